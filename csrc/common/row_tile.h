// Which query rows a CTA works on.
//
// Dense: every sequence has the same number of tiles. Packed: the lengths are known to the GPU
// only, so tiles get numbers without a prefix sum, a hint from the host or a synchronisation.
// Sequence b owns the numbers from floor(cu[b] / tile_size) + b up to those of b + 1, that is
//     floor(cu[b + 1] / tile_size) - floor(cu[b] / tile_size) + 1 >= ceil(length / tile_size)
// of them. The price is at most one unused tile per sequence. The pseudo-sequence b == batch, the
// rows that belong to nobody, is numbered alike, so that every row of the buffer is in some tile.
#pragma once

#include "sequence.h"

namespace neginf {

struct RowTile {
  int index;  // of the sequence; problem.batch: rows of no sequence
  Sequence sequence;
  int first_row;  // in the sequence; past its end in an unused tile

  NEGINF_HOST_DEVICE Range rows(int tile_size) const { return {first_row, first_row + tile_size}; }
};

template <typename Real>
NEGINF_HOST_DEVICE int64_t num_row_tiles(const Problem<Real>& problem, int tile_size) {
  if (problem.cu_seqlens_q != nullptr) return problem.total_q / tile_size + problem.batch + 1;
  return (problem.total_q + tile_size - 1) / tile_size * problem.batch;
}

// `tile` is in [0, num_row_tiles).
template <typename Real>
NEGINF_HOST_DEVICE RowTile find_row_tile(const Problem<Real>& problem, int tile_size, int tile) {
  if (problem.cu_seqlens_q == nullptr) {
    const int tiles = static_cast<int>((problem.total_q + tile_size - 1) / tile_size);
    const int index = tile / tiles;
    return {index, query_sequence(problem, index), (tile - index * tiles) * tile_size};
  }
  const auto first_tile = [&](int index) {
    return static_cast<int>(query_sequence(problem, index).first_row / tile_size) + index;
  };
  // The last sequence whose first tile is not past `tile`. first_tile(0) is 0.
  int index = 0;
  int end = problem.batch + 1;
  while (end - index > 1) {
    const int middle = index + (end - index) / 2;
    if (first_tile(middle) <= tile) {
      index = middle;
    } else {
      end = middle;
    }
  }
  return {index, query_sequence(problem, index), (tile - first_tile(index)) * tile_size};
}

}  // namespace neginf
