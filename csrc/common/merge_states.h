// Where the states of a merged row are, for host and device: stacked in one tensor, or each in a
// tensor of its own. RowStates has the same functions for both.
#pragma once

#include <cstdint>

#include "../params.h"

namespace neginf {

// One merged row.
struct MergeRow {
  unsigned batch;
  unsigned row;
  unsigned head;

  NEGINF_HOST_DEVICE int64_t offset(const CombineStrides& strides) const {
    return batch * strides.batch + head * strides.head + row * strides.row;
  }
};

template <typename Partial, typename States>
class RowStates;

template <typename Partial, typename Real>
class RowStates<Partial, StackedStates<Real>> {
 public:
  NEGINF_HOST_DEVICE RowStates(const StackedStates<Real>& states, MergeRow row)
      : states_(states),
        out_offset_(row.offset(states.out_strides)),
        lse_offset_(row.offset(states.lse_strides)) {}

  NEGINF_HOST_DEVICE const Partial* out(int state) const {
    return static_cast<const Partial*>(states_.out) + out_offset_ +
           state * states_.out_strides.split;
  }
  NEGINF_HOST_DEVICE BasicLse<Real> lse(int state) const {
    return states_.lse[lse_offset_ + state * states_.lse_strides.split];
  }

 private:
  // Offsets and not pointers: nvcc 13.0 reads an lse from local memory if its address is kept here.
  const StackedStates<Real>& states_;
  int64_t out_offset_, lse_offset_;
};

template <typename Partial, typename Real>
class RowStates<Partial, ListedStates<Real>> {
 public:
  NEGINF_HOST_DEVICE RowStates(const ListedStates<Real>& states, MergeRow row)
      : states_(states), row_(row) {}

  NEGINF_HOST_DEVICE const Partial* out(int state) const {
    const auto& one = states_.at[state];
    return static_cast<const Partial*>(one.out) + row_.offset(one.out_strides);
  }
  NEGINF_HOST_DEVICE BasicLse<Real> lse(int state) const {
    const auto& one = states_.at[state];
    return one.lse[row_.offset(one.lse_strides)];
  }

 private:
  const ListedStates<Real>& states_;
  MergeRow row_;
};

// use(the states) with their own type.
template <typename Real, typename Use>
void dispatch_states(const CombineInputs<Real>& inputs, const Use& use) {
  if (inputs.listed != nullptr) {
    use(*inputs.listed);
  } else {
    use(inputs.stacked);
  }
}

}  // namespace neginf
