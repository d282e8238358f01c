// Attention backward with mma.sync and cp.async: for sm80, and as PTX for newer GPUs.
//
// A CTA owns kBlockN keys of one key head and walks over the tiles of kBlockM query rows that see
// any of them, of every query head in the group. dK and dV stay in registers; dQ is added to fp32
// memory. Everything of size keys x rows is computed transposed:
//
//     S^T = K Q^T          P = exp(S - L)         dV += P^T dO
//     dP^T = V dO^T        dS = P (dP - delta)    dK += dS^T Q      dQ += dS K
//
//   global       K, V         Q, dO, divisor, delta                          dQ (fp32)   dK, dV
//                | cp.async   | cp.async                                        ^          ^
//   shared       sK, sV       sQ[2], sdO     sP, sdS ---------------.           | red      |
//                | ldmatrix   | ldmatrix     ^ st.shared            | ldmatrix  |          |
//   registers    '------------'--> S^T, dP^T -' --> P, dS ----------'--> dQ ----'  dK, dV -'
//
// Iteration t, with Q and the row statistics in stage t % 2. Where tiles of keys x rows are cut
// both ways (P and dS go through shared memory):
//
//   wait, barrier | S, issue Q(t+1), dO(t+1), dP -> P, dS | barrier | dV, dQ, dK
//        |                                                    |
//   all warps are past dQ(t-1):                          P and dS are there
//   the other stage, sP and sdS are free
//
// With one stage of dO, a barrier after dV says that sdO is free, and dO(t+1) is issued there.
// Where each warp owns whole rows of S^T (kKeepsP), P^T and dS^T go from accumulator to operand
// in registers, and only dQ needs sdS. What lies in brackets may take the rows of a tile in several
// passes: larger tiles than S^T and dP^T have registers for, so fewer barriers, and dQ fetches each
// fragment of K for more rows.
//
//   wait, barrier | issue Q(t+1), dO(t+1), [S -> P, dV, dP -> dS, dK] | barrier | dQ
//
// Registers are what is short: dK and dV alone take half. So shared memory is addressed as
// swizzle.h says, one register for each kind of operand.
//
// Softcap and ALiBi are a second kernel, as in the forward.
#pragma once

#include <cute/tensor.hpp>
#include <limits>

#include "../common/backward_rows.h"
#include "../common/cuda_check.h"
#include "../common/device.h"
#include "../common/shared_memory.h"
#include "../common/softmax.h"
#include "../kernels.h"
#include "backward_tile_sizes.h"
#include "backward_work.cuh"
#include "shared_tile.cuh"
#include "tiles.cuh"

namespace neginf::sm80 {

using namespace cute;

// ------------------------------------------------------------------------------------------ traits

template <typename Element_, int kHeadDim_, typename Sizes, bool kModifiesScores_>
struct BackwardTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kModifiesScores = kModifiesScores_;
  static constexpr int kBlockM = Sizes::kBlockM;
  static constexpr int kBlockN = Sizes::kBlockN;
  static constexpr int kWarps = Sizes::kWarps;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kStagesQ = 2;
  static constexpr int kStagesDout = Sizes::kStagesDout;
  static constexpr int kQueryGradParts = Sizes::kQueryGradParts;
  static constexpr int kScoreWarpsKeys = Sizes::kScoreWarpsKeys;
  static constexpr int kKeyGradWarpsKeys = Sizes::kKeyGradWarpsKeys;
  static constexpr int kQueryGradWarpsRows = Sizes::kQueryGradWarpsRows;
  static constexpr int kPasses = Sizes::kPasses;
  static constexpr int kPassM = kBlockM / kPasses;  // rows
  // sm_80 code of it spills, and the shared memory of an sm80 holds one such CTA, not two.
  static constexpr bool kOnlySm90 = kPasses > 1;
  static constexpr bool kKeepsP = kScoreWarpsKeys == kWarps && kKeyGradWarpsKeys == kWarps;

  using MmaAtom = std::conditional_t<std::is_same_v<Element, half_t>, SM80_16x8x16_F32F16F16F32_TN,
                                     SM80_16x8x16_F32BF16BF16F32_TN>;
  // Products with `kRowWarps` warps along the rows of the result and the others along its columns.
  template <int kRowWarps>
  using TiledMmaOf = decltype(make_tiled_mma(
      MmaAtom{}, Layout<Shape<Int<kRowWarps>, Int<kWarps / kRowWarps>, _1>>{},
      Tile<Int<16 * kRowWarps>, Int<16 * (kWarps / kRowWarps)>, _16>{}));
  using ScoreMma = TiledMmaOf<Sizes::kScoreWarpsKeys>;          // (keys, rows)
  using KeyGradMma = TiledMmaOf<Sizes::kKeyGradWarpsKeys>;      // (keys, head_dim)
  using QueryGradMma = TiledMmaOf<Sizes::kQueryGradWarpsRows>;  // (rows, head_dim)

  using SharedQ = SharedTile<kBlockM, kHeadDim>;  // also dO
  using SharedK = SharedTile<kBlockN, kHeadDim>;  // also V
  using SharedP = SharedTile<kBlockN, kBlockM>;   // also dS; transposed, as S is
  using ScoreA = OperandA<SharedK, kScoreWarpsKeys>;
  using ScoreB = OperandB<SharedQ, kWarps / kScoreWarpsKeys>;
  using ScoreStore = AccumulatorStore<SharedP, kScoreWarpsKeys, kWarps / kScoreWarpsKeys>;
  using KeyGradA = OperandA<SharedP, kKeyGradWarpsKeys>;
  using KeyGradB = TransposedOperandB<SharedQ, kWarps / kKeyGradWarpsKeys>;
  using QueryGradA = TransposedOperandA<SharedP, kQueryGradWarpsRows>;
  using QueryGradB = TransposedOperandB<SharedK, kWarps / kQueryGradWarpsRows>;
  using KeyTile = Shape<Int<kBlockN>, Int<kHeadDim>>;
  using ScoreTile = Shape<Int<kBlockN>, Int<kPassM>>;  // of a pass

  // 16 bytes per thread along a column block.
  static constexpr int kThreadsPerRow = SharedQ::kChunks;
  using GmemThreads = Layout<Shape<Int<kThreads / kThreadsPerRow>, Int<kThreadsPerRow>>,
                             Stride<Int<kThreadsPerRow>, _1>>;
  using GmemLoad =
      decltype(make_tiled_copy(Copy_Atom<SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>, Element>{},
                               GmemThreads{}, Layout<Shape<_1, _8>>{}));
  using GmemStore = decltype(make_tiled_copy(Copy_Atom<UniversalCopy<uint128_t>, Element>{},
                                             GmemThreads{}, Layout<Shape<_1, _8>>{}));
  using SmemStore = Copy_Atom<UniversalCopy<uint32_t>, Element>;

  struct SharedStorage {
    alignas(128) Element k[kBlockN * kHeadDim];  // the epilogue puts dK here
    alignas(128) Element v[kBlockN * kHeadDim];  // and dV here
    alignas(128) Element q[kStagesQ][kBlockM * kHeadDim];
    alignas(128) Element dout[kStagesDout][kBlockM * kHeadDim];
    alignas(128) Element p[kKeepsP ? 1 : kBlockN * kBlockM];
    alignas(128) Element ds[kBlockN * kBlockM];
    RowStatistics<kBlockM> statistics[kStagesQ];
    KeyWork work;
  };
};

// ------------------------------------------------------------------------------------ needing care

// The Lse of the rows of a step, and which of them must not enter a product: those without weight,
// and those that are NaN anyway, whose q and dO would meet the zeros of keys they do not see.
struct CarefulRows {
  const Lse* lse;  // of the first row
  int rows_left;

  static __device__ CarefulRows of(const BackwardParams<float>& params, const BackwardRows& rows,
                                   const KeyWork& work, const RowStep& step) {
    const int first_row = step.tile * rows.tile_rows;
    return {params.lse + work.keys.index * params.lse_strides.batch +
                step.head * params.lse_strides.head + work.queries.first_row + first_row,
            work.queries.length - first_row};
  }

  __device__ bool must_clear(int r) const {
    return r < rows_left && (lse[r].is_empty() || lse[r].value() != lse[r].value());
  }

  // P = exp2 of it. Without contraction: s must be rounded as the Lse was. A row that is empty
  // though the mask shows it keys has had its q cleared, so its scores are no longer -inf.
  __device__ float exponent(int r, float raw, float scale) const {
    if (r >= rows_left || lse[r].is_empty()) return masked_score<float>();
    return Divisor::of(lse[r]).exponent(__fmul_rn(raw, scale)) * kLog2e;
  }
};

// Their exponents are whole, so there is nothing left for the divisors in shared memory to do.
template <typename Traits>
__device__ __noinline__ void clear_careful_rows(CarefulRows rows, typename Traits::Element* q,
                                                typename Traits::Element* dout,
                                                RowStatistics<Traits::kBlockM>& statistics) {
  using Element = typename Traits::Element;
  Tensor sQ = make_tensor(make_smem_ptr(q), typename Traits::SharedQ::Layout{});
  Tensor sdO = make_tensor(make_smem_ptr(dout), typename Traits::SharedQ::Layout{});
  for (int i = thread_index(); i < Traits::kBlockM * Traits::kHeadDim; i += Traits::kThreads) {
    const int r = i / Traits::kHeadDim;
    if (!rows.must_clear(r)) continue;
    sQ(r, i % Traits::kHeadDim) = Element(0);
    sdO(r, i % Traits::kHeadDim) = Element(0);
  }
  for (int r = thread_index(); r < Traits::kBlockM; r += Traits::kThreads) {
    statistics.divisor[r] = Log2Divisor::none();
  }
}

// -------------------------------------------------------------------------------- the scores' part

// S^T to P, in place. Tensors here are (rows, keys), as in the forward; the rows of a thread are
// many and its keys are few.
template <class Scores, class RowOf>
__device__ __forceinline__ void to_probabilities(Scores& scores, const Log2Divisor* divisor,
                                                 const RowOf& row_of, float scale_log2) {
  CUTE_UNROLL
  for (int r = 0; r < size<0>(scores); ++r) {
    const Log2Divisor of_row = divisor[row_of(r)];
    CUTE_UNROLL
    for (int c = 0; c < size<1>(scores); ++c) {
      scores(r, c) = exp2_approx(of_row.exponent(scores(r, c), scale_log2));
    }
  }
}

// For rows that base 2 cannot serve: S^T to what to_probabilities takes with a scale of 1. Not to
// P, which would put a branch around all of that, and its arithmetic could not move into the
// products.
template <class Scores, class RowOf>
__device__ __forceinline__ void to_careful_exponents(Scores& scores, const CarefulRows& rows,
                                                     const RowOf& row_of, float scale) {
  CUTE_UNROLL
  for (int r = 0; r < size<0>(scores); ++r) {
    CUTE_UNROLL
    for (int c = 0; c < size<1>(scores); ++c) {
      scores(r, c) = rows.exponent(row_of(r), scores(r, c), scale);
    }
  }
}

// dP to dS, in place.
template <class Gradients, class Probabilities, class RowOf>
__device__ __forceinline__ void to_score_gradients(Gradients& gradients, const Probabilities& p,
                                                   const float* delta, const RowOf& row_of) {
  CUTE_UNROLL
  for (int r = 0; r < size<0>(gradients); ++r) {
    const float of_row = delta[row_of(r)];
    CUTE_UNROLL
    for (int c = 0; c < size<1>(gradients); ++c) {
      gradients(r, c) = p(r, c) * (gradients(r, c) - of_row);
    }
  }
}

// A key of weight 0 gets gradient 0 also from a row whose other factor is NaN.
template <class Gradients, class Probabilities>
__device__ __forceinline__ void drop_weightless_keys(Gradients& gradients, const Probabilities& p) {
  CUTE_UNROLL
  for (int i = 0; i < size(gradients); ++i) {
    if (p(i) == 0.f) gradients(i) = 0.f;
  }
}

// ---------------------------------------------------------------------------------------- products

// The accumulator of a transposed tile, ((2, 2), keys, rows) per thread, as (rows, keys).
template <class Fragment>
__device__ __forceinline__ auto as_rows_and_keys(Fragment& fragment) {
  return make_tensor(fragment.data(), select<1, 0>(rows_and_columns(fragment.layout())));
}

// Where this lane finds operands in shared memory: in stage 0, and in K, Q, dS rather than their
// twins V, dO, P, which lie at a constant distance.
template <typename Traits>
struct OperandAddresses {
  uint32_t k;             // A of S^T
  uint32_t q;             // B of S^T
  uint32_t ds;            // A of dK
  uint32_t q_transposed;  // B of dK

  __device__ __forceinline__ explicit OperandAddresses(
      const typename Traits::SharedStorage& shared) {
    const int lane = thread_index() % 32;
    const int warp = thread_index() / 32;
    constexpr int kScoreKeys = Traits::kScoreWarpsKeys;
    constexpr int kGradKeys = Traits::kKeyGradWarpsKeys;
    k = cast_smem_ptr_to_uint(shared.k) + Traits::ScoreA::begin(lane, warp % kScoreKeys);
    q = cast_smem_ptr_to_uint(shared.q) + Traits::ScoreB::begin(lane, warp / kScoreKeys);
    ds = cast_smem_ptr_to_uint(shared.ds) + Traits::KeyGradA::begin(lane, warp % kGradKeys);
    q_transposed =
        cast_smem_ptr_to_uint(shared.q) + Traits::KeyGradB::begin(lane, warp / kGradKeys);
  }

  // What the compiler makes of them is not kept across iterations.
  __device__ __forceinline__ void forget_all() {
    forget(k);
    forget(q);
    forget(ds);
    forget(q_transposed);
  }
};

// The others are made anew where they are used: registers are short, and there latency is not.

// Where the accumulator of a tile like dS^T goes.
template <typename Traits>
__device__ __forceinline__ uint32_t score_store_address(const typename Traits::Element* tile) {
  const int thread = thread_index_again();
  const int warp = thread / 32;
  constexpr int kKeys = Traits::kScoreWarpsKeys;
  return cast_smem_ptr_to_uint(tile) +
         Traits::ScoreStore::begin(thread % 32, warp % kKeys, warp / kKeys);
}

// The operands of dQ.
template <typename Traits>
struct QueryGradAddresses {
  uint32_t ds_transposed;  // A
  uint32_t k_transposed;   // B

  __device__ __forceinline__ explicit QueryGradAddresses(
      const typename Traits::SharedStorage& shared) {
    const int thread = thread_index_again();
    const int lane = thread % 32;
    const int warp = thread / 32;
    constexpr int kRows = Traits::kQueryGradWarpsRows;
    ds_transposed =
        cast_smem_ptr_to_uint(shared.ds) + Traits::QueryGradA::begin(lane, warp % kRows);
    k_transposed = cast_smem_ptr_to_uint(shared.k) + Traits::QueryGradB::begin(lane, warp / kRows);
  }
};

template <typename Traits, class TiledMma, class Rounded, class Shared>
__device__ __forceinline__ void store_accumulator(const Rounded& rounded, const Shared& shared) {
  auto store = make_tiled_copy_C(typename Traits::SmemStore{}, TiledMma{});
  auto thread = store.get_slice(thread_index());
  copy(store, thread.retile_S(rounded), thread.partition_D(shared));
}

// ------------------------------------------------------------------------------------------- dQ

// Lets key tiles add to a tile of dQ one after the other, the last one first.
struct OrderedAdds {
  int* adds;  // null: in any order
  int turn;

  static __device__ OrderedAdds of(const BackwardParams<float>& params, const BackwardRows& rows,
                                   const KeyWork& work, const RowStep& step, int block_n) {
    if (!params.deterministic) return {nullptr, 0};
    const int first_row = step.tile * rows.tile_rows;
    const Range tiles =
        tiles_covering(work.mask.keys_of_rows({first_row, first_row + rows.tile_rows}), block_n);
    return {rows.adds + step.number(rows, work), tiles.end - 1 - work.keys.first_row / block_n};
  }

  __device__ void wait() const {
    if (adds == nullptr) return;
    if (threadIdx.x == 0) {
      int done;
      do {
        asm volatile("ld.global.acquire.gpu.b32 %0, [%1];" : "=r"(done) : "l"(adds) : "memory");
      } while (done != turn);
    }
    __syncthreads();
  }

  __device__ void pass_on() const {
    if (adds == nullptr) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(adds) : "memory");
    }
  }
};

// Where this thread's registers of the first block go that its warp adds to, see dq_piece_offset.
template <typename Traits>
__device__ __forceinline__ float* query_gradient_of_thread(float* tile) {
  constexpr int kRows = Traits::kQueryGradWarpsRows;
  const int thread = thread_index_again();
  const int warp = thread / 32;
  const int block = warp % kRows * (Traits::kHeadDim / 8) + warp / kRows;
  return tile + block * 128 + thread % 32 * (kAddsVectors ? 4 : 1);
}

// Adds one part of the columns. As atomicAdd, which some compilers make an atomic with a result
// that nobody wants.
template <typename Traits, class Part, class Accumulator>
__device__ __forceinline__ void add_query_gradient(float* of_thread, Part part,
                                                   const Accumulator& tQrQ) {
  constexpr int kRows = Traits::kQueryGradWarpsRows;
  constexpr int kColumnBlocks = Traits::kHeadDim / 8;
  CUTE_UNROLL
  for (int m = 0; m < size<1>(tQrQ); ++m) {
    CUTE_UNROLL
    for (int n = 0; n < size<2>(tQrQ); ++n) {
      const int block = m * kRows * kColumnBlocks + n * (Traits::kWarps / kRows) +
                        part * (kColumnBlocks / Traits::kQueryGradParts);
      float* to = of_thread + block * 128;
      const float* from = &tQrQ(0, m, n);
      if constexpr (kAddsVectors) {
        asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(from[0]),
                     "f"(from[1]), "f"(from[2]), "f"(from[3])
                     : "memory");
      } else {
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to + 32 * i), "f"(from[i]) : "memory");
        }
      }
    }
  }
}

// ---------------------------------------------------------------------------------------- mainloop

template <typename Traits, class KeyGradient>
__device__ __forceinline__ void mainloop(const BackwardParams<float>& params,
                                         const BackwardRows& rows, const KeyWork& work,
                                         typename Traits::SharedStorage& shared, KeyGradient& tKrK,
                                         KeyGradient& tVrV) {
  using Element = typename Traits::Element;
  constexpr int kBlockM = Traits::kBlockM;
  constexpr int kBlockN = Traits::kBlockN;
  constexpr bool kSingleDout = Traits::kStagesDout == 1;
  const int head_dim = params.problem.head_dim;
  int steps_left = work.row_tiles.size() * work.group;
  if (steps_left == 0) return;

  typename Traits::ScoreMma score_mma;
  typename Traits::KeyGradMma key_grad_mma;
  typename Traits::QueryGradMma query_grad_mma;

  OperandAddresses<Traits> at(shared);
  constexpr uint32_t kTileOfRows = sizeof(shared.q[0]);
  constexpr uint32_t kFromKToV = sizeof(shared.k);
  constexpr uint32_t kFromQToDout = sizeof(shared.q);
  constexpr uint32_t kFromDsToP = sizeof(shared.p);  // backwards

  Tensor tScS = score_mma.get_slice(thread_index())
                    .partition_C(make_identity_tensor(typename Traits::ScoreTile{}));
  Tensor coordinates = make_tensor(tScS.data(), select<1, 0>(rows_and_columns(tScS.layout())));
  const auto key_of = [&](int c) { return work.keys.first_row + get<0>(coordinates(0, c)); };

  constexpr int kScoreKeys = Traits::kScoreWarpsKeys;
  constexpr int kScoreRows = Traits::kWarps / kScoreKeys;
  constexpr int kScoreM = kBlockN / (16 * kScoreKeys);
  constexpr int kScoreN = Traits::kPassM / (16 * kScoreRows);
  // accumulator (keys, rows) += A B^T over head_dim.
  const auto multiply_scores = [&](auto& accumulator, uint32_t a_address, uint32_t b_address) {
    multiply_stepwise<Traits::kHeadDim / 16, kScoreN, kScoreM>(
        score_mma, accumulator,
        [&](int m, int k, uint32_t (&a)[4]) { ldmatrix(a, Traits::ScoreA::at(a_address, m, k)); },
        [&](int n, int k, uint32_t (&b)[4]) { ldmatrix(b, Traits::ScoreB::at(b_address, n, k)); });
  };
  const auto store_scores = [&](const auto& rounded, uint32_t address, int pass) {
    Tensor words = recast<uint32_t>(rounded);  // ((1, 2), kScoreM, 2 * kScoreN)
    CUTE_UNROLL
    for (int i = 0; i < size(words); ++i) {
      const int m = i / 2 % kScoreM;
      const int n = i / (2 * kScoreM) + pass * 2 * kScoreN;
      store_shared(Traits::ScoreStore::at(address, m, i % 2, n), words(i));
    }
  };
  constexpr int kGradKeys = Traits::kKeyGradWarpsKeys;
  constexpr int kGradColumns = Traits::kWarps / kGradKeys;
  const auto load_scores = [&](uint32_t address) {
    return [address](int m, int k, uint32_t (&a)[4]) {
      ldmatrix(a, Traits::KeyGradA::at(address, m, k));
    };
  };
  // An accumulator of scores that is an operand as it is.
  const auto load_operand = [&](const auto& rounded) {
    Tensor operand = recast<uint32_t>(
        make_tensor(rounded.data(), accumulator_as_operand(rounded.layout())));  // (4, M, K)
    return [operand](int m, int k, uint32_t (&a)[4]) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) a[i] = operand(i, m, k);
    };
  };
  // accumulator (keys, head_dim) += A B over the rows of a pass, or those of all if P and dS come
  // from shared memory.
  const auto multiply_key_gradient = [&](auto& accumulator, const auto& load_a, uint32_t b_address,
                                         int pass) {
    constexpr int kK = (Traits::kKeepsP ? Traits::kPassM : kBlockM) / 16;
    multiply_stepwise<kK, Traits::kHeadDim / (16 * kGradColumns), kBlockN / (16 * kGradKeys)>(
        key_grad_mma, accumulator, load_a, [&](int n, int k, uint32_t (&b)[4]) {
          ldmatrix_transposed(b, Traits::KeyGradB::at(b_address, n, k + pass * kK));
        });
  };

  RowLoader<Traits> loader(params, rows, work);
  int stage = 0;
  load_keys<Traits>(params.k, params.k_strides, shared.k, work, head_dim);
  load_keys<Traits>(params.v, params.v_strides, shared.v, work, head_dim);
  loader.load_q(shared.q[0]);
  loader.load_dout(shared.dout[0]);
  loader.load_statistics(&shared.statistics[0]);
  cp_async_fence();
  int needs_care = loader.needs_care();

  for (; steps_left > 0; --steps_left, stage ^= 1) {
    const RowStep step = loader.step();
    const bool has_next = steps_left > 1;
    const int first_row = step.tile * kBlockM;
    Element* const dout = shared.dout[kSingleDout ? 0 : stage];
    const uint32_t q_stage = stage * kTileOfRows;
    const uint32_t dout_stage = kFromQToDout + (kSingleDout ? 0 : q_stage);
    at.forget_all();

    if (has_next) loader.advance();
    const bool masked = !work.unmasked_tiles.contains(step.tile);
    const bool careful = needs_care != 0;
    const auto load_next = [&] {
      if (has_next) {
        needs_care = loader.needs_care();
        loader.load_q(shared.q[stage ^ 1]);
        if constexpr (!kSingleDout) loader.load_dout(shared.dout[stage ^ 1]);
        loader.load_statistics(&shared.statistics[stage ^ 1]);
      }
      cp_async_fence();
    };

    cp_async_wait<0>();
    __syncthreads();
    if constexpr (Traits::kKeepsP) load_next();
    const auto careful_rows = [&] { return CarefulRows::of(params, rows, work, step); };
    if (careful) {
      clear_careful_rows<Traits>(careful_rows(), shared.q[stage], dout, shared.statistics[stage]);
      __syncthreads();
    }

    using Scores = decltype(partition_fragment_C(score_mma, typename Traits::ScoreTile{}));
    for_each(make_int_sequence<Traits::kPasses>{}, [&](auto pass) __attribute__((always_inline)) {
      const auto row_in_tile = [&](int r) {
        return pass * Traits::kPassM + get<1>(coordinates(r, 0));
      };
      const uint32_t pass_offset = pass * Traits::kPassM * Traits::SharedQ::kRowBytes;
      Scores tSrS;
      clear(tSrS);
      multiply_scores(tSrS, at.k, at.q + q_stage + pass_offset);
      Scores tPrP;  // dP^T
      const auto multiply_dout = [&] {
        clear(tPrP);
        multiply_scores(tPrP, at.k + kFromKToV, at.q + dout_stage + pass_offset);
      };
      // One long phase of products is better than two, where there are registers for it. It hides
      // the loads, too.
      if constexpr (!Traits::kKeepsP) {
        if constexpr (pass == 0) load_next();
        multiply_dout();
      }

      Tensor p = as_rows_and_keys(tSrS);
      const auto modifiers = ScoreModifiers::of(params.problem, work.keys.index, step.head);
      const float scale = Traits::kModifiesScores ? modifiers.scale : params.problem.softmax_scale;
      [[maybe_unused]] Tensor slope = make_fragment_like(tSrS);  // of softcap
      if constexpr (Traits::kModifiesScores) {
        const auto row_of = [&](int r) { return first_row + row_in_tile(r); };
        if (modifiers.has_softcap) {
          modifiers.apply_softcap(p);
          CUTE_UNROLL
          for (int i = 0; i < size(slope); ++i) slope(i) = 1.f - tSrS(i) * tSrS(i);
        }
        if (modifiers.has_alibi) {
          const auto slope_of = [&](int) { return modifiers.alibi_slope; };
          modifiers.apply_alibi(p, slope_of, work.mask, row_of, key_of);
        }
      }
      if (masked) {
        apply_mask(p, work.mask, [&](int r) { return first_row + row_in_tile(r); }, key_of);
      }
      float scale_log2 = scale * kLog2e;
      if (careful) {
        to_careful_exponents(p, careful_rows(), row_in_tile, scale);
        scale_log2 = 1.f;
      }
      to_probabilities(p, shared.statistics[stage].divisor, row_in_tile, scale_log2);
      if constexpr (Traits::kKeepsP) {
        multiply_key_gradient(tVrV, load_operand(convert<Element>(tSrS)),
                              at.q_transposed + dout_stage, pass);
        multiply_dout();
      } else {
        store_scores(convert<Element>(tSrS), score_store_address<Traits>(shared.p), pass);
      }

      Tensor ds = as_rows_and_keys(tPrP);
      to_score_gradients(ds, p, shared.statistics[stage].delta, row_in_tile);
      if constexpr (Traits::kModifiesScores) {
        if (modifiers.has_softcap) {
          CUTE_UNROLL
          for (int i = 0; i < size(slope); ++i) tPrP(i) *= slope(i);
        }
      }
      if (careful) drop_weightless_keys(ds, p);
      Tensor rounded_ds = convert<Element>(tPrP);
      store_scores(rounded_ds, score_store_address<Traits>(shared.ds), pass);
      if constexpr (Traits::kKeepsP) {
        multiply_key_gradient(tKrK, load_operand(rounded_ds), at.q_transposed + q_stage, pass);
      }
    });

    __syncthreads();
    if constexpr (!Traits::kKeepsP) {
      multiply_key_gradient(tVrV, load_scores(at.ds - kFromDsToP), at.q_transposed + dout_stage, 0);
      if constexpr (kSingleDout) __syncthreads();
    }
    if constexpr (kSingleDout) {
      if (has_next) loader.load_dout(shared.dout[0]);
      cp_async_fence();
    }

    const auto order = OrderedAdds::of(params, rows, work, step, kBlockN);
    const QueryGradAddresses<Traits> at_query(shared);
    // In parts, so that the adds of one overlap the products of the next.
    for_each(make_int_sequence<Traits::kQueryGradParts>{}, [&](auto part) {
      using Columns = Int<Traits::kHeadDim / Traits::kQueryGradParts>;
      Tensor tQrQ = partition_fragment_C(query_grad_mma, Shape<Int<kBlockM>, Columns>{});  // dQ
      clear(tQrQ);
      constexpr int kWarpsRows = Traits::kQueryGradWarpsRows;
      constexpr int kN = Columns{} / (16 * (Traits::kWarps / kWarpsRows));
      multiply_stepwise<kBlockN / 16, kN, kBlockM / (16 * kWarpsRows)>(
          query_grad_mma, tQrQ,
          [&](int m, int k, uint32_t (&a)[4]) {
            ldmatrix_transposed(a, Traits::QueryGradA::at(at_query.ds_transposed, m, k));
          },
          [&](int n, int k, uint32_t (&b)[4]) {
            ldmatrix_transposed(b, Traits::QueryGradB::at(at_query.k_transposed, part * kN + n, k));
          });
      if (part == 0) order.wait();
      float* const of_thread =
          query_gradient_of_thread<Traits>(rows.dq_of(step.number(rows, work)));
      add_query_gradient<Traits>(of_thread, part, tQrQ);
    });
    if constexpr (!Traits::kKeepsP) {  // last, so that the adds drain behind it
      multiply_key_gradient(tKrK, load_scores(at.ds), at.q_transposed + q_stage, 0);
    }
    order.pass_on();
  }
  __syncthreads();  // the epilogue writes where K and V were
}

// ---------------------------------------------------------------------------------------- epilogue

// dK or dV in the dtype of k, through shared memory so that it leaves in 16-byte pieces. A key that
// nobody sees gets exactly 0, whatever met its zeros.
template <typename Traits, class Accumulator>
__device__ __forceinline__ void store_key_gradient(void* tensor, const Strides& strides,
                                                   float scale, const KeyWork& work,
                                                   Accumulator& gradient,
                                                   typename Traits::Element* shared, int head_dim) {
  using Element = typename Traits::Element;
  typename Traits::KeyGradMma mma;
  Tensor tKcK =
      mma.get_slice(thread_index()).partition_C(make_identity_tensor(typename Traits::KeyTile{}));
  CUTE_UNROLL
  for (int i = 0; i < size(gradient); ++i) {
    const int key = work.keys.first_row + get<0>(tKcK(i));
    gradient(i) = work.visible_keys.contains(key) ? gradient(i) * scale : 0.f;
  }
  Tensor sG = make_tensor(make_smem_ptr(shared), typename Traits::SharedK::Layout{});
  store_accumulator<Traits, typename Traits::KeyGradMma>(convert<Element>(gradient), sG);
  __syncthreads();

  Tensor gG = keys_of_work<Traits>(static_cast<Element*>(tensor), strides, work);
  store_tile<Traits>(sG, gG, work.keys.sequence.rows - work.keys.first_row, head_dim);
}

// ------------------------------------------------------------------------------------------ kernel

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads)
    backward_kernel(const __grid_constant__ BackwardParams<float> params,
                    const __grid_constant__ BackwardRows rows) {
#if __CUDA_ARCH__ < 900
  if constexpr (Traits::kOnlySm90) return;
#endif
  extern __shared__ __align__(128) char shared_memory[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(shared_memory);

  if (threadIdx.x == 0) {
    // Blocks need not start in the order of their index; who waits for lower work must know that it
    // has started.
    const int number =
        params.deterministic ? atomicAdd(rows.next_work, 1) : static_cast<int>(blockIdx.x);
    shared.work = KeyWork::of(params, rows, Traits::kBlockN, number);
  }
  __syncthreads();
  const KeyWork& work = shared.work;
  typename Traits::KeyGradMma mma;
  Tensor tKrK = partition_fragment_C(mma, typename Traits::KeyTile{});  // dK
  Tensor tVrV = partition_fragment_C(mma, typename Traits::KeyTile{});  // dV
  clear(tKrK);
  clear(tVrV);
  mainloop<Traits>(params, rows, work, shared, tKrK, tVrV);
  store_key_gradient<Traits>(params.dk, params.dk_strides, params.problem.softmax_scale, work, tKrK,
                             shared.k, params.problem.head_dim);
  store_key_gradient<Traits>(params.dv, params.dv_strides, 1.f, work, tVrV, shared.v,
                             params.problem.head_dim);
}

// Pointers are aligned to 16 bytes, head_dim and the strides of row, head and batch are multiples
// of 8 elements; head_dim <= kHeadDim.
template <typename Traits>
void launch_backward(const BackwardParams<float>& params, const BackwardRows& rows) {
  const Problem<float>& problem = params.problem;
  const int64_t blocks =
      num_row_tiles(keys_as_rows(problem), Traits::kBlockN) * problem.num_heads_k;
  if (blocks == 0) return;
  if (blocks > std::numeric_limits<int>::max()) {
    throw std::runtime_error("neginf: sm80 backward: too many key tiles x heads: " +
                             std::to_string(blocks));
  }
  constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  allow_shared_memory<backward_kernel<Traits>>(kSharedBytes);
  backward_kernel<Traits>
      <<<static_cast<unsigned>(blocks), Traits::kThreads, kSharedBytes, params.stream>>>(params,
                                                                                         rows);
  cuda_check(cudaGetLastError(), "sm80 backward");
}

template <typename Traits>
void run_tiles(const BackwardParams<float>& params) {
  constexpr DType kDType =
      std::is_same_v<typename Traits::Element, half_t> ? DType::float16 : DType::bfloat16;
  const auto rows = BackwardRows::allocate(params, Traits::kBlockM, Traits::kHeadDim);
  prepare_backward(params, rows, kDType);
  launch_backward<Traits>(params, rows);
  finish_backward(params, rows, kDType);
}

template <typename Element, int kHeadDim>
void run_backward(const BackwardParams<float>& params) {
  using Tiles = BackwardTiles<kHeadDim>;
  using Large = BackwardTraits<Element, kHeadDim, typename Tiles::Large, false>;
  using Small = BackwardTraits<Element, kHeadDim, typename Tiles::Small, false>;
  using ModifiesScores = BackwardTraits<Element, kHeadDim, typename Tiles::ModifiesScores, true>;
  static_assert(sizeof(typename Small::SharedStorage) <= 99 * 1024);
  static_assert(sizeof(typename ModifiesScores::SharedStorage) <= 99 * 1024);
  const auto fits = [] {
    return sizeof(typename Large::SharedStorage) <= max_shared_memory() &&
           (!Large::kOnlySm90 || current_compute_capability() == 90);
  };
  if (params.problem.softcap != 0.f || params.problem.alibi_slopes != nullptr) {
    run_tiles<ModifiesScores>(params);
  } else if (fits()) {
    run_tiles<Large>(params);
  } else {
    run_tiles<Small>(params);
  }
}

template <typename Element, int kHeadDim>
using RegisterBackward = RegisterKernel<BackwardParams<float>, run_backward<Element, kHeadDim>>;

}  // namespace neginf::sm80
