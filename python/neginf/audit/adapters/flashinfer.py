"""FlashInfer: attention of one request, of ragged batches, and its merge."""

import torch

from neginf.audit.adapter import Adapter


class FlashInfer(Adapter):
    name = "FlashInfer"
    module = "flashinfer"
    batch = 1

    def attend(self, q, k, v, causal=False):
        import flashinfer

        out, lse = flashinfer.single_prefill_with_kv_cache(
            q[0], k[0], v[0], causal=causal, return_lse=True
        )
        return out[None], lse

    def attend_varlen(self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        import flashinfer

        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=q.device)
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        heads, head_dim = q.shape[1:]
        wrapper.plan(
            cu_seqlens_q, cu_seqlens_k, heads, heads, head_dim, causal=False, q_data_type=q.dtype
        )
        return wrapper.run(q, k, v, return_lse=True)

    def merge(self, outs, lses):
        import flashinfer

        (v_a, v_b), (s_a, s_b) = outs, lses
        v, s = flashinfer.merge_state(v_a[0], s_a[0].T.contiguous(), v_b[0], s_b[0].T.contiguous())
        return v[None], s.T[None]
