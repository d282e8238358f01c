// Pieces of the sm80 kernels in CuTe: accumulators seen the way a step needs them, and the
// predicated load and store of a tile.
#pragma once

#include <cute/tensor.hpp>

#include "../common/convert.cuh"
#include "../common/thread_index.h"
#include "../mask.h"

namespace neginf::sm80 {

using namespace cute;

// An accumulator, ((2, 2), M, N) per thread, as (rows, columns).
template <class Layout>
CUTE_HOST_DEVICE constexpr auto rows_and_columns(Layout layout) {
  return make_layout(make_layout(get<0, 1>(layout), get<1>(layout)),
                     make_layout(get<0, 0>(layout), get<2>(layout)));
}

// The accumulator of S, ((2, 2), M, N), as the A operand of P V, ((2, 2, 2), M, N / 2): two n8
// accumulators side by side are one k16 operand.
template <class Layout>
CUTE_HOST_DEVICE constexpr auto accumulator_as_operand(Layout layout) {
  auto pairs = logical_divide(get<2>(layout), _2{});  // (2, N / 2)
  return make_layout(make_layout(get<0, 0>(layout), get<0, 1>(layout), get<0>(pairs)),
                     get<1>(layout), get<1>(pairs));
}

// What lies outside `rows` or past head_dim is not read and becomes 0.
template <typename Traits, class Global, class Shared>
__device__ __forceinline__ void load_tile(const Global& global, const Shared& shared, Range rows,
                                          int head_dim) {
  typename Traits::GmemLoad load;
  auto thread = load.get_slice(thread_index());
  Tensor source = thread.partition_S(global);  // (8, M, K)
  Tensor target = thread.partition_D(shared);
  Tensor coordinates = thread.partition_S(make_identity_tensor(shape(global)));
  CUTE_UNROLL
  for (int m = 0; m < size<1>(source); ++m) {
    CUTE_UNROLL
    for (int k = 0; k < size<2>(source); ++k) {
      const auto at = coordinates(0, m, k);
      const bool wanted = rows.contains(get<0>(at)) && get<1>(at) < head_dim;
      copy(load.with(wanted), source(_, m, k), target(_, m, k));
    }
  }
}

// The first `rows` rows of a tile, up to head_dim.
template <typename Traits, class Shared, class Global>
__device__ __forceinline__ void store_tile(const Shared& shared, const Global& global, int rows,
                                           int head_dim) {
  typename Traits::GmemStore store;
  auto thread = store.get_slice(thread_index());
  Tensor source = thread.partition_S(shared);  // (8, M, K)
  Tensor target = thread.partition_D(global);
  Tensor coordinates = thread.partition_D(make_identity_tensor(shape(global)));
  CUTE_UNROLL
  for (int m = 0; m < size<1>(target); ++m) {
    CUTE_UNROLL
    for (int k = 0; k < size<2>(target); ++k) {
      const auto at = coordinates(0, m, k);
      if (get<0>(at) < rows && get<1>(at) < head_dim) copy(store, source(_, m, k), target(_, m, k));
    }
  }
}

}  // namespace neginf::sm80
