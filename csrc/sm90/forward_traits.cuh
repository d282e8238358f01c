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

template <typename Element_, int kHeadDim_, int kHeadDimV_, typename Tile, bool kModifiesScores_>
struct ForwardTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;  // of V and O
  static constexpr bool kModifiesScores = kModifiesScores_;
  static constexpr int kBlockM = Tile::kBlockM;
  static constexpr int kBlockN = Tile::kBlockN;
  static constexpr int kStages = 2;  // of K and V
  static constexpr int kStagesQ = Tile::kStagesQ;
  static constexpr bool kTakesTurns = Tile::kTakesTurns;
  // O leaves through the rows of Q that it was made from. With a single Q, the next one would have
  // to wait for that.
  static constexpr bool kStoresThroughQ = kStagesQ > 1;
  static constexpr int kWorkSlots = 4;
  static constexpr int kWarpgroups = kBlockM / 64;  // consumers
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  // Per thread; at most 512 for all warpgroups together, as many as the multiprocessor has. Two
  // consumers leave some over for the producers, of which kernels that modify scores need more.
  static constexpr int kConsumerRegisters = kWarpgroups == 3 ? 160 : kModifiesScores ? 224 : 232;
  static constexpr int kProducerRegisters = kWarpgroups == 3 ? 32 : kModifiesScores ? 56 : 40;

  using ScoreTile = Shape<Int<kBlockM>, Int<kBlockN>>;
  using OutputTile = Shape<Int<kBlockM>, Int<kHeadDimV>>;
  using Warpgroups = Layout<Shape<Int<kWarpgroups>, _1, _1>>;
  using ScoreMma = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<kBlockN>, Int<kHeadDim>>>(),
      Warpgroups{}));
  using OutputMma = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float, Shape<_64, Int<kHeadDimV>, Int<kBlockN>>,
                           GMMA::Major::K, GMMA::Major::MN>(),
      Warpgroups{}));

  // One instruction for all columns: CuTe knows every multiple of 8 only if told so by the build.
  static_assert(size<1>(typename ScoreMma::AtomShape_MNK{}) == kBlockN);
  static_assert(size<1>(typename OutputMma::AtomShape_MNK{}) == kHeadDimV);

  static constexpr int kSwizzleColumns = kHeadDim % 64 == 0 ? 64 : 32;
  static_assert(kHeadDimV <= kHeadDim && kHeadDimV % kSwizzleColumns == 0);
  using SwizzleAtom = std::conditional_t<kSwizzleColumns == 64, GMMA::Layout_K_SW128_Atom<Element>,
                                         GMMA::Layout_K_SW64_Atom<Element>>;
  using LayoutQ =
      decltype(tile_to_shape(SwizzleAtom{}, Shape<Int<kBlockM>, Int<kHeadDim>, Int<kStagesQ>>{}));
  using LayoutO = decltype(tile_to_shape(SwizzleAtom{}, OutputTile{}));
  static constexpr int kWarpRows = 16;  // of a product
  template <int kColumns>
  using LayoutKeys =
      decltype(tile_to_shape(SwizzleAtom{}, Shape<Int<kBlockN>, Int<kColumns>, Int<kStages>>{}));
  using LayoutK = LayoutKeys<kHeadDim>;
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
    KeyTiles key_tiles[kWorkSlots][kWarpgroups];  // that matter to the rows of each
    bool is_end[kWorkSlots];                      // there is no more work
    Ring<kStagesQ> q_ring;
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
  CUtensorMap out;  // for the 16 rows of a warp, one head
  Schedule schedule;
};

}  // namespace neginf::sm90
