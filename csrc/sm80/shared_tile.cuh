// Tiles in shared memory for kernels that are short of registers, with addresses made by hand.
//
// Where every register counts, CuTe's partitions cost too many: each swizzled offset of a thread
// and each row pointer is a value of its own that lives as long as the loop. Here a thread keeps
// one address per tile; all others are it, xor or plus a constant.
#pragma once

#include <cutlass/numeric_conversion.h>

#include <cstdint>
#include <cute/tensor.hpp>

#include "swizzle.h"

namespace neginf::sm80 {

using namespace cute;

// A SwizzledTile with the same layout for CuTe.
template <int kRows, int kColumns>
struct SharedTile : SwizzledTile<kRows, kColumns> {
  static constexpr int kWidth = SwizzledTile<kRows, kColumns>::kWidth;
  using Layout = decltype(tile_to_shape(
      composition(Swizzle<kWidth == 64 ? 3 : 2, 3, 3>{},
                  cute::Layout<Shape<_8, Int<kWidth>>, Stride<Int<kWidth>, _1>>{}),
      Shape<Int<kRows>, Int<kColumns>>{}));
};

__device__ __forceinline__ void ldmatrix(uint32_t (&to)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address));
}

__device__ __forceinline__ void ldmatrix_transposed(uint32_t (&to)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address));
}

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// 16 bytes, or 16 zeros instead of reading anything.
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from, bool wanted) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(wanted ? 16 : 0));
}

// A thread's chunks of a tile: of every column block, every kRowsPerPass-th row from where `to` and
// `from` point. Unless the tile is whole, wanted(r, b) says whether the chunk of row r on, in
// column block b, exists; what does not becomes 0.
template <class Tile, int kRowsPerPass, class Wanted>
__device__ __forceinline__ void load_chunks(uint32_t to, const char* from, int64_t pass_bytes,
                                            bool is_whole, const Wanted& wanted) {
  const auto load_row = [&](int r, const auto& wanted_in) __attribute__((always_inline)) {
    CUTE_UNROLL
    for (int b = 0; b < Tile::kBlocks; ++b) {
      cp_async_16(to + r * Tile::kRowBytes + b * Tile::kBlockBytes, from + b * Tile::kRowBytes,
                  wanted_in(r, b));
    }
  };
  if (is_whole) {
    CUTE_UNROLL
    for (int r = 0; r < Tile::kTileRows; r += kRowsPerPass, from += pass_bytes) {
      load_row(r, [](int, int) { return true; });
    }
  } else {
    CUTE_NO_UNROLL
    for (int r = 0; r < Tile::kTileRows; r += kRowsPerPass, from += pass_bytes) {
      load_row(r, wanted);
    }
  }
}

// accumulator += A B with one mma m16n8k16 after the other. load_a(m, k, registers) brings 16 rows
// of k-block k of A, load_b(n, k, registers) 16 columns of B, one step ahead of the mmas that read
// it: few enough registers for accumulators that take 192 of 255.
template <int kK, int kN, int kM, class TiledMma, class Accumulator, class LoadA, class LoadB>
__device__ __forceinline__ void multiply_stepwise(const TiledMma&, Accumulator& accumulator,
                                                  const LoadA& load_a, const LoadB& load_b) {
  using Atom = typename TiledMma::Atom::MMA_Op;
  uint32_t a[2][kM][4];
  uint32_t b[2][4];
  const auto load_all_a = [&](int k) {
    CUTE_UNROLL
    for (int m = 0; m < kM; ++m) load_a(m, k, a[k % 2][m]);
  };
  load_all_a(0);
  load_b(0, 0, b[0]);
  CUTE_UNROLL
  for (int step = 0; step < kK * kN; ++step) {
    const int k = step / kN;
    const int n = step % kN;
    if (step + 1 < kK * kN) load_b((step + 1) % kN, (step + 1) / kN, b[(step + 1) % 2]);
    if (n == kN - 1 && k + 1 < kK) load_all_a(k + 1);
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      CUTE_UNROLL
      for (int m = 0; m < kM; ++m) {
        float* c = &accumulator(0, m, 2 * n + half);
        const uint32_t (&x)[4] = a[k % 2][m];
        const uint32_t* y = &b[step % 2][2 * half];
        Atom::fma(c[0], c[1], c[2], c[3], x[0], x[1], x[2], x[3], y[0], y[1], c[0], c[1], c[2],
                  c[3]);
      }
    }
  }
}

// The compiler takes `value` for a new one: what is computed from it is not kept across iterations.
__device__ __forceinline__ void forget(uint32_t& value) { asm volatile("" : "+r"(value)); }

}  // namespace neginf::sm80
