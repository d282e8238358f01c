// Attention forward on the CPU, whatever its keys come from.
//
// A work item is one block of query rows of one head, for one split of the keys. It walks over the
// tiles of keys that its rows see with an online softmax and never holds more than a tile of
// scores. Rows without keys take the same way through the epilogue as all others.
#pragma once

#include <ATen/ops/amax.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "../common/sequence.h"
#include "../lse.h"
#include "block.h"
#include "scores.h"

namespace neginf {

// Some keys and values of one head.
struct KeyTile {
  at::Tensor k;              // (keys, head_dim), of type Real
  at::Tensor v;              // (keys, head_dim_v)
  std::vector<int> missing;  // of the tile; their v is 0
};

struct RowBlock {
  int sequence;
  Range rows;  // of the buffer, those past the sequence's length included
};

template <typename Real>
std::vector<RowBlock> row_blocks(const Problem<Real>& problem) {
  std::vector<RowBlock> blocks;
  for (int sequence = 0; sequence < sequences_of(problem); ++sequence) {
    const Range all{0, query_sequence(problem, sequence).rows};
    for (int begin = 0; begin < all.end; begin += kBlockM) {
      blocks.push_back({sequence, intersect(all, {begin, begin + kBlockM})});
    }
  }
  return blocks;
}

// The online softmax of a block of rows: what has been summed over the tiles so far.
template <typename Real>
struct SoftmaxState {
  explicit SoftmaxState(int head_dim_v)
      : max(kBlockM),
        sum(kBlockM),
        tile_max(kBlockM),
        tile_sum(kBlockM),
        accumulated(kBlockM * head_dim_v) {}

  void reset(int rows, int head_dim_v) {
    std::fill_n(max.data(), rows, masked_score<Real>());
    std::fill_n(sum.data(), rows, Real(0));
    std::fill_n(accumulated.data(), rows * head_dim_v, Real(0));
  }

  // Adds a tile; scores become probabilities that are still to be divided by the row's sum.
  void add(at::Tensor scores, const at::Tensor& v) {
    const int rows = static_cast<int>(scores.size(0));
    const int head_dim_v = static_cast<int>(v.size(1));
    at::Tensor shift = tile_max.view(rows, 1);
    at::Tensor row_sum = tile_sum.view(rows, 1);
    at::amax_out(shift, scores, {1}, /*keepdim=*/true);
    for (int i = 0; i < rows; ++i) {
      const Real old_max = max.data()[i];
      max.data()[i] = running_max(old_max, tile_max.data()[i]);
      tile_max.data()[i] = softmax_shift(max.data()[i]);
      // old_max itself and not its shift: what precedes the first visible key weighs exp(-inf) = 0.
      rescale(i, std::exp(old_max - tile_max.data()[i]), head_dim_v);
    }
    scores.sub_(shift).exp_();
    at::sum_out(row_sum, scores, {1}, /*keepdim=*/true);
    for (int i = 0; i < rows; ++i) sum.data()[i] += tile_sum.data()[i];
    accumulated.view(rows, head_dim_v).addmm_(scores, v);
  }

  void rescale(int row, Real factor, int head_dim_v) {
    if (factor == Real(1)) return;
    sum.data()[row] *= factor;
    Real* out = accumulated.data() + row * head_dim_v;
    for (int d = 0; d < head_dim_v; ++d) out[d] *= factor;
  }

  Scratch<Real> max;
  Scratch<Real> sum;
  Scratch<Real> tile_max;
  Scratch<Real> tile_sum;
  Scratch<Real> accumulated;
};

// Keys: where they come from.
template <typename Real, class Keys>
class ForwardWorker {
 public:
  ForwardWorker(const ForwardParams<Real>& params, at::ScalarType type,
                const std::vector<RowBlock>& blocks, Keys keys)
      : params_(params),
        problem_(params.problem),
        type_(type),
        blocks_(blocks),
        keys_(std::move(keys)),
        state_(problem_.head_dim_v),
        q_(kBlockM * problem_.head_dim),
        scores_(kBlockM * kBlockN) {}

  // Blocks of one head are neighbours, so that its keys stay in the cache.
  void run(int64_t item) {
    const RowBlock& block = blocks_[item % blocks_.size()];
    item /= blocks_.size();
    const int head = static_cast<int>(item % problem_.num_heads);
    const int split = static_cast<int>(item / problem_.num_heads);

    state_.reset(block.rows.size(), problem_.head_dim_v);
    attend(block, head, split);
    write(block, head, split);
  }

 private:
  void attend(const RowBlock& block, int head, int split) {
    const Sequence queries = query_sequence(problem_, block.sequence);
    const Mask mask = mask_of(problem_, queries, keys_.sequence(block.sequence));
    const Range rows = intersect(block.rows, {0, queries.length});
    const Range visible = mask.keys_of_rows(rows);
    const Range common = mask.keys_common_to_rows(rows);
    const Range tiles = share_of(tiles_covering(visible, kBlockN), split, params_.num_splits);
    if (tiles.empty()) return;

    const int head_k = head / (problem_.num_heads / problem_.num_heads_k);
    const HeadRows all_q(params_.q, type_, params_.q_strides, block.sequence, queries.first_row,
                         head, problem_.head_dim);
    const HeadScores<Real> head_scores{problem_, mask, block.sequence, head};

    const at::Tensor q = q_.copy(all_q[rows]).mul_(problem_.softmax_scale);
    for (int t = tiles.begin; t < tiles.end; ++t) {
      const Range tile_keys = intersect(visible, {t * kBlockN, (t + 1) * kBlockN});
      const at::Tensor scores = scores_.view(rows.size(), tile_keys.size());
      const KeyTile tile = keys_.tile(block.sequence, head_k, tile_keys);
      head_scores.compute(q, tile.k, rows, tile_keys, scores, scores);
      if (!covers(common, tile_keys)) {
        for (int i = 0; i < rows.size(); ++i) {
          fill_invisible(scores_.data() + i * tile_keys.size(), tile_keys,
                         mask.keys_of_row(rows.begin + i), masked_score<Real>());
        }
      }
      for (int i = 0; i < rows.size(); ++i) {
        for (const int key : tile.missing) {
          scores_.data()[i * tile_keys.size() + key] = masked_score<Real>();
        }
      }
      state_.add(scores, tile.v);
    }
  }

  void write(const RowBlock& block, int head, int split) {
    const Sequence queries = query_sequence(problem_, block.sequence);
    const bool has_sink = problem_.sink != nullptr && split == 0;
    BasicLse<Real>* lse = params_.num_splits > 1
                              ? params_.lse_partial + split * params_.lse_partial_split_stride
                              : params_.lse;
    lse += block.sequence * params_.lse_strides.batch + head * params_.lse_strides.head +
           queries.first_row + block.rows.begin;
    for (int i = 0; i < block.rows.size(); ++i) {
      Finalized<Real> row = finalize(state_.max.data()[i], state_.sum.data()[i], Real(1));
      if (has_sink && block.rows.begin + i < queries.length) {
        row = merge_sink(row, problem_.sink[head]);
      }
      lse[i] = row.lse;
      Real* out = state_.accumulated.data() + i * problem_.head_dim_v;
      for (int d = 0; d < problem_.head_dim_v; ++d) out[d] = row.output(out[d]);
    }
    out_rows(block.sequence, queries.first_row, head, split)[block.rows].copy_(
        state_.accumulated.view(block.rows.size(), problem_.head_dim_v));
  }

  HeadRows out_rows(int sequence, int64_t first_row, int head, int split) const {
    if (params_.num_splits > 1) {
      return {params_.out_partial + split * params_.out_partial_split_stride,
              kScalarType<Real>,
              params_.out_partial_strides,
              sequence,
              first_row,
              head,
              problem_.head_dim_v};
    }
    return {params_.out, type_, params_.out_strides, sequence,
            first_row,   head,  problem_.head_dim_v};
  }

  const ForwardParams<Real>& params_;
  const Problem<Real>& problem_;
  const at::ScalarType type_;
  const std::vector<RowBlock>& blocks_;
  Keys keys_;
  SoftmaxState<Real> state_;
  Scratch<Real> q_;
  Scratch<Real> scores_;
};

template <typename Real, class MakeKeys>
void run_forward(const ForwardParams<Real>& params, at::ScalarType type, Bits bits,
                 const MakeKeys& make_keys) {
  const std::vector<RowBlock> blocks = row_blocks(params.problem);
  const int64_t items =
      static_cast<int64_t>(blocks.size()) * params.problem.num_heads * params.num_splits;
  run_items(items, score_cost(params.problem), bits,
            [&] { return ForwardWorker(params, type, blocks, make_keys()); });
}

}  // namespace neginf
