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
      __syncwarp();
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
      if (step.is_first(work)) load_keys(launch_.k, shared_.k_ring, shared_.k, ToClear::kK, work);
      load_q(work, step);
      if (step.is_first(work)) load_keys(launch_.v, shared_.v_ring, shared_.v, ToClear::kV, work);
      load_dout(work, step);
      ++row_count_;
      if (step.is_last(work)) return;
    }
  }

  // ---- tiles

  // Tile number `count` of a ring. If it must be cleared, nobody is told that it is there before
  // the clearer has done that.
  template <class Ring, class Issue>
  __device__ __forceinline__ void load(Ring& ring, int count, int bytes, bool must_clear,
                                       ToClear::What what, const RowStep& step,
                                       const Issue& issue) {
    LoadBarrier& full = ring.wait_empty(count);
    if (is_first_lane()) {
      if (must_clear) {
        shared_.to_clear = {what, ring.stage(count), shared_.work_ring.stage(turn_), step};
      }
      LoadBarrier& barrier = must_clear ? shared_.uncleared : full;
      barrier.arrive_and_expect_tx(bytes);
      issue(barrier);
    }
    if (must_clear) {
      barrier_sync(BackwardBarrier::kCleared, 64);
      if (is_first_lane()) full.arrive();
    }
    __syncwarp();
  }

  template <class Ring, class Buffers>
  __device__ __forceinline__ void load_keys(const CUtensorMap& map, Ring& ring, Buffers& buffers,
                                            ToClear::What what, const KeyWork& work) {
    constexpr int kSwizzle = Traits::kSwizzleColumnsK;
    asm volatile("" : "+r"(turn_));  // what follows from it is worked out here, not kept
    const int first_key = work.keys.first_row;
    const TileCoordinates at{work.head_k,
                             static_cast<int>(work.keys.sequence.first_row) + first_key,
                             work.visible_keys.end - first_key,
                             params_.problem.cu_seqlens_k == nullptr ? work.keys.index : 0};
    const bool must_clear = work.visible_keys.begin > first_key;
    auto& buffer = buffers[ring.stage(turn_)];
    load(ring, turn_, sizeof(buffer), must_clear, what, {}, [&](LoadBarrier& barrier) {
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

  __device__ __forceinline__ void load_rows(const CUtensorMap& map, LoadBarrier& barrier,
                                            Element* tile, const KeyWork& work,
                                            const RowStep& step) const {
    constexpr int kSwizzle = Traits::kSwizzleColumns;
    load_tile<kHeadDim, kSwizzle>(map, barrier, tile, kBlockM * kSwizzle, kBlockM,
                                  coordinates(work, step));
  }

  // Q and the statistics of its rows.
  __device__ __forceinline__ void load_q(const KeyWork& work, const RowStep& step) {
    const Statistics* from = rows_.statistics_of<kBlockM>(step.number(rows_, work));
    must_clear_ = from->needs_care != 0 || step.tile * kBlockM < work.rows_with_keys.begin;
    const int stage = shared_.q_ring.stage(row_count_);
    load(shared_.q_ring, row_count_, sizeof(shared_.q[0]) + sizeof(Statistics), must_clear_,
         ToClear::kQ, step, [&](LoadBarrier& barrier) {
           load_rows(launch_.q, barrier, shared_.q[stage], work, step);
           cute::SM90_BULK_COPY_G2S::copy(from, reinterpret_cast<uint64_t*>(&barrier),
                                          &shared_.statistics[stage], sizeof(Statistics));
         });
  }

  // Of the same step as the last load_q.
  __device__ __forceinline__ void load_dout(const KeyWork& work, const RowStep& step) {
    Element* const tile = shared_.dout[shared_.dout_ring.stage(row_count_)];
    load(shared_.dout_ring, row_count_, sizeof(shared_.dout[0]), must_clear_, ToClear::kDout, step,
         [&](LoadBarrier& barrier) { load_rows(launch_.dout, barrier, tile, work, step); });
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
  using Element = typename Traits::Element;
  using SharedStorage = typename Traits::SharedStorage;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;

 public:
  __device__ __forceinline__ Clearer(const BackwardParams<float>& params, const BackwardRows& rows,
                                     SharedStorage& shared)
      : params_(params), rows_(rows), shared_(shared) {}

  __device__ __forceinline__ void run() {
    for (uint32_t count = 0;; ++count) {
      shared_.uncleared.wait(count % 2);
      const ToClear& to_clear = shared_.to_clear;
      switch (to_clear.what) {
        case ToClear::kEnd: return;
        case ToClear::kK: clear_keys(shared_.k[to_clear.stage]); break;
        case ToClear::kV: clear_keys(shared_.v[to_clear.stage]); break;
        case ToClear::kQ:
          needs_care_ = shared_.statistics[to_clear.stage].needs_care != 0;
          clear_rows(shared_.q[to_clear.stage]);
          if (needs_care_) fetch_careful_divisors();
          break;
        case ToClear::kDout:  // of the same rows
          clear_rows(shared_.dout[to_clear.stage]);
          break;
      }
      cutlass::arch::fence_view_async_shared();
      barrier_arrive(BackwardBarrier::kCleared, 64);
    }
  }

 private:
  __device__ __forceinline__ const KeyWork& work() const {
    return shared_.work[shared_.to_clear.slot];
  }
  __device__ __forceinline__ CarefulRows careful() const {
    return CarefulRows::of(params_, rows_, work(), shared_.to_clear.step);
  }

  // A row after the other, each by all lanes.
  template <int kRows, int kSwizzleColumns, class MustClear>
  static __device__ __forceinline__ void clear(Element* tile, const MustClear& must_clear) {
    constexpr int kWords = kSwizzleColumns / 2;  // of a row of a block
#pragma unroll 1
    for (int r = 0; r < kRows; ++r) {
      if (!must_clear(r)) continue;
      auto* row = reinterpret_cast<uint32_t*>(tile) + r * kWords;
#pragma unroll 1
      for (int i = thread_index_again() % 32; i < Traits::kHeadDim / 2; i += 32) {
        row[i / kWords * (kRows * kWords) + i % kWords] = 0;
      }
    }
  }

  __device__ __forceinline__ void clear_keys(Element* tile) {
    const int first_visible = work().visible_keys.begin - work().keys.first_row;
    clear<kBlockN, Traits::kSwizzleColumnsK>(tile, [&](int r) { return r < first_visible; });
  }

  __device__ __forceinline__ void clear_rows(Element* tile) {
    const int first_with_keys = work().rows_with_keys.begin - shared_.to_clear.step.tile * kBlockM;
    const CarefulRows rows = careful();
    clear<kBlockM, Traits::kSwizzleColumns>(
        tile, [&](int r) { return r < first_with_keys || (needs_care_ && rows.must_clear(r)); });
  }

  __device__ __forceinline__ void fetch_careful_divisors() {
    const CarefulRows rows = careful();
#pragma unroll 1
    for (int r = thread_index_again() % 32; r < kBlockM; r += 32) {
      shared_.careful[shared_.to_clear.stage][r] = rows.divisor(r);
    }
  }

  const BackwardParams<float>& params_;
  const BackwardRows& rows_;
  SharedStorage& shared_;
  bool needs_care_ = false;
};

}  // namespace neginf::sm90
