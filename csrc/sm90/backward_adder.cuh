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

// Who may write to a tile of dQ, by a word of memory. The first one stores, so that nobody need have
// cleared it; the others add once that is in memory, and in order if deterministic.
class QueryGradTurn {
 public:
  QueryGradTurn() = default;
  __device__ __forceinline__ QueryGradTurn(const BackwardParams<float>& params,
                                           const BackwardRows& rows, const KeyWork& work,
                                           const RowStep& step, int block_n)
      : tile_(step.number(rows, work)),
        turn_(params.deterministic ? order_of_adding(rows, work, step, block_n) : kAny) {}

  // Its number in BackwardRows.
  __device__ __forceinline__ int tile() const { return tile_; }

  // Whether others have stored the tile and it is the caller's turn to add, without taking it. If
  // so, it stays so.
  __device__ __forceinline__ bool can_add(const BackwardRows& rows) const {
    const int written = load_acquire(rows.adds + tile_);
    return turn_ == kAny ? written > kNobody : written == turn_;
  }

  // Whether it is the caller's turn now. If not, it may be asked again.
  __device__ __forceinline__ bool take(const BackwardRows& rows) {
    if (turn_ == kAny) {
      const int found = compare_and_swap(rows.adds + tile_, kNobody, kTaken);
      if (found == kNobody) turn_ = 0;
      return found != kTaken;
    }
    return turn_ == 0 || load_acquire(rows.adds + tile_) == turn_;
  }
  __device__ __forceinline__ bool is_first() const { return turn_ == 0; }
  // Whether anybody may wait for the caller.
  __device__ __forceinline__ bool must_pass_on() const { return turn_ != kAny; }

  // Once, when what the caller has written is in memory.
  __device__ __forceinline__ void pass_on(const BackwardRows& rows) {
    asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(rows.adds + tile_), "r"(turn_ + 1)
                 : "memory");
    turn_ = kAny;
  }

 private:
  // The word: who has written, unless in any order, when 1 is all there is to say.
  static constexpr int kNobody = 0;
  static constexpr int kTaken = -1;  // by the first one, who has yet to write
  // A turn that is not a number, and not waited for by anyone.
  static constexpr int kAny = -1;

  static __device__ __forceinline__ int compare_and_swap(int* word, int from, int to) {
    int found;
    asm volatile("atom.acquire.gpu.global.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(found)
                 : "l"(word), "r"(from), "r"(to)
                 : "memory");
    return found;
  }

  int tile_ = 0;
  int turn_ = kAny;
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
      may_add_ = 0;
      for (int left = work.row_tiles.size() * work.group; left > 0; --left) {
        look_ahead(work, step, left);
#pragma unroll 1
        for (int part = 0; part < Traits::kQueryGradParts; ++part) add(work, step, part);
        step.advance(work);
      }
      if (is_first_lane()) pass_on(turn_);
      __syncwarp();
      shared_.work_ring.release(turn);
    }
    if (is_first_lane()) cute::tma_store_wait<0>();
  }

 private:
  static __device__ __forceinline__ bool is_first_lane() { return thread_index_again() % 32 == 0; }

  // Asks for many steps at a time whether it is their turn, as the answer takes a microsecond.
  __device__ __forceinline__ void look_ahead(const KeyWork& work, const RowStep& step, int left) {
    if (may_add_ > 0) return;
    bool may_add = false;
    const int lane = thread_index_again() % 32;
    if (lane < left) {
      may_add = QueryGradTurn(params_, rows_, work, step.later(work, lane), Traits::kBlockN)
                    .can_add(rows_);
    }
    may_add_ = __ffs(~static_cast<int>(__ballot_sync(0xffffffffu, may_add))) - 1;
    if (may_add_ < 0) may_add_ = 32;
  }

  __device__ __forceinline__ void add(const KeyWork& work, const RowStep& step, int part) {
    await_read<1>();
    Handover::say_free(0);
    await_read<0>();
    Handover::say_free(1);
    // While the consumers are busy with what is to be added.
    QueryGradTurn before;
    if (part == 0) {
      before = turn_;
      turn_ = QueryGradTurn(params_, rows_, work, step, Traits::kBlockN);
      if (is_first_lane()) {
        if (may_add_ == 0 && !turn_.take(rows_)) {
          // Who waits must not keep others waiting.
          pass_on(before);
          while (!turn_.take(rows_)) continue;
        }
        fence_async_global();
        if constexpr (!Traits::kIsWide) pass_on(before);
      }
      if (may_add_ > 0) --may_add_;
    }
#pragma unroll 1
    for (int warpgroup = 0; warpgroup < Traits::kWarpgroups; ++warpgroup) {
      Handover::await_full(warpgroup);
      if (is_first_lane()) {
        // A wide step is too short to wait for that before.
        if constexpr (Traits::kIsWide) pass_on(before);
        // What BackwardRows::dq_of says, by sizes that take no registers.
        float* const dq = rows_.dq + int64_t{turn_.tile()} * (Traits::kBlockM * Traits::kHeadDim);
        // In pieces, between which the copy engine loads the next tiles.
#pragma unroll 1
        for (int warp = 0; warp < 4; ++warp) {
          float* const to = dq + Handover::offset(part, warpgroup, warp);
          const float* const from = Handover::in_shared(shared_, warpgroup, warp);
          constexpr int kBytes = Handover::kPiece * sizeof(float);
          turn_.is_first() ? store_bulk(to, from, kBytes) : add_bulk(to, from, kBytes);
        }
        cute::tma_store_arrive();
      }
      __syncwarp();
    }
  }

  // Until all but the last kStillRead adds have read shared memory.
  template <int kStillRead>
  __device__ __forceinline__ void await_read() {
    if (is_first_lane()) cute::tma_store_wait<kStillRead>();
    __syncwarp();
  }

  // By one lane: the turn of the last row tile to which it has added.
  __device__ __forceinline__ void pass_on(QueryGradTurn& turn) const {
    if (!turn.must_pass_on()) return;
    bulk_wait_written();
    turn.pass_on(rows_);
  }

  const BackwardParams<float>& params_;
  const BackwardRows& rows_;
  SharedStorage& shared_;
  QueryGradTurn turn_;  // of the last row tile
  int may_add_ = 0;     // for so many steps, at least
};

}  // namespace neginf::sm90
