"""The probes: small inputs, what came back in words, and whether docs/contract.md says so too."""

import itertools
import textwrap
from typing import NamedTuple

import torch

from neginf.audit import lse as lses
from neginf.audit.adapter import NotOffered


class Finding(NamedTuple):
    text: str
    conforms: bool | None  # with docs/contract.md; None where that does not apply


NO_FUNCTION = Finding("-", None)
SEQLEN_Q, SEQLEN_K = 9, 8  # differ from each other, from the heads and from the batch
SPLIT_KEYS = 1024  # enough that every library has a tile of its own for each of two splits


class Probes:
    """All probes of one library; each public method is one, in the order of the report."""

    def __init__(self, adapter):
        self.adapter = adapter
        self._layout = None

    def lse(self):
        """Base and layout, from ordinary attention."""
        q, k, v = self._tensors(SEQLEN_Q, SEQLEN_K)
        out, lse = self.adapter.attend(q, k, v)
        expected_out, expected_lse = _reference(q, k, v)
        layout = lses.detect(lse, expected_lse)
        if layout is None:
            return Finding(f"not understood, shape {tuple(lse.shape)}", False)
        right = torch.allclose(out.double(), expected_out, rtol=0, atol=lses.TOLERANCE)
        wrong = "" if right else "; out is wrong"
        return Finding(f"{layout}{wrong}", right and layout.base == "ln")

    def masked_row(self):
        """A row that sees no key, beside rows that do."""
        q, k, v = self._tensors(SEQLEN_K + 1, SEQLEN_K)
        finding = self._row(*self.adapter.attend_first_row_masked(q, k, v))
        if finding.text == "out finite, lse finite":
            return Finding("the row sees keys: the mask is aligned otherwise", False)
        return finding

    def no_keys(self):
        """A key tensor without rows."""
        return self._row(*self.adapter.attend(*self._tensors(SEQLEN_Q, 0)))

    def zero_length_sequence(self):
        """Packed sequences, the first without keys, the second with."""
        lengths_q, lengths_k = (2, 5), (0, 7)
        q, k, v = (t[0] for t in self._tensors(sum(lengths_q), sum(lengths_k), batch=1))
        packing = [
            torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32, device=q.device)
            for n in (lengths_q, lengths_k)
        ]
        out, lse = self.adapter.attend_varlen(q, k, v, *packing, max(lengths_q), max(lengths_k))
        expected = torch.full((q.shape[1], q.shape[0]), float("-inf"), dtype=torch.float64)
        _, second = _reference(q[None, 2:], k[None], v[None])
        expected[:, 2:] = second[0].cpu()
        layout, arranged = lses.detect_packed(lse.cpu(), expected, lengths_q)
        if layout is None:
            return Finding(f"lse not understood, shape {tuple(lse.shape)}", False)
        text, conforms = _describe(out[:2], arranged[:, :2])
        return Finding(f"{text}; {layout.layout}", conforms)

    def nan_score(self):
        """One key with a NaN, which every row sees."""
        q, k, v = self._tensors(SEQLEN_Q, SEQLEN_K)
        return self._row(*self.adapter.attend(q, _with_nan(k, 1), v), expect_nan=True)

    def nan_row(self):
        """A row of q with a NaN: all its scores are NaN."""
        q, k, v = self._tensors(SEQLEN_Q, SEQLEN_K)
        return self._row(*self.adapter.attend(_with_nan(q, 0), k, v), expect_nan=True)

    def split(self):
        """Two splits against one, without and with a NaN in the first."""
        q, k, v = self._tensors(SEQLEN_Q, SPLIT_KEYS)
        one, two = (self.adapter.attend_split(q, k, v, n) for n in (1, 2))
        equal = torch.allclose(one[0].float(), two[0].float(), rtol=0, atol=lses.TOLERANCE)
        k = _with_nan(k, 1)
        with_nan = [self._row(*self.adapter.attend_split(q, k, v, n), True) for n in (1, 2)]
        same = with_nan[0].text == with_nan[1].text
        nan = with_nan[0].text if same else f"{with_nan[0].text} becomes {with_nan[1].text}"
        text = f"{'equal' if equal else 'not equal'}; NaN: {nan}"
        return Finding(text, equal and same and bool(with_nan[0].conforms))

    def merge_of_empties(self):
        """(0, -inf) merged with (0, -inf)."""
        out, lse = self._state()
        out, lse = torch.zeros_like(out), torch.full_like(lse, float("-inf"))
        merged = self.adapter.merge([out, out.clone()], [lse, lse.clone()])
        return Finding(*_describe(merged[0], merged[1]))

    def plus_infinity(self):
        """(0, +inf), as FlashAttention-2 marks an empty row, merged with a good state."""
        out, lse = self._state()
        marked = torch.full_like(lse, float("inf"))
        try:
            merged = self.adapter.merge([torch.zeros_like(out), out], [marked, lse])
        except (ValueError, TypeError) as error:
            return Finding(_raises(error), True)
        if torch.equal(merged[0], out):
            return Finding("taken for empty", False)
        text, _ = _describe(merged[0], merged[1])
        nan = bool(merged[0].isnan().all() and merged[1].isnan().all())
        return Finding(text, nan)

    def backward(self):
        """Gradients beside a row without keys, whose dout is ordinary, then NaN."""
        ordinary = self._gradients(1.0)
        if ordinary is None:
            return NO_FUNCTION
        dq_is_zero = bool((ordinary["dq"][:, 0] == 0).all())
        finite = all(g.isfinite().all() for g in ordinary.values())
        poisoned = self._gradients(float("nan"))
        reached = [n for n, g in poisoned.items() if not g.isfinite().all()]
        text = f"dq {'0' if dq_is_zero else 'not 0'}" if finite else "not finite"
        text += f"; NaN in its dout {'reaches ' + ', '.join(reached) if reached else 'ignored'}"
        return Finding(text, dq_is_zero and finite and not reached)

    def backward_of_lse(self):
        """The gradient of q through lse."""
        q, k, v = (t.clone().requires_grad_() for t in self._tensors(SEQLEN_Q, SEQLEN_K))
        _, lse = self.adapter.attend(q, k, v)
        expected_lse = _reference(q, k, v)[1]
        layout = lses.detect(lse, expected_lse.detach())
        if not lse.requires_grad or layout is None:
            return Finding("none", None)
        (dq,) = torch.autograd.grad(lse.sum() * lses.BASES[layout.base], q, allow_unused=True)
        if dq is None or not dq.any():
            return Finding("0, without an error", False)
        (expected,) = torch.autograd.grad(expected_lse.sum(), q)
        right = torch.allclose(dq.double(), expected.double(), rtol=0, atol=lses.TOLERANCE)
        return Finding("right" if right else "wrong", right)

    def _gradients(self, dout_of_masked_row):
        """None if the library records no gradient."""
        q, k, v = (t.clone().requires_grad_() for t in self._tensors(SEQLEN_K + 1, SEQLEN_K))
        out, _ = self.adapter.attend_first_row_masked(q, k, v)
        if not out.requires_grad:
            return None
        dout = torch.ones_like(out)
        dout[:, 0] = dout_of_masked_row
        gradients = torch.autograd.grad(out, (q, k, v), dout)
        return dict(zip(("dq", "dk", "dv"), gradients, strict=True))

    def _row(self, out, lse, expect_nan=False):
        """The first row of dense attention, in words."""
        if self._layout is None:
            q, k, v = self._tensors(SEQLEN_Q, SEQLEN_K)
            self._layout = lses.detect(self.adapter.attend(q, k, v)[1], _reference(q, k, v)[1])
        batch, seqlen, heads, _ = out.shape
        arranged = self._layout and self._layout.arranged(lse, batch, heads, seqlen)
        if arranged is None:
            return Finding(f"lse not understood, shape {tuple(lse.shape)}", False)
        return Finding(*_describe(out[:, :1], arranged[..., :1], expect_nan))

    def _tensors(self, seqlen_q, seqlen_k, batch=None):
        """The same every time."""
        a = self.adapter
        generator = torch.Generator().manual_seed(0)

        def normal(seqlen, heads):
            shape = (batch or a.batch, seqlen, heads, a.head_dim)
            return torch.randn(shape, generator=generator).to(a.device, a.dtype)

        if a.head_dim_v is None:
            return normal(seqlen_q, a.heads), normal(seqlen_k, a.heads), normal(seqlen_k, a.heads)
        q, k = normal(seqlen_q, a.heads), normal(seqlen_k, 1)
        return q, k, k[..., : a.head_dim_v]

    def _state(self):
        """A good state; its lse is as right in one base as in another."""
        a = self.adapter
        out = self._tensors(3, 1)[0][..., : a.head_dim_v]
        return out, torch.full((out.shape[0], a.heads, 3), 0.5, device=a.device)


NAMES = [n for n in vars(Probes) if not n.startswith("_")]


def run(name, adapter):
    """The finding of one probe; what it raises is one too."""
    try:
        return getattr(Probes(adapter), name)()
    except NotOffered:
        return NO_FUNCTION
    except Exception as error:
        return Finding(_raises(error), False)


def _raises(error):
    text = textwrap.shorten(str(error), 100, placeholder=" ...")
    return f"raises {type(error).__name__}: {text}"


def _with_nan(tensor, row):
    tensor = tensor.clone()
    tensor[:, row, :, 0] = float("nan")
    return tensor


def _reference(q, k, v):
    """(out, natural lse (batch, heads, seqlen)) in float64."""
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


def _describe(out, lse, expect_nan=False):
    """(text, whether it is (0, -inf), or (NaN, NaN))."""
    out_text = _in_words(out)
    lse_text = _in_words(lse)
    expected = ("NaN", "NaN") if expect_nan else ("0", "-inf")
    return f"out {out_text}, lse {lse_text}", (out_text, lse_text) == expected


def _in_words(tensor):
    """What all values are, or "finite", or "mixed"."""
    tensor = tensor.detach()
    for text, where in (
        ("0", tensor == 0),
        ("NaN", tensor.isnan()),
        ("+inf", tensor == float("inf")),
        ("-inf", tensor == float("-inf")),
    ):
        if where.all():
            return text
    first = tensor.flatten()[0].item()
    if (tensor == first).all():
        return f"{first:g}"
    return "finite" if tensor.isfinite().all() else "mixed"
