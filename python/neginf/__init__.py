"""Attention whose log-sum-exp can be trusted: a row that sees no key has L = ln 0 = -inf."""

from neginf import convert
from neginf.attention import flash_attn_func, flash_attn_varlen_func
from neginf.backends import backend, backends
from neginf.cascade import (
    CascadeLevel,
    cascade_attention,
    chunked_attention,
    shared_prefix_attention,
)
from neginf.kvcache import flash_attn_with_kvcache
from neginf.merge import (
    apply_sink,
    flash_attn_combine,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from neginf.ops import build_info

__version__ = build_info()["version"]

__all__ = [
    "CascadeLevel",
    "apply_sink",
    "backend",
    "backends",
    "cascade_attention",
    "chunked_attention",
    "convert",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "shared_prefix_attention",
]
