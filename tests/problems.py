"""Attention problems: written out or drawn by hypothesis, laid out in memory full of NaN, run."""

import contextlib
import dataclasses
import functools
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

import judge
import neginf
import oracle


@contextlib.contextmanager
def poisoned_allocations():
    """torch.empty, from C++ too, returns memory full of NaN: who leaves an element out shows it."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill


class Guarded:
    """A tensor inside a larger buffer of NaN; `view` is the tensor, with odd strides."""

    def __init__(self, tensor, device="cpu", last_dim_padding=8):
        before = [1] * (tensor.dim() - 1) + [0]
        after = [1] * (tensor.dim() - 1) + [last_dim_padding]
        shape = [a + n + b for a, n, b in zip(before, tensor.shape, after, strict=True)]
        self.buffer = torch.full(shape, float("nan"), dtype=tensor.dtype, device=device)
        self.index = tuple(slice(a, a + n) for a, n in zip(before, tensor.shape, strict=True))
        self.view = self.buffer[self.index]
        self.view.copy_(tensor)
        self.before = self.buffer.clone()

    def assert_unchanged(self, what):
        judge.assert_bits_equal(self.buffer, self.before, f"{what} and the memory around it")

    def assert_guard_unchanged(self, what):
        """For a tensor that is an output: only what lies around it must be as before."""
        now, before = self.buffer.clone(), self.before.clone()
        now[self.index] = before[self.index] = 0
        judge.assert_bits_equal(now, before, f"the memory around {what}")


@dataclass(frozen=True)
class Problem:
    """Sizes and switches. The values come from `seed`."""

    lengths_q: tuple = (5,)
    lengths_k: tuple = (7,)
    heads: int = 2
    heads_k: int = 1
    head_dim: int = 16
    head_dim_v: int | None = None  # that of q and k
    varlen: bool = False
    used_q: tuple | None = None
    used_k: tuple | None = None
    extra_q: int = 0  # rows past cu_seqlens[-1]
    extra_k: int = 0
    slack: int = 0  # max_seqlen above the longest sequence
    causal: bool = False
    window_size: tuple = (-1, -1)
    softmax_scale: float | None = None
    softcap: float = 0.0
    alibi: str | None = None  # "h" or "bh"
    sink: tuple | None = None  # one number per head
    num_splits: int = 1
    deterministic: bool = False
    seed: int = 0

    @property
    def batch(self):
        return len(self.lengths_q)

    def with_(self, **changes):
        return dataclasses.replace(self, **changes)


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def cumulative(lengths):
    sums = [0]
    for length in lengths:
        sums.append(sums[-1] + length)
    return sums


class Inputs:
    """The tensors of a problem, in one dtype on one device; unused memory holds NaN."""

    def __init__(self, problem, dtype, device="cpu", poison=True):
        self.problem = p = problem
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator().manual_seed(p.seed)
        head_dim_v = p.head_dim if p.head_dim_v is None else p.head_dim_v
        if p.varlen:
            shape_q = (sum(p.lengths_q) + p.extra_q, p.heads, p.head_dim)
            shape_k = (sum(p.lengths_k) + p.extra_k, p.heads_k, p.head_dim)
            shape_lse = (p.heads, shape_q[0])
        else:
            assert len(set(p.lengths_q)) <= 1, "dense lengths are equal"
            assert len(set(p.lengths_k)) <= 1, "dense lengths are equal"
            shape_q = (p.batch, max(p.lengths_q, default=3), p.heads, p.head_dim)
            shape_k = (p.batch, max(p.lengths_k, default=4), p.heads_k, p.head_dim)
            shape_lse = (p.batch, p.heads, shape_q[1])
        lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        shape_v, shape_out = ((*shape[:-1], head_dim_v) for shape in (shape_k, shape_q))
        q, k, v = self.normal(shape_q), self.normal(shape_k), self.normal(shape_v)
        dout, dlse = self.normal(shape_out), self.normal(shape_lse, lse_dtype)

        self.options = {
            "causal": p.causal,
            "window_size": p.window_size,
            "softcap": p.softcap,
            "softmax_scale": p.softmax_scale,
        }
        if p.varlen:
            self.options["cu_seqlens_q"] = int32(cumulative(p.lengths_q), "cpu")
            self.options["cu_seqlens_k"] = int32(cumulative(p.lengths_k), "cpu")
        if p.used_q is not None:
            self.options["seqused_q"] = int32(p.used_q, "cpu")
        if p.used_k is not None:
            self.options["seqused_k"] = int32(p.used_k, "cpu")
        if p.alibi is not None:
            shape = (p.heads,) if p.alibi == "h" else (p.batch, p.heads)
            slopes = torch.rand(shape, generator=self.generator, dtype=torch.float64)
            self.options["alibi_slopes"] = slopes.to(lse_dtype)
        if p.sink is not None:
            self.options["sink"] = torch.tensor(p.sink, dtype=lse_dtype)

        self.used_q, self.used_k = oracle.where_used(q, k, **self.options)
        if poison:
            q[~self.used_q] = dout[~self.used_q] = float("nan")
            k[~self.used_k] = v[~self.used_k] = float("nan")
            # A row without keys but with a finite sink has an L, whose gradient goes to the sink.
            _, lse = oracle.attention(q, k, v, **self.options)
            dlse[lse == oracle.NEG_INF] = float("nan")
        self.guarded = {
            name: Guarded(tensor, device)
            for name, tensor in {"q": q, "k": k, "v": v, "dout": dout}.items()
        }
        self.dlse = dlse

    def normal(self, shape, dtype=None):
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return values.to(dtype or self.dtype)

    def tensor(self, name):
        return self.guarded[name].view

    def call(self, q, k, v, **overrides):
        """The library's function on these tensors: (out, lse)."""
        p = self.problem
        options = {**self.options, "num_splits": p.num_splits, "deterministic": p.deterministic}
        options.update(overrides)
        for name, value in options.items():
            if isinstance(value, torch.Tensor):
                options[name] = value.to(self.device)
        if not p.varlen:
            return neginf.flash_attn_func(q, k, v, return_lse=True, **options)
        return neginf.flash_attn_varlen_func(
            q,
            k,
            v,
            max_seqlen_q=max(p.lengths_q, default=0) + p.slack,
            max_seqlen_k=max(p.lengths_k, default=0) + p.slack,
            return_lse=True,
            **options,
        )

    def forward(self, **overrides):
        with poisoned_allocations():
            out, lse = self.call(*(self.tensor(n) for n in "qkv"), **overrides)
        self.assert_inputs_unchanged()
        return out, lse

    def assert_inputs_unchanged(self):
        for name, guarded in self.guarded.items():
            guarded.assert_unchanged(name)

    @functools.cache  # noqa: B019, lives as long as its test
    def reference(self, compute):
        q, k, v = (self.tensor(n).cpu() for n in "qkv")
        return oracle.attention(q, k, v, compute=compute, **self.options)

    def gradients(self, uses=("out", "lse"), **overrides):
        """out, lse and the gradients of <out, dout> + <lse, dlse>, by name."""
        leaves = {n: self.tensor(n).detach().requires_grad_() for n in "qkv"}
        if self.problem.sink is not None:
            leaves["sink"] = self.options["sink"].to(self.device).requires_grad_()
            overrides["sink"] = leaves["sink"]
        with poisoned_allocations():
            out, lse = self.call(leaves["q"], leaves["k"], leaves["v"], **overrides)
            given = {"out": self.tensor("dout"), "lse": self.dlse.to(self.device)}
            results = {"out": out, "lse": lse}
            gradients = torch.autograd.grad(
                [results[u] for u in uses],
                list(leaves.values()),
                [given[u] for u in uses],
            )
        self.assert_inputs_unchanged()
        return out.detach(), lse.detach(), dict(zip(leaves, gradients, strict=True))

    def reference_gradients(self, compute, uses=("out", "lse")):
        softmax_dtype = torch.promote_types(compute, torch.float32)
        leaves = {n: self.tensor(n).cpu().to(compute).requires_grad_() for n in "qkv"}
        options = dict(self.options)
        if self.problem.sink is not None:
            leaves["sink"] = options["sink"] = (
                self.options["sink"].to(softmax_dtype).requires_grad_()
            )
        out, lse = oracle.attention(compute=compute, **{**options, **leaves})
        terms = {"out": (out, self.tensor("dout").cpu()), "lse": (lse, self.dlse)}
        # Without a single sequence nothing depends on the inputs.
        terms = [terms[u] for u in uses if terms[u][0].requires_grad]
        gradients = torch.autograd.grad(
            [result for result, _ in terms],
            list(leaves.values()),
            [given.to(result.dtype) for result, given in terms],
            allow_unused=True,
            materialize_grads=True,
        )
        return dict(zip(leaves, gradients, strict=True))

    @functools.cache  # noqa: B019
    def score_size(self):
        """Magnitude of the terms that a score is a sum of: its rounding is relative to this."""
        p = self.problem
        q = self.tensor("q").cpu().double().nan_to_num(0)
        k = self.tensor("k").cpu().double().nan_to_num(0)
        if q.numel() == 0 or k.numel() == 0:
            return 1.0
        scale = p.head_dim**-0.5 if p.softmax_scale is None else p.softmax_scale
        size = scale * (q.norm(dim=-1).max() * k.norm(dim=-1).max()).item()
        if "alibi_slopes" in self.options:
            length = max([*p.lengths_q, *p.lengths_k], default=0)
            size += judge.largest(self.options["alibi_slopes"]) * length
        return 1.0 + size


def check_forward(inputs, **overrides):
    """Runs the forward and judges it; returns (out, lse)."""
    out, lse = inputs.forward(**overrides)
    check_state(inputs, out, lse)
    return out, lse


def check_state(inputs, out, lse):
    judge_state(
        out, lse, inputs.dtype, inputs.reference, judge.largest(inputs.tensor("v").cpu()),
        inputs.score_size(),
    )  # fmt: skip


def judge_state(out, lse, dtype, reference, value_size, score_size):
    """reference(compute) is the state computed in that dtype; sizes are what rounding goes by."""
    exact_out, exact_lse = reference(torch.float64)
    low_out, _ = reference(dtype)
    # Scores and sums are float32 whatever the dtype, so L is held to float32.
    lse_compute = torch.promote_types(dtype, torch.float32)
    _, low_lse = reference(lse_compute)
    assert out.dtype == dtype
    assert lse.dtype == lse_compute
    assert lse.is_contiguous()
    sum_size = value_size * score_size
    judge.assert_close(out, exact_out, low_out, "out", size=value_size, sum_size=sum_size)
    judge.assert_close(lse, exact_lse, low_lse, "lse", sum_size=score_size)


def check_gradients(inputs, uses=("out", "lse"), **overrides):
    """Runs forward and backward and judges both; returns the gradients by name."""
    out, lse, gradients = inputs.gradients(uses, **overrides)
    check_state(inputs, out, lse)
    exact = inputs.reference_gradients(torch.float64, uses)
    low = inputs.reference_gradients(inputs.dtype, uses)
    for name, gradient in gradients.items():
        check_gradient(inputs, name, gradient, exact[name], low[name])
    judge.assert_zero(gradients["q"].cpu()[~inputs.used_q], "dq of rows without keys")
    judge.assert_zero(gradients["k"].cpu()[~inputs.used_k], "dk of unseen keys")
    judge.assert_zero(gradients["v"].cpu()[~inputs.used_k], "dv of unseen keys")
    return gradients


def check_gradient(inputs, name, gradient, exact, low):
    what = f"d{name}"
    assert gradient.isfinite().all(), f"{what} is not finite"
    assert gradient.dtype == (inputs.dtype if name != "sink" else inputs.options["sink"].dtype)
    judge.assert_close(
        gradient,
        exact,
        low,
        what,
        factor=judge.GRADIENT_FACTOR,
        dtype=inputs.dtype,
        # The gradients of the sink and of k are sums over rows. What is rounded is one row's term:
        # its D comes from O as it was stored, which the low-precision reference does not round.
        size=max(1.0 if name in ("sink", "k") else 0.3, judge.largest(exact)),
        sum_size=inputs.score_size() * max(1.0, judge.largest(exact)),
    )


# head_dim and head_dim_v. Kernels are chosen by the first; that of 192 may know the second, too.
NARROWER_VALUES = (
    (64, 1),
    (59, 33),
    (96, 95),
    (128, 64),
    (192, 128),
    (192, 64),
    (192, 136),
    (256, 192),
)

# Lengths around the edges of tiles, and small ones where every mask has a chance to be odd.
LENGTHS = st.one_of(
    st.integers(0, 12),
    st.sampled_from([63, 64, 65, 127, 128, 129, 200, 255, 256, 257, 511, 513, 700]),
)
WINDOW_SIDES = st.one_of(st.just(-1), st.integers(0, 6), st.sampled_from([31, 64, 100, 2**31]))
SINKS = st.one_of(st.floats(-3, 3, width=16), st.just(float("-inf")))


@st.composite
def problems(draw, head_dims=(1, 8, 16, 40, 59, 64, 128)):
    varlen = draw(st.booleans())
    batch = draw(st.integers(0, 3))
    if varlen:
        lengths_q = tuple(draw(LENGTHS) for _ in range(batch))
        lengths_k = tuple(draw(LENGTHS) for _ in range(batch))
    else:
        lengths_q = (draw(LENGTHS),) * batch
        lengths_k = (draw(LENGTHS),) * batch
    heads_k = draw(st.integers(1, 2))
    heads = heads_k * draw(st.integers(1, 3))

    def used(lengths):
        if not draw(st.booleans()):
            return None
        return tuple(draw(st.integers(0, n)) for n in lengths)

    head_dim = draw(st.sampled_from(head_dims))
    return Problem(
        lengths_q=lengths_q,
        lengths_k=lengths_k,
        heads=heads,
        heads_k=heads_k,
        head_dim=head_dim,
        head_dim_v=draw(st.one_of(st.none(), st.integers(1, head_dim))),
        varlen=varlen,
        used_q=used(lengths_q),
        used_k=used(lengths_k),
        extra_q=draw(st.integers(0, 3)) if varlen else 0,
        extra_k=draw(st.integers(0, 3)) if varlen else 0,
        slack=draw(st.sampled_from([0, 0, 70])) if varlen else 0,
        causal=draw(st.booleans()),
        window_size=(draw(WINDOW_SIDES), draw(WINDOW_SIDES)),
        softmax_scale=draw(st.sampled_from([None, None, 0.05, 1.0])),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.0, 15.0])),
        alibi=draw(st.sampled_from([None, None, "h", "bh"])),
        sink=draw(st.one_of(st.none(), st.tuples(*[SINKS] * heads))),
        seed=draw(st.integers(0, 2**16)),
    )
