// The shapes of the sm90 backward: products, how their operands lie in shared memory, and what is
// there.
#pragma once

#include <algorithm>
#include <cute/tensor.hpp>
#include <type_traits>

#include "../common/backward_rows.h"
#include "../common/backward_work.cuh"
#include "backward_tile_sizes.h"
#include "tma.cuh"

namespace neginf::sm90 {

using namespace cute;

template <typename Element_, int kHeadDim_, typename Tile_, bool kModifiesScores_>
struct BackwardTraits {
  using Element = Element_;
  using Tile = Tile_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kModifiesScores = kModifiesScores_;
  static constexpr int kBlockM = Tile::kBlockM;
  static constexpr int kBlockN = Tile::kBlockN;
  static constexpr int kStagesQ = Tile::kStagesQ;
  static constexpr int kStagesDout = Tile::kStagesDout;
  static constexpr bool kKeepsP = Tile::kKeepsP;
  static constexpr int kWarpgroups = 2;  // consumers
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  // Per thread. The CTA has what it is launched with, 168 for each.
  static constexpr int kConsumerRegisters = Tile::kConsumerRegisters;
  static constexpr int kProducerRegisters = 3 * 168 - 2 * kConsumerRegisters;
  // dQ is cut among the warpgroups by rows, or where they are too few by columns.
  static constexpr bool kCutsRows = kBlockM == 64 * kWarpgroups;
  static constexpr bool kOwnQueryGrad = Tile::kOwnQueryGrad;
  static constexpr int kQueryGradColumns = kCutsRows ? kHeadDim : kHeadDim / kWarpgroups;
  static_assert(kCutsRows || kBlockM == 64);
  static constexpr int kQueryGradParts = Tile::kQueryGradParts;

  // What a warpgroup has of S^T, and of dK and dV.
  static constexpr int kScoreRows = kKeepsP ? kBlockM : kBlockM / kWarpgroups;
  static constexpr int kKeyGradColumns = kKeepsP ? kHeadDim : kHeadDim / kWarpgroups;
  static_assert(kBlockN == (kKeepsP ? 64 * kWarpgroups : 64));
  static_assert(kQueryGradParts == 1 || (kQueryGradParts == 2 && !kKeepsP));
  using ScoreTile = Shape<Int<kBlockN>, Int<kBlockM>>;       // S^T, dP^T
  using KeyGradTile = Shape<Int<kBlockN>, Int<kHeadDim>>;    // dK, dV
  using QueryGradTile = Shape<Int<kBlockM>, Int<kHeadDim>>;  // dQ
  // How the warpgroups lie in a product.
  using AlongM = Layout<Shape<Int<kWarpgroups>, _1, _1>>;
  using AlongN = Layout<Shape<_1, Int<kWarpgroups>, _1>>;
  using AlongKeysIfKept = std::conditional_t<kKeepsP, AlongM, AlongN>;
  using ScoreMma = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float,
                           Shape<_64, Int<std::min(kScoreRows, 64)>, Int<kHeadDim>>>(),
      AlongKeysIfKept{}));
  static constexpr auto key_grad_op() {
    using ProductTile = Shape<_64, Int<kKeyGradColumns>, Int<kBlockM>>;
    if constexpr (kKeepsP) {
      return GMMA::rs_op_selector<Element, Element, float, ProductTile, GMMA::Major::K,
                                  GMMA::Major::MN>();
    } else {
      return GMMA::ss_op_selector<Element, Element, float, ProductTile, GMMA::Major::K,
                                  GMMA::Major::MN>();
    }
  }
  using KeyGradMma = decltype(make_tiled_mma(key_grad_op(), AlongKeysIfKept{}));
  using QueryGradMma =
      decltype(make_tiled_mma(GMMA::ss_op_selector<Element, Element, float,
                                                   Shape<_64, Int<kQueryGradColumns>, Int<kBlockN>>,
                                                   GMMA::Major::MN, GMMA::Major::MN>(),
                              std::conditional_t<kCutsRows, AlongM, AlongN>{}));

  // Column blocks of Q and dO divide a warpgroup's columns of dK and dV, those of K its columns of
  // dQ: a product must begin where a block does.
  static constexpr int kSwizzleColumns = kKeyGradColumns % 64 == 0 ? 64 : 32;
  static constexpr int kSwizzleColumnsK =  // also of V
      kQueryGradColumns % kSwizzleColumns == 0 ? kSwizzleColumns : 16;
  template <int kColumns>
  using SwizzleAtom =
      std::conditional_t<kColumns == 64, GMMA::Layout_K_SW128_Atom<Element>,
                         std::conditional_t<kColumns == 32, GMMA::Layout_K_SW64_Atom<Element>,
                                            GMMA::Layout_K_SW32_Atom<Element>>>;
  // (rows, columns, stage) and its transpose, (columns, rows, stage).
  template <int kRows, int kColumns, int kStages, int kSwizzle>
  struct Layouts {
    using Plain = decltype(tile_to_shape(SwizzleAtom<kSwizzle>{},
                                         Shape<Int<kRows>, Int<kColumns>, Int<kStages>>{}));
    using Transposed = decltype(composition(
        Plain{}, make_layout(Shape<Int<kColumns>, Int<kRows>, Int<kStages>>{},
                             Stride<Int<kRows>, _1, Int<kRows * kColumns>>{})));
  };
  using LayoutsQ = Layouts<kBlockM, kHeadDim, kStagesQ, kSwizzleColumns>;
  using LayoutsDout = Layouts<kBlockM, kHeadDim, kStagesDout, kSwizzleColumns>;
  using LayoutsK = Layouts<kBlockN, kHeadDim, 1, kSwizzleColumnsK>;  // also V
  using LayoutsP = Layouts<kBlockN, kBlockM, 1, 64>;                 // P^T, also dS^T

  struct SharedStorage {
    alignas(1024) Element k[kBlockN * kHeadDim];
    alignas(1024) Element v[kBlockN * kHeadDim];
    alignas(1024) Element q[kStagesQ][kBlockM * kHeadDim];
    alignas(1024) Element dout[kStagesDout][kBlockM * kHeadDim];
    alignas(1024) Element ds[kBlockN * kBlockM];
    alignas(kKeepsP ? alignof(Element) : 1024) Element p[kKeepsP ? 1 : kBlockN * kBlockM];
    alignas(128) float dq[kBlockM * kHeadDim / kQueryGradParts];  // of a part of a step
    RowStatistics<kBlockM> statistics[kStagesQ];
    alignas(8) Divisor careful[kStagesQ][kBlockM];  // of a tile that needs care
    KeyWork work[2];
    bool is_end[2];
    Ring<2> work_ring;
    Ring<1> k_ring;
    Ring<1> v_ring;
    Ring<kStagesQ> q_ring;  // and the statistics
    Ring<kStagesDout> dout_ring;
    ReadBarrier loaded;  // all loads of the last work have been issued
    LoadBarrier uncleared;
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024);
};

}  // namespace neginf::sm90
