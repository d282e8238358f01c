// The divisor of an attention row: what the backward divides exp(score) by.
//
// It is not the public Lse. A row without keys has L = -inf, and exp(-inf - -inf) is NaN; a padding
// row of a tile has no L at all, and its scores are 0. So:
//     row has keys                    divisor = L      P = exp(s - L)
//     row is empty (public L = -inf)  divisor = 0      P = exp(-inf - 0) = 0
//     row is out of bounds (padding)  divisor = +inf   P = exp(0 - inf) = 0
// This +inf is the only one in the library. It never leaves the backward: there is no way from a
// Divisor back to a number or to a Lse. No forward file includes this header.
#pragma once

#include "lse.h"

namespace neginf {

template <typename Real>
class BasicLog2Divisor;

template <typename Real>
class BasicDivisor {
 public:
  // A +inf that came in from outside is no empty row and no padding either: it makes its row NaN.
  static NEGINF_HOST_DEVICE BasicDivisor of(BasicLse<Real> lse) {
    constexpr Real nan = std::numeric_limits<Real>::quiet_NaN();
    if (!may_be_public(lse.value())) return BasicDivisor(nan);
    return BasicDivisor(lse.is_empty() ? Real(0) : lse.value());
  }

  static NEGINF_HOST_DEVICE BasicDivisor out_of_bounds() {
    constexpr Real infinity = std::numeric_limits<Real>::infinity();
    return BasicDivisor(infinity);
  }

  // exp(score - divisor). A masked key has probability exactly 0 even in a row whose L is NaN: the
  // row's NaN must not reach a key it does not see.
  NEGINF_HOST_DEVICE Real probability(Real score) const {
    using std::exp;
    return exp(exponent(score));
  }

  NEGINF_HOST_DEVICE Real exponent(Real score) const {
    return is_masked(score) ? score : score - value_;
  }

 private:
  explicit NEGINF_HOST_DEVICE BasicDivisor(Real value) : value_(value) {}

  friend class BasicLog2Divisor<Real>;

  Real value_;
};

// The same in base 2, for kernels that fold the scale of the scores into the exponent:
//     P = exp2(exponent(raw, scale * log2(e)))   with s = raw * scale
template <typename Real>
class BasicLog2Divisor {
 public:
  BasicLog2Divisor() = default;  // of nothing yet
  explicit NEGINF_HOST_DEVICE BasicLog2Divisor(BasicDivisor<Real> divisor)
      : value_(divisor.value_ * Real(1.4426950408889634)) {}

  // Divides by 1: for a score that is an exponent already.
  static NEGINF_HOST_DEVICE BasicLog2Divisor none() { return BasicLog2Divisor(Real(0)); }

  NEGINF_HOST_DEVICE Real exponent(Real raw, Real scale_log2) const {
    using std::fma;
    return fma(raw, scale_log2, -value_);
  }

  // One fma rounds the divisor before it is subtracted, which is off by half a unit in its last
  // place: less than 2^-14 up to here, and factors of exp(thousands) near 1e11. Beyond, as for a
  // NaN, only Divisor::probability will do.
  NEGINF_HOST_DEVICE bool is_exact() const { return value_ <= kLargest && -value_ <= kLargest; }

 private:
  static constexpr Real kLargest = 1024;

  explicit NEGINF_HOST_DEVICE BasicLog2Divisor(Real value) : value_(value) {}

  Real value_;
};

using Divisor = BasicDivisor<float>;
using Log2Divisor = BasicLog2Divisor<float>;
static_assert(sizeof(Divisor) == sizeof(float), "a buffer of Divisor is a buffer of float");
static_assert(sizeof(Log2Divisor) == sizeof(float));

}  // namespace neginf
