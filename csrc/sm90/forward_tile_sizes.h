// Tile sizes of the sm90 forward.
#pragma once

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

template <int kHeadDim, bool kModifiesScores>
struct ForwardTile;

template <bool kModifiesScores>
struct ForwardTile<64, kModifiesScores> : TileSizes<192, 128, 2, true> {};
template <>
struct ForwardTile<64, true> : TileSizes<128, 128, 2, false> {};

template <bool kModifiesScores>
struct ForwardTile<96, kModifiesScores> : TileSizes<128, 128, 2, false> {};

template <bool kModifiesScores>
struct ForwardTile<128, kModifiesScores> : TileSizes<128, 128, 2, false> {};

template <bool kModifiesScores>
struct ForwardTile<192, kModifiesScores> : TileSizes<128, 112, 1, false> {};
template <>
struct ForwardTile<192, true> : TileSizes<128, 80, 1, false> {};

template <bool kModifiesScores>
struct ForwardTile<256, kModifiesScores> : TileSizes<128, 80, 1, false> {};
template <>
struct ForwardTile<256, true> : TileSizes<128, 48, 1, false> {};

template <int kHeadDim>
constexpr BlockSizes forward_block(bool modifies_scores) {
  using Plain = ForwardTile<kHeadDim, false>;
  using Modifying = ForwardTile<kHeadDim, true>;
  return modifies_scores ? BlockSizes{Modifying::kBlockM, Modifying::kBlockN, 1}
                         : BlockSizes{Plain::kBlockM, Plain::kBlockN, 1};
}

}  // namespace neginf::sm90
