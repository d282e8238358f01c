// Merges attention states in plain CUDA. Bound by memory: each row reads its states once.
#include "../kernels.h"
#include "cuda_check.h"
#include "merge_kernel.h"
#include "merge_row.h"

namespace neginf {
namespace {

template <typename Partial, typename Out, int kVector>
__global__ void __launch_bounds__(kMergeThreads, 4)
    combine_kernel(const __grid_constant__ CombineParams<float> params, int lanes) {
  for_each_merge_row(params, lanes, [&](const MergeRow& row, int lane) {
    const Lse* lse_partial = params.lse_partial + row.offset(params.lse_partial_strides);
    const auto lse_of = [&](int s) { return lse_partial[s * params.lse_partial_strides.split]; };
    const auto merged = merge<float>(params.num_splits, lse_of);
    if (lane == 0) params.lse[row.offset(params.lse_strides)] = merged.lse;

    const Partial* out_partial =
        static_cast<const Partial*>(params.out_partial) + row.offset(params.out_partial_strides);
    Out* out = static_cast<Out*>(params.out) + row.offset(params.out_strides);
    for (int column = lane * kVector; column < params.head_dim; column += lanes * kVector) {
      float sum[kVector] = {};
#pragma unroll 4  // loads in flight
      for (int s = 0; s < params.num_splits; ++s) {
        float state[kVector];
        load(state, out_partial + s * params.out_partial_strides.split + column);
        const auto share = MergeShare<float>::of(lse_of(s), merged);
#pragma unroll
        for (int i = 0; i < kVector; ++i) sum[i] += share.weighted(state[i]);
      }
      store(out + column, sum);
    }
  });
}

template <typename Partial, typename Out, int kVector>
void launch_combine(const CombineParams<float>& params) {
  launch_merge<kVector>(params, [&](unsigned blocks, int lanes) {
    combine_kernel<Partial, Out, kVector>
        <<<blocks, kMergeThreads, 0, params.stream>>>(params, lanes);
    cuda_check(cudaGetLastError(), "combine");
  });
}

template <typename Out>
void run_combine(const CombineParams<float>& params) {
  dispatch_partial_dtype(params.partial_dtype, [&](auto partial) {
    using Partial = decltype(partial);
    const bool packs = params.head_dim % 4 == 0 &&
                       allows_pack<Partial>(params.out_partial, params.out_partial_strides) &&
                       allows_pack<Out>(params.out, params.out_strides);
    if (packs) {
      launch_combine<Partial, Out, 4>(params);
    } else {
      launch_combine<Partial, Out, 1>(params);
    }
  });
}

template <typename Out>
using RegisterCombine = RegisterKernel<CombineParams<float>, run_combine<Out>>;

const RegisterCombine<float> float32(Arch::cuda, DType::float32, kAnyHeadDim);
const RegisterCombine<__nv_bfloat16> bfloat16(Arch::cuda, DType::bfloat16, kAnyHeadDim);
const RegisterCombine<__half> float16(Arch::cuda, DType::float16, kAnyHeadDim);

}  // namespace
}  // namespace neginf
