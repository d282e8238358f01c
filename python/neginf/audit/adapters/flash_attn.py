"""FlashAttention-2, -3 and -4."""

import importlib

import torch

from neginf.audit.adapter import Adapter


class _FlashAttention(Adapter):
    options = {}  # noqa: RUF012, makes the functions return lse

    def attend(self, q, k, v, causal=False):
        return self._functions().flash_attn_func(q, k, v, causal=causal, **self.options)[:2]

    def attend_varlen(self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        return self._functions().flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, **self.options,
        )[:2]  # fmt: skip

    def _functions(self):
        return importlib.import_module(self.module)


class FlashAttention2(_FlashAttention):
    name = "FlashAttention-2"
    module = "flash_attn_2_cuda"
    options = {"return_attn_probs": True}  # noqa: RUF012

    def attend_split(self, q, k, v, num_splits):
        return self._functions().flash_attn_with_kvcache(
            q, k, v, num_splits=num_splits, return_softmax_lse=True
        )

    def _functions(self):
        return importlib.import_module("flash_attn")


class _WithSplits(_FlashAttention):
    def attend_split(self, q, k, v, num_splits):
        function = self._functions().flash_attn_func
        return function(q, k, v, num_splits=num_splits, **self.options)[:2]

    def merge(self, outs, lses):
        """The splits' lse is laid out (splits, batch, seqlen, heads), out in float32."""
        partial = torch.stack(outs).float(), torch.stack(lses).transpose(-1, -2)
        return self._combine()(*partial, out_dtype=self.dtype)[:2]

    def _combine(self):
        return self._functions().flash_attn_combine


class FlashAttention3(_WithSplits):
    name = "FlashAttention-3"
    module = "flash_attn_interface"
    options = {"return_attn_probs": True}  # noqa: RUF012


class FlashAttention4(_WithSplits):
    name = "FlashAttention-4"
    module = "flash_attn.cute"
    options = {"return_lse": True}  # noqa: RUF012

    def _combine(self):
        return importlib.import_module("flash_attn.cute.interface").flash_attn_combine
