"""How the probes call a library."""

import torch


class NotOffered(Exception):
    """The library has no such function."""


class Adapter:
    """One attention library. `name`, `module` and `attend` are required; the rest as it has it.

    Tensors come as q (batch, seqlen_q, heads, head_dim), k and v (batch, seqlen_k, heads,
    head_dim), contiguous, of `dtype` on `device`, with the sizes below. Every method returns (out,
    lse): out in the same layout as q, and lse **as the library returns it**, in its own layout and
    base; the probes find out which. An exception is a finding, so nothing needs to be caught.
    Import the library inside the methods: they run in a process of their own.
    """

    name = ""  # for the reader
    module = "torch"  # must be importable
    device = "cuda"
    dtype = torch.bfloat16
    batch = 2
    heads = 4
    head_dim = 64
    head_dim_v = None  # MLA: k has one head for all of q's, and v is its first head_dim_v columns

    def attend(self, q, k, v, causal=False):
        """Attention of q over k and v, scaled by 1 / sqrt(head_dim); causal bottom-right."""
        raise NotImplementedError

    def attend_first_row_masked(self, q, k, v):
        """The first row sees no key, all others see some. q has one row more than k."""
        return self.attend(q, k, v, causal=True)

    def attend_varlen(self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        """Of packed sequences: q (total_q, heads, head_dim), k and v likewise; int32 cu_seqlens."""
        raise NotOffered

    def attend_split(self, q, k, v, num_splits):
        """With the keys split into num_splits shares."""
        raise NotOffered

    def merge(self, outs, lses):
        """The merge of two states: outs two of (batch, seqlen, heads, head_dim), lses two of
        (batch, heads, seqlen) float32, in the library's base; the result laid out likewise."""
        raise NotOffered
