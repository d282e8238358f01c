// The gradient of the merge in plain CUDA. Bound by memory.
#include "../kernels.h"
#include "cuda_check.h"
#include "merge_kernel.h"
#include "merge_row.h"

namespace neginf {
namespace {

template <typename Partial, typename Out, int kVector>
__global__ void __launch_bounds__(kMergeThreads, 4)
    combine_backward_kernel(const __grid_constant__ CombineBackwardParams<float> params,
                            int lanes) {
  for_each_merge_row(params, lanes, [&](const MergeRow& row, int lane) {
    const Lse* lse_partial = params.lse_partial + row.offset(params.lse_partial_strides);
    const auto lse_of = [&](int s) { return lse_partial[s * params.lse_partial_strides.split]; };
    const auto merged = merge<float>(params.num_splits, lse_of);
    float* dlse_partial = params.dlse_partial + row.offset(params.dlse_partial_strides);
    const auto dlse_of = [&](int s) -> float& {
      return dlse_partial[s * params.dlse_partial_strides.split];
    };

    const Partial* out_partial =
        static_cast<const Partial*>(params.out_partial) + row.offset(params.out_partial_strides);
    const Out* dout = static_cast<const Out*>(params.dout) + row.offset(params.dout_strides);
    Partial* dout_partial =
        static_cast<Partial*>(params.dout_partial) + row.offset(params.dout_partial_strides);

    float dout_out = 0.f;  // dO . O
    for (int s = 0; s < params.num_splits; ++s) {
      const auto share = MergeShare<float>::of(lse_of(s), merged);
      float dot = 0.f;  // dO . O_s
      for (int column = lane * kVector; column < params.head_dim; column += lanes * kVector) {
        float state[kVector], grad[kVector] = {};
        if (params.dout != nullptr) {
          load(state, out_partial + s * params.out_partial_strides.split + column);
          load(grad, dout + column);
        }
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          if (params.dout != nullptr) dot += grad[i] * state[i];
          grad[i] = share.weighted(grad[i]);
        }
        store(dout_partial + s * params.dout_partial_strides.split + column, grad);
      }
      dot = reduce_group(dot, lanes);
      dout_out += share.weighted(dot);
      if (lane == 0) dlse_of(s) = dot;
    }

    if (lane != 0) return;
    const float dlse = params.dlse != nullptr ? params.dlse[row.offset(params.dlse_strides)] : 0.f;
    for (int s = 0; s < params.num_splits; ++s) {
      const auto share = MergeShare<float>::of(lse_of(s), merged);
      dlse_of(s) = share.weighted(dlse_of(s) - dout_out + dlse);
    }
  });
}

template <typename Partial, typename Out, int kVector>
void launch_combine_backward(const CombineBackwardParams<float>& params) {
  launch_merge<kVector>(params, [&](unsigned blocks, int lanes) {
    combine_backward_kernel<Partial, Out, kVector>
        <<<blocks, kMergeThreads, 0, params.stream>>>(params, lanes);
    cuda_check(cudaGetLastError(), "combine_backward");
  });
}

template <typename Out>
void run_combine_backward(const CombineBackwardParams<float>& params) {
  dispatch_partial_dtype(params.partial_dtype, [&](auto partial) {
    using Partial = decltype(partial);
    const bool packs = params.head_dim % 4 == 0 &&
                       allows_pack<Partial>(params.out_partial, params.out_partial_strides) &&
                       allows_pack<Out>(params.dout, params.dout_strides) &&
                       allows_pack<Partial>(params.dout_partial, params.dout_partial_strides);
    if (packs) {
      launch_combine_backward<Partial, Out, 4>(params);
    } else {
      launch_combine_backward<Partial, Out, 1>(params);
    }
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
