// Writes new keys and values into a cache and rotates queries, on the CPU.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <type_traits>

#include "../common/append_rows.h"
#include "../kernels.h"

namespace neginf {
namespace {

template <typename Element>
class Append {
 public:
  explicit Append(const AppendParams& params) : params_(params) {}

  void run() const {
    for (int index = 0; index < params_.batch; ++index) {
      params_.seqlens[index] = AppendedSequence(params_, index).length(params_);
    }
    const bool is_packed = params_.cu_seqlens_new != nullptr;
    const int64_t new_rows = is_packed ? params_.total_new : params_.batch * params_.total_new;
    for (int64_t number = 0; number < new_rows; ++number) append(number, is_packed);
    if (params_.rotary_dim == 0) return;
    const bool is_packed_q = params_.cu_seqlens_q != nullptr;
    const int64_t rows_q = is_packed_q ? params_.total_q : params_.batch * params_.total_q;
    for (int64_t number = 0; number < rows_q; ++number) rotate_query(number, is_packed_q);
  }

 private:
  using Real = std::conditional_t<std::is_same_v<Element, double>, double, float>;

  void append(int64_t number, bool is_packed) const {
    const auto row = NewRow::of(number, params_.batch, params_.cu_seqlens_new, params_.total_new);
    if (row.sequence >= params_.batch) return;
    const AppendedSequence sequence(params_, row.sequence);
    const CacheRow to = sequence.cache_row(params_, row.row);
    if (!to.exists) return;
    const int64_t batch = is_packed ? 0 : row.sequence;
    const int64_t from = is_packed ? number : row.row;
    copy(at<const Element>(params_.k, params_.k_strides, batch, from), params_.k_strides.head,
         at<Element>(params_.k_cache, params_.k_cache_strides, to.entry, to.row),
         params_.k_cache_strides.head, params_.num_heads_k, params_.head_dim,
         params_.rotary_dim > 0 ? sequence.position(params_, row.row) : -1);
    copy(at<const Element>(params_.v, params_.v_strides, batch, from), params_.v_strides.head,
         at<Element>(params_.v_cache, params_.v_cache_strides, to.entry, to.row),
         params_.v_cache_strides.head, params_.num_heads_k, params_.head_dim_v, -1);
  }

  void rotate_query(int64_t number, bool is_packed) const {
    const auto row = NewRow::of(number, params_.batch, params_.cu_seqlens_q, params_.total_q);
    const int64_t batch = is_packed ? 0 : row.sequence;
    const int64_t from = is_packed ? number : row.row;
    // Rows of no sequence have no position.
    const int64_t position = row.sequence >= params_.batch
                                 ? -1
                                 : AppendedSequence(params_, row.sequence)
                                       .position(params_, params_.advances_q ? row.row : 0);
    copy(at<const Element>(params_.q, params_.q_strides, batch, from), params_.q_strides.head,
         at<Element>(params_.rotated_q, params_.rotated_q_strides, batch, from),
         params_.rotated_q_strides.head, params_.num_heads, params_.head_dim, position);
  }

  template <typename T, typename Void>
  static T* at(Void* tensor, const Strides& strides, int64_t batch, int64_t row) {
    return static_cast<T*>(tensor) + batch * strides.batch + row * strides.row;
  }

  // A row of all heads; rotated if there is a position.
  void copy(const Element* from, int64_t from_head, Element* to, int64_t to_head, int heads,
            int head_dim, int64_t position) const {
    const int rotary_dim = position < 0 ? 0 : params_.rotary_dim;
    const auto* cos = static_cast<const Element*>(params_.cos) + position * params_.cos_stride;
    const auto* sin = static_cast<const Element*>(params_.sin) + position * params_.sin_stride;
    for (int head = 0; head < heads; ++head, from += from_head, to += to_head) {
      for (int p = 0; p < (head_dim + 1) / 2; ++p) {
        const auto pair = RotaryPair::of(p, rotary_dim, params_.interleaved);
        if (pair.turns) {
          const auto rotated =
              rotate(static_cast<Real>(from[pair.first]), static_cast<Real>(from[pair.second]),
                     static_cast<Real>(cos[p]), static_cast<Real>(sin[p]));
          to[pair.first] = static_cast<Element>(rotated.first);
          to[pair.second] = static_cast<Element>(rotated.second);
        } else {
          to[pair.first] = from[pair.first];
          if (pair.second < head_dim) to[pair.second] = from[pair.second];
        }
      }
    }
  }

  const AppendParams& params_;
};

template <typename Element>
void run_append(const AppendParams& params) {
  Append<Element>(params).run();
}

template <typename Element>
using RegisterAppend = RegisterKernel<AppendParams, run_append<Element>>;

const RegisterAppend<double> float64(Arch::cpu, DType::float64, kAnyHeadDim);
const RegisterAppend<float> float32(Arch::cpu, DType::float32, kAnyHeadDim);
const RegisterAppend<c10::BFloat16> bfloat16(Arch::cpu, DType::bfloat16, kAnyHeadDim);
const RegisterAppend<c10::Half> float16(Arch::cpu, DType::float16, kAnyHeadDim);

}  // namespace
}  // namespace neginf
