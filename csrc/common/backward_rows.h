// What every GPU backward does before and after its main kernel, and the memory between the three.
//
//   prepare   per query row: its divisor and D - dL, once instead of once per key tile; dQ = 0
//   main      (of each architecture) per tile of keys: dK and dV; adds to dQ in fp32
//   finish    dQ * softmax_scale to the dtype of q
//
// Row tiles are numbered as in row_tile.h and padded to their full size, so that the main kernel
// reads and adds without bounds.
#pragma once

#include "../lse_backward.h"
#include "../params.h"
#include "row_tile.h"

namespace neginf {

struct BackwardRows {
  int tile_rows;  // kBlockM of the main kernel
  int head_dim;   // of dq; a multiple of 8
  int num_tiles;  // per head

  Log2Divisor* divisor;  // (num_heads, num_tiles, tile_rows)
  float* delta;          // likewise; D - dL, 0 for rows that are empty or out of bounds
  float* dq;             // (num_heads, num_tiles, tile_rows, head_dim), see dq_offset

  // (num_heads, num_tiles). Not 0: a row of the tile is more than base 2 and multiplication can
  // handle. It may be empty though it has keys, NaN, or very large; the main kernel must look.
  int* needs_care;
  // (num_heads, num_tiles), for deterministic sums: how many key tiles have added to dq.
  int* adds;
  int* next_work;  // one number, for deterministic sums: the next piece of work

  static BackwardRows allocate(const BackwardParams<float>& params, int tile_rows, int head_dim);

  NEGINF_HOST_DEVICE int64_t tile(int head, int tile) const {
    return static_cast<int64_t>(head) * num_tiles + tile;
  }
  NEGINF_HOST_DEVICE int64_t tile_size() const {
    return static_cast<int64_t>(tile_rows) * head_dim;
  }
};

// Within a tile dq lies in blocks of 16 rows and 8 columns, and within a block as the 32 lanes of
// a warp hold the accumulator of an m16n8 mma: register by register. A warp that adds one register
// therefore touches 128 consecutive bytes.
NEGINF_HOST_DEVICE int dq_offset(int row, int column, int head_dim) {
  const int block = row / 16 * (head_dim / 8) + column / 8;
  const int reg = row % 16 / 8 * 2 + column % 2;
  const int lane = row % 8 * 4 + column % 8 / 2;
  return block * 128 + reg * 32 + lane;
}

// dtype is that of q. prepare also writes dsink.
void prepare_backward(const BackwardParams<float>& params, const BackwardRows& rows, DType dtype);
void finish_backward(const BackwardParams<float>& params, const BackwardRows& rows, DType dtype);

}  // namespace neginf
