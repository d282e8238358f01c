// Scores to probabilities inside a GPU kernel, one tile of keys at a time.
//
// Tensors here are a thread's accumulators seen as (rows, columns); the four threads of a quad
// share each row, as in every mma accumulator. Scores are raw: s = raw * scale with scale > 0, and
// scale is applied inside exp2 together with log2(e).
#pragma once

#include <cute/tensor.hpp>

#include "../lse.h"
#include "../params.h"
#include "score.h"

namespace neginf {

constexpr float kLog2e = 1.4426950408889634f;

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// To float accuracy, also relative to a small x, where 1 - 2 / (exp(2 x) + 1) cancels: a large
// softcap has only small x. NaN stays NaN.
__device__ __forceinline__ float tanh_approx(float x) {
  const float exp_2x = exp2_approx(2.f * kLog2e * x);
  const float large = 1.f - __fdividef(2.f, exp_2x + 1.f);
  const float x2 = x * x;
  const float small = x + x * x2 * (-1.f / 3.f + x2 * (2.f / 15.f - x2 * (17.f / 315.f)));
  return fabsf(x) < 0.2f ? small : large;
}

template <typename Operator>
__device__ __forceinline__ float reduce_quad(float x, Operator op) {
  x = op(x, __shfl_xor_sync(0xffffffffu, x, 2));
  return op(x, __shfl_xor_sync(0xffffffffu, x, 1));
}

// score.h for one head of one sequence.
struct ScoreModifiers {
  float scale;           // s = raw * scale, raw being what apply() leaves behind
  float softcap_factor;  // tanh(q.k * softcap_factor)
  float alibi_factor;    // q.k, or that tanh, to a score in the units of the bias
  float alibi_slope;
  bool has_softcap;
  bool has_alibi;

  static __device__ ScoreModifiers of(const Problem<float>& problem, int batch, int head) {
    const bool has_softcap = problem.softcap != 0.f;
    const float unbiased_scale = has_softcap ? problem.softcap : problem.softmax_scale;
    const float* slopes = problem.alibi_slopes;
    // The rows of no sequence (batch == problem.batch) have no slope either.
    const bool has_alibi = slopes != nullptr && batch < problem.batch;
    return {has_alibi ? 1.f : unbiased_scale,
            problem.softmax_scale / unbiased_scale,
            unbiased_scale,
            has_alibi ? slopes[batch * problem.alibi_batch_stride + head] : 0.f,
            has_softcap,
            has_alibi};
  }

  // `scores` is q.k on entry; row_of(r) and key_of(c) are its coordinates in the sequence.
  template <class Scores, class RowOf, class KeyOf>
  __device__ __forceinline__ void apply(Scores& scores, const Mask& mask, const RowOf& row_of,
                                        const KeyOf& key_of) const {
    if (has_softcap) apply_softcap(scores);
    if (has_alibi) apply_alibi(scores, mask, row_of, key_of);
  }

  template <class Scores>
  __device__ __forceinline__ void apply_softcap(Scores& scores) const {
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) scores(i) = tanh_approx(scores(i) * softcap_factor);
  }

  template <class Scores, class RowOf, class KeyOf>
  __device__ __forceinline__ void apply_alibi(Scores& scores, const Mask& mask, const RowOf& row_of,
                                              const KeyOf& key_of) const {
    CUTE_UNROLL
    for (int r = 0; r < size<0>(scores); ++r) {
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c) {
        const float bias = alibi_bias(alibi_slope, row_of(r), key_of(c), mask.offset());
        scores(r, c) = scores(r, c) * alibi_factor + bias;
      }
    }
  }
};

// Masking overwrites: a key the row does not see weighs nothing even when its score is NaN.
template <class Scores, class RowOf, class KeyOf>
__device__ __forceinline__ void apply_mask(Scores& scores, const Mask& mask, const RowOf& row_of,
                                           const KeyOf& key_of) {
  CUTE_UNROLL
  for (int r = 0; r < size<0>(scores); ++r) {
    const Range keys = mask.keys_of_row(row_of(r));
    CUTE_UNROLL
    for (int c = 0; c < size<1>(scores); ++c) {
      if (!keys.contains(key_of(c))) scores(r, c) = masked_score<float>();
    }
  }
}

template <int kRows>
class OnlineSoftmax {
 public:
  __device__ explicit OnlineSoftmax(float scale) : scale_(scale), scale_log2_(scale * kLog2e) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      row_max_[r] = masked_score<float>();
      row_sum_[r] = 0.f;
    }
  }

  // Scores of one more tile of keys become probabilities relative to the running maximum, and
  // `output`, accumulated so far, is rescaled to it.
  template <class Scores, class Output>
  __device__ __forceinline__ void step(Scores& scores, Output& output) {
    float shift[kRows];
    float largest = 0.f;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float tile_max = row_max_[r];
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c) tile_max = running_max(tile_max, scores(r, c));
      tile_max = reduce_quad(tile_max, running_max<float>);

      shift[r] = softmax_shift(tile_max);
      largest = running_max(largest, fabsf(shift[r]));
      const float rescale = exact_probability(row_max_[r], shift[r]);
      row_max_[r] = tile_max;
      row_sum_[r] *= rescale;
      CUTE_UNROLL
      for (int c = 0; c < size<1>(output); ++c) output(r, c) *= rescale;
    }
    if (__any_sync(0xffffffffu, largest * scale_log2_ > kExactFma)) {
      exponentiate(scores, [&](float score, int r) { return exact_probability(score, shift[r]); });
    } else {
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) shift[r] *= -scale_log2_;
      exponentiate(scores, [&](float score, int r) {
        return exp2_approx(fmaf(score, scale_log2_, shift[r]));
      });
    }
  }

  // Every thread of the quad must call it. A row that is not in use ends as an empty one, whatever
  // it has met.
  __device__ Finalized<float> finish(int r, bool in_use) const {
    const float row_sum = reduce_quad(row_sum_[r], [](float a, float b) { return a + b; });
    return finalize(row_max_[r], in_use ? row_sum : 0.f, scale_);
  }

 private:
  // As one fma, score * scale_log2 - shift * scale_log2 is off by the rounding of the second
  // product: 2^-14 at this size of it, which no 16-bit probability shows, and as much as exp2 can
  // take for scores near 1e11.
  static constexpr float kExactFma = 1024.f;

  __device__ __forceinline__ float exact_probability(float score, float shift) const {
    return exp2_approx((score - shift) * scale_log2_);
  }

  template <class Scores, class Probability>
  __device__ __forceinline__ void exponentiate(Scores& scores, const Probability& probability) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c) {
        scores(r, c) = probability(scores(r, c), r);
        row_sum_[r] += scores(r, c);
      }
    }
  }

  float scale_;
  float scale_log2_;
  float row_max_[kRows];
  float row_sum_[kRows];  // this thread's share until finish()
};

}  // namespace neginf
