// neginf::decode, decode_out and check_decode: attention over a cache of keys and values.
#include <ATen/MemoryOverlap.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include "torch/backend.h"
#include "torch/cache.h"
#include "torch/decode_options.h"
#include "torch/workspace.h"

namespace neginf {

namespace {

using at::Tensor;

struct Decode {
  Options options;
  CacheTables tables;
  int64_t keys_per_split;
};

// What forward and decode share is checked under decode's own names.
Shape check(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Decode& decode,
            CacheShape& cache) {
  const Options& options = decode.options;
  check_same_device({"q", q}, {{"cache_seqlens", options.seqused_k},
                               {"cu_seqlens_q", options.cu_seqlens_q},
                               {"alibi_slopes", options.alibi_slopes},
                               {"sink", options.sink}});
  check_scalars(options);
  const int64_t dim = options.is_varlen() ? 3 : 4;
  TORCH_CHECK_VALUE(
      q.dim() == dim, "q: got ", q.dim(), " dimensions; accepted are ", dim, ", ",
      options.is_varlen() ? "(total, heads, head_dim)" : "(batch, seqlen, heads, head_dim)");
  const int64_t rows = q.size(-3);
  check_size(rows, "q, number of rows");
  check_size(q.size(-2), "q, number of heads");
  const int64_t batch = options.is_varlen()
                            ? check_packing(options.cu_seqlens_q, "cu_seqlens_q",
                                            options.max_seqlen_q, "max_seqlen_q", rows)
                            : q.size(0);
  check_size(batch, "batch");
  cache = check_cache(q, k_cache, v_cache, decode.tables, batch);
  check_int32_vector(options.seqused_k, "cache_seqlens", batch);
  check_alibi_slopes(q, options.alibi_slopes, batch, q.size(-2));
  check_sink(q, options.sink, q.size(-2));
  TORCH_CHECK_VALUE(0 <= decode.keys_per_split && decode.keys_per_split < kMaxSeqlen,
                    "seqlen_k_per_split: got ", decode.keys_per_split,
                    "; accepted are integers from 1, or None");
  TORCH_CHECK_VALUE(decode.keys_per_split == 0 || options.num_splits == 0, "num_splits: got ",
                    options.num_splits, " together with seqlen_k_per_split; accepted is 0");
  const int64_t seqlen_q = options.is_varlen() ? options.max_seqlen_q->expect_int() : rows;
  return {batch,           seqlen_q,   cache.capacity,  rows, cache.capacity, q.size(-2),
          k_cache.size(2), q.size(-1), v_cache.size(-1)};
}

template <typename Real>
void run(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Decode& decode,
         const Shape& shape, const CacheShape& cache, const Tensor& out, const Tensor& lse) {
  const DType dtype = dtype_of(q, "q");
  const ReadableInputs inputs(q, k_cache, v_cache, decode.options);
  const Kernel& kernel = select_kernel(Operation::decode, q, dtype, inputs.head_dim());
  if (out.numel() == 0) return;
  const bool writes_in_place = out.size(-1) == inputs.head_dim_v() && readable(out).is_same(out);
  const Tensor target =
      writes_in_place ? out : at::empty(sizes_of_out(inputs.q, inputs.v), q.options());

  DecodeParams<Real> params{};
  set_inputs(params, shape, decode.options, inputs, lse);
  params.out = target.mutable_data_ptr();
  params.out_strides = strides_of(target);
  params.lse = lse_data<Real>(lse);
  params.num_splits = static_cast<int>(decode.options.num_splits);
  params.keys_per_split = static_cast<int>(decode.keys_per_split);
  params.cache = key_cache(cache, decode.tables);
  TensorWorkspace workspace(q);
  params.workspace = &workspace;
  launch(kernel, params);
  if (!writes_in_place) out.copy_(target.narrow(-1, 0, out.size(-1)));
}

Tensor decode_into(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                   const Decode& decode, const Shape& shape, const CacheShape& cache,
                   const Tensor& out) {
  const auto accumulate = q.options().dtype(accumulate_type(q.scalar_type()));
  const Tensor lse = decode.options.is_varlen()
                         ? at::empty({shape.num_heads, shape.total_q}, accumulate)
                         : at::empty({shape.batch, shape.num_heads, shape.seqlen_q}, accumulate);
  q.scalar_type() == at::kDouble ? run<double>(q, k_cache, v_cache, decode, shape, cache, out, lse)
                                 : run<float>(q, k_cache, v_cache, decode, shape, cache, out, lse);
  return lse;
}

std::tuple<Tensor, Tensor> decode(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                                  NEGINF_DECODE_PARAMETERS) {
  const c10::DeviceGuard guard(q.device());
  const Decode options = NEGINF_DECODE_OPTIONS;
  CacheShape cache{};
  const Shape shape = check(q, k_cache, v_cache, options, cache);
  const Tensor out = at::empty(sizes_of_out(q, v_cache), q.options());
  return {out, decode_into(q, k_cache, v_cache, options, shape, cache, out)};
}

void check_out(const Tensor& out, const Tensor& q, const Tensor& k_cache, const Tensor& v_cache) {
  check_same_device({"q", q}, {{"out", out}});
  check_dtype({"out", out}, q);
  TORCH_CHECK_VALUE(out.sizes() == sizes_of_out(q, v_cache), "out: got shape ", out.sizes(),
                    "; accepted is ", sizes_of_out(q, v_cache));
  TORCH_CHECK_VALUE(
      at::has_internal_overlap(out) != at::MemOverlap::Yes,
      "out: got a tensor whose elements share memory; accepted is one place for each");
  for (const Argument& input :
       {Argument("q", q), Argument("k_cache", k_cache), Argument("v_cache", v_cache)}) {
    const auto overlap = at::get_overlap_status(out, *input.tensor);
    TORCH_CHECK_VALUE(
        overlap != at::MemOverlapStatus::Full && overlap != at::MemOverlapStatus::Partial,
        "out: got memory of ", input.name, "; accepted is memory of its own");
  }
}

// Of all that decode and decode_out would refuse, for who writes to the cache before them.
void check_decode(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                  NEGINF_DECODE_PARAMETERS, const std::optional<Tensor>& out) {
  CacheShape cache{};
  check(q, k_cache, v_cache, NEGINF_DECODE_OPTIONS, cache);
  select_kernel(Operation::decode, q, dtype_of(q, "q"), q.size(-1));
  if (out.has_value()) check_out(*out, q, k_cache, v_cache);
}

Tensor decode_out(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                  NEGINF_DECODE_PARAMETERS, Tensor out) {
  const c10::DeviceGuard guard(q.device());
  const Decode options = NEGINF_DECODE_OPTIONS;
  CacheShape cache{};
  const Shape shape = check(q, k_cache, v_cache, options, cache);
  check_out(out, q, k_cache, v_cache);
  return decode_into(q, k_cache, v_cache, options, shape, cache, out);
}

std::tuple<Tensor, Tensor> decode_meta(const Tensor& q, const Tensor& k_cache,
                                       const Tensor& v_cache, NEGINF_DECODE_PARAMETERS) {
  const Decode options = NEGINF_DECODE_OPTIONS;
  check_cache_devices(q, k_cache, v_cache, options.tables);
  check_same_device({"q", q}, {{"cache_seqlens", cache_seqlens},
                               {"cu_seqlens_q", cu_seqlens_q},
                               {"alibi_slopes", alibi_slopes},
                               {"sink", sink}});
  check_scalars(options.options);
  const int64_t dim = options.options.is_varlen() ? 3 : 4;
  TORCH_CHECK_VALUE(q.dim() == dim, "q: got ", q.dim(), " dimensions; accepted are ", dim);
  TORCH_CHECK_VALUE(v_cache.dim() == 4, "v_cache: got ", v_cache.dim(),
                    " dimensions; accepted are 4");
  at::SymDimVector out_sizes(q.sym_sizes());
  out_sizes.back() = v_cache.sym_size(-1);
  const auto accumulate = q.options().dtype(accumulate_type(q.scalar_type()));
  const Tensor lse =
      options.options.is_varlen()
          ? at::empty_symint({q.sym_size(1), q.sym_size(0)}, accumulate)
          : at::empty_symint({q.sym_size(0), q.sym_size(2), q.sym_size(1)}, accumulate);
  return {at::empty_symint(out_sizes, q.options()), lse};
}

Tensor decode_out_meta(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                       NEGINF_DECODE_PARAMETERS, Tensor out) {
  check_same_device({"q", q}, {{"out", out}});
  return std::get<1>(decode_meta(q, k_cache, v_cache, NEGINF_DECODE_ARGUMENTS));
}

void check_decode_meta(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                       NEGINF_DECODE_PARAMETERS, const std::optional<Tensor>& out) {
  check_same_device({"q", q}, {{"out", out}});
  decode_meta(q, k_cache, v_cache, NEGINF_DECODE_ARGUMENTS);
}

}  // namespace

TORCH_LIBRARY_IMPL(neginf, CPU, m) {
  m.impl("check_decode", check_decode);
  m.impl("decode", decode);
  m.impl("decode_out", decode_out);
}
TORCH_LIBRARY_IMPL(neginf, CUDA, m) {
  m.impl("check_decode", check_decode);
  m.impl("decode", decode);
  m.impl("decode_out", decode_out);
}
TORCH_LIBRARY_IMPL(neginf, Meta, m) {
  m.impl("check_decode", check_decode_meta);
  m.impl("decode", decode_meta);
  m.impl("decode_out", decode_out_meta);
}
TORCH_LIBRARY_IMPL(neginf, ADInplaceOrView, m) {
  m.impl("decode_out", torch::autograd::autogradNotImplementedInplaceOrViewFallback());
}
TORCH_LIBRARY_IMPL(neginf, Autograd, m) {
  m.impl("decode", torch::autograd::autogradNotImplementedFallback());
  m.impl("decode_out", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace neginf
