// Attention states that are to be merged, as a caller passes them: checks, and the launch of the
// combine kernels. Shared by neginf::combine, whose states are stacked in one tensor, and
// neginf::merge, whose states are a list of tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "kernels.h"

namespace neginf {

using OptionalDType = std::optional<at::ScalarType>;

class States {
 public:
  // (splits, batch, seqlen, heads, head_dim) and (splits, batch, heads, seqlen), or without batch.
  static States stacked(const at::Tensor& out_partial, const at::Tensor& lse_partial);
  // Each (batch, seqlen, heads, head_dim) and (batch, heads, seqlen), or without batch. Throws
  // unless there is an lse for each out, and at least one.
  static States listed(at::TensorList outs, at::TensorList lses);

  // All that can be checked of fake tensors: throws unless they are on one device.
  void check_devices() const;

  // Throws unless the states fit each other and a merged out of this dtype, known to the caller as
  // the dtype of `dtype_argument`.
  void check(at::ScalarType dtype, const char* dtype_argument) const;

  at::IntArrayRef merged_out_sizes() const { return outs_[0].sizes().slice(is_stacked_); }
  at::IntArrayRef merged_lse_sizes() const { return lses_[0].sizes().slice(is_stacked_); }

  // What follows needs states that were checked.

  at::Tensor merge_into(const at::Tensor& out) const;  // returns lse
  std::tuple<at::Tensor, at::Tensor> merge(at::ScalarType out_dtype) const;
  // Gradients of all states, stacked.
  std::tuple<at::Tensor, at::Tensor> backward(const std::optional<at::Tensor>& dout,
                                              const std::optional<at::Tensor>& dlse) const;

 private:
  struct Sizes {
    int64_t states, batch, seqlen, heads, head_dim;  // varlen is one batch entry
  };

  States(bool is_stacked, at::TensorList outs, at::TensorList lses)
      : is_stacked_(is_stacked), outs_(outs.vec()), lses_(lses.vec()) {}

  void check_list() const;
  Sizes sizes() const;

  // A list that is too long for one launch is merged in parts, whose merged states are merged.
  bool is_too_long() const;
  std::vector<States> parts() const;
  static States merged_each(const std::vector<States>& parts);

  void backward_into(const at::Tensor& dout, const at::Tensor& dlse, const at::Tensor& douts,
                     const at::Tensor& dlses) const;
  States readable() const;  // with last stride 1
  template <typename Real>
  void launch_merge(const Kernel& kernel, const at::Tensor& out, const at::Tensor& lse) const;
  template <typename Real>
  void launch_backward(const Kernel& kernel, const at::Tensor& dout, const at::Tensor& dlse,
                       const at::Tensor& douts, const at::Tensor& dlses) const;
  template <typename Params, typename Real>
  void launch(const Kernel& kernel, Params& params, ListedStates<Real>& list) const;

  bool is_stacked_;
  std::vector<at::Tensor> outs_, lses_;  // one of each, if stacked
};

}  // namespace neginf
