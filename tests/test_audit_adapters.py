"""The adapters of libraries that need a GPU, against stand-ins that take the libraries' arguments.

A stand-in has the signature of the real function and computes the right attention on the CPU. So
this shows that the adapters pass and read what those functions take and return; what the libraries
themselves do, only an audit on a GPU shows.
"""

import math
import sys
import types

import pytest
import torch

import audit_adapters
import neginf
import neginf.compat.flash_attn
import neginf.compat.flashinfer
from neginf.audit import probes
from neginf.audit.adapters import flash_attn, flash_mla, flashinfer, torch_, xformers

NEG_INF = float("-inf")


def attention(q, k, v, causal=False):
    return audit_adapters.OnCpu().attend(q, k, v, causal)


def packed(q, k, v, cu_q, cu_k):
    return audit_adapters.OnCpu().attend_varlen(q, k, v, cu_q, cu_k, None, None)


def combine(out_partial, lse_partial, out=None, out_dtype=None):
    assert out_partial.dtype == lse_partial.dtype == torch.float32
    return neginf.flash_attn_combine(out_partial, lse_partial.transpose(-1, -2), out, out_dtype)


def flash_attn_2():
    functions = types.ModuleType("flash_attn")
    functions.flash_attn_func = neginf.compat.flash_attn.flash_attn_func
    functions.flash_attn_varlen_func = neginf.compat.flash_attn.flash_attn_varlen_func

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, *, num_splits=0, return_softmax_lse=False
    ):
        assert return_softmax_lse
        return neginf.flash_attn_func(q, k_cache, v_cache, num_splits=num_splits, return_lse=True)

    functions.flash_attn_with_kvcache = flash_attn_with_kvcache
    return {"flash_attn": functions}


def flash_attn_3():
    module = types.ModuleType("flash_attn_interface")

    def flash_attn_func(
        q, k, v, softmax_scale=None, causal=False, *, num_splits=1, return_attn_probs=False
    ):
        assert return_attn_probs
        return neginf.flash_attn_func(
            q, k, v, causal=causal, num_splits=num_splits, return_lse=True
        )

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
        seqused_k=None, softmax_scale=None, causal=False, *, return_attn_probs=False,
    ):  # fmt: skip
        assert return_attn_probs
        return packed(q, k, v, cu_seqlens_q, cu_seqlens_k)

    module.flash_attn_func = flash_attn_func
    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.flash_attn_combine = combine
    return {"flash_attn_interface": module}


def flash_attn_4():
    package, module, interface = (
        types.ModuleType(name)
        for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface")
    )

    def flash_attn_func(q, k, v, *, causal=False, num_splits=1, return_lse=False):
        assert return_lse
        return neginf.flash_attn_func(
            q, k, v, causal=causal, num_splits=num_splits, return_lse=True
        )

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, *,
        return_lse=False,
    ):  # fmt: skip
        assert return_lse
        return packed(q, k, v, cu_seqlens_q, cu_seqlens_k)

    module.flash_attn_func = flash_attn_func
    module.flash_attn_varlen_func = flash_attn_varlen_func
    interface.flash_attn_combine = combine
    return {m.__name__: m for m in (package, module, interface)}


def flash_infer():
    module = types.ModuleType("flashinfer")

    def base2(lse):
        return lse.T / math.log(2)

    def single_prefill_with_kv_cache(q, k, v, *, causal=False, return_lse=False):
        assert return_lse
        out, lse = attention(q[None], k[None], v[None], causal)
        return out[0], base2(lse[0])

    class BatchPrefillWithRaggedKVCacheWrapper:
        def __init__(self, float_workspace_buffer, kv_layout="NHD"):
            assert float_workspace_buffer.dtype == torch.uint8

        def plan(
            self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, *, causal,
            q_data_type,
        ):  # fmt: skip
            self.starts = qo_indptr, kv_indptr

        def run(self, q, k, v, *, return_lse=False):
            assert return_lse
            out, lse = packed(q, k, v, *self.starts)
            return out, base2(lse)

    module.single_prefill_with_kv_cache = single_prefill_with_kv_cache
    module.BatchPrefillWithRaggedKVCacheWrapper = BatchPrefillWithRaggedKVCacheWrapper
    module.merge_state = neginf.compat.flashinfer.merge_state
    return {"flashinfer": module}


def mla():
    module = types.ModuleType("flash_mla")

    def flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata,
        num_splits=None, softmax_scale=None, causal=False,
    ):  # fmt: skip
        assert block_table.dtype == cache_seqlens.dtype == torch.int32
        assert k_cache.shape[1:] == (64, 1, 576)
        results = []
        for i, length in enumerate(cache_seqlens.tolist()):
            k = k_cache[block_table[i].long()].flatten(0, 1)[None, :length]
            results.append(attention(q[i : i + 1], k, k[..., :head_dim_v], causal))
        return tuple(torch.cat(parts) for parts in zip(*results, strict=True))

    def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512):
        assert indices.dtype == torch.int32
        assert indices.shape[:2] == (q.shape[0], kv.shape[1])
        assert sm_scale == q.shape[-1] ** -0.5
        rows, heads = q.shape[:2]
        out, lse = torch.zeros(rows, heads, d_v), torch.full((rows, heads), NEG_INF)
        for i in range(rows):
            keys = kv[indices[i, 0][indices[i, 0] >= 0].long()][None]
            o, s = attention(q[None, i : i + 1], keys, keys[..., :d_v])
            out[i], lse[i] = o[0, 0], s[0, :, 0]
        return out, lse.clone(), lse

    module.get_mla_metadata = lambda: (object(), None)
    module.flash_mla_with_kvcache = flash_mla_with_kvcache
    module.flash_mla_sparse_fwd = flash_mla_sparse_fwd
    return {"flash_mla": module}


def x_formers():
    names = ("xformers", "xformers.ops", "xformers.ops.fmha", "xformers.ops.fmha.attn_bias")
    modules = {name: types.ModuleType(name) for name in names}
    fmha, attn_bias = modules[names[2]], modules[names[3]]
    modules["xformers.ops"].fmha = fmha

    class LowerTriangularFromBottomRightMask:
        pass

    class BlockDiagonalMask:
        @classmethod
        def from_seqlens(cls, q_seqlen, kv_seqlen=None):
            mask = cls()
            mask.starts = [torch.tensor([0, *n]).cumsum(0).int() for n in (q_seqlen, kv_seqlen)]
            return mask

    def memory_efficient_attention_forward_requires_grad(query, key, value, attn_bias=None):
        if isinstance(attn_bias, BlockDiagonalMask):
            out, lse = packed(query[0], key[0], value[0], *attn_bias.starts)
            return out[None], lse[None]
        return attention(query, key, value, attn_bias is not None)

    fmha.memory_efficient_attention_forward_requires_grad = (
        memory_efficient_attention_forward_requires_grad
    )
    fmha.merge_attentions = neginf.flash_attn_combine
    attn_bias.LowerTriangularFromBottomRightMask = LowerTriangularFromBottomRightMask
    attn_bias.BlockDiagonalMask = BlockDiagonalMask
    return modules


ADAPTERS = {
    flash_attn.FlashAttention2: (flash_attn_2, "ln, (batch, heads, seqlen)", "(heads, tokens)"),
    flash_attn.FlashAttention3: (flash_attn_3, "ln, (batch, heads, seqlen)", "(heads, tokens)"),
    flash_attn.FlashAttention4: (flash_attn_4, "ln, (batch, heads, seqlen)", "(heads, tokens)"),
    flashinfer.FlashInfer: (flash_infer, "log2, (tokens, heads)", "(tokens, heads)"),
    flash_mla.FlashMlaDecode: (mla, "ln, (batch, heads, seqlen)", None),
    flash_mla.FlashMlaSparse: (mla, "ln, (tokens, heads)", None),
    xformers.XFormers: (x_formers, "ln, (batch, heads, seqlen)", "(1, heads, tokens)"),
}


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda a: a.name)
def test_adapter(adapter, monkeypatch):
    stand_in, lse, packed_layout = ADAPTERS[adapter]
    for name, module in stand_in().items():
        monkeypatch.setitem(sys.modules, name, module)
    on_cpu = type(adapter.__name__, (adapter,), {"device": "cpu", "dtype": torch.float32})
    findings = {name: probes.run(name, on_cpu()) for name in probes.NAMES}
    assert findings["lse"].text == lse
    for probe in ("masked_row", "no_keys"):
        assert findings[probe] == ("out 0, lse -inf", True)
    for probe in ("nan_score", "nan_row"):
        assert findings[probe] == ("out NaN, lse NaN", True)
    varlen = findings["zero_length_sequence"]
    assert varlen.text == (f"out 0, lse -inf; {packed_layout}" if packed_layout else "-")
    assert findings["split"].text in ("-", "equal; NaN: out NaN, lse NaN")
    assert findings["merge_of_empties"].text in ("-", "out 0, lse -inf")
    assert findings["plus_infinity"].text == "-" or findings["plus_infinity"].conforms
    has_merge = adapter.merge is not audit_adapters.Adapter.merge
    assert (findings["merge_of_empties"].text != "-") == has_merge


@pytest.mark.parametrize(
    "operator",
    [
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_flash_attention_forward",
    ],
)
def test_torch_operators_take_what_their_adapters_pass(operator, monkeypatch):
    """On fake tensors: the schema accepts the arguments, and the first two results are out, lse."""
    schema = getattr(torch.ops.aten, operator).default._schema
    names = [result.name for result in schema.returns]
    assert names[0] == "output"
    assert "log" in names[1]
    adapter = {
        "_scaled_dot_product_efficient_attention": torch_.TorchEfficient,
        "_scaled_dot_product_cudnn_attention": torch_.TorchCudnn,
        "_flash_attention_forward": torch_.TorchFlash,
    }[operator]
    q = torch.empty(2, 16, 4, 64, device="meta", dtype=torch.bfloat16)
    out, lse = adapter().attend(q, q, q)
    assert out.shape == q.shape
    assert lse.shape[:2] == (2, 4)
