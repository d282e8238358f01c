// What the tiles of a forward are. Groups of instances (tile_order.h) are cut so:
//
//   causal       a group is as many instances as L2 holds the K and V of, since they run side by
//                side: row tile by row tile, the longest first, each for all of them
//   otherwise    instance by instance: tiles are equal, and all instances are one group
#pragma once

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "../common/forward_work.h"
#include "tile_order.h"

namespace neginf::sm90 {

struct Schedule {
  ForwardGrid grid;
  TileOrder order;
  int sequences;  // dense: batch; varlen: 1, row tiles count through all of them
  bool longest_first;
  int num_splits;

  static Schedule of(const ForwardParams<float>& params, int block_m, int block_n) {
    const Problem<float>& problem = params.problem;
    const auto grid = ForwardGrid::of(problem, block_m);
    const int sequences = problem.cu_seqlens_q == nullptr ? problem.batch : 1;
    const int row_tiles = sequences == 0 ? 0 : grid.row_tiles / sequences;
    const int64_t instances = int64_t{sequences} * grid.head_tiles * params.num_splits;
    if (row_tiles * instances > std::numeric_limits<int>::max() / 2) {
      throw std::runtime_error("neginf: sm90 forward: too many row tiles x heads x splits: " +
                               std::to_string(row_tiles * instances));
    }
    const bool is_causal = problem.window_left < 0 && problem.window_right >= 0;
    // K and V of one instance, 16 bits each.
    const int64_t bytes =
        std::max<int64_t>(1, 2 * problem.total_k * (problem.head_dim + problem.head_dim_v));
    const int64_t group_size =
        is_causal ? std::clamp<int64_t>(kL2Bytes / bytes, 1, std::max<int64_t>(1, instances))
                  : instances;
    // How many keys are in use is known to the GPU only.
    const int tiles_per_cta =
        problem.seqused_k != nullptr
            ? 0
            : choose_tiles_per_cta(row_tiles * instances,
                                   keys_per_row(problem) / params.num_splits / block_n, !is_causal,
                                   params.num_sms);
    return {grid,
            {row_tiles, static_cast<int>(instances), static_cast<int>(group_size), tiles_per_cta},
            sequences,
            is_causal,
            params.num_splits};
  }

  // As for_each_tile numbers them.
  template <int kBlockM, int kBlockN>
  __device__ ForwardWork work(const Problem<float>& problem, int first, int size, int tile) const {
    const int row_tiles = order.row_tiles;
    const int row = longest_first ? tile / size : tile % row_tiles;
    const int instance = first + (longest_first ? tile - row * size : tile / row_tiles);
    const int head_and_split = sequences == 1 ? instance : instance / sequences;
    const int sequence = instance - head_and_split * sequences;
    const int split = num_splits == 1 ? 0 : head_and_split / grid.head_tiles;
    return ForwardWork::of<kBlockM, kBlockN>(
        problem, grid, sequence * row_tiles + row_tiles - 1 - row,
        head_and_split - split * grid.head_tiles, split, num_splits);
  }

 private:
  // What K and V may take of the 50 MB.
  static constexpr int64_t kL2Bytes = 32 << 20;

  // About, of all keys.
  static int64_t keys_per_row(const Problem<float>& problem) {
    const int64_t sequences = std::max(problem.batch, 1);
    const auto length = [&](const int* cu_seqlens, int seqlen, int64_t total) {
      return cu_seqlens == nullptr ? seqlen : total / sequences;
    };
    const int64_t rows = length(problem.cu_seqlens_q, problem.seqlen_q, problem.total_q);
    const int64_t keys = length(problem.cu_seqlens_k, problem.seqlen_k, problem.total_k);
    const int64_t left = problem.window_left;
    const int64_t right = problem.window_right;
    if (left >= 0 && right >= 0) return std::min(keys, left + 1 + right);
    return left < 0 && right < 0 ? keys : keys - std::min(rows, keys) / 2;
  }
};

}  // namespace neginf::sm90
