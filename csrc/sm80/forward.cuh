// Attention forward with mma.sync and cp.async: for sm80, and as PTX for newer GPUs.
//
// A CTA owns kBlockM query rows of one head, and of their keys the share of one split. All warps
// load, all multiply; each has its own rows, so the softmax needs no exchange between warps.
//
//   global       Q          K              V                              out, lse
//                | cp.async | cp.async     | cp.async                        ^
//   shared       sQ         sK[2]          sV[2]                  sO (= sQ) -'
//                | ldmatrix | ldmatrix     | ldmatrix.trans           ^
//   registers    '--> S = Q K^T -> mask -> softmax -> P --> O += P V -'
//
// Iteration t, with K and V of tile t in stage t % 2 and one cp.async group for each:
//
//   issue K(t+1) | wait K(t), barrier | issue V(t+1), S | softmax | wait V(t), barrier | O
//                              |                                          |
//                 all warps are past O(t-1):                 all warps are past S(t):
//                 the stage of V(t-1) is free                the stage of K(t) is free
//
// A tile without keys runs the loop zero times and leaves through the same epilogue. Softcap and
// ALiBi are a second kernel: as a branch at run time they cost the plain one its registers.
#pragma once

#include <cute/tensor.hpp>
#include <limits>

#include "../common/cuda_check.h"
#include "../common/key_tiles.h"
#include "../common/row_tile.h"
#include "../common/shared_memory.h"
#include "../common/softmax.h"
#include "../kernels.h"
#include "tile_sizes.h"
#include "tiles.cuh"

namespace neginf::sm80 {

using namespace cute;

// -------------------------------------------------------------------------------------------- work

// What a CTA works on. It lives in shared memory: the accumulators need the registers, and most of
// this is read once per tile.
struct Work {
  RowTile tile;
  int head;
  int split;
  Mask mask;
  KeyTiles key_tiles;
  // Keys that no row of the sequence sees may hold NaN, which P = 0 would not undo in P V.
  Range visible_keys;
  int64_t k_offset;  // of the sequence and head, in elements
  int64_t v_offset;

  // In the one-dimensional grid row tiles run fastest, so that neighbours share K and V in L2.
  static __device__ Work of(const ForwardParams<float>& params, int block_m, int block_n) {
    const Problem<float>& problem = params.problem;
    const int block = static_cast<int>(blockIdx.x);
    const int tiles = static_cast<int>(num_row_tiles(problem, block_m));
    const int head_and_split = block / tiles;
    const RowTile tile = find_row_tile(problem, block_m, block - head_and_split * tiles);
    const Sequence keys = key_sequence(problem, tile.index);
    const int split = head_and_split / problem.num_heads;
    const int head = head_and_split - split * problem.num_heads;
    const int head_k = head / (problem.num_heads / problem.num_heads_k);
    const Mask mask = mask_of(problem, tile.sequence, keys);
    const auto offset = [&](const Strides& strides) {
      return tile.index * strides.batch + keys.first_row * strides.row + head_k * strides.head;
    };
    return {tile,
            head,
            split,
            mask,
            KeyTiles::of(mask, tile.rows(block_m), block_n, split, params.num_splits),
            mask.visible_keys(),
            offset(params.k_strides),
            offset(params.v_strides)};
  }
};

// ------------------------------------------------------------------------------------------ traits

template <typename Element_, int kHeadDim_, bool kModifiesScores_>
struct ForwardTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kModifiesScores = kModifiesScores_;
  static constexpr int kBlockM = ForwardTile<kHeadDim, kModifiesScores>::kBlockM;
  static constexpr int kBlockN = ForwardTile<kHeadDim, kModifiesScores>::kBlockN;
  static constexpr int kWarps = ForwardTile<kHeadDim, kModifiesScores>::kWarps;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kStages = 2;  // the waits in the mainloop count on it
  static_assert(kHeadDim % 64 == 0, "SmemAtom is 64 wide; smaller head_dims are padded to it");
  using QueryTile = Shape<Int<kBlockM>, Int<kHeadDim>>;
  using KeyTile = Shape<Int<kBlockN>, Int<kHeadDim>>;

  using MmaAtom = std::conditional_t<std::is_same_v<Element, half_t>, SM80_16x8x16_F32F16F16F32_TN,
                                     SM80_16x8x16_F32BF16BF16F32_TN>;
  using TiledMma = decltype(make_tiled_mma(MmaAtom{}, Layout<Shape<Int<kWarps>, _1, _1>>{},
                                           Tile<Int<16 * kWarps>, _16, _16>{}));
  static constexpr int kRowsPerThread = 2 * kBlockM / (16 * kWarps);

  // Rows of 128 bytes with their eight 16-byte chunks permuted: no bank conflict for cp.async,
  // ldmatrix or the epilogue.
  using SmemAtom =
      decltype(composition(Swizzle<3, 3, 3>{}, Layout<Shape<_8, _64>, Stride<_64, _1>>{}));
  using SmemLayoutQ = decltype(tile_to_shape(SmemAtom{}, QueryTile{}));
  using SmemLayoutKV =
      decltype(tile_to_shape(SmemAtom{}, Shape<Int<kBlockN>, Int<kHeadDim>, Int<kStages>>{}));
  // V as the B operand of P V: (head_dim, keys).
  using SmemLayoutVt = decltype(composition(
      SmemLayoutKV{}, Layout<Shape<Int<kHeadDim>, Int<kBlockN>, Int<kStages>>,
                             Stride<Int<kBlockN>, _1, Int<kBlockN * kHeadDim>>>{}));

  // 16 bytes per thread, 8 threads per row of the atom.
  using GmemThreads = Layout<Shape<Int<kThreads / 8>, _8>, Stride<_8, _1>>;
  using GmemLoad =
      decltype(make_tiled_copy(Copy_Atom<SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>, Element>{},
                               GmemThreads{}, Layout<Shape<_1, _8>>{}));
  using GmemStore = decltype(make_tiled_copy(Copy_Atom<UniversalCopy<uint128_t>, Element>{},
                                             GmemThreads{}, Layout<Shape<_1, _8>>{}));
  using SmemLoad = Copy_Atom<SM75_U32x4_LDSM_N, Element>;
  using SmemLoadTransposed = Copy_Atom<SM75_U16x8_LDSM_T, Element>;
  using SmemStore = Copy_Atom<UniversalCopy<uint32_t>, Element>;

  struct SharedStorage {
    alignas(128) Element q[cosize_v<SmemLayoutQ>];  // the epilogue puts O here
    alignas(128) Element k[cosize_v<SmemLayoutKV>];
    alignas(128) Element v[cosize_v<SmemLayoutKV>];
    Work work;
  };
  static_assert(sizeof(SharedStorage) <= 99 * 1024, "what sm86, sm89 and sm120 have");
};

// --------------------------------------------------------------------------------------- tensors

// The rows of one CTA in a tensor shaped like q: (kBlockM, kHeadDim).
template <typename Traits, typename Element>
__device__ __forceinline__ auto query_tile(Element* base, const Strides& strides,
                                           const Work& work) {
  base += work.tile.index * strides.batch + work.head * strides.head +
          (work.tile.sequence.first_row + work.tile.first_row) * strides.row;
  return make_tensor(make_gmem_ptr(base), typename Traits::QueryTile{},
                     make_stride(strides.row, _1{}));
}

// ------------------------------------------------------------------------------- global to shared

// Loads tile number t of K or V into its stage, as one cp.async group. Past the last tile the group
// is empty: the waits in the mainloop count groups.
template <typename Traits>
__device__ __forceinline__ void load_keys(const void* tensor, int64_t offset, int64_t row_stride,
                                          typename Traits::Element* stages, const Work& work, int t,
                                          int head_dim) {
  using Element = typename Traits::Element;
  if (t < work.key_tiles.size()) {
    const int first_key = work.key_tiles.at(t) * Traits::kBlockN;
    Tensor global = make_tensor(
        make_gmem_ptr(static_cast<const Element*>(tensor) + offset + first_key * row_stride),
        typename Traits::KeyTile{}, make_stride(row_stride, _1{}));
    Tensor ring = make_tensor(make_smem_ptr(stages), typename Traits::SmemLayoutKV{});
    load_tile<Traits>(global, ring(_, _, t % Traits::kStages),
                      {work.visible_keys.begin - first_key, work.visible_keys.end - first_key},
                      head_dim);
  }
  cp_async_fence();
}

// ---------------------------------------------------------------------------------------- mainloop

template <typename Traits, class Output, class Softmax>
__device__ __forceinline__ void mainloop(const ForwardParams<float>& params, const Work& work,
                                         const ScoreModifiers& modifiers,
                                         typename Traits::SharedStorage& shared, Output& tOrO,
                                         Softmax& softmax) {
  using Element = typename Traits::Element;
  constexpr int kBlockN = Traits::kBlockN;
  using ScoreTile = Shape<Int<Traits::kBlockM>, Int<kBlockN>>;

  Tensor sQ = make_tensor(make_smem_ptr(shared.q), typename Traits::SmemLayoutQ{});
  Tensor sK = make_tensor(make_smem_ptr(shared.k), typename Traits::SmemLayoutKV{});
  Tensor sVt = make_tensor(make_smem_ptr(shared.v), typename Traits::SmemLayoutVt{});

  typename Traits::TiledMma mma;
  auto mma_thread = mma.get_slice(thread_index());
  Tensor tSrQ = mma_thread.partition_fragment_A(sQ);           // (8, M, K)
  Tensor tSrK = mma_thread.partition_fragment_B(sK(_, _, 0));  // (4, N, K)
  Tensor tOrV = make_tensor<Element>(
      partition_shape_B(mma, select<0, 1>(shape(sVt))));  // (4, head_dim, keys)
  auto load_q = make_tiled_copy_A(typename Traits::SmemLoad{}, mma);
  auto load_k = make_tiled_copy_B(typename Traits::SmemLoad{}, mma);
  auto load_v = make_tiled_copy_B(typename Traits::SmemLoadTransposed{}, mma);
  Tensor tSsQ = load_q.get_slice(thread_index()).partition_S(sQ);
  Tensor tSsK = load_k.get_slice(thread_index()).partition_S(sK);
  Tensor tOsV = load_v.get_slice(thread_index()).partition_S(sVt);
  Tensor tSrQ_copy = load_q.get_slice(thread_index()).retile_D(tSrQ);
  Tensor tSrK_copy = load_k.get_slice(thread_index()).retile_D(tSrK);
  Tensor tOrV_copy = load_v.get_slice(thread_index()).retile_D(tOrV);

  Tensor tScS = mma_thread.partition_C(make_identity_tensor(ScoreTile{}));
  Tensor coordinates = make_tensor(tScS.data(), rows_and_columns(tScS.layout()));
  Tensor output = make_tensor(tOrO.data(), rows_and_columns(tOrO.layout()));

  const auto load_k_tile = [&](int t) {
    load_keys<Traits>(params.k, work.k_offset, params.k_strides.row, shared.k, work, t,
                      params.problem.head_dim);
  };
  const auto load_v_tile = [&](int t) {
    load_keys<Traits>(params.v, work.v_offset, params.v_strides.row, shared.v, work, t,
                      params.problem.head_dim);
  };
  const KeyTiles& tiles = work.key_tiles;

  // Inlined by force: in a call the accumulators would live in memory.
  const auto step = [&](int t, auto masked) __attribute__((always_inline)) {
    const int stage = t % Traits::kStages;
    const int first_key = tiles.at(t) * kBlockN;
    const auto row_of = [&](int r) { return work.tile.first_row + get<0>(coordinates(r, 0)); };
    const auto key_of = [&](int c) { return first_key + get<1>(coordinates(0, c)); };

    load_k_tile(t + 1);
    cp_async_wait<2>();  // K(t); younger: V(t), K(t+1)
    __syncthreads();
    load_v_tile(t + 1);
    Tensor tSrS = partition_fragment_C(mma, ScoreTile{});
    clear(tSrS);
    multiply(mma, tSrS, tSrQ, tSrK, [&](int k) {
      copy(load_q, tSsQ(_, _, k), tSrQ_copy(_, _, k));
      copy(load_k, tSsK(_, _, k, stage), tSrK_copy(_, _, k));
    });

    Tensor scores = make_tensor(tSrS.data(), rows_and_columns(tSrS.layout()));
    if constexpr (Traits::kModifiesScores) modifiers.apply(scores, work.mask, row_of, key_of);
    if constexpr (masked) apply_mask(scores, work.mask, row_of, key_of);
    softmax.step(scores, output);

    Tensor tSrP = convert<Element>(tSrS);
    Tensor tOrP = make_tensor(tSrP.data(), accumulator_as_operand(tSrP.layout()));
    cp_async_wait<2>();  // V(t); younger: K(t+1), V(t+1)
    __syncthreads();
    multiply(mma, tOrO, tOrP, tOrV,
             [&](int k) { copy(load_v, tOsV(_, _, k, stage), tOrV_copy(_, _, k)); });
  };

  load_tile<Traits>(
      query_tile<Traits>(static_cast<const Element*>(params.q), params.q_strides, work), sQ,
      {0, work.tile.sequence.length - work.tile.first_row}, params.problem.head_dim);
  load_k_tile(0);  // in one group with Q
  load_v_tile(0);
  int t = 0;
  for (; t < tiles.unmasked.size(); ++t) step(t, false_type{});
  for (; t < tiles.size(); ++t) step(t, true_type{});

  // The epilogue writes where Q was.
  cp_async_wait<0>();
  __syncthreads();
}

// ---------------------------------------------------------------------------------------- epilogue

// Ends the softmax of every row, whether or not it saw a key, belongs to a sequence or holds a
// sink: writes the Lse of those that lie in the buffer and turns the accumulated rows into O.
template <class Softmax, class Output, class Coordinates>
__device__ __forceinline__ void finish_rows(const ForwardParams<float>& params, const Work& work,
                                            const Softmax& softmax, Output& output,
                                            const Coordinates& coordinates) {
  const Sequence& sequence = work.tile.sequence;
  const float* sink = work.split == 0 ? params.problem.sink : nullptr;
  Lse* lse = params.num_splits > 1
                 ? params.lse_partial + work.split * params.lse_partial_split_stride
                 : params.lse;
  lse += work.tile.index * params.lse_strides.batch + work.head * params.lse_strides.head +
         sequence.first_row;

  CUTE_UNROLL
  for (int r = 0; r < size<0>(output); ++r) {
    const int row = work.tile.first_row + get<0>(coordinates(r, 0));
    const bool in_use = row < sequence.length;
    Finalized<float> finalized = softmax.finish(r, in_use);
    if (sink != nullptr && in_use) finalized = merge_sink(finalized, sink[work.head]);

    const bool first_of_quad = get<1>(coordinates(r, 0)) == 0;
    if (first_of_quad && row < sequence.rows) lse[row] = finalized.lse;
    CUTE_UNROLL
    for (int c = 0; c < size<1>(output); ++c) output(r, c) = finalized.output(output(r, c));
  }
}

// The state of one split, float, straight from the accumulators.
template <typename Traits, class Output, class Coordinates>
__device__ __forceinline__ void store_partial(const ForwardParams<float>& params, const Work& work,
                                              const Output& output,
                                              const Coordinates& coordinates) {
  const int rows_left = work.tile.sequence.rows - work.tile.first_row;
  Tensor gO = query_tile<Traits>(params.out_partial + work.split * params.out_partial_split_stride,
                                 params.out_partial_strides, work);
  CUTE_UNROLL
  for (int r = 0; r < size<0>(output); ++r) {
    CUTE_UNROLL
    for (int c = 0; c < size<1>(output); c += 2) {
      const auto at = coordinates(r, c);
      if (get<0>(at) < rows_left && get<1>(at) < params.problem.head_dim) {
        *reinterpret_cast<float2*>(&gO(at)) = make_float2(output(r, c), output(r, c + 1));
      }
    }
  }
}

// O in the dtype of q, through shared memory so that it leaves in 16-byte pieces.
template <typename Traits, class Accumulator>
__device__ __forceinline__ void store_output(const ForwardParams<float>& params, const Work& work,
                                             const Accumulator& tOrO,
                                             typename Traits::SharedStorage& shared) {
  using Element = typename Traits::Element;
  const int rows_left = work.tile.sequence.rows - work.tile.first_row;

  Tensor sO = make_tensor(make_smem_ptr(shared.q), typename Traits::SmemLayoutQ{});
  auto smem_store = make_tiled_copy_C(typename Traits::SmemStore{}, typename Traits::TiledMma{});
  auto smem_thread = smem_store.get_slice(thread_index());
  Tensor rounded = convert<Element>(tOrO);
  copy(smem_store, smem_thread.retile_S(rounded), smem_thread.partition_D(sO));
  __syncthreads();

  Tensor gO = query_tile<Traits>(static_cast<Element*>(params.out), params.out_strides, work);
  typename Traits::GmemStore gmem_store;
  auto gmem_thread = gmem_store.get_slice(thread_index());
  Tensor tOsO = gmem_thread.partition_S(sO);  // (8, M, K)
  Tensor tOgO = gmem_thread.partition_D(gO);
  Tensor tOcO = gmem_thread.partition_D(make_identity_tensor(typename Traits::QueryTile{}));
  CUTE_UNROLL
  for (int m = 0; m < size<1>(tOgO); ++m) {
    CUTE_UNROLL
    for (int k = 0; k < size<2>(tOgO); ++k) {
      const auto at = tOcO(0, m, k);
      if (get<0>(at) < rows_left && get<1>(at) < params.problem.head_dim) {
        copy(gmem_store, tOsO(_, m, k), tOgO(_, m, k));
      }
    }
  }
}

// ------------------------------------------------------------------------------------------ kernel

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads)
    forward_kernel(const __grid_constant__ ForwardParams<float> params) {
  extern __shared__ __align__(128) char shared_memory[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(shared_memory);
  using OutputTile = typename Traits::QueryTile;

  if (threadIdx.x == 0) shared.work = Work::of(params, Traits::kBlockM, Traits::kBlockN);
  __syncthreads();
  const Work& work = shared.work;
  const auto modifiers = ScoreModifiers::of(params.problem, work.tile.index, work.head);
  typename Traits::TiledMma mma;
  Tensor tOrO = partition_fragment_C(mma, OutputTile{});  // ((2, 2), M, head_dim / 8)
  clear(tOrO);
  OnlineSoftmax<Traits::kRowsPerThread> softmax(modifiers.scale);
  mainloop<Traits>(params, work, modifiers, shared, tOrO, softmax);

  Tensor output = make_tensor(tOrO.data(), rows_and_columns(tOrO.layout()));
  Tensor tOcO = mma.get_slice(thread_index()).partition_C(make_identity_tensor(OutputTile{}));
  Tensor coordinates = make_tensor(tOcO.data(), rows_and_columns(tOcO.layout()));
  finish_rows(params, work, softmax, output, coordinates);
  if (params.num_splits > 1) {
    store_partial<Traits>(params, work, output, coordinates);
  } else {
    store_output<Traits>(params, work, tOrO, shared);
  }
}

// Pointers are aligned to 16 bytes, head_dim and the strides of row, head and batch are multiples
// of 8 elements; head_dim <= kHeadDim.
template <typename Traits>
void launch_forward(const ForwardParams<float>& params) {
  const Problem<float>& problem = params.problem;
  const int64_t blocks = num_row_tiles(problem, Traits::kBlockM) * problem.num_heads *
                         static_cast<int64_t>(params.num_splits);
  if (blocks == 0) return;
  if (blocks > std::numeric_limits<int>::max()) {
    throw std::runtime_error("neginf: sm80 forward: too many row tiles x heads x splits: " +
                             std::to_string(blocks));
  }
  constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  allow_shared_memory<forward_kernel<Traits>>(kSharedBytes);
  forward_kernel<Traits>
      <<<static_cast<unsigned>(blocks), Traits::kThreads, kSharedBytes, params.stream>>>(params);
  cuda_check(cudaGetLastError(), "sm80 forward");
}

template <typename Element, int kHeadDim>
void run_forward(const ForwardParams<float>& params) {
  const bool modifies_scores =
      params.problem.softcap != 0.f || params.problem.alibi_slopes != nullptr;
  modifies_scores ? launch_forward<ForwardTraits<Element, kHeadDim, true>>(params)
                  : launch_forward<ForwardTraits<Element, kHeadDim, false>>(params);
}

template <typename Element, int kHeadDim>
using RegisterForward = RegisterKernel<ForwardParams<float>, run_forward<Element, kHeadDim>>;

}  // namespace neginf::sm80
