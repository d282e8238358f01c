// Attention forward with WGMMA and the tensor memory accelerator, for sm90.
//
// A CTA works on one tile of kBlockM query rows after the other (tile_order.h) and on their keys by
// tiles of kBlockN. The scheduler says what the next tile of rows is, a loader thread fetches its
// Q, K and V, and consumer warpgroups multiply. Each of these owns 64 of the rows from S to O,
// so that the softmax needs no exchange beyond a quad, and passes over the key tiles that only the
// others' rows see.
//
// clang-format off
//   scheduler    work(0)   work(1)   ...                              full: it is there
//   loader       K(0) Q | K(1) V(0) | ... | K'(0) V(n-1) Q' | ...      empty: all its readers
//   shared       work[4]   sQ[2]   sK[2]   sV[2]                             are past it
//   consumer     S = Q K^T -> mask, softmax -> P (registers) -> O += P V -> sQ, lse
//   storer       sQ -> out
//
// (consumers in forward_consumer.cuh, the others in forward_producers.cuh)
//
// Inside a warpgroup, S(t+1) and O(t) are issued together; at the end of a row tile the next one's
// S(0) takes that place:
//
//   tensor cores   S(1) O(0) |      | S(2) O(1) | ... | O(n-1) S'(0) |           | S'(1) O'(0) | ...
//   arithmetic               | P(1) |           |     | lse          | out P'(0) |
// clang-format on
//
// and the other warpgroups multiply while this one does arithmetic. To issue a product lasts about
// as long as those before it run, so arithmetic begins when O(t) is nearly there. A row tile
// without keys goes through the same epilogue as all others.
//
// O leaves through the shared memory of Q (leave_rows, store_tiles), or straight from the
// accumulators where there is no Q to spare or packed heads make rows of a tile lie apart
// (store_rows).
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cute/tensor.hpp>
#include <limits>

#include "../common/cuda_check.h"
#include "../common/forward_work.h"
#include "../common/shared_memory.h"
#include "../kernels.h"
#include "forward_consumer.cuh"
#include "forward_producers.cuh"
#include "forward_traits.cuh"
#include "schedule.h"

namespace neginf::sm90 {

using namespace cute;

// Rows of a tile that packed heads leave over: no load writes them, and what lies there would sway
// the softmax of the warp by a rounding.
template <typename Traits>
__device__ __forceinline__ void clear_unused_rows(const QueryPacking& packing,
                                                  typename Traits::SharedStorage& shared) {
  using Element = typename Traits::Element;
  constexpr int kRowBlocks = Traits::kHeadDim / Traits::kSwizzleColumns * Traits::kStagesQ;
  const int first = packing.heads * packing.positions * Traits::kSwizzleColumns;
  constexpr int kEnd = Traits::kBlockM * Traits::kSwizzleColumns;
  for (int block = 0; block < kRowBlocks; ++block) {
    for (int i = first + static_cast<int>(threadIdx.x); i < kEnd; i += Traits::kThreads) {
      shared.q[0][block * kEnd + i] = Element(0);
    }
  }
  cutlass::arch::fence_view_async_shared();
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams<float> params,
                   const __grid_constant__ Launch launch) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(shared_memory);

  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&launch.q, &launch.k, &launch.v}) prefetch_tma_descriptor(map);
    constexpr int kConsumerWarps = 4 * Traits::kWarpgroups;
    constexpr int kConsumers = 32 * kConsumerWarps;
    constexpr bool kHasStorer = Traits::kStoresThroughQ;
    shared.q_ring.init(kHasStorer ? 1 : kConsumerWarps);
    shared.out_ring.init(1, kConsumers);
    shared.k_ring.init(kConsumerWarps);
    shared.v_ring.init(kConsumerWarps);
    // Read by threads, the loader's and the storer's among them.
    shared.work_ring.init(kConsumers + 1 + kHasStorer, Traits::kWarpgroups);
    cutlass::arch::fence_barrier_init();
  }
  clear_unused_rows<Traits>(launch.schedule.grid.packing, shared);
  __syncthreads();
  if (threadIdx.x < 128) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    const int warp = cutlass::canonical_warp_idx_sync();
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (warp == 0) {
      if (lane == 0) load_tiles<Traits>(params.problem, launch, shared);
    } else if (warp == 1) {
      if (lane < Traits::kWarpgroups) {
        schedule_work<Traits>(params, launch.schedule, lane, shared);
      }
    } else if (warp == 2 && Traits::kStoresThroughQ) {
      if (lane == 0) store_tiles<Traits>(params, launch, shared);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    Consumer<Traits>(params, launch, shared).run();
  }
}

// Whether rows see so many keys that a LongForwardTile is the better one. Splits have none: they
// are decided on by the tiles of the others (forward_block).
template <typename Tile>
bool is_long(const ForwardParams<float>& params) {
  const MeanLengths mean = MeanLengths::of(params.problem);
  return params.num_splits == 1 && mean.rows >= Tile::kFromRows &&
         mean.keys_per_row >= Tile::kFromKeys &&
         (!Tile::kHalvesLast || params.problem.window_right >= 0);
}

// Pointers are aligned to 16 bytes, head_dim, head_dim_v and the strides of row, head and batch are
// multiples of 8 elements; head_dim <= kHeadDim, head_dim_v <= kHeadDimV.
template <typename Traits>
void launch_forward(const ForwardParams<float>& params) {
  constexpr DType kDType =
      std::is_same_v<typename Traits::Element, half_t> ? DType::float16 : DType::bfloat16;
  const Problem<float>& problem = params.problem;
  Launch launch;
  launch.schedule = Schedule::of(params, Traits::kBlockM, Traits::kBlockN);
  const int ctas = launch.schedule.order.ctas(params.num_sms);
  if (ctas == 0) return;
  const QueryPacking& packing = launch.schedule.grid.packing;
  const bool q_is_packed = problem.cu_seqlens_q != nullptr;
  const bool k_is_packed = problem.cu_seqlens_k != nullptr;
  launch.q = tensor_map(params.q, kDType, params.q_strides, q_is_packed ? 1 : problem.batch,
                        problem.total_q, problem.num_heads, problem.head_dim,
                        {Traits::kSwizzleColumns, packing.heads, packing.positions});
  const TensorBox keys{Traits::kSwizzleColumns, 1, Traits::kBlockN};
  const int batch_k = k_is_packed ? 1 : problem.batch;
  launch.k = tensor_map(params.k, kDType, params.k_strides, batch_k, problem.total_k,
                        problem.num_heads_k, problem.head_dim, keys);
  launch.v = tensor_map(params.v, kDType, params.v_strides, batch_k, problem.total_k,
                        problem.num_heads_k, problem.head_dim_v, keys);

  if constexpr (Traits::kStoresThroughQ) {
    launch.out = tensor_map(params.out, kDType, params.out_strides, q_is_packed ? 1 : problem.batch,
                            problem.total_q, problem.num_heads, problem.head_dim_v,
                            {Traits::kSwizzleColumns, 1, Traits::kBlockM});
  }

  constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  allow_shared_memory<forward_kernel<Traits>>(kSharedBytes);
  forward_kernel<Traits><<<ctas, Traits::kThreads, kSharedBytes, params.stream>>>(params, launch);
  cuda_check(cudaGetLastError(), "sm90 forward");
}

template <typename Element, int kHeadDim>
void run_forward(const ForwardParams<float>& params) {
  const bool modifies_scores =
      params.problem.softcap != 0.f || params.problem.alibi_slopes != nullptr;
  dispatch_forward_tile<kHeadDim>(
      params.problem.head_dim_v, modifies_scores,
      [&](auto tile) { return is_long<decltype(tile)>(params); },
      [&](auto tile, auto kHeadDimV, auto kModifiesScores) {
        launch_forward<
            ForwardTraits<Element, kHeadDim, kHeadDimV, decltype(tile), kModifiesScores>>(params);
      });
}

template <typename Element, int kHeadDim>
using RegisterForward = RegisterKernel<ForwardParams<float>, run_forward<Element, kHeadDim>>;

}  // namespace neginf::sm90
