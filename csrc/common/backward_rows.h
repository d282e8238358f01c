// What every GPU backward does before and after its main kernel, and the memory between the three.
//
//   prepare   per query row: its divisor and D - dL, once instead of once per key tile; dQ = 0,
//             unless the main kernel stores what comes first
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

// Of the rows of one tile. A multiple of 16 bytes, so that it is copied in such pieces.
template <int kRows>
struct alignas(16) RowStatistics {
  Log2Divisor divisor[kRows];
  float delta[kRows];  // D - dL, 0 for rows that are empty or out of bounds
  // Not 0: a row of the tile is more than base 2 and multiplication can handle. It may be empty
  // though it has keys, very large, NaN, or have such a delta; the main kernel must look.
  int needs_care;
};

struct BackwardRows {
  // What the main kernel says of a tile.
  struct Tile {
    int rows;
    int head_dim;       // of dq; a multiple of 8
    bool transposed;    // dq is kept transposed, as dq_transposed_offset says
    bool first_stores;  // who comes first to a tile of dq stores it; else it must be 0 before
  };

  int tile_rows;
  int head_dim;
  bool transposed;
  bool first_stores;
  int num_tiles;  // per head

  void* statistics;  // (num_heads, num_tiles) of RowStatistics<tile_rows>
  float* dq;         // (num_heads, num_tiles, tile_rows, head_dim), see dq_piece_offset

  int* adds;       // (num_heads, num_tiles): 0; who may write to dq, to the main kernel
  int* next_work;  // one number: the next piece of work, for kernels that claim it

  static BackwardRows allocate(const BackwardParams<float>& params, const Tile& tile);

  template <int kRows>
  NEGINF_HOST_DEVICE RowStatistics<kRows>* statistics_of(int64_t tile) const {
    return static_cast<RowStatistics<kRows>*>(statistics) + tile;
  }
  NEGINF_HOST_DEVICE float* dq_of(int64_t tile) const { return dq + tile * tile_rows * head_dim; }
};

// Within a tile dq lies in blocks of 16 rows and 8 columns, and within a block as the 32 lanes of
// a warp hold the accumulator of an m16n8 mma: registers 0 and 1 belong to row lane / 4, registers
// 2 and 3 to the row 8 below. Where a lane can add its four registers at once (from sm90 on) they
// lie together, elsewhere register by register: either way what a warp adds with one instruction is
// contiguous. All kernels of a launch must be compiled alike.
#ifdef __CUDA_ARCH__
constexpr bool kAddsVectors = __CUDA_ARCH__ >= 900;
#else
constexpr bool kAddsVectors = false;  // unused
#endif

// Of the j-th of the four float4 that hold columns column to column + 7 of rows row and row + 8,
// where row % 16 < 8 and column % 8 == 0. If kAddsVectors it is lane j's of the quad that has the
// row, otherwise register j's.
NEGINF_HOST_DEVICE int dq_piece_offset(int row, int column, int j, int head_dim) {
  const int block = row / 16 * (head_dim / 8) + column / 8;
  return block * 128 + (kAddsVectors ? row % 8 * 16 + j * 4 : j * 32 + row % 8 * 4);
}

// The same of a tile that is kept transposed: blocks of 16 columns and 8 rows, the block's `column`
// being that of the float4 that holds it and the column 8 further of rows row and row + 1.
NEGINF_HOST_DEVICE int dq_transposed_offset(int row, int column, int tile_rows) {
  const int block = column / 16 * (tile_rows / 8) + row / 8;
  return block * 128 + column % 8 * 16 + row % 8 * 2;
}

// dtype is that of q. prepare also writes dsink.
void prepare_backward(const BackwardParams<float>& params, const BackwardRows& rows, DType dtype);
void finish_backward(const BackwardParams<float>& params, const BackwardRows& rows, DType dtype);

// All three, the second one by main(params, rows).
template <class Main>
void run_around_main(const BackwardParams<float>& params, const BackwardRows::Tile& tile,
                     DType dtype, const Main& main) {
  const auto rows = BackwardRows::allocate(params, tile);
  prepare_backward(params, rows, dtype);
  main(params, rows);
  finish_backward(params, rows, dtype);
}

}  // namespace neginf
