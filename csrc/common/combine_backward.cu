// The gradient of the merge in plain CUDA. Bound by memory: each row reads its states and dO once
// and writes the states' gradients once. Measured as the forward, where a copy has 0.92 and 0.99:
//     states           2     3     4     8    16
//     float32 d128   0.98  0.98  0.98  0.96  0.86
//     16 bits d128   0.93  0.94  0.94  0.94  0.88
//     16 bits d64    0.85  0.87  0.88  0.88  0.82
#include "../kernels.h"
#include "cuda_check.h"
#include "merge_kernel.h"

namespace neginf {
namespace {

constexpr int kThreads = 128;
// That registers must allow on a multiprocessor. One more would spill in some kernels.
template <typename InFlight>
constexpr int kBlocksPerMultiprocessor = 8;
template <>
constexpr int kBlocksPerMultiprocessor<FourStates> = 5;
template <>
constexpr int kBlocksPerMultiprocessor<EightStates> = 5;

// dO . O_s at the columns of a pack. NaN of an empty state is left out where dots are weighted.
template <typename Partial, int kVector, int kStates>
__device__ __forceinline__ void add_dots(float (&dots)[kStates], const float (&dout)[kVector],
                                         const LoadedStates<Partial, kVector, kStates>& loaded,
                                         int count) {
#pragma unroll
  for (int i = 0; i < kStates; ++i) {
    if (i >= count) break;
    float values[kVector];
    unpack<Partial>(values, loaded.at[i]);
#pragma unroll
    for (int j = 0; j < kVector; ++j) dots[i] += dout[j] * values[j];
  }
}

// dO_s of `count` states, which are `stride` apart. MergeShare::weighted, but that it selects after
// rounding: 4 instructions of as many words, not one for each column.
template <typename Partial, int kVector, int kStates>
__device__ __forceinline__ void write_weighted(Partial* to, int64_t stride, int count,
                                               const float (&dout)[kVector],
                                               const MergeShare<float> (&shares)[kStates]) {
#pragma unroll
  for (int i = 0; i < kStates; ++i, to += stride) {
    if (i >= count) break;
    float values[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) values[j] = shares[i].weight * dout[j];
    const auto bits = rounded<Partial>(values);
    store_bits<kVector>(to, shares[i].contributes ? bits : Bits<Partial, kVector>{});
  }
}

// A row and the group of lanes that takes it.
template <typename Partial, typename Out, int kVector, typename InFlight, typename States>
struct RowOfGroup {
  static constexpr int kStates = InFlight::kStates;

  // What is read of a pack of columns.
  struct Loaded {
    Bits<Out, kVector> dout;
    LoadedStates<Partial, kVector, kStates> states;
  };

  const CombineBackwardParams<float>& params;
  const LaneGroup& group;
  const BlockRow row;
  const RowStates<Partial, States> states;

  // Of states first, first + 1, ..., those that are wanted, and only if there is a dO.
  template <typename IsWanted>
  __device__ __forceinline__ void load(Loaded& loaded, int first, int column,
                                       const IsWanted& is_wanted) const {
    const bool has_dout = params.dout != nullptr;
    loaded.dout = {};
    if (has_dout) {
      loaded.dout = load_bits<kVector>(static_cast<const Out*>(params.dout) +
                                       row.offset(params.dout_strides) + column);
    }
    loaded.states.load(states, first, column, [&](int i) { return has_dout && is_wanted(i); });
  }

  // Adds to the dots dO . O_s and writes dO_s.
  __device__ __forceinline__ void use(float (&dots)[kStates], const Loaded& loaded, int first,
                                      int column,
                                      const MergeShare<float> (&shares)[kStates]) const {
    if (!row.exists || column >= params.head_dim) return;
    const int count = params.num_splits - first;
    const CombineStrides& strides = params.dout_partial_strides;
    float dout[kVector];
    unpack<Out>(dout, loaded.dout);
    add_dots(dots, dout, loaded.states, count);
    write_weighted(static_cast<Partial*>(params.dout_partial) + row.offset(strides) + column +
                       first * strides.split,
                   strides.split, count, dout, shares);
  }

  __device__ __forceinline__ float dlse() const {
    return params.dlse != nullptr ? params.dlse[row.offset(params.dlse_strides)] : 0.f;
  }
  __device__ __forceinline__ float& dlse_partial(int state) const {
    const CombineStrides& strides = params.dlse_partial_strides;
    return params.dlse_partial[row.offset(strides) + state * strides.split];
  }

  __device__ __forceinline__ void run_few() const {
    const float dlse_of_row = dlse();
    LseOfStates<kStates> lse;
    lse.load(states, 0, params.num_splits);
    MergeShare<float> shares[kStates];
    float dots[kStates] = {};
    constexpr int kPacks = InFlight::kPacks;
    const int step = group.lanes * kVector;
#pragma unroll 1
    for (int first = 0; first < params.head_dim; first += step * kPacks) {
      const int column = first + group.lane * kVector;
      // As in the forward before it is known what the states are worth.
      Loaded loaded[kPacks];
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        load(loaded[i], 0, readable(column + i * step, params),
             [&](int s) { return s < params.num_splits; });
      }
      if (first == 0) lse.get_shares(shares, lse.merged());
#pragma unroll
      for (int i = 0; i < kPacks; ++i) use(dots, loaded[i], 0, column + i * step, shares);
    }
    group.sum(dots);
    float dout_out = 0.f;  // dO . O
#pragma unroll
    for (int s = 0; s < kStates; ++s) dout_out += shares[s].weighted(dots[s]);
    float mine = 0.f;  // lane s writes that of state s
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      const float of_state = shares[s].weighted(dots[s] - dout_out + dlse_of_row);
      if (group.lane == s) mine = of_state;
    }
    if (row.exists && group.lane < params.num_splits) dlse_partial(group.lane) = mine;
  }

  __device__ __forceinline__ void run_many() const {
    const float dlse_of_row = dlse();
    const auto merged = merge_by_group(states, params.num_splits, group);
    float dout_out = 0.f;  // dO . O
#pragma unroll 1
    for (int first = 0; first < params.num_splits; first += kStates) {
      LseOfStates<kStates> lse;
      lse.load(states, first, params.num_splits);
      MergeShare<float> shares[kStates];
      lse.get_shares(shares, merged);
      float dots[kStates] = {};
#pragma unroll 1
      for (int column = group.lane * kVector; column < params.head_dim;
           column += group.lanes * kVector) {
        Loaded loaded;
        load(loaded, first, column, [&](int i) { return shares[i].contributes; });
        use(dots, loaded, first, column, shares);
      }
      group.sum(dots);
      // dO . O_s is kept where dL_s will be, by the lane that reads it again.
      const int offset = (group.lane - first) & (group.lanes - 1);
      float mine = 0.f;
#pragma unroll
      for (int i = 0; i < kStates; ++i) {
        dout_out += shares[i].weighted(dots[i]);
        if (offset == i) mine = dots[i];
      }
      const int s = first + offset;
      if (row.exists && offset < kStates && s < params.num_splits) dlse_partial(s) = mine;
    }
#pragma unroll 1
    for (int s = group.lane; row.exists && s < params.num_splits; s += group.lanes) {
      const auto share = MergeShare<float>::of(states.lse(s), merged);
      dlse_partial(s) = share.weighted(dlse_partial(s) - dout_out + dlse_of_row);
    }
  }
};

template <typename Partial, typename Out, int kVector, typename InFlight, typename States>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor<InFlight>)
    combine_backward_kernel(const __grid_constant__ CombineBackwardParams<float> params,
                            const __grid_constant__ States all_states,
                            const __grid_constant__ MergeGrid grid) {
  const LaneGroup group(grid.log2_lanes);
  const BlockRow row = RowsOfBlock(params, grid, group.count).row(group.index);
  const RowOfGroup<Partial, Out, kVector, InFlight, States> work{
      params, group, row, RowStates<Partial, States>(all_states, row)};
  if constexpr (InFlight::kHoldsAll) {
    work.run_few();
  } else {
    work.run_many();
  }
}

template <typename Partial, typename Out, int kVector, typename States>
void launch_combine_backward(const CombineBackwardParams<float>& params, const States& states) {
  if (params.batch == 0 || params.seqlen == 0 || params.num_heads == 0) return;
  dispatch_in_flight<kVector>(params.num_splits, [&](auto in_flight) {
    using InFlight = decltype(in_flight);
    const int log2_lanes = log2_lanes_of_row<Partial, InFlight>(params.head_dim);
    const MergeGrid grid = merge_grid(params, log2_lanes, kThreads >> log2_lanes);
    combine_backward_kernel<Partial, Out, kVector, InFlight, States>
        <<<grid.blocks, kThreads, 0, params.stream>>>(params, states, grid);
    cuda_check(cudaGetLastError(), "combine_backward");
  });
}

template <typename Out>
void run_combine_backward(const CombineBackwardParams<float>& params) {
  dispatch_partial_dtype(params.partial_dtype, [&](auto partial) {
    using Partial = decltype(partial);
    constexpr int kVector = kWide<Partial>;
    dispatch_states(params, [&](const auto& states) {
      const bool packs =
          params.head_dim % kVector == 0 &&
          allow_pack<kVector, Partial>(states, params.num_splits) &&
          allows_pack<kVector, Out>(params.dout, params.dout_strides) &&
          allows_pack<kVector, Partial>(params.dout_partial, params.dout_partial_strides);
      if (packs) {
        launch_combine_backward<Partial, Out, kVector>(params, states);
      } else {
        launch_combine_backward<Partial, Out, 1>(params, states);
      }
    });
  });
}

template <typename Out>
using RegisterCombineBackward =
    RegisterKernel<CombineBackwardParams<float>, run_combine_backward<Out>>;

const RegisterCombineBackward<float> float32(Arch::cuda, DType::float32, kAnyHeadDim);
const RegisterCombineBackward<__nv_bfloat16> bfloat16(Arch::cuda, DType::bfloat16, kAnyHeadDim);
const RegisterCombineBackward<__half> float16(Arch::cuda, DType::float16, kAnyHeadDim);

}  // namespace
}  // namespace neginf
