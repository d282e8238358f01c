// A test program is a list of CHECKs; it prints the ones that fail and returns 1.
#pragma once

#include <cmath>
#include <cstdio>
#include <limits>

inline int failures = 0;

#define CHECK(...)                                                  \
  do {                                                              \
    if (!(__VA_ARGS__)) {                                           \
      std::printf("%s:%d: %s\n", __FILE__, __LINE__, #__VA_ARGS__); \
      ++failures;                                                   \
    }                                                               \
  } while (false)

inline int report() { return failures == 0 ? 0 : 1; }

template <typename Real>
constexpr Real kInf = std::numeric_limits<Real>::infinity();
template <typename Real>
constexpr Real kNan = std::numeric_limits<Real>::quiet_NaN();

template <typename Real>
bool near(Real got, Real expected) {
  const Real eps = std::numeric_limits<Real>::epsilon();
  return std::fabs(got - expected) <= 4 * eps * (1 + std::fabs(expected));
}
