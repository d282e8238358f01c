// The producers of the sm90 backward: one thread claims work, one warp brings its tiles into shared
// memory.
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

// Passes the buffer for dQ from the consumers to the warp that adds it and back.
template <typename Traits>
struct QueryGradHandover {
  static constexpr int kThreads = 128 * Traits::kWarpgroups + 32;
  static constexpr int kFull = 2;  // barriers; 0 is __syncthreads, 1 the consumers' own
  static constexpr int kFree = 3;
  // A warp's part of dQ, which is contiguous in shared memory and, kParts of them, in memory.
  static constexpr int kParts = Traits::kQueryGradParts;
  static constexpr int kPieces = 4 * Traits::kWarpgroups;
  static constexpr int kPiece = Traits::kBlockM * Traits::kHeadDim / (kPieces * kParts);

  static __device__ __forceinline__ void say_full() {
    cutlass::arch::NamedBarrier::arrive(kThreads, kFull);
  }
  static __device__ __forceinline__ void await_full() {
    cutlass::arch::NamedBarrier::sync(kThreads, kFull);
  }
  static __device__ __forceinline__ void say_free() {
    cutlass::arch::NamedBarrier::arrive(kThreads, kFree);
  }
  static __device__ __forceinline__ void await_free() {
    cutlass::arch::NamedBarrier::sync(kThreads, kFree);
  }
};

// Work is claimed in the order of its number, also by CTAs that start late: who waits for its turn
// to add to dQ waits for lower numbers, which have been claimed.
template <typename Traits>
__device__ __forceinline__ void claim_work(const BackwardParams<float>& params,
                                           const BackwardRows& rows, int works,
                                           typename Traits::SharedStorage& shared) {
  for (int turn = 0;; ++turn) {
    LoadBarrier& full = shared.work_ring.wait_empty(turn);
    // Not before it is needed, so that work goes to who is free. In order it must also begin soon:
    // others wait for it.
    if (turn > 0) {
      if (params.deterministic) {
        shared.work_ring.wait_released(turn - 1);
      } else {
        shared.loaded.wait((turn - 1) % 2);
      }
    }
    const int slot = shared.work_ring.stage(turn);
    const int number = atomicAdd(rows.next_work, 1);
    const bool is_end = number >= works;
    shared.is_end[slot] = is_end;
    if (!is_end) shared.work[slot] = KeyWork::of(params, rows, Traits::kBlockN, number);
    full.arrive();
    if (is_end) return;
  }
}

// Adds to dQ what the consumers put in shared memory, by one warp. The copy engine does the adding:
// neither the consumers nor what else they load waits for it.
template <typename Traits>
__device__ __forceinline__ void add_query_gradients(const BackwardParams<float>& params,
                                                    const BackwardRows& rows,
                                                    typename Traits::SharedStorage& shared) {
  using Handover = QueryGradHandover<Traits>;
  for (int turn = 0;; ++turn) {
    shared.work_ring.wait_full(turn);
    const int slot = shared.work_ring.stage(turn);
    if (shared.is_end[slot]) return;
    const KeyWork& work = shared.work[slot];
    RowStep step{work.head_k * work.group, work.row_tiles.begin};
    for (int left = work.row_tiles.size() * work.group; left > 0; --left) {
#pragma unroll 1
      for (int part = 0; part < Handover::kParts; ++part) {
        Handover::say_free();
        Handover::await_full();
        if (thread_index_again() % 32 == 0) {
          const auto order = OrderedAdds::of(params, rows, work, step, Traits::kBlockN);
          if (params.deterministic && part == 0) order.wait_for_turn();
          // In pieces, between which the copy engine loads the next tiles.
          float* const dq = rows.dq_of(step.number(rows, work)) + part * Handover::kPiece;
#pragma unroll 1
          for (int i = 0; i < Handover::kPieces; ++i) {
            add_bulk(dq + i * Handover::kParts * Handover::kPiece, shared.dq + i * Handover::kPiece,
                     Handover::kPiece * sizeof(float));
          }
          cute::tma_store_arrive();
          if (params.deterministic && part == Handover::kParts - 1) {
            bulk_wait_written();
            order.pass_on();
          } else {
            cute::tma_store_wait<0>();
          }
        }
        __syncwarp();
      }
      step.advance(work);
    }
    shared.work_ring.release(turn);
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
      if (shared_.is_end[slot]) return;
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
      shared_.work_ring.release(turn_);
      if (is_first_lane()) shared_.loaded.arrive();
    }
  }

 private:
  __device__ __forceinline__ void load_work(const KeyWork& work) {
    load_keys(launch_.k, shared_.k_ring, shared_.k, work);
    RowStep step{work.head_k * work.group, work.row_tiles.begin};
    load_q(work, step);
    load_keys(launch_.v, shared_.v_ring, shared_.v, work);
    load_dout(work, step);
    for (int left = work.row_tiles.size() * work.group - 1; left > 0; --left) {
      ++row_count_;
      step.advance(work);
      load_q(work, step);
      load_dout(work, step);
    }
    ++row_count_;
  }

  static __device__ __forceinline__ bool is_first_lane() { return thread_index_again() % 32 == 0; }

  // ---- tiles

  // What K and V of keys that nobody sees in front of a tile, or q and dO of rows without keys or
  // weight, hold must not enter a product. Such tiles are rare; they are cleared before anyone is
  // told that they are there.
  template <class Issue, class Clear>
  __device__ __forceinline__ void load(LoadBarrier& full, int bytes, bool must_clear,
                                       const Issue& issue, const Clear& clear) {
    LoadBarrier& barrier = must_clear ? shared_.uncleared : full;
    if (is_first_lane()) {
      barrier.arrive_and_expect_tx(bytes);
      issue(barrier);
    }
    if (must_clear) {
      shared_.uncleared.wait(uncleared_count_++ % 2);
      clear();
      cutlass::arch::fence_view_async_shared();
      __syncwarp();
      if (is_first_lane()) full.arrive();
    }
    __syncwarp();
  }

  template <int kRows, int kSwizzleColumns, class MustClear>
  __device__ __forceinline__ static void clear_rows(Element* tile, const MustClear& must_clear) {
    constexpr int kPieces = kSwizzleColumns / 8;
    for (int r = static_cast<int>(threadIdx.x) % 32; r < kRows; r += 32) {
      if (!must_clear(r)) continue;
      for (int block = 0; block < kHeadDim / kSwizzleColumns; ++block) {
        auto* row = reinterpret_cast<uint4*>(tile + (block * kRows + r) * kSwizzleColumns);
        for (int i = 0; i < kPieces; ++i) row[i] = uint4{};
      }
    }
  }

  template <class Ring, class Buffers>
  __device__ __forceinline__ void load_keys(const CUtensorMap& map, Ring& ring, Buffers& buffer,
                                            const KeyWork& work) {
    constexpr int kSwizzle = Traits::kSwizzleColumnsK;
    const int first_key = work.keys.first_row;
    const TileCoordinates at{work.head_k,
                             static_cast<int>(work.keys.sequence.first_row) + first_key,
                             work.visible_keys.end - first_key,
                             params_.problem.cu_seqlens_k == nullptr ? work.keys.index : 0};
    const int first_visible = work.visible_keys.begin - first_key;
    load(
        ring.wait_empty(turn_), sizeof(buffer), first_visible > 0,
        [&](LoadBarrier& barrier) {
          load_tile<kHeadDim, kSwizzle>(map, barrier, buffer, kBlockN * kSwizzle, kBlockN, at);
        },
        [&] { clear_rows<kBlockN, kSwizzle>(buffer, [&](int r) { return r < first_visible; }); });
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

  __device__ __forceinline__ void clear_rows_of(Element* tile, const KeyWork& work,
                                                const RowStep& step) const {
    const int first_with_keys = work.rows_with_keys.begin - step.tile * kBlockM;
    const auto careful = CarefulRows::of(params_, rows_, work, step);
    clear_rows<kBlockM, Traits::kSwizzleColumns>(
        tile, [&](int r) { return r < first_with_keys || (needs_care_ && careful.must_clear(r)); });
  }

  // Q and the statistics of its rows.
  __device__ __forceinline__ void load_q(const KeyWork& work, const RowStep& step) {
    const Statistics* from = rows_.statistics_of<kBlockM>(step.number(rows_, work));
    needs_care_ = from->needs_care != 0;
    must_clear_ = needs_care_ || step.tile * kBlockM < work.rows_with_keys.begin;
    LoadBarrier& full = shared_.q_ring.wait_empty(row_count_);
    const int stage = shared_.q_ring.stage(row_count_);
    Statistics& statistics = shared_.statistics[stage];
    load(
        full, sizeof(shared_.q[0]) + sizeof(Statistics), must_clear_,
        [&](LoadBarrier& barrier) {
          load_rows(launch_.q, barrier, shared_.q[stage], work, step);
          cute::SM90_BULK_COPY_G2S::copy(from, reinterpret_cast<uint64_t*>(&barrier), &statistics,
                                         sizeof(Statistics));
        },
        [&] {
          clear_rows_of(shared_.q[stage], work, step);
          if (!needs_care_) return;
          const auto careful = CarefulRows::of(params_, rows_, work, step);
          for (int r = static_cast<int>(threadIdx.x) % 32; r < kBlockM; r += 32) {
            shared_.careful[stage][r] = careful.divisor(r);
          }
        });
  }

  // Of the same step as the last load_q.
  __device__ __forceinline__ void load_dout(const KeyWork& work, const RowStep& step) {
    LoadBarrier& full = shared_.dout_ring.wait_empty(row_count_);
    Element* const tile = shared_.dout[shared_.dout_ring.stage(row_count_)];
    load(
        full, sizeof(shared_.dout[0]), must_clear_,
        [&](LoadBarrier& barrier) { load_rows(launch_.dout, barrier, tile, work, step); },
        [&] { clear_rows_of(tile, work, step); });
  }

  const BackwardParams<float>& params_;
  const BackwardRows& rows_;
  const BackwardLaunch& launch_;
  SharedStorage& shared_;
  bool needs_care_;
  bool must_clear_;
  int turn_ = 0;  // of key tiles
  int row_count_ = 0;
  uint32_t uncleared_count_ = 0;
};

}  // namespace neginf::sm90
