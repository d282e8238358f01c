"""This library, on the GPU where this build has kernels for it, else on the CPU."""

import neginf
from neginf.audit.adapter import Adapter


class Neginf(Adapter):
    name = "neginf"
    module = "neginf"
    device = "cuda" if any(b.usable for n, b in neginf.backends().items() if n != "cpu") else "cpu"

    def attend(self, q, k, v, causal=False):
        return neginf.flash_attn_func(q, k, v, causal=causal, return_lse=True)

    def attend_varlen(self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        return neginf.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, return_lse=True
        )

    def attend_split(self, q, k, v, num_splits):
        return neginf.flash_attn_func(q, k, v, num_splits=num_splits, return_lse=True)

    def merge(self, outs, lses):
        return neginf.merge_states(outs, lses)
