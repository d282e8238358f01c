// The roles of the sm90 forward that do not multiply: who finds the work, who loads it, who stores
// what comes of it. Their registers are few.
#pragma once

#include "../common/forward_epilogue.cuh"
#include "../common/forward_work.h"
#include "forward_traits.cuh"
#include "schedule.h"
#include "tma.cuh"

namespace neginf::sm90 {

using namespace cute;

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
    shared.own[slot][lane] = OwnKeyTiles::of(work, positions, Traits::kBlockN, Traits::kHalvesLast);
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

}  // namespace neginf::sm90
