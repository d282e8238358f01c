// The producers of the sm90 backward: one warp claims work, one brings its tiles into shared
// memory, another one clears what must not enter a product. Their registers are few.
#pragma once

#include "../common/backward_rows.h"
#include "../common/backward_scores.cuh"
#include "../common/backward_work.cuh"
#include "../common/thread_index.h"
#include "tma.cuh"

namespace neginf::sm90 {

// What the host prepares for a launch.
struct BackwardLaunch {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap dout;
  int works;  // key tiles times key heads
};

// Work is claimed in the order of its number, also by CTAs that start late: who waits for its turn
// to add to dQ waits for lower numbers, which have been claimed.
template <typename Traits>
__device__ __forceinline__ void claim_work(const BackwardParams<float>& params,
                                           const BackwardRows& rows, int works,
                                           typename Traits::SharedStorage& shared) {
  bool is_end = false;
  for (int turn = 0; !is_end; ++turn) {
    LoadBarrier& full = shared.work_ring.wait_empty(turn);
    if (is_first_lane()) {
      // Not before it is needed, so that work goes to who is free.
      if (turn > 0) shared.loaded.wait((turn - 1) % 2);
      const int slot = shared.work_ring.stage(turn);
      const int number = atomicAdd(rows.next_work, 1);
      is_end = number >= works;
      shared.is_end[slot] = is_end;
      if (!is_end) {
        shared.work[slot].find(params, rows, Traits::kBlockN, number);
        if constexpr (Traits::kIsWide) shared.work[slot].spread_starts(params);
      }
      full.arrive();
    }
    is_end = __any_sync(0xffffffffu, is_end);
  }
}

template <typename Traits>
class Loader {
  using Element = typename Traits::Element;
  using SharedStorage = typename Traits::SharedStorage;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kHeadDim = Traits::kHeadDim;
  using Statistics = RowStatistics<kBlockM>;

 public:
  __device__ __forceinline__ Loader(const BackwardParams<float>& params, const BackwardRows& rows,
                                    const BackwardLaunch& launch, SharedStorage& shared)
      : params_(params), rows_(rows), launch_(launch), shared_(shared) {}

  __device__ __forceinline__ void run() {
    for (;; ++turn_) {
      shared_.work_ring.wait_full(turn_);
      const int slot = shared_.work_ring.stage(turn_);
      if (shared_.is_end[slot]) break;
      const KeyWork& work = shared_.work[slot];
      if (work.row_tiles.empty()) {
        if (is_first_lane()) {
          shared_.k_ring.wait_empty(turn_).arrive();
          shared_.v_ring.wait_empty(turn_).arrive();
        }
      } else {
        load_work(work);
      }
      shared_.work_ring.release_by_thread(turn_);
      if (is_first_lane()) shared_.loaded.arrive();
    }
    if (is_first_lane()) {
      shared_.to_clear.what = ToClear::kEnd;
      shared_.uncleared.arrive();
    }
    for (int i = max(0, row_count_ - Traits::kStagesQ); i < row_count_; ++i) {
      shared_.q_ring.wait_released(i);
    }
  }

 private:
  __device__ __forceinline__ void load_work(const KeyWork& work) {
    RowStep step = RowStep::first(work);
    for (;; step.advance(work)) {
      if (step.is_first(work)) load_keys(launch_.k, shared_.k_ring, shared_.k, work);
      load_q(work, step);
      if (step.is_first(work)) load_keys(launch_.v, shared_.v_ring, shared_.v, work);
      load_dout(work, step);
      ++row_count_;
      if (step.is_last(work)) return;
    }
  }

  // ---- tiles

  // Tile number `count` of a ring. describe() writes what goes with it, and if it must be cleared
  // also to_clear: then nobody is told that it is there before the clearer has done that. The load
  // takes longer than that, and consumers may be waiting for it, so it is asked for first.
  template <class Ring, class Describe, class Issue>
  __device__ __forceinline__ void load(Ring& ring, int count, int bytes, bool must_clear,
                                       const Describe& describe, const Issue& issue) {
    LoadBarrier& full = ring.wait_empty(count);
    if (is_first_lane()) {
      LoadBarrier& barrier = must_clear ? shared_.uncleared : full;
      barrier.expect_transaction(bytes);
      issue(barrier);
      describe();
      barrier.arrive();
    }
    if (must_clear) {
      barrier_sync(BackwardBarrier::kCleared, 64);
      if (is_first_lane()) full.arrive();
    }
    __syncwarp();
  }

  __device__ __forceinline__ void load_keys(const CUtensorMap& map, Ring<1>& ring,
                                            Element (&buffer)[kBlockN * kHeadDim],
                                            const KeyWork& work) {
    constexpr int kSwizzle = Traits::kSwizzleColumnsK;
    asm volatile("" : "+r"(turn_));  // what follows from it is worked out here, not kept
    const int first_key = work.keys.first_row;
    const TileCoordinates at{work.head_k,
                             static_cast<int>(work.keys.sequence.first_row) + first_key,
                             work.visible_keys.end - first_key,
                             params_.problem.cu_seqlens_k == nullptr ? work.keys.index : 0};
    const int first_visible = work.visible_keys.begin - first_key;
    const bool must_clear = first_visible > 0;
    const auto describe = [&] {
      if (must_clear) shared_.to_clear = {ToClear::kKeys, buffer, first_visible, {}};
    };
    load(ring, turn_, sizeof(buffer), must_clear, describe, [&](LoadBarrier& barrier) {
      load_tile<kHeadDim, kSwizzle>(map, barrier, buffer, kBlockN * kSwizzle, kBlockN, at);
    });
  }

  __device__ __forceinline__ TileCoordinates coordinates(const KeyWork& work,
                                                         const RowStep& step) const {
    const int first_row = step.tile * kBlockM;
    return {step.head, static_cast<int>(work.queries.first_row) + first_row,
            work.rows_with_keys.end - first_row,
            params_.problem.cu_seqlens_q == nullptr ? work.keys.index : 0};
  }

  static __device__ __forceinline__ void load_rows(const CUtensorMap& map, LoadBarrier& barrier,
                                                   Element* tile, const TileCoordinates& at) {
    constexpr int kSwizzle = Traits::kSwizzleColumns;
    load_tile<kHeadDim, kSwizzle>(map, barrier, tile, kBlockM * kSwizzle, kBlockM, at);
  }

  // A function that gives what of() does: worked out now, as consumers may be waiting from when the
  // buffer is free on, unless there are no registers for it.
  template <class Of>
  static __device__ __forceinline__ auto ahead(const Of& of) {
    if constexpr (Traits::kProducerRegisters > 24) {
      return [value = of()] { return value; };
    } else {
      return of;
    }
  }

  // Q, the statistics of its rows, and the notes.
  __device__ __forceinline__ void load_q(const KeyWork& work, const RowStep& step) {
    const auto at = ahead([&] { return coordinates(work, step); });
    const Statistics* from = rows_.statistics_of<kBlockM>(step.number(rows_, work));
    const bool needs_care = from->needs_care != 0;
    must_clear_ = needs_care || step.tile * kBlockM < work.rows_with_keys.begin;
    const auto flags = ahead([&] {
      return (work.unmasked_tiles.contains(step.tile) ? 0 : StepNotes::kMasked) |
             (needs_care ? StepNotes::kNeedsCare : 0) |
             (step.is_last(work) ? StepNotes::kIsLast : 0);
    });
    const int stage = shared_.q_ring.stage(row_count_);
    Element* const tile = shared_.q[stage];
    const auto describe = [&] {
      notes().flags = flags();
      notes().step = step;
      if (!must_clear_) return;
      notes().rows =
          needs_care ? CarefulRows::of(params_, rows_, work, step) : CarefulRows{nullptr, 0};
      describe_to_clear(tile, work);
    };
    load(shared_.q_ring, row_count_, sizeof(shared_.q[0]) + sizeof(Statistics), must_clear_,
         describe, [&](LoadBarrier& barrier) {
           load_rows(launch_.q, barrier, tile, at());
           cute::SM90_BULK_COPY_G2S::copy(from, reinterpret_cast<uint64_t*>(&barrier),
                                          &shared_.statistics[stage], sizeof(Statistics));
         });
  }

  // Of the same step as the last load_q.
  __device__ __forceinline__ void load_dout(const KeyWork& work, const RowStep& step) {
    const auto at = ahead([&] { return coordinates(work, step); });
    Element* const tile = shared_.dout[shared_.dout_ring.stage(row_count_)];
    const auto describe = [&] {
      if (must_clear_) describe_to_clear(tile, work);
    };
    load(shared_.dout_ring, row_count_, sizeof(shared_.dout[0]), must_clear_, describe,
         [&](LoadBarrier& barrier) { load_rows(launch_.dout, barrier, tile, at()); });
  }

  __device__ __forceinline__ StepNotes& notes() const {
    return shared_.notes[shared_.q_ring.stage(row_count_)];
  }

  __device__ __forceinline__ void describe_to_clear(Element* tile, const KeyWork& work) const {
    const int first_with_keys = work.rows_with_keys.begin - notes().step.tile * kBlockM;
    shared_.to_clear = {ToClear::kRows, tile, first_with_keys, notes().rows};
  }

  const BackwardParams<float>& params_;
  const BackwardRows& rows_;
  const BackwardLaunch& launch_;
  SharedStorage& shared_;
  bool must_clear_;
  int turn_ = 0;  // of key tiles
  int row_count_ = 0;
};

// Makes tiles harmless that hold what must not enter a product: K and V of keys in front of those
// that anyone sees, q and dO of rows without keys or weight. They are rare. A warp of its own, as
// the loader has no registers left for it.
template <typename Traits>
class Clearer {
 public:
  __device__ __forceinline__ explicit Clearer(typename Traits::SharedStorage& shared)
      : shared_(shared) {}

  __device__ __forceinline__ void run() {
    for (uint32_t count = 0;; ++count) {
      shared_.uncleared.wait(count % 2);
      const ToClear& to_clear = shared_.to_clear;
      switch (to_clear.what) {
        case ToClear::kEnd: return;
        case ToClear::kKeys: clear<Traits::kBlockN, Traits::kSwizzleColumnsK>(to_clear); break;
        case ToClear::kRows: clear<Traits::kBlockM, Traits::kSwizzleColumns>(to_clear); break;
      }
      cutlass::arch::fence_view_async_shared();
      barrier_arrive(BackwardBarrier::kCleared, 64);
    }
  }

 private:
  // A row after the other, each by all lanes.
  template <int kRows, int kSwizzleColumns>
  static __device__ __forceinline__ void clear(const ToClear& to_clear) {
    constexpr int kWords = kSwizzleColumns / 2;  // of a row of a block
#pragma unroll 1
    for (int r = 0; r < kRows; ++r) {
      if (r >= to_clear.first && !to_clear.rows.must_clear(r)) continue;
      auto* row = static_cast<uint32_t*>(to_clear.tile) + r * kWords;
#pragma unroll 1
      for (int i = thread_index_again() % 32; i < Traits::kHeadDim / 2; i += 32) {
        row[i / kWords * (kRows * kWords) + i % kWords] = 0;
      }
    }
  }

  typename Traits::SharedStorage& shared_;
};

}  // namespace neginf::sm90
