"""Finding out in which base and layout a log-sum-exp comes."""

import math
from typing import NamedTuple

import torch

BASES = {"ln": 1.0, "log2": math.log(2)}
TOLERANCE = 0.03  # of scores from bfloat16 inputs; the bases are further apart


class Layout(NamedTuple):
    """What a library's log-sum-exp is."""

    base: str
    layout: str

    def __str__(self):
        return f"{self.base}, {self.layout}"

    def arranged(self, lse, batch, heads, seqlen):
        """lse, in its base, as (batch, heads, seqlen); None if its shape is not of this layout."""
        return dict(_arrangements(lse.detach(), batch, heads, seqlen)).get(self.layout)


def detect(lse, expected):
    """The Layout in which lse holds the values of `expected`, natural (batch, heads, seqlen).

    Sizes must differ pairwise. None if there is no such layout.
    """
    return _match(_arrangements(lse.detach(), *expected.shape), expected)


def detect_packed(lse, expected, lengths):
    """Layout of packed sequences and lse, in its base, as (heads, total); judged by those of
    `expected`, natural (heads, total), that are finite. None, None if there is no such layout."""
    arrangements = list(_packed_arrangements(lse.detach(), *expected.shape, lengths))
    layout = _match(arrangements, expected)
    return layout, layout and dict(arrangements)[layout.layout]


def _match(arrangements, expected):
    finite = expected.isfinite()
    for layout, arranged in arrangements:
        for base, unit in BASES.items():
            natural = arranged.double() * unit
            if torch.allclose(natural[finite], expected[finite], rtol=0, atol=TOLERANCE):
                return Layout(base, layout)
    return None


def _arrangements(lse, batch, heads, seqlen):
    """(name, lse as (batch, heads, seqlen)) for every layout whose shape fits."""
    shape = tuple(lse.shape)
    if shape == (batch, heads, seqlen):
        yield "(batch, heads, seqlen)", lse
    if shape == (batch, seqlen, heads):
        yield "(batch, seqlen, heads)", lse.transpose(1, 2)
    if shape == (batch, heads, seqlen, 1):
        yield "(batch, heads, seqlen, 1)", lse.squeeze(-1)
    if len(shape) == 3 and shape[:2] == (batch, heads) and shape[2] > seqlen:
        yield "(batch, heads, padded seqlen)", lse[..., :seqlen]
    if shape == (batch * seqlen, heads):
        yield "(tokens, heads)", lse.view(batch, seqlen, heads).transpose(1, 2)
    if shape == (heads, batch * seqlen):
        yield "(heads, tokens)", lse.view(heads, batch, seqlen).transpose(0, 1)


def _packed_arrangements(lse, heads, total, lengths):
    shape = tuple(lse.shape)
    if shape == (heads, total):
        yield "(heads, tokens)", lse
    if shape == (total, heads):
        yield "(tokens, heads)", lse.T
    if shape == (1, heads, total):
        yield "(1, heads, tokens)", lse[0]
    if len(shape) == 3 and shape[:2] == (len(lengths), heads) and shape[2] >= max(lengths):
        rows = [lse[i, :, :length] for i, length in enumerate(lengths)]
        yield "(batch, heads, padded seqlen)", torch.cat(rows, dim=1)
