// S^T to P and dP to dS in the backward, in accumulators, and the rows for which that needs care.
#pragma once

#include <cute/tensor.hpp>

#include "../common/backward_rows.h"
#include "../common/softmax.h"
#include "../common/thread_index.h"
#include "backward_work.cuh"

namespace neginf::sm80 {

using namespace cute;

// The Lse of the rows of a step, and which of them must not enter a product: those without weight,
// and those that are NaN anyway, whose q and dO would meet the zeros of keys they do not see.
struct CarefulRows {
  const Lse* lse;  // of the first row
  int rows_left;

  static __device__ CarefulRows of(const BackwardParams<float>& params, const BackwardRows& rows,
                                   const KeyWork& work, const RowStep& step) {
    const int first_row = step.tile * rows.tile_rows;
    return {params.lse + work.keys.index * params.lse_strides.batch +
                step.head * params.lse_strides.head + work.queries.first_row + first_row,
            work.queries.length - first_row};
  }

  __device__ bool must_clear(int r) const {
    return r < rows_left && (lse[r].is_empty() || lse[r].value() != lse[r].value());
  }

  // P = exp2 of it. Without contraction: s must be rounded as the Lse was. A row that is empty
  // though the mask shows it keys has had its q cleared, so its scores are no longer -inf.
  __device__ float exponent(int r, float raw, float scale) const {
    if (r >= rows_left || lse[r].is_empty()) return masked_score<float>();
    return Divisor::of(lse[r]).exponent(__fmul_rn(raw, scale)) * kLog2e;
  }
};

// Their exponents are whole, so there is nothing left for the divisors in shared memory to do.
template <typename Traits>
__device__ __noinline__ void clear_careful_rows(CarefulRows rows, typename Traits::Element* q,
                                                typename Traits::Element* dout,
                                                RowStatistics<Traits::kBlockM>& statistics) {
  using Element = typename Traits::Element;
  Tensor sQ = make_tensor(make_smem_ptr(q), typename Traits::SharedQ::Layout{});
  Tensor sdO = make_tensor(make_smem_ptr(dout), typename Traits::SharedQ::Layout{});
  for (int i = thread_index(); i < Traits::kBlockM * Traits::kHeadDim; i += Traits::kThreads) {
    const int r = i / Traits::kHeadDim;
    if (!rows.must_clear(r)) continue;
    sQ(r, i % Traits::kHeadDim) = Element(0);
    sdO(r, i % Traits::kHeadDim) = Element(0);
  }
  for (int r = thread_index(); r < Traits::kBlockM; r += Traits::kThreads) {
    statistics.divisor[r] = Log2Divisor::none();
  }
}

// S^T to P, in place. Tensors here are (rows, keys), as in the forward; the rows of a thread are
// many and its keys are few.
template <class Scores, class RowOf>
__device__ __forceinline__ void to_probabilities(Scores& scores, const Log2Divisor* divisor,
                                                 const RowOf& row_of, float scale_log2) {
  CUTE_UNROLL
  for (int r = 0; r < size<0>(scores); ++r) {
    const Log2Divisor of_row = divisor[row_of(r)];
    CUTE_UNROLL
    for (int c = 0; c < size<1>(scores); ++c) {
      scores(r, c) = exp2_approx(of_row.exponent(scores(r, c), scale_log2));
    }
  }
}

// For rows that base 2 cannot serve: S^T to what to_probabilities takes with a scale of 1. Not to
// P, which would put a branch around all of that, and its arithmetic could not move into the
// products.
template <class Scores, class RowOf>
__device__ __forceinline__ void to_careful_exponents(Scores& scores, const CarefulRows& rows,
                                                     const RowOf& row_of, float scale) {
  CUTE_UNROLL
  for (int r = 0; r < size<0>(scores); ++r) {
    CUTE_UNROLL
    for (int c = 0; c < size<1>(scores); ++c) {
      scores(r, c) = rows.exponent(row_of(r), scores(r, c), scale);
    }
  }
}

// dP to dS, in place.
template <class Gradients, class Probabilities, class RowOf>
__device__ __forceinline__ void to_score_gradients(Gradients& gradients, const Probabilities& p,
                                                   const float* delta, const RowOf& row_of) {
  CUTE_UNROLL
  for (int r = 0; r < size<0>(gradients); ++r) {
    const float of_row = delta[row_of(r)];
    CUTE_UNROLL
    for (int c = 0; c < size<1>(gradients); ++c) {
      gradients(r, c) = p(r, c) * (gradients(r, c) - of_row);
    }
  }
}

// A key of weight 0 gets gradient 0 also from a row whose other factor is NaN.
template <class Gradients, class Probabilities>
__device__ __forceinline__ void drop_weightless_keys(Gradients& gradients, const Probabilities& p) {
  CUTE_UNROLL
  for (int i = 0; i < size(gradients); ++i) {
    if (p(i) == 0.f) gradients(i) = 0.f;
  }
}

}  // namespace neginf::sm80
