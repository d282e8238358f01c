// How the decode kernel cuts keys and rows, and how many CTAs share out the work.
#pragma once

#include <bit>
#include <cmath>
#include <limits>

#include "../common/decode_plan.h"
#include "../common/split_heuristic.h"

namespace neginf::sm80 {

// Slices on their way are what hides the latency of memory: of each warp kStages - 1, of 4 KB of K
// and as much of V. A segment begins and ends with waiting, in which another CTA reads on.
template <int kHeadDim_>
struct DecodeTile {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kKeys = kHeadDim <= 64 ? 32 : 16;
  static constexpr int kStages = 3;
  static constexpr int kStagesBesideQueries = 2;
  static constexpr int kWarps = kHeadDim <= 128 ? 4 : 2;
  static constexpr int kBlockN = kKeys * kWarps;
  static_assert(std::has_single_bit(static_cast<unsigned>(kBlockN)));
  static constexpr int kMostRows = kHeadDim <= 128 ? 32 : 16;
  static constexpr int kBlocksPerSm = 1;
  static constexpr int kSharedBytes = 99 * 1024;  // what sm86, sm89 and sm120 have
};

template <typename Tile>
DecodeGrid decode_grid(const DecodeParams<float>& params, int rows) {
  // Beyond so many sequences, finding one's own place among them takes longer than an even division
  // wins.
  constexpr int kMostSequences = 8192;

  const Problem<float>& problem = params.problem;
  const int group = problem.num_heads / problem.num_heads_k;
  const auto packing = QueryPacking::of_group(group, rows);
  DecodeGrid grid{{packing, static_cast<int>(num_row_tiles(problem, packing.positions)),
                   problem.num_heads_k * packing.head_tiles, group},
                  std::countr_zero(static_cast<unsigned>(Tile::kBlockN)),
                  problem.cu_seqlens_q == nullptr ? dense_row_tiles(problem, packing.positions) : 0,
                  0,
                  0.f,
                  1,
                  0};
  if (params.keys_per_split > 0) {
    const int blocks = (params.cache.capacity + Tile::kBlockN - 1) / Tile::kBlockN;
    grid.blocks_per_split = (params.keys_per_split + Tile::kBlockN - 1) / Tile::kBlockN;
    grid.splits = blocks / grid.blocks_per_split + 1;
  } else if (params.num_splits > 0) {
    grid.splits = params.num_splits;
  } else if (problem.batch <= kMostSequences &&
             grid.num_tiles() * (params.cache.capacity / Tile::kBlockN + 1) <
                 std::numeric_limits<int>::max()) {
    grid.even_workers = params.num_sms * Tile::kBlocksPerSm;
    grid.share_of_worker = std::nextafter(1.f / grid.even_workers, 0.f);
  }
  return grid;
}

}  // namespace neginf::sm80
