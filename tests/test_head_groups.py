"""Few positions and many query heads per key head: GPU kernels put several heads into one tile."""

import itertools

import pytest
import torch

import judge
import neginf
from problems import Inputs, Problem, check_forward
from targets import runs_on

NEG_INF = float("-inf")
GROUPS = (1, 2, 3, 6, 8, 20, 130)
LENGTHS_Q_AND_SPLITS = ((1, 3), (2, 1), (5, 0), (17, 1))

CASES = {
    "plain": {},
    "causal": {"causal": True},
    "empty_rows": {"causal": True, "keys": 3},
    "no_keys": {"keys": 0},
    "window": {"window_size": (20, 3)},
    "sink": {"sink": (0.5, NEG_INF, -1.0), "keys": 3, "causal": True},
    "alibi": {"alibi": "bh"},
    "softcap_alibi": {"softcap": 2.0, "alibi": "h", "causal": True},
    "everything": {
        "softcap": 5.0, "alibi": "bh", "causal": True, "window_size": (100, 0),
        "sink": (2.0, NEG_INF),
    },
}  # fmt: skip


def problem_of(case, group, length_q, heads_k=2, **changes):
    switches = {**CASES[case], **changes}
    keys = switches.pop("keys", 150)
    heads = heads_k * group
    if "sink" in switches:
        switches["sink"] = tuple(itertools.islice(itertools.cycle(switches["sink"]), heads))
    return Problem(
        **{
            "lengths_q": (length_q,) * 2, "lengths_k": (keys,) * 2, "heads": heads,
            "heads_k": heads_k, "head_dim": 32, **switches,
        }
    )  # fmt: skip


@runs_on("forward", "combine", dtypes=("bfloat16", "float16"))
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("case", CASES)
def test_dense(target, case, group):
    for length_q, splits in LENGTHS_Q_AND_SPLITS:
        inputs = Inputs(problem_of(case, group, length_q), target.dtype, target.device)
        check_forward(inputs, num_splits=splits)


@runs_on("forward", "combine", dtypes=("bfloat16",))
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("case", CASES)
def test_varlen(target, case, group):
    """Sequences without rows or keys, rows of no sequence, unused rows and keys."""
    problem = problem_of(
        case, group, 1, heads_k=1 if group > 100 else 2,
        lengths_q=(3, 0, 17, 1), lengths_k=(70, 5, 0, 200),
    )  # fmt: skip
    for changes in (
        {"num_splits": 3},
        {"extra_q": 9, "extra_k": 4, "slack": 3},
        {"used_q": (2, 0, 17, 0), "used_k": (70, 5, 0, 33)},
    ):
        varied = problem.with_(varlen=True, **changes)
        check_forward(Inputs(varied, target.dtype, target.device))


@runs_on("forward", dtypes=("bfloat16",))
@pytest.mark.parametrize("group", GROUPS)
def test_dense_with_seqused(target, group):
    for length_q, _ in LENGTHS_Q_AND_SPLITS:
        problem = problem_of(
            "sink", group, length_q, lengths_q=(length_q,) * 3, lengths_k=(80,) * 3,
            used_q=(length_q, 0, length_q // 2), used_k=(80, 80, 1),
        )  # fmt: skip
        check_forward(Inputs(problem, target.dtype, target.device))


@runs_on("forward", dtypes=("bfloat16", "float16"))
@pytest.mark.parametrize("length_q", [30, 31, 32, 33, 63, 64, 65, 66, 95, 96, 97, 127, 128, 129])
def test_around_half_a_tile(target, length_q):
    """Where packing begins and ends: the same results on either side."""
    for head_dim in target.head_dims(64, 128, 256):
        problem = problem_of("everything", 5, length_q, head_dim=head_dim)
        check_forward(Inputs(problem, target.dtype, target.device))


@runs_on("forward", dtypes=("bfloat16",))
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_stays_with_the_rows_that_see_it(target, value):
    """Also when rows that do not see it lie in the same tile."""
    problem = problem_of("causal", 6, 5, lengths_q=(5,), lengths_k=(70,))
    inputs = Inputs(problem, target.dtype, target.device)
    q, k, v = (inputs.tensor(name).clone() for name in "qkv")
    q.abs_()
    k[:, 67, 1] = value
    expected = torch.zeros(1, 12, 5, dtype=torch.bool)
    expected[:, 6:, 2:] = True
    out, lse = inputs.call(q, k, v)
    assert torch.equal(lse.isnan().cpu(), expected)
    assert torch.equal(out.isnan().cpu(), expected.mT[..., None].expand(out.shape))
    assert lse.cpu()[~expected].isfinite().all()


@runs_on("forward", dtypes=("bfloat16",), gpu_only=True)
def test_max_seqlen_that_is_too_small(target):
    """Lengths on the GPU are not checked against the hint: it may cost time, never a result."""
    problem = problem_of("causal", 4, 1, lengths_q=(3, 150), lengths_k=(70, 200), varlen=True)
    inputs = Inputs(problem, target.dtype, target.device)
    q, k, v = (inputs.tensor(name) for name in "qkv")
    options = {
        name: value.to(target.device) if isinstance(value, torch.Tensor) else value
        for name, value in inputs.options.items()
    }
    results = [
        neginf.flash_attn_varlen_func(
            q, k, v, max_seqlen_q=hint, max_seqlen_k=200, return_lse=True, **options
        )
        for hint in (150, 1)
    ]
    for got, expected, what in zip(results[1], results[0], ("out", "lse"), strict=True):
        judge.assert_special_positions_equal(got, expected, what)
        eps = torch.finfo(got.dtype).eps
        assert judge.max_error(got, expected.cpu()) <= 32 * eps
