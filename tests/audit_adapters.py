"""Libraries that do wrong, for test_audit.py: each imitates what some real one does."""

import math
import os
import time

import torch

from neginf.audit import Adapter

NEG_INF = float("-inf")
INF = float("inf")


def attention(q, k, v, visible=None):
    """(out, natural lse (batch, heads, seqlen)); rows without keys (0, -inf). Differentiable."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if visible is not None:
        scores = torch.where(visible, scores, NEG_INF)
    if k.shape[-2] == 0:
        out = q.new_zeros(*q.shape[:-1], v.shape[-1]).transpose(1, 2)
        return out, scores.new_full(scores.shape[:-1], NEG_INF)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - torch.where(lse == NEG_INF, 0, lse)[..., None])
    return (weights @ v).transpose(1, 2), lse


class OnCpu(Adapter):
    device = "cpu"
    dtype = torch.float32

    def attend(self, q, k, v, causal=False):
        diagonal = k.shape[1] - q.shape[1]
        visible = torch.ones(q.shape[1], k.shape[1]).tril(diagonal).bool() if causal else None
        return attention(q, k, v, visible)

    def attend_varlen(self, q, k, v, cu_q, cu_k, max_q, max_k):
        parts = [
            self.attend(
                q[None, cu_q[i] : cu_q[i + 1]], *(t[None, cu_k[i] : cu_k[i + 1]] for t in (k, v))
            )
            for i in range(len(cu_q) - 1)
        ]
        return torch.cat([o[0] for o, _ in parts]), torch.cat([s[0] for _, s in parts], -1)


class PlusInfinity(OnCpu):
    """Empty and NaN alike are +inf, as in FlashAttention-2, and one +inf spoils a merge."""

    name = "plus infinity"

    def attend(self, q, k, v, causal=False):
        out, lse = super().attend(q, k, v, causal)
        return out, torch.where(lse.isnan() | (lse == NEG_INF), INF, lse)

    def merge(self, outs, lses):
        lse = torch.logaddexp(*lses)
        weights = [torch.exp(s - lse).transpose(1, 2)[..., None] for s in lses]
        return weights[0] * outs[0] + weights[1] * outs[1], lse


class BaseTwo(OnCpu):
    """Base 2 and (tokens, heads), as FlashInfer has them, and a sentinel for empty rows."""

    name = "base 2"

    def attend(self, q, k, v, causal=False):
        out, lse = super().attend(q, k, v, causal)
        lse = torch.where(lse == NEG_INF, -1e30, lse / math.log(2))
        return out, lse.transpose(1, 2).flatten(0, 1)

    def attend_varlen(self, q, k, v, cu_q, cu_k, max_q, max_k):
        out, lse = OnCpu().attend_varlen(q, k, v, cu_q, cu_k, max_q, max_k)
        return out, torch.where(lse == NEG_INF, -1e30, lse / math.log(2)).T

    def merge(self, outs, lses):
        """Forgets that a good state was there."""
        return outs[0], torch.where(lses[0] == INF, 0.0, lses[0])


class DropsNan(OnCpu):
    """A split with a NaN is left out of the sum, as in FlashAttention-3; lse has no gradient."""

    name = "drops NaN"

    def attend(self, q, k, v, causal=False):
        out, lse = super().attend(q, k, v, causal)
        return out, torch.where(lse.isnan(), NEG_INF, lse).detach()

    def attend_split(self, q, k, v, num_splits):
        if num_splits == 1:
            return self.attend(q, k, v)
        half = k.shape[1] // 2
        if k[:, :half].isnan().any():
            return self.attend(q, k[:, half:], v[:, half:])
        return self.attend(q, k, v)


class Padded(OnCpu):
    """A padded layout; the gradient through lse is silently 0."""

    name = "padded"

    def attend(self, q, k, v, causal=False):
        out, lse = super().attend(q, k, v, causal)
        lse = lse.detach() + 0 * q.sum()
        return out, torch.nn.functional.pad(lse, (0, 23), value=7.0)

    def attend_varlen(self, q, k, v, cu_q, cu_k, max_q, max_k):
        out, lse = OnCpu().attend_varlen(q, k, v, cu_q, cu_k, max_q, max_k)
        lengths = cu_q.diff().tolist()
        padded = torch.zeros(len(lengths), q.shape[1], 16)
        for i, part in enumerate(lse.split(lengths, 1)):
            padded[i, :, : lengths[i]] = part
        return out, padded


class TopLeft(OnCpu):
    """A causal mask aligned to the top-left corner, under which the first row sees a key."""

    name = "top left"

    def attend(self, q, k, v, causal=False):
        visible = torch.ones(q.shape[1], k.shape[1]).tril().bool() if causal else None
        return attention(q, k, v, visible)


class Nonsense(OnCpu):
    name = "nonsense"

    def attend(self, q, k, v, causal=False):
        out, lse = super().attend(q, k, v, causal)
        return out, lse + 1


class Ends(OnCpu):
    """Ends its process in one probe, hangs in another, and raises in a third."""

    name = "ends"

    def attend(self, q, k, v, causal=False):
        if k.shape[1] == 0:
            os.abort()
        return super().attend(q, k, v, causal)

    def attend_varlen(self, *_):
        os._exit(7)

    def attend_split(self, *_):
        time.sleep(3600)

    def merge(self, outs, lses):
        raise RuntimeError("no kernel for this,\nnor for that")


class Absent(OnCpu):
    name = "absent"
    module = "no_such_package.no_such_module"
