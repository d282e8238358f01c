// Merging one row of several attention states, forward and backward: the arithmetic that the CPU
// and the CUDA combine share. Who loads and who sums over head_dim is theirs.
//     L = ln sum_s exp(L_s)     w_s = exp(L_s - L)     O = sum_s w_s O_s
//     dO_s = w_s dO             dL_s = w_s (dO . O_s - dO . O + dL)
//     with dO . O = sum_s w_s (dO . O_s)
// The backward takes dO . O from the states, not from O: that one is rounded to its dtype.
#pragma once

#include "../lse.h"

namespace neginf {

// What one state is to the merged row. The payload of an empty state may be anything, stale NaN
// included, so it is left out by select: 0 * NaN is NaN. A merged row is empty only when all of its
// states are, so its gradient is dropped by the same select.
template <typename Real>
struct MergeShare {
  bool contributes;
  Real weight;

  static NEGINF_HOST_DEVICE MergeShare of(BasicLse<Real> state, const Merged<Real>& merged) {
    return {!state.is_empty(), merged.weight_of(state)};
  }

  // O_s to its term of O, dO to dO_s, dO . O_s to its term of dO . O, dL_s from what w_s
  // multiplies.
  NEGINF_HOST_DEVICE Real weighted(Real value) const {
    return contributes ? weight * value : Real(0);
  }
  // sum + weighted(value) in one instruction, where the machine has it.
  NEGINF_HOST_DEVICE Real add_weighted(Real sum, Real value) const {
    return contributes ? sum + weight * value : sum;
  }
};

}  // namespace neginf
