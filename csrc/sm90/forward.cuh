// Attention forward with WGMMA and the tensor memory accelerator, for sm90.
//
// A CTA works on one tile of kBlockM query rows after the other (schedule.h) and on their keys by
// tiles of kBlockN. A scheduler thread says what the next tile of rows is, a loader thread fetches
// its Q, K and V, and consumer warpgroups multiply. Each of these owns 64 of the rows from S to O,
// so that the softmax needs no exchange beyond a quad.
//
//   scheduler    work(0)   work(1)   ...                            full: it has been written or
//   loaded loader       K(0) Q | K(1) V(0) | K(2) V(1) | ...               empty: all consumer
//   warps are past it shared       work[4]   sQ[2]   sK[2]   sV[2] consumer     S = Q K^T -> mask,
//   softmax -> P (registers) -> O += P V -> out, lse
//
// Inside a warpgroup, S(t+1) and O(t) are issued together, so that the tensor cores have work while
// S(t+1) goes through the softmax; at the end of a row tile the next one's S(0) takes that place:
//
//   tensor cores   S(1) O(0) | S(2) O(1) | ... | O(n-1) S'(0) | S'(1) O'(0) | ...
//   arithmetic          P(1)        P(2)          out, lse P'(0)      P'(1)
//
// and the other warpgroup multiplies while this one does arithmetic. A row tile without keys goes
// through the same epilogue as all others.
//
// O goes from the accumulators to global memory (store_rows), not through shared memory.
#pragma once

// m64nNk16 for every N.
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cute/tensor.hpp>
#include <limits>

#include "../common/convert.cuh"
#include "../common/cuda_check.h"
#include "../common/forward_epilogue.cuh"
#include "../common/forward_work.h"
#include "../common/shared_memory.h"
#include "../common/softmax.h"
#include "../common/thread_index.h"
#include "../kernels.h"
#include "forward_tile_sizes.h"
#include "schedule.h"
#include "tma.cuh"

namespace neginf::sm90 {

using namespace cute;

// ------------------------------------------------------------------------------------------ traits

template <typename Element_, int kHeadDim_, typename Tile, bool kModifiesScores_>
struct ForwardTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kModifiesScores = kModifiesScores_;
  static constexpr int kBlockM = Tile::kBlockM;
  static constexpr int kBlockN = Tile::kBlockN;
  static constexpr int kStages = 2;  // of K and V
  static constexpr int kStagesQ = Tile::kStagesQ;
  static constexpr bool kTakesTurns = Tile::kTakesTurns;
  static constexpr int kWorkSlots = 4;
  static constexpr int kWarpgroups = kBlockM / 64;  // consumers
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  // Per thread; 512 for four warpgroups together, as many as the multiprocessor has.
  static constexpr int kProducerRegisters = 32;
  static constexpr int kConsumerRegisters = kWarpgroups == 2 ? 232 : 160;

  using ScoreTile = Shape<Int<kBlockM>, Int<kBlockN>>;
  using OutputTile = Shape<Int<kBlockM>, Int<kHeadDim>>;
  using Warpgroups = Layout<Shape<Int<kWarpgroups>, _1, _1>>;
  using ScoreMma = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<kBlockN>, Int<kHeadDim>>>(),
      Warpgroups{}));
  using OutputMma = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float, Shape<_64, Int<kHeadDim>, Int<kBlockN>>,
                           GMMA::Major::K, GMMA::Major::MN>(),
      Warpgroups{}));

  static constexpr int kSwizzleColumns = kHeadDim % 64 == 0 ? 64 : 32;
  using SwizzleAtom = std::conditional_t<kSwizzleColumns == 64, GMMA::Layout_K_SW128_Atom<Element>,
                                         GMMA::Layout_K_SW64_Atom<Element>>;
  using LayoutQ =
      decltype(tile_to_shape(SwizzleAtom{}, Shape<Int<kBlockM>, Int<kHeadDim>, Int<kStagesQ>>{}));
  using LayoutKV =
      decltype(tile_to_shape(SwizzleAtom{}, Shape<Int<kBlockN>, Int<kHeadDim>, Int<kStages>>{}));
  // (head_dim, keys, stage)
  using LayoutVTransposed = decltype(composition(
      LayoutKV{}, make_layout(Shape<Int<kHeadDim>, Int<kBlockN>, Int<kStages>>{},
                              Stride<Int<kBlockN>, _1, Int<kBlockN * kHeadDim>>{})));

  struct SharedStorage {
    alignas(1024) Element q[kStagesQ][kBlockM * kHeadDim];
    alignas(1024) Element k[kStages][kBlockN * kHeadDim];
    alignas(1024) Element v[kStages][kBlockN * kHeadDim];
    ForwardWork work[kWorkSlots];
    bool is_end[kWorkSlots];  // there is no more work
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
  Schedule schedule;
};

// ------------------------------------------------------------------------------ scheduler, loader

template <typename Traits>
__device__ __forceinline__ void schedule_work(const Problem<float>& problem,
                                              const Schedule& schedule,
                                              typename Traits::SharedStorage& shared) {
  int turn = 0;
  for_each_tile(schedule, [&](int first, int size, int tile) {
    LoadBarrier& full = shared.work_ring.wait_empty(turn);
    const int slot = shared.work_ring.stage(turn++);
    shared.work[slot] = schedule.work<Traits::kBlockM, Traits::kBlockN>(problem, first, size, tile);
    shared.is_end[slot] = false;
    full.arrive();
  });
  LoadBarrier& full = shared.work_ring.wait_empty(turn);
  shared.is_end[shared.work_ring.stage(turn)] = true;
  full.arrive();
}

// Where the keys of a row tile are.
struct KeySource {
  int head;
  int first_row;  // of key 0
  int end;        // of what any row sees
  int batch;
};

template <typename Traits>
__device__ __forceinline__ void load_tiles(const Problem<float>& problem, const Launch& launch,
                                           typename Traits::SharedStorage& shared) {
  constexpr int kHeadDim = Traits::kHeadDim;
  constexpr int kSwizzleColumns = Traits::kSwizzleColumns;
  const QueryPacking& packing = launch.schedule.grid.packing;

  const auto load_keys = [&](const CUtensorMap& map, auto& ring, int count, auto& buffers,
                             const KeySource& keys, int tile) {
    const int first_key = tile * Traits::kBlockN;
    LoadBarrier& full = ring.wait_empty(count);
    full.arrive_and_expect_tx(Traits::kBlockN * kHeadDim * 2);
    load_tile<kHeadDim, kSwizzleColumns>(
        map, full, buffers[ring.stage(count)], Traits::kBlockN * kSwizzleColumns, Traits::kBlockN,
        {keys.head, keys.first_row + first_key, keys.end - first_key, keys.batch});
  };

  int q_count = 0;
  int k_count = 0;
  // V is one tile behind K, as O is behind S.
  KeySource v_keys{};
  int v_tile = KeyTiles::kNone;
  const auto load_v = [&] {
    if (v_tile == KeyTiles::kNone) return;
    load_keys(launch.v, shared.v_ring, k_count - 1, shared.v, v_keys, v_tile);
    v_tile = KeyTiles::kNone;
  };

  for (int turn = 0;; ++turn) {
    shared.work_ring.wait_full(turn);
    const int slot = shared.work_ring.stage(turn);
    if (shared.is_end[slot]) break;
    const ForwardWork& work = shared.work[slot];
    const KeyTiles& tiles = work.key_tiles;
    int tile = tiles.first();
    if (tile == KeyTiles::kNone) {
      load_v();  // there may be many of these in a row, and no slot for more work before it is read
      shared.work_ring.release(turn);
      continue;
    }

    const KeySource keys{work.head_k, static_cast<int>(work.keys.first_row),
                         work.mask.visible_keys().end,
                         problem.cu_seqlens_k == nullptr ? work.tile.index : 0};
    load_keys(launch.k, shared.k_ring, k_count, shared.k, keys, tile);
    LoadBarrier& q_full = shared.q_ring.wait_empty(q_count);
    q_full.arrive_and_expect_tx(packing.heads * packing.positions * kHeadDim * 2);
    load_tile<kHeadDim, kSwizzleColumns>(
        launch.q, q_full, shared.q[shared.q_ring.stage(q_count)], Traits::kBlockM * kSwizzleColumns,
        packing.positions,
        {work.head, static_cast<int>(work.tile.sequence.first_row) + work.tile.first_row,
         work.tile.sequence.length - work.tile.first_row,
         problem.cu_seqlens_q == nullptr ? work.tile.index : 0});
    ++q_count;
    load_v();
    ++k_count;
    v_keys = keys;
    v_tile = tile;
    while ((tile = tiles.after(tile)) != KeyTiles::kNone) {
      load_keys(launch.k, shared.k_ring, k_count, shared.k, keys, tile);
      load_v();
      ++k_count;
      v_tile = tile;
    }
    shared.work_ring.release(turn);
  }
  load_v();
}

// --------------------------------------------------------------------------------------- fragments

// Among the consumers.
__device__ __forceinline__ int consumer_thread() { return thread_index_again() - 128; }

// An accumulator, ((2, 2, N / 8), 1, 1) per thread, as (rows, columns).
template <class Layout>
CUTE_HOST_DEVICE constexpr auto rows_and_columns(Layout layout) {
  return make_layout(make_layout(get<0, 1>(layout), get<1>(layout)),
                     make_layout(get<0, 0>(layout), get<0, 2>(layout), get<2>(layout)));
}

// A value that is the same in all lanes, known to be so: products are issued on no divergent path.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// The accumulator of S, rounded, as the A operand of P V: a thread's values are in the same order.
template <int kBlockN>
using OperandLayout = Layout<Shape<Shape<_2, _2, _2>, _1, Int<kBlockN / 16>>>;

// ---------------------------------------------------------------------------------------- products

// Issues accumulator += A B, with kClears accumulator = A B, and does not wait for it.
template <bool kClears, class TiledMma, class A, class B, class Accumulator>
__device__ __forceinline__ void issue(TiledMma& mma, const A& a, const B& b,
                                      Accumulator& accumulator) {
  warpgroup_fence_operand(accumulator);
  warpgroup_arrive();
  mma.accumulate_ = kClears ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
  CUTE_UNROLL
  for (int k = 0; k < size<2>(a); ++k) {
    cute::gemm(mma, a(_, _, k), b(_, _, k), accumulator);
    mma.accumulate_ = GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
}

// The warpgroups issue in a fixed order, round and round. Each has a barrier on which it waits for
// the one before it.
template <int kWarpgroups>
struct Turns {
  static constexpr int kFirstBarrier = 1;  // 0 is __syncthreads
  int warpgroup;

  __device__ __forceinline__ void begin() const {
    if (warpgroup == kWarpgroups - 1) pass_on();
  }
  __device__ __forceinline__ void wait() const {
    cutlass::arch::NamedBarrier::sync(256, kFirstBarrier + warpgroup);
  }
  __device__ __forceinline__ void pass_on() const {
    const int next = warpgroup + 1 == kWarpgroups ? 0 : warpgroup + 1;
    cutlass::arch::NamedBarrier::arrive(256, kFirstBarrier + next);
  }
};

// Until all but the last kStillRunning products are done.
template <int kStillRunning, class Accumulator>
__device__ __forceinline__ void wait_for(Accumulator& accumulator) {
  warpgroup_wait<kStillRunning>();
  warpgroup_fence_operand(accumulator);
}

// ---------------------------------------------------------------------------------------- epilogue

// x[i] of lane j of a quad goes to x[j] of lane i.
__device__ __forceinline__ void transpose_in_quad(uint32_t (&x)[4]) {
  const int lane = static_cast<int>(threadIdx.x);
  CUTE_UNROLL
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = (lane & bit) != 0;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t received = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + bit], bit);
      (upper ? x[i] : x[i + bit]) = received;
    }
  }
}

// O in the dtype of q. The four lanes of a quad have two columns each of every eight; exchanged,
// each has all of some eights and writes 16 bytes, the quad 64 side by side.
template <typename Traits, class Accumulator, class Coordinates>
__device__ __forceinline__ void store_rows(const ForwardParams<float>& params,
                                           const ForwardWork& work, const Accumulator& tOrO,
                                           const Coordinates& coordinates) {
  using Element = typename Traits::Element;
  Tensor rounded = convert<Element>(tOrO);
  const int quad_lane = static_cast<int>(threadIdx.x) % 4;
  Tensor words = recast<uint32_t>(rounded);  // two columns each: (row, eight columns)
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    const ForwardWork::Row row = work.row(get<0>(coordinates(r, 0)));
    const bool exists = row.exists && row.position < work.tile.sequence.rows;
    Element* to = static_cast<Element*>(params.out) + work.offset(row, params.out_strides);
    CUTE_UNROLL
    for (int group = 0; group < Traits::kHeadDim / 32; ++group) {
      uint32_t chunk[4];
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) chunk[i] = words(r + 2 * (4 * group + i));
      transpose_in_quad(chunk);
      const int column = 32 * group + 8 * quad_lane;
      if (exists && column < params.problem.head_dim) {
        *reinterpret_cast<uint4*>(to + column) = make_uint4(chunk[0], chunk[1], chunk[2], chunk[3]);
      }
    }
  }
}

// ------------------------------------------------------------------------------------------ kernel

// The slopes of this thread's rows.
template <class Coordinates>
__device__ __forceinline__ void load_alibi_slopes(const Problem<float>& problem,
                                                  const ForwardWork& work,
                                                  const Coordinates& coordinates,
                                                  float (&slopes)[2]) {
  const float* of_batch = problem.alibi_slopes + work.tile.index * problem.alibi_batch_stride;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    const ForwardWork::Row row = work.row(get<0>(coordinates(r, 0)));
    slopes[r] = row.exists ? of_batch[row.head] : 0.f;
  }
}

template <typename Traits>
__device__ __forceinline__ void consume(const ForwardParams<float>& params,
                                        typename Traits::SharedStorage& shared) {
  using Element = typename Traits::Element;
  using ScoreTile = typename Traits::ScoreTile;
  constexpr int kBlockN = Traits::kBlockN;

  Tensor sQ = make_tensor(make_smem_ptr(shared.q[0]), typename Traits::LayoutQ{});
  Tensor sK = make_tensor(make_smem_ptr(shared.k[0]), typename Traits::LayoutKV{});
  Tensor sVt = make_tensor(make_smem_ptr(shared.v[0]), typename Traits::LayoutVTransposed{});
  typename Traits::ScoreMma score_mma;
  typename Traits::OutputMma output_mma;
  // Descriptors, uniform in a warpgroup and known to be.
  const int warpgroup = cutlass::canonical_warp_group_idx() - 1;
  const Turns<Traits::kWarpgroups> turns{warpgroup};
  if constexpr (Traits::kTakesTurns) turns.begin();
  auto score_thread = score_mma.get_slice(warpgroup * 128);
  auto output_thread = output_mma.get_slice(warpgroup * 128);
  Tensor tSrQ = score_thread.partition_fragment_A(sQ);  // (MMA, M, K, stage)
  Tensor tSrK = score_thread.partition_fragment_B(sK);
  Tensor tOrV = output_thread.partition_fragment_B(sVt);

  Tensor tSrS = partition_fragment_C(score_mma, ScoreTile{});
  Tensor scores = make_tensor(tSrS.data(), rows_and_columns(tSrS.layout()));
  Tensor tOrP = make_tensor<Element>(OperandLayout<kBlockN>{});
  Tensor tOrO = partition_fragment_C(output_mma, typename Traits::OutputTile{});
  Tensor output = make_tensor(tOrO.data(), rows_and_columns(tOrO.layout()));
  const auto output_coordinates = [&] {
    Tensor tOcO = output_mma.get_slice(consumer_thread())
                      .partition_C(make_identity_tensor(typename Traits::OutputTile{}));
    return make_tensor(tOcO.data(), rows_and_columns(tOcO.layout()));
  };

  OnlineSoftmax<2> softmax(params.problem.softmax_scale);
  [[maybe_unused]] ScoreModifiers modifiers{};
  [[maybe_unused]] float slopes[2];
  int turn = 0;     // of row tiles
  int q_count = 0;  // of row tiles with keys
  int count = 0;    // of key tiles

  const auto work_of = [&](int turn) -> const ForwardWork& {
    return shared.work[shared.work_ring.stage(turn)];
  };
  const auto is_end = [&](int turn) {
    return uniform(shared.is_end[shared.work_ring.stage(turn)]) != 0;
  };
  const auto issue_scores = [&](int k_count) __attribute__((always_inline)) {
    issue<true>(score_mma, tSrQ(_, _, _, shared.q_ring.stage(q_count)),
                tSrK(_, _, _, shared.k_ring.stage(k_count)), tSrS);
  };
  const auto issue_output = [&]() __attribute__((always_inline)) {
    shared.v_ring.wait_full(count);
    issue<false>(output_mma, tOrP, tOrV(_, _, _, shared.v_ring.stage(count)), tOrO);
  };

  const auto begin_row_tile = [&] {
    if constexpr (Traits::kModifiesScores) {
      const ForwardWork& work = work_of(turn);
      modifiers = ScoreModifiers::of(params.problem, work.tile.index, work.head);
      if (modifiers.has_alibi) {
        load_alibi_slopes(params.problem, work, output_coordinates(), slopes);
      }
      softmax = OnlineSoftmax<2>(modifiers.scale);
    } else {
      softmax = OnlineSoftmax<2>(params.problem.softmax_scale);
    }
    clear(tOrO);
  };
  const auto end_row_tile = [&] {
    const ForwardWork& work = work_of(turn);
    const auto coordinates = output_coordinates();
    finish_rows(params, work, softmax, output, coordinates);
    if (params.num_splits > 1) {
      store_partial(params, work, output, coordinates);
    } else {
      store_rows<Traits>(params, work, tOrO, coordinates);
    }
    shared.work_ring.release(turn++);
  };

  // What happens to the scores of a key tile before the softmax.
  const auto modify_and_mask = [&](int tile) __attribute__((always_inline)) {
    const ForwardWork& work = work_of(turn);
    const bool masked = !work.key_tiles.unmasked.contains(tile);
    if (!masked && !Traits::kModifiesScores) return;
    Tensor tScS =
        score_mma.get_slice(consumer_thread()).partition_C(make_identity_tensor(ScoreTile{}));
    Tensor coordinates = make_tensor(tScS.data(), rows_and_columns(tScS.layout()));
    const auto row_of = [&](int r) {
      return work.tile.first_row + work.packing.position_of(get<0>(coordinates(r, 0)));
    };
    const auto key_of = [&](int c) { return tile * kBlockN + get<1>(coordinates(0, c)); };
    if constexpr (Traits::kModifiesScores) {
      if (modifiers.has_softcap) modifiers.apply_softcap(scores);
      if (modifiers.has_alibi) {
        modifiers.apply_alibi(scores, [&](int r) { return slopes[r]; }, work.mask, row_of, key_of);
      }
    }
    if (masked) apply_mask(scores, work.mask, row_of, key_of);
  };
  const auto to_operand = [&]() __attribute__((always_inline)) {
    Tensor words = recast<uint32_t>(tOrP);
    CUTE_UNROLL
    for (int i = 0; i < size(words); ++i) words(i) = pack<Element>(tSrS(2 * i), tSrS(2 * i + 1));
  };

  // O of the key tile before, and S and P of this one.
  const auto step = [&](int tile) __attribute__((always_inline)) {
    shared.k_ring.wait_full(count + 1);
    if constexpr (Traits::kTakesTurns) turns.wait();
    issue_scores(count + 1);
    issue_output();
    if constexpr (Traits::kTakesTurns) turns.pass_on();
    wait_for<1>(tSrS);
    shared.k_ring.release(count + 1);
    modify_and_mask(tile);
    float rescale[2];
    const bool raised =
        softmax.raise_maximum(scores, [&](int r, float factor) { rescale[r] = factor; });
    softmax.exponentiate(scores);
    warpgroup_fence_operand(tSrS);
    // In branches, so that the compiler moves nothing from before the wait behind it.
    if (raised) {
      wait_for<0>(tOrO);
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) multiply_row(output, r, rescale[r]);
    } else {
      wait_for<0>(tOrO);
    }
    shared.v_ring.release(count++);
    to_operand();
  };

  bool has_begun = false;  // S of the first key tile of row tile `turn` is on its way
  while (true) {
    if (!has_begun) {
      shared.work_ring.wait_full(turn);
      if (is_end(turn)) return;
    }
    begin_row_tile();
    int tile = uniform(work_of(turn).key_tiles.first());
    if (tile == KeyTiles::kNone) {
      end_row_tile();
      continue;
    }
    if (!has_begun) {
      shared.q_ring.wait_full(q_count);
      shared.k_ring.wait_full(count);
      issue_scores(count);
      wait_for<0>(tSrS);
    }
    shared.k_ring.release(count);
    modify_and_mask(tile);
    softmax.raise_maximum(scores, [](int, float) {});
    softmax.exponentiate(scores);
    to_operand();
    while ((tile = uniform(work_of(turn).key_tiles.after(tile))) != KeyTiles::kNone) step(tile);

    shared.q_ring.release(q_count++);
    if constexpr (Traits::kTakesTurns) turns.wait();
    issue_output();
    if constexpr (Traits::kStagesQ > 1) {
      shared.work_ring.wait_full(turn + 1);
      has_begun = !is_end(turn + 1) && uniform(work_of(turn + 1).key_tiles.tiles.size()) != 0;
      if (has_begun) {
        shared.q_ring.wait_full(q_count);
        shared.k_ring.wait_full(count + 1);
      }
      // Also where nothing begins, of what lies there: the compiler must know what is on its way.
      issue_scores(count + 1);
      if constexpr (Traits::kTakesTurns) turns.pass_on();
      wait_for<1>(tOrO);
      shared.v_ring.release(count++);
      end_row_tile();
      wait_for<0>(tSrS);
    } else {
      if constexpr (Traits::kTakesTurns) turns.pass_on();
      wait_for<0>(tOrO);
      shared.v_ring.release(count++);
      end_row_tile();
    }
  }
}

// Rows of a tile that packed heads leave over: no load writes them, and what lies there would sway
// the softmax of the warp by a rounding.
template <typename Traits>
__device__ __forceinline__ void clear_unused_rows(const QueryPacking& packing,
                                                  typename Traits::SharedStorage& shared) {
  using Element = typename Traits::Element;
  constexpr int kRowBlocks = Traits::kHeadDim / Traits::kSwizzleColumns * Traits::kStagesQ;
  const int first = packing.heads * packing.positions * Traits::kSwizzleColumns;
  constexpr int kEnd = Traits::kBlockM * Traits::kSwizzleColumns;
  for (int block = 0; block < kRowBlocks; ++block) {
    for (int i = first + static_cast<int>(threadIdx.x); i < kEnd; i += Traits::kThreads) {
      shared.q[0][block * kEnd + i] = Element(0);
    }
  }
  cutlass::arch::fence_view_async_shared();
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams<float> params,
                   const __grid_constant__ Launch launch) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(shared_memory);

  if (threadIdx.x == 0) {
    constexpr int kConsumerWarps = 4 * Traits::kWarpgroups;
    shared.q_ring.init(kConsumerWarps);
    shared.k_ring.init(kConsumerWarps);
    shared.v_ring.init(kConsumerWarps);
    shared.work_ring.init(kConsumerWarps + 1);  // and the loader
    cutlass::arch::fence_barrier_init();
  }
  clear_unused_rows<Traits>(launch.schedule.grid.packing, shared);
  __syncthreads();
  if (threadIdx.x < 128) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    if (threadIdx.x == 0) {
      load_tiles<Traits>(params.problem, launch, shared);
    } else if (threadIdx.x == 32) {
      schedule_work<Traits>(params.problem, launch.schedule, shared);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    consume<Traits>(params, shared);
  }
}

// Pointers are aligned to 16 bytes, head_dim and the strides of row, head and batch are multiples
// of 8 elements; head_dim <= kHeadDim.
template <typename Traits>
void launch_forward(const ForwardParams<float>& params) {
  constexpr DType kDType =
      std::is_same_v<typename Traits::Element, half_t> ? DType::float16 : DType::bfloat16;
  const Problem<float>& problem = params.problem;
  Launch launch;
  launch.schedule = Schedule::of(params, Traits::kBlockM);
  const int tiles = launch.schedule.tiles();
  if (tiles == 0) return;
  const QueryPacking& packing = launch.schedule.grid.packing;
  const bool q_is_packed = problem.cu_seqlens_q != nullptr;
  const bool k_is_packed = problem.cu_seqlens_k != nullptr;
  launch.q = tensor_map(params.q, kDType, params.q_strides, q_is_packed ? 1 : problem.batch,
                        problem.total_q, problem.num_heads, problem.head_dim,
                        {Traits::kSwizzleColumns, packing.heads, packing.positions});
  const TensorBox keys{Traits::kSwizzleColumns, 1, Traits::kBlockN};
  const int batch_k = k_is_packed ? 1 : problem.batch;
  launch.k = tensor_map(params.k, kDType, params.k_strides, batch_k, problem.total_k,
                        problem.num_heads_k, problem.head_dim, keys);
  launch.v = tensor_map(params.v, kDType, params.v_strides, batch_k, problem.total_k,
                        problem.num_heads_k, problem.head_dim, keys);

  constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  allow_shared_memory<forward_kernel<Traits>>(kSharedBytes);
  const int ctas = std::min(tiles, params.num_sms);
  forward_kernel<Traits><<<ctas, Traits::kThreads, kSharedBytes, params.stream>>>(params, launch);
  cuda_check(cudaGetLastError(), "sm90 forward");
}

template <typename Element, int kHeadDim>
void run_forward(const ForwardParams<float>& params) {
  using Plain = ForwardTraits<Element, kHeadDim, ForwardTile<kHeadDim, false>, false>;
  using ModifiesScores = ForwardTraits<Element, kHeadDim, ForwardTile<kHeadDim, true>, true>;
  const bool modifies_scores =
      params.problem.softcap != 0.f || params.problem.alibi_slopes != nullptr;
  modifies_scores ? launch_forward<ModifiesScores>(params) : launch_forward<Plain>(params);
}

template <typename Element, int kHeadDim>
using RegisterForward = RegisterKernel<ForwardParams<float>, run_forward<Element, kHeadDim>>;

}  // namespace neginf::sm90
