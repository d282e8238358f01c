// Tile sizes of the sm90 forward, with the measurements that chose them: H200, bf16, 16k tokens,
// hidden 2048, TFLOP/s at 512 / 1k / 2k / 4k / 8k / 16k.
//
//   head_dim  rows x keys  Q  turns  full, and below it causal
//   64        192 x 128    2  yes    345 / 413 / 489 / 516 / 555 / 543
//                                    188 / 259 / 359 / 440 / 502 / 531
//   64        128 x 192    2  no     279 / 326 / 370 / 411 / 458 / 476
//                                    161 / 257 / 342 / 392 / 436 / 468
//   64        128 x 128    1  yes    295 / 355 / 391 / 409 / 419 / 432
//                                    178 / 252 / 317 / 375 / 405 / 432
//   64        192 x 144    2  yes    spills
//   96        192 x 112    2  yes    386 / 469 / 606 / 655 / 673 / 669
//                                    211 / 302 / 437 / 548 / 555 / 577
//   96        128 x 128    2  no     388 / 475 / 546 / 582 / 600 / 570
//                                    223 / 338 / 443 / 520 / 566 / 564
//   128       128 x 128    2  no     494 / 594 / 650 / 680 / 703 / 706
//                                    276 / 421 / 530 / 612 / 667 / 694
//   128       128 x 176    1  no     364 / 502 / 595 / 655 / 702 / 713
//                                    202 / 304 / 457 / 575 / 653 / 705
//   128       192 x 80     2  no     440 / 544 / 656 / 691 / 726 / 716
//                                    241 / 367 / 511 / 598 / 688 / 722
//   192       128 x 80     2  no     503 / 636 / 707 / 748 / 772 / 784
//                                    273 / 427 / 573 / 672 / 728 / 777
//   192       128 x 112    1  no     427 / 556 / 674 / 752 / 788 / 803
//                                    235 / 381 / 531 / 659 / 733 / 798
//   256       128 x 80     1  no     469 / 625 / 715 / 776 / 812 / 811
//                                    271 / 420 / 572 / 701 / 772 / 813
//
//   192/128   128 x 128    1  no     446 / 594 / 698 / 757 / 784 / 790
//                                    244 / 369 / 496 / 627 / 689 / 721
//
// A thread has 232 registers (224 with softcap or ALiBi), or 160 where there are three consumer
// warpgroups, which bounds rows x keys by the accumulators and P; two Q, which bound it through
// shared memory, are worth 10 % up to 1k.
#pragma once

#include <type_traits>

#include "../common/split_heuristic.h"

namespace neginf::sm90 {

template <int kBlockM_, int kBlockN_, int kStagesQ_, bool kTakesTurns_>
struct TileSizes {
  static constexpr int kBlockM = kBlockM_;  // query rows, 64 per consumer warpgroup
  static constexpr int kBlockN = kBlockN_;  // keys
  // With two, the next row tile begins before this one ends.
  static constexpr int kStagesQ = kStagesQ_;
  // Whether the warpgroups issue their products in turn.
  static constexpr bool kTakesTurns = kTakesTurns_;
};

template <int kHeadDim, bool kModifiesScores, int kHeadDimV = kHeadDim>
struct ForwardTile;

template <bool kModifiesScores>
struct ForwardTile<64, kModifiesScores> : TileSizes<192, 128, 2, true> {};
template <>
struct ForwardTile<64, true> : TileSizes<128, 128, 2, false> {};

template <bool kModifiesScores>
struct ForwardTile<96, kModifiesScores> : TileSizes<192, 112, 2, true> {};
template <>
struct ForwardTile<96, true> : TileSizes<128, 128, 2, false> {};

template <bool kModifiesScores>
struct ForwardTile<128, kModifiesScores> : TileSizes<128, 128, 2, false> {};

template <bool kModifiesScores>
struct ForwardTile<192, kModifiesScores> : TileSizes<128, 80, 2, false> {};
template <bool kModifiesScores>
struct ForwardTile<192, kModifiesScores, 128> : TileSizes<128, 128, 1, false> {};
template <>
struct ForwardTile<192, true, 128> : TileSizes<128, 96, 2, false> {};  // 128 or 112 keys spill

template <bool kModifiesScores>
struct ForwardTile<256, kModifiesScores> : TileSizes<128, 80, 1, false> {};
template <>
struct ForwardTile<256, true> : TileSizes<128, 48, 1, false> {};

// Calls function(tile, kHeadDimV, kModifiesScores) with what serves a problem.
template <int kHeadDim, class Function>
auto dispatch_forward_tile(int head_dim_v, bool modifies_scores, const Function& function) {
  const auto with_head_dim_v = [&](auto kHeadDimV) {
    return modifies_scores
               ? function(ForwardTile<kHeadDim, true, kHeadDimV>{}, kHeadDimV, std::true_type{})
               : function(ForwardTile<kHeadDim, false, kHeadDimV>{}, kHeadDimV, std::false_type{});
  };
  if constexpr (kHeadDim == 192) {
    if (head_dim_v <= 128) return with_head_dim_v(std::integral_constant<int, 128>{});
  }
  return with_head_dim_v(std::integral_constant<int, kHeadDim>{});
}

template <int kHeadDim>
BlockSizes forward_block(int head_dim_v, bool modifies_scores) {
  return dispatch_forward_tile<kHeadDim>(head_dim_v, modifies_scores, [](auto tile, auto, auto) {
    return BlockSizes{tile.kBlockM, tile.kBlockN, 1};
  });
}

}  // namespace neginf::sm90
