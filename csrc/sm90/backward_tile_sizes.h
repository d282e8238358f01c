// Tile sizes of the sm90 backward, with the measurements that chose them: H200, bf16, 16k tokens,
// hidden 2048, TFLOP/s of prepare, main and finish at 512 / 2k / 16k, of several runs:
//
//   head_dim  rows  Q, dO  registers  full              causal
//   64        128   2, 3   240        333 / 468 / 523   202 / 396 / 519
//   128       64    3, 3   240        370 / 487 / 538   216 / 411 / 515
//             80    2, 2   240        322 / 539 / 571   183 / 414 / 542   now 558 / 613, 458 / 568
//   192       64    2, 2   232        284 / 433 / 478   176 / 374 / 478
//   256       64    2, 1   232        278 / 410 / 444   181 / 361 / 442
//
// What else was tried is in benchmarks/NOTES.md.
#pragma once

namespace neginf::sm90 {

// For head_dims of which a warpgroup has registers for dK and dV of its keys.
template <int kBlockM_, int kStagesQ_, int kStagesDout_, bool kOwnQueryGrad_,
          int kConsumerRegisters_ = 232>
struct NarrowBackwardTile {
  static constexpr bool kIsWide = false;
  static constexpr int kBlockM = kBlockM_;  // query rows
  static constexpr int kBlockN = 128;       // keys, 64 per consumer warpgroup
  static constexpr int kStagesQ = kStagesQ_;
  static constexpr int kStagesDout = kStagesDout_;
  // dQ has registers of its own, not those of dP. With the other choice ptxas runs all products one
  // by one (C7512), be it that registers are too few or that it does not follow who uses them.
  static constexpr bool kOwnQueryGrad = kOwnQueryGrad_;
  static constexpr int kQueryGradParts = 1;
  static constexpr int kQueryGradTilesOfTurn = 1;
  static constexpr int kConsumerRegisters = kConsumerRegisters_;
  // A thread has registers for addresses that are the same in all steps.
  static constexpr bool kKeepsAddresses = kConsumerRegisters == 240;
};

// For head_dims of which a warpgroup has registers for dK or dV of 64 keys, but not for both.
template <int kStagesDout_, int kQueryGradParts_, int kQueryGradTilesOfTurn_>
struct WideBackwardTile {
  static constexpr bool kIsWide = true;
  static constexpr int kBlockM = 64;
  static constexpr int kBlockN = 64;
  static constexpr int kStagesQ = 2;
  static constexpr int kStagesDout = kStagesDout_;
  // dQ is computed and handed over in so many pieces of its columns: 2 where registers and shared
  // memory do not hold all.
  static constexpr int kQueryGradParts = kQueryGradParts_;
  // In order, to wait until dQ is in memory and to say so takes 3 us: where a step takes less, it
  // is done for two tiles of rows at once.
  static constexpr int kQueryGradTilesOfTurn = kQueryGradTilesOfTurn_;
  static constexpr int kConsumerRegisters = 232;
  static constexpr bool kKeepsAddresses = false;
};

// That of most launches.
template <int kHeadDim, bool kModifiesScores>
struct BackwardTile;

template <>
struct BackwardTile<64, false> : NarrowBackwardTile<128, 2, 3, false, 240> {};
template <>
struct BackwardTile<64, true> : NarrowBackwardTile<64, 3, 3, true> {};

template <>
struct BackwardTile<128, false> : NarrowBackwardTile<64, 3, 3, true, 240> {};
template <>
struct BackwardTile<128, true> : NarrowBackwardTile<64, 3, 3, false> {};

template <bool kModifiesScores>
struct BackwardTile<192, kModifiesScores> : WideBackwardTile<2, 1, 2> {};

template <bool kModifiesScores>
struct BackwardTile<256, kModifiesScores> : WideBackwardTile<1, 2, 1> {};

// Those of many rows. A step has more of them: fewer bytes through shared memory for each, which is
// what it is short of. Where rows are few, more of the last tile is wasted, and of those on the
// diagonal.
template <int kHeadDim>
struct LongBackwardTile;
template <>
struct LongBackwardTile<128> : NarrowBackwardTile<80, 2, 2, false, 240> {};
template <int kHeadDim>
constexpr bool kHasLongBackwardTile = kHeadDim == 128;
// Not to clear dQ makes up for the questions who comes first: 1.02 to 1.06 at 512, 1.00 to 1.03 at
// 2k, 1.01 at 4k, 0.99 to 1.01 beyond.
constexpr int kMostRowsToStoreFirst = 4096;

constexpr int kLongRows = 1024;
constexpr int kLongRowsCausal = 2048;

}  // namespace neginf::sm90
