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

// Of a sequence of a dense tensor. In 32 bits, as every size is less than 2^30: on a GPU a division
// of 64 bits takes a hundred instructions.
template <typename Real>
NEGINF_HOST_DEVICE int dense_row_tiles(const Problem<Real>& problem, int tile_size) {
  return (static_cast<int>(problem.total_q) + tile_size - 1) / tile_size;
}

template <typename Real>
NEGINF_HOST_DEVICE int64_t num_row_tiles(const Problem<Real>& problem, int tile_size) {
  if (problem.cu_seqlens_q != nullptr) return problem.total_q / tile_size + problem.batch + 1;
  return int64_t{dense_row_tiles(problem, tile_size)} * problem.batch;
}

// The number of the first tile of a sequence.
template <typename Real>
NEGINF_HOST_DEVICE int first_row_tile(const Problem<Real>& problem, int tile_size, int index) {
  if (problem.cu_seqlens_q == nullptr) {
    return dense_row_tiles(problem, tile_size) * index;
  }
  return static_cast<int>(query_sequence(problem, index).first_row) / tile_size + index;
}

// `tile` is in [0, num_row_tiles).
template <typename Real>
NEGINF_HOST_DEVICE RowTile find_row_tile(const Problem<Real>& problem, int tile_size, int tile) {
  int index = 0;
  if (problem.cu_seqlens_q == nullptr) {
    index = tile / dense_row_tiles(problem, tile_size);
  } else {
    // The last sequence whose first tile is not past `tile`. That of sequence 0 is 0.
    int end = problem.batch + 1;
    while (end - index > 1) {
      const int middle = index + (end - index) / 2;
      if (first_row_tile(problem, tile_size, middle) <= tile) {
        index = middle;
      } else {
        end = middle;
      }
    }
  }
  return {index, query_sequence(problem, index),
          (tile - first_row_tile(problem, tile_size, index)) * tile_size};
}

// The same problem with its keys in the place of its queries, to cut those into tiles.
template <typename Real>
NEGINF_HOST_DEVICE Problem<Real> keys_as_rows(Problem<Real> problem) {
  problem.total_q = problem.total_k;
  problem.cu_seqlens_q = problem.cu_seqlens_k;
  problem.seqused_q = problem.seqused_k;
  return problem;
}

}  // namespace neginf
