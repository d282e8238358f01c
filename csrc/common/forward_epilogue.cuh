// How a tile of a GPU forward ends, but for the store of O. Tensors here are a thread's
// accumulators and their coordinates seen as (rows, columns).
#pragma once

#include <array>
#include <cute/tensor.hpp>
#include <utility>

#include "../params.h"
#include "forward_work.h"
#include "softmax.h"

namespace neginf {

// Where the Lse of a tile's rows go, and what sinks they meet: all that their end depends on.
struct alignas(16) RowEndings {
  Lse* lse;           // of row 0
  const float* sink;  // of its head; null: none
  int positions;      // from row 0 to the end of what the buffer has for the sequence
  int in_use;         // of them, from row 0 on
  QueryPacking packing;
  int heads;

  static __device__ RowEndings of(const ForwardParams<float>& params, const ForwardWork& work) {
    Lse* lse = params.num_splits > 1
                   ? params.lse_partial + work.split * params.lse_partial_split_stride
                   : params.lse;
    const float* sink = params.problem.sink;
    return {lse + work.tile.index * params.lse_strides.batch + work.head * params.lse_strides.head +
                work.tile.sequence.first_row + work.tile.first_row,
            work.split == 0 && sink != nullptr ? sink + work.head : nullptr,
            work.tile.sequence.rows - work.tile.first_row,
            work.tile.sequence.length - work.tile.first_row,
            work.packing,
            work.heads};
  }
};

// What O is made of.
template <int kRows>
struct RowScales {
  float scale[kRows];  // O = accumulated * scale
  bool sees_keys[kRows];
};

// Ends the softmax of every row, whether or not it saw a key, belongs to a sequence or holds a
// sink, and writes the Lse of those that lie in the buffer. Needs nothing of O: it can run while
// the last product does.
template <int kRows, class Coordinates>
__device__ __forceinline__ RowScales<kRows> end_softmax(const ForwardParams<float>& params,
                                                        const RowEndings& endings,
                                                        const OnlineSoftmax<kRows>& softmax,
                                                        const Coordinates& coordinates) {
  using namespace cute;
  RowInTile rows[kRows];
  bool in_use[kRows];
  float row_sums[kRows];
  CUTE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    rows[r] = RowInTile::of(endings.packing, endings.heads, get<0>(coordinates(r, 0)));
    in_use[r] = rows[r].exists & (rows[r].position < endings.in_use);
    row_sums[r] = softmax.row_sum(r);
  }
  // All rows before the first branch, so that their latencies overlap.
  auto finalized = [&]<int... r>(std::integer_sequence<int, r...>) {
    return std::array{softmax.finish(r, in_use[r] ? row_sums[r] : 0.f)...};
  }(std::make_integer_sequence<int, kRows>{});
  if (endings.sink != nullptr) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if (in_use[r]) finalized[r] = merge_sink(finalized[r], endings.sink[rows[r].head]);
    }
  }
  RowScales<kRows> scales;
  CUTE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const bool first_of_quad = get<1>(coordinates(r, 0)) == 0;
    if (first_of_quad & rows[r].exists & (rows[r].position < endings.positions)) {
      endings.lse[rows[r].head * params.lse_strides.head + rows[r].position] = finalized[r].lse;
    }
    scales.scale[r] = finalized[r].scale;
    scales.sees_keys[r] = finalized[r].sees_keys;
  }
  return scales;
}

// Turns the accumulated rows into O.
template <int kRows, class Output>
__device__ __forceinline__ void end_output(const RowScales<kRows>& scales, Output& output) {
  using namespace cute;
  bool any_empty = false;
  CUTE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    multiply_row(output, r, scales.scale[r]);
    any_empty |= !scales.sees_keys[r];
  }
  // Rarely; 0 times what has been accumulated may be NaN.
  if (!__any_sync(0xffffffffu, any_empty)) return;
  CUTE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    CUTE_UNROLL
    for (int c = 0; c < size<1>(output); ++c) {
      output(r, c) = scales.sees_keys[r] ? output(r, c) : 0.f;
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
      if (column < params.problem.head_dim_v) {
        *reinterpret_cast<float2*>(to + column) = make_float2(output(r, c), output(r, c + 1));
      }
    }
  }
}

}  // namespace neginf
