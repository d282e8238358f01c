// Tile sizes of the sm90 forward, with the measurements that chose them: H200, bf16, 16k tokens,
// hidden 2048, TFLOP/s at 512 / 1k / 2k / 4k / 8k / 16k, full and below it causal. In one run:
//
//   head_dim  rows x keys  Q  turns
//   64        192 x 128    2  yes    379 / 455 / 538 / 566 / 576 / 563    3 stages of K and V
//                                    225 / 306 / 408 / 488 / 552 / 576
//   128       128 x 128    2  no     479 / 588 / 667 / 675 / 673 / 654    now in turn, see below
//                                    277 / 411 / 540 / 633 / 666 / 606
//   128       192 x 80     2  yes    445 / 580 / 707 / 734 / 743 / 739    long
//                                    238 / 368 / 554 / 665 / 727 / 661
//   192       128 x 64     2  no     396 / 521 / 584 / 645 / 662 / 677
//                                    293 / 435 / 546 / 642 / 737 / 710
//   192       128 x 80     2  no     382 / 530 / 603 / 670 / 700 / 719    long
//                                    278 / 416 / 552 / 663 / 769 / 780
//   256       128 x 64     1  no     486 / 604 / 691 / 733 / 744 / 782
//                                    329 / 480 / 603 / 714 / 749 / 733
//   256       128 x 80     1  no     468 / 625 / 723 / 767 / 788 / 777    long
//                                    312 / 459 / 613 / 731 / 782 / 769
//
// In another run, at 512 / 1k / 2k / 4k / 16k: 128 in turn 502 / 602 / 666 / 692 / 674, causal 315
// / 437 / 564 / 651 / 678, without turns 498 / 602 / 664 / 692 / 680, causal 305 / 425 / 541 / 635
// / 671. In one more, causal: 64 with half a last key tile 224 / 322 / 436 / 500 / 543, with whole
// ones 231 / 314 / 418 / 493 / 538.
//
// Left in another run, at 512 / 1k / 2k: 64 with 192 x 96 335 / 417 / 474, causal 216 / 314 / 423
// (kept 380 / 457 / 517, 230 / 306 / 423), 192 x 64 353 / 405 / 452, causal 202 / 297 / 389; 128
// with 128 x 64 and four stages 466 / 570 / 626, causal 302 / 425 / 533 (kept 502 / 602 / 668, 295
// / 420 / 547), 128 x 96 and three 442 / 569 / 622, causal 278 / 407 / 522; 192 x 96 spills. And
// with an earlier kernel, in one run with what it had:
//
//   64        128 x 192    2  no     279 / 326 / 370 / 411 / 458 / 476    of 345 / 413 / 489 / 516
//   /
//                                    161 / 257 / 342 / 392 / 436 / 468       555 / 543
//   64        128 x 128    1  yes    295 / 355 / 391 / 409 / 419 / 432
//                                    178 / 252 / 317 / 375 / 405 / 432
//   64        192 x 144    2  yes    spills
//   96        192 x 112    2  yes    386 / 469 / 606 / 655 / 673 / 669    kept
//                                    211 / 302 / 437 / 548 / 555 / 577
//   96        128 x 128    2  no     388 / 475 / 546 / 582 / 600 / 570
//                                    223 / 338 / 443 / 520 / 566 / 564
//   128       128 x 176    1  no     364 / 502 / 595 / 655 / 702 / 713    of 494 / 594 / 650 / 680
//   /
//                                    202 / 304 / 457 / 575 / 653 / 705       703 / 706
//   192       128 x 112    1  no     427 / 556 / 674 / 752 / 788 / 803    of 503 / 636 / 707 / 748
//   /
//                                    235 / 381 / 531 / 659 / 733 / 798       772 / 784
//   192/128   128 x 128    1  no     446 / 594 / 698 / 757 / 784 / 790    kept
//                                    244 / 369 / 496 / 627 / 689 / 721
//
// A thread has 232 registers, or 160 where there are three consumer warpgroups, which bounds rows x
// keys by the accumulators and P; two Q, which bound it through shared memory, are worth 10 % up to
// 1k. Few keys suit short sequences: less of the last tile and of those on the diagonal is wasted.
// Long ones want more arithmetic for each byte that products read from shared memory.
#pragma once

#include <type_traits>

#include "../common/split_heuristic.h"

namespace neginf::sm90 {

template <int kBlockM_, int kBlockN_, int kStagesQ_, bool kTakesTurns_, int kStages_ = 2,
          bool kHalvesLast_ = false>
struct TileSizes {
  static constexpr int kBlockM = kBlockM_;  // query rows, 64 per consumer warpgroup
  static constexpr int kBlockN = kBlockN_;  // keys
  // With two, the next row tile begins before this one ends.
  static constexpr int kStagesQ = kStagesQ_;
  // Whether the warpgroups issue their products in turn.
  static constexpr bool kTakesTurns = kTakesTurns_;
  static constexpr int kStages = kStages_;  // of K and V
  // Whether a warpgroup multiplies only the first half of its last key tile where it sees no more.
  static constexpr bool kHalvesLast = kHalvesLast_;
};

template <int kHeadDim, bool kModifiesScores, int kHeadDimV = kHeadDim>
struct ForwardTile;

template <bool kModifiesScores>
struct ForwardTile<64, kModifiesScores> : TileSizes<192, 128, 2, true, 3> {};
template <>
struct ForwardTile<64, true> : TileSizes<128, 128, 2, false> {};

template <bool kModifiesScores>
struct ForwardTile<96, kModifiesScores> : TileSizes<192, 112, 2, true> {};
template <>
struct ForwardTile<96, true> : TileSizes<128, 128, 2, false> {};

template <bool kModifiesScores>
struct ForwardTile<128, kModifiesScores> : TileSizes<128, 128, 2, true> {};

template <bool kModifiesScores>
struct ForwardTile<192, kModifiesScores> : TileSizes<128, 64, 2, false> {};
template <bool kModifiesScores>
struct ForwardTile<192, kModifiesScores, 128> : TileSizes<128, 128, 1, false> {};
template <>
struct ForwardTile<192, true, 128> : TileSizes<128, 96, 2, false> {};  // 128 or 112 keys spill

template <bool kModifiesScores>
struct ForwardTile<256, kModifiesScores> : TileSizes<128, 64, 1, false> {};
template <>
struct ForwardTile<256, true> : TileSizes<128, 48, 1, false> {};

// Where rows see many keys, of kernels that modify no scores: from so many keys for each row on, of
// so many rows. What halves the last key tile is for masks with a diagonal.
template <typename Tile, int kKeys, int kRows>
struct FromLength : Tile {
  static constexpr int kFromKeys = kKeys;
  static constexpr int kFromRows = kRows;
};

template <int kHeadDim, int kHeadDimV>
struct LongForwardTile;
template <>
struct LongForwardTile<64, 64> : FromLength<TileSizes<192, 128, 2, true, 3, true>, 512, 1024> {};
template <>
struct LongForwardTile<128, 128> : FromLength<TileSizes<192, 80, 2, true>, 1024, 1536> {};
template <>
struct LongForwardTile<192, 192> : FromLength<TileSizes<128, 80, 2, false>, 1024, 1536> {};
template <>
struct LongForwardTile<256, 256> : FromLength<TileSizes<128, 80, 1, false>, 1024, 1536> {};
template <int kHeadDim, int kHeadDimV>
constexpr bool kHasLongForwardTile = kHeadDim != 96 && kHeadDimV == kHeadDim;

// Calls function(tile, kHeadDimV, kModifiesScores) with what serves a problem. is_long(tile) says
// whether it is one for a long tile.
template <int kHeadDim, class IsLong, class Function>
auto dispatch_forward_tile(int head_dim_v, bool modifies_scores, const IsLong& is_long,
                           const Function& function) {
  const auto with_head_dim_v = [&](auto kHeadDimV) {
    if constexpr (kHasLongForwardTile<kHeadDim, kHeadDimV>) {
      const LongForwardTile<kHeadDim, kHeadDimV> tile{};
      if (!modifies_scores && is_long(tile)) return function(tile, kHeadDimV, std::false_type{});
    }
    return modifies_scores
               ? function(ForwardTile<kHeadDim, true, kHeadDimV>{}, kHeadDimV, std::true_type{})
               : function(ForwardTile<kHeadDim, false, kHeadDimV>{}, kHeadDimV, std::false_type{});
  };
  if constexpr (kHeadDim == 192) {
    if (head_dim_v <= 128) return with_head_dim_v(std::integral_constant<int, 128>{});
  }
  return with_head_dim_v(std::integral_constant<int, kHeadDim>{});
}

// To decide on splits by, which have no long tiles.
template <int kHeadDim>
BlockSizes forward_block(int head_dim_v, bool modifies_scores) {
  return dispatch_forward_tile<kHeadDim>(
      head_dim_v, modifies_scores, [](auto) { return false; },
      [](auto tile, auto, auto) { return BlockSizes{tile.kBlockM, tile.kBlockN, 1}; });
}

}  // namespace neginf::sm90
