// Merges attention states in plain CUDA. Bound by memory: each row reads its states once.
//
// Of a large copy's bytes per second, which a copy of as many bytes has 0.85 of at 2 states of d64
// and 16 bits (104 MB) and 0.97 of at 2 float32 states of d128, on an H200 with a cold L2 cache:
//     states           2     3     4     8
//     float32 d128   0.97  0.98  1.00  1.01
//     16 bits d128   0.89  0.91  0.93  0.97
//     16 bits d64    0.78  0.81  0.83  0.89
#include <type_traits>

#include "../kernels.h"
#include "cuda_check.h"
#include "merge_kernel.h"

namespace neginf {
namespace {

// So few that a block for each pays: 32 rows of 128 states take 5 us instead of 9.
constexpr int64_t kFewRows = 1024;

// Threads of a block, and blocks that registers must allow on a multiprocessor: with 32 warps there
// 8 float32 and bfloat16 states of d128 merged at 0.90 and 0.86 of a copy's rate, with 40 at 0.99
// and 0.94. Few rows want many lanes for each.
template <bool kShared>
constexpr int kThreads = kShared ? 256 : 128;
template <typename InFlight, bool kShared>
constexpr int kBlocksPerMultiprocessor = kShared ? 4 : 9;
template <>
constexpr int kBlocksPerMultiprocessor<TwoStates, false> = 10;
template <>
constexpr int kBlocksPerMultiprocessor<FourStates, false> = 8;
template <>
constexpr int kBlocksPerMultiprocessor<EightStates, false> = 6;

template <typename Partial, int kVector, int kStates>
__device__ __forceinline__ void add(float (&sum)[kVector],
                                    const LoadedStates<Partial, kVector, kStates>& loaded,
                                    const MergeShare<float> (&shares)[kStates], int count) {
#pragma unroll
  for (int i = 0; i < kStates; ++i) {
    if (i >= count) break;
    float values[kVector];
    unpack<Partial>(values, loaded.at[i]);
#pragma unroll
    for (int j = 0; j < kVector; ++j) sum[j] = shares[i].add_weighted(sum[j], values[j]);
  }
}

// Sum over the groups of the block, in their order; what the first group gets is the whole.
template <int kVector>
__device__ __forceinline__ void sum_over_groups(float (&sum)[kVector], const LaneGroup& group) {
  __shared__ float sums[kThreads<true>][kVector + 1];
#pragma unroll
  for (int j = 0; j < kVector; ++j) sums[threadIdx.x][j] = sum[j];
  __syncthreads();
  if (group.index == 0) {
    for (int other = group.lane + group.lanes; other < kThreads<true>; other += group.lanes) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) sum[j] += sums[other][j];
    }
  }
  __syncthreads();
}

// A row and the group of lanes that merges it. kShared: with the other groups of the block.
template <typename Partial, typename Out, int kVector, typename InFlight, bool kShared,
          typename States>
struct RowOfGroup {
  static constexpr int kStates = InFlight::kStates;
  using Loaded = LoadedStates<Partial, kVector, kStates>;

  const CombineParams<float>& params;
  const LaneGroup& group;
  const BlockRow row;
  const RowStates<Partial, States> states;

  __device__ __forceinline__ bool writes() const {
    return row.exists && (!kShared || group.index == 0);
  }
  __device__ __forceinline__ void write_lse(Lse lse) const {
    if (writes() && group.lane == 0) params.lse[row.offset(params.lse_strides)] = lse;
  }
  __device__ __forceinline__ void write(int column, const float (&sum)[kVector]) const {
    if (!writes() || column >= params.head_dim) return;
    store_bits<kVector>(static_cast<Out*>(params.out) + row.offset(params.out_strides) + column,
                        rounded<Out>(sum));
  }

  __device__ __forceinline__ void merge_few() const {
    LseOfStates<kStates> lse;
    lse.load(states, 0, params.num_splits);
    MergeShare<float> shares[kStates];
    constexpr int kPacks = InFlight::kPacks;
    const int step = group.lanes * kVector;
#pragma unroll 1
    for (int first = 0; first < params.head_dim; first += step * kPacks) {
      const int column = first + group.lane * kVector;
      // Before it is known what the states are worth: a warp has so few bytes on their way that a
      // second wait costs more than reading empty ones for nothing, if these are few.
      Loaded loaded[kPacks];
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        loaded[i].load(states, 0, readable(column + i * step, params),
                       [&](int s) { return s < params.num_splits; });
      }
      if (first == 0) {
        const auto merged = lse.merged();
        lse.get_shares(shares, merged);
        write_lse(merged.lse);
      }
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        float sum[kVector] = {};
        add(sum, loaded[i], shares, params.num_splits);
        write(column + i * step, sum);
      }
    }
  }

  __device__ __forceinline__ void merge_many() const {
    const auto merged = merge_by_group(states, params.num_splits, group);
    write_lse(merged.lse);
    // Which states the group takes.
    const int share =
        kShared ? (params.num_splits + group.count - 1) / group.count : params.num_splits;
    const int begin = kShared ? min(group.index * share, params.num_splits) : 0;
    const int end = min(begin + share, params.num_splits);
    // All lanes take as many turns: groups that share add theirs together.
#pragma unroll 1
    for (int first = 0; first < params.head_dim; first += group.lanes * kVector) {
      const int column = first + group.lane * kVector;
      float sum[kVector] = {};
      add_states(sum, begin, end, readable(column, params), merged);
      if constexpr (kShared) sum_over_groups(sum, group);
      write(column, sum);
    }
  }

 private:
  __device__ __forceinline__ void add_states(float (&sum)[kVector], int begin, int end, int column,
                                             const Merged<float>& merged) const {
#pragma unroll 1
    for (int s = begin; s < end; s += kStates) {
      LseOfStates<kStates> lse;
      lse.load(states, s, end);
      MergeShare<float> shares[kStates];
      lse.get_shares(shares, merged);
      Loaded loaded;
      loaded.load(states, s, column, [&](int i) { return shares[i].contributes; });
      add(sum, loaded, shares, kStates);
    }
  }
};

template <typename Partial, typename Out, int kVector, typename InFlight, bool kShared,
          typename States>
__global__ void __launch_bounds__(kThreads<kShared>, kBlocksPerMultiprocessor<InFlight, kShared>)
    combine_kernel(const __grid_constant__ CombineParams<float> params,
                   const __grid_constant__ States all_states,
                   const __grid_constant__ MergeGrid grid) {
  const LaneGroup group(grid.log2_lanes);
  const BlockRow row =
      RowsOfBlock(params, grid, kShared ? 1 : group.count).row(kShared ? 0 : group.index);
  const RowOfGroup<Partial, Out, kVector, InFlight, kShared, States> work{
      params, group, row, RowStates<Partial, States>(all_states, row)};
  if constexpr (InFlight::kHoldsAll) {
    work.merge_few();
  } else {
    work.merge_many();
  }
}

template <typename Partial, typename Out, int kVector, typename States>
void launch_combine(const CombineParams<float>& params, const States& states) {
  const int64_t rows = int64_t{params.batch} * params.seqlen * params.num_heads;
  if (rows == 0) return;
  dispatch_in_flight<kVector>(params.num_splits, [&](auto in_flight) {
    using InFlight = decltype(in_flight);
    const int log2_lanes = log2_lanes_of_row<Partial, InFlight>(params.head_dim);
    const auto launch = [&](auto* kernel, int threads, int rows_per_block) {
      const MergeGrid grid = merge_grid(params, log2_lanes, rows_per_block);
      kernel<<<grid.blocks, threads, 0, params.stream>>>(params, states, grid);
      cuda_check(cudaGetLastError(), "combine");
    };
    // A list is too short for its states to be shared out.
    if constexpr (!InFlight::kHoldsAll && std::is_same_v<States, StackedStates<float>>) {
      if (rows <= kFewRows) {
        return launch(combine_kernel<Partial, Out, kVector, InFlight, true, States>, kThreads<true>,
                      1);
      }
    }
    launch(combine_kernel<Partial, Out, kVector, InFlight, false, States>, kThreads<false>,
           kThreads<false> >> log2_lanes);
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
