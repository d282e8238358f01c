// How dQ gets from the consumers of the sm90 backward to memory: a warp lets the copy engine add
// what they put in shared memory. Neither the consumers nor what else they load waits for it.
#pragma once

#include "../common/backward_rows.h"
#include "../common/backward_work.cuh"
#include "../common/thread_index.h"
#include "backward_traits.cuh"
#include "backward_works.cuh"
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

// When a CTA may write to a tile of dQ, by a word of memory that CTAs share. Who comes first
// stores, so that nobody need have cleared it; others add once that is in memory, and if
// deterministic one after the other. If dQ was cleared and any order will do, there is nothing to
// wait for.
//
// kTiles neighbouring tiles share a turn.
template <int kTiles>
class QueryGradTurn {
 public:
  QueryGradTurn() = default;
  __device__ __forceinline__ QueryGradTurn(const BackwardParams<float>& params,
                                           const BackwardRows& rows, const KeyWork& work,
                                           const RowStep& step, int block_n) {
    if (!rows.first_stores) return;
    const int first_tile = step.tile / kTiles * kTiles;
    word_ = RowStep{step.head, first_tile}.number(rows, work);
    if (params.deterministic) {
      const int first_row = first_tile * rows.tile_rows;
      turn_ = order_of_adding(work, {first_row, first_row + kTiles * rows.tile_rows}, block_n);
    }
  }

  __device__ __forceinline__ bool is_same_as(const QueryGradTurn& other) const {
    return word_ == other.word_;
  }

  // Passes on the turn before, once what was written in it is in memory, and waits for this one.
  __device__ __forceinline__ void take_after(const QueryGradTurn& before,
                                             const BackwardRows& rows) {
    int* const word = rows.adds + word_;
    if (turn_ > 0) {  // asked for while the other one is passed on
      int written = load_relaxed(word);
      before.pass_on(rows);
      if (before.turn_ == kAny) fence_gpu();
      while (written != turn_) written = load_acquire(word);
    } else {
      before.pass_on(rows);
      if (turn_ == kAny && word_ != kNoWord) take_if_first(word);
    }
    fence_async_global();
  }

  // Whether nobody has written to this tile, once the turn is taken. Who comes later in the order
  // may be the first for some tiles of a turn.
  __device__ __forceinline__ bool is_first(const BackwardRows& rows, const KeyWork& work,
                                           const RowStep& step, int block_n) const {
    if (kTiles == 1 || turn_ <= 0) return turn_ == 0;
    const int first_row = step.tile * rows.tile_rows;
    return order_of_adding(work, {first_row, first_row + rows.tile_rows}, block_n) == 0;
  }

 private:
  __device__ __forceinline__ void pass_on(const BackwardRows& rows) const {
    if (turn_ == kAny) return;  // nobody waits for who was not the first
    bulk_wait_written();
    fence_gpu();
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(rows.adds + word_), "r"(turn_ + 1)
                 : "memory");
  }

  __device__ __forceinline__ void take_if_first(int* word) {
    int found;
    do found = compare_and_swap(word, kNobody, kTaken);
    while (found == kTaken);
    if (found == kNobody) turn_ = 0;
  }

  // The word: how many have written, or if in any order, whether anyone has.
  static constexpr int kNobody = 0;
  static constexpr int kTaken = -1;  // by the first one, who has yet to write

  static constexpr int kNoWord = -1;
  static constexpr int kAny = -1;

  // What was read before is acquired, what is written after is released.
  static __device__ __forceinline__ void fence_gpu() {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
  }

  static __device__ __forceinline__ int load_relaxed(const int* from) {
    int value;
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
  }

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
  using Turn = QueryGradTurn<Traits::Tile::kQueryGradTilesOfTurn>;

 public:
  __device__ __forceinline__ QueryGradAdder(const BackwardParams<float>& params,
                                            const BackwardRows& rows, SharedStorage& shared)
      : params_(params), rows_(rows), shared_(shared) {}

  __device__ __forceinline__ void run() {
    for_each_work(shared_, [&](const KeyWork& work, int) {
      for_each_step(work, [&](const RowStep& step) {
#pragma unroll 1
        for (int part = 0; part < Traits::kQueryGradParts; ++part) add(work, step, part);
      });
      change_turn({});
    });
    if (is_first_lane()) cute::tma_store_wait<0>();
  }

 private:
  __device__ __forceinline__ void add(const KeyWork& work, const RowStep& step, int part) {
    await_read<1>();
    Handover::say_free(0);
    await_read<0>();
    Handover::say_free(1);
    // While the consumers are busy with what is to be added.
    if (part == 0) change_turn({params_, rows_, work, step, Traits::kBlockN});
    const bool stores = is_first_lane() && turn_.is_first(rows_, work, step, Traits::kBlockN);
    // What BackwardRows::dq_of says, by sizes that take no registers.
    float* const dq =
        rows_.dq + int64_t{step.number(rows_, work)} * (Traits::kBlockM * Traits::kHeadDim);
#pragma unroll 1
    for (int warpgroup = 0; warpgroup < Traits::kWarpgroups; ++warpgroup) {
      Handover::await_full(warpgroup);
      if (is_first_lane()) {
        const auto send = [&](const auto& send_bulk) {
        // In pieces, between which the copy engine loads the next tiles.
#pragma unroll 1
          for (int warp = 0; warp < 4; ++warp) {
            send_bulk(dq + Handover::offset(part, warpgroup, warp),
                      Handover::in_shared(shared_, warpgroup, warp),
                      Handover::kPiece * sizeof(float));
          }
        };
        // A choice for each piece takes as long as to send it.
        stores ? send(store_bulk) : send(add_bulk);
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
  __device__ __forceinline__ void change_turn(const Turn& next) {
    if (!is_first_lane() || next.is_same_as(turn_)) return;
    const Turn before = turn_;
    turn_ = next;
    turn_.take_after(before, rows_);
  }

  const BackwardParams<float>& params_;
  const BackwardRows& rows_;
  SharedStorage& shared_;
  Turn turn_;
};

}  // namespace neginf::sm90
