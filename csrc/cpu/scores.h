// A tile of scores on the CPU: the steps that forward and backward must do alike.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/tanh.h>

#include <algorithm>

#include "../common/score.h"
#include "../mask.h"
#include "../params.h"

namespace neginf {

// Rows per block and keys per tile. A float tile is half a megabyte and stays in a core's L2.
constexpr int kBlockM = 256;
constexpr int kBlockN = 512;

inline bool covers(Range outer, Range inner) {
  return outer.begin <= inner.begin && inner.end <= outer.end;
}

// Overwrites what a row of a tile holds for keys that the row does not see.
template <typename Real>
void fill_invisible(Real* tile_row, Range tile, Range visible, Real value) {
  const int begin = std::clamp(visible.begin, tile.begin, tile.end);
  const int end = std::clamp(visible.end, begin, tile.end);
  std::fill(tile_row, tile_row + (begin - tile.begin), value);
  std::fill(tile_row + (end - tile.begin), tile_row + tile.size(), value);
}

// One (sequence, head) of the problem.
template <typename Real>
struct HeadScores {
  const Problem<Real>& problem;
  Mask mask;
  int sequence;
  int head;

  // Scores before the mask. q comes multiplied by softmax_scale. tanh_of_scores is where the
  // backward wants tanh for softcap's derivative; the forward passes `scores` again.
  void compute(const at::Tensor& q, const at::Tensor& k, Range rows, Range keys, at::Tensor scores,
               at::Tensor tanh_of_scores) const {
    at::mm_out(scores, q, k.t());
    if (problem.softcap > 0) {
      scores.div_(problem.softcap);
      at::tanh_out(tanh_of_scores, scores);
      at::mul_out(scores, tanh_of_scores, at::Scalar(problem.softcap));
    }
    if (problem.alibi_slopes != nullptr) {
      const Real slope = problem.alibi_slopes[sequence * problem.alibi_batch_stride + head];
      Real* score = scores.data_ptr<Real>();
      for (int row = rows.begin; row < rows.end; ++row) {
        for (int key = keys.begin; key < keys.end; ++key) {
          *score++ += alibi_bias(slope, row, key, mask.offset());
        }
      }
    }
  }
};

}  // namespace neginf
