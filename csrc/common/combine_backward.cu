// The gradient of the merge in plain CUDA. Bound by memory: each row reads its states and dO once
// and writes the states' gradients once.
#include "../kernels.h"
#include "cuda_check.h"
#include "merge_kernel.h"

namespace neginf {
namespace {

// Bytes per second of a copy's at 2 / 8 / 32 float32 states of d128: 0.93 / 0.90 / 0.72. Two states
// leave registers for a fourth block (0.86 with three), but for sm80 that spills; more states in
// flight would spill everywhere.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
template <typename InFlight>
constexpr int kBlocksPerMultiprocessor = 3;
#else
template <typename InFlight>
constexpr int kBlocksPerMultiprocessor = InFlight::kStates == 2 ? 4 : 3;
#endif

// The tensors of one row.
template <typename Partial, typename Out, int kVector, int kStates, typename States>
struct BackwardRow {
  const Out* dout;  // null: zero
  RowStates<Partial, States> states;
  Partial* dout_partial;
  const CombineBackwardParams<float>& params;
  bool exists;

  // For the states from `state` on, `count` of them, whose shares the lanes from first_lane on
  // hold: the dots dO . O_s over the lane's columns. Writes their dO_s.
  __device__ void run(float (&dots)[kStates], int state, int count, const Shares& shares,
                      int first_lane, const LaneGroup& group) const {
    MergeShare<float> share[kStates];
#pragma unroll
    for (int i = 0; i < kStates; ++i) share[i] = shares.of(first_lane + i);
    for (int column = group.lane * kVector; exists && column < params.head_dim;
         column += group.lanes * kVector) {
      Partial* to = dout_partial + state * params.dout_partial_strides.split + column;
      Bits<Partial, kVector> loaded[kStates];
#pragma unroll
      for (int i = 0; i < kStates; ++i) {
        loaded[i] = {};
        if (dout != nullptr && shares.contributes(first_lane + i)) {
          loaded[i] = load<kVector>(states.out(state + i) + column);
        }
      }
      float grad[kVector] = {};
      if (dout != nullptr) load_values(grad, dout + column);
#pragma unroll
      for (int i = 0; i < kStates; ++i, to += params.dout_partial_strides.split) {
        if (i >= count) break;
        float values[kVector];
        unpack<Partial>(values, loaded[i]);
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          dots[i] += grad[j] * values[j];
          values[j] = share[i].weighted(grad[j]);
        }
        store(to, values);
      }
    }
  }
};

template <typename Partial, typename Out, int kVector, typename InFlight, typename States>
__global__ void __launch_bounds__(kMergeThreads, kBlocksPerMultiprocessor<InFlight>)
    combine_backward_kernel(const __grid_constant__ CombineBackwardParams<float> params,
                            const __grid_constant__ States all_states, const MergeGrid grid) {
  using StatesOfRow = RowStates<Partial, States>;
  constexpr int kStates = InFlight::kStates;
  const LaneGroup group(grid.log2_lanes);
  const LaneGroup holders(grid.log2_holders);
  const RowsOfBlock rows(params, holders.count);

  const BlockRow held_row = rows.row(holders.index);
  const auto held = HeldStates<StatesOfRow>::of(StatesOfRow(all_states, held_row),
                                                params.num_splits, group, holders);
  float* dlse_partial = params.dlse_partial + held_row.offset(params.dlse_partial_strides);
  const auto dlse_of = [&](int s) -> float& {
    return dlse_partial[s * params.dlse_partial_strides.split];
  };

  const float dlse =
      params.dlse != nullptr ? params.dlse[held_row.offset(params.dlse_strides)] : 0.f;

  // The lane that holds a state keeps its dO . O_s, where dL_s will be. More rows than one leave a
  // single turn.
  const int end = InFlight::kHoldsAll ? 1 : params.num_splits;
  float dout_out = 0.f;  // dO . O of the lane's row
#pragma unroll 1
  for (int base = 0; base < end; base += holders.lanes) {
    const auto shares = held.shares(base, params.num_splits);
    const int count = min(holders.lanes, params.num_splits - base);
    float dot_of_lane = 0.f;
#pragma unroll 1
    for (int r = 0; r < grid.rows_per_group(); ++r) {
      const BlockRow row = rows.row(group.index * grid.rows_per_group() + r);
      const BackwardRow<Partial, Out, kVector, kStates, States> work{
          params.dout == nullptr
              ? nullptr
              : static_cast<const Out*>(params.dout) + row.offset(params.dout_strides),
          StatesOfRow(all_states, row),
          static_cast<Partial*>(params.dout_partial) + row.offset(params.dout_partial_strides),
          params, row.exists};
#pragma unroll 1
      for (int i = 0; i < (InFlight::kHoldsAll ? 1 : count); i += kStates) {
        const int first_lane = (r << grid.log2_holders) + i;
        float dots[kStates] = {};
        work.run(dots, base + i, count - i, shares, first_lane, group);
        group.sum(dots);
#pragma unroll
        for (int j = 0; j < kStates; ++j) {
          if (group.lane == first_lane + j) dot_of_lane = dots[j];
        }
      }
    }
    dout_out += shares.mine().weighted(dot_of_lane);
    if (held_row.exists && holders.lane < count) dlse_of(base + holders.lane) = dot_of_lane;
  }
  dout_out = holders.sum(dout_out);

#pragma unroll 1
  for (int base = 0; base < end; base += holders.lanes) {
    const auto share = held.shares(base, params.num_splits).mine();
    const int s = base + holders.lane;
    if (held_row.exists && s < params.num_splits) {
      dlse_of(s) = share.weighted(dlse_of(s) - dout_out + dlse);
    }
  }
}

template <typename Partial, typename Out, int kVector, typename States>
void launch_combine_backward(const CombineBackwardParams<float>& params, const States& states) {
  if (num_positions(params) * params.num_heads == 0) return;
  dispatch_in_flight<Partial, kVector, 1>(params, [&](auto in_flight, const MergeGrid& grid) {
    combine_backward_kernel<Partial, Out, kVector, decltype(in_flight), States>
        <<<checked_blocks(grid.blocks), kMergeThreads, 0, params.stream>>>(params, states, grid);
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
