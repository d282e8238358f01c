// Writes new keys and values into a cache and rotates queries, a block for each new row.
#include <algorithm>
#include <limits>
#include <stdexcept>
#include <type_traits>

#include "../kernels.h"
#include "append_rows.h"
#include "cuda_check.h"
#include "element.h"

namespace neginf {
namespace {

constexpr int kThreads = 128;

// A row of `head_dim` elements of each of `heads` heads; rotated if there is a position.
template <typename Element>
__device__ void copy_row(const AppendParams& params, const Element* from, int64_t from_head,
                         Element* to, int64_t to_head, int heads, int head_dim, int64_t position) {
  const int rotary_dim = position < 0 ? 0 : params.rotary_dim;
  const int pairs = (head_dim + 1) / 2;
  for (int i = static_cast<int>(threadIdx.x); i < heads * pairs; i += kThreads) {
    const int head = i / pairs;
    const int p = i - head * pairs;
    const auto pair = RotaryPair::of(p, rotary_dim, params.interleaved);
    const Element* x = from + head * from_head;
    Element* y = to + head * to_head;
    if (pair.turns) {
      const float cos =
          to_float(static_cast<const Element*>(params.cos)[position * params.cos_stride + p]);
      const float sin =
          to_float(static_cast<const Element*>(params.sin)[position * params.sin_stride + p]);
      const auto rotated = rotate(to_float(x[pair.first]), to_float(x[pair.second]), cos, sin);
      round_to(y[pair.first], rotated.first);
      round_to(y[pair.second], rotated.second);
    } else {
      y[pair.first] = x[pair.first];
      if (pair.second < head_dim) y[pair.second] = x[pair.second];
    }
  }
}

template <typename Element>
__global__ void __launch_bounds__(kThreads)
    append_kernel(const __grid_constant__ AppendParams params, int64_t new_rows, int64_t rows_q) {
  const int64_t number = blockIdx.x;
  for (int64_t index = number * kThreads + threadIdx.x; index < params.batch;
       index += int64_t{gridDim.x} * kThreads) {
    params.seqlens[index] = AppendedSequence(params, static_cast<int>(index)).length(params);
  }
  const auto at = [](auto* tensor, const Strides& strides, int64_t batch, int64_t row) {
    using Pointer = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(tensor)>>,
                                       const Element*, Element*>;
    return static_cast<Pointer>(tensor) + batch * strides.batch + row * strides.row;
  };

  if (number < new_rows) {
    const auto row = NewRow::of(number, params.batch, params.cu_seqlens_new, params.total_new);
    if (row.sequence >= params.batch) return;
    const AppendedSequence sequence(params, row.sequence);
    const CacheRow to = sequence.cache_row(params, row.row);
    if (!to.exists) return;
    // A packed tensor has one batch entry.
    const bool is_packed = params.cu_seqlens_new != nullptr;
    const int64_t batch = is_packed ? 0 : row.sequence;
    const int64_t from = is_packed ? number : row.row;
    const int64_t position = params.rotary_dim > 0 ? sequence.position(params, row.row) : -1;
    copy_row(params, at(params.k, params.k_strides, batch, from), params.k_strides.head,
             at(params.k_cache, params.k_cache_strides, to.entry, to.row),
             params.k_cache_strides.head, params.num_heads_k, params.head_dim, position);
    copy_row(params, at(params.v, params.v_strides, batch, from), params.v_strides.head,
             at(params.v_cache, params.v_cache_strides, to.entry, to.row),
             params.v_cache_strides.head, params.num_heads_k, params.head_dim_v, int64_t{-1});
  } else if (const int64_t number_q = number - new_rows; number_q < rows_q) {
    const auto row = NewRow::of(number_q, params.batch, params.cu_seqlens_q, params.total_q);
    const bool is_packed = params.cu_seqlens_q != nullptr;
    const int64_t batch = is_packed ? 0 : row.sequence;
    const int64_t from = is_packed ? number_q : row.row;
    // Rows of no sequence have no position.
    const int64_t position = row.sequence >= params.batch
                                 ? -1
                                 : AppendedSequence(params, row.sequence)
                                       .position(params, params.advances_q ? row.row : 0);
    copy_row(params, at(params.q, params.q_strides, batch, from), params.q_strides.head,
             at(params.rotated_q, params.rotated_q_strides, batch, from),
             params.rotated_q_strides.head, params.num_heads, params.head_dim, position);
  }
}

template <typename Element>
void run_append(const AppendParams& params) {
  const int64_t new_rows =
      params.cu_seqlens_new != nullptr ? params.total_new : params.batch * params.total_new;
  const int64_t rows_q = params.rotary_dim == 0           ? 0
                         : params.cu_seqlens_q != nullptr ? params.total_q
                                                          : params.batch * params.total_q;
  // One at least, for the lengths.
  const int64_t blocks = std::max<int64_t>(1, new_rows + rows_q);
  if (blocks > std::numeric_limits<int>::max()) {
    throw std::runtime_error("neginf: append: more rows than a grid of blocks covers");
  }
  append_kernel<Element>
      <<<static_cast<unsigned>(blocks), kThreads, 0, params.stream>>>(params, new_rows, rows_q);
  cuda_check(cudaGetLastError(), "append");
}

template <typename Element>
using RegisterAppend = RegisterKernel<AppendParams, run_append<Element>>;

const RegisterAppend<__nv_bfloat16> bfloat16(Arch::cuda, DType::bfloat16, kAnyHeadDim);
const RegisterAppend<__half> float16(Arch::cuda, DType::float16, kAnyHeadDim);

}  // namespace
}  // namespace neginf
