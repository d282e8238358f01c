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
#include "../common/backward_scores.cuh"
#include "../common/cuda_check.h"
#include "../common/device.h"
#include "../common/shared_memory.h"
#include "../kernels.h"
#include "backward_query_gradient.cuh"
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

template <typename Traits, class TiledMma, class Rounded, class Shared>
__device__ __forceinline__ void store_accumulator(const Rounded& rounded, const Shared& shared) {
  auto store = make_tiled_copy_C(typename Traits::SmemStore{}, TiledMma{});
  auto thread = store.get_slice(thread_index());
  copy(store, thread.retile_S(rounded), thread.partition_D(shared));
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
  load_keys<Traits>(params.k, params.k_strides, shared.k, work, params.problem.head_dim);
  load_keys<Traits>(params.v, params.v_strides, shared.v, work, params.problem.head_dim_v);
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
      if (part == 0) wait_for_turn(order);
      float* const of_thread =
          query_gradient_of_thread<Traits>(rows.dq_of(step.number(rows, work)));
      add_query_gradient<Traits>(of_thread, part, tQrQ);
    });
    if constexpr (!Traits::kKeepsP) {  // last, so that the adds drain behind it
      multiply_key_gradient(tKrK, load_scores(at.ds), at.q_transposed + q_stage, 0);
    }
    pass_on_turn(order);
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
    shared.work.find(params, rows, Traits::kBlockN, number);
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
                             params.problem.head_dim_v);
}

// Pointers are aligned to 16 bytes, head_dim, head_dim_v and the strides of row, head and batch are
// multiples of 8 elements; head_dim_v <= head_dim <= kHeadDim.
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
  const BackwardRows::Tile tile{Traits::kBlockM, Traits::kHeadDim, /*transposed=*/false,
                                /*first_stores=*/false};
  run_around_main(
      params, tile,
      std::is_same_v<typename Traits::Element, half_t> ? DType::float16 : DType::bfloat16,
      launch_backward<Traits>);
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
