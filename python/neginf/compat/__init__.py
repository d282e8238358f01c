"""The functions of other attention libraries, under their names and with their arguments.

One module per library: :mod:`neginf.compat.flash_attn`, :mod:`neginf.compat.flashinfer` and
:mod:`neginf.compat.vllm`. What they take and return is laid out as the library lays it out; rows
without keys follow docs/contract.md.
"""
