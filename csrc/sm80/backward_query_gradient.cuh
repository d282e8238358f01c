// dQ in the backward: where its operands are, and how its tiles are added up in memory.
#pragma once

#include <cute/tensor.hpp>

#include "../common/backward_rows.h"
#include "../common/thread_index.h"
#include "backward_work.cuh"

namespace neginf::sm80 {

using namespace cute;

// The operands of dQ.
template <typename Traits>
struct QueryGradAddresses {
  uint32_t ds_transposed;  // A
  uint32_t k_transposed;   // B

  __device__ __forceinline__ explicit QueryGradAddresses(
      const typename Traits::SharedStorage& shared) {
    const int thread = thread_index_again();
    const int lane = thread % 32;
    const int warp = thread / 32;
    constexpr int kRows = Traits::kQueryGradWarpsRows;
    ds_transposed =
        cast_smem_ptr_to_uint(shared.ds) + Traits::QueryGradA::begin(lane, warp % kRows);
    k_transposed = cast_smem_ptr_to_uint(shared.k) + Traits::QueryGradB::begin(lane, warp / kRows);
  }
};

// Lets key tiles add to a tile of dQ one after the other, if deterministic.
struct OrderedAdds {
  int* adds;  // null: in any order
  int turn;

  static __device__ OrderedAdds of(const BackwardParams<float>& params, const BackwardRows& rows,
                                   const KeyWork& work, const RowStep& step, int block_n) {
    if (!params.deterministic) return {nullptr, 0};
    const int first_row = step.tile * rows.tile_rows;
    return {rows.adds + step.number(rows, work),
            order_of_adding(work, {first_row, first_row + rows.tile_rows}, block_n)};
  }

  // By one thread, if there is an order.
  __device__ void wait_for_turn() const {
    while (load_acquire(adds) != turn) continue;
  }

  // By one thread, if there is an order, after all that add have passed a fence.
  __device__ void pass_on() const {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(adds) : "memory");
  }
};

__device__ __forceinline__ void wait_for_turn(const OrderedAdds& order) {
  if (order.adds == nullptr) return;
  if (threadIdx.x == 0) order.wait_for_turn();
  __syncthreads();
}

__device__ __forceinline__ void pass_on_turn(const OrderedAdds& order) {
  if (order.adds == nullptr) return;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) order.pass_on();
}

// Where this thread's registers of the first block go that its warp adds to, see dq_piece_offset.
template <typename Traits>
__device__ __forceinline__ float* query_gradient_of_thread(float* tile) {
  constexpr int kRows = Traits::kQueryGradWarpsRows;
  const int thread = thread_index_again();
  const int warp = thread / 32;
  const int block = warp % kRows * (Traits::kHeadDim / 8) + warp / kRows;
  return tile + block * 128 + thread % 32 * (kAddsVectors ? 4 : 1);
}

// Adds one part of the columns. As atomicAdd, which some compilers make an atomic with a result
// that nobody wants.
template <typename Traits, class Part, class Accumulator>
__device__ __forceinline__ void add_query_gradient(float* of_thread, Part part,
                                                   const Accumulator& tQrQ) {
  constexpr int kRows = Traits::kQueryGradWarpsRows;
  constexpr int kColumnBlocks = Traits::kHeadDim / 8;
  CUTE_UNROLL
  for (int m = 0; m < size<1>(tQrQ); ++m) {
    CUTE_UNROLL
    for (int n = 0; n < size<2>(tQrQ); ++n) {
      const int block = m * kRows * kColumnBlocks + n * (Traits::kWarps / kRows) +
                        part * (kColumnBlocks / Traits::kQueryGradParts);
      float* to = of_thread + block * 128;
      const float* from = &tQrQ(0, m, n);
      if constexpr (kAddsVectors) {
        asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(from[0]),
                     "f"(from[1]), "f"(from[2]), "f"(from[3])
                     : "memory");
      } else {
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to + 32 * i), "f"(from[i]) : "memory");
        }
      }
    }
  }
}

}  // namespace neginf::sm80
