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
  float scale;           // s = raw * scale, raw being what these leave behind
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

  // `scores` is q.k on entry. First this one, then apply_alibi, each if there is such a thing.
  template <class Scores>
  __device__ __forceinline__ void apply_softcap(Scores& scores) const {
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) scores(i) = tanh_approx(scores(i) * softcap_factor);
  }

  // row_of(r) and key_of(c) are the coordinates in the sequence, slope_of(r) the slope of the head.
  template <class Scores, class SlopeOf, class RowOf, class KeyOf>
  __device__ __forceinline__ void apply_alibi(Scores& scores, const SlopeOf& slope_of,
                                              const Mask& mask, const RowOf& row_of,
                                              const KeyOf& key_of) const {
    CUTE_UNROLL
    for (int r = 0; r < size<0>(scores); ++r) {
      const float slope = slope_of(r);
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c) {
        const float bias = alibi_bias(slope, row_of(r), key_of(c), mask.offset());
        scores(r, c) = scores(r, c) * alibi_factor + bias;
      }
    }
  }
};

// Masking overwrites: a key the row does not see weighs nothing even when its score is NaN. The
// keys of a row begin at 0 unless the window is bounded on the left, so most masks need one
// comparison. Compared are distances from the first column: they are constants.
template <class Scores, class RowOf, class KeyOf>
__device__ __forceinline__ void apply_mask(Scores& scores, const Mask& mask, const RowOf& row_of,
                                           const KeyOf& key_of) {
  CUTE_UNROLL
  for (int r = 0; r < size<0>(scores); ++r) {
    const int end = mask.keys_of_row(row_of(r)).end - key_of(0);
    CUTE_UNROLL
    for (int c = 0; c < size<1>(scores); ++c) {
      if (key_of(c) - key_of(0) >= end) scores(r, c) = masked_score<float>();
    }
  }
  if (mask.window_left < 0) return;
  CUTE_UNROLL
  for (int r = 0; r < size<0>(scores); ++r) {
    const int begin = mask.keys_of_row(row_of(r)).begin - key_of(0);
    CUTE_UNROLL
    for (int c = 0; c < size<1>(scores); ++c) {
      if (key_of(c) - key_of(0) < begin) scores(r, c) = masked_score<float>();
    }
  }
}

// So many of the columns of a lane, two neighbours of every eight keys, lie before key `end`, both
// counted from its first one; as ones in a word for 32 of them.
__device__ __forceinline__ uint32_t columns_before(int end) {
  const int columns = 2 * (end >> 3) + min(end & 7, 2);
  return ~__funnelshift_lc(0u, 0xffffffffu, max(columns, 0));
}

// The same with a bit for each score, of which an instruction makes seven predicates.
// keys_of(r) are the keys of a row, counted from the first column of the lane.
template <class Scores, class KeysOf>
__device__ __forceinline__ void apply_mask_by_bits(Scores& scores, const KeysOf& keys_of) {
  constexpr int kBits = 32;
  CUTE_UNROLL
  for (int r = 0; r < size<0>(scores); ++r) {
    const Range keys = keys_of(r);
    CUTE_UNROLL
    for (int first = 0; first < size<1>(scores); first += kBits) {
      const int passed = 4 * first;  // keys
      const uint32_t seen =
          columns_before(keys.end - passed) & ~columns_before(keys.begin - passed);
      CUTE_UNROLL
      for (int c = first; c < size<1>(scores) && c < first + kBits; ++c) {
        if ((seen >> (c - first) & 1) == 0) scores(r, c) = masked_score<float>();
      }
    }
  }
}

template <class Tensor>
__device__ __forceinline__ void multiply_row(Tensor& tensor, int r, float factor) {
  CUTE_UNROLL
  for (int c = 0; c < size<1>(tensor); ++c) tensor(r, c) *= factor;
}

template <int kRows>
class OnlineSoftmax {
 public:
  struct RowValues {
    float of_row[kRows];
  };

  __device__ explicit OnlineSoftmax(float scale) : scale_(scale), scale_log2_(scale * kLog2e) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      row_max_[r] = masked_score<float>();
      row_sum_[r] = 0.f;
    }
    if constexpr (kKeepsOffsets) offsets_ = offsets_of_maximum();
  }

  // First part of a step: this thread's share of the maxima of one more tile of keys.
  template <class Scores>
  static __device__ __forceinline__ RowValues maxima(const Scores& scores) {
    RowValues max;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      max.of_row[r] = scores(r, 0);
      CUTE_UNROLL
      for (int c = 1; c < size<1>(scores); ++c)
        max.of_row[r] = running_max(max.of_row[r], scores(r, c));
    }
    return max;
  }

  // Whether the running maximum of a row of the warp is too small for them: one that is less than
  // 2^kSlack too small may stay, as probabilities up to that size do no harm. After the first tiles
  // hardly any row needs the exchange with its quad and the pass over O.
  __device__ __forceinline__ bool outgrown_by(const RowValues& tile_max) const {
    bool outgrown = false;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      outgrown |= outgrows(tile_max.of_row[r], r);
    }
    return __any_sync(0xffffffffu, outgrown);
  }

  // Second part, needed only then: raises the running maxima. What has been accumulated for a row
  // must be multiplied by the factor with which rescale(r, factor) is called.
  template <class Rescale>
  __device__ __forceinline__ void raise_maximum(const RowValues& tile_max, const Rescale& rescale) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const float raised =
          running_max(row_max_[r], reduce_quad(tile_max.of_row[r], running_max<float>));
      const float factor = exp2_approx((row_max_[r] - softmax_shift(raised)) * scale_log2_);
      row_max_[r] = raised;
      row_sum_[r] *= factor;
      rescale(r, factor);
    }
    if constexpr (kKeepsOffsets) offsets_ = offsets_of_maximum();
  }

  // Second part where the bits of a row must not depend on the rows beside it: raises the maxima of
  // those rows alone that outgrow theirs.
  template <class Rescale>
  __device__ __forceinline__ void raise_each_maximum(RowValues tile_max, const Rescale& rescale) {
    if (!outgrown_by(tile_max)) return;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const float max = reduce_quad(tile_max.of_row[r], running_max<float>);
      tile_max.of_row[r] = outgrows(max, r) ? max : masked_score<float>();
    }
    raise_maximum(tile_max, rescale);
  }

  // Third part: the scores become probabilities relative to the running maximum.
  template <class Scores>
  __device__ __forceinline__ void exponentiate(Scores& scores) {
    float factor = scale_log2_;
    Offsets offsets = kKeepsOffsets ? offsets_ : offsets_of_maximum();
    if (offsets.any_large) {
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const float shift = softmax_shift(row_max_[r]);
        CUTE_UNROLL
        for (int c = 0; c < size<1>(scores); ++c) {
          scores(r, c) = (scores(r, c) - shift) * scale_log2_;
        }
        offsets.of_row[r] = 0.f;
      }
      factor = 1.f;
    }
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c) {
        scores(r, c) = exp2_approx(fmaf(scores(r, c), factor, offsets.of_row[r]));
        row_sum_[r] += scores(r, c);
      }
    }
  }

  __device__ float row_max(int r) const { return row_max_[r]; }
  // Every thread of the quad must call it.
  __device__ float row_sum(int r) const {
    return reduce_quad(row_sum_[r], [](float a, float b) { return a + b; });
  }

  // With a sum of 0 the row ends as an empty one, whatever it has met.
  __device__ Finalized<float> finish(int r, float row_sum) const {
    return finalize(row_max_[r], row_sum, scale_);
  }

 private:
  static constexpr float kSlack = 8.f;
  __device__ __forceinline__ bool outgrows(float max, int r) const {
    // From -inf to anything is a growth of inf; -inf to -inf is NaN, and so is inf to inf: none.
    return (max - row_max_[r]) * scale_log2_ > kSlack;
  }

  // As one fma, score * scale_log2 - shift * scale_log2 is off by the rounding of the second
  // product: 2^-14 at this size of it, which no 16-bit probability shows, and as much as exp2 can
  // take for scores near 1e11.
  static constexpr float kExactFma = 1024.f;

  // Made when the maximum changes; where a thread has many rows, in every step, as their registers
  // would be spilled.
  static constexpr bool kKeepsOffsets = kRows <= 2;
  struct Offsets {
    float of_row[kRows];  // -softmax_shift(row_max) in base 2
    bool any_large;       // in the warp: past kExactFma
  };

  __device__ __forceinline__ Offsets offsets_of_maximum() const {
    Offsets offsets;
    float largest = 0.f;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      offsets.of_row[r] = -scale_log2_ * softmax_shift(row_max_[r]);
      largest = running_max(largest, fabsf(offsets.of_row[r]));
    }
    offsets.any_large = __any_sync(0xffffffffu, largest > kExactFma);
    return offsets;
  }

  float scale_;
  float scale_log2_;
  float row_max_[kRows];
  float row_sum_[kRows];  // this thread's share until finish()
  Offsets offsets_;       // if kept
};

}  // namespace neginf
