#include "torch/inputs.h"

#include <ATen/ops/constant_pad_nd.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "torch/backend.h"

namespace neginf {

namespace {

using OptionalTensor = std::optional<at::Tensor>;

// Values can be read without a synchronisation only on the CPU; kernels clamp them elsewhere.
void check_cu_seqlens_values(const at::Tensor& cu_seqlens, const char* argument, int64_t total,
                             int64_t max_seqlen, const char* max_argument) {
  if (!cu_seqlens.is_cpu()) return;
  const int* values = cu_seqlens.const_data_ptr<int>();
  const int64_t batch = cu_seqlens.size(0) - 1;
  TORCH_CHECK_VALUE(values[0] == 0, argument, ": got ", values[0], " first; accepted is 0");
  int64_t longest = 0;
  for (int64_t i = 0; i < batch; ++i) {
    TORCH_CHECK_VALUE(values[i] <= values[i + 1], argument, ": got ", values[i], " followed by ",
                      values[i + 1], " at index ", i + 1, "; accepted are values that never fall");
    longest = std::max<int64_t>(longest, values[i + 1] - values[i]);
  }
  TORCH_CHECK_VALUE(values[batch] <= total, argument, ": got ", values[batch],
                    " last; accepted is at most the number of tokens, ", total);
  TORCH_CHECK_VALUE(longest <= max_seqlen, max_argument, ": got ", max_seqlen,
                    "; accepted is at least the longest sequence, ", longest);
}

void check_seqused_values(const OptionalTensor& seqused, const char* argument, int64_t seqlen,
                          const OptionalTensor& cu_seqlens) {
  if (!seqused.has_value() || !seqused->is_cpu()) return;
  const int* values = seqused->const_data_ptr<int>();
  const int* starts = cu_seqlens.has_value() ? cu_seqlens->const_data_ptr<int>() : nullptr;
  for (int64_t i = 0; i < seqused->size(0); ++i) {
    const int64_t length = starts == nullptr ? seqlen : starts[i + 1] - starts[i];
    TORCH_CHECK_VALUE(0 <= values[i] && values[i] <= length, argument, ": got ", values[i],
                      " at index ", i, "; accepted are 0 to the sequence's length, ", length);
  }
}

void check_sizes(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                 const Options& options) {
  const int64_t dim = options.is_varlen() ? 3 : 4;
  const char* layout =
      options.is_varlen() ? "(total, heads, head_dim)" : "(batch, seqlen, heads, head_dim)";
  const std::pair<const at::Tensor*, const char*> arguments[] = {{&q, "q"}, {&k, "k"}, {&v, "v"}};
  for (const auto& [tensor, argument] : arguments) {
    TORCH_CHECK_VALUE(tensor->dim() == dim, argument, ": got ", tensor->dim(),
                      " dimensions; accepted are ", dim, ", ", layout);
  }
  TORCH_CHECK_VALUE(k.sizes().slice(0, dim - 1) == v.sizes().slice(0, dim - 1), "v: got shape ",
                    v.sizes(), "; accepted is the shape of k, ", k.sizes(), ", up to head_dim");
  TORCH_CHECK_VALUE(q.size(-1) == k.size(-1), "k: got head_dim ", k.size(-1),
                    "; accepted is the head_dim of q, ", q.size(-1));
  TORCH_CHECK_VALUE(1 <= q.size(-1) && q.size(-1) <= kMaxHeadDim, "q: got head_dim ", q.size(-1),
                    "; accepted are 1 to ", kMaxHeadDim);
  check_head_dim_v(q.size(-1), v.size(-1));
  TORCH_CHECK_VALUE(q.size(-2) >= 1 && k.size(-2) >= 1 && q.size(-2) % k.size(-2) == 0, "q: got ",
                    q.size(-2), " heads; accepted is a positive multiple of the ", k.size(-2),
                    " heads of k");
  if (!options.is_varlen()) {
    TORCH_CHECK_VALUE(q.size(0) == k.size(0), "k: got batch ", k.size(0),
                      "; accepted is the batch of q, ", q.size(0));
  }
}

bool is_aligned_for_gpu(const at::Tensor& tensor) {
  const int64_t elements = 16 / tensor.element_size();
  for (int64_t d = 0; d + 1 < tensor.dim(); ++d) {
    if (tensor.size(d) > 1 && tensor.stride(d) % elements != 0) return false;
  }
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
}

// A side that no row comes to the end of is as good as unbounded, and cheaper. `most` is what it
// would have to leave out: keys on the left, rows on the right.
int window_side(int64_t side, int64_t most) {
  return side < 0 || side >= most ? -1 : static_cast<int>(side);
}

}  // namespace

at::ScalarType accumulate_type(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

void check_int32_vector(const std::optional<at::Tensor>& tensor, const char* argument,
                        int64_t size) {
  if (!tensor.has_value()) return;
  TORCH_CHECK_TYPE(tensor->scalar_type() == at::kInt, argument, ": got dtype ",
                   tensor->scalar_type(), "; accepted is int32");
  TORCH_CHECK_VALUE(tensor->dim() == 1 && tensor->size(0) == size && tensor->is_contiguous(),
                    argument, ": got shape ", tensor->sizes(), " with strides ", tensor->strides(),
                    "; accepted is a contiguous tensor of shape [", size, "]");
}

void check_size(int64_t size, const char* what) {
  TORCH_CHECK_VALUE(size < kMaxSeqlen, what, ": got ", size, "; accepted is less than 2^30");
}

void check_q_dtype(const at::Tensor& q) {
  const bool half = q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16;
  const bool single_or_double = q.scalar_type() == at::kFloat || q.scalar_type() == at::kDouble;
  TORCH_CHECK_TYPE(half || (single_or_double && !q.is_cuda()), "q: got dtype ", q.scalar_type(),
                   " on ", q.device(),
                   "; accepted are float16 and bfloat16, and on the CPU float32 and float64");
}

void check_dtype(const Argument& argument, const at::Tensor& q) {
  TORCH_CHECK_TYPE(argument.tensor->scalar_type() == q.scalar_type(), argument.name, ": got dtype ",
                   argument.tensor->scalar_type(), "; accepted is the dtype of q, ",
                   q.scalar_type());
}

void check_scalars(const Options& options) {
  if (options.softmax_scale.has_value()) {
    // Written so that NaN fails too.
    const bool good = *options.softmax_scale >= std::numeric_limits<float>::min() &&
                      *options.softmax_scale <= std::numeric_limits<float>::max();
    TORCH_CHECK_VALUE(good, "softmax_scale: got ", *options.softmax_scale,
                      "; accepted are float32 values above 0, or None for 1/sqrt(head_dim)");
  }
  const bool good_softcap =
      options.softcap == 0 || (options.softcap >= std::numeric_limits<float>::min() &&
                               options.softcap <= std::numeric_limits<float>::max());
  TORCH_CHECK_VALUE(good_softcap, "softcap: got ", options.softcap,
                    "; accepted are float32 values above 0, or 0 for none");
  TORCH_CHECK_VALUE(options.window_left >= -1 && options.window_right >= -1, "window_size: got (",
                    options.window_left, ", ", options.window_right,
                    "); accepted are values from 0, or -1 for unbounded");
  TORCH_CHECK_VALUE(0 <= options.num_splits && options.num_splits <= kMaxSplits, "num_splits: got ",
                    options.num_splits, "; accepted are 0 (automatic) to ", kMaxSplits);
}

void check_alibi_slopes(const at::Tensor& q, const OptionalTensor& slopes, int64_t batch,
                        int64_t num_heads) {
  if (!slopes.has_value()) return;
  const at::ScalarType expected = accumulate_type(q.scalar_type());
  TORCH_CHECK_TYPE(slopes->scalar_type() == expected, "alibi_slopes: got dtype ",
                   slopes->scalar_type(), "; accepted is ", expected);
  const bool per_head = slopes->dim() == 1 && slopes->size(0) == num_heads;
  const bool per_batch =
      slopes->dim() == 2 && slopes->size(0) == batch && slopes->size(1) == num_heads;
  TORCH_CHECK_VALUE(per_head || per_batch, "alibi_slopes: got shape ", slopes->sizes(),
                    "; accepted are [", num_heads, "] and [", batch, ", ", num_heads, "]");
}

void check_sink(const at::Tensor& q, const OptionalTensor& sink, int64_t num_heads) {
  if (!sink.has_value()) return;
  const at::ScalarType accumulate = accumulate_type(q.scalar_type());
  TORCH_CHECK_TYPE(sink->scalar_type() == accumulate || sink->scalar_type() == q.scalar_type(),
                   "sink: got dtype ", sink->scalar_type(), "; accepted are ", accumulate, " and ",
                   q.scalar_type());
  TORCH_CHECK_VALUE(sink->dim() == 1 && sink->size(0) == num_heads, "sink: got shape ",
                    sink->sizes(), "; accepted is [", num_heads, "]");
}

int64_t check_packing(const OptionalTensor& cu_seqlens, const char* argument,
                      const std::optional<c10::SymInt>& max_seqlen, const char* max_argument,
                      int64_t total) {
  TORCH_CHECK_VALUE(cu_seqlens->dim() == 1 && cu_seqlens->size(0) >= 1, argument, ": got shape ",
                    cu_seqlens->sizes(), "; accepted is [batch + 1]");
  const int64_t batch = cu_seqlens->size(0) - 1;
  check_int32_vector(cu_seqlens, argument, batch + 1);
  TORCH_CHECK_VALUE(max_seqlen.has_value(), max_argument,
                    ": got None; accepted are integers from 0");
  const int64_t longest = max_seqlen->expect_int();
  TORCH_CHECK_VALUE(longest >= 0, max_argument, ": got ", longest,
                    "; accepted are integers from 0");
  check_size(longest, max_argument);
  check_cu_seqlens_values(*cu_seqlens, argument, total, longest, max_argument);
  return batch;
}

void check_without_sizes(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const Options& options) {
  check_same_device({"q", q}, {{"k", k},
                               {"v", v},
                               {"cu_seqlens_q", options.cu_seqlens_q},
                               {"cu_seqlens_k", options.cu_seqlens_k},
                               {"seqused_q", options.seqused_q},
                               {"seqused_k", options.seqused_k},
                               {"alibi_slopes", options.alibi_slopes},
                               {"sink", options.sink}});
  check_dtype({"k", k}, q);
  check_dtype({"v", v}, q);
  check_q_dtype(q);
  check_scalars(options);
}

void check_same_device(const Argument& reference, std::initializer_list<Argument> others) {
  const auto check_is_tensor = [](const Argument& argument) {
    TORCH_CHECK_TYPE(argument.tensor->defined(), argument.name, ": got None; accepted is a tensor");
  };
  check_is_tensor(reference);
  const at::Device device = reference.tensor->device();
  for (const Argument& other : others) {
    if (other.tensor == nullptr) continue;
    check_is_tensor(other);
    TORCH_CHECK_VALUE(other.tensor->device() == device, other.name, ": got a tensor on ",
                      other.tensor->device(), "; accepted is the device of ", reference.name, ", ",
                      device);
  }
}

void check_head_dim_v(int64_t head_dim, int64_t head_dim_v) {
  TORCH_CHECK_VALUE(1 <= head_dim_v && head_dim_v <= head_dim, "v: got head_dim ", head_dim_v,
                    "; accepted are 1 to the head_dim of q, ", head_dim);
}

Shape check_inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                   const Options& options) {
  check_without_sizes(q, k, v, options);
  TORCH_CHECK_VALUE(options.cu_seqlens_q.has_value() == options.cu_seqlens_k.has_value(),
                    "cu_seqlens_q, cu_seqlens_k: got only one; accepted are both or neither");
  check_sizes(q, k, v, options);

  const int64_t rows_q = q.size(-3);
  const int64_t rows_k = k.size(-3);
  check_size(rows_q, "q, number of rows");
  check_size(rows_k, "k, number of rows");
  check_size(q.size(-2), "q, number of heads");
  Shape shape{q.size(0),  rows_q,     rows_k,     rows_q,    rows_k,
              q.size(-2), k.size(-2), q.size(-1), v.size(-1)};
  if (options.is_varlen()) {
    shape.batch = check_packing(options.cu_seqlens_q, "cu_seqlens_q", options.max_seqlen_q,
                                "max_seqlen_q", rows_q);
    check_int32_vector(options.cu_seqlens_k, "cu_seqlens_k", shape.batch + 1);
    check_packing(options.cu_seqlens_k, "cu_seqlens_k", options.max_seqlen_k, "max_seqlen_k",
                  rows_k);
    shape.seqlen_q = options.max_seqlen_q->expect_int();
    shape.seqlen_k = options.max_seqlen_k->expect_int();
  }
  check_size(shape.batch, "batch");
  check_int32_vector(options.seqused_q, "seqused_q", shape.batch);
  check_int32_vector(options.seqused_k, "seqused_k", shape.batch);
  check_seqused_values(options.seqused_q, "seqused_q", rows_q, options.cu_seqlens_q);
  check_seqused_values(options.seqused_k, "seqused_k", rows_k, options.cu_seqlens_k);
  check_alibi_slopes(q, options.alibi_slopes, shape.batch, shape.num_heads);
  check_sink(q, options.sink, shape.num_heads);
  return shape;
}

at::DimVector sizes_of_out(const at::Tensor& q, const at::Tensor& v) {
  at::DimVector sizes(q.sizes());
  sizes.back() = v.size(-1);
  return sizes;
}

at::Tensor readable(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
  const int64_t padding = (8 - tensor.size(-1) % 8) % 8;
  if (padding != 0) return at::constant_pad_nd(tensor, {0, padding}).contiguous();
  if (tensor.stride(-1) == 1 && is_aligned_for_gpu(tensor)) return tensor;
  return tensor.clone(at::MemoryFormat::Contiguous);
}

Strides strides_of(const at::Tensor& tensor) {
  return {tensor.dim() == 4 ? tensor.stride(0) : 0, tensor.stride(-3), tensor.stride(-2)};
}

LseStrides lse_strides_of(const at::Tensor& lse) {
  return {lse.dim() == 3 ? lse.stride(0) : 0, lse.stride(-2)};
}

ReadableInputs::ReadableInputs(const at::Tensor& q_in, const at::Tensor& k_in,
                               const at::Tensor& v_in, const Options& options)
    : q(readable(q_in)), k(readable(k_in)), v(readable(v_in)) {
  if (options.alibi_slopes.has_value()) alibi_slopes = options.alibi_slopes->contiguous();
  if (options.sink.has_value()) {
    sink = options.sink->to(accumulate_type(q_in.scalar_type())).contiguous();
  }
}

template <typename Real>
void set_inputs(AttentionInputs<Real>& inputs, const Shape& shape, const Options& options,
                const ReadableInputs& tensors, const at::Tensor& lse) {
  const auto int_data = [](const OptionalTensor& tensor) {
    return tensor.has_value() ? tensor->const_data_ptr<int>() : nullptr;
  };
  const auto real_data = [](const OptionalTensor& tensor) {
    return tensor.has_value() ? tensor->const_data_ptr<Real>() : nullptr;
  };
  Problem<Real>& problem = inputs.problem;
  problem.batch = static_cast<int>(shape.batch);
  problem.num_heads = static_cast<int>(shape.num_heads);
  problem.num_heads_k = static_cast<int>(shape.num_heads_k);
  problem.head_dim = static_cast<int>(tensors.head_dim());
  problem.head_dim_v = static_cast<int>(tensors.head_dim_v());
  problem.seqlen_q = static_cast<int>(shape.seqlen_q);
  problem.seqlen_k = static_cast<int>(shape.seqlen_k);
  problem.total_q = shape.total_q;
  problem.total_k = shape.total_k;
  problem.cu_seqlens_q = int_data(options.cu_seqlens_q);
  problem.cu_seqlens_k = int_data(options.cu_seqlens_k);
  problem.seqused_q = int_data(options.seqused_q);
  problem.seqused_k = int_data(options.seqused_k);
  // The default goes by the caller's head_dim, not by the padded one.
  problem.softmax_scale = static_cast<Real>(
      options.softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(shape.head_dim))));
  problem.softcap = static_cast<Real>(options.softcap);
  problem.window_left = window_side(options.window_left, shape.total_k);
  problem.window_right = options.causal ? 0 : window_side(options.window_right, shape.total_q);
  problem.alibi_slopes = real_data(tensors.alibi_slopes);
  problem.alibi_batch_stride =
      tensors.alibi_slopes.has_value() && tensors.alibi_slopes->dim() == 2 ? shape.num_heads : 0;
  problem.sink = real_data(tensors.sink);

  inputs.q = tensors.q.const_data_ptr();
  inputs.k = tensors.k.const_data_ptr();
  inputs.v = tensors.v.const_data_ptr();
  inputs.q_strides = strides_of(tensors.q);
  inputs.k_strides = strides_of(tensors.k);
  inputs.v_strides = strides_of(tensors.v);
  inputs.lse_strides = lse_strides_of(lse);
  inputs.num_sms = num_sms(tensors.q);
  inputs.stream = current_stream(tensors.q);
}

template <typename Real>
BasicLse<Real>* lse_data(const at::Tensor& tensor) {
  return reinterpret_cast<BasicLse<Real>*>(tensor.data_ptr<Real>());
}

template <typename Real>
void check_public_values(const at::Tensor& lse, const char* argument) {
  const at::Tensor values = lse.contiguous();
  const Real* data = values.const_data_ptr<Real>();
  for (int64_t i = 0; i < values.numel(); ++i) {
    TORCH_CHECK_VALUE(may_be_public(data[i]), argument,
                      ": got +inf; accepted are finite values, NaN, and -inf for a row without "
                      "keys. FlashAttention-2, FlashMLA and torch's flash attention mark such rows "
                      "by +inf; neginf.convert.from_fa2 and its like tell them from NaN");
  }
}

template void check_public_values<float>(const at::Tensor&, const char*);
template void check_public_values<double>(const at::Tensor&, const char*);
template void set_inputs(AttentionInputs<float>&, const Shape&, const Options&,
                         const ReadableInputs&, const at::Tensor&);
template void set_inputs(AttentionInputs<double>&, const Shape&, const Options&,
                         const ReadableInputs&, const at::Tensor&);
template BasicLse<float>* lse_data(const at::Tensor&);
template BasicLse<double>* lse_data(const at::Tensor&);

}  // namespace neginf
