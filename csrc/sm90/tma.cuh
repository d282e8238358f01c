// Barriers in shared memory and the loads that complete on them.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/arch/copy_sm90_tma.hpp>

#include "named_barrier.cuh"
#include "tensor_map.h"

namespace neginf::sm90 {

using LoadBarrier = cutlass::arch::ClusterTransactionBarrier;  // a load has arrived
using ReadBarrier = cutlass::arch::ClusterBarrier;             // its readers are done

// A ring of kStages buffers: full[s] says that the load of buffer s has arrived, or where threads
// write it that all of them have. A role counts the tiles that it has seen; that says which buffer
// is next and which phase its barriers are in.
template <int kStages>
struct LoadRing {
  LoadBarrier full[kStages];

  static __device__ __forceinline__ int stage(int count) { return count % kStages; }
  static __device__ __forceinline__ uint32_t phase(int count) { return count / kStages % 2; }

  __device__ void init(int writers = 1) {
    for (int s = 0; s < kStages; ++s) full[s].init(writers);
  }

  __device__ __forceinline__ void wait_full(int count) { full[stage(count)].wait(phase(count)); }
  // Whether that would not wait.
  __device__ __forceinline__ bool is_full(int count) const {
    return full[stage(count)].test_wait(phase(count));
  }
  // By threads that write buffers.
  __device__ __forceinline__ void fill_by_thread(int count) { full[stage(count)].arrive(); }
};

// empty[s] says that every reader is past buffer s: warps, whose lanes wait for products together,
// or threads.
template <int kStages>
struct Ring : LoadRing<kStages> {
  using LoadRing<kStages>::stage, LoadRing<kStages>::phase;
  ReadBarrier empty[kStages];

  __device__ void init(int readers, int writers = 1) {
    LoadRing<kStages>::init(writers);
    for (int s = 0; s < kStages; ++s) empty[s].init(readers);
  }

  // The first kStages buffers are free from the start.
  __device__ __forceinline__ LoadBarrier& wait_empty(int count) {
    empty[stage(count)].wait(phase(count) ^ 1);
    return this->full[stage(count)];
  }
  __device__ __forceinline__ void release_by_thread(int count) { empty[stage(count)].arrive(); }
  // For the calling warp, all lanes of which are past the products that read the buffer. Of what
  // lanes have read themselves that says nothing.
  __device__ __forceinline__ void release(int count) {
    if (threadIdx.x % 32 == 0) empty[stage(count)].arrive();
  }
};

// A ring from which kReaders threads read themselves. Each says that it is past a buffer, by one of
// the CTA's barriers from number kFirstBarrier on, as so many would take long to arrive in shared
// memory. A warp waits for them.
template <int kStages, int kFirstBarrier, int kReaders>
struct ThreadsRing : LoadRing<kStages> {
  using LoadRing<kStages>::stage;
  static constexpr int kThreads = kReaders + 32;

  // The first kStages buffers are free from the start.
  __device__ __forceinline__ LoadBarrier& wait_empty(int count) {
    if (count >= kStages) wait_released(count - kStages);
    return this->full[stage(count)];
  }
  // Once for each buffer, also for the last ones: a barrier must not be left half complete.
  __device__ __forceinline__ void wait_released(int count) {
    barrier_sync(kFirstBarrier + stage(count), kThreads);
  }
  __device__ __forceinline__ void release(int count) {
    barrier_arrive(kFirstBarrier + stage(count), kThreads);
  }
};

struct TileCoordinates {
  int head;
  int first_row;  // of the tile in the buffer
  int rows;       // that exist; those after them become 0 or are not stored. Any number
  int batch;
};

// Calls copy(column, coordinates...) for all column blocks of a tile, as SM90_TMA_*_5D take them.
template <int kColumns, int kSwizzleColumns, class Copy>
__device__ __forceinline__ void for_each_block(int box_positions, const TileCoordinates& at,
                                               const Copy& copy) {
  const int left = at.rows < 0 ? 0 : at.rows < box_positions ? at.rows : box_positions;
  CUTE_UNROLL
  for (int column = 0; column < kColumns; column += kSwizzleColumns) {
    copy(column, at.head, box_positions - left, at.first_row + left, at.batch);
  }
}

// By one thread, which has made the barrier expect the bytes.
template <int kColumns, int kSwizzleColumns, class Element>
__device__ __forceinline__ void load_tile(const CUtensorMap& map, LoadBarrier& barrier,
                                          Element* tile, int block_elements, int box_positions,
                                          const TileCoordinates& at) {
  for_each_block<kColumns, kSwizzleColumns>(box_positions, at, [&](int column, auto... others) {
    cute::SM90_TMA_LOAD_5D::copy(&map, reinterpret_cast<uint64_t*>(&barrier),
                                 static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                 tile + column / kSwizzleColumns * block_elements, column,
                                 others...);
  });
}

// By one thread, which must wait with tma_store_wait before the tile may be written again.
template <int kColumns, int kSwizzleColumns, class Element>
__device__ __forceinline__ void store_tile(const CUtensorMap& map, const Element* tile,
                                           int block_elements, int box_positions,
                                           const TileCoordinates& at) {
  for_each_block<kColumns, kSwizzleColumns>(box_positions, at, [&](int column, auto... others) {
    cute::SM90_TMA_STORE_5D::copy(&map, tile + column / kSwizzleColumns * block_elements, column,
                                  others...);
  });
  cute::tma_store_arrive();
}

// Stores `bytes` of floats in memory, or adds them, both aligned to 16 bytes. They should stay in
// L2 until they are added to again. By one thread, which must end it with tma_store_arrive and wait
// with tma_store_wait before the source may be written again.
constexpr auto kStaysInL2 = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST);
__device__ __forceinline__ void store_bulk(float* to, const float* from, int bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(to),
      "r"(cute::cast_smem_ptr_to_uint(from)), "r"(bytes), "l"(kStaysInL2)
      : "memory");
}
__device__ __forceinline__ void add_bulk(float* to, const float* from, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32 [%0], [%1], %2, "
      "%3;" ::"l"(to),
      "r"(cute::cast_smem_ptr_to_uint(from)), "r"(bytes), "l"(kStaysInL2)
      : "memory");
}

// What others have written and the calling thread knows to be written, before what it lets the copy
// engine do to it.
__device__ __forceinline__ void fence_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Until all that the calling thread has stored or added so is in memory, before any access of its
// own.
__device__ __forceinline__ void bulk_wait_written() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace neginf::sm90
