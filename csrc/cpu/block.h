// What the CPU kernels share: views of blocks for ATen, scratch memory, and a work queue.
//
// A kernel walks over blocks of rows and tiles of keys. Blocks are ATen tensors made on memory that
// is already there, so that products and element-wise steps run in ATen's vectorised code and
// nothing larger than a tile is ever allocated per score.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "../params.h"

namespace neginf {

template <typename Real>
constexpr at::ScalarType kScalarType = c10::CppTypeToScalarType<Real>::value;

constexpr at::ScalarType scalar_type(DType dtype) {
  switch (dtype) {
    case DType::float64: return at::kDouble;
    case DType::float32: return at::kFloat;
    case DType::bfloat16: return at::kBFloat16;
    case DType::float16: return at::kHalf;
  }
  return at::ScalarType::Undefined;
}

inline at::Tensor matrix(const void* data, at::ScalarType type, int64_t rows, int64_t cols,
                         int64_t row_stride) {
  return at::from_blob(const_cast<void*>(data), {rows, cols}, {row_stride, 1}, type);
}

// All rows of one sequence and head in a tensor of the model's dtype.
struct HeadRows {
  char* data;
  at::ScalarType type;
  int64_t row_stride;
  int head_dim;

  HeadRows(const void* tensor, at::ScalarType type, const Strides& strides, int sequence,
           int64_t first_row, int head, int head_dim)
      : data(static_cast<char*>(const_cast<void*>(tensor))),
        type(type),
        row_stride(strides.row),
        head_dim(head_dim) {
    data += at::elementSize(type) *
            (sequence * strides.batch + first_row * strides.row + head * strides.head);
  }

  at::Tensor operator[](Range rows) const {
    return matrix(data + at::elementSize(type) * rows.begin * row_stride, type, rows.size(),
                  head_dim, row_stride);
  }
};

// Packed buffers have an entry more: the rows that belong to no sequence.
template <typename Real>
int sequences_of(const Problem<Real>& problem) {
  return problem.batch + (problem.cu_seqlens_q != nullptr ? 1 : 0);
}

// Memory of one thread that views of changing shape are laid on.
template <typename Real>
class Scratch {
 public:
  explicit Scratch(int64_t size) : storage_(at::empty({size}, kScalarType<Real>)) {}

  Real* data() const { return storage_.template data_ptr<Real>(); }

  at::Tensor view(int64_t rows, int64_t cols) const {
    return matrix(data(), kScalarType<Real>, rows, cols, cols);
  }

  // `block` as Real: itself when it is Real already, else a copy here.
  at::Tensor as_real(const at::Tensor& block) const {
    return block.scalar_type() == kScalarType<Real> ? block : copy(block);
  }

  at::Tensor copy(const at::Tensor& block) const {
    return view(block.size(0), block.size(1)).copy_(block);
  }

 private:
  at::Tensor storage_;
};

// Multiply-adds of Q K^T without a mask.
template <typename Real>
double score_cost(const Problem<Real>& problem) {
  const double rows = problem.cu_seqlens_q != nullptr
                          ? static_cast<double>(problem.total_q)
                          : static_cast<double>(problem.total_q) * problem.batch;
  return rows * problem.seqlen_k * problem.num_heads * problem.head_dim;
}

// Whether an item must get the same bits whatever other items there are.
enum class Bits { any, same };

// Calls run(item) for every item in [0, count) of a Worker that each thread makes for itself. Items
// are handed out one by one because their cost differs: causal blocks, sequences of any length.
// `cost` is that of all items, in multiply-adds: what is soon done is not worth waking a thread
// for.
template <typename MakeWorker>
void run_items(int64_t count, double cost, Bits bits, const MakeWorker& make_worker) {
  constexpr double kCostPerThread = 1 << 20;  // tens of microseconds
  const auto worth = static_cast<int64_t>(std::min(1 + cost / kCostPerThread, 1e6));
  // Where only one thread is at work, a product is divided among all of them, and how it is rounded
  // depends on that. The second one may have nothing to do.
  const int64_t least = bits == Bits::same ? 2 : 1;
  const int64_t threads = std::max(least, std::min({int64_t{at::get_num_threads()}, count, worth}));
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    // The caller's autograd and autocast state is the calling thread's only, and no business of a
    // kernel.
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    auto worker = make_worker();
    for (int64_t item = next++; item < count; item = next++) worker.run(item);
  });
}

}  // namespace neginf
