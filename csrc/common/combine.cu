// Merges attention states in plain CUDA. Bound by memory: each row reads its states once.
#include <type_traits>

#include "../kernels.h"
#include "cuda_check.h"
#include "merge_kernel.h"

namespace neginf {
namespace {

// So few that a block for each pays: 32 rows of 128 states take 5 us instead of 9.
constexpr int64_t kFewRows = 1024;

constexpr int kBlocksPerMultiprocessor = 4;

// kStatesInFlight states at the lane's columns.
template <typename Partial, int kVector>
struct LoadedStates {
  Bits<Partial, kVector> bits[kStatesInFlight];

  // Those from `first` on that contribute, of the lanes from first_lane on; the others are zero.
  template <typename StatesOfRow>
  __device__ LoadedStates(const StatesOfRow& states, int first, int column, const Shares& shares,
                          int first_lane) {
#pragma unroll
    for (int i = 0; i < kStatesInFlight; ++i) {
      bits[i] = {};
      if (shares.contributes(first_lane + i))
        bits[i] = load<kVector>(states.out(first + i) + column);
    }
  }

  __device__ void add_to(float (&sum)[kVector], const Shares& shares, int first_lane) const {
#pragma unroll
    for (int i = 0; i < kStatesInFlight; ++i) {
      const auto share = shares.of(first_lane + i);
      float values[kVector];
      unpack<Partial>(values, bits[i]);
#pragma unroll
      for (int j = 0; j < kVector; ++j) sum[j] += share.weighted(values[j]);
    }
  }
};

// Sum over the groups of the block, in their order; what the first group gets is the whole.
template <int kVector>
__device__ __forceinline__ void sum_over_groups(float (&sum)[kVector], const LaneGroup& group) {
  __shared__ float sums[kMergeThreads][kVector + 1];
#pragma unroll
  for (int j = 0; j < kVector; ++j) sums[threadIdx.x][j] = sum[j];
  __syncthreads();
  if (group.index == 0) {
    for (int other = group.lane + group.lanes; other < kMergeThreads; other += group.lanes) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) sum[j] += sums[other][j];
    }
  }
  __syncthreads();
}

// kShared: the groups of a block share the states of one row; else each group has its own rows.
template <typename Partial, typename Out, int kVector, bool kShared, typename States>
__global__ void __launch_bounds__(kMergeThreads, kBlocksPerMultiprocessor)
    combine_kernel(const __grid_constant__ CombineParams<float> params,
                   const __grid_constant__ States all_states, const MergeGrid grid) {
  using StatesOfRow = RowStates<Partial, States>;
  const LaneGroup group(grid.log2_lanes);
  const LaneGroup holders(grid.log2_holders);
  const RowsOfBlock rows(params, kShared ? 1 : holders.count);

  const bool writes = !kShared || group.index == 0;

  const BlockRow held_row = rows.row(kShared ? 0 : holders.index);
  const auto held = HeldStates<StatesOfRow>::of(StatesOfRow(all_states, held_row),
                                                params.num_splits, group, holders);
  if (writes && held_row.exists && holders.lane == 0) {
    params.lse[held_row.offset(params.lse_strides)] = held.merged_lse();
  }

  // Which states the group takes. All groups take as many turns, the last with less to do.
  const int share =
      kShared ? (params.num_splits + group.count - 1) / group.count : params.num_splits;
  const int begin = kShared ? min(group.index * share, params.num_splits) : 0;
  const int end = min(begin + share, params.num_splits);

  // More rows than one leave a single turn.
  for (int r = 0; r < grid.rows_per_group(); ++r) {
    const BlockRow row = rows.row(kShared ? 0 : group.index * grid.rows_per_group() + r);
    const StatesOfRow states(all_states, row);
    Out* out = static_cast<Out*>(params.out) + row.offset(params.out_strides);
    const int first_lane = r << grid.log2_holders;
    for (int first = 0; first < params.head_dim; first += group.lanes * kVector) {
      // A lane past the row helps with the weights and reads what the first lane does.
      const int column = first + group.lane * kVector;
      const bool inside = column < params.head_dim;
      float sum[kVector] = {};
#pragma unroll 1
      for (int base = 0; base < share; base += holders.lanes) {
        const auto shares = held.shares(begin + base, end);
        const int count = min(holders.lanes, share - base);
#pragma unroll 1
        for (int i = 0; i < count; i += kStatesInFlight) {
          const LoadedStates<Partial, kVector> loaded(states, begin + base + i, inside ? column : 0,
                                                      shares, first_lane + i);
          loaded.add_to(sum, shares, first_lane + i);
        }
      }
      if constexpr (kShared) sum_over_groups(sum, group);
      if (writes && row.exists && inside) store(out + column, sum);
    }
  }
}

template <typename Partial, typename Out, int kVector, typename States>
void launch_combine(const CombineParams<float>& params, const States& states) {
  const int64_t rows = num_positions(params) * params.num_heads;
  if (rows == 0) return;
  MergeGrid grid = merge_grid<Partial>(params);
  auto* kernel = combine_kernel<Partial, Out, kVector, false, States>;
  // A list is too short for its states to be shared out.
  if constexpr (std::is_same_v<States, StackedStates<float>>) {
    if (rows <= kFewRows && params.num_splits > kStatesInFlight) {
      grid.log2_holders = grid.log2_lanes;
      grid.blocks = rows;
      kernel = combine_kernel<Partial, Out, kVector, true, States>;
    }
  }
  kernel<<<checked_blocks(grid.blocks), kMergeThreads, 0, params.stream>>>(params, states, grid);
  cuda_check(cudaGetLastError(), "combine");
}

template <typename Out>
void run_combine(const CombineParams<float>& params) {
  dispatch_partial_dtype(params.partial_dtype, [&](auto partial) {
    using Partial = decltype(partial);
    constexpr int kVector = kWide<Partial>;
    dispatch_states(params, [&](const auto& states) {
      const bool packs = params.head_dim % kVector == 0 &&
                         allow_pack<kVector, Partial>(states, params.num_splits) &&
                         allows_pack<kVector, Out>(params.out, params.out_strides);
      if (packs) {
        launch_combine<Partial, Out, kVector>(params, states);
      } else {
        launch_combine<Partial, Out, 1>(params, states);
      }
    });
  });
}

template <typename Out>
using RegisterCombine = RegisterKernel<CombineParams<float>, run_combine<Out>>;

const RegisterCombine<float> float32(Arch::cuda, DType::float32, kAnyHeadDim);
const RegisterCombine<__nv_bfloat16> bfloat16(Arch::cuda, DType::bfloat16, kAnyHeadDim);
const RegisterCombine<__half> float16(Arch::cuda, DType::float16, kAnyHeadDim);

}  // namespace
}  // namespace neginf
