// Products of warpgroups and what becomes of their accumulators.
//
// ptxas must see which products are on their way wherever an accumulator is touched; otherwise it
// runs them one by one, and says so in a warning (C7510 to C7519). So everything here is inlined.
#pragma once

#include <cute/tensor.hpp>

#include "../common/convert.cuh"

namespace neginf::sm90 {

using namespace cute;

// ---------------------------------------------------------------------------------------- products

// The part of issue() that multiplies blocks kBegin to kEnd - 1 of A's columns.
template <int kBegin, int kEnd, class TiledMma, class A, class B, class Accumulator>
__device__ __forceinline__ void issue_blocks(TiledMma& mma, const A& a, const B& b,
                                             Accumulator& accumulator) {
  warpgroup_arrive();
  CUTE_UNROLL
  for (int k = kBegin; k < kEnd; ++k) {
    cute::gemm(mma, a(_, _, k), b(_, _, k), accumulator);
    mma.accumulate_ = GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
}

// Issues accumulator += A B, with kClears accumulator = A B, and does not wait for it.
template <bool kClears, class TiledMma, class A, class B, class Accumulator>
__device__ __forceinline__ void issue(TiledMma& mma, const A& a, const B& b,
                                      Accumulator& accumulator) {
  warpgroup_fence_operand(accumulator);
  mma.accumulate_ = kClears ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
  issue_blocks<0, decltype(size<2>(a))::value>(mma, a, b, accumulator);
}

// Until all but the last kStillRunning products are done.
template <int kStillRunning, class Accumulator>
__device__ __forceinline__ void wait_for(Accumulator& accumulator) {
  warpgroup_wait<kStillRunning>();
  warpgroup_fence_operand(accumulator);
}

// --------------------------------------------------------------------------------------- fragments

// An accumulator or its coordinates, ((2, 2, N / 8), 1, products along N) per thread, as (rows,
// columns).
template <class Fragment>
__device__ __forceinline__ auto as_rows_and_columns(Fragment&& fragment) {
  const auto layout = fragment.layout();
  return make_tensor(fragment.data(), make_layout(make_layout(get<0, 1>(layout), get<1>(layout)),
                                                  make_layout(get<0, 0>(layout), get<0, 2>(layout),
                                                              get<2>(layout))));
}

// A value that is the same in all lanes, known to be so: products are issued on no divergent path.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// The accumulator of S, rounded, as the A operand of P V: a thread's values are in the same order.
template <int kColumns>
using OperandLayout = Layout<Shape<Shape<_2, _2, _2>, _1, Int<kColumns / 16>>>;

// x[i] of lane j of a quad goes to x[j] of lane i.
__device__ __forceinline__ void transpose_in_quad(uint32_t (&x)[4]) {
  const int lane = static_cast<int>(threadIdx.x);
  CUTE_UNROLL
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = (lane & bit) != 0;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t received = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + bit], bit);
      (upper ? x[i] : x[i + bit]) = received;
    }
  }
}

}  // namespace neginf::sm90
