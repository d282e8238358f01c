// How a tile of a GPU forward ends, but for the store of O. Tensors here are a thread's
// accumulators and their coordinates seen as (rows, columns).
#pragma once

#include <cute/tensor.hpp>

#include "../params.h"
#include "forward_work.h"
#include "softmax.h"

namespace neginf {

// Ends the softmax of every row, whether or not it saw a key, belongs to a sequence or holds a
// sink: writes the Lse of those that lie in the buffer and turns the accumulated rows into O.
template <class Softmax, class Output, class Coordinates>
__device__ __forceinline__ void finish_rows(const ForwardParams<float>& params,
                                            const ForwardWork& work, const Softmax& softmax,
                                            Output& output, const Coordinates& coordinates) {
  using namespace cute;
  const Sequence& sequence = work.tile.sequence;
  const float* sink = work.split == 0 ? params.problem.sink : nullptr;
  Lse* lse = params.num_splits > 1
                 ? params.lse_partial + work.split * params.lse_partial_split_stride
                 : params.lse;
  lse += work.tile.index * params.lse_strides.batch + sequence.first_row;

  CUTE_UNROLL
  for (int r = 0; r < size<0>(output); ++r) {
    const ForwardWork::Row row = work.row(get<0>(coordinates(r, 0)));
    const bool in_use = row.exists && row.position < sequence.length;
    Finalized<float> finalized = softmax.finish(r, in_use);
    if (sink != nullptr && in_use) finalized = merge_sink(finalized, sink[row.head]);

    const bool first_of_quad = get<1>(coordinates(r, 0)) == 0;
    if (first_of_quad && row.exists && row.position < sequence.rows) {
      lse[row.head * params.lse_strides.head + row.position] = finalized.lse;
    }
    multiply_row(output, r, finalized.scale);
    if (!finalized.sees_keys) {  // rarely; 0 times what has been accumulated may be NaN
      CUTE_UNROLL
      for (int c = 0; c < size<1>(output); ++c) output(r, c) = 0.f;
    }
  }
}

// The state of one split, float, straight from the accumulators.
template <class Output, class Coordinates>
__device__ __forceinline__ void store_partial(const ForwardParams<float>& params,
                                              const ForwardWork& work, const Output& output,
                                              const Coordinates& coordinates) {
  using namespace cute;
  float* out = params.out_partial + work.split * params.out_partial_split_stride;
  CUTE_UNROLL
  for (int r = 0; r < size<0>(output); ++r) {
    const ForwardWork::Row row = work.row(get<0>(coordinates(r, 0)));
    if (!row.exists || row.position >= work.tile.sequence.rows) continue;
    float* to = out + work.offset(row, params.out_partial_strides);
    CUTE_UNROLL
    for (int c = 0; c < size<1>(output); c += 2) {
      const int column = get<1>(coordinates(r, c));
      if (column < params.problem.head_dim) {
        *reinterpret_cast<float2*>(to + column) = make_float2(output(r, c), output(r, c + 1));
      }
    }
  }
}

}  // namespace neginf
