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

// kStates states of a row at the lane's columns.
template <typename Partial, int kVector, int kStates>
struct LoadedStates {
  Bits<Partial, kVector> bits[kStates];

  // Those from `first` on that contribute, of the lanes from first_lane on; the others are zero.
  template <typename StatesOfRow>
  __device__ void load_from(const StatesOfRow& states, int first, int column, const Shares& shares,
                            int first_lane) {
#pragma unroll
    for (int i = 0; i < kStates; ++i) {
      bits[i] = {};
      if (shares.contributes(first_lane + i))
        bits[i] = load<kVector>(states.out(first + i) + column);
    }
  }

  // The first `count` of them.
  __device__ void add_to(float (&sum)[kVector], int count, const Shares& shares,
                         int first_lane) const {
#pragma unroll
    for (int i = 0; i < kStates; ++i) {
      if (i >= count) break;
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
template <typename Partial, typename Out, int kVector, typename InFlight, bool kShared,
          typename States>
__global__ void __launch_bounds__(kMergeThreads, kBlocksPerMultiprocessor)
    combine_kernel(const __grid_constant__ CombineParams<float> params,
                   const __grid_constant__ States all_states, const MergeGrid grid) {
  using StatesOfRow = RowStates<Partial, States>;
  constexpr int kStates = InFlight::kStates;
  constexpr int kRows = InFlight::kRows;
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
  const Shares first_shares = held.shares(begin, end);
#pragma unroll 1
  for (int r = 0; r < grid.rows_per_group(); r += kRows) {
    BlockRow row[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      row[i] = rows.row(kShared ? 0 : group.index * grid.rows_per_group() + r + i);
    }
#pragma unroll 1
    for (int first = 0; first < params.head_dim; first += group.lanes * kVector) {
      // A lane past the row helps with the weights and reads what the first lane does.
      const int column = first + group.lane * kVector;
      const bool inside = column < params.head_dim;
      float sum[kRows][kVector] = {};
      // `count` states from `state` on, whose shares each row's holders from `holder` on have.
      const auto add = [&](int state, int count, const Shares& shares, int holder) {
        LoadedStates<Partial, kVector, kStates> loaded[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          loaded[i].load_from(StatesOfRow(all_states, row[i]), state, inside ? column : 0, shares,
                              ((r + i) << grid.log2_holders) + holder);
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          loaded[i].add_to(sum[i], count, shares, ((r + i) << grid.log2_holders) + holder);
        }
      };
      if constexpr (InFlight::kHoldsAll) {
        add(0, params.num_splits, first_shares, 0);
      } else {
#pragma unroll 1
        for (int base = 0; base < share; base += holders.lanes) {
          const auto shares = base == 0 ? first_shares : held.shares(begin + base, end);
          const int count = min(holders.lanes, share - base);
#pragma unroll 1
          for (int i = 0; i < count; i += kStates) add(begin + base + i, count - i, shares, i);
        }
      }
      if constexpr (kShared) sum_over_groups(sum[0], group);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (writes && row[i].exists && inside) {
          store(static_cast<Out*>(params.out) + row[i].offset(params.out_strides) + column, sum[i]);
        }
      }
    }
  }
}

template <typename Partial, typename Out, int kVector, typename States>
void launch_combine(const CombineParams<float>& params, const States& states) {
  const int64_t rows = num_positions(params) * params.num_heads;
  if (rows == 0) return;
  dispatch_in_flight<Partial, kVector, 2>(params, [&](auto in_flight, MergeGrid grid) {
    using InFlight = decltype(in_flight);
    auto* kernel = combine_kernel<Partial, Out, kVector, InFlight, false, States>;
    // A list is too short for its states to be shared out.
    if constexpr (std::is_same_v<InFlight, ManyStates> &&
                  std::is_same_v<States, StackedStates<float>>) {
      if (rows <= kFewRows && params.num_splits > ManyStates::kStates) {
        grid.log2_holders = grid.log2_lanes;
        grid.blocks = rows;
        kernel = combine_kernel<Partial, Out, kVector, InFlight, true, States>;
      }
    }
    kernel<<<checked_blocks(grid.blocks), kMergeThreads, 0, params.stream>>>(params, states, grid);
    cuda_check(cudaGetLastError(), "combine");
  });
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
