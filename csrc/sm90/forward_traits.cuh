// The shapes of the sm90 forward: products, how their operands lie in shared memory, what is there,
// and what the host prepares.
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

#include "../common/forward_epilogue.cuh"
#include "../common/forward_work.h"
#include "forward_tile_sizes.h"
#include "schedule.h"
#include "tma.cuh"

namespace neginf::sm90 {

using namespace cute;

// Which keys the rows of a tile see, by their position in it. Those behind the end of the sequence
// see what they would see if it went on; nothing of them is stored.
struct alignas(16) TileMask {
  int begin;  // of the keys of position 0; of each further position one more
  int end;    // likewise
  int keys;   // of the sequence

  static __device__ TileMask of(const Mask& mask, int first_row) {
    constexpr int kUnbounded = kMaxSeqlen / 2;  // so that differences fit
    const int diagonal = first_row + mask.offset();
    return {mask.window_left < 0 ? -kUnbounded : diagonal - mask.window_left,
            mask.window_right < 0 ? mask.seqlen_k : diagonal + mask.window_right + 1,
            mask.seqlen_k};
  }

  // Counted from `first_key`.
  __device__ Range keys_of(int position, int first_key) const {
    return {position + begin - first_key, min(position + end, keys) - first_key};
  }
};

// The key tiles of a row tile that matter to the rows of one warpgroup.
struct alignas(16) OwnKeyTiles {
  KeyTiles key;
  int before;  // so many do not, in front of them and behind
  int after;
  int whole_end;  // of those that are multiplied whole; only half of the last one may matter

  static __device__ OwnKeyTiles of(const ForwardWork& work, Range positions, int block_n,
                                   bool halves_last) {
    const int first = work.tile.first_row;
    const Range rows{first + positions.begin, first + positions.end};
    const KeyTiles own = work.key_tiles.of_rows(work.mask, rows, block_n);
    const Range all = work.key_tiles.tiles;
    if (own.tiles.empty()) return {own, all.size(), 0, own.tiles.end};
    const int last = own.tiles.end - 1;
    const bool is_half = halves_last && last > own.tiles.begin &&
                         work.mask.keys_of_rows(rows).end <= last * block_n + block_n / 2;
    return {own, own.tiles.begin - all.begin, all.end - own.tiles.end, is_half ? last : last + 1};
  }
};

template <typename Element_, int kHeadDim_, int kHeadDimV_, typename Tile, bool kModifiesScores_>
struct ForwardTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;  // of V and O
  static constexpr bool kModifiesScores = kModifiesScores_;
  static constexpr int kBlockM = Tile::kBlockM;
  static constexpr int kBlockN = Tile::kBlockN;
  static constexpr int kStages = Tile::kStages;
  static constexpr int kStagesQ = Tile::kStagesQ;
  static constexpr bool kTakesTurns = Tile::kTakesTurns;
  static constexpr bool kHalvesLast = Tile::kHalvesLast;
  // O leaves through the Q that it was made from. With a single Q, the next one would have to wait
  // for that.
  static constexpr bool kStoresThroughQ = kStagesQ > 1;
  static constexpr int kWorkSlots = 4;
  static constexpr int kWarpgroups = kBlockM / 64;  // consumers
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  // Per thread; at most 512 for all warpgroups together, as many as the multiprocessor has.
  static constexpr int kConsumerRegisters = kWarpgroups == 3 ? 160 : 232;
  static constexpr int kProducerRegisters = kWarpgroups == 3 ? 32 : 40;

  static constexpr int kLeastN = kHalvesLast ? kBlockN / 2 : kBlockN;  // keys of a product
  template <bool kHalf>
  using ScoreTile = Shape<Int<kBlockM>, Int<kHalf ? kLeastN : kBlockN>>;
  using OutputTile = Shape<Int<kBlockM>, Int<kHeadDimV>>;
  using Warpgroups = Layout<Shape<Int<kWarpgroups>, _1, _1>>;
  template <bool kHalf>
  using ScoreMma = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float,
                           Shape<_64, Int<kHalf ? kLeastN : kBlockN>, Int<kHeadDim>>>(),
      Warpgroups{}));
  using OutputMma = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float, Shape<_64, Int<kHeadDimV>, Int<kBlockN>>,
                           GMMA::Major::K, GMMA::Major::MN>(),
      Warpgroups{}));

  // One instruction for all columns: CuTe knows every multiple of 8 only if told so by the build.
  static_assert(size<1>(typename ScoreMma<false>::AtomShape_MNK{}) == kBlockN);
  static_assert(size<1>(typename ScoreMma<true>::AtomShape_MNK{}) == kLeastN);
  static_assert(size<1>(typename OutputMma::AtomShape_MNK{}) == kHeadDimV);

  static constexpr int kSwizzleColumns = kHeadDim % 64 == 0 ? 64 : 32;
  static_assert(kHeadDimV <= kHeadDim && kHeadDimV % kSwizzleColumns == 0);
  using SwizzleAtom = std::conditional_t<kSwizzleColumns == 64, GMMA::Layout_K_SW128_Atom<Element>,
                                         GMMA::Layout_K_SW64_Atom<Element>>;
  using LayoutQ =
      decltype(tile_to_shape(SwizzleAtom{}, Shape<Int<kBlockM>, Int<kHeadDim>, Int<kStagesQ>>{}));
  using LayoutO = decltype(tile_to_shape(SwizzleAtom{}, OutputTile{}));
  template <int kColumns>
  using LayoutKeys =
      decltype(tile_to_shape(SwizzleAtom{}, Shape<Int<kBlockN>, Int<kColumns>, Int<kStages>>{}));
  template <bool kHalf>
  using LayoutK = decltype(composition(
      LayoutKeys<kHeadDim>{},
      make_layout(Shape<Int<kHalf ? kLeastN : kBlockN>, Int<kHeadDim>, Int<kStages>>{},
                  Stride<_1, Int<kBlockN>, Int<kBlockN * kHeadDim>>{})));
  // (head_dim_v, keys, stage)
  using LayoutVTransposed = decltype(composition(
      LayoutKeys<kHeadDimV>{}, make_layout(Shape<Int<kHeadDimV>, Int<kBlockN>, Int<kStages>>{},
                                           Stride<Int<kBlockN>, _1, Int<kBlockN * kHeadDimV>>{})));

  struct SharedStorage {
    alignas(1024) Element q[kStagesQ][kBlockM * kHeadDim];
    alignas(1024) Element k[kStages][kBlockN * kHeadDim];
    alignas(1024) Element v[kStages][kBlockN * kHeadDimV];
    ForwardWork work[kWorkSlots];
    RowEndings endings[kWorkSlots];
    TileMask mask[kWorkSlots];
    OwnKeyTiles own[kWorkSlots][kWarpgroups];
    bool is_end[kWorkSlots];  // there is no more work, and none in `own`
    Ring<kStagesQ> q_ring;
    Ring<kStagesQ> out_ring;  // O in the place of Q, where it leaves so
    Ring<kStages> k_ring;
    Ring<kStages> v_ring;
    Ring<kWorkSlots> work_ring;
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024);
};

// What the host prepares for a launch.
struct Launch {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap out;
  Schedule schedule;
};

// Whether O leaves through Q: the rows of a tile must be a box, and O all there is.
template <typename Traits>
__device__ __forceinline__ bool leaves_through_q(const ForwardParams<float>& params,
                                                 const QueryPacking& packing) {
  return Traits::kStoresThroughQ && packing.heads == 1 && params.num_splits == 1;
}

}  // namespace neginf::sm90
