// What the tiles of a forward are. Groups of instances (tile_order.h) are cut so:
//
//   causal       a group is some instances that run side by side: row tile by row tile, the longest
//                first, each for all of them
//   otherwise    instance by instance, and all of them are one group: tiles are equal, or come in
//                pairs that are
#pragma once

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "../common/forward_work.h"
#include "tile_order.h"

namespace neginf::sm90 {

// Lengths of the sequences, about, and how many keys a row sees.
struct MeanLengths {
  int64_t rows;
  int64_t keys_per_row;

  static MeanLengths of(const Problem<float>& problem) {
    const int64_t sequences = std::max(problem.batch, 1);
    const auto length = [&](const int* cu_seqlens, int seqlen, int64_t total) {
      return cu_seqlens == nullptr ? seqlen : total / sequences;
    };
    const int64_t rows = length(problem.cu_seqlens_q, problem.seqlen_q, problem.total_q);
    const int64_t keys = length(problem.cu_seqlens_k, problem.seqlen_k, problem.total_k);
    return {rows, keys_per_row_of(problem, rows, keys)};
  }

 private:
  static int64_t keys_per_row_of(const Problem<float>& problem, int64_t rows, int64_t keys) {
    const int64_t left = problem.window_left;
    const int64_t right = problem.window_right;
    if (left >= 0 && right >= 0) return std::min(keys, left + 1 + right);
    return left < 0 && right < 0 ? keys : keys - std::min(rows, keys) / 2;
  }
};

struct Schedule {
  ForwardGrid grid;
  TileOrder order;
  int sequences;
  PackedTiles packed;  // no tiles: dense, or all row tiles are those of one sequence
  bool longest_first;
  int num_splits;

  static Schedule of(const ForwardParams<float>& params, int block_m, int block_n) {
    const Problem<float>& problem = params.problem;
    const auto grid = ForwardGrid::of(problem, block_m);
    const bool is_causal = problem.window_left < 0 && problem.window_right >= 0;
    const bool is_packed = problem.cu_seqlens_q != nullptr;
    const PackedTiles packed = is_packed && is_causal
                                   ? PackedTiles::of(grid.row_tiles, problem.batch, problem.total_q,
                                                     grid.packing.positions)
                                   : PackedTiles{};
    const int sequences = packed.tiles > 0 ? packed.sequences : is_packed ? 1 : problem.batch;
    const int row_tiles = packed.tiles > 0 ? packed.most()
                          : sequences == 0 ? 0
                                           : grid.row_tiles / sequences;
    const int64_t instances = int64_t{sequences} * grid.head_tiles * params.num_splits;
    if (row_tiles * instances > std::numeric_limits<int>::max() / 2) {
      throw std::runtime_error("neginf: sm90 forward: too many row tiles x heads x splits: " +
                               std::to_string(row_tiles * instances));
    }
    // How many keys are in use is known to the GPU only.
    const int tiles_per_cta = problem.seqused_k != nullptr
                                  ? 0
                                  : choose_tiles_per_cta(row_tiles * instances,
                                                         MeanLengths::of(problem).keys_per_row /
                                                             params.num_splits / block_n,
                                                         !is_causal, params.num_sms);
    const InstanceBytes bytes = InstanceBytes::of(problem);
    const bool longest_first =
        is_causal &&
        (is_packed || !pairs_are_even(bytes, row_tiles, instances, tiles_per_cta, params.num_sms));
    // Of packed sequences what is left over counts for little, as a sequence and as a row tile.
    const int64_t group_size =
        !longest_first ? instances
                       : sorted_group(bytes, row_tiles - is_packed,
                                      instances - is_packed * grid.head_tiles * params.num_splits,
                                      tiles_per_cta, block_m, params.num_sms);
    return {grid,
            {row_tiles, static_cast<int>(instances), static_cast<int>(group_size), tiles_per_cta},
            sequences,
            packed,
            longest_first,
            params.num_splits};
  }

  // A row tile as `grid` numbers them.
  struct Place {
    bool exists;
    int row_tile;
    int head_tile;
    int split;
  };

  // As for_each_tile numbers them.
  __device__ Place place(int first, int size, int tile) const {
    const int row_tiles = order.row_tiles;
    const int row = longest_first ? tile / size : tile % row_tiles;
    const int instance = first + (longest_first ? tile - row * size : tile / row_tiles);
    // Heads beside each other lie beside each other in memory.
    const int sequence_and_split = instance / grid.head_tiles;
    const int split = num_splits == 1 ? 0 : sequence_and_split / sequences;
    const int sequence = sequence_and_split - split * sequences;
    const int head_tile = instance - sequence_and_split * grid.head_tiles;
    if (packed.tiles == 0) {
      return {true, sequence * row_tiles + row_tiles - 1 - row, head_tile, split};
    }
    // The one that may be unused comes after the others: it is short.
    const int in_sequence = row == row_tiles - 1 ? row : row_tiles - 2 - row;
    const int row_tile = packed.first(sequence) + in_sequence;
    return {row_tile < packed.first(sequence + 1), row_tile, head_tile, split};
  }

 private:
  // Of one instance, in tensors of 16 bits.
  struct InstanceBytes {
    int64_t keys;  // of K and V
    int64_t all;   // with Q and O

    static InstanceBytes of(const Problem<float>& problem) {
      const int64_t columns = problem.head_dim + problem.head_dim_v;
      const auto of_one = [&](const int* cu_seqlens, int64_t rows) {
        return 2 * columns * (cu_seqlens == nullptr ? rows : rows / std::max(problem.batch, 1));
      };
      const int64_t keys = of_one(problem.cu_seqlens_k, problem.total_k);
      const int64_t queries = of_one(problem.cu_seqlens_q, problem.total_q);
      return {std::max<int64_t>(1, keys), std::max<int64_t>(1, keys + queries)};
    }
  };

  // What K and V may take of the 50 MB of L2, and what they may with Q and O.
  static constexpr int64_t kKeyBytes = 32 << 20;
  static constexpr int64_t kBytes = 48 << 20;

  // Whether instance by instance each CTA gets pairs of row tiles that are together as long as any
  // other pair, r and row_tiles - 1 - r, and no single one at the end. Sorting is then worth
  // nothing but traffic: L2 does not hold all that two tiles for each CTA need.
  static bool pairs_are_even(const InstanceBytes& bytes, int64_t row_tiles, int64_t instances,
                             int tiles_per_cta, int num_sms) {
    if (row_tiles == 0 || row_tiles > kFewRowTiles || tiles_per_cta > 0) return false;
    const int64_t turns = (row_tiles * instances + num_sms - 1) / num_sms;
    return 2 * num_sms % row_tiles == 0 && turns % 2 == 0 &&
           2 * num_sms / row_tiles * bytes.all > kBytes;
  }

  // How many instances are sorted together. Not more than L2 holds the K and V of, and better as
  // many as have just two, four or six tiles for each CTA, since the order gives every CTA as much
  // of these. With three warpgroups more is better, as the cost of a row tile is no straight line;
  // of very short sequences less: the K and V of all in a group are needed at once.
  static int64_t sorted_group(const InstanceBytes& bytes, int64_t row_tiles, int64_t instances,
                              int tiles_per_cta, int block_m, int num_sms) {
    if (row_tiles * instances == 0) return 1;
    const int64_t in_l2 = std::clamp<int64_t>(kKeyBytes / bytes.keys, 1, instances);
    if (tiles_per_cta > 0) {
      // The hardware balances runs of the last group only if there are some for each.
      const int64_t enough = int64_t{kRunsPerSm} * num_sms * tiles_per_cta / row_tiles;
      const int64_t groups = std::max<int64_t>(1, instances / std::max(in_l2, enough));
      return (instances + groups - 1) / groups;
    }
    const int most_turns = block_m > 128 ? 6 : row_tiles <= kFewRowTiles / 2 ? 2 : 4;
    for (int64_t turns = most_turns; turns > 0; turns -= 2) {
      const int64_t tiles = turns * num_sms;
      const int64_t size = tiles / row_tiles;
      if (size == 0 || size > in_l2 + in_l2 / 16) continue;
      const int64_t left_over = instances % size;
      const bool fills = 16 * (tiles - size * row_tiles) <= tiles;
      const bool ends_evenly = instances >= 6 * size || left_over == 0 || 4 * left_over >= 3 * size;
      if (fills && ends_evenly) return size;
    }
    return in_l2;
  }
  static constexpr int64_t kFewRowTiles = 8;
};

}  // namespace neginf::sm90
