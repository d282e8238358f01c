// sm80/swizzle.h: ldmatrix and mma played on the host with the addresses that the kernels give
// them. For every product of every tile size each warp's accumulators must be those of A B^T.
#include "sm80/swizzle.h"

#include <array>
#include <vector>

#include "check.h"

namespace {

using namespace neginf::sm80;

// Small whole numbers in 16 bits: sums are exact, and each element differs from its neighbours.
struct Matrix {
  int rows, columns;
  int at(int row, int column) const { return (row * 31 + column * 7 + row * column) % 23 - 11; }
};

// A tile in shared memory, filled as cp.async fills it: whole chunks.
template <class Tile>
std::vector<short> filled(const Matrix& matrix) {
  std::vector<short> memory(matrix.rows * matrix.columns, 12345);
  for (int row = 0; row < matrix.rows; ++row) {
    for (int column = 0; column < matrix.columns; ++column) {
      const int chunk = column % Tile::kWidth / 8;
      const uint32_t address = Tile::offset(row % 8, chunk) + row / 8 * 8 * Tile::kRowBytes +
                               column / Tile::kWidth * Tile::kBlockBytes;
      CHECK(memory.at(address / 2 + column % 8) == 12345);  // nothing lies on another
      memory.at(address / 2 + column % 8) = static_cast<short>(matrix.at(row, column));
    }
  }
  return memory;
}

// Where a tensor map of 128-byte swizzle puts the rows of a column block, whose address is a
// multiple of 1024: bits 4 to 6 of a plain address, xor bits 7 to 9.
template <class Tile>
void check_place_of_tensor_map() {
  static_assert(Tile::kRowBytes == 128 && Tile::kBlockBytes % 1024 == 0);
  for (int row = 0; row < Tile::kTileRows; ++row) {
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
      const uint32_t plain = row * 128 + chunk * 16;
      CHECK(Tile::offset(row, chunk) == (plain ^ (plain >> 7 & 7) << 4));
    }
  }
}

using Registers = std::array<std::array<std::array<int, 2>, 4>, 32>;  // of lane, register, half

// address_of(lane) is what the lane passes.
template <class AddressOf>
Registers ldmatrix(const std::vector<short>& memory, bool transposed, const AddressOf& address_of) {
  Registers result;
  for (int matrix = 0; matrix < 4; ++matrix) {
    int banks = 0;  // in groups of four: what 16 bytes take
    for (int row = 0; row < 8; ++row) banks |= 1 << address_of(matrix * 8 + row) / 16 % 8;
    CHECK(banks == 0xff);
    for (int lane = 0; lane < 32; ++lane) {
      for (int half = 0; half < 2; ++half) {
        const int row = transposed ? lane % 4 * 2 + half : lane / 4;
        const int column = transposed ? lane / 4 : lane % 4 * 2 + half;
        const uint32_t address = address_of(matrix * 8 + row);
        CHECK(address % 16 == 0);
        result[lane][matrix][half] = memory.at(address / 2 + column);
      }
    }
  }
  return result;
}

// mma.m16n8k16 as (row, column, sum over k), from the definition of its fragments. `first` is the
// register of B that holds k 0 to 7.
int mma(const Registers& a, const Registers& b, int first, int row, int column) {
  int sum = 0;
  for (int k = 0; k < 16; ++k) {
    const int lane_k = k % 8 / 2;
    const int value_a = a[row % 8 * 4 + lane_k][row / 8 + k / 8 * 2][k % 2];
    const int value_b = b[column * 4 + lane_k][first + k / 8][k % 2];
    sum += value_a * value_b;
  }
  return sum;
}

// The product of A (m, k) and B (n, k) by kWarpsM x kWarpsN warps; *_of(row, k) are their elements.
template <class A, class B, int kWarpsM, int kWarpsN, bool kTransposedA, bool kTransposedB,
          class ElementA, class ElementB>
void check_product(const std::vector<short>& memory_a, const std::vector<short>& memory_b, int rows,
                   int columns, int depth, const ElementA& a_of, const ElementB& b_of) {
  std::vector<int> times(rows * columns, 0);
  bool same = true;
  for (int warp_m = 0; warp_m < kWarpsM; ++warp_m) {
    for (int warp_n = 0; warp_n < kWarpsN; ++warp_n) {
      for (int m = 0; m < rows / (16 * kWarpsM); ++m) {
        for (int n = 0; n < columns / (16 * kWarpsN); ++n) {
          std::array<int, 16 * 16> sums{};
          for (int k = 0; k < depth / 16; ++k) {
            const auto a = ldmatrix(memory_a, kTransposedA,
                                    [&](int lane) { return A::at(A::begin(lane, warp_m), m, k); });
            const auto b = ldmatrix(memory_b, kTransposedB,
                                    [&](int lane) { return B::at(B::begin(lane, warp_n), n, k); });
            for (int i = 0; i < 16 * 16; ++i) sums[i] += mma(a, b, i % 16 / 8 * 2, i / 16, i % 8);
          }
          for (int i = 0; i < 16 * 16; ++i) {
            const int row = 16 * (warp_m + kWarpsM * m) + i / 16;
            const int column = 8 * (warp_n + kWarpsN * (2 * n + i % 16 / 8)) + i % 8;
            int expected = 0;
            for (int k = 0; k < depth; ++k) expected += a_of(row, k) * b_of(column, k);
            same = same && sums[i] == expected;
            ++times[row * columns + column];
          }
        }
      }
    }
  }
  CHECK(same);
  for (const int count : times) CHECK(count == 1);
}

// Stored by all lanes of all warps, the accumulator of a tile is the tile.
template <class Tile, int kWarpsM, int kWarpsN>
void check_store(const Matrix& matrix) {
  using Store = AccumulatorStore<Tile, kWarpsM, kWarpsN>;
  std::vector<short> memory(matrix.rows * matrix.columns, 12345);
  for (int lane = 0; lane < 32; ++lane) {
    for (int warp_m = 0; warp_m < kWarpsM; ++warp_m) {
      for (int warp_n = 0; warp_n < kWarpsN; ++warp_n) {
        for (int m = 0; m < matrix.rows / (16 * kWarpsM); ++m) {
          for (int n = 0; n < matrix.columns / (8 * kWarpsN); ++n) {
            for (int i = 0; i < 4; ++i) {
              const int row = 16 * (warp_m + kWarpsM * m) + lane / 4 + i / 2 * 8;
              const int column = 8 * (warp_n + kWarpsN * n) + lane % 4 * 2 + i % 2;
              const auto address = Store::at(Store::begin(lane, warp_m, warp_n), m, i / 2, n);
              memory.at(address / 2 + i % 2) = static_cast<short>(matrix.at(row, column));
            }
          }
        }
      }
    }
  }
  CHECK(memory == filled<Tile>(matrix));
}

template <int kBlockM, int kBlockN, int kHeadDim, int kWarps>
void check_forward() {
  using SharedQ = SwizzledTile<kBlockM, kHeadDim>;
  using SharedKV = SwizzledTile<kBlockN, kHeadDim>;
  using SharedP = SwizzledTile<kBlockM, kBlockN>;  // in registers there
  const Matrix q{kBlockM, kHeadDim}, kv{kBlockN, kHeadDim}, p{kBlockM, kBlockN};
  const auto in_q = [&](int row, int k) { return q.at(row, k); };
  const auto in_k = [&](int row, int k) { return kv.at(row, k); };
  const auto in_v = [&](int column, int k) { return kv.at(k, column); };
  const auto in_p = [&](int row, int k) { return p.at(row, k); };
  check_product<OperandA<SharedQ, kWarps>, OperandB<SharedKV, 1>, kWarps, 1, false, false>(
      filled<SharedQ>(q), filled<SharedKV>(kv), kBlockM, kBlockN, kHeadDim, in_q, in_k);
  if constexpr (kBlockN % 32 == 0) {
    check_product<OperandA<SharedP, kWarps>, TransposedOperandB<SharedKV, 1>, kWarps, 1, false,
                  true>(filled<SharedP>(p), filled<SharedKV>(kv), kBlockM, kHeadDim, kBlockN, in_p,
                        in_v);
  }
}

// Sizes as in backward_tile_sizes.h.
template <int kHeadDim, int kBlockM, int kBlockN, int kWarps, int kScoreKeys, int kGradKeys,
          int kQueryRows>
void check_backward() {
  using SharedQ = SwizzledTile<kBlockM, kHeadDim>;
  using SharedK = SwizzledTile<kBlockN, kHeadDim>;
  using SharedP = SwizzledTile<kBlockN, kBlockM>;
  constexpr int kScoreRows = kWarps / kScoreKeys;
  constexpr int kGradColumns = kWarps / kGradKeys;
  constexpr int kQueryColumns = kWarps / kQueryRows;
  const Matrix q{kBlockM, kHeadDim}, key{kBlockN, kHeadDim}, p{kBlockN, kBlockM};
  const auto memory_q = filled<SharedQ>(q);
  const auto memory_k = filled<SharedK>(key);
  const auto memory_p = filled<SharedP>(p);
  const auto plain = [](const Matrix& matrix) {
    return [&matrix](int row, int k) { return matrix.at(row, k); };
  };
  const auto flipped = [](const Matrix& matrix) {
    return [&matrix](int row, int k) { return matrix.at(k, row); };
  };
  check_product<OperandA<SharedK, kScoreKeys>, OperandB<SharedQ, kScoreRows>, kScoreKeys,
                kScoreRows, false, false>(memory_k, memory_q, kBlockN, kBlockM, kHeadDim,
                                          plain(key), plain(q));  // S^T
  check_product<OperandA<SharedP, kGradKeys>, TransposedOperandB<SharedQ, kGradColumns>, kGradKeys,
                kGradColumns, false, true>(memory_p, memory_q, kBlockN, kHeadDim, kBlockM, plain(p),
                                           flipped(q));  // dK
  check_product<TransposedOperandA<SharedP, kQueryRows>, TransposedOperandB<SharedK, kQueryColumns>,
                kQueryRows, kQueryColumns, true, true>(memory_p, memory_k, kBlockM, kHeadDim,
                                                       kBlockN, flipped(p), flipped(key));  // dQ
  check_store<SharedP, kScoreKeys, kScoreRows>(p);
}

}  // namespace

int main() {
  check_forward<128, 128, 64, 4>();
  check_forward<128, 64, 96, 4>();
  check_forward<128, 48, 128, 4>();
  check_forward<64, 96, 192, 4>();
  check_forward<64, 64, 256, 4>();

  check_backward<64, 64, 128, 4, 4, 4, 2>();
  check_backward<64, 32, 128, 4, 4, 4, 2>();
  check_backward<64, 64, 64, 4, 4, 4, 2>();
  check_backward<96, 64, 64, 4, 2, 2, 2>();
  check_backward<96, 32, 64, 4, 4, 4, 2>();
  check_backward<128, 64, 128, 8, 4, 4, 2>();
  check_backward<128, 32, 64, 4, 4, 4, 2>();
  check_backward<192, 64, 64, 8, 2, 2, 2>();
  check_backward<192, 32, 32, 4, 2, 2, 2>();
  check_backward<256, 64, 64, 8, 4, 2, 2>();
  check_backward<256, 32, 32, 4, 2, 2, 2>();

  check_place_of_tensor_map<SwizzledTile<32, 64>>();
  check_place_of_tensor_map<SwizzledTile<16, 128>>();
  check_place_of_tensor_map<SwizzledTile<16, 256>>();
  return report();
}
