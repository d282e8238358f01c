// Attention forward with WGMMA and the tensor memory accelerator, for sm90.
//
// A CTA works on one tile of kBlockM query rows after the other (tile_order.h) and on their keys by
// tiles of kBlockN. A scheduler thread says what the next tile of rows is, a loader thread fetches
// its Q, K and V, and consumer warpgroups multiply. Each of these owns 64 of the rows from S to O,
// so that the softmax needs no exchange beyond a quad, and passes over the key tiles that only the
// others' rows see.
//
// clang-format off
//   scheduler    work(0)   work(1)   ...                              full: it is there
//   loader       K(0) Q | K(1) V(0) | ... | K'(0) V(n-1) Q' | ...      empty: all its readers
//   shared       work[4]   sQ[2]   sK[2]   sV[2]                             are past it
//   consumer     S = Q K^T -> mask, softmax -> P (registers) -> O += P V -> sQ, lse
//   storer       sQ -> out
//
// Inside a warpgroup, S(t+1) and O(t) are issued together; at the end of a row tile the next one's
// S(0) takes that place:
//
//   tensor cores   S(1) O(0) |      | S(2) O(1) | ... | O(n-1) S'(0) |           | S'(1) O'(0) | ...
//   arithmetic               | P(1) |           |     | lse          | out P'(0) |
// clang-format on
//
// and the other warpgroups multiply while this one does arithmetic. To issue a product lasts about
// as long as those before it run, so arithmetic begins when O(t) is nearly there. A row tile
// without keys goes through the same epilogue as all others.
//
// O leaves through the shared memory of Q (leave_rows, store_tiles), or straight from the
// accumulators where there is no Q to spare or packed heads make rows of a tile lie apart
// (store_rows).
#pragma once

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
#include "forward_traits.cuh"
#include "schedule.h"
#include "tma.cuh"
#include "wgmma.cuh"

namespace neginf::sm90 {

using namespace cute;

// ---------------------------------------------------------------------- scheduler, loader, storer

// By a thread for each consumer warpgroup, number `lane` of one warp. The first one finds the work.
template <typename Traits>
__device__ __forceinline__ void schedule_work(const ForwardParams<float>& params,
                                              const Schedule& schedule, int lane,
                                              typename Traits::SharedStorage& shared) {
  constexpr unsigned kLanes = (1u << Traits::kWarpgroups) - 1;
  int turn = 0;
  const auto publish = [&](int first, int size, int tile) {
    const Schedule::Place place = schedule.place(first, size, tile);
    if (!place.exists) return;
    shared.work_ring.wait_empty(turn);
    const int slot = shared.work_ring.stage(turn);
    if (lane == 0) {
      shared.work[slot] = ForwardWork::of<Traits::kBlockM, Traits::kBlockN>(
          params.problem, schedule.grid, place.row_tile, place.head_tile, place.split,
          schedule.num_splits);
      const ForwardWork& work = shared.work[slot];
      shared.endings[slot] = RowEndings::of(params, work);
      shared.mask[slot] = TileMask::of(work.mask, work.tile.first_row);
      shared.is_end[slot] = false;
    }
    __syncwarp(kLanes);
    const ForwardWork& work = shared.work[slot];
    const Range positions{work.packing.position_of(64 * lane),
                          work.packing.position_of(64 * lane + 63) + 1};
    shared.own[slot][lane] = OwnKeyTiles::of(work, positions, Traits::kBlockN);
    shared.work_ring.fill_by_thread(turn++);
  };
  for_each_tile(schedule.order, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), publish);
  shared.work_ring.wait_empty(turn);
  const int slot = shared.work_ring.stage(turn);
  if (lane == 0) shared.is_end[slot] = true;
  shared.own[slot][lane] = {};
  shared.work_ring.fill_by_thread(turn);
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

  const auto load_keys = [&](auto columns, const CUtensorMap& map, auto& ring, int count,
                             auto& buffers, const KeySource& keys, int tile) {
    const int first_key = tile * Traits::kBlockN;
    LoadBarrier& full = ring.wait_empty(count);
    full.arrive_and_expect_tx(Traits::kBlockN * columns * 2);
    load_tile<columns, kSwizzleColumns>(
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
    load_keys(Int<Traits::kHeadDimV>{}, launch.v, shared.v_ring, k_count - 1, shared.v, v_keys,
              v_tile);
    v_tile = KeyTiles::kNone;
  };

  for (int turn = 0;; ++turn) {
    shared.work_ring.wait_full(turn);
    const int slot = shared.work_ring.stage(turn);
    if (shared.is_end[slot]) break;
    const ForwardWork& work = shared.work[slot];
    const Range tiles = work.key_tiles.tiles;
    int tile = tiles.begin;
    if (tiles.empty()) {
      load_v();  // there may be many of these in a row, and no slot for more work before it is read
      shared.work_ring.release_by_thread(turn);
      continue;
    }

    const KeySource keys{work.head_k, static_cast<int>(work.keys.first_row),
                         work.mask.visible_keys().end,
                         problem.cu_seqlens_k == nullptr ? work.tile.index : 0};
    load_keys(Int<kHeadDim>{}, launch.k, shared.k_ring, k_count, shared.k, keys, tile);
    load_v();
    LoadBarrier& q_full = shared.q_ring.wait_empty(q_count);
    q_full.arrive_and_expect_tx(packing.heads * packing.positions * kHeadDim * 2);
    load_tile<kHeadDim, kSwizzleColumns>(
        launch.q, q_full, shared.q[shared.q_ring.stage(q_count)], Traits::kBlockM * kSwizzleColumns,
        packing.positions,
        {work.head, static_cast<int>(work.tile.sequence.first_row) + work.tile.first_row,
         work.tile.sequence.length - work.tile.first_row,
         problem.cu_seqlens_q == nullptr ? work.tile.index : 0});
    ++q_count;
    ++k_count;
    v_keys = keys;
    v_tile = tile;
    while (++tile < tiles.end) {
      load_keys(Int<kHeadDim>{}, launch.k, shared.k_ring, k_count, shared.k, keys, tile);
      load_v();
      ++k_count;
      v_tile = tile;
    }
    shared.work_ring.release_by_thread(turn);
  }
  load_v();
}

// Whether O leaves through Q: the rows of a tile must be a box, and O all there is.
template <typename Traits>
__device__ __forceinline__ bool leaves_through_q(const ForwardParams<float>& params,
                                                 const QueryPacking& packing) {
  return Traits::kStoresThroughQ && packing.heads == 1 && params.num_splits == 1;
}

// Stores what the consumers have left in the place of Q, which it then releases for them. By the
// tensor memory accelerator, which writes whole lines and nothing behind the end of the sequence.
template <typename Traits>
__device__ __forceinline__ void store_tiles(const ForwardParams<float>& params,
                                            const Launch& launch,
                                            typename Traits::SharedStorage& shared) {
  const bool is_packed = params.problem.cu_seqlens_q != nullptr;
  const bool leaves = leaves_through_q<Traits>(params, launch.schedule.grid.packing);
  int q_count = 0;
  for (int turn = 0;; ++turn) {
    shared.work_ring.wait_full(turn);
    const int slot = shared.work_ring.stage(turn);
    if (shared.is_end[slot]) break;
    const ForwardWork& work = shared.work[slot];
    if (!work.key_tiles.tiles.empty()) {
      shared.out_ring.wait_full(q_count);
      if (leaves) {
        store_tile<Traits::kHeadDimV, Traits::kSwizzleColumns>(
            launch.out, shared.q[shared.q_ring.stage(q_count)],
            Traits::kBlockM * Traits::kSwizzleColumns, Traits::kBlockM,
            {work.head, static_cast<int>(work.tile.sequence.first_row) + work.tile.first_row,
             work.tile.sequence.rows - work.tile.first_row, is_packed ? 0 : work.tile.index});
        tma_store_wait<0>();
      }
      shared.q_ring.release_by_thread(q_count++);
    }
    shared.work_ring.release_by_thread(turn);
  }
}

// --------------------------------------------------------------------------------------- consumers

// Among the consumers.
__device__ __forceinline__ int consumer_thread() { return thread_index_again() - 128; }

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

// ---------------------------------------------------------------------------------------- epilogue

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
    for (int group = 0; group < Traits::kHeadDimV / 32; ++group) {
      uint32_t chunk[4];
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) chunk[i] = words(r + 2 * (4 * group + i));
      transpose_in_quad(chunk);
      const int column = 32 * group + 8 * quad_lane;
      if (exists && column < params.problem.head_dim_v) {
        *reinterpret_cast<uint4*>(to + column) = make_uint4(chunk[0], chunk[1], chunk[2], chunk[3]);
      }
    }
  }
}

// The same for the storer. `tile` is one of Q's, of whose rows this warpgroup's are read no more.
template <typename Traits, class Accumulator>
__device__ __forceinline__ void leave_rows(typename Traits::Element* tile, int consumer,
                                           const Accumulator& tOrO) {
  using Element = typename Traits::Element;
  Tensor sO = make_tensor(make_smem_ptr(tile), typename Traits::LayoutO{});
  auto smem_store =
      make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, typename Traits::OutputMma{});
  auto smem_thread = smem_store.get_slice(consumer);
  Tensor rounded = convert<Element>(tOrO);
  copy(smem_store, smem_thread.retile_S(rounded), smem_thread.partition_D(sO));
  tma_store_fence();
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

// One consumer warpgroup. Everything is inlined: accumulators must stay in registers.
template <typename Traits>
class Consumer {
  using Element = typename Traits::Element;
  using SharedStorage = typename Traits::SharedStorage;
  using ScoreMma = typename Traits::ScoreMma;
  using OutputMma = typename Traits::OutputMma;
  using ScoreTile = typename Traits::ScoreTile;
  using OutputTile = typename Traits::OutputTile;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kFirstLeaveBarrier = 4;  // after those of Turns
  // So many key tiles may be passed over between two S while V of the former is not released: no
  // more K are loaded then; and who holds the turn for O of the last of these waits for its V.
  static constexpr int kMostBetween = Traits::kStages - Traits::kTakesTurns;

 public:
  __device__ __forceinline__ Consumer(const ForwardParams<float>& params, const Launch& launch,
                                      SharedStorage& shared)
      : params_(params),
        launch_(launch),
        shared_(shared),
        // Uniform in the warpgroup, and known to be.
        warpgroup_(cutlass::canonical_warp_group_idx() - 1),
        turns_{warpgroup_},
        softmax_(params.problem.softmax_scale) {}

  __device__ __forceinline__ void run() {
    if constexpr (Traits::kTakesTurns) turns_.begin();
    int tile = KeyTiles::kNone;  // of row tile `turn_`, the one whose S is there
    while (true) {
      const bool has_begun = tile != KeyTiles::kNone;
      if (!has_begun) {
        shared_.work_ring.wait_full(turn_);
        if (is_end(turn_)) return;
      }
      begin_row_tile();
      if (!has_begun) {
        if (uniform(own(turn_).key.tiles.size()) == 0) {
          end_without_keys();
          continue;
        }
        tile = begin_scores();
      }
      first_step(tile);
      const int end = uniform(own(turn_).key.tiles.end);
      // With three warpgroups there is no register for it.
      while (++tile < (Traits::kWarpgroups > 2 ? uniform(own(turn_).key.tiles.end) : end)) {
        step(tile);
      }
      tile = last_step();
    }
  }

 private:
  // ---- the work

  __device__ __forceinline__ const ForwardWork& work(int turn) const {
    return shared_.work[shared_.work_ring.stage(turn)];
  }
  __device__ __forceinline__ bool is_end(int turn) const {
    return uniform(shared_.is_end[shared_.work_ring.stage(turn)]) != 0;
  }

  __device__ __forceinline__ const OwnKeyTiles& own(int turn) const {
    return shared_.own[shared_.work_ring.stage(turn)][warpgroup_];
  }
  __device__ __forceinline__ bool is_masked(int tile) const {
    return !own(turn_).key.unmasked.contains(tile);
  }

  // ---- products

  __device__ __forceinline__ void issue_scores(int k_count) {
    Tensor sQ = make_tensor(make_smem_ptr(shared_.q[0]), typename Traits::LayoutQ{});
    Tensor sK = make_tensor(make_smem_ptr(shared_.k[0]), typename Traits::LayoutK{});
    ScoreMma mma;
    auto thread = mma.get_slice(warpgroup_ * 128);
    Tensor tSrQ = thread.partition_fragment_A(sQ);  // descriptors, (MMA, M, K, stage)
    Tensor tSrK = thread.partition_fragment_B(sK);
    issue<true>(mma, tSrQ(_, _, _, shared_.q_ring.stage(q_count_)),
                tSrK(_, _, _, shared_.k_ring.stage(k_count)), tSrS_);
  }

  __device__ __forceinline__ void issue_output() {
    Tensor sVt = make_tensor(make_smem_ptr(shared_.v[0]), typename Traits::LayoutVTransposed{});
    OutputMma mma;
    Tensor tOrV = mma.get_slice(warpgroup_ * 128).partition_fragment_B(sVt);
    shared_.v_ring.wait_full(count_);
    issue<false>(mma, tOrP_, tOrV(_, _, _, shared_.v_ring.stage(count_)), tOrO_);
  }

  // ---- steps

  // The next key tiles are not needed, nor their turns to issue. K and V one after the other, as
  // they are loaded.
  __device__ __forceinline__ void skip_tiles(int skipped) {
    CUTE_NO_UNROLL
    for (int i = 0; i < skipped; ++i) {
      if constexpr (Traits::kTakesTurns) {
        turns_.wait();
        turns_.pass_on();
      }
      skip_key(count_);
      skip_value();
    }
  }
  __device__ __forceinline__ void skip_key(int count) {
    shared_.k_ring.wait_full(count);
    shared_.k_ring.release(count);
  }
  __device__ __forceinline__ void skip_value() {
    shared_.v_ring.wait_full(count_);
    shared_.v_ring.release(count_++);
  }

  // A row tile none of whose keys matter to this warpgroup. It ends before it passes over them: so
  // the storer need not wait for that.
  __device__ __forceinline__ void end_without_keys() {
    const int skipped = uniform(own(turn_).before);
    const bool has_q = skipped > 0;
    if (has_q) {
      shared_.q_ring.wait_full(q_count_);
      if constexpr (!Traits::kStoresThroughQ) shared_.q_ring.release(q_count_);
      ++q_count_;
    }
    end_row_tile(end_softmax(shared_.endings[shared_.work_ring.stage(turn_)]), has_q);
    skip_tiles(skipped);
  }

  // S of the first key tile, where last_step has not begun with it. Returns its number.
  __device__ __forceinline__ int begin_scores() {
    skip_tiles(uniform(own(turn_).before));
    shared_.q_ring.wait_full(q_count_);
    shared_.k_ring.wait_full(count_);
    issue_scores(count_);
    wait_for<0>(tSrS_);
    return uniform(own(turn_).key.tiles.begin);
  }

  // S of the first key tile becomes P.
  __device__ __forceinline__ void first_step(int tile) {
    const bool masked = is_masked(tile);
    shared_.k_ring.release(count_);
    modify_and_mask(tile, masked);
    Tensor scores = as_rows_and_columns(tSrS_);
    softmax_.raise_maximum(softmax_.maxima(scores), [](int, float) {});
    softmax_.exponentiate(scores);
    to_operand();
  }

  // O of the key tile before; S and P of this one.
  __device__ __forceinline__ void step(int tile) {
    const bool masked = is_masked(tile);  // asked for before the products
    shared_.k_ring.wait_full(count_ + 1);
    if constexpr (Traits::kTakesTurns) turns_.wait();
    issue_scores(count_ + 1);
    issue_output();
    if constexpr (Traits::kTakesTurns) turns_.pass_on();
    wait_for<1>(tSrS_);
    shared_.k_ring.release(count_ + 1);
    modify_and_mask(tile, masked);
    Tensor scores = as_rows_and_columns(tSrS_);
    const auto maxima = softmax_.maxima(scores);
    // O was issued when S was, and is nearly there: to issue a product takes until the one before
    // it is done. In branches, so that the compiler moves nothing from before the wait behind it.
    if (softmax_.outgrown_by(maxima)) {
      wait_for<0>(tOrO_);
      Tensor output = as_rows_and_columns(tOrO_);
      softmax_.raise_maximum(maxima, [&](int r, float factor) { multiply_row(output, r, factor); });
    } else {
      wait_for<0>(tOrO_);
    }
    shared_.v_ring.release(count_++);
    softmax_.exponentiate(scores);
    to_operand();
  }

  // O of the last key tile, and meanwhile S of the next row tile's first. Returns the number of
  // that one, or kNone if the next row tile has not begun so.
  __device__ __forceinline__ int last_step() {
    // All that is read from shared memory is asked for before the product, which keeps it busy.
    const RowEndings endings = shared_.endings[shared_.work_ring.stage(turn_)];
    // Where there are turns, before them: there the registers do not suffice for doing it while
    // the products run.
    RowScales<2> scales;
    if constexpr (Traits::kTakesTurns) scales = end_softmax(endings);
    if constexpr (!Traits::kStoresThroughQ) shared_.q_ring.release(q_count_);
    ++q_count_;
    const int skipped = uniform(own(turn_).after);
    if constexpr (Traits::kStagesQ > 1) {
      shared_.work_ring.wait_full(turn_ + 1);
      const Range next = own(turn_ + 1).key.tiles;
      const int between = skipped + uniform(own(turn_ + 1).before);  // the two S
      const int first = uniform(next.begin);
      const bool begins = uniform(next.size()) != 0 && between <= kMostBetween;
      if constexpr (Traits::kTakesTurns) turns_.wait();
      issue_output();
      if (begins) {
        CUTE_NO_UNROLL
        for (int i = 1; i <= between; ++i) {
          // Others may have to issue before more K can be loaded.
          if constexpr (Traits::kTakesTurns) turns_.pass_on();
          skip_key(count_ + i);
          if constexpr (Traits::kTakesTurns) turns_.wait();
        }
        shared_.q_ring.wait_full(q_count_);
        shared_.k_ring.wait_full(count_ + 1 + between);
      }
      // Also where nothing begins, of what lies there: the compiler must know what is on its way.
      issue_scores(count_ + 1 + between);
      if constexpr (Traits::kTakesTurns) turns_.pass_on();
      if constexpr (!Traits::kTakesTurns) scales = end_softmax(endings);
      wait_for<1>(tOrO_);
      shared_.v_ring.release(count_++);
      if (begins) {
        for (int i = 0; i < between; ++i) skip_value();
      } else {
        skip_tiles(skipped);
      }
      end_row_tile(scales, true);
      wait_for<0>(tSrS_);
      return begins ? first : KeyTiles::kNone;
    } else {
      if constexpr (Traits::kTakesTurns) turns_.wait();
      issue_output();
      if constexpr (Traits::kTakesTurns) turns_.pass_on();
      if constexpr (!Traits::kTakesTurns) scales = end_softmax(endings);
      wait_for<0>(tOrO_);
      shared_.v_ring.release(count_++);
      skip_tiles(skipped);
      end_row_tile(scales, false);
      return KeyTiles::kNone;
    }
  }

  // ---- arithmetic

  __device__ __forceinline__ void begin_row_tile() {
    if constexpr (Traits::kModifiesScores) {
      const Problem<float>& problem = params_.problem;
      modifiers_ = ScoreModifiers::of(problem, work(turn_).tile.index, work(turn_).head);
      if (modifiers_.has_alibi) {
        load_alibi_slopes(problem, work(turn_), output_coordinates(), slopes_);
      }
      softmax_ = OnlineSoftmax<2>(modifiers_.scale);
    } else {
      softmax_ = OnlineSoftmax<2>(params_.problem.softmax_scale);
    }
    clear(tOrO_);
  }

  // What happens to the scores of a key tile before the softmax.
  __device__ __forceinline__ void modify_and_mask(int tile, bool masked) {
    const ForwardWork& work = this->work(turn_);
    if (!masked && !Traits::kModifiesScores) return;
    Tensor scores = as_rows_and_columns(tSrS_);
    Tensor tScS =
        ScoreMma{}.get_slice(consumer_thread()).partition_C(make_identity_tensor(ScoreTile{}));
    Tensor coordinates = as_rows_and_columns(tScS);
    const auto position_of = [&](int r) {
      return work.packing.position_of(get<0>(coordinates(r, 0)));
    };
    const auto key_of = [&](int c) { return tile * kBlockN + get<1>(coordinates(0, c)); };
    if constexpr (Traits::kModifiesScores) {
      if (modifiers_.has_softcap) modifiers_.apply_softcap(scores);
      if (modifiers_.has_alibi) {
        const auto slope_of = [&](int r) { return slopes_[r]; };
        const auto row_of = [&](int r) { return work.tile.first_row + position_of(r); };
        modifiers_.apply_alibi(scores, slope_of, work.mask, row_of, key_of);
      }
    }
    if (masked) {
      const TileMask& mask = shared_.mask[shared_.work_ring.stage(turn_)];
      apply_mask_by_bits(scores, [&](int r) { return mask.keys_of(position_of(r), key_of(0)); });
    }
  }

  __device__ __forceinline__ void to_operand() {
    Tensor words = recast<uint32_t>(tOrP_);
    CUTE_UNROLL
    for (int i = 0; i < size(words); ++i) words(i) = pack<Element>(tSrS_(2 * i), tSrS_(2 * i + 1));
  }

  __device__ __forceinline__ RowScales<2> end_softmax(const RowEndings& endings) {
    return neginf::end_softmax(params_, endings, softmax_, output_coordinates());
  }

  // With `has_q`, number q_count_ - 1 is that of the row tile.
  __device__ __forceinline__ void end_row_tile(const RowScales<2>& scales, bool has_q) {
    const ForwardWork& work = this->work(turn_);
    const auto coordinates = output_coordinates();
    Tensor output = as_rows_and_columns(tOrO_);
    end_output(scales, output);
    if (params_.num_splits > 1) {
      store_partial(params_, work, output, coordinates);
    } else if (has_q && leaves_through_q<Traits>(params_, launch_.schedule.grid.packing)) {
      // The other warps' part of S may still be reading it.
      cutlass::arch::NamedBarrier::sync(128, kFirstLeaveBarrier + warpgroup_);
      leave_rows<Traits>(shared_.q[shared_.q_ring.stage(q_count_ - 1)], consumer_thread(), tOrO_);
    } else {
      store_rows<Traits>(params_, work, tOrO_, coordinates);
    }
    if (Traits::kStoresThroughQ && has_q) shared_.out_ring.fill_by_thread(q_count_ - 1);
    shared_.work_ring.release_by_thread(turn_++);
  }

  static __device__ __forceinline__ auto output_coordinates() {
    Tensor tOcO =
        OutputMma{}.get_slice(consumer_thread()).partition_C(make_identity_tensor(OutputTile{}));
    return as_rows_and_columns(tOcO);
  }

  const ForwardParams<float>& params_;
  const Launch& launch_;
  SharedStorage& shared_;
  const int warpgroup_;
  const Turns<Traits::kWarpgroups> turns_;
  int turn_ = 0;     // of row tiles
  int q_count_ = 0;  // of row tiles with keys
  int count_ = 0;    // of key tiles

  decltype(partition_fragment_C(ScoreMma{}, ScoreTile{})) tSrS_;
  decltype(make_tensor<Element>(OperandLayout<kBlockN>{})) tOrP_;
  decltype(partition_fragment_C(OutputMma{}, OutputTile{})) tOrO_;
  OnlineSoftmax<2> softmax_;
  ScoreModifiers modifiers_;  // these two only with kModifiesScores
  float slopes_[2];
};

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
    for (const CUtensorMap* map : {&launch.q, &launch.k, &launch.v}) prefetch_tma_descriptor(map);
    constexpr int kConsumerWarps = 4 * Traits::kWarpgroups;
    constexpr int kConsumers = 32 * kConsumerWarps;
    constexpr bool kHasStorer = Traits::kStoresThroughQ;
    shared.q_ring.init(kHasStorer ? 1 : kConsumerWarps);
    shared.out_ring.init(1, kConsumers);
    shared.k_ring.init(kConsumerWarps);
    shared.v_ring.init(kConsumerWarps);
    // Read by threads, the loader's and the storer's among them.
    shared.work_ring.init(kConsumers + 1 + kHasStorer, Traits::kWarpgroups);
    cutlass::arch::fence_barrier_init();
  }
  clear_unused_rows<Traits>(launch.schedule.grid.packing, shared);
  __syncthreads();
  if (threadIdx.x < 128) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    const int warp = cutlass::canonical_warp_idx_sync();
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (warp == 0) {
      if (lane == 0) load_tiles<Traits>(params.problem, launch, shared);
    } else if (warp == 1) {
      if (lane < Traits::kWarpgroups) {
        schedule_work<Traits>(params, launch.schedule, lane, shared);
      }
    } else if (warp == 2 && Traits::kStoresThroughQ) {
      if (lane == 0) store_tiles<Traits>(params, launch, shared);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    Consumer<Traits>(params, launch, shared).run();
  }
}

// Whether rows see so many keys that LongForwardTile is the better one. Splits have none: they are
// decided on by the tiles of the others (forward_block).
inline bool is_long(const ForwardParams<float>& params) {
  const MeanLengths mean = MeanLengths::of(params.problem);
  return params.num_splits == 1 && mean.rows >= kLongForwardRows &&
         mean.keys_per_row >= kLongForwardKeys;
}

// Pointers are aligned to 16 bytes, head_dim, head_dim_v and the strides of row, head and batch are
// multiples of 8 elements; head_dim <= kHeadDim, head_dim_v <= kHeadDimV.
template <typename Traits>
void launch_forward(const ForwardParams<float>& params) {
  constexpr DType kDType =
      std::is_same_v<typename Traits::Element, half_t> ? DType::float16 : DType::bfloat16;
  const Problem<float>& problem = params.problem;
  Launch launch;
  launch.schedule = Schedule::of(params, Traits::kBlockM, Traits::kBlockN);
  const int ctas = launch.schedule.order.ctas(params.num_sms);
  if (ctas == 0) return;
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
                        problem.num_heads_k, problem.head_dim_v, keys);

  if constexpr (Traits::kStoresThroughQ) {
    launch.out = tensor_map(params.out, kDType, params.out_strides, q_is_packed ? 1 : problem.batch,
                            problem.total_q, problem.num_heads, problem.head_dim_v,
                            {Traits::kSwizzleColumns, 1, Traits::kBlockM});
  }

  constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  allow_shared_memory<forward_kernel<Traits>>(kSharedBytes);
  forward_kernel<Traits><<<ctas, Traits::kThreads, kSharedBytes, params.stream>>>(params, launch);
  cuda_check(cudaGetLastError(), "sm90 forward");
}

template <typename Element, int kHeadDim>
void run_forward(const ForwardParams<float>& params) {
  const bool modifies_scores =
      params.problem.softcap != 0.f || params.problem.alibi_slopes != nullptr;
  dispatch_forward_tile<kHeadDim>(
      params.problem.head_dim_v, modifies_scores, is_long(params),
      [&](auto tile, auto kHeadDimV, auto kModifiesScores) {
        launch_forward<
            ForwardTraits<Element, kHeadDim, kHeadDimV, decltype(tile), kModifiesScores>>(params);
      });
}

template <typename Element, int kHeadDim>
using RegisterForward = RegisterKernel<ForwardParams<float>, run_forward<Element, kHeadDim>>;

}  // namespace neginf::sm90
