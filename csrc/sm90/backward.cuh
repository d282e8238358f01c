// Attention backward with WGMMA and the tensor memory accelerator, for sm90.
//
// A CTA works on one tile of kBlockN keys of a key head after the other, and for each on the tiles
// of kBlockM query rows that see any of them, of every query head in the group. Everything of size
// keys x rows is computed transposed, so that P^T and dS^T are operands as they lie in
// accumulators:
//
//     S^T = K Q^T          P = exp(S - L)         dV += P^T dO
//     dP^T = V dO^T        dS = P (dP - delta)    dK += dS^T Q      dQ += dS K
//
//   claimer      next work, by an atomic counter                   backward_loader.cuh
//   loader       K Q V dO | Q dO | Q dO | ...   TMA; notes of what a step is
//   clearer      rows and keys of those that must not be read, which are rare
//                  |
//   shared       work[2]  sK sV  sQ[2, 3] statistics, notes  sdO[1 to 3]  sdS[2]  sdQ
//                  |                                                        ^      |
//   consumers    two warpgroups                                      -------'------'
//                  up to head_dim 128 each has 64 keys             backward_narrow.cuh
//                  above one has S^T, dV, the other dP^T, dK       backward_wide.cuh
//                  |
//   adder        sdQ -> memory, in order if deterministic          backward_adder.cuh
//
// Softcap and ALiBi are a second kernel, as in the forward.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cute/tensor.hpp>
#include <limits>

#include "../common/backward_rows.h"
#include "../common/cuda_check.h"
#include "../common/shared_memory.h"
#include "../kernels.h"
#include "backward_adder.cuh"
#include "backward_loader.cuh"
#include "backward_narrow.cuh"
#include "backward_traits.cuh"
#include "backward_wide.cuh"

namespace neginf::sm90 {

using namespace cute;

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams<float> params,
                    const __grid_constant__ BackwardRows rows,
                    const __grid_constant__ BackwardLaunch launch) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(shared_memory);

  if (threadIdx.x == 0) {
    constexpr int kConsumerWarps = 4 * Traits::kWarpgroups;
    shared.work_ring.init(Traits::kWorkReaders);
    shared.loaded.init(1);
    shared.k_ring.init(kConsumerWarps);
    shared.v_ring.init(kConsumerWarps);
    shared.q_ring.init();
    shared.dout_ring.init(kConsumerWarps);
    shared.uncleared.init(1);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    if (threadIdx.x < 32) {
      Loader<Traits>(params, rows, launch, shared).run();
    } else if (threadIdx.x < 64) {
      claim_work<Traits>(params, rows, launch.works, shared);
    } else if (threadIdx.x < 96) {
      QueryGradAdder<Traits>(params, rows, shared).run();
    } else {
      Clearer<Traits>(shared).run();
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    const int warpgroup = uniform(thread_index() / 128) - 1;
    if constexpr (!Traits::kIsWide) {
      NarrowConsumer<Traits>(params, shared, warpgroup).run();
    } else if (warpgroup == 0) {
      ValuesConsumer<Traits>(params, shared, 0).run();
    } else {
      KeysConsumer<Traits>(params, shared, 1).run();
    }
  }
}

// The average length of the sequences.
inline int64_t rows_of_sequence(const Problem<float>& problem) {
  return problem.cu_seqlens_q == nullptr ? problem.total_q
                                         : problem.total_q / std::max(1, problem.batch);
}

// Whether LongBackwardTile is the better one.
inline bool is_long(const Problem<float>& problem) {
  return rows_of_sequence(problem) >= (problem.window_right < 0 ? kLongRows : kLongRowsCausal);
}

// Whether dQ is stored by who comes first rather than cleared before. That takes time in each step,
// which a wide one does not have. Where sums are ordered all is at hand for it.
template <typename Traits>
bool first_stores(const BackwardParams<float>& params) {
  return params.deterministic ||
         (!Traits::kIsWide && rows_of_sequence(params.problem) <= kMostRowsToStoreFirst);
}

// Pointers are aligned to 16 bytes, head_dim and the strides of row, head and batch are multiples
// of 8 elements; head_dim_v <= head_dim <= kHeadDim.
template <typename Traits>
void launch_backward(const BackwardParams<float>& params, const BackwardRows& rows) {
  constexpr DType kDType = Traits::kDType;
  const Problem<float>& problem = params.problem;
  const int64_t works = num_row_tiles(keys_as_rows(problem), Traits::kBlockN) * problem.num_heads_k;
  if (works == 0) return;
  if (works > std::numeric_limits<int>::max() / 2) {
    throw std::runtime_error("neginf: sm90 backward: too many key tiles x heads: " +
                             std::to_string(works));
  }
  BackwardLaunch launch;
  launch.works = static_cast<int>(works);
  const int batch_q = problem.cu_seqlens_q != nullptr ? 1 : problem.batch;
  const int batch_k = problem.cu_seqlens_k != nullptr ? 1 : problem.batch;
  const TensorBox of_rows{Traits::kSwizzleColumns, 1, Traits::kBlockM};
  const TensorBox of_keys{Traits::kSwizzleColumnsK, 1, Traits::kBlockN};
  launch.q = tensor_map(params.q, kDType, params.q_strides, batch_q, problem.total_q,
                        problem.num_heads, problem.head_dim, of_rows);
  launch.dout = tensor_map(params.dout, kDType, params.dout_strides, batch_q, problem.total_q,
                           problem.num_heads, problem.head_dim_v, of_rows);
  launch.k = tensor_map(params.k, kDType, params.k_strides, batch_k, problem.total_k,
                        problem.num_heads_k, problem.head_dim, of_keys);
  launch.v = tensor_map(params.v, kDType, params.v_strides, batch_k, problem.total_k,
                        problem.num_heads_k, problem.head_dim_v, of_keys);

  constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  allow_shared_memory<backward_kernel<Traits>>(kSharedBytes);
  const int ctas = std::min(launch.works, params.num_sms);
  backward_kernel<Traits>
      <<<ctas, Traits::kThreads, kSharedBytes, params.stream>>>(params, rows, launch);
  cuda_check(cudaGetLastError(), "sm90 backward");
}

template <typename Traits>
void run_tiles(const BackwardParams<float>& params) {
  const BackwardRows::Tile tile{Traits::kBlockM, Traits::kHeadDim, Traits::kTransposesDq,
                                first_stores<Traits>(params)};
  run_around_main(params, tile, Traits::kDType, launch_backward<Traits>);
}

template <typename Element, int kHeadDim>
void run_backward(const BackwardParams<float>& params) {
  using Plain = BackwardTraits<Element, kHeadDim, BackwardTile<kHeadDim, false>, false>;
  using ModifiesScores = BackwardTraits<Element, kHeadDim, BackwardTile<kHeadDim, true>, true>;
  if (params.problem.softcap != 0.f || params.problem.alibi_slopes != nullptr) {
    return run_tiles<ModifiesScores>(params);
  }
  if constexpr (kHasLongBackwardTile<kHeadDim>) {
    using Long = BackwardTraits<Element, kHeadDim, LongBackwardTile<kHeadDim>, false>;
    if (is_long(params.problem)) return run_tiles<Long>(params);
  }
  run_tiles<Plain>(params);
}

template <typename Element, int kHeadDim>
using RegisterBackward = RegisterKernel<BackwardParams<float>, run_backward<Element, kHeadDim>>;

}  // namespace neginf::sm90
