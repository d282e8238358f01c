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

// When a CTA may write to a tile of dQ, by a word of memory that CTAs share. Who comes first stores,
// so that nobody need have cleared it; others add once that is in memory, and if deterministic one
// after the other. If dQ was cleared and any order will do, there is nothing to wait for.
class QueryGradTurn {
 public:
  QueryGradTurn() = default;
  // tiles_of_turn neighbouring tiles share a turn.
  __device__ __forceinline__ QueryGradTurn(const BackwardParams<float>& params,
                                           const BackwardRows& rows, const KeyWork& work,
                                           const RowStep& step, int block_n, int tiles_of_turn) {
    if (!rows.first_stores) return;
    const int first_tile = step.tile / tiles_of_turn * tiles_of_turn;
    word_ = RowStep{step.head, first_tile}.number(rows, work);
    if (params.deterministic) {
      const int first_row = first_tile * rows.tile_rows;
      turn_ = order_of_adding(work, {first_row, first_row + tiles_of_turn * rows.tile_rows},
                              block_n);
    }
  }

  __device__ __forceinline__ bool is_same_as(const QueryGradTurn& other) const {
    return word_ == other.word_;
  }

  // Until it is the caller's turn.
  __device__ __forceinline__ void take(const BackwardRows& rows) {
    if (word_ == kNoWord) return;
    int* const word = rows.adds + word_;
    if (turn_ == kAny) {
      int found;
      do found = compare_and_swap(word, kNobody, kTaken);
      while (found == kTaken);
      if (found == kNobody) turn_ = 0;
    } else if (turn_ > 0) {
      while (load_acquire(word) != turn_) continue;
    }
    fence_async_global();
  }

  __device__ __forceinline__ bool is_first() const { return turn_ == 0; }

  // When all that the caller has written is in memory.
  __device__ __forceinline__ void pass_on(const BackwardRows& rows) const {
    if (turn_ == kAny) return;  // nobody waits for who was not the first
    bulk_wait_written();
    asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(rows.adds + word_), "r"(turn_ + 1)
                 : "memory");
  }

 private:
  // The word: how many have written, or if in any order, whether anyone has.
  static constexpr int kNobody = 0;
  static constexpr int kTaken = -1;  // by the first one, who has yet to write

  static constexpr int kNoWord = -1;
  static constexpr int kAny = -1;

  static __device__ __forceinline__ int compare_and_swap(int* word, int from, int to) {
    int found;
    asm volatile("atom.acquire.gpu.global.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(found)
                 : "l"(word), "r"(from), "r"(to)
                 : "memory");
    return found;
  }

  int word_ = kNoWord;
  int turn_ = kAny;  // how many come before
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
      change_turn({});
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
    // While the consumers are busy with what is to be added.
    if (part == 0) {
      change_turn(
          {params_, rows_, work, step, Traits::kBlockN, Traits::Tile::kQueryGradTilesOfTurn});
    }
#pragma unroll 1
    for (int warpgroup = 0; warpgroup < Traits::kWarpgroups; ++warpgroup) {
      Handover::await_full(warpgroup);
      if (is_first_lane()) {
        // What BackwardRows::dq_of says, by sizes that take no registers.
        float* const dq = rows_.dq + int64_t{step.number(rows_, work)} *
                                         (Traits::kBlockM * Traits::kHeadDim);
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

  // Passes on the last turn, if this is another one, and takes it.
  __device__ __forceinline__ void change_turn(const QueryGradTurn& next) {
    if (!is_first_lane() || next.is_same_as(turn_)) return;
    turn_.pass_on(rows_);
    turn_ = next;
    turn_.take(rows_);
  }

  const BackwardParams<float>& params_;
  const BackwardRows& rows_;
  SharedStorage& shared_;
  QueryGradTurn turn_;
};

}  // namespace neginf::sm90
