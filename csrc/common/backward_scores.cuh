// S^T to P and dP to dS in a GPU backward, in accumulators, and the rows for which that needs care.
#pragma once

#include <cute/tensor.hpp>

#include "backward_rows.h"
#include "backward_work.cuh"
#include "softmax.h"

namespace neginf {

// P = exp2 of it, for rows that base 2 cannot serve. Without contraction: s must be rounded as the
// Lse was.
__device__ __forceinline__ float careful_exponent(Divisor divisor, float raw, float scale) {
  return divisor.exponent(__fmul_rn(raw, scale)) * kLog2e;
}

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

  // For kernels that apply it themselves. An empty row is as good as out of bounds.
  __device__ Divisor divisor(int r) const {
    return r >= rows_left || lse[r].is_empty() ? Divisor::out_of_bounds() : Divisor::of(lse[r]);
  }

  // A row that is empty though the mask shows it keys has had its q cleared, so its scores are no
  // longer -inf.
  __device__ float exponent(int r, float raw, float scale) const {
    if (r >= rows_left || lse[r].is_empty()) return masked_score<float>();
    return careful_exponent(Divisor::of(lse[r]), raw, scale);
  }
};

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

// apply_mask for a thread that has many rows and few keys: the rows that see a key are a range,
// too, and compared are distances from the first row.
template <class Scores, class RowOf, class KeyOf>
__device__ __forceinline__ void apply_mask_by_key(Scores& scores, const Mask& mask,
                                                  const RowOf& row_of, const KeyOf& key_of) {
  const auto rows_of_key = [&](int c) { return mask.rows_of_keys({key_of(c), key_of(c) + 1}); };
  // Of all keys before the first comparison: what is compared before a branch is kept in registers.
  int begin[decltype(size<1>(scores))::value];
  CUTE_UNROLL
  for (int c = 0; c < size<1>(scores); ++c) {
    const Range rows = rows_of_key(c);
    begin[c] = (rows.empty() ? kMaxSeqlen : rows.begin) - row_of(0);
  }
  CUTE_UNROLL
  for (int c = 0; c < size<1>(scores); ++c) {
    asm volatile("" : "+r"(begin[c]));
    CUTE_UNROLL
    for (int r = 0; r < size<0>(scores); ++r) {
      if (row_of(r) - row_of(0) < begin[c]) scores(r, c) = masked_score<float>();
    }
  }
  if (mask.window_left < 0) return;
  CUTE_UNROLL
  for (int c = 0; c < size<1>(scores); ++c) {
    const int end = rows_of_key(c).end - row_of(0);
    CUTE_UNROLL
    for (int r = 0; r < size<0>(scores); ++r) {
      if (row_of(r) - row_of(0) >= end) scores(r, c) = masked_score<float>();
    }
  }
}

}  // namespace neginf
