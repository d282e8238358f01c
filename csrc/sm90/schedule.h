// In which order the tiles of a forward are worked on, and by which CTA.
//
// As many CTAs as multiprocessors each work on one tile after the other. An instance is one head
// (or pack of heads) of one sequence and split; its row tiles share K and V. Instances run in
// groups, one group after the other:
//
//   causal       row tile by row tile, the longest first, each for all instances of a group: as
//                many as L2 holds the K and V of, since they run side by side
//   otherwise    instance by instance: tiles are equal, and all instances are one group
//
// Of a group with n CTAs, CTA c has tiles c, 2n - 1 - c, 2n + c, ...: where lengths fall steadily
// the sums come out even. When the last row of these runs forward, the CTAs after it are behind by
// a tile, and the next group begins with them.
#pragma once

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "../common/forward_work.h"

namespace neginf::sm90 {

struct Schedule {
  ForwardGrid grid;
  int sequences;  // dense: batch; varlen: 1, row tiles count through all of them
  int row_tiles;  // of one sequence in that sense
  int instances;
  int group_size;  // in instances
  bool longest_first;
  int num_splits;

  static Schedule of(const ForwardParams<float>& params, int block_m) {
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
    return {grid,
            sequences,
            row_tiles,
            static_cast<int>(instances),
            static_cast<int>(group_size),
            is_causal,
            params.num_splits};
  }

  int tiles() const { return row_tiles * instances; }

  // Number `tile` of the group that begins with instance `first` and has `size` of them.
  template <int kBlockM, int kBlockN>
  __device__ ForwardWork work(const Problem<float>& problem, int first, int size, int tile) const {
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
};

// Calls body(first, size, tile) for the tiles of the calling CTA, as Schedule::work takes them.
template <class Body>
__device__ __forceinline__ void for_each_tile(const Schedule& schedule, const Body& body) {
  const int ctas = static_cast<int>(gridDim.x);
  int cta = static_cast<int>(blockIdx.x);  // counted from where the group begins
  for (int first = 0; first < schedule.instances; first += schedule.group_size) {
    const int left = schedule.instances - first;
    const int size = left < schedule.group_size ? left : schedule.group_size;
    const int tiles = size * schedule.row_tiles;
    bool forward = true;
    int begin = 0;
    for (; begin < tiles; begin += ctas, forward = !forward) {
      const int tile = begin + (forward ? cta : ctas - 1 - cta);
      if (tile < tiles) body(first, size, tile);
    }
    if (!forward) {
      cta -= tiles - (begin - ctas);
      if (cta < 0) cta += ctas;
    }
  }
}

}  // namespace neginf::sm90
