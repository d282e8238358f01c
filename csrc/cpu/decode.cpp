// Attention forward on the CPU over keys and values in a cache.
#include "../common/key_cache.h"
#include "../kernels.h"
#include "forward_worker.h"

namespace neginf {
namespace {

template <typename Real>
class CachedKeys {
 public:
  CachedKeys(const DecodeParams<Real>& params, at::ScalarType type)
      : params_(params),
        type_(type),
        k_(kBlockN * params.problem.head_dim),
        v_(kBlockN * params.problem.head_dim_v) {}

  Sequence sequence(int index) const { return cached(index).keys; }

  // Gathered row by row, as pages go.
  KeyTile tile(int index, int head_k, Range keys) const {
    const CachedSequence sequence = cached(index);
    const Problem<Real>& problem = params_.problem;
    KeyTile tile{
        k_.view(keys.size(), problem.head_dim), v_.view(keys.size(), problem.head_dim_v), {}};
    for (int i = 0; i < keys.size(); ++i) {
      const CacheRow at = sequence.row(params_.cache, keys.begin + i);
      if (!at.exists) tile.missing.push_back(i);
      copy(at, params_.k, params_.k_strides, head_k, problem.head_dim, tile.k[i]);
      copy(at, params_.v, params_.v_strides, head_k, problem.head_dim_v, tile.v[i]);
    }
    return tile;
  }

 private:
  CachedSequence cached(int index) const {
    return CachedSequence::of(params_.cache, params_.problem, index);
  }

  void copy(const CacheRow& at, const void* cache, const Strides& strides, int head_k, int head_dim,
            const at::Tensor& to) const {
    if (!at.exists) {
      to.zero_();
      return;
    }
    const HeadRows rows(cache, type_, strides, at.entry, 0, head_k, head_dim);
    to.copy_(rows[{at.row, at.row + 1}][0]);
  }

  const DecodeParams<Real>& params_;
  at::ScalarType type_;
  Scratch<Real> k_;
  Scratch<Real> v_;
};

// Blocks of rows and tiles of keys go by the sequence alone, so num_splits has nothing to divide.
// With keys_per_split a sequence gets the same bits in any batch.
template <typename Real, DType kDType>
void decode(const DecodeParams<Real>& params) {
  const at::ScalarType type = scalar_type(kDType);
  ForwardParams<Real> forward = params;
  forward.num_splits = 1;
  const Bits bits = params.keys_per_split > 0 ? Bits::same : Bits::any;
  run_forward(forward, type, bits, [&] { return CachedKeys<Real>(params, type); });
}

template <typename Real, DType kDType>
using RegisterDecode = RegisterKernel<DecodeParams<Real>, decode<Real, kDType>>;

const RegisterDecode<double, DType::float64> float64(Arch::cpu, DType::float64, kMaxHeadDim);
const RegisterDecode<float, DType::float32> float32(Arch::cpu, DType::float32, kMaxHeadDim);
const RegisterDecode<float, DType::bfloat16> bfloat16(Arch::cpu, DType::bfloat16, kMaxHeadDim);
const RegisterDecode<float, DType::float16> float16(Arch::cpu, DType::float16, kMaxHeadDim);

}  // namespace
}  // namespace neginf
