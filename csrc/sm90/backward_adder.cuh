// How dQ gets from the consumers of the sm90 backward to memory: a warp lets the copy engine add
// what they put in shared memory. Neither the consumers nor what else they load waits for it.
#pragma once

#include "../common/backward_rows.h"
#include "../common/backward_work.cuh"
#include "../common/thread_index.h"
#include "backward_traits.cuh"
#include "named_barrier.cuh"
#include "tma.cuh"

namespace neginf::sm90 {

// Passes a warpgroup's buffer for dQ to the adder and back. So that warpgroups need not wait for
// each other, each has its own.
template <typename Traits>
struct QueryGradHandover {
  static constexpr int kThreads = 128 + 32;
  // A warp's part of dQ, which is contiguous in shared memory and in memory.
  static constexpr int kPieces = 4 * Traits::kWarpgroups;
  static constexpr int kPiece = Traits::kBlockM * Traits::kPartColumns / kPieces;

  static __device__ __forceinline__ void say_full(int warpgroup) {
    barrier_arrive(BackwardBarrier::kQueryGradFull + warpgroup, kThreads);
  }
  static __device__ __forceinline__ void await_full(int warpgroup) {
    barrier_sync(BackwardBarrier::kQueryGradFull + warpgroup, kThreads);
  }
  static __device__ __forceinline__ void say_free(int warpgroup) {
    barrier_arrive(BackwardBarrier::kQueryGradFree + warpgroup, kThreads);
  }
  static __device__ __forceinline__ void await_free(int warpgroup) {
    barrier_sync(BackwardBarrier::kQueryGradFree + warpgroup, kThreads);
  }

  static __device__ __forceinline__ float* in_shared(typename Traits::SharedStorage& shared,
                                                     int warpgroup, int warp) {
    return shared.dq + (4 * warpgroup + warp) * kPiece;
  }

  // Where the tile has it: rows before columns, or if transposed the other way round. Warps have
  // what comes first, and so have warpgroups, unless they divide the columns.
  static __device__ __forceinline__ int offset(int part, int warpgroup, int warp) {
    if constexpr (Traits::kCutsRows || Traits::kTransposesDq) {
      return (4 * warpgroup + warp) * kPiece;
    } else {
      return ((warp * Traits::kQueryGradParts + part) * Traits::kWarpgroups + warpgroup) * kPiece;
    }
  }
};

template <typename Traits>
class QueryGradAdder {
  using Handover = QueryGradHandover<Traits>;
  using SharedStorage = typename Traits::SharedStorage;

 public:
  __device__ __forceinline__ QueryGradAdder(const BackwardParams<float>& params,
                                            const BackwardRows& rows, SharedStorage& shared)
      : params_(params), rows_(rows), shared_(shared) {}

  __device__ __forceinline__ void run() {
    for (int turn = 0;; ++turn) {
      shared_.work_ring.wait_full(turn);
      const int slot = shared_.work_ring.stage(turn);
      if (shared_.is_end[slot]) break;
      const KeyWork& work = shared_.work[slot];
      RowStep step = RowStep::first(work);
      for (int left = work.row_tiles.size() * work.group; left > 0; --left) {
#pragma unroll 1
        for (int part = 0; part < Traits::kQueryGradParts; ++part) add(work, step, part);
        step.advance(work);
      }
      pass_on_turn();
      __syncwarp();
      shared_.work_ring.release(turn);
    }
    if (is_first_lane()) cute::tma_store_wait<0>();
  }

 private:
  static __device__ __forceinline__ bool is_first_lane() { return thread_index_again() % 32 == 0; }

  __device__ __forceinline__ void add(const KeyWork& work, const RowStep& step, int part) {
    await_read<1>();
    Handover::say_free(0);
    await_read<0>();
    Handover::say_free(1);
    // The consumers can go on; that the last sum is in memory is for others to know.
    if (part == 0) pass_on_turn();
    const auto order = OrderedAdds::of(params_, rows_, work, step, Traits::kBlockN);
    float* const dq = rows_.dq_of(step.number(rows_, work));
#pragma unroll 1
    for (int warpgroup = 0; warpgroup < Traits::kWarpgroups; ++warpgroup) {
      Handover::await_full(warpgroup);
      if (is_first_lane()) {
        if (params_.deterministic && part == 0 && warpgroup == 0) {
          order.wait_for_turn();
          fence_async_global();
        }
        // In pieces, between which the copy engine loads the next tiles.
#pragma unroll 1
        for (int warp = 0; warp < 4; ++warp) {
          add_bulk(dq + Handover::offset(part, warpgroup, warp),
                   Handover::in_shared(shared_, warpgroup, warp), Handover::kPiece * sizeof(float));
        }
        cute::tma_store_arrive();
      }
      __syncwarp();
    }
    turn_of_ = order;
  }

  // Until all but the last kStillRead adds have read shared memory.
  template <int kStillRead>
  __device__ __forceinline__ void await_read() {
    if (is_first_lane()) cute::tma_store_wait<kStillRead>();
    __syncwarp();
  }

  // That of the last row tile, to which all has been added.
  __device__ __forceinline__ void pass_on_turn() {
    if (turn_of_.adds == nullptr) return;
    if (is_first_lane()) {
      bulk_wait_written();
      turn_of_.pass_on();
    }
    turn_of_ = {nullptr, 0};
  }

  const BackwardParams<float>& params_;
  const BackwardRows& rows_;
  SharedStorage& shared_;
  OrderedAdds turn_of_{nullptr, 0};  // null: nobody's
};

}  // namespace neginf::sm90
