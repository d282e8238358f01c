// Slices of decode that one lane loads, by a tensor map. sm80/decode_loader.cuh says what they are.
#pragma once

#include "../common/thread_index.h"
#include "../params.h"
#include "tensor_map.h"
#include "tma.cuh"

namespace neginf::sm90 {

// Of the cache, for the kernel.
struct SliceMaps {
  bool are_usable;
  CUtensorMap k, v;

  template <typename Tile>
  static SliceMaps of(const DecodeParams<float>& params, DType dtype) {
    SliceMaps maps{};
    const Problem<float>& problem = params.problem;
    maps.are_usable =
        encode<Tile>(maps.k, dtype, params.k, params.k_strides, params, problem.head_dim) &&
        encode<Tile>(maps.v, dtype, params.v, params.v_strides, params, problem.head_dim_v);
    return maps;
  }

 private:
  // Dimensions: column in its block, row, block, head, entry. So one instruction fetches a slice as
  // SharedTile has it, block after block. Whether there is such a map.
  template <typename Tile>
  static bool encode(CUtensorMap& map, DType dtype, const void* tensor, const Strides& strides,
                     const DecodeParams<float>& params, int head_dim) {
    constexpr int kWidth = 64;
    const KeyCache& cache = params.cache;
    const int heads = params.problem.num_heads_k;
    const bool is_one_block = head_dim <= kWidth;
    if (cache.num_entries == 0 || cache.entry_rows == 0) return false;
    // From pages of 16 keys a copy takes 2 % longer than threads.
    if (cache.page_table != nullptr && cache.entry_rows % Tile::kBlockN != 0) return false;
    if (!is_one_block && head_dim % kWidth != 0) return false;
    const cuuint64_t dims[] = {static_cast<cuuint64_t>(is_one_block ? head_dim : kWidth),
                               static_cast<cuuint64_t>(cache.entry_rows),
                               static_cast<cuuint64_t>(is_one_block ? 1 : head_dim / kWidth),
                               static_cast<cuuint64_t>(heads),
                               static_cast<cuuint64_t>(cache.num_entries)};
    const cuuint64_t byte_strides[] = {byte_stride(strides.row, cache.entry_rows), 2 * kWidth,
                                       byte_stride(strides.head, heads),
                                       byte_stride(strides.batch, cache.num_entries)};
    const cuuint32_t box[] = {kWidth, Tile::kKeys, Tile::kHeadDim / kWidth, 1, 1};
    // Promoted to 256 bytes, all is 5 % slower.
    return encode_map(map, dtype, tensor, dims, byte_strides, box,
                      CU_TENSOR_MAP_L2_PROMOTION_NONE) == CUDA_SUCCESS;
  }
};

// Of a warp, which counts the loads of each stage. A barrier completes for every slice, also for
// one that the lanes load themselves.
template <int kStages>
class SliceCopies {
 public:
  using Maps = SliceMaps;
  struct Barriers {
    LoadBarrier full[kStages];
  };

  __device__ __forceinline__ SliceCopies(const Maps& maps, Barriers& barriers)
      : maps_(maps), barriers_(barriers) {
    if (is_first_lane()) {
      CUTE_UNROLL
      for (LoadBarrier& full : barriers.full) full.init(1);
      cutlass::arch::fence_barrier_init();
      cute::prefetch_tma_descriptor(&maps.k);
      cute::prefetch_tma_descriptor(&maps.v);
    }
    __syncwarp();
  }

  __device__ __forceinline__ bool are_usable() const { return maps_.are_usable; }

  // A slice of which every key is visible, from `row` of an entry that exists on.
  template <class Slice>
  __device__ __forceinline__ void issue(const Slice& slice, int stage, int entry, int row,
                                        int head) {
    if (!is_first_lane()) return;
    LoadBarrier& full = barriers_.full[stage];
    full.arrive_and_expect_tx(sizeof(Slice));
    const auto load = [&](const CUtensorMap& map, const auto* to) {
      cute::SM90_TMA_LOAD_5D::copy(&map, reinterpret_cast<uint64_t*>(&full),
                                   static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                   const_cast<void*>(static_cast<const void*>(to)), 0, row, 0, head,
                                   entry);
    };
    load(maps_.k, slice.k);
    load(maps_.v, slice.v);
  }
  // One that the lanes load.
  __device__ __forceinline__ void skip(int stage) {
    if (is_first_lane()) barriers_.full[stage].arrive();
  }
  __device__ __forceinline__ void wait(int stage) {
    barriers_.full[stage].wait(phases_ >> stage & 1);
    phases_ ^= 1u << stage;
  }

  // By lanes that have written where slices go, before the next one is issued.
  static __device__ __forceinline__ void fence() { cutlass::arch::fence_view_async_shared(); }

 private:
  const Maps& maps_;
  Barriers& barriers_;
  unsigned phases_ = 0;  // bit s: of the next wait for stage s
};

}  // namespace neginf::sm90
