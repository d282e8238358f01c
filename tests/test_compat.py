"""Other libraries' functions: their names, argument order, layouts and bases, our rule."""

import inspect
import itertools
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import judge
import neginf
import oracle
from kvcache_problems import CacheInputs, CacheProblem
from neginf.compat import flash_attn, flashinfer, vllm
from problems import (
    Guarded,
    Inputs,
    Problem,
    check_gradient,
    check_state,
    int32,
    poisoned_allocations,
)
from targets import runs_on
from test_merge import accumulate, states

NEG_INF = float("-inf")
NAN = float("nan")
INF = float("inf")

OPTIONS = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic "
OPTIONS += "return_attn_probs"
PACKING = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
PRIVATE = "dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes"
NAMES = {
    "flash_attn_func": f"q k v {OPTIONS}",
    "flash_attn_qkvpacked_func": f"qkv {OPTIONS}",
    "flash_attn_kvpacked_func": f"q kv {OPTIONS}",
    "flash_attn_varlen_func": f"q k v {PACKING} {OPTIONS} block_table",
    "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {OPTIONS}",
    "flash_attn_varlen_kvpacked_func": f"q kv {PACKING} {OPTIONS}",
    "flash_attn_with_kvcache": "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens "
    "cache_batch_idx cache_leftpad block_table softmax_scale causal window_size softcap "
    "rotary_interleaved alibi_slopes num_splits return_softmax_lse",
    "_flash_attn_forward": f"q k v {PRIVATE} return_softmax",
    "_flash_attn_backward": "dout q k v out softmax_lse dq dk dv "
    f"{PRIVATE} deterministic rng_state",
    "_flash_attn_varlen_forward": f"q k v {PACKING} {PRIVATE} return_softmax block_table leftpad_k "
    "seqused_k zero_tensors",
    "_flash_attn_varlen_backward": f"dout q k v out softmax_lse dq dk dv {PACKING} {PRIVATE} "
    "deterministic rng_state zero_tensors",
}


@pytest.mark.parametrize("name", NAMES)
def test_names_and_order_of_the_arguments(name):
    """getfullargspec, as ring-flash-attention asks, and not only signature."""
    spec = inspect.getfullargspec(getattr(flash_attn, name))
    assert spec.args == NAMES[name].split()
    assert not spec.varargs
    assert not spec.varkw


def test_signatures_of_the_merges():
    arguments = {
        flashinfer.merge_state: ["v_a", "s_a", "v_b", "s_b"],
        flashinfer.merge_states: ["v", "s"],
        flashinfer.merge_state_in_place: ["v", "s", "v_other", "s_other", "mask"],
        vllm.merge_attn_states: [
            "output", "prefix_output", "prefix_lse", "suffix_output", "suffix_lse", "output_lse",
            "prefill_tokens_with_context", "output_scale",
        ],
    }  # fmt: skip
    for function, names in arguments.items():
        assert list(inspect.signature(function).parameters) == names


def test_it_can_stand_in_for_the_module():
    program = (
        "import sys, neginf.compat.flash_attn\n"
        "sys.modules['flash_attn'] = sys.modules['flash_attn.flash_attn_interface'] = "
        "neginf.compat.flash_attn\n"
        "from flash_attn import flash_attn_func, flash_attn_varlen_kvpacked_func\n"
        "from flash_attn import flash_attn_with_kvcache\n"
        "from flash_attn.flash_attn_interface import _flash_attn_forward, _flash_attn_backward\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@runs_on("forward", "backward", dtypes=("float32", "bfloat16"))
@pytest.mark.parametrize("causal", [False, True])
def test_packed_forms(target, causal):
    """The same bits as with q, k and v apart, and gradients of the packed tensor."""
    options = {"causal": causal, "softcap": 2.0, "window_size": (3, -1), "deterministic": True}
    options |= {"return_attn_probs": True}
    options |= {"softmax_scale": 0.3, "alibi_slopes": torch.tensor([0.1, 0.2]).to(target.device)}
    qkv = torch.randn(2, 5, 3, 2, 16).to(target.device, target.dtype).requires_grad_()
    cu_seqlens = int32([0, 4, 10], target.device)
    flat = qkv.flatten(0, 1)
    q, k, v = qkv.unbind(2)
    apart = flash_attn.flash_attn_func(q, k, v, **options)
    packed_apart = flash_attn.flash_attn_varlen_func(
        *flat.unbind(1), cu_seqlens, cu_seqlens, 6, 6, **options
    )
    pairs = [
        (flash_attn.flash_attn_qkvpacked_func(qkv, **options), apart),
        (
            flash_attn.flash_attn_kvpacked_func(q, qkv[:, :, 1:], **options),
            apart,
        ),
        (
            flash_attn.flash_attn_varlen_qkvpacked_func(
                flat, cu_seqlens, 6, **options
            ),
            packed_apart,
        ),
        (
            flash_attn.flash_attn_varlen_kvpacked_func(
                flat[:, 0], flat[:, 1:], cu_seqlens, cu_seqlens, 6, 6, **options,
            ),
            packed_apart,
        ),
    ]  # fmt: skip
    for got, expected in pairs:
        assert got[2] is None
        judge.assert_bits_equal(got[0], expected[0], "out")
        judge.assert_bits_equal(got[1], expected[1], "lse")
        gradients = [
            torch.autograd.grad(s[0].sum() + s[1].sum(), qkv, retain_graph=True)[0]
            for s in (got, expected)
        ]
        judge.assert_bits_equal(*gradients, "dqkv")


@pytest.mark.parametrize("name", [name for name in NAMES if "dropout_p" in NAMES[name]])
def test_dropout_raises(name):
    function = getattr(flash_attn, name)
    packed = "varlen" in name
    rows = torch.zeros(4, 2, 8) if packed else torch.zeros(1, 4, 2, 8)
    lse = torch.zeros(2, 4) if packed else torch.zeros(1, 2, 4)
    values = {
        "qkv": torch.stack([rows] * 3, -3), "kv": torch.stack([rows] * 2, -3), "softmax_lse": lse,
        "cu_seqlens": int32([0, 4], "cpu"), "max_seqlen": 4,
    }  # fmt: skip
    for argument in ("cu_seqlens_q", "cu_seqlens_k"):
        values[argument] = values["cu_seqlens"]
    for argument in ("max_seqlen_q", "max_seqlen_k"):
        values[argument] = 4
    parameters = inspect.signature(function).parameters
    required = [n for n, p in parameters.items() if p.default is p.empty]
    arguments = {n: values.get(n, rows.clone()) for n in required}
    function(**arguments)
    with pytest.raises(NotImplementedError, match=r"^dropout_p: got 0\.1; accepted is 0\.0"):
        function(**arguments, dropout_p=0.1)


def test_what_else_is_refused():
    qkv = torch.zeros(1, 4, 3, 2, 8)
    q = qkv[:, :, 0]
    cu_seqlens = int32([0, 4], "cpu")
    packing = (cu_seqlens, cu_seqlens, 4, 4)
    for call, error, argument in [
        (lambda: flash_attn.flash_attn_qkvpacked_func(qkv[:, :, :2]), ValueError, "qkv"),
        (lambda: flash_attn.flash_attn_qkvpacked_func(qkv[0]), ValueError, "qkv"),
        (lambda: flash_attn.flash_attn_qkvpacked_func(None), TypeError, "qkv"),
        (lambda: flash_attn.flash_attn_kvpacked_func(q, qkv), ValueError, "kv"),
        (
            lambda: flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, 4),
            ValueError,
            "qkv",
        ),
        (
            lambda: flash_attn.flash_attn_varlen_kvpacked_func(q[0], q[0], *packing),
            ValueError,
            "kv",
        ),
        (
            lambda: flash_attn._flash_attn_forward(q, q, q, return_softmax=True),
            NotImplementedError,
            "return_softmax",
        ),
        (
            lambda: flash_attn._flash_attn_varlen_forward(
                q[0], q[0], q[0], *packing, leftpad_k=cu_seqlens
            ),
            NotImplementedError,
            "leftpad_k",
        ),
        (
            lambda: flash_attn._flash_attn_backward(
                q, q, q, q, q, torch.zeros(1, 2, 4), q, q[:, :3], q
            ),
            ValueError,
            "dk",
        ),
        (
            lambda: flash_attn._flash_attn_backward(
                q, q, q, q, q, torch.zeros(1, 2, 4), q, q, q.to("meta")
            ),
            ValueError,
            "dv",
        ),
        (
            lambda: flash_attn._flash_attn_backward(
                q, q, q, q, q, torch.full((1, 2, 4), INF), q, q, q
            ),
            ValueError,
            "lse",
        ),
    ]:
        with pytest.raises(error, match=rf"^{argument}: got .*accepted"):
            call()


def arguments_of(function, **given):
    """As ring-flash-attention fills in a call: every argument by keyword, defaults as they are."""
    spec = inspect.getfullargspec(function)
    defaults = spec.defaults or ()
    padded = (None,) * (len(spec.args) - len(defaults)) + defaults
    arguments = dict(zip(spec.args, padded, strict=True))
    assert given.keys() <= arguments.keys()
    return {**arguments, **given}


# Keys of a block, and how far the diagonal of the whole lies to the right of the block's own.
BLOCKS = ((0, 7), (7, 7), (7, 30), (30, 40))


def ring(inputs, merge):
    """Forward block by block, then backward on each block with the merged out and lse."""
    q, k, v, dout = (inputs.tensor(n) for n in ("q", "k", "v", "dout"))
    scale = inputs.problem.head_dim**-0.5
    common = {
        "softmax_scale": scale, "dropout_p": 0, "alibi_slopes": None, "window_size_left": -1,
    }  # fmt: skip

    def window(end):
        return 40 - end if inputs.problem.causal else -1

    parts = []
    for begin, end in BLOCKS:
        outputs = flash_attn._flash_attn_forward(
            **arguments_of(
                flash_attn._flash_attn_forward, q=q, k=k[:, begin:end], v=v[:, begin:end],
                causal=False, window_size_right=window(end), return_softmax=False, **common,
            )
        )  # fmt: skip
        assert len(outputs) == 4
        parts.append(outputs[:2])
    out, lse = merge(parts)
    dq = torch.zeros_like(q, dtype=accumulate(q.dtype))
    dks, dvs = [], []
    for begin, end in BLOCKS:
        buffers = [
            Guarded(torch.full_like(t, NAN).cpu(), inputs.device)
            for t in (q, k[:, begin:end], v[:, begin:end])
        ]
        flash_attn._flash_attn_backward(
            **arguments_of(
                flash_attn._flash_attn_backward, dout=dout, q=q, k=k[:, begin:end],
                v=v[:, begin:end], out=out, softmax_lse=lse, dq=buffers[0].view,
                dk=buffers[1].view, dv=buffers[2].view, causal=False,
                window_size_right=window(end), deterministic=False, **common,
            )
        )  # fmt: skip
        for name, buffer in zip(("dq", "dk", "dv"), buffers, strict=True):
            buffer.assert_guard_unchanged(name)
        dq += buffers[0].view
        dks.append(buffers[1].view)
        dvs.append(buffers[2].view)
    gradients = {"q": dq.to(q.dtype), "k": torch.cat(dks, 1), "v": torch.cat(dvs, 1)}
    return out, lse, gradients


@runs_on("forward", "backward", "combine")
@pytest.mark.parametrize("causal", [False, True])
def test_backward_on_a_block_with_out_and_lse_of_the_whole(target, causal):
    """Sums of blocks are gradients of the whole; blocks and rows without keys give exact zeros."""
    problem = Problem(lengths_q=(50,) * 2, lengths_k=(40,) * 2, heads=4, heads_k=2, causal=causal)
    inputs = Inputs(problem, target.dtype, target.device)
    with poisoned_allocations():
        out, lse, gradients = ring(
            inputs, lambda parts: neginf.merge_states(*zip(*parts, strict=True))
        )
    check_state(inputs, out, lse)
    assert (lse[..., :10] == NEG_INF).all() == causal
    exact = inputs.reference_gradients(torch.float64, uses=("out",))
    low = inputs.reference_gradients(target.dtype, uses=("out",))
    for name, gradient in gradients.items():
        check_gradient(inputs, name, gradient, exact[name], low[name])
    judge.assert_zero(gradients["q"].cpu()[~inputs.used_q], "dq of rows without keys")


@runs_on("forward", "backward", "combine", dtypes=("float64", "bfloat16"))
def test_varlen_backward_on_a_block(target):
    """Two blocks of packed keys, one of which some sequences have no key in."""
    lengths_q, blocks = (3, 0, 4, 2), ((2, 1, 0, 3), (4, 0, 5, 0))
    lengths_k = tuple(a + b for a, b in zip(*blocks, strict=True))
    problem = Problem(lengths_q=lengths_q, lengths_k=lengths_k, varlen=True, head_dim_v=8)
    inputs = Inputs(problem, target.dtype, target.device)
    q, k, v, dout = (inputs.tensor(n) for n in ("q", "k", "v", "dout"))
    starts = list(itertools.accumulate(lengths_k, initial=0))

    def indices(block):
        """Where the block's keys are in the whole."""
        skipped = [sum(b[i] for b in blocks[:block]) for i in range(4)]
        return [
            starts[i] + skipped[i] + j for i in range(4) for j in range(blocks[block][i])
        ]  # fmt: skip

    def packing(block):
        return {
            "cu_seqlens_q": int32([0, 3, 3, 7, 9], target.device),
            "cu_seqlens_k": int32(
                list(itertools.accumulate(blocks[block], initial=0)), target.device
            ),
            "max_seqlen_q": 4,
            "max_seqlen_k": 5,
        }

    with poisoned_allocations():
        states_of_blocks = [
            flash_attn._flash_attn_varlen_forward(
                q=q, k=k[indices(i)], v=v[indices(i)], **packing(i)
            )[:2]
            for i in range(2)
        ]
        out, lse = neginf.merge_states(*zip(*states_of_blocks, strict=True))
        check_state(inputs, out, lse)
        gradients = {"q": 0, "k": torch.full_like(k, NAN), "v": torch.full_like(v, NAN)}
        for i in range(2):
            at = indices(i)
            dq, dk, dv = (torch.full_like(t, NAN) for t in (q, k[at], v[at]))
            flash_attn._flash_attn_varlen_backward(
                dout=dout, q=q, k=k[at], v=v[at], out=out, softmax_lse=lse, dq=dq, dk=dk, dv=dv,
                **packing(i),
            )  # fmt: skip
            gradients["q"] = gradients["q"] + dq.to(accumulate(target.dtype))
            gradients["k"][at], gradients["v"][at] = dk, dv
    gradients["q"] = gradients["q"].to(target.dtype)
    exact = inputs.reference_gradients(torch.float64, uses=("out",))
    low = inputs.reference_gradients(target.dtype, uses=("out",))
    for name, gradient in gradients.items():
        check_gradient(inputs, name, gradient, exact[name], low[name])


def test_private_functions_record_no_gradient():
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    out, lse, _, _ = flash_attn._flash_attn_forward(q, q, q)
    dq = torch.zeros_like(q)
    flash_attn._flash_attn_backward(out, q, q, q, out, lse, dq, None, None)
    assert not any(t.requires_grad for t in (out, lse, dq))
    assert dq.abs().max() > 0


def paged(inputs):
    """A problem's tensors as flash_attn_varlen_func takes them, with the keyword arguments that
    both functions have."""
    q, k, v = (inputs.tensor(n) for n in ("q", "k_cache", "v_cache"))
    options = dict(inputs.options)
    table, lengths = options.pop("page_table"), options.pop("cache_seqlens")
    starts, per_split = options.pop("cu_seqlens_q"), options.pop("seqlen_k_per_split")
    assert per_split is None
    longest = [max(of, default=0) for of in (inputs.problem.lengths_q, inputs.problem.lengths)]
    return (q, k, v), starts, lengths, longest, {"block_table": table, **options}


PAGED = {
    "pages_16": CacheProblem(
        lengths=(70, 0, 33, 16), lengths_q=(3, 1, 33, 0), varlen=True, causal=True, page_size=16
    ),
    "options": CacheProblem(
        lengths=(70, 9), lengths_q=(3, 2), varlen=True, extra_q=2, page_size=5, softcap=3.0,
        alibi="bh", sink=(0.5, -1.0, 2.0, 0.0), window_size=(20, 3), missing=((0, 4),),
        num_splits=3, softmax_scale=0.2,
    ),
    "narrow_values": CacheProblem(
        lengths=(70,), lengths_q=(1,), varlen=True, page_size=16, head_dim=59, head_dim_v=33
    ),
}  # fmt: skip


@runs_on("decode", dtypes=("float32", "bfloat16"))
@pytest.mark.parametrize("name", PAGED)
def test_block_table_of_packed_sequences(target, name):
    """Lengths as vLLM gives them, by seqused_k, and as transformers does, by cu_seqlens_k."""
    inputs = CacheInputs(PAGED[name], target.dtype, target.device)
    expected = inputs.check()
    qkv, starts, lengths, (longest_q, longest_k), options = paged(inputs)
    starts_k = int32(list(itertools.accumulate(lengths.tolist(), initial=0)), target.device)
    packing = {"cu_seqlens_q": starts, "max_seqlen_q": longest_q, "max_seqlen_k": longest_k}
    for lengths_k in (
        {"cu_seqlens_k": None, "seqused_k": lengths},
        {"cu_seqlens_k": starts_k},
        {"cu_seqlens_k": torch.zeros_like(starts_k), "seqused_k": lengths},
    ):
        with poisoned_allocations():
            got = flash_attn.flash_attn_varlen_func(
                *qkv, **packing, **lengths_k, **options, return_lse=True
            )
        judge.assert_bits_equal(got[0], expected[0], "out")
        judge.assert_bits_equal(got[1], expected[1], "lse")
    *got, probabilities = flash_attn.flash_attn_varlen_func(
        *qkv, **packing, cu_seqlens_k=starts_k, **options, return_attn_probs=True
    )
    assert probabilities is None
    judge.assert_bits_equal(got[0], expected[0], "out")
    judge.assert_bits_equal(got[1], expected[1], "lse")


@runs_on("decode", dtypes=("bfloat16",))
def test_block_table_of_the_private_function(target):
    inputs = CacheInputs(PAGED["pages_16"], target.dtype, target.device)
    expected = inputs.check()
    qkv, starts, lengths, longest, options = paged(inputs)
    got = flash_attn._flash_attn_varlen_forward(
        *qkv, starts, None, *longest, causal=True, block_table=options["block_table"],
        seqused_k=lengths,
    )  # fmt: skip
    judge.assert_bits_equal(got[0], expected[0], "out")
    judge.assert_bits_equal(got[1], expected[1], "softmax_lse")
    assert got[2:] == (None, None)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_block_table_has_no_gradient(name):
    inputs = CacheInputs(PAGED["pages_16"], torch.float32)
    qkv, starts, lengths, longest, options = paged(inputs)
    tensors = dict(zip("qkv", qkv, strict=True))
    tensors[name] = tensors[name].clone().requires_grad_()

    def call():
        return flash_attn.flash_attn_varlen_func(
            **tensors, cu_seqlens_q=starts, cu_seqlens_k=None, max_seqlen_q=longest[0],
            max_seqlen_k=longest[1], seqused_k=lengths, **options, return_lse=True,
        )  # fmt: skip

    with pytest.raises(NotImplementedError, match=r"^block_table: got .* needs a gradient; accep"):
        call()
    with torch.no_grad():
        inputs.judge(*call())


@runs_on("decode", dtypes=("bfloat16",))
def test_flash_attn_with_kvcache_is_ours(target):
    problem = PAGED["pages_16"].with_(lengths_q=(2,) * 4, varlen=False)
    inputs = CacheInputs(problem, target.dtype, target.device)
    expected = inputs.check()
    got = flash_attn.flash_attn_with_kvcache(
        *(inputs.tensor(n) for n in ("q", "k_cache", "v_cache")),
        cache_seqlens=inputs.options["cache_seqlens"], causal=True,
        block_table=inputs.options["page_table"], return_softmax_lse=True,
    )  # fmt: skip
    judge.assert_bits_equal(got[0], expected[0], "out")
    judge.assert_bits_equal(got[1], expected[1], "softmax_lse")


# FlashInfer


def base2(lse):
    """(..., heads, rows), natural -> (..., rows, heads), base 2."""
    return (lse / math.log(2)).transpose(-1, -2)


@runs_on("combine")
@given(count=st.integers(0, 4), rows=st.sampled_from([0, 1, 7]), seed=st.integers(0, 1000))
def test_flashinfer_merge_states(target, count, rows, seed):
    out, lse = states(target, count, (rows,), heads=2, head_dim=16, empty=0.4, seed=seed)
    with poisoned_allocations():
        v, s = flashinfer.merge_states(out.transpose(0, 1), base2(lse).transpose(0, 1))
    assert s.is_contiguous()
    check_merged(v, s, out, lse)


@runs_on("combine")
@given(seed=st.integers(0, 1000))
def test_flashinfer_merge_state(target, seed):
    out, lse = states(target, 2, (7,), heads=2, head_dim=16, empty=0.4, seed=seed)
    s_a, s_b = base2(lse)
    with poisoned_allocations():
        v, s = flashinfer.merge_state(out[0], s_a, out[1], s_b)
    check_merged(v, s, out, lse)


@runs_on("combine")
@given(seed=st.integers(0, 1000))
def test_flashinfer_merge_state_in_place(target, seed):
    """The tokens that are not merged keep every bit, also of a number that base e would round."""
    out, lse = states(target, 2, (7,), heads=2, head_dim=16, empty=0.4, seed=seed)
    s_a, s_b = base2(lse) + 0.1
    v, s = flashinfer.merge_state(out[0], s_a, out[1], s_b)
    for share in (None, 0.5):
        mask = None if share is None else torch.rand(7, device=target.device) < share
        rows = slice(None) if mask is None else mask
        v_place, s_place = out[0].clone(), s_a.clone()
        flashinfer.merge_state_in_place(v_place, s_place, out[1], s_b, mask)
        expected_v, expected_s = out[0].clone(), s_a.clone()
        expected_v[rows], expected_s[rows] = v[rows], s[rows]
        judge.assert_bits_equal(v_place, expected_v, "v")
        judge.assert_bits_equal(s_place, expected_s, "s")


def check_merged(v, s, out, lse):
    exact = oracle.merge(out.cpu(), lse.cpu())
    low_out = oracle.merge(out.cpu(), lse.cpu(), out.dtype)[0].to(v.dtype)
    low_lse = oracle.merge(out.cpu(), lse.cpu(), accumulate(out.dtype))[1]
    assert s.dtype == accumulate(out.dtype)
    judge.assert_close(v, exact[0], low_out, "v", size=judge.largest(out), sum_size=16.0)
    judge.assert_close(s, base2(exact[1]), base2(low_lse), "s", sum_size=24.0)


@runs_on("combine", "combine_backward", dtypes=("float64",))
def test_flashinfer_gradients(target):
    out, lse = states(target, 2, (6,), heads=2, head_dim=4, empty=0.5)
    lse[:, :, 0] = NEG_INF
    out = out.nan_to_num(0)
    empty = base2(lse) == NEG_INF
    s = torch.where(empty, 0, base2(lse))

    def function(v_a, s_a, v_b, s_b):
        s_a, s_b = (torch.where(e, NEG_INF, t) for e, t in zip(empty, (s_a, s_b), strict=True))
        v, merged = flashinfer.merge_state(v_a, s_a, v_b, s_b)
        return v, torch.where(merged == NEG_INF, 0, merged)

    leaves = [t.clone().requires_grad_() for t in (out[0], s[0], out[1], s[1])]
    assert torch.autograd.gradcheck(function, leaves)


@runs_on("combine")
def test_flashinfer_two_empties_and_plus_infinity(target):
    v = torch.full((1, 2, 8), NAN).to(target.device, target.dtype)
    s = torch.full((1, 2), NEG_INF, dtype=accumulate(target.dtype), device=target.device)
    got = flashinfer.merge_state(v, s, v, s)
    judge.assert_state(got, 0, NEG_INF)
    s_inf = torch.full_like(s, INF)
    if target.device == "cpu":
        with pytest.raises(ValueError, match=r"\+inf"):
            flashinfer.merge_state(v, s_inf, v, s)
    else:
        judge.assert_state(flashinfer.merge_state(v, s_inf, v, s), NAN, NAN)


def test_flashinfer_arguments_are_named():
    v, s = torch.zeros(5, 2, 8), torch.zeros(5, 2)
    for call, error, argument in [
        (lambda: flashinfer.merge_state(v, s.T, v, s), ValueError, "s_a"),
        (lambda: flashinfer.merge_state(v, s, v[0], s), ValueError, "v_b"),
        (lambda: flashinfer.merge_state(v, s, v, None), TypeError, "s_b"),
        (lambda: flashinfer.merge_state(v, s.int(), v, s.int()), TypeError, "s_a"),
        (lambda: flashinfer.merge_state(v, s, v.half(), s), TypeError, "v_b"),
        (lambda: flashinfer.merge_states(v, s), ValueError, "v"),
        (lambda: flashinfer.merge_states(v[:, None], s), ValueError, "s"),
        (lambda: flashinfer.merge_state_in_place(v, s, v, s[:3]), ValueError, "s_other"),
        (lambda: flashinfer.merge_state_in_place(v, s, v, s, torch.ones(5)), TypeError, "mask"),
        (
            lambda: flashinfer.merge_state_in_place(v, s, v, s.clone().requires_grad_()),
            ValueError,
            "s_other",
        ),
    ]:
        with pytest.raises(error, match=rf"^{argument}: got .*accepted"):
            call()


# vLLM


def flash_attention_states(target, seed=0, mark=INF):
    """Two states as FlashAttention-2 writes them, or -3: `mark` and zeros where empty."""
    out, lse = states(target, 2, (9,), heads=2, head_dim=16, empty=0.4, seed=seed)
    empty = lse == NEG_INF
    out = torch.where(empty.transpose(-1, -2)[..., None], 0, out)
    return out, lse, torch.where(empty, mark, lse)


@runs_on("combine")
@given(seed=st.integers(0, 1000), with_lse=st.booleans(), mark=st.sampled_from([INF, NEG_INF]))
def test_vllm_merge_attn_states(target, seed, with_lse, mark):
    """Every operand with strides of its own; an infinity beside an output of 0 is empty."""
    out, lse, marked = flash_attention_states(target, seed, mark)
    expected = neginf.merge_states(list(out), list(lse))
    output = Guarded(torch.full_like(out[0], NAN).cpu(), target.device)
    output_lse = Guarded(torch.full_like(lse[0], NAN).cpu(), target.device)
    wide = torch.full((9, 2, 24), NAN).to(target.device, target.dtype)
    wide[..., :16] = out[1]
    vllm.merge_attn_states(
        output.view, out[0].transpose(0, 1).contiguous().transpose(0, 1), marked[0],
        wide[..., :16], marked[1].T.contiguous().T, output_lse.view if with_lse else None,
    )  # fmt: skip
    judge.assert_bits_equal(output.view, expected[0], "output")
    output.assert_guard_unchanged("output")
    output_lse.assert_guard_unchanged("output_lse")
    if with_lse:
        judge.assert_bits_equal(output_lse.view, expected[1], "output_lse")


@runs_on("combine")
def test_vllm_output_may_be_an_input(target):
    out, lse, marked = flash_attention_states(target)
    expected = neginf.merge_states(list(out), list(lse))
    buffers, lses = out.clone(), marked.clone()
    vllm.merge_attn_states(buffers[0], buffers[0], lses[0], buffers[1], lses[1], lses[0])
    judge.assert_bits_equal(buffers[0], expected[0], "output")
    judge.assert_bits_equal(lses[0], expected[1], "output_lse")


@runs_on("combine")
def test_vllm_plus_infinity_beside_nan_is_not_empty(target):
    out, _, marked = flash_attention_states(target)
    out[0, 3, 1], marked[0, 1, 3] = NAN, INF
    output, output_lse = torch.empty_like(out[0]), torch.empty_like(marked[0])
    vllm.merge_attn_states(output, out[0], marked[0], out[1], marked[1], output_lse)
    assert output_lse.isnan().nonzero().tolist() == [[1, 3]]
    assert output.isnan().all(-1).nonzero().tolist() == [[3, 1]]


@runs_on("combine")
@pytest.mark.parametrize("payload", [NAN, 5.0])
def test_vllm_negative_infinity_is_the_identity(target, payload):
    """Whatever lies beside it, in one state or in both."""
    out, lse, _ = flash_attention_states(target)
    expected = neginf.merge_states(list(out), list(lse))
    assert (lse == NEG_INF).all(0).any()
    stale = torch.where((lse == NEG_INF).transpose(-1, -2)[..., None], payload, out)
    output, output_lse = torch.empty_like(out[0]), torch.empty_like(lse[0])
    vllm.merge_attn_states(output, stale[0], lse[0], stale[1], lse[1], output_lse)
    judge.assert_bits_equal(output, expected[0], "output")
    judge.assert_bits_equal(output_lse, expected[1], "output_lse")


@runs_on("combine")
@pytest.mark.parametrize("count", [0, 4, 9])
def test_vllm_tokens_without_context(target, count):
    """From `count` on, what the prefix's buffers hold does not matter."""
    out, lse, marked = flash_attention_states(target)
    without = lse.clone()
    without[0, :, count:] = NEG_INF
    expected = neginf.merge_states(list(out), list(without))
    out[0, count:], marked[0, :, count:] = NAN, NAN
    output, output_lse = torch.empty_like(out[0]), torch.empty_like(lse[0])
    vllm.merge_attn_states(
        output, out[0], marked[0], out[1], marked[1], output_lse,
        prefill_tokens_with_context=count,
    )  # fmt: skip
    judge.assert_bits_equal(output, expected[0], "output")
    judge.assert_bits_equal(output_lse, expected[1], "output_lse")


def test_vllm_arguments_are_named():
    out, lse = torch.zeros(5, 2, 8), torch.zeros(2, 5)
    state = {"prefix_output": out, "prefix_lse": lse, "suffix_output": out, "suffix_lse": lse}
    with pytest.raises(NotImplementedError, match=r"^output_scale: got .*accepted"):
        vllm.merge_attn_states(torch.zeros_like(out), **state, output_scale=lse[0, 0])
    for name in ("output", *state, "output_lse"):
        buffers = {"output": torch.full_like(out, 7.0), "output_lse": torch.full_like(lse, 7.0)}
        arguments = {**buffers, **state}
        needs_gradient = arguments[name].clone().requires_grad_()
        for bad, error in ((needs_gradient, ValueError), ([], TypeError)):
            with pytest.raises(error, match=rf"^{name}: got .*accepted"):
                vllm.merge_attn_states(**{**arguments, name: bad})
        if name != "output":  # it may have a dtype of its own
            with pytest.raises(TypeError, match=r"^\w+_(output|lse): got dtype"):
                vllm.merge_attn_states(**{**arguments, name: arguments[name].half()})
        assert all((b == 7).all() for b in buffers.values())
    for changes, argument in [
        ({"output": out[0]}, "output"),
        ({"prefix_output": out[:4]}, "prefix_output"),
        ({"prefix_lse": lse.T}, "prefix_lse"),
        ({"suffix_output": out[..., :4]}, "suffix_output"),
        ({"suffix_lse": lse[0]}, "suffix_lse"),
        ({"output_lse": lse.T}, "output_lse"),
    ]:
        arguments = {
            "output": torch.zeros_like(out), "prefix_output": out, "prefix_lse": lse,
            "suffix_output": out, "suffix_lse": lse, **changes,
        }  # fmt: skip
        with pytest.raises(ValueError, match=rf"^{argument}: got .*accepted"):
            vllm.merge_attn_states(**arguments)
