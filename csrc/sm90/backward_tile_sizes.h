// Tile sizes of the sm90 backward, with the measurements that chose them: H200, bf16, 16k tokens,
// hidden 2048, TFLOP/s of prepare, main and finish at 512 / 2k / 4k / 16k.
//
//   head_dim  rows  dO  registers  full, and below it causal
//   64        128   3   232        286 / 401 / 429 / 453
//                                  182 / 339 / 395 / 448
//   64        64    2   240        241 / 326 / 350 / 366   (dQ added by the consumers)
//                                  163 / 289 / 332 / 373
//   128       64    3   232        335 / 479 / 515 / 545
//                                  205 / 392 / 455 / 523
//   128       64    2   232        292 / 390 / 415 / 430   (dQ in one piece, statistics not ahead)
//                                  196 / 354 / 399 / 452
//   192       64    2   232        227 / 298 / 311 / 316
//                                  169 / 277 / 307 / 329
//   256       64    1   232        265 / 370 / 395 / 407
//                                  183 / 341 / 388 / 427
//
// With 240 registers for the consumers the producers have 24, and spill. At 256, S of the next row
// tile with dQ and dK leaves too few registers, and two stages of dO or all of dQ at once too
// little shared memory.
#pragma once

namespace neginf::sm90 {

template <int kBlockM_, bool kOwnQueryGrad_>
struct BackwardTileSizes {
  // Warpgroups own keys, and P^T and dS^T stay in the registers in which they are made.
  static constexpr bool kKeepsP = true;
  static constexpr int kBlockM = kBlockM_;  // query rows
  static constexpr int kBlockN = 128;       // keys, 64 per consumer warpgroup
  static constexpr int kStagesQ = 3;
  static constexpr int kStagesDout = 3;
  // dQ has registers of its own, not those of dP: where it has another shape than (part of) dP.
  static constexpr bool kOwnQueryGrad = kOwnQueryGrad_;
  static constexpr int kConsumerRegisters = 232;
  static constexpr int kQueryGradParts = 1;
};

// For head_dims of which dK and dV of 64 keys are too much for the registers of a warpgroup.
template <int kStagesDout_, bool kEarlyScores_, int kQueryGradParts_>
struct WideBackwardTileSizes {
  // Warpgroups own columns of head_dim, and P^T and dS^T of all go through shared memory.
  static constexpr bool kKeepsP = false;
  static constexpr int kBlockM = 64;
  static constexpr int kBlockN = 64;
  static constexpr int kStagesQ = 2;
  static constexpr int kStagesDout = kStagesDout_;
  // S of the next row tile is issued with dQ and dK of this one, not after them.
  static constexpr bool kEarlyScores = kEarlyScores_;
  static constexpr bool kOwnQueryGrad = true;
  static constexpr int kConsumerRegisters = 232;
  static constexpr int kQueryGradParts = kQueryGradParts_;  // 2 where all does not fit in shared
};

template <int kHeadDim, bool kModifiesScores>
struct BackwardTile;

template <bool kModifiesScores>
struct BackwardTile<64, kModifiesScores> : BackwardTileSizes<128, false> {};
template <>
struct BackwardTile<64, true> : BackwardTileSizes<64, true> {};

template <bool kModifiesScores>
struct BackwardTile<128, kModifiesScores> : BackwardTileSizes<64, false> {};

template <bool kModifiesScores>
struct BackwardTile<192, kModifiesScores> : WideBackwardTileSizes<2, true, 1> {};

template <bool kModifiesScores>
struct BackwardTile<256, kModifiesScores> : WideBackwardTileSizes<1, false, 2> {};

}  // namespace neginf::sm90
