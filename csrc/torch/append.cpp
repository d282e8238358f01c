// neginf::append: new keys and values go into a cache, rotated if asked for, as the queries are.
#include <ATen/MemoryOverlap.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include "torch/backend.h"
#include "torch/cache.h"

namespace neginf {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

void check_devices(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cache_seqlens,
                   const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k_new,
                   const OptionalTensor& rotary_cos, const OptionalTensor& rotary_sin,
                   const OptionalTensor& rotary_seqlens) {
  check_same_device({"q", q}, {{"k", k},
                               {"v", v},
                               {"cache_seqlens", cache_seqlens},
                               {"cu_seqlens_q", cu_seqlens_q},
                               {"cu_seqlens_k_new", cu_seqlens_k_new},
                               {"rotary_cos", rotary_cos},
                               {"rotary_sin", rotary_sin},
                               {"rotary_seqlens", rotary_seqlens}});
  check_dtype({"k", k}, q);
  check_dtype({"v", v}, q);
  TORCH_CHECK_VALUE(rotary_cos.has_value() == rotary_sin.has_value(),
                    "rotary_cos, rotary_sin: got only one; accepted are both or neither");
  if (rotary_cos.has_value()) {
    check_dtype({"rotary_cos", rotary_cos}, q);
    check_dtype({"rotary_sin", rotary_sin}, q);
  } else {
    TORCH_CHECK_VALUE(!rotary_seqlens.has_value(),
                      "rotary_seqlens: got a tensor without rotary_cos; accepted is None");
  }
}

void check_rotary(const Tensor& cos, const Tensor& sin, int64_t head_dim) {
  TORCH_CHECK_VALUE(
      cos.dim() == 2 && cos.size(0) >= 1 && cos.size(1) >= 1 && 2 * cos.size(1) <= head_dim,
      "rotary_cos: got shape ", cos.sizes(),
      "; accepted is [positions, rotary_dim / 2] with a rotary_dim from 2 to head_dim, ", head_dim);
  TORCH_CHECK_VALUE(sin.sizes() == cos.sizes(), "rotary_sin: got shape ", sin.sizes(),
                    "; accepted is that of rotary_cos, ", cos.sizes());
}

// New keys and values: as q, but for heads and, if they are packed otherwise, rows.
void check_new(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
               bool is_packed, int64_t batch) {
  const int64_t dim = is_packed ? 3 : 4;
  for (const auto& [name, tensor, cache] :
       {std::tuple("k", &k, &k_cache), std::tuple("v", &v, &v_cache)}) {
    TORCH_CHECK_VALUE(tensor->dim() == dim, name, ": got ", tensor->dim(),
                      " dimensions; accepted are ", dim);
    TORCH_CHECK_VALUE(tensor->size(-2) == cache->size(-2) && tensor->size(-1) == cache->size(-1),
                      name, ": got shape ", tensor->sizes(),
                      "; accepted are the heads and the "
                      "head_dim of the cache, ",
                      cache->sizes());
    TORCH_CHECK_VALUE(is_packed || tensor->size(0) == batch, name, ": got batch ", tensor->size(0),
                      "; accepted is that of q, ", batch);
  }
  TORCH_CHECK_VALUE(k.size(-3) == v.size(-3), "v: got ", v.size(-3),
                    " rows; accepted are as many as k has, ", k.size(-3));
  check_size(k.size(-3), "k, number of rows");
}

// In place: nothing may be copied that has to be written.
void check_writable(const Argument& cache, std::initializer_list<Argument> inputs) {
  TORCH_CHECK_VALUE(cache.tensor->stride(-1) == 1 || cache.tensor->size(-1) == 1, cache.name,
                    ": got last stride ", cache.tensor->stride(-1), "; accepted is 1");
  TORCH_CHECK_VALUE(at::has_internal_overlap(*cache.tensor) != at::MemOverlap::Yes, cache.name,
                    ": got a tensor whose elements share memory; accepted is one place for each");
  for (const Argument& input : inputs) {
    const auto overlap = at::get_overlap_status(*cache.tensor, *input.tensor);
    TORCH_CHECK_VALUE(
        overlap != at::MemOverlapStatus::Full && overlap != at::MemOverlapStatus::Partial,
        cache.name, ": got memory of ", input.name, "; accepted is memory of its own");
  }
}

Tensor with_last_stride_1(const Tensor& tensor) {
  return tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
}

#define NEGINF_APPEND_PARAMETERS                                                     \
  const Tensor &q, const Tensor &k, const Tensor &v, Tensor k_cache, Tensor v_cache, \
      const Tensor &cache_seqlens, const OptionalTensor &page_table,                 \
      const OptionalTensor &cache_batch_idx, const OptionalTensor &cu_seqlens_q,     \
      const OptionalTensor &cu_seqlens_k_new, const OptionalTensor &rotary_cos,      \
      const OptionalTensor &rotary_sin, const OptionalTensor &rotary_seqlens,        \
      bool rotary_interleaved, bool advances_q

std::tuple<Tensor, Tensor> append(NEGINF_APPEND_PARAMETERS) {
  const c10::DeviceGuard guard(q.device());
  check_devices(q, k, v, cache_seqlens, cu_seqlens_q, cu_seqlens_k_new, rotary_cos, rotary_sin,
                rotary_seqlens);
  const bool is_packed_q = cu_seqlens_q.has_value();
  TORCH_CHECK_VALUE(q.dim() == (is_packed_q ? 3 : 4), "q: got ", q.dim(),
                    " dimensions; accepted are ", is_packed_q ? 3 : 4);
  const int64_t batch = is_packed_q ? cu_seqlens_q->size(0) - 1 : q.size(0);
  const CacheTables tables{page_table, cache_batch_idx, std::nullopt};
  const CacheShape shape = check_cache(q, k_cache, v_cache, tables, batch);
  check_new(k, v, k_cache, v_cache, cu_seqlens_k_new.has_value(), batch);
  check_int32_vector(cache_seqlens, "cache_seqlens", batch);
  check_int32_vector(cu_seqlens_q, "cu_seqlens_q", batch + 1);
  check_int32_vector(cu_seqlens_k_new, "cu_seqlens_k_new", batch + 1);
  check_int32_vector(rotary_seqlens, "rotary_seqlens", batch);
  if (rotary_cos.has_value()) check_rotary(*rotary_cos, *rotary_sin, q.size(-1));
  check_writable({"k_cache", k_cache}, {{"k", k}, {"v", v}, {"v_cache", v_cache}});
  check_writable({"v_cache", v_cache}, {{"k", k}, {"v", v}});

  const Tensor q_in = with_last_stride_1(q), k_in = with_last_stride_1(k),
               v_in = with_last_stride_1(v);
  const Tensor seqlens = at::empty({batch}, cache_seqlens.options());
  const Tensor rotated =
      rotary_cos.has_value() ? at::empty(q.sizes(), q.options()) : at::empty({0}, q.options());
  AppendParams params{};
  params.batch = static_cast<int>(batch);
  params.num_heads = static_cast<int>(q.size(-2));
  params.num_heads_k = static_cast<int>(k_cache.size(-2));
  params.head_dim = static_cast<int>(q.size(-1));
  params.head_dim_v = static_cast<int>(v_cache.size(-1));
  params.total_q = q.size(-3);
  params.total_new = k.size(-3);
  const auto int_data = [](const OptionalTensor& tensor) {
    return tensor.has_value() ? tensor->const_data_ptr<int>() : nullptr;
  };
  params.cu_seqlens_q = int_data(cu_seqlens_q);
  params.cu_seqlens_new = int_data(cu_seqlens_k_new);
  params.q = q_in.const_data_ptr();
  params.k = k_in.const_data_ptr();
  params.v = v_in.const_data_ptr();
  params.q_strides = strides_of(q_in);
  params.k_strides = strides_of(k_in);
  params.v_strides = strides_of(v_in);
  Tensor cos, sin;
  if (rotary_cos.has_value()) {
    cos = with_last_stride_1(*rotary_cos);
    sin = with_last_stride_1(*rotary_sin);
    params.rotary_dim = static_cast<int>(2 * cos.size(1));
    params.interleaved = rotary_interleaved;
    params.advances_q = advances_q;
    params.cos = cos.const_data_ptr();
    params.sin = sin.const_data_ptr();
    params.num_positions = cos.size(0);
    params.cos_stride = cos.stride(0);
    params.sin_stride = sin.stride(0);
    params.rotated_q = rotated.mutable_data_ptr();
    params.rotated_q_strides = strides_of(rotated);
    params.rotary_seqlens = int_data(rotary_seqlens);
  }
  params.k_cache = k_cache.mutable_data_ptr();
  params.v_cache = v_cache.mutable_data_ptr();
  params.k_cache_strides = strides_of(k_cache);
  params.v_cache_strides = strides_of(v_cache);
  params.cache = key_cache(shape, tables);
  params.cache_seqlens = cache_seqlens.const_data_ptr<int>();
  params.seqlens = seqlens.mutable_data_ptr<int>();
  params.stream = current_stream(q);
  launch(select_kernel(Operation::append, q, dtype_of(q, "q"), q.size(-1)), params);
  return {rotated, seqlens};
}

std::tuple<Tensor, Tensor> append_meta(NEGINF_APPEND_PARAMETERS) {
  (void)rotary_interleaved, (void)advances_q;
  check_devices(q, k, v, cache_seqlens, cu_seqlens_q, cu_seqlens_k_new, rotary_cos, rotary_sin,
                rotary_seqlens);
  check_cache_devices(q, k_cache, v_cache, {page_table, cache_batch_idx, std::nullopt});
  const Tensor rotated = rotary_cos.has_value() ? at::empty_symint(q.sym_sizes(), q.options())
                                                : at::empty({0}, q.options());
  return {rotated, at::empty_symint(cache_seqlens.sym_sizes(), cache_seqlens.options())};
}

}  // namespace

TORCH_LIBRARY_IMPL(neginf, CPU, m) { m.impl("append", append); }
TORCH_LIBRARY_IMPL(neginf, CUDA, m) { m.impl("append", append); }
TORCH_LIBRARY_IMPL(neginf, Meta, m) { m.impl("append", append_meta); }
TORCH_LIBRARY_IMPL(neginf, ADInplaceOrView, m) {
  m.impl("append", torch::autograd::autogradNotImplementedInplaceOrViewFallback());
}
TORCH_LIBRARY_IMPL(neginf, Autograd, m) {
  m.impl("append", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace neginf
