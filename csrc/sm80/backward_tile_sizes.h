// Tile sizes of the sm80 backward, with the measurements that chose them: H200, bf16, 16k tokens,
// hidden 2048, 4k, full, TFLOP/s of the main kernel, at three times: "atom" before dQ was added by
// red instead of atom, "walk" once pointers walked over the row tiles. Operands were addressed by
// CuTe then; with addresses as in swizzle.h nothing was measured yet. Warps: along the keys of S^T,
// the keys of dK and dV, the rows of dQ.
//
//   head_dim  rows x keys  warps     dO stages, dQ parts   atom  red  walk
//   64        32 x 128     4: 4 4 2  2, 1                  264   285  285
//   64        32 x 128     4: 4 4 2  2, 2                             288
//   64        32 x 128     4: 4 4 2  1, 1                        272
//   64        64 x 128     8: 8 8 4  2, 1                        223
//   64        64 x 128     8: 4 4 2  2, 1                  194
//   64        128 x 128    8: 8 8 4  1, 1                  230
//   64        64 x 64      4: 4 4 2  2, 1                  221
//   64        64 x 64      4: 2 2 2  2, 1                  217
//   96        64 x 64      4: 2 2 2  2, 1                        282
//   96        64 x 64      4: 4 4 2  2, 1                        265
//   96        64 x 128     8: 4 4 2  2, 1                        252
//   128       64 x 128     8: 4 4 2  2, 1                  263   295  293
//   128       64 x 128     8: 4 4 2  2, 2                             295  spills
//   128       64 x 128     8: 4 4 4  2, 1                        285
//   128       64 x 128     8: 4 4 2  1, 1                  253
//   128       64 x 128     8: 8 8 4  2, 1                        262
//   128       64 x 64      4: 4 4 2  1, 1                  260   266
//   128       64 x 64      4: 2 2 2  1, 1                  243
//   192       64 x 64      8: 2 2 2  2, 1                             251
//   192       64 x 64      8: 4 2 2  2, 1                             247
//   192       64 x 64      8: 2 2 4  2, 1                             244
//   192       64 x 64      8: 2 2 2  1, 1                             246
//   256       64 x 64      8: 4 2 2  1, 2                             248
//   256       64 x 64      8: 2 2 2  1, 2                             244
//   256       64 x 64      8: 2 2 2  1, 4                             245
//   256       64 x 64      8: 2 2 2  1, 1                        236  237
//   256       64 x 64      8: 4 2 2  1, 1                        232
//   256       32 x 64      8: 4 2 2  2, 1                        199
//
// What bounds them is the latency of a warp that has one neighbour on its scheduler, then shared
// memory. So d64 keeps P in registers and runs two CTAs; the large tiles from d96 on cut keys x
// rows both ways, which reads each fragment less often. Parts of dQ paid where its adds were many
// and each a single float.
#pragma once

namespace neginf::sm80 {

template <int kBlockM_, int kBlockN_, int kWarps_, int kScoreWarpsKeys_, int kKeyGradWarpsKeys_,
          int kQueryGradWarpsRows_, int kStagesDout_, int kQueryGradParts_, int kPasses_ = 1>
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
  // S^T, P, dP^T and dS of a tile are made in so many passes over its rows.
  static constexpr int kPasses = kPasses_;
};

// Large: where shared memory allows it. Small: elsewhere; fits the 99 KB of sm86, sm89 and sm120.
// ModifiesScores: with softcap and ALiBi, which want another tile of registers; small as well.
template <int kHeadDim>
struct BackwardTiles;

template <>
struct BackwardTiles<64> {
  using Large = BackwardSizes<64, 128, 4, 4, 4, 2, 2, 1, 2>;  // 97 KB, sm90
  using Small = BackwardSizes<32, 128, 4, 4, 4, 2, 2, 2>;     // 57 KB
  using ModifiesScores = BackwardSizes<64, 64, 4, 4, 4, 2, 2, 1>;
};

template <>
struct BackwardTiles<96> {
  using Large = BackwardSizes<64, 64, 4, 2, 2, 2, 2, 1>;  // 89 KB
  using Small = Large;
  using ModifiesScores = BackwardSizes<32, 64, 4, 4, 4, 2, 2, 1>;  // more rows spill
};

template <>
struct BackwardTiles<128> {
  using Large = BackwardSizes<64, 128, 8, 4, 4, 2, 2, 1>;  // 161 KB, as much as sm80 has
  using Small = BackwardSizes<32, 64, 4, 4, 4, 2, 2, 1>;   // 69 KB
  using ModifiesScores = Small;
};

template <>
struct BackwardTiles<192> {
  using Large = BackwardSizes<64, 64, 8, 2, 2, 2, 2, 1>;  // 161 KB
  using Small = BackwardSizes<32, 32, 4, 2, 2, 2, 2, 1>;
  using ModifiesScores = Small;
};

template <>
struct BackwardTiles<256> {
  using Large = BackwardSizes<64, 64, 8, 4, 2, 2, 1, 1>;  // 177 KB: sm90 and newer
  using Small = BackwardSizes<32, 32, 4, 2, 2, 2, 1, 1>;
  using ModifiesScores = Small;
};

}  // namespace neginf::sm80
