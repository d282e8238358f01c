// Tile sizes of the sm90 backward, with the measurements that chose them: H200, bf16, 16k tokens,
// hidden 2048, TFLOP/s of prepare, main and finish at 512 / 1k / 2k / 4k / 8k / 16k.
//
//   head_dim  rows  S'     P in dS  registers  full, and below it causal
//   64        128   late   rounded  224        280 / 347 / 390 / 416 / 430 / 440
//                                              183 / 263 / 335 / 387 / 419 / 436
//   64        64    early  exact    240        241 / 290 / 326 / 350 / 364 / 366
//                                              163 / 230 / 289 / 332 / 357 / 373
//   128       64    late   rounded  232        303 / 376 / 431 / 458 / 468 / 475
//                                              198 / 289 / 373 / 432 / 446 / 461
//   128       64    late   exact    240        302 / 378 / 429 / 461 / 461 / 471
//                                              198 / 292 / 377 / 419 / 421 / 440
//   128       64    early  rounded  240        310 / 390 / 448 / 483 / 494 / 502
//                                              200 / 299 / 391 / 452 / 473 / 485
//   128       64    early  exact    240        316 / 396 / 457 / 488 / 502 / 506
//                                              203 / 301 / 398 / 450 / 464 / 481
//
// With 240 registers for the consumers the producers have 24, and spill. S' early and exact: dV is
// waited for at once.
//
// 192 and 256 are not measured yet. At 256, S' early leaves too few registers, and two stages of dO
// or all of dQ at once too little shared memory.
#pragma once

namespace neginf::sm90 {

template <int kBlockM_, int kStagesQ_, int kStagesDout_, bool kEarlyScores_, bool kOwnQueryGrad_,
          int kConsumerRegisters_>
struct BackwardTileSizes {
  // Warpgroups own keys, and P^T and dS^T stay in the registers in which they are made.
  static constexpr bool kKeepsP = true;
  static constexpr int kBlockM = kBlockM_;  // query rows
  static constexpr int kBlockN = 128;       // keys, 64 per consumer warpgroup
  static constexpr int kStagesQ = kStagesQ_;
  static constexpr int kStagesDout = kStagesDout_;
  // S of the next row tile is issued with dQ and dK of this one, not after them.
  static constexpr bool kEarlyScores = kEarlyScores_;
  // dQ has registers of its own, not those of dP: where it has another shape than (part of) dP.
  static constexpr bool kOwnQueryGrad = kOwnQueryGrad_;
  static constexpr int kConsumerRegisters = kConsumerRegisters_;
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
  static constexpr bool kEarlyScores = kEarlyScores_;
  static constexpr bool kOwnQueryGrad = true;
  static constexpr int kConsumerRegisters = 232;
  static constexpr int kQueryGradParts = kQueryGradParts_;  // 2 where all does not fit in shared
};

template <int kHeadDim, bool kModifiesScores>
struct BackwardTile;

template <bool kModifiesScores>
struct BackwardTile<64, kModifiesScores> : BackwardTileSizes<128, 3, 3, false, false, 224> {};
template <>
struct BackwardTile<64, true> : BackwardTileSizes<64, 3, 3, false, true, 232> {};

template <bool kModifiesScores>
struct BackwardTile<128, kModifiesScores> : BackwardTileSizes<64, 3, 3, false, false, 232> {};

template <bool kModifiesScores>
struct BackwardTile<192, kModifiesScores> : WideBackwardTileSizes<2, true, 1> {};

template <bool kModifiesScores>
struct BackwardTile<256, kModifiesScores> : WideBackwardTileSizes<1, false, 2> {};

}  // namespace neginf::sm90
