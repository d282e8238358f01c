// Merging attention states on the CPU, forward and backward. merge_row.h has the arithmetic.
#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "../common/merge_row.h"
#include "../common/merge_states.h"
#include "../kernels.h"

namespace neginf {
namespace {

template <typename Real, typename Work>
void for_each_row(const CombineInputs<Real>& params, const Work& work) {
  constexpr int64_t kElementsPerTask = 1 << 15;
  const int64_t rows = int64_t{params.batch} * params.seqlen * params.num_heads;
  const int64_t row_elements = int64_t{params.num_splits + 1} * params.head_dim;
  const int64_t grain = (kElementsPerTask + row_elements - 1) / row_elements;
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    std::vector<Real> scratch(params.head_dim);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t token = i / params.num_heads;
      work(MergeRow{static_cast<unsigned>(token / params.seqlen),
                    static_cast<unsigned>(token % params.seqlen),
                    static_cast<unsigned>(i % params.num_heads)},
           scratch.data());
    }
  });
}

template <typename Function>
void dispatch(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::float64: return function(std::type_identity<double>());
    case DType::float32: return function(std::type_identity<float>());
    case DType::bfloat16: return function(std::type_identity<c10::BFloat16>());
    case DType::float16: return function(std::type_identity<c10::Half>());
  }
}

template <typename Partial, typename Out, typename Real, typename States>
void combine_typed(const CombineParams<Real>& params, const States& all_states) {
  for_each_row(params, [&](MergeRow row, Real* sum) {
    const RowStates<Partial, States> states(all_states, row);
    const auto lse_of = [&](int split) { return states.lse(split); };
    const auto merged = merge<Real>(params.num_splits, lse_of);
    std::fill_n(sum, params.head_dim, Real(0));
    for (int split = 0; split < params.num_splits; ++split) {
      const auto share = MergeShare<Real>::of(lse_of(split), merged);
      if (!share.contributes) continue;
      const Partial* partial = states.out(split);
      for (int d = 0; d < params.head_dim; ++d) {
        sum[d] += share.weighted(static_cast<Real>(partial[d]));
      }
    }
    Out* out = static_cast<Out*>(params.out) + row.offset(params.out_strides);
    for (int d = 0; d < params.head_dim; ++d) out[d] = static_cast<Out>(sum[d]);
    params.lse[row.offset(params.lse_strides)] = merged.lse;
  });
}

template <typename Partial, typename Out, typename Real, typename States>
void combine_backward_typed(const CombineBackwardParams<Real>& params, const States& all_states) {
  for_each_row(params, [&](MergeRow row, Real* dout) {
    const RowStates<Partial, States> states(all_states, row);
    const auto lse_of = [&](int split) { return states.lse(split); };
    Partial* dout_partial =
        static_cast<Partial*>(params.dout_partial) + row.offset(params.dout_partial_strides);
    Real* dlse_partial = params.dlse_partial + row.offset(params.dlse_partial_strides);
    const auto dlse_of = [&](int split) -> Real& {
      return dlse_partial[split * params.dlse_partial_strides.split];
    };
    const auto merged = merge<Real>(params.num_splits, lse_of);
    std::fill_n(dout, params.head_dim, Real(0));
    if (params.dout != nullptr) {
      const Out* from = static_cast<const Out*>(params.dout) + row.offset(params.dout_strides);
      for (int d = 0; d < params.head_dim; ++d) dout[d] = static_cast<Real>(from[d]);
    }
    Real dout_out = 0;
    for (int split = 0; split < params.num_splits; ++split) {
      const auto share = MergeShare<Real>::of(lse_of(split), merged);
      const Partial* partial = states.out(split);
      Partial* dpartial = dout_partial + split * params.dout_partial_strides.split;
      Real dout_dot_partial = 0;
      for (int d = 0; d < params.head_dim; ++d) {
        if (params.dout != nullptr) dout_dot_partial += dout[d] * static_cast<Real>(partial[d]);
        dpartial[d] = static_cast<Partial>(share.weighted(dout[d]));
      }
      dlse_of(split) = dout_dot_partial;
      dout_out += share.weighted(dout_dot_partial);
    }
    const Real dlse = params.dlse != nullptr ? params.dlse[row.offset(params.dlse_strides)] : 0;
    for (int split = 0; split < params.num_splits; ++split) {
      const auto share = MergeShare<Real>::of(lse_of(split), merged);
      dlse_of(split) = share.weighted(dlse_of(split) - dout_out + dlse);
    }
  });
}

template <typename Real, typename Out>
void combine(const CombineParams<Real>& params) {
  dispatch(params.partial_dtype, [&](auto partial) {
    dispatch_states(params, [&](const auto& states) {
      combine_typed<typename decltype(partial)::type, Out>(params, states);
    });
  });
}

template <typename Real, typename Out>
void combine_backward(const CombineBackwardParams<Real>& params) {
  dispatch(params.partial_dtype, [&](auto partial) {
    dispatch_states(params, [&](const auto& states) {
      combine_backward_typed<typename decltype(partial)::type, Out>(params, states);
    });
  });
}

template <typename Real, typename Out>
struct RegisterCombine {
  explicit RegisterCombine(DType dtype)
      : forward(Arch::cpu, dtype, kAnyHeadDim), backward(Arch::cpu, dtype, kAnyHeadDim) {}

  RegisterKernel<CombineParams<Real>, combine<Real, Out>> forward;
  RegisterKernel<CombineBackwardParams<Real>, combine_backward<Real, Out>> backward;
};

const RegisterCombine<double, double> float64(DType::float64);
const RegisterCombine<float, float> float32(DType::float32);
const RegisterCombine<float, c10::BFloat16> bfloat16(DType::bfloat16);
const RegisterCombine<float, c10::Half> float16(DType::float16);

}  // namespace
}  // namespace neginf
