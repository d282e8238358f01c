"""More tiles of rows than a GPU has multiprocessors: kernels that stay on one work on several."""

import pytest
import torch

import judge
import neginf
from problems import Inputs, Problem, check_forward, int32, poisoned_allocations
from targets import runs_on

CASES = {
    "full": {"lengths_q": (300,) * 12, "lengths_k": (150,) * 12},
    "causal_empty_rows": {"lengths_q": (400,) * 12, "lengths_k": (250,) * 12, "causal": True},
    "window": {"lengths_q": (400,) * 12, "lengths_k": (500,) * 12, "window_size": (70, 5)},
    # Between two row tiles warpgroups pass over many key tiles, and must not wait for each other.
    "narrow_window": {"lengths_q": (900,) * 8, "lengths_k": (900,) * 8, "window_size": (200, 0)},
    # So long that kernels for these halve the last key tile of rows that see no more.
    "long_causal": {"lengths_q": (1100,) * 4, "lengths_k": (1170,) * 4, "causal": True},
    "long_varlen": {
        "lengths_q": (1000, 1300, 1900, 1), "lengths_k": (1100, 1300, 1900, 64),
        "varlen": True, "causal": True,
    },
    "long_window": {"lengths_q": (1300,) * 4, "lengths_k": (1350,) * 4, "window_size": (700, 3)},
    "sink": {
        "lengths_q": (400,) * 12, "lengths_k": (100,) * 12, "causal": True, "sink": (0.5,) * 12,
    },
    "alibi": {"lengths_q": (130,) * 16, "lengths_k": (200,) * 16, "alibi": "bh"},
    "varlen": {
        "lengths_q": (1, 0, 300, 77, 0, 0, 513, 5) * 8,
        "lengths_k": (9, 4, 0, 270, 0, 1, 400, 70) * 8,
        "varlen": True, "causal": True,
    },
    # Long runs of tiles without keys between tiles that have some.
    "keys_seldom": {
        "lengths_q": (140,) * 90, "lengths_k": ((0,) * 29 + (200,)) * 3, "varlen": True,
    },
    "packed_heads": {"lengths_q": (3,) * 200, "lengths_k": (90,) * 200, "heads_k": 2},
}  # fmt: skip


def problem_of(case, head_dim, head_dim_v=None):
    sizes = {"heads": 12, "heads_k": 3, "head_dim": head_dim, "head_dim_v": head_dim_v}
    return Problem(**{**sizes, **CASES[case]})


@runs_on("forward", dtypes=("bfloat16",), gpu_only=True)
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(64, None), (96, None), (128, None), (192, 128), (256, None)]
)
@pytest.mark.parametrize("case", CASES)
def test_forward(target, case, head_dim, head_dim_v):
    check_forward(Inputs(problem_of(case, head_dim, head_dim_v), target.dtype, target.device))


@runs_on("forward", dtypes=("bfloat16",), gpu_only=True)
@pytest.mark.parametrize("case", CASES)
def test_same_bits_every_time(target, case):
    inputs = Inputs(problem_of(case, 128), target.dtype, target.device)
    out, lse = inputs.forward()
    for _ in range(200):
        again_out, again_lse = inputs.forward()
        assert torch.equal(out, again_out)
        assert torch.equal(lse, again_lse)


@runs_on("forward", dtypes=("bfloat16",), gpu_only=True)
def test_neighbours_change_no_bit(target):
    """What lies behind a sequence, in the rows of its last tile, does not even round."""
    q, k, v = (torch.randn(n, 4, 64, dtype=target.dtype, device="cuda") for n in (103, 135, 135))
    cu_seqlens_q, cu_seqlens_k = int32([0, 70, 103], "cuda"), int32([0, 90, 135], "cuda")

    def forward():
        return neginf.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, 70, 90, return_lse=True
        )

    out, lse = forward()
    for x, length in ((q, 70), (k, 90), (v, 90)):
        x[length:] *= 100
    other_out, other_lse = forward()
    judge.assert_bits_equal(out[:70], other_out[:70], "out")
    judge.assert_bits_equal(lse[:, :70], other_lse[:, :70], "lse")
    assert not torch.equal(out[70:], other_out[70:])


@runs_on("forward", dtypes=("bfloat16",), gpu_only=True)
@pytest.mark.parametrize("causal", [False, True])
def test_many_long_tiles_are_as_few(target, causal):
    """So many long ones that CTAs make room for others; of few heads they stay."""
    heads, keys = 56, 8195
    q = torch.randn(2, 4096, heads, 128, dtype=target.dtype, device="cuda")
    k, v = torch.randn(2, 2, keys, heads, 128, dtype=target.dtype, device="cuda")

    def forward(of):
        with poisoned_allocations():
            return neginf.flash_attn_func(
                q[:, :, of], k[:, :, of], v[:, :, of],
                causal=causal, num_splits=1, return_lse=True,
            )  # fmt: skip

    out, lse = forward(slice(None))
    for first in range(0, heads, 4):
        of = slice(first, first + 4)
        few_out, few_lse = forward(of)
        judge.assert_bits_equal(out[:, :, of], few_out, "out")
        judge.assert_bits_equal(lse[:, of], few_lse, "lse")
