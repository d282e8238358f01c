// Attention backward on the CPU.
//
// A work item is one key head of one sequence. It walks over the blocks of query rows of every
// query head in the group, and for each block over the tiles of keys that the block sees:
//     P = exp(S - L)    dS = P * (dO V^T - (D - dL)) * softcap'    D = rowsum(O * dO)
//     dV += P^T dO      dK += dS^T Q      dQ += dS K
// dK and dV are summed in Real by one thread in a fixed order: the result is always deterministic.
#include <ATen/ops/tanh_backward.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

#include "../common/sequence.h"
#include "../kernels.h"
#include "../lse.h"
#include "../lse_backward.h"
#include "block.h"
#include "scores.h"

namespace neginf {
namespace {

template <typename Real>
class BackwardWorker {
  using Lse = BasicLse<Real>;
  using Divisor = BasicDivisor<Real>;

 public:
  BackwardWorker(const BackwardParams<Real>& params, at::ScalarType type)
      : params_(params),
        problem_(params.problem),
        type_(type),
        head_dim_(problem_.head_dim),
        head_dim_v_(problem_.head_dim_v),
        q_(kBlockM * head_dim_),
        out_(kBlockM * head_dim_v_),
        dout_(kBlockM * head_dim_v_),
        dq_(kBlockM * head_dim_),
        delta_(kBlockM),
        p_(kBlockM * kBlockN),
        ds_(kBlockM * kBlockN),
        tanh_(problem_.softcap > 0 ? kBlockM * kBlockN : 0) {}

  void run(int64_t item) {
    sequence_ = static_cast<int>(item / problem_.num_heads_k);
    const int head_k = static_cast<int>(item % problem_.num_heads_k);
    queries_ = query_sequence(problem_, sequence_);
    keys_ = key_sequence(problem_, sequence_);
    mask_ = mask_of(problem_, queries_, keys_);

    const Range visible = mask_.visible_keys();
    first_key_ = visible.begin;
    k_ = key_rows(params_.k, params_.k_strides, head_k, head_dim_)[visible].to(kScalarType<Real>);
    v_ = key_rows(params_.v, params_.v_strides, head_k, head_dim_v_)[visible].to(kScalarType<Real>);
    dk_ = at::zeros({visible.size(), head_dim_}, kScalarType<Real>);
    dv_ = at::zeros({visible.size(), head_dim_v_}, kScalarType<Real>);

    const int group = problem_.num_heads / problem_.num_heads_k;
    for (int head = head_k * group; head < (head_k + 1) * group; ++head) {
      dsink_ = 0;
      for (int begin = 0; begin < queries_.rows; begin += kBlockM) {
        run_block(head, intersect({0, queries_.rows}, {begin, begin + kBlockM}));
      }
      if (params_.dsink != nullptr && sequence_ < problem_.batch) {
        params_.dsink[int64_t{sequence_} * problem_.num_heads + head] = dsink_;
      }
    }
    write_key_gradient(key_rows(params_.dk, params_.dk_strides, head_k, head_dim_), visible, dk_);
    write_key_gradient(key_rows(params_.dv, params_.dv_strides, head_k, head_dim_v_), visible, dv_);
  }

 private:
  HeadRows query_rows(const void* tensor, const Strides& strides, int head, int head_dim) const {
    return {tensor, type_, strides, sequence_, queries_.first_row, head, head_dim};
  }
  HeadRows key_rows(const void* tensor, const Strides& strides, int head_k, int head_dim) const {
    return {tensor, type_, strides, sequence_, keys_.first_row, head_k, head_dim};
  }

  void write_key_gradient(const HeadRows& rows, Range visible, const at::Tensor& gradient) const {
    rows[{0, visible.begin}].zero_();
    rows[visible].copy_(gradient);
    rows[{visible.end, keys_.rows}].zero_();
  }

  // `block` counts the rows of the buffer, those past the sequence's length included.
  void run_block(int head, Range block) {
    const Range rows = intersect(block, {0, queries_.length});
    const HeadRows dq_rows = query_rows(params_.dq, params_.dq_strides, head, head_dim_);
    dq_rows[{rows.end, block.end}].zero_();
    if (rows.empty()) return;

    load(head, rows);
    const at::Tensor dq = dq_.view(rows.size(), head_dim_).zero_();
    const Range keys = mask_.keys_of_rows(rows);
    for (int begin = keys.begin; begin < keys.end; begin += kBlockN) {
      add_tile(head, rows, intersect(keys, {begin, begin + kBlockN}));
    }
    // A key that only other rows see may have brought 0 * NaN.
    for (int i = 0; i < rows.size(); ++i) {
      if (visible_[i].empty()) clear(dq_, i, head_dim_);
    }
    dq_rows[rows].copy_(dq.mul_(problem_.softmax_scale));
  }

  // Rows that see no key, and those whose Lse is empty, come in as zeros whatever they hold.
  void load(int head, Range rows) {
    q_.copy(query_rows(params_.q, params_.q_strides, head, head_dim_)[rows])
        .mul_(problem_.softmax_scale);
    out_.copy(query_rows(params_.out, params_.out_strides, head, head_dim_v_)[rows]);
    dout_.copy(query_rows(params_.dout, params_.dout_strides, head, head_dim_v_)[rows]);
    const int64_t lse_row = sequence_ * params_.lse_strides.batch +
                            head * params_.lse_strides.head + queries_.first_row + rows.begin;
    lse_ = params_.lse + lse_row;
    const Real* dlse = params_.dlse != nullptr ? params_.dlse + lse_row : nullptr;

    common_ = mask_.keys_common_to_rows(rows);
    visible_.clear();
    divisor_.clear();
    nan_rows_.clear();
    for (int i = 0; i < rows.size(); ++i) {
      const Lse lse = lse_[i];
      visible_.push_back(lse.is_empty() ? Range{0, 0} : mask_.keys_of_row(rows.begin + i));
      const bool sees_keys = !visible_[i].empty();
      const Real delta = dout_dot_out(i, sees_keys) - (dlse != nullptr ? dlse[i] : Real(0));
      if (!lse.is_empty()) add_to_sink(head, lse, delta);
      delta_.data()[i] = sees_keys ? delta : Real(0);
      divisor_.push_back(Divisor::of(is_nan(lse.value()) ? Lse::empty() : lse));
      if (!sees_keys) {
        common_ = {0, 0};
        clear(q_, i, head_dim_);
        clear(dout_, i, head_dim_v_);
      } else if (is_nan(lse.value())) {
        // Its NaN will be in P and dS of the keys it sees; in q and dO it would meet the zeros of
        // the other keys too.
        nan_rows_.push_back(i);
        if (q_has_nan(i)) clear(q_, i, head_dim_);
        clear(dout_, i, head_dim_v_);
      } else if (is_nan(delta)) {
        nan_rows_.push_back(i);
      }
    }
  }

  // Where a row sees no key its O is the constant 0, unless the Lse comes from a merge with other
  // keys: what is 0 in it owes nothing to dO, which may be NaN.
  Real dout_dot_out(int i, bool sees_keys) const {
    const Real* out = out_.data() + i * head_dim_v_;
    const Real* dout = dout_.data() + i * head_dim_v_;
    Real sum = 0;
    for (int d = 0; d < head_dim_v_; ++d) {
      if (sees_keys || out[d] != Real(0)) sum += out[d] * dout[d];
    }
    return sum;
  }

  void add_to_sink(int head, Lse lse, Real delta) {
    if (problem_.sink == nullptr || is_masked(problem_.sink[head])) return;
    dsink_ -= Divisor::of(lse).probability(problem_.sink[head]) * delta;
  }

  void add_tile(int head, Range rows, Range keys) {
    const at::Tensor q = q_.view(rows.size(), head_dim_);
    const at::Tensor dout = dout_.view(rows.size(), head_dim_v_);
    const at::Tensor dq = dq_.view(rows.size(), head_dim_);
    const at::Tensor k = of_keys(k_, keys);
    const at::Tensor p = p_.view(rows.size(), keys.size());
    at::Tensor ds = ds_.view(rows.size(), keys.size());
    const at::Tensor tanh = problem_.softcap > 0 ? tanh_.view(rows.size(), keys.size()) : p;
    const bool masked = !covers(common_, keys);

    const HeadScores<Real> scores{problem_, mask_, sequence_, head};
    scores.compute(q, k, rows, keys, p, tanh);
    if (masked) fill_invisible(p_, keys, masked_score<Real>());
    move_nan_to_scores(keys);
    p.sub_(divisors()).exp_();

    at::mm_out(ds, dout, of_keys(v_, keys).t());
    ds.sub_(delta_.view(rows.size(), 1)).mul_(p);
    if (problem_.softcap > 0) at::tanh_backward_out(ds, ds, tanh);
    if (masked) fill_invisible(ds_, keys, Real(0));
    drop_weightless_keys(keys);

    of_keys(dv_, keys).addmm_(p.t(), dout);
    of_keys(dk_, keys).addmm_(ds.t(), q);
    dq.addmm_(ds, k);
  }

  // Divisor::probability for a whole tile is a subtraction and exp in ATen, and for a row whose Lse
  // is NaN it must still give 0 to a masked key. So there the NaN goes onto the scores that are not
  // masked, and the divisor is that of an empty row.
  void move_nan_to_scores(Range keys) {
    for (const int i : nan_rows_) {
      const Real lse = lse_[i].value();
      if (!is_nan(lse)) continue;
      Real* scores = p_.data() + i * keys.size();
      for (int j = 0; j < keys.size(); ++j) {
        if (!is_masked(scores[j])) scores[j] = lse;
      }
    }
  }

  // A key of weight 0 gets gradient 0 also from a row whose other factor is NaN.
  void drop_weightless_keys(Range keys) {
    for (const int i : nan_rows_) {
      const Real* p = p_.data() + i * keys.size();
      Real* ds = ds_.data() + i * keys.size();
      for (int j = 0; j < keys.size(); ++j) {
        if (p[j] == Real(0)) ds[j] = 0;
      }
    }
  }

  void fill_invisible(const Scratch<Real>& tile, Range keys, Real value) const {
    for (size_t i = 0; i < visible_.size(); ++i) {
      neginf::fill_invisible(tile.data() + i * keys.size(), keys, visible_[i], value);
    }
  }

  static void clear(const Scratch<Real>& block, int row, int head_dim) {
    std::fill_n(block.data() + row * head_dim, head_dim, Real(0));
  }

  bool q_has_nan(int row) const {
    const Real* values = q_.data() + row * head_dim_;
    return std::any_of(values, values + head_dim_, is_nan);
  }

  at::Tensor of_keys(const at::Tensor& rows, Range keys) const {
    return rows.narrow(0, keys.begin - first_key_, keys.size());
  }

  at::Tensor divisors() const {
    return matrix(divisor_.data(), kScalarType<Real>, divisor_.size(), 1, 1);
  }

  static bool is_nan(Real value) { return value != value; }

  const BackwardParams<Real>& params_;
  const Problem<Real>& problem_;
  const at::ScalarType type_;
  const int head_dim_;
  const int head_dim_v_;

  // Of the item: one sequence and key head. k_, v_, dk_, dv_ hold the keys that somebody sees.
  int sequence_ = 0;
  Sequence queries_{};
  Sequence keys_{};
  Mask mask_{};
  int first_key_ = 0;
  at::Tensor k_, v_, dk_, dv_;
  Real dsink_ = 0;

  // Of a block of rows.
  const Lse* lse_ = nullptr;
  Range common_{};              // keys that every row sees
  std::vector<Range> visible_;  // keys of each row; none where the Lse is empty
  std::vector<Divisor> divisor_;
  std::vector<int> nan_rows_;  // rows whose Lse or delta is NaN
  Scratch<Real> q_;            // times softmax_scale
  Scratch<Real> out_;
  Scratch<Real> dout_;
  Scratch<Real> dq_;
  Scratch<Real> delta_;  // D - dL

  // Of a tile.
  Scratch<Real> p_;
  Scratch<Real> ds_;
  Scratch<Real> tanh_;
};

template <typename Real, DType kDType>
void backward(const BackwardParams<Real>& params) {
  const Problem<Real>& problem = params.problem;
  const int64_t items = int64_t{sequences_of(problem)} * problem.num_heads_k;
  run_items(items, score_cost(problem), Bits::any,
            [&] { return BackwardWorker<Real>(params, scalar_type(kDType)); });
}

template <typename Real, DType kDType>
using RegisterBackward = RegisterKernel<BackwardParams<Real>, backward<Real, kDType>>;

const RegisterBackward<double, DType::float64> float64(Arch::cpu, DType::float64, kMaxHeadDim);
const RegisterBackward<float, DType::float32> float32(Arch::cpu, DType::float32, kMaxHeadDim);
const RegisterBackward<float, DType::bfloat16> bfloat16(Arch::cpu, DType::bfloat16, kMaxHeadDim);
const RegisterBackward<float, DType::float16> float16(Arch::cpu, DType::float16, kMaxHeadDim);

}  // namespace
}  // namespace neginf
