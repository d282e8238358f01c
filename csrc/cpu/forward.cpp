// Attention forward on the CPU over keys and values in tensors.
#include "../kernels.h"
#include "forward_worker.h"

namespace neginf {
namespace {

template <typename Real>
class BufferedKeys {
 public:
  BufferedKeys(const ForwardParams<Real>& params, at::ScalarType type)
      : params_(params),
        type_(type),
        k_(kBlockN * params.problem.head_dim),
        v_(kBlockN * params.problem.head_dim_v) {}

  Sequence sequence(int index) const { return key_sequence(params_.problem, index); }

  KeyTile tile(int index, int head_k, Range keys) const {
    const int64_t first_row = sequence(index).first_row;
    const HeadRows k(params_.k, type_, params_.k_strides, index, first_row, head_k,
                     params_.problem.head_dim);
    const HeadRows v(params_.v, type_, params_.v_strides, index, first_row, head_k,
                     params_.problem.head_dim_v);
    return {k_.as_real(k[keys]), v_.as_real(v[keys]), {}};
  }

 private:
  const ForwardParams<Real>& params_;
  at::ScalarType type_;
  Scratch<Real> k_;
  Scratch<Real> v_;
};

template <typename Real, DType kDType>
void forward(const ForwardParams<Real>& params) {
  const at::ScalarType type = scalar_type(kDType);
  run_forward(params, type, Bits::any, [&] { return BufferedKeys<Real>(params, type); });
}

template <typename Real, DType kDType>
using RegisterForward = RegisterKernel<ForwardParams<Real>, forward<Real, kDType>>;

const RegisterForward<double, DType::float64> float64(Arch::cpu, DType::float64, kMaxHeadDim);
const RegisterForward<float, DType::float32> float32(Arch::cpu, DType::float32, kMaxHeadDim);
const RegisterForward<float, DType::bfloat16> bfloat16(Arch::cpu, DType::bfloat16, kMaxHeadDim);
const RegisterForward<float, DType::float16> float16(Arch::cpu, DType::float16, kMaxHeadDim);

}  // namespace
}  // namespace neginf
