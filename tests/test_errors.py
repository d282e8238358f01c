"""Bad input ends in an exception that names the argument, before anything is computed."""

import pytest
import torch
import torch.autograd.forward_ad as fwad

import neginf
from neginf import _C
from problems import int32
from targets import HALF, runs_on

NAN = float("nan")
INF = float("inf")


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def dense_arguments():
    return {"q": zeros(2, 5, 4, 8), "k": zeros(2, 6, 2, 8), "v": zeros(2, 6, 2, 8)}


def packed_arguments():
    return {
        "q": zeros(5, 4, 8),
        "k": zeros(6, 2, 8),
        "v": zeros(6, 2, 8),
        "cu_seqlens_q": int32([0, 2, 5], "cpu"),
        "cu_seqlens_k": int32([0, 4, 6], "cpu"),
        "max_seqlen_q": 3,
        "max_seqlen_k": 4,
    }


def test_the_arguments_are_good():
    neginf.flash_attn_func(**dense_arguments())
    neginf.flash_attn_varlen_func(**packed_arguments())
    neginf.flash_attn_combine(zeros(2, 3, 4, 5, 8), zeros(2, 3, 5, 4))


DENSE = [
    # what is changed, the exception, the argument its message begins with
    ({"q": zeros(2, 5, 4)}, ValueError, "q"),
    ({"k": zeros(6, 2, 8)}, ValueError, "k"),
    ({"v": zeros(2, 6, 2, 8, 1)}, ValueError, "v"),
    ({"q": zeros(2, 5, 4, 8, dtype=torch.int64)}, TypeError, "k|q"),
    ({n: zeros(2, 5, 4, 8, dtype=torch.int32) for n in "qkv"}, TypeError, "q"),
    ({n: zeros(2, 5, 4, 8, dtype=torch.complex64) for n in "qkv"}, TypeError, "q"),
    ({"k": zeros(2, 6, 2, 8, dtype=torch.float64)}, TypeError, "k"),
    ({"v": zeros(2, 6, 2, 8, dtype=torch.bfloat16)}, TypeError, "v"),
    ({"k": zeros(3, 6, 2, 8), "v": zeros(3, 6, 2, 8)}, ValueError, "k"),
    ({"v": zeros(2, 7, 2, 8)}, ValueError, "v"),
    ({"v": zeros(2, 6, 4, 8)}, ValueError, "v"),
    ({"v": zeros(2, 6, 2, 9)}, ValueError, "v"),
    ({"v": zeros(2, 6, 2, 0)}, ValueError, "v"),
    ({"q": zeros(2, 5, 4, 16)}, ValueError, "k"),
    ({"q": zeros(2, 5, 3, 8)}, ValueError, "q"),
    ({"q": zeros(2, 5, 1, 8)}, ValueError, "q"),
    ({"q": zeros(2, 5, 0, 8)}, ValueError, "q"),
    ({"k": zeros(2, 6, 0, 8), "v": zeros(2, 6, 0, 8)}, ValueError, "q"),
    ({n: zeros(2, 5, 4, 0) for n in "qkv"}, ValueError, "q"),
    ({n: zeros(2, 5, 4, 257) for n in "qkv"}, ValueError, "q"),
    ({"dropout_p": 0.1}, NotImplementedError, "dropout_p"),
    ({"softmax_scale": 0.0}, ValueError, "softmax_scale"),
    ({"softmax_scale": -1.0}, ValueError, "softmax_scale"),
    ({"softmax_scale": NAN}, ValueError, "softmax_scale"),
    ({"softmax_scale": INF}, ValueError, "softmax_scale"),
    ({"softmax_scale": 1e-60}, ValueError, "softmax_scale"),  # 0 in float32
    ({"softcap": -1.0}, ValueError, "softcap"),
    ({"softcap": NAN}, ValueError, "softcap"),
    ({"softcap": INF}, ValueError, "softcap"),
    ({"softcap": 1e-60}, ValueError, "softcap"),  # 0, which is none, in float32
    ({"window_size": (-2, 0)}, ValueError, "window_size"),
    ({"window_size": (0, -5)}, ValueError, "window_size"),
    ({"window_size": (-(2**40), -1)}, ValueError, "window_size"),
    ({"window_size": (-(2**70), -1)}, ValueError, "window_size"),
    ({"window_size": (-1, -7), "causal": True}, ValueError, "window_size"),
    ({"window_size": (1.5, 0)}, TypeError, "window_size"),
    ({"window_size": (0, "a")}, TypeError, "window_size"),
    ({"window_size": (None, None)}, TypeError, "window_size"),
    ({"window_size": (1,)}, ValueError, "window_size"),
    ({"window_size": (1, 2, 3)}, ValueError, "window_size"),
    ({"num_splits": -1}, ValueError, "num_splits"),
    ({"num_splits": 2**31}, ValueError, "num_splits"),
    ({"num_splits": 2**40}, ValueError, "num_splits"),
    ({"alibi_slopes": zeros(3)}, ValueError, "alibi_slopes"),
    ({"alibi_slopes": zeros(3, 4)}, ValueError, "alibi_slopes"),
    ({"alibi_slopes": zeros(2, 4, 1)}, ValueError, "alibi_slopes"),
    ({"alibi_slopes": zeros(4, dtype=torch.float64)}, TypeError, "alibi_slopes"),
    ({"alibi_slopes": zeros(4, dtype=torch.float16)}, TypeError, "alibi_slopes"),
    ({"q": [1.0]}, TypeError, "q"),
    ({"v": None}, TypeError, "v"),
    ({"alibi_slopes": [1.0] * 4}, TypeError, "alibi_slopes"),
    ({"seqused_k": [5, 6]}, TypeError, "seqused_k"),
    ({"sink": [1.0] * 4}, TypeError, "sink"),
    ({"sink": 1.0}, TypeError, "sink"),
    ({"sink": zeros(2)}, ValueError, "sink"),
    ({"sink": zeros(2, 4)}, ValueError, "sink"),
    ({"sink": zeros(4, dtype=torch.float64)}, TypeError, "sink"),
    ({"sink": zeros(4, dtype=torch.int32)}, TypeError, "sink"),
    ({"seqused_q": int32([5], "cpu")}, ValueError, "seqused_q"),
    ({"seqused_q": int32([5, 6], "cpu")}, ValueError, "seqused_q"),
    ({"seqused_k": int32([-1, 6], "cpu")}, ValueError, "seqused_k"),
    ({"seqused_k": int32([0, 7], "cpu")}, ValueError, "seqused_k"),
    ({"seqused_k": torch.tensor([1, 2])}, TypeError, "seqused_k"),
    ({"seqused_k": torch.tensor([1.0, 2.0])}, TypeError, "seqused_k"),
    ({"seqused_k": int32([[1, 2]], "cpu")}, ValueError, "seqused_k"),
    ({"seqused_k": int32([1, 0, 2, 0], "cpu")[::2]}, ValueError, "seqused_k"),
]
PACKED = [
    ({"cu_seqlens_k": [0, 4, 6]}, TypeError, "cu_seqlens_k"),
    ({"sink": [1.0] * 4}, TypeError, "sink"),
    ({"q": zeros(1, 5, 4, 8)}, ValueError, "q"),
    ({"cu_seqlens_q": torch.tensor([0, 2, 5])}, TypeError, "cu_seqlens_q"),
    ({"cu_seqlens_k": torch.tensor([0.0, 4, 6])}, TypeError, "cu_seqlens_k"),
    ({"cu_seqlens_q": int32([1, 2, 5], "cpu")}, ValueError, "cu_seqlens_q"),
    ({"cu_seqlens_q": int32([0, 4, 2], "cpu"), "max_seqlen_q": 9}, ValueError, "cu_seqlens_q"),
    ({"cu_seqlens_k": int32([0, 7, 6], "cpu")}, ValueError, "cu_seqlens_k|max_seqlen_k"),
    ({"cu_seqlens_q": int32([0, 2, 6], "cpu"), "max_seqlen_q": 9}, ValueError, "cu_seqlens_q"),
    ({"cu_seqlens_k": int32([0, 4, 2**31 - 1], "cpu")}, ValueError, "cu_seqlens_k|max_seqlen_k"),
    ({"cu_seqlens_k": int32([0, 6], "cpu")}, ValueError, "cu_seqlens_k"),
    ({"cu_seqlens_q": int32([], "cpu")}, ValueError, "cu_seqlens_q"),
    ({"cu_seqlens_q": int32([[0, 2, 5]], "cpu")}, ValueError, "cu_seqlens_q"),
    ({"cu_seqlens_q": int32([0, 9, 2, 9, 5, 9], "cpu")[::2]}, ValueError, "cu_seqlens_q"),
    ({"cu_seqlens_k": None}, ValueError, "cu_seqlens"),
    ({"cu_seqlens_q": None}, ValueError, "cu_seqlens"),
    ({"max_seqlen_q": 2}, ValueError, "max_seqlen_q"),
    ({"max_seqlen_k": 3}, ValueError, "max_seqlen_k"),
    ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k"),
    ({"max_seqlen_q": 2**31}, ValueError, "max_seqlen_q"),
    ({"max_seqlen_k": 2**40}, ValueError, "max_seqlen_k"),
    ({"max_seqlen_q": None}, ValueError, "max_seqlen_q"),
    ({"seqused_k": int32([5, 1], "cpu")}, ValueError, "seqused_k"),
    ({"seqused_q": int32([2, -1], "cpu")}, ValueError, "seqused_q"),
    ({"dropout_p": 0.5}, NotImplementedError, "dropout_p"),
    ({"alibi_slopes": zeros(3, 4)}, ValueError, "alibi_slopes"),
]
# Errors call what is paged by the names of flash_attn_with_kvcache.
PAGED = [
    ({"k": zeros(6, 2, 8)}, ValueError, "k_cache"),
    ({"v": zeros(6, 2, 8)}, ValueError, "v_cache"),
    ({"k": None}, TypeError, "k"),
    ({"k": zeros(2, 3, 3, 8), "v": zeros(2, 3, 3, 8)}, ValueError, "q"),
    ({"block_table": zeros(3, 2, dtype=torch.int32)}, ValueError, "page_table"),
    ({"block_table": zeros(2, 2)}, TypeError, "page_table"),
    ({"block_table": [[0], [1]]}, TypeError, "page_table"),
    ({"seqused_q": int32([1, 1], "cpu")}, NotImplementedError, "seqused_q"),
    ({"cu_seqlens_q": None}, TypeError, "cu_seqlens_q"),
    ({"cu_seqlens_k": None}, ValueError, "cu_seqlens_k, seqused_k"),
    ({"cu_seqlens_k": [0, 4, 6]}, TypeError, "cu_seqlens_k"),
    ({"cu_seqlens_k": torch.tensor([0, 4, 6])}, TypeError, "cu_seqlens_k"),
    ({"cu_seqlens_k": int32([0, 6], "cpu")}, ValueError, "cu_seqlens_k"),
    ({"seqused_k": int32([4, 2, 1], "cpu")}, ValueError, "seqused_k"),
    ({"seqused_k": int32([[4, 2]], "cpu")}, ValueError, "seqused_k"),
    ({"seqused_k": torch.tensor([4, 2])}, TypeError, "seqused_k"),
    ({"seqused_k": [4, 2]}, TypeError, "seqused_k"),
    ({"dropout_p": 0.5}, NotImplementedError, "dropout_p"),
]


def describe(value):
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype)[6:]}{list(value.shape)}{value.device.type[0]}"
    return str(value)


def label(case):
    changes, _, _ = case
    return ",".join(f"{name}={describe(value)}" for name, value in changes.items())


@pytest.mark.parametrize("case", DENSE, ids=label)
def test_dense(case):
    changes, error, argument = case
    with pytest.raises(error, match=rf"^(?:{argument})\b"):
        neginf.flash_attn_func(**{**dense_arguments(), **changes})


@pytest.mark.parametrize("case", PACKED, ids=label)
def test_packed(case):
    changes, error, argument = case
    with pytest.raises(error, match=rf"^(?:{argument})"):
        neginf.flash_attn_varlen_func(**{**packed_arguments(), **changes})


@pytest.mark.parametrize("case", PAGED, ids=label)
def test_paged(case):
    changes, error, argument = case
    pages = {"k": zeros(2, 4, 2, 8), "v": zeros(2, 4, 2, 8)}
    arguments = {**packed_arguments(), **pages, "block_table": int32([[0], [1]], "cpu")}
    neginf.flash_attn_varlen_func(**arguments)
    with pytest.raises(error, match=rf"^(?:{argument}): got .*accepted"):
        neginf.flash_attn_varlen_func(**{**arguments, **changes})


def test_a_value_head_dim_above_that_of_q():
    with pytest.raises(ValueError, match=r"^v: got head_dim 9; accepted are 1 to .* of q, 8$"):
        neginf.flash_attn_func(**{**dense_arguments(), "v": zeros(2, 6, 2, 9)})


def test_message_says_what_was_got_and_what_is_accepted():
    with pytest.raises(
        ValueError, match=r"num_splits: got -3; accepted are 0 \(automatic\) to \d+"
    ):
        neginf.flash_attn_func(**dense_arguments(), num_splits=-3)
    for changes, error, _ in DENSE:
        with pytest.raises(error) as raised:
            neginf.flash_attn_func(**{**dense_arguments(), **changes})
        assert "got" in str(raised.value)
        assert "accepted" in str(raised.value)


def test_sizes_that_overflow():
    """2^30 rows and more do not fit the kernels' integers; no memory is touched to find out."""
    long = torch.zeros(1).expand(1, 2**30, 1, 1)
    short = zeros(1, 1, 1, 1)
    with pytest.raises(ValueError, match=r"^k\b.*1073741824.*2\^30"):
        neginf.flash_attn_func(short, long, long)
    with pytest.raises(ValueError, match=r"^q\b.*1073741824.*2\^30"):
        neginf.flash_attn_func(long, short, short)
    wide = torch.zeros(1).expand(2**31 + 2, 0, 1, 1)
    with pytest.raises(ValueError, match="batch"):
        neginf.flash_attn_func(wide, wide, wide)
    many = torch.zeros(1).expand(2, 0, 2**31 + 2, 1)
    with pytest.raises(ValueError, match=r"^[qk]\b"):
        neginf.flash_attn_func(many, many, many)


COMBINE = [
    ({"out_partial": zeros(2, 3, 4)}, ValueError, "out_partial"),
    ({"out_partial": zeros(2, 3, 4, 5, 0)}, ValueError, "out_partial"),
    ({"out_partial": zeros(2, 3, 4, 5, 8, dtype=torch.int32)}, TypeError, "out_partial"),
    ({"lse_partial": zeros(2, 3, 4, 5)}, ValueError, "lse_partial"),  # rows before heads
    ({"lse_partial": zeros(3, 3, 5, 4)}, ValueError, "lse_partial"),
    ({"lse_partial": zeros(2, 3, 5)}, ValueError, "lse_partial"),
    ({"lse_partial": zeros(2, 3, 5, 4, dtype=torch.float64)}, TypeError, "lse_partial"),
    ({"lse_partial": zeros(2, 3, 5, 4, dtype=torch.float16)}, TypeError, "lse_partial"),
    ({"lse_partial": torch.full((2, 3, 5, 4), INF)}, ValueError, "lse_partial"),
    ({"out_dtype": torch.float64}, TypeError, "out_dtype"),
    ({"out_dtype": torch.int32}, TypeError, "out_dtype"),
    ({"out": zeros(3, 4, 5, 7)}, ValueError, "out"),
    ({"out": zeros(2, 3, 4, 5, 8)}, ValueError, "out"),
    ({"out": zeros(3, 4, 8, 5).transpose(2, 3)}, ValueError, "out"),
    ({"out": zeros(3, 4, 5, 8, dtype=torch.float64)}, TypeError, "out"),
    ({"out": zeros(3, 4, 5, 8), "out_dtype": torch.float16}, ValueError, "out_dtype"),
]


@pytest.mark.parametrize("case", COMBINE, ids=label)
def test_combine(case):
    changes, error, argument = case
    arguments = {"out_partial": zeros(2, 3, 4, 5, 8), "lse_partial": zeros(2, 3, 5, 4)}
    with pytest.raises(error, match=rf"^(?:{argument})"):
        neginf.flash_attn_combine(**{**arguments, **changes})


def test_combine_into_out_is_not_differentiable():
    out_partial = zeros(2, 3, 4, 8).requires_grad_()
    with pytest.raises((ValueError, RuntimeError), match="out"):
        neginf.flash_attn_combine(out_partial, zeros(2, 4, 3), out=zeros(3, 4, 8))
    with torch.no_grad():
        neginf.flash_attn_combine(out_partial, zeros(2, 4, 3), out=zeros(3, 4, 8))


def test_combine_writes_into_memory_of_its_own():
    """Rows are merged in no particular order: none may be written where one is still to be read."""
    out_partial, lse_partial = zeros(3, 1, 5, 2, 4), zeros(3, 1, 2, 5)
    shared = zeros(1, 1, 1, 4).expand(1, 5, 2, 4)
    across = out_partial.view(-1)[8:48].view(1, 5, 2, 4)
    for out in (shared, across, out_partial[0]):
        with pytest.raises(ValueError, match=r"^out: got"):
            neginf.flash_attn_combine(out_partial, lse_partial, out=out)


def test_combine_into_out_invalidates_what_autograd_saved():
    x = zeros(1, 3, 2, 4).requires_grad_()
    y = x * 1
    loss = (y * y).sum()
    with torch.inference_mode():
        neginf.flash_attn_combine(zeros(2, 1, 3, 2, 4), zeros(2, 1, 2, 3), out=y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_forward_mode_is_not_implemented():
    q, out_partial = zeros(1, 3, 2, 8), zeros(2, 1, 3, 2, 8)
    with fwad.dual_level():
        with pytest.raises(NotImplementedError, match="forward-mode"):
            neginf.flash_attn_func(fwad.make_dual(q, q), q, q)
        dual = fwad.make_dual(out_partial, out_partial)
        with pytest.raises(ValueError, match=r"^out: got"):
            neginf.flash_attn_combine(dual, zeros(2, 1, 2, 3), out=q)


def test_backward_rejects_a_public_inf():
    """+inf does not mean empty (contract section 5): a ring must not take another library's lse."""
    q = zeros(1, 3, 2, 8)
    out, lse = neginf.flash_attn_func(q, q, q, return_lse=True)
    options = (None,) * 6 + (1.0, False, -1, -1, 0.0, None, None, 1, False)
    with pytest.raises(ValueError, match=r"^lse: got \+inf"):
        torch.ops.neginf.backward(q, None, q, q, q, out, torch.full_like(lse, INF), *options)


def test_backward_rejects_another_head_dim_than_that_of_v():
    q, v = zeros(1, 3, 2, 8), zeros(1, 3, 2, 4)
    out, lse = neginf.flash_attn_func(q, q, v, return_lse=True)
    options = (None,) * 6 + (1.0, False, -1, -1, 0.0, None, None, 1, False)
    with pytest.raises(ValueError, match=r"^dout: got shape .* 8\]; accepted is .* 4\]"):
        torch.ops.neginf.backward(q, None, q, q, v, out, lse, *options)
    with pytest.raises(ValueError, match=r"^out: got shape .* 8\]; accepted is .* 4\]"):
        torch.ops.neginf.backward(out, None, q, q, v, q, lse, *options)


def test_fake_tensors_are_checked_too():
    q = zeros(1, 3, 2, 8).to("meta")
    for changes, error in (
        ({"k": q.half()}, TypeError),
        ({"softmax_scale": float("nan")}, ValueError),
        ({"num_splits": -4}, ValueError),
        ({"q": None}, TypeError),
        ({"v": q[0]}, ValueError),
        ({"v": zeros(1, 3, 2, 9).to("meta")}, ValueError),
    ):
        with pytest.raises(error, match=f"^{next(iter(changes))}"):
            neginf.flash_attn_func(**{"q": q, "k": q, "v": q, **changes})


@pytest.mark.parametrize("place", [0, 16, 39])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_bad_state_of_a_long_list_is_called_by_its_number(place, needs_grad):
    outs = [torch.zeros(3, 4, 8, requires_grad=needs_grad) for _ in range(40)]
    lses = [torch.zeros(4, 3) for _ in range(40)]
    lses[place][0, 0] = INF
    with pytest.raises(ValueError, match=rf"^lses\[{place}\]: got \+inf"):
        neginf.merge_states(outs, lses)


def test_merge_states():
    out, lse = zeros(3, 4, 8), zeros(4, 3)
    with pytest.raises(TypeError, match=r"^outs\[1\]: got int"):
        neginf.merge_states([out, 1], [lse, lse])
    with pytest.raises(ValueError, match="outs"):
        neginf.merge_states([], [])
    with pytest.raises(ValueError, match="lses"):
        neginf.merge_states([out, out], [lse])
    with pytest.raises(ValueError, match="outs"):
        neginf.merge_states([out, out[:2]], [lse, lse])
    with pytest.raises(ValueError, match="lses"):
        neginf.merge_states([out, out], [lse, lse[:, :2]])
    with pytest.raises(TypeError, match="outs"):
        neginf.merge_states([out, out.half()], [lse, lse])
    with pytest.raises(TypeError, match="lses"):
        neginf.merge_states([out, out], [lse, lse.double()])
    with pytest.raises(ValueError, match=r"^lses\[1\]: got \+inf"):
        neginf.merge_states([out, out], [lse, torch.full_like(lse, INF)])
    with pytest.raises(ValueError, match=r"^outs\[0\]: got 2 dimensions"):
        neginf.merge_states([out[0]], [lse])
    with pytest.raises(ValueError, match=r"^lses\[0\]: got shape \[3, 4\]"):
        neginf.merge_states([out], [lse.T])


def test_the_operator_on_lists_trusts_nobody():
    out, lse = zeros(3, 4, 8), zeros(4, 3)
    cases = [
        (([], [lse], None), ValueError, r"^outs: got 0 states; accepted is 1 or more"),
        (([out] * 2, [lse], None), ValueError, r"^lses: got 1 tensors"),
        (([out, out[:2]], [lse] * 2, None), ValueError, r"^outs\[1\]: got shape"),
        (([out] * 3, [lse, lse, lse[:2]], None), ValueError, r"^lses\[2\]: got shape"),
        (([out, out.half()], [lse] * 2, None), TypeError, r"^outs\[1\]: got dtype"),
        (([out], [lse], torch.float64), TypeError, r"^out_dtype: got dtype"),
    ]
    for arguments, error, message in cases:
        with pytest.raises(error, match=message):
            torch.ops.neginf.merge(*arguments)
        outs, lses, out_dtype = arguments
        if out_dtype is None:
            with pytest.raises(error, match=message):
                torch.ops.neginf.merge_backward(None, None, outs, lses)
    on_meta = out.to("meta")
    for outs, lses in (([], [on_meta]), ([on_meta], [])):
        with pytest.raises(ValueError, match=r"^(outs|lses): got"):
            torch.ops.neginf.merge(outs, lses, None)
    for outs, lses, name in (
        ([on_meta, out], [lse.to("meta")] * 2, r"outs\[1\]"),
        ([on_meta] * 2, [lse.to("meta"), lse], r"lses\[1\]"),
    ):
        message = rf"^{name}: got a tensor on cpu; accepted is the device of outs\[0\], meta"
        with pytest.raises(ValueError, match=message):
            torch.ops.neginf.merge(outs, lses, None)
        with pytest.raises(ValueError, match=message):
            torch.ops.neginf.merge_backward(None, None, outs, lses)


def test_backend_names():
    with pytest.raises(ValueError, match="sm12345"), neginf.backend("sm12345"):
        pass
    built = {arch for _, arch, _, _ in _C.kernels()}
    for name in {"sm80"} - built:
        with pytest.raises(NotImplementedError, match="NEGINF_BACKENDS"), neginf.backend(name):
            pass
    with neginf.backend("cpu"):
        neginf.flash_attn_func(**dense_arguments())
    assert _C.get_backend() is None


def test_backend_is_restored_after_an_exception():
    with pytest.raises(KeyError), neginf.backend("cpu"):
        raise KeyError
    assert _C.get_backend() is None


@runs_on("forward", dtypes=HALF, gpu_only=True)
def test_gpu_device_mix(target):
    gpu = torch.zeros(1, 2, 1, 64, dtype=target.dtype, device=target.device)
    for name in "qkv":
        arguments = dict.fromkeys("qkv", gpu)
        arguments[name] = gpu.cpu()
        with pytest.raises(ValueError, match=r"^[qkv]: got a tensor on"):
            neginf.flash_attn_func(**arguments)
    for name in ("sink", "alibi_slopes"):
        with pytest.raises(ValueError, match=f"^{name}"):
            neginf.flash_attn_func(gpu, gpu, gpu, **{name: zeros(1)})
    with pytest.raises(ValueError, match=r"^seqused_k"):
        neginf.flash_attn_func(gpu, gpu, gpu, seqused_k=int32([1], "cpu"))


@runs_on("forward", dtypes=HALF, gpu_only=True)
def test_gpu_without_a_kernel(target):
    """What this build lacks is named, together with how to get it."""
    with neginf.backend(target.forced_backend):
        too_wide = target.max_head_dim + 1
        if too_wide <= 256:
            q = torch.zeros(1, 2, 1, too_wide, dtype=target.dtype, device=target.device)
            with pytest.raises(NotImplementedError, match=r"forward.*NEGINF_"):
                neginf.flash_attn_func(q, q, q)
    for dtype in (torch.float32, torch.float64):
        q = torch.zeros(1, 2, 1, 64, dtype=dtype, device=target.device)
        with pytest.raises(TypeError, match=r"^q: got dtype"):
            neginf.flash_attn_func(q, q, q)
