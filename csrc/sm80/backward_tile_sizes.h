// Tile sizes of the sm80 backward, with the measurement that chose each: H200, bf16, 16k tokens,
// hidden 2048, TFLOP/s of the main kernel at 4k, full.
#pragma once

namespace neginf::sm80 {

template <int kBlockM_, int kBlockN_, int kWarps_, int kScoreWarpsKeys_, int kKeyGradWarpsKeys_,
          int kQueryGradWarpsRows_, int kStagesDout_, int kQueryGradParts_,
          bool kKeepsAddresses_ = true>
struct BackwardSizes {
  static constexpr int kBlockM = kBlockM_;  // query rows
  static constexpr int kBlockN = kBlockN_;  // keys
  static constexpr int kWarps = kWarps_;
  // How many of the warps lie along the rows of each product; the others lie along its columns.
  static constexpr int kScoreWarpsKeys = kScoreWarpsKeys_;          // S^T, dP^T: (keys, rows)
  static constexpr int kKeyGradWarpsKeys = kKeyGradWarpsKeys_;      // dK, dV: (keys, head_dim)
  static constexpr int kQueryGradWarpsRows = kQueryGradWarpsRows_;  // dQ: (rows, head_dim)
  static constexpr int kStagesDout = kStagesDout_;
  static constexpr int kQueryGradParts = kQueryGradParts_;  // of the columns of dQ, in turn
  static constexpr bool kKeepsAddresses = kKeepsAddresses_;  // in registers; false: spills else
};

// Large: where shared memory allows it, without softcap and ALiBi. Small: elsewhere; fits the 99 KB
// of sm86, sm89 and sm120.
template <int kHeadDim>
struct BackwardTiles;

template <>
struct BackwardTiles<64> {
  using Large = BackwardSizes<32, 128, 4, 4, 4, 2, 2, 2>;
  using Small = Large;
};

template <>
struct BackwardTiles<96> {
  using Large = BackwardSizes<64, 64, 4, 2, 2, 2, 2, 1>;
  using Small = Large;
};

template <>
struct BackwardTiles<128> {
  using Large = BackwardSizes<64, 128, 8, 4, 4, 2, 2, 1>;  // 161 KB
  using Small = BackwardSizes<64, 64, 4, 4, 4, 2, 1, 1>;   // 89 KB
};

template <>
struct BackwardTiles<192> {
  using Large = BackwardSizes<64, 64, 8, 2, 2, 2, 2, 1>;  // 161 KB
  using Small = BackwardSizes<32, 32, 4, 2, 2, 2, 2, 1>;
};

template <>
struct BackwardTiles<256> {
  using Large = BackwardSizes<64, 64, 8, 4, 2, 2, 1, 2, false>;  // 177 KB
  using Small = BackwardSizes<32, 32, 4, 2, 2, 2, 1, 1>;
};

}  // namespace neginf::sm80
