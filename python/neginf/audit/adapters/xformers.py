"""xFormers: whichever of its operators it dispatches to."""

import torch

from neginf.audit.adapter import Adapter


class XFormers(Adapter):
    name = "xFormers"
    module = "xformers"

    def attend(self, q, k, v, causal=False):
        from xformers.ops.fmha.attn_bias import LowerTriangularFromBottomRightMask

        return self._call(q, k, v, LowerTriangularFromBottomRightMask() if causal else None)

    def attend_varlen(self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        from xformers.ops.fmha.attn_bias import BlockDiagonalMask

        lengths = [cu_seqlens.diff().tolist() for cu_seqlens in (cu_seqlens_q, cu_seqlens_k)]
        out, lse = self._call(q[None], k[None], v[None], BlockDiagonalMask.from_seqlens(*lengths))
        return out[0], lse

    def merge(self, outs, lses):
        from xformers.ops import fmha

        return fmha.merge_attentions(torch.stack(outs), torch.stack(lses))

    def _call(self, q, k, v, bias):
        from xformers.ops import fmha

        return fmha.memory_efficient_attention_forward_requires_grad(q, k, v, attn_bias=bias)
