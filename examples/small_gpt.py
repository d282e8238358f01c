"""A small byte-level GPT over rows that are padded on the left, and three ways to attend in it.

Sequences of different lengths end at the last position of their rows; what stands before their
starts is padding. A row may be nothing but padding.
"""

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import nn

import neginf


class LeftPadded:
    """Where the sequences of a batch lie.

    lengths: (batch) int32; 0 is a row of nothing but padding.
    """

    def __init__(self, lengths, seqlen):
        self.lengths, self.seqlen = lengths, seqlen
        # Of each place, how far it is from the start of its sequence; negative in padding.
        self.positions = torch.arange(seqlen, device=lengths.device) - (seqlen - lengths[:, None])
        self.padding = self.positions < 0

    @cached_property
    def keys_to_front(self):
        """(batch, seqlen): which place is read to move each sequence to the start of its row."""
        places = torch.arange(self.seqlen, device=self.lengths.device)
        return (places + self.seqlen - self.lengths[:, None]) % self.seqlen

    @cached_property
    def cu_seqlens(self):
        return F.pad(self.lengths.cumsum(0, dtype=torch.int32), (1, 0))

    @cached_property
    def real(self):
        """The places that are not padding, counted through the whole batch."""
        return (~self.padding).flatten().nonzero().squeeze(1)

    @cached_property
    def visible(self):
        """(batch, 1, seqlen, seqlen): the mask for torch. Padding sees itself, so that no row is
        without keys; what it sees reaches no other place."""
        places = torch.arange(self.seqlen, device=self.lengths.device)
        causal = places[:, None] >= places
        itself = places[:, None] == places
        return (itself | (causal & ~self.padding[:, None, :])).unsqueeze(1)


def attend_padded(q, k, v, rows):
    """Queries stay where they are, and keys move to the front, where seqused_k counts them.

    The causal mask ends at the last query and the last key in use. So a real query sees the keys up
    to its own, and the queries before the sequence's start, more than there are keys, see none.
    """
    index = rows.keys_to_front[..., None, None].expand_as(k)
    k, v = k.gather(1, index), v.gather(1, index)
    return neginf.flash_attn_func(q, k, v, causal=True, seqused_k=rows.lengths)


def attend_packed(q, k, v, rows):
    """Padding is taken out, and put back as zeros. Rows of nothing but padding have length 0."""
    q, k, v = (tensor.flatten(0, 1)[rows.real] for tensor in (q, k, v))
    out = neginf.flash_attn_varlen_func(
        q, k, v, rows.cu_seqlens, rows.cu_seqlens, rows.seqlen, rows.seqlen, causal=True
    )
    padded = out.new_zeros(rows.padding.numel(), *out.shape[1:])
    return padded.index_copy(0, rows.real, out).unflatten(0, rows.padding.shape)


def attend_sdpa(q, k, v, rows):
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=rows.visible).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x, rows, attend):
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.projection(attend(q, k, v, rows).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """forward: (batch, seqlen) bytes -> (batch, seqlen, 256) logits of the next byte."""

    def __init__(self, layers, width, heads, seqlen):
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(seqlen, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, tokens, rows, attend):
        x = self.tokens(tokens) + self.positions(rows.positions.clamp(min=0))
        for block in self.blocks:
            x = block(x, rows, attend)
        return self.head(self.norm(x))
