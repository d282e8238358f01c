"""FlashMLA: dense decode over a paged cache, and sparse prefill."""

import torch

from neginf.audit.adapter import Adapter

PAGE = 64


class _FlashMla(Adapter):
    module = "flash_mla"
    heads = 64
    head_dim = 576
    head_dim_v = 512


class FlashMlaDecode(_FlashMla):
    name = "FlashMLA decode"

    def attend(self, q, k, v, causal=False):
        import flash_mla

        batch, seqlen_k, _, head_dim = k.shape
        pages = max(1, -(-seqlen_k // PAGE))
        cache = k.new_zeros(batch, pages * PAGE, 1, head_dim)
        cache[:, :seqlen_k] = k
        table = torch.arange(batch * pages, dtype=torch.int32, device=k.device)
        lengths = torch.full((batch,), seqlen_k, dtype=torch.int32, device=k.device)
        metadata, _ = flash_mla.get_mla_metadata()
        return flash_mla.flash_mla_with_kvcache(
            q, cache.view(batch * pages, PAGE, 1, head_dim), table.view(batch, pages), lengths,
            self.head_dim_v, metadata, causal=causal,
        )  # fmt: skip


class FlashMlaSparse(_FlashMla):
    name = "FlashMLA sparse prefill"
    batch = 1
    heads = 128
    top_k = 128  # a row's list of keys; -1 is none

    def attend(self, q, k, v, causal=False):
        rows = torch.arange(q.shape[1], device=q.device)[:, None]
        keys = torch.arange(self.top_k, device=q.device)[None, :]
        last = rows + k.shape[1] - q.shape[1] if causal else torch.full_like(rows, k.shape[1] - 1)
        return self._call(q, k, torch.where(keys <= last, keys, -1))

    def _call(self, q, k, indices):
        import flash_mla

        out, _, lse = flash_mla.flash_mla_sparse_fwd(
            q[0], k[0], indices[:, None].int().contiguous(), self.head_dim**-0.5, self.head_dim_v
        )
        return out[None], lse
