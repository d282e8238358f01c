// Where things lie in a tile in shared memory, and where each lane finds its part of an mma operand
// there. Plain arithmetic, so that a test can play ldmatrix and mma on the host.
#pragma once

#include <cstdint>

#include "../lse.h"

namespace neginf::sm80 {

// A tile of kRows x kColumns elements of 2 bytes, 128-byte aligned: column blocks kWidth wide, one
// after the other, each with kRows rows. The 16-byte chunks of a row are permuted (chunk ^= a
// function of the row), so that eight rows of one chunk, or a row, meet no bank twice.
template <int kRows, int kColumns>
struct SwizzledTile {
  static constexpr int kTileRows = kRows;
  static constexpr int kWidth = kColumns % 64 == 0 ? 64 : 32;
  static constexpr int kChunks = kWidth / 8;  // of 16 bytes, per row of a column block
  static constexpr int kRowBytes = kWidth * 2;
  static constexpr int kBlocks = kColumns / kWidth;
  static constexpr int kBlockBytes = kRows * kRowBytes;

  // Of (row, chunk) in the first column block.
  static NEGINF_HOST_DEVICE uint32_t offset(int row, int chunk) {
    const int permuted = chunk ^ (kWidth == 64 ? row % 8 : row / 2 % 4);
    return row * kRowBytes + permuted * 16;
  }

  // From the address of (row, chunk) to that of (row + rows, chunk + chunks), where rows is a
  // multiple of 8 and chunks has no bit that chunk may have.
  static NEGINF_HOST_DEVICE uint32_t move(uint32_t address, int rows, int chunks) {
    return (address ^ (chunks % kChunks * 16)) + chunks / kChunks * kBlockBytes + rows * kRowBytes;
  }
};

// Operands of a product of which the warps take turns along a dimension, as CuTe's TiledMMA shares
// it out: `kWarps` of them, 16 rows each, or 8 columns each (so that the two halves of a warp's 16
// columns are 8 * kWarps apart). begin() is the offset in the tile for m, n, k = 0, at() goes on
// from an address that began there: A in steps m of 16 rows, B in steps n of 16 columns, k in steps
// of 16. What each lane passes to ldmatrix.

// A (m, k), k along the columns of the tile.
template <class Tile, int kWarps>
struct OperandA {
  static NEGINF_HOST_DEVICE uint32_t begin(int lane, int warp) {
    return Tile::offset(16 * warp + lane % 16, lane / 16);
  }
  static NEGINF_HOST_DEVICE uint32_t at(uint32_t address, int m, int k) {
    return Tile::move(address, 16 * kWarps * m, 2 * k);
  }
};

// A (m, k), k along its rows; for ldmatrix.trans.
template <class Tile, int kWarps>
struct TransposedOperandA {
  static NEGINF_HOST_DEVICE uint32_t begin(int lane, int warp) {
    return Tile::offset(lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2);
  }
  static NEGINF_HOST_DEVICE uint32_t at(uint32_t address, int m, int k) {
    return Tile::move(address, 16 * k, 2 * kWarps * m);
  }
};

// B (n, k), k along the columns of the tile.
template <class Tile, int kWarps>
struct OperandB {
  static NEGINF_HOST_DEVICE uint32_t begin(int lane, int warp) {
    return Tile::offset(lane % 8 + 8 * (warp + kWarps * (lane / 16)), lane / 8 % 2);
  }
  static NEGINF_HOST_DEVICE uint32_t at(uint32_t address, int n, int k) {
    return Tile::move(address, 16 * kWarps * n, 2 * k);
  }
};

// B (n, k), k along its rows; for ldmatrix.trans.
template <class Tile, int kWarps>
struct TransposedOperandB {
  static NEGINF_HOST_DEVICE uint32_t begin(int lane, int warp) {
    return Tile::offset(lane % 16, warp + kWarps * (lane / 16));
  }
  static NEGINF_HOST_DEVICE uint32_t at(uint32_t address, int n, int k) {
    return Tile::move(address, 16 * k, 2 * kWarps * n);
  }
};

// Where a lane stores pairs of an accumulator that becomes a tile: of rows lane / 4 and, with half
// = 1, 8 rows below, in steps m of 16 rows and n of 8 columns.
template <class Tile, int kWarpsM, int kWarpsN>
struct AccumulatorStore {
  static NEGINF_HOST_DEVICE uint32_t begin(int lane, int warp_m, int warp_n) {
    return Tile::offset(16 * warp_m + lane / 4, warp_n) + lane % 4 * 4;
  }
  static NEGINF_HOST_DEVICE uint32_t at(uint32_t address, int m, int half, int n) {
    return Tile::move(address, 16 * kWarpsM * m + 8 * half, kWarpsN * n);
  }
};

}  // namespace neginf::sm80
