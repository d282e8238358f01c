// The shapes of the sm90 backward: products, how their operands lie in shared memory, and what is
// there.
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

#include "../common/backward_rows.h"
#include "../common/backward_scores.cuh"
#include "../common/backward_work.cuh"
#include "backward_tile_sizes.h"
#include "tma.cuh"

namespace neginf::sm90 {

using namespace cute;

// The hardware barriers of the kernel, see named_barrier.cuh.
struct BackwardBarrier {
  static constexpr int kConsumers = 1;  // their own; if wide those of the second warpgroup
  // Two each: of a warpgroup, and if wide of a step.
  static constexpr int kQueryGradFull = 2;
  static constexpr int kQueryGradFree = 4;
  static constexpr int kProbabilities = 6;
  static constexpr int kGradients = 8;
  static constexpr int kQueriesRead = 10;  // of buffers, up to three
  static constexpr int kCleared = 15;
};

// What the loader tells the clearer: of a tile of keys or of rows those before `first`, and of rows
// those that need it.
struct ToClear {
  enum What { kKeys, kRows, kEnd };
  What what;
  void* tile;  // in shared memory
  int first;
  CarefulRows rows;
};

// What the loader tells the consumers of a step, which they need not work out then.
struct StepNotes {
  enum Flag { kMasked = 1, kNeedsCare = 2, kIsLast = 4 };  // the last one of the work
  int flags;
  RowStep step;
  CarefulRows rows;  // if it needs care; none of them if it is only to be cleared
};

template <typename Element_, int kHeadDim_, typename Tile_, bool kModifiesScores_>
struct BackwardTraits {
  using Element = Element_;
  using Tile = Tile_;
  static constexpr DType kDType =
      std::is_same_v<Element, half_t> ? DType::float16 : DType::bfloat16;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kModifiesScores = kModifiesScores_;
  static constexpr bool kIsWide = Tile::kIsWide;
  static constexpr int kBlockM = Tile::kBlockM;
  static constexpr int kBlockN = Tile::kBlockN;
  static constexpr int kStagesQ = Tile::kStagesQ;
  static constexpr int kStagesDout = Tile::kStagesDout;
  static constexpr int kStagesDs = 2;
  static constexpr int kWarpgroups = 2;  // consumers
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  // Per thread. The CTA has what it is launched with, so many for each.
  static constexpr int kLaunchRegisters = 168;
  static constexpr int kConsumerRegisters = Tile::kConsumerRegisters;
  static constexpr int kProducerRegisters =
      kThreads / 128 * kLaunchRegisters - kWarpgroups * kConsumerRegisters;

  // How the warpgroups lie in a product.
  using Alone = Layout<Shape<_1, _1, _1>>;
  using AlongM = Layout<Shape<Int<kWarpgroups>, _1, _1>>;
  using AlongN = Layout<Shape<_1, Int<kWarpgroups>, _1>>;

  // S^T, dP^T and dK, dV: each warpgroup has its keys, or if wide one has S^T and dV and the other
  // one dP^T and dK.
  static_assert(kBlockN == (kIsWide ? 64 : 64 * kWarpgroups));
  using OfKeys = std::conditional_t<kIsWide, Alone, AlongM>;
  using ScoreTile = Shape<Int<kBlockN>, Int<kBlockM>>;
  using ScoreMma = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<kBlockM>, Int<kHeadDim>>>(),
      OfKeys{}));
  using KeyGradTile = Shape<Int<kBlockN>, Int<kHeadDim>>;
  using KeyGradMma = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float, Shape<_64, Int<kHeadDim>, Int<kBlockM>>,
                           GMMA::Major::K, GMMA::Major::MN>(),
      OfKeys{}));
  static constexpr int kKeyThreads = size(ScoreMma{});

  // dQ is cut among the warpgroups by rows, or where they are too few by columns. A product has 64
  // rows; any other number of them is the N of dQ^T = K^T dS^T.
  static constexpr bool kCutsRows = kBlockM == 64 * kWarpgroups;
  static constexpr bool kTransposesDq = kBlockM % 64 != 0;
  static constexpr int kQueryGradParts = Tile::kQueryGradParts;
  static constexpr int kPartColumns = kHeadDim / kQueryGradParts;
  static constexpr int kQueryGradColumns = kCutsRows ? kPartColumns : kPartColumns / kWarpgroups;
  static_assert(kCutsRows || kTransposesDq || kBlockM == 64);
  static_assert(!kTransposesDq || kQueryGradColumns == 64);
  using OfQueryGrad = std::conditional_t<kCutsRows, AlongM, AlongN>;
  static constexpr auto query_grad_mma() {
    if constexpr (kTransposesDq) {
      return make_tiled_mma(
          GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<kBlockM>, Int<kBlockN>>,
                               GMMA::Major::MN, GMMA::Major::K>(),
          AlongM{});
    } else {
      return make_tiled_mma(GMMA::ss_op_selector<Element, Element, float,
                                                 Shape<_64, Int<kQueryGradColumns>, Int<kBlockN>>,
                                                 GMMA::Major::MN, GMMA::Major::MN>(),
                            OfQueryGrad{});
    }
  }
  using QueryGradMma = decltype(query_grad_mma());
  using QueryGradTile =  // of a part
      std::conditional_t<kTransposesDq, Shape<Int<kPartColumns>, Int<kBlockM>>,
                         Shape<Int<kBlockM>, Int<kPartColumns>>>;

  // Columns of a block of Q and dO, and of K and V. Those of K divide a warpgroup's columns of dQ:
  // a product must begin where a block does.
  static constexpr int kSwizzleColumns = 64;
  static constexpr int kSwizzleColumnsK = kQueryGradColumns % 64 == 0   ? 64
                                          : kQueryGradColumns % 32 == 0 ? 32
                                                                        : 16;
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
  using LayoutsDs = std::conditional_t<kTransposesDq, Layouts<kBlockM, kBlockN, kStagesDs, 64>,
                                       Layouts<kBlockN, kBlockM, kStagesDs, 64>>;  // dS, dS^T

  // Who reads works: all but the claimer, which writes them, and the clearer, which the loader
  // waits for.
  static constexpr int kWorkReaders = kThreads - 2 * 32;

  struct SharedStorage {
    alignas(1024) Element k[kBlockN * kHeadDim];
    alignas(1024) Element v[kBlockN * kHeadDim];
    alignas(1024) Element q[kStagesQ][kBlockM * kHeadDim];
    alignas(1024) Element dout[kStagesDout][kBlockM * kHeadDim];
    alignas(1024) Element ds[kStagesDs][kBlockN * kBlockM];
    // If wide, P^T as the registers of its threads: each 16 rows of them four words.
    uint4 p[kIsWide ? 2 : 1][kIsWide ? kBlockM / 16 : 1][kIsWide ? 128 : 1];
    alignas(128) float dq[kBlockM * kPartColumns];
    RowStatistics<kBlockM> statistics[kStagesQ];
    StepNotes notes[kStagesQ];
    KeyWork work[2];
    bool is_end[2];
    Ring<2> work_ring;
    Ring<1> k_ring;
    Ring<1> v_ring;
    ThreadsRing<kStagesQ, BackwardBarrier::kQueriesRead, 128 * kWarpgroups>
        q_ring;  // and statistics, notes
    Ring<kStagesDout> dout_ring;
    ReadBarrier loaded;     // all loads of the last work have been issued
    LoadBarrier uncleared;  // to_clear is there, and what it speaks of
    ToClear to_clear;
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024);
};

}  // namespace neginf::sm90
