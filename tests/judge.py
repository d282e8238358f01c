"""When is a result right? Contract section 8.

The error against the float64 oracle may be twice (gradients: three times) that of the same maths
done in low precision with torch, plus what rounding alone can do. Positions of -inf, +inf and NaN
must match exactly.
"""

import torch

OUTPUT_FACTOR = 2
GRADIENT_FACTOR = 3


def assert_special_positions_equal(got, expected, what):
    for kind, where in (
        ("nan", torch.isnan),
        ("-inf", torch.isneginf),
        ("+inf", torch.isposinf),
    ):
        wrong = where(got.cpu()) != where(expected.cpu())
        assert not wrong.any(), (
            f"{what}: {int(wrong.sum())} of {wrong.numel()} positions of {kind} differ, "
            f"first at {tuple(wrong.nonzero()[0].tolist())}: "
            f"got {got.cpu()[wrong][0]}, expected {expected.cpu()[wrong][0]}"
        )


def max_error(got, expected):
    """Largest |got - expected| over the finite values of `expected`."""
    finite = expected.isfinite()
    error = (got.cpu().double() - expected.double()).abs()[finite]
    return error.max().item() if error.numel() else 0.0


def largest(tensor):
    finite = tensor.double()[tensor.isfinite()].abs()
    return finite.max().item() if finite.numel() else 0.0


def rounding_floor(dtype, size, sum_size):
    """Error that a right computation may have, however lucky the low-precision reference was.

    Half a unit in the last place for a result of this size, as much for the weights that it is a
    sum of, and float32 (float64 for float64) sums of terms of size `sum_size` in another order.
    """
    storage = torch.finfo(dtype).eps if dtype in (torch.float16, torch.bfloat16) else 0.0
    accumulate = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    return storage * size + 4 * accumulate * sum_size


def assert_close(
    got, oracle, reference, what, *, factor=OUTPUT_FACTOR, dtype=None, size=None, sum_size=1.0
):
    """Judges `got`; `reference` is the low-precision result.

    dtype: what inputs and intermediate results are rounded to, if that is not the dtype of `got`.
    size, sum_size: see rounding_floor; the oracle's own size is the least.
    """
    assert got.shape == oracle.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(oracle.shape)}"
    assert_special_positions_equal(got, oracle, what)
    error = max_error(got, oracle)
    own_size = largest(oracle)
    floor = rounding_floor(
        dtype or got.dtype, own_size if size is None else size, max(sum_size, own_size)
    )
    allowed = factor * max_error(reference, oracle) + floor
    assert error <= allowed, f"{what}: error {error:.3e}, allowed {allowed:.3e} (floor {floor:.3e})"


def assert_zero(tensor, what):
    """Exactly zero, which NaN is not."""
    wrong = ~(tensor == 0)
    assert not wrong.any(), f"{what}: {int(wrong.sum())} values are not 0"


def assert_state(got, out, lse, what="state"):
    """The state is bit for bit this one; `out` and `lse` may be numbers."""
    for name, actual, expected in (("out", got[0], out), ("lse", got[1], lse)):
        expected = torch.as_tensor(expected, dtype=actual.dtype).expand(actual.shape)
        same = (actual.cpu() == expected) | (actual.cpu().isnan() & expected.isnan())
        assert same.all(), f"{what}, {name}: got {actual}, expected {expected}"


def assert_bits_equal(a, b, what):
    assert a.shape == b.shape
    view = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    assert torch.equal(a.contiguous().view(view), b.contiguous().view(view)), f"{what}: bits differ"
