"""Attention over sequences, or a KV cache, that are spread over the ranks of a process group.

Not imported with neginf: it needs torch.distributed.
"""

from neginf.distributed.all_gather import all_gather_attention
from neginf.distributed.decode import decode_attention, merge_over_ranks
from neginf.distributed.ring import ring_attention
from neginf.distributed.sharding import SequenceSharding

__all__ = [
    "SequenceSharding",
    "all_gather_attention",
    "decode_attention",
    "merge_over_ranks",
    "ring_attention",
]
