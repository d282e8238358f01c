// Checks of what the caller passed, and its translation into params. Everything here runs before
// any kernel: bad input ends in a Python exception that names the argument, what was got and what
// is accepted, and nothing has been written.
#pragma once

#include <initializer_list>

#include "params.h"
#include "torch/options.h"

namespace neginf {

// Sizes of the attention problem, once checked.
struct Shape {
  int64_t batch;
  int64_t seqlen_q, seqlen_k;  // dense: the sizes; varlen: max_seqlen_q and max_seqlen_k
  int64_t total_q, total_k;    // rows per batch entry: dense seqlen, varlen total
  int64_t num_heads, num_heads_k;
  int64_t head_dim, head_dim_v;  // of q and k; of v and out
};

constexpr int64_t kMaxSplits = 256;

// A tensor and the name the caller knows it by; null when it was not passed.
struct Argument {
  const char* name;
  const at::Tensor* tensor;

  Argument(const char* name, const at::Tensor& tensor) : name(name), tensor(&tensor) {}
  Argument(const char* name, const std::optional<at::Tensor>& tensor)
      : name(name), tensor(tensor.has_value() ? &*tensor : nullptr) {}
};

// A mix of devices reaches whichever implementation the dispatcher finds first, the one for fake
// tensors included, so each of them asks.
void check_same_device(const Argument& reference, std::initializer_list<Argument> others);
// What can be checked of fake tensors, whose sizes may be symbols: devices, dtypes and scalars.
void check_without_sizes(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const Options& options);

Shape check_inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                   const Options& options);

// Parts of check_inputs, for operators whose keys and values come otherwise.
void check_q_dtype(const at::Tensor& q);
void check_dtype(const Argument& argument, const at::Tensor& q);
void check_scalars(const Options& options);
void check_size(int64_t size, const char* what);
void check_int32_vector(const std::optional<at::Tensor>& tensor, const char* argument,
                        int64_t size);
void check_head_dim_v(int64_t head_dim, int64_t head_dim_v);
void check_alibi_slopes(const at::Tensor& q, const std::optional<at::Tensor>& slopes, int64_t batch,
                        int64_t num_heads);
void check_sink(const at::Tensor& q, const std::optional<at::Tensor>& sink, int64_t num_heads);
// Checks cu_seqlens and max_seqlen, and returns the number of sequences. `total` is that of rows.
int64_t check_packing(const std::optional<at::Tensor>& cu_seqlens, const char* argument,
                      const std::optional<c10::SymInt>& max_seqlen, const char* max_argument,
                      int64_t total);

// Those of q, but for head_dim, which is that of v.
at::DimVector sizes_of_out(const at::Tensor& q, const at::Tensor& v);

// The dtype of LSE, accumulators and scalars that go with tensors of this dtype.
at::ScalarType accumulate_type(at::ScalarType dtype);

// A tensor a kernel can read: last stride 1 and, on the GPU, 16-byte aligned rows with head_dim
// padded by zeros to a multiple of 8. Copies only what is not so already. The one place that pads.
at::Tensor readable(const at::Tensor& tensor);

Strides strides_of(const at::Tensor& tensor);      // (batch, seqlen, heads, d) or (total, heads, d)
LseStrides lse_strides_of(const at::Tensor& lse);  // (batch, heads, seqlen) or (heads, total)

// The tensors that AttentionInputs points at, in a form that kernels can read. They must outlive
// the launch.
struct ReadableInputs {
  at::Tensor q, k, v;
  std::optional<at::Tensor> alibi_slopes;
  std::optional<at::Tensor> sink;

  ReadableInputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                 const Options& options);

  // Padded.
  int64_t head_dim() const { return q.size(-1); }
  int64_t head_dim_v() const { return v.size(-1); }
};

template <typename Real>
void set_inputs(AttentionInputs<Real>& inputs, const Shape& shape, const Options& options,
                const ReadableInputs& tensors, const at::Tensor& lse);

// Real* -> BasicLse<Real>*: the only place where numbers become public log-sum-exps.
template <typename Real>
BasicLse<Real>* lse_data(const at::Tensor& tensor);

// +inf is in no public value. On the CPU that is checked where one comes in; elsewhere the check
// would be a synchronisation, and +inf makes its row NaN.
template <typename Real>
void check_public_values(const at::Tensor& lse, const char* argument);

}  // namespace neginf
