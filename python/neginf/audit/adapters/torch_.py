"""PyTorch's own attention: the operators behind scaled_dot_product_attention, and FlexAttention."""

import torch

from neginf.audit.adapter import Adapter

aten = torch.ops.aten


class _HeadsFirst(Adapter):
    """Operators that take (batch, heads, seqlen, head_dim) and a bias added to the scores."""

    def attend(self, q, k, v, causal=False):
        return self._call(q, k, v, None)

    def attend_first_row_masked(self, q, k, v):
        bias = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        bias[:, :, 0] = float("-inf")
        return self._call(q, k, v, bias)

    def _call(self, q, k, v, bias):
        out, lse = self._operator(*(t.transpose(1, 2) for t in (q, k, v)), bias)
        return out.transpose(1, 2), lse


class TorchFlashCpu(_HeadsFirst):
    name = "torch flash, CPU"
    device = "cpu"
    dtype = torch.float32

    def _operator(self, q, k, v, bias):
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias)[:2]


class TorchEfficient(_HeadsFirst):
    name = "torch efficient"

    def _operator(self, q, k, v, bias):
        return aten._scaled_dot_product_efficient_attention(q, k, v, bias, True)[:2]


class TorchCudnn(_HeadsFirst):
    name = "torch cuDNN"

    def _operator(self, q, k, v, bias):
        return aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True)[:2]


class TorchFlash(Adapter):
    name = "torch FA-2"

    def attend(self, q, k, v, causal=False):
        sizes = (q.shape[1], k.shape[1])
        return aten._flash_attention_forward(q, k, v, None, None, *sizes, 0.0, causal, False)[:2]

    def attend_varlen(self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        packing = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return aten._flash_attention_forward(q, k, v, *packing, 0.0, False, False)[:2]


class TorchFlex(Adapter):
    """Not compiled: what it means, not one of its kernels."""

    name = "torch FlexAttention"
    module = "torch.nn.attention.flex_attention"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32

    def attend(self, q, k, v, causal=False):
        return self._call(q, k, v, None)

    def attend_first_row_masked(self, q, k, v):
        from torch.nn.attention.flex_attention import create_block_mask

        sizes = (q.shape[1], k.shape[1])
        mask = create_block_mask(lambda b, h, i, j: i > 0, None, None, *sizes, device=q.device)
        return self._call(q, k, v, mask)

    def _call(self, q, k, v, block_mask):
        from torch.nn.attention.flex_attention import flex_attention

        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out, lse = flex_attention(q, k, v, block_mask=block_mask, return_lse=True)
        return out.transpose(1, 2), lse
