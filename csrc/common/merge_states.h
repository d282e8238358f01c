// Where the states of a merged row are, for host and device: stacked in one tensor, or each in a
// tensor of its own. RowStates has the same functions for both.
#pragma once

#include <cstdint>

#include "../params.h"

namespace neginf {

// One merged row.
struct MergeRow {
  int batch;
  int row;
  int head;

  NEGINF_HOST_DEVICE int64_t offset(const CombineStrides& strides) const {
    return batch * strides.batch + row * strides.row + head * strides.head;
  }
};

template <typename Partial, typename States>
class RowStates;

template <typename Partial, typename Real>
class RowStates<Partial, StackedStates<Real>> {
 public:
  NEGINF_HOST_DEVICE RowStates(const StackedStates<Real>& states, MergeRow row)
      : out_(static_cast<const Partial*>(states.out) + row.offset(states.out_strides)),
        lse_(states.lse + row.offset(states.lse_strides)),
        out_stride_(states.out_strides.split),
        lse_stride_(states.lse_strides.split) {}

  NEGINF_HOST_DEVICE const Partial* out(int state) const { return out_ + state * out_stride_; }
  NEGINF_HOST_DEVICE BasicLse<Real> lse(int state) const { return lse_[state * lse_stride_]; }

 private:
  const Partial* out_;
  const BasicLse<Real>* lse_;
  int64_t out_stride_, lse_stride_;
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
