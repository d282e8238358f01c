"""Attention as bench_fwd.py and bench_bwd.py measure it: the cases, the back-ends, the run."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import bench
import neginf

ROOF = "matmul"
FA2_SDPA = "torch FA-2"


@dataclass(frozen=True)
class Case:
    """One problem; q is (batch, seqlen, heads, head_dim), k and v have heads_k, v head_dim_v."""

    head_dim: int
    head_dim_v: int
    causal: bool
    seqlen: int
    batch: int
    heads: int
    heads_k: int
    dtype: torch.dtype = torch.bfloat16
    deterministic: bool = False

    def operations(self, backward=False):
        """Of the products; a causal mask leaves half of them."""
        # S and O, or S, dK, dQ and dP, dV.
        of_qk, of_v = (3, 2) if backward else (1, 1)
        columns = of_qk * self.head_dim + of_v * self.head_dim_v
        full = 2 * self.batch * self.heads * self.seqlen**2 * columns
        return full * (0.5 if self.causal else 1.0)

    def columns(self):
        head_dim = self.head_dim
        if self.head_dim_v != head_dim:
            head_dim = f"{head_dim}/{self.head_dim_v}"
        columns = {"head_dim": head_dim, "mask": "causal" if self.causal else "full"}
        if self.heads_k != self.heads:
            columns["heads"] = f"{self.heads}/{self.heads_k}"
        return {**columns, "seqlen": self.seqlen}

    def tensors(self, device="cuda"):
        """q, k, v and dout."""
        sizes = (
            (self.heads, self.head_dim),
            (self.heads_k, self.head_dim),
            (self.heads_k, self.head_dim_v),
            (self.heads, self.head_dim_v),
        )
        return [
            torch.randn(self.batch, self.seqlen, *size, device=device, dtype=self.dtype)
            for size in sizes
        ]


# ---- back-ends: case -> function of (q, k, v)


def neginf_attention(case):
    return lambda q, k, v: neginf.flash_attn_func(
        q, k, v, causal=case.causal, deterministic=case.deterministic
    )


def torch_attention(backend):
    def of_case(case):
        def attend(q, k, v):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(
                    q, k, v, is_causal=case.causal, enable_gqa=case.heads != case.heads_k
                )
            return out.transpose(1, 2)

        return attend

    return of_case


def flash_attn_package(module):
    """FlashAttention-2, -3 and -4 differ in where their function lives and in what it returns."""

    def of_case(case):
        function = importlib.import_module(module).flash_attn_func

        def attend(q, k, v):
            options = {"deterministic": True} if case.deterministic else {}
            result = function(q, k, v, causal=case.causal, **options)
            return result[0] if isinstance(result, tuple) else result

        return attend

    return of_case


def flashinfer_attention(case):
    import flashinfer

    workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device="cuda") * case.seqlen
    wrapper.plan(
        starts, starts, case.heads, case.heads_k, case.head_dim,
        head_dim_vo=case.head_dim_v, causal=case.causal, q_data_type=case.dtype,
    )  # fmt: skip
    return lambda q, k, v: wrapper.run(*(x.flatten(0, 1) for x in (q, k, v))).unflatten(
        0, q.shape[:2]
    )


@dataclass(frozen=True)
class Backend:
    label: str
    attention: Callable
    module: str | None = None  # must be installed
    has_backward: bool = True

    def is_installed(self):
        if self.module is None:
            return True
        try:
            return importlib.util.find_spec(self.module) is not None
        except ModuleNotFoundError:  # of the package that it is in
            return False


BACKENDS = {
    "neginf": Backend(bench.OURS, neginf_attention),
    "fa2-sdpa": Backend(FA2_SDPA, torch_attention(SDPBackend.FLASH_ATTENTION)),
    "cudnn": Backend("torch cuDNN", torch_attention(SDPBackend.CUDNN_ATTENTION)),
    "fa2": Backend("flash_attn", flash_attn_package("flash_attn"), "flash_attn_2_cuda"),
    "fa3": Backend("FA-3", flash_attn_package("flash_attn_interface"), "flash_attn_interface"),
    "fa4": Backend("FA-4", flash_attn_package("flash_attn.cute"), "flash_attn.cute"),
    "flashinfer": Backend("FlashInfer", flashinfer_attention, "flashinfer", has_backward=False),
}


def chosen_backends(names, backward):
    """Those asked for, which must be there, or else all that are."""
    for name in names or ():
        if not BACKENDS[name].is_installed():
            raise SystemExit(f"--backends: {name} needs {BACKENDS[name].module}, not installed")
        if backward and not BACKENDS[name].has_backward:
            raise SystemExit(f"--backends: {name} has no backward")
    return [
        BACKENDS[name]
        for name in names or BACKENDS
        if BACKENDS[name].is_installed() and (BACKENDS[name].has_backward or not backward)
    ]


# ---- the run


def prepare_forward(backend, case, tensors):
    attend = backend.attention(case)
    q, k, v, _ = tensors
    return lambda: (attend(q, k, v),)


def prepare_backward(backend, case, tensors):
    """The forward is run here, once; what is captured is its gradient alone."""
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out = backend.attention(case)(*leaves)
    return lambda: torch.autograd.grad(out, leaves, tensors[3], retain_graph=True)


def measure(case, backends, backward, rounds, matmul):
    prepare, outputs = (
        (prepare_backward, ("dq", "dk", "dv")) if backward else (prepare_forward, ("out",))
    )
    tensors = case.tensors()
    graphs, results, reasons = {}, {}, {}
    for backend in backends:
        captured, reason = bench.attempt(
            lambda backend=backend: bench.Captured(lambda: prepare(backend, case, tensors))
        )
        if captured is None:
            reasons[backend.label] = reason
            continue
        graphs[backend.label] = captured
        results[backend.label] = dict(zip(outputs, captured.result, strict=True))
    if results:
        bench.check_agreement(results)
    matmul_call, matmul_operations = matmul
    ms = bench.interleaved_ms({**graphs, ROOF: matmul_call}, rounds)
    operations = case.operations(backward)
    return bench.Result(
        case.columns(),
        {b.label: operations / ms[b.label] / 1e9 if b.label in ms else None for b in backends},
        matmul_operations / ms[ROOF] / 1e9,
        reasons,
    )


def options_of(doc, backward):
    options = bench.parser(doc)
    names = ",".join(BACKENDS)
    options.add_argument(
        "--backends", type=bench.choice_of(BACKENDS), metavar="A,B", help=f"of {names}"
    )
    options.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    options.add_argument("--head-dim-v", type=int, help="of v and out; default that of q and k")
    options.add_argument("--seqlens", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    options.add_argument(
        "--masks", type=bench.choice_of(("full", "causal")), default=["full", "causal"]
    )
    options.add_argument("--heads-k", type=int, help="key and value heads; default as many as q's")
    options.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    options.add_argument("--tokens", type=int, default=16384, help="batch is tokens / seqlen")
    options.add_argument("--hidden", type=int, default=2048, help="heads is hidden / head_dim")
    if backward:
        options.add_argument("--deterministic", action="store_true")
    return options


def cases_of(options):
    for head_dim in options.head_dims:
        heads = options.hidden // head_dim
        heads_k = options.heads_k or heads
        if heads == 0 or heads % heads_k:
            raise SystemExit(
                f"--heads-k: {heads_k} does not divide the {heads} heads of head_dim {head_dim}"
            )
        for mask in options.masks:
            for seqlen in options.seqlens:
                yield Case(
                    head_dim, options.head_dim_v or head_dim, mask == "causal", seqlen,
                    max(1, options.tokens // seqlen), heads, heads_k, bench.DTYPES[options.dtype],
                    getattr(options, "deterministic", False),
                )  # fmt: skip


def main(script, doc, backward):
    options = options_of(doc, backward).parse_args()
    cases = list(cases_of(options))
    backends = chosen_backends(options.backends, backward)
    bench.need_gpu(script)
    torch.manual_seed(0)
    matmul = bench.matmul_8192()
    title = f"{'backward' if backward else 'forward'}, {options.dtype}"
    if getattr(options, "deterministic", False):
        title += ", deterministic"
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # costs time, changes nothing
    results = [measure(case, backends, backward, options.rounds, matmul) for case in cases]
    peer = FA2_SDPA if FA2_SDPA in results[0].rates else None
    bench.report(options, title, results, ROOF, "seqlen", "TFLOP/s", peer)
