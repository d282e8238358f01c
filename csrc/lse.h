// The log-sum-exp of an attention row as a type, and the algebra of attention states.
//
// An attention state is a pair (O, L): over the visible keys j of a row with scores s_j,
//     Z = sum_j exp(s_j)     L = ln Z     O = sum_j exp(s_j - L) v_j
// A row that sees no key has Z = 0, so L = ln 0 = -inf and O = 0: the identity of the merge.
//
// This header and lse_backward.h are the only files that may write an infinity or ask whether a
// value is one; a test greps for it. Everything here runs on host and device and needs neither
// torch nor CUTLASS. Real is float in every kernel and double in the float64 CPU path.
#pragma once

#include <cmath>
#include <limits>

#if defined(__CUDACC__)
#define NEGINF_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define NEGINF_HOST_DEVICE inline
#endif

namespace neginf {

template <typename Real>
struct Finalized;

// The public log-sum-exp of one row: natural log, -inf for a row without keys, NaN for a row that
// saw a NaN or a +inf score, never +inf. It has no constructor from a number: a Lse exists only
// because finalize() or a merge made it, or because the row is Lse::empty().
template <typename Real>
class BasicLse {
 public:
  static NEGINF_HOST_DEVICE BasicLse empty() {
    constexpr Real ln_zero = -std::numeric_limits<Real>::infinity();
    return BasicLse(ln_zero);
  }

  NEGINF_HOST_DEVICE bool is_empty() const { return value_ == empty().value_; }

  NEGINF_HOST_DEVICE Real value() const { return value_; }

 private:
  explicit NEGINF_HOST_DEVICE BasicLse(Real value) : value_(value) {}

  template <typename R>
  friend NEGINF_HOST_DEVICE Finalized<R> finalize(R row_max, R row_sum, R scale);
  template <typename R>
  friend NEGINF_HOST_DEVICE Finalized<R> merge_sink(Finalized<R> keys, R sink);

  Real value_;
};

using Lse = BasicLse<float>;
static_assert(sizeof(Lse) == sizeof(float), "a buffer of Lse is a buffer of float");

// Whether a number that comes from outside may stand for a log-sum-exp: anything but +inf, by which
// other libraries mark the rows that are -inf here.
template <typename Real>
NEGINF_HOST_DEVICE bool may_be_public(Real value) {
  constexpr Real infinity = std::numeric_limits<Real>::infinity();
  return value != infinity;
}

// The score of a key the row does not see.
template <typename Real>
NEGINF_HOST_DEVICE Real masked_score() {
  return BasicLse<Real>::empty().value();
}

template <typename Real>
NEGINF_HOST_DEVICE bool is_masked(Real score) {
  return score == masked_score<Real>();
}

// Running maximum of scores. fmax skips NaN, which is fine for choosing what to subtract and wrong
// for anything else: whether a row is empty or NaN is decided by its sum, in finalize().
template <typename Real>
NEGINF_HOST_DEVICE Real running_max(Real a, Real b) {
  using std::fmax;
  return fmax(a, b);
}

// What to subtract from the scores of a row before exp. While every key so far was masked the
// maximum is -inf and -inf - -inf would be NaN, so such a row subtracts 0.
// Must be applied in every iteration that can meet such a row, not only in the first.
template <typename Real>
NEGINF_HOST_DEVICE Real softmax_shift(Real row_max) {
  return is_masked(row_max) ? Real(0) : row_max;
}

// What a kernel's epilogue needs: the public Lse and how to turn the accumulated row into O.
template <typename Real>
struct Finalized {
  BasicLse<Real> lse;
  Real scale;      // O = accumulated * scale
  bool sees_keys;  // false: O is exactly 0 whatever was accumulated (0 * NaN is NaN)

  NEGINF_HOST_DEVICE Real output(Real accumulated) const {
    return sees_keys ? accumulated * scale : Real(0);
  }
};

// 1 / x and ln x of a sum of exponentials, which is far from the ends of the range: on a GPU
// without what a division and a logarithm do for those. ln is off by 2^-21 of the larger of 1 and
// itself, about as much as the sum is.
template <typename Real>
NEGINF_HOST_DEVICE Real reciprocal_of_sum(Real x) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(Real) == sizeof(float)) return __fdividef(1.f, x);
#endif
  return Real(1) / x;
}
template <typename Real>
NEGINF_HOST_DEVICE Real log_of_sum(Real x) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(Real) == sizeof(float)) return __logf(x);
#endif
  return std::log(x);
}

// Ends the online softmax of one row. row_max and row_sum are over the raw scores r_j with
// s_j = r_j * scale:  row_sum = sum_j exp(s_j - softmax_shift(row_max) * scale).
// With scale = 1 and r_j = L_j it ends the merge of several states.
template <typename Real>
NEGINF_HOST_DEVICE Finalized<Real> finalize(Real row_max, Real row_sum, Real scale) {
  constexpr Real infinity = std::numeric_limits<Real>::infinity();
  constexpr Real nan = std::numeric_limits<Real>::quiet_NaN();
  const Real scaled_max = row_max * scale;
  const bool sum_is_nan = row_sum != row_sum;
  // A maximum that is -inf only after scaling means that every score is -inf: no visible weight.
  // All of it computed, then selected: kernels end several rows at a time and should not branch.
  const Real log_sum = log_of_sum(row_sum);
  const Real reciprocal = reciprocal_of_sum(row_sum);
  const bool is_empty = (row_sum == Real(0)) | (is_masked(scaled_max) & !sum_is_nan);
  const bool is_nan = sum_is_nan | (scaled_max == infinity);
  const Real lse = is_nan ? nan : scaled_max + log_sum;
  const Real to_output = is_nan ? nan : reciprocal;
  return {is_empty ? BasicLse<Real>::empty() : BasicLse<Real>(lse), is_empty ? Real(0) : to_output,
          !is_empty};
}

// The merge of several states over disjoint keys: O = sum_s weight_of(L_s) * O_s.
template <typename Real>
struct Merged {
  BasicLse<Real> lse;
  Real shift;  // softmax_shift of the largest L_s
  Real scale;  // 1 / sum_s exp(L_s - shift)

  // exp(L_s - lse), exactly 0 for an empty state. Not computed from lse itself: that is rounded,
  // and near 1e11 a rounding is worth a factor of exp(thousands).
  NEGINF_HOST_DEVICE Real weight_of(BasicLse<Real> state) const {
    using std::exp;
    return state.is_empty() ? Real(0) : exp(state.value() - shift) * scale;
  }
};

// The merge by lanes that each see some of the states: for_each_state(f) calls f with the Lse of
// each state of this lane, and reduce_max(x) and reduce_sum(x) give every lane the running_max and
// the sum of x over all lanes.
template <typename Real, typename ForEachState, typename ReduceMax, typename ReduceSum>
NEGINF_HOST_DEVICE Merged<Real> merge_by_lanes(const ForEachState& for_each_state,
                                               const ReduceMax& reduce_max,
                                               const ReduceSum& reduce_sum) {
  using std::exp;
  Real max = masked_score<Real>();
  for_each_state([&](BasicLse<Real> lse) { max = running_max(max, lse.value()); });
  max = reduce_max(max);
  const Real shift = softmax_shift(max);
  Real sum = 0;
  for_each_state([&](BasicLse<Real> lse) { sum += exp(lse.value() - shift); });
  const Finalized<Real> merged = finalize(max, reduce_sum(sum), Real(1));
  return {merged.lse, shift, merged.scale};
}

// lse_of(s) is the Lse of state s; no state at all gives empty.
template <typename Real, typename LseOf>
NEGINF_HOST_DEVICE Merged<Real> merge(int num_states, const LseOf& lse_of) {
  const auto alone = [](Real x) { return x; };
  return merge_by_lanes<Real>(
      [&](const auto& use) {
        for (int s = 0; s < num_states; ++s) use(lse_of(s));
      },
      alone, alone);
}

// Merges the sink, the state (0, sink), into a finished row. sink = -inf changes nothing; a sink
// of +inf or NaN makes the row NaN, O included also where it sees no key.
template <typename Real>
NEGINF_HOST_DEVICE Finalized<Real> merge_sink(Finalized<Real> keys, Real sink) {
  const BasicLse<Real> sink_lse(sink);
  const auto merged = merge<Real>(2, [&](int s) { return s == 0 ? keys.lse : sink_lse; });
  const bool is_nan = merged.scale != merged.scale;
  return {merged.lse, is_nan ? merged.scale : keys.scale * merged.weight_of(keys.lse),
          keys.sees_keys || is_nan};
}

}  // namespace neginf
