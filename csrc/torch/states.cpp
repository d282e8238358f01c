#include "torch/states.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <string>

#include "torch/backend.h"
#include "torch/inputs.h"

namespace neginf {

namespace {

using at::Tensor;

bool is_supported(at::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kHalf ||
         dtype == at::kBFloat16;
}

// Strides of (batch, seqlen, heads, d) or (total, heads, d), of which the states lead if
// is_stacked.
CombineStrides out_strides_of(const Tensor& tensor, bool is_stacked) {
  const bool is_varlen = tensor.dim() - is_stacked == 3;
  return {is_stacked ? tensor.stride(0) : 0, is_varlen ? 0 : tensor.stride(-4), tensor.stride(-3),
          tensor.stride(-2)};
}

// Strides of (batch, heads, seqlen) or (heads, total).
CombineStrides lse_strides_of(const Tensor& tensor, bool is_stacked) {
  const bool is_varlen = tensor.dim() - is_stacked == 2;
  return {is_stacked ? tensor.stride(0) : 0, is_varlen ? 0 : tensor.stride(-3), tensor.stride(-1),
          tensor.stride(-2)};
}

Tensor with_last_stride_1(const Tensor& tensor) {
  return tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
}

void check_public_values_of(const Tensor& lse, const std::string& name) {
  if (!lse.is_cpu()) return;
  lse.scalar_type() == at::kDouble ? check_public_values<double>(lse, name.c_str())
                                   : check_public_values<float>(lse, name.c_str());
}

}  // namespace

States States::stacked(const Tensor& out_partial, const Tensor& lse_partial) {
  return {true, out_partial, lse_partial};
}

States States::listed(at::TensorList outs, at::TensorList lses) {
  TORCH_CHECK_VALUE(!outs.empty(), "outs: got 0 states; accepted is 1 or more");
  TORCH_CHECK_VALUE(lses.size() == outs.size(), "lses: got ", lses.size(),
                    " tensors; accepted is one for each of the ", outs.size(), " outs");
  return {false, outs, lses};
}

void States::check_devices() const {
  const char* first_name = is_stacked_ ? "out_partial" : "outs[0]";
  if (is_stacked_) {
    check_same_device({first_name, outs_[0]}, {{"lse_partial", lses_[0]}});
    return;
  }
  for (const auto& [list, what] : {std::pair(&outs_, "outs["), std::pair(&lses_, "lses[")}) {
    for (size_t i = 0; i < list->size(); ++i) {
      const std::string name = what + std::to_string(i) + "]";
      check_same_device({first_name, outs_[0]}, {{name.c_str(), (*list)[i]}});
    }
  }
}

// Every state like the first one.
void States::check_list() const {
  for (const auto& [list, what] : {std::pair(&outs_, "outs["), std::pair(&lses_, "lses[")}) {
    const Tensor& first = (*list)[0];
    const std::string first_name = std::string(what) + "0]";
    for (size_t i = 1; i < list->size(); ++i) {
      const Tensor& one = (*list)[i];
      const std::string name = what + std::to_string(i) + "]";
      TORCH_CHECK_VALUE(one.sizes() == first.sizes(), name, ": got shape ", one.sizes(),
                        "; accepted is that of ", first_name, ", ", first.sizes());
      TORCH_CHECK_TYPE(one.scalar_type() == first.scalar_type(), name, ": got dtype ",
                       one.scalar_type(), "; accepted is that of ", first_name, ", ",
                       first.scalar_type());
    }
  }
}

void States::check(at::ScalarType dtype, const char* dtype_argument) const {
  check_devices();
  if (!is_stacked_) check_list();
  const char* out_name = is_stacked_ ? "out_partial" : "outs[0]";
  const char* lse_name = is_stacked_ ? "lse_partial" : "lses[0]";
  const Tensor& out = outs_[0];
  const Tensor& lse = lses_[0];
  const int64_t lead = is_stacked_;
  TORCH_CHECK_VALUE(out.dim() - lead == 3 || out.dim() - lead == 4, out_name, ": got ", out.dim(),
                    " dimensions; accepted are ",
                    is_stacked_ ? "5, (splits, batch, seqlen, heads, head_dim), or 4, (splits, "
                                  "total, heads, head_dim)"
                                : "4, (batch, seqlen, heads, head_dim), or 3, (total, heads, "
                                  "head_dim)");
  const at::ScalarType accumulate = accumulate_type(out.scalar_type());
  TORCH_CHECK_TYPE(lse.scalar_type() == accumulate, lse_name, ": got dtype ", lse.scalar_type(),
                   "; accepted is ", accumulate);
  TORCH_CHECK_TYPE(is_supported(out.scalar_type()), out_name, ": got dtype ", out.scalar_type(),
                   "; accepted are float32, float16 and bfloat16, and on the CPU float64");
  TORCH_CHECK_TYPE(is_supported(dtype) && accumulate_type(dtype) == accumulate, dtype_argument,
                   ": got dtype ", dtype, "; accepted for ", out_name, " of ", out.scalar_type(),
                   " are ",
                   accumulate == at::kDouble ? "float64" : "float32, float16 and bfloat16");
  TORCH_CHECK_TYPE(!out.is_cuda() || accumulate == at::kFloat, out_name, ": got dtype float64 on ",
                   out.device(), "; accepted are float32, float16 and bfloat16");
  std::vector<int64_t> expected = out.sizes().slice(0, out.dim() - 1).vec();
  std::swap(expected[expected.size() - 1], expected[expected.size() - 2]);  // heads before rows
  TORCH_CHECK_VALUE(lse.sizes() == expected, lse_name, ": got shape ", lse.sizes(),
                    "; accepted is ", at::IntArrayRef(expected), " for ", out_name, " of shape ",
                    out.sizes());
  TORCH_CHECK_VALUE(out.size(-1) >= 1, out_name, ": got head_dim 0; accepted is 1 or more");
  for (const int64_t size : out.sizes()) {
    TORCH_CHECK_VALUE(size < kMaxSeqlen, out_name, ": got size ", size,
                      "; accepted is less than 2^30");
  }
  for (size_t i = 0; i < lses_.size(); ++i) {
    check_public_values_of(lses_[i], is_stacked_ ? lse_name : "lses[" + std::to_string(i) + "]");
  }
}

States::Sizes States::sizes() const {
  const Tensor& out = outs_[0];
  const bool is_varlen = out.dim() - is_stacked_ == 3;
  return {is_stacked_ ? out.size(0) : static_cast<int64_t>(outs_.size()),
          is_varlen ? 1 : out.size(-4), out.size(-3), out.size(-2), out.size(-1)};
}

bool States::is_too_long() const {
  return !is_stacked_ && outs_.size() > ListedStates<float>::kMost;
}

std::vector<States> States::parts() const {
  const at::TensorList outs(outs_), lses(lses_);
  std::vector<States> parts;
  for (size_t first = 0; first < outs.size(); first += ListedStates<float>::kMost) {
    const size_t count = std::min<size_t>(ListedStates<float>::kMost, outs.size() - first);
    parts.push_back(States(false, outs.slice(first, count), lses.slice(first, count)));
  }
  return parts;
}

// Without a rounding in between: in the dtype of lse.
States States::merged_each(const std::vector<States>& parts) {
  std::vector<Tensor> outs, lses;
  for (const States& part : parts) {
    const auto [out, lse] = part.merge(part.lses_[0].scalar_type());
    outs.push_back(out);
    lses.push_back(lse);
  }
  return {false, outs, lses};
}

States States::readable() const {
  States states = *this;
  for (Tensor& out : states.outs_) out = with_last_stride_1(out);
  return states;
}

// `list` must outlive nothing but this call: kernels get a copy.
template <typename Params, typename Real>
void States::launch(const Kernel& kernel, Params& params, ListedStates<Real>& list) const {
  const Sizes shape = sizes();
  params.num_splits = static_cast<int>(shape.states);
  params.batch = static_cast<int>(shape.batch);
  params.seqlen = static_cast<int>(shape.seqlen);
  params.num_heads = static_cast<int>(shape.heads);
  params.head_dim = static_cast<int>(shape.head_dim);
  params.partial_dtype = dtype_of(outs_[0], "out_partial");
  if (is_stacked_) {
    params.stacked = {outs_[0].const_data_ptr(), lse_data<Real>(lses_[0]),
                      out_strides_of(outs_[0], true), lse_strides_of(lses_[0], true)};
  } else {
    for (size_t i = 0; i < outs_.size(); ++i) {
      list.at[i] = {outs_[i].const_data_ptr(), lse_data<Real>(lses_[i]),
                    out_strides_of(outs_[i], false), lse_strides_of(lses_[i], false)};
    }
    params.listed = &list;
  }
  params.stream = current_stream(outs_[0]);
  neginf::launch(kernel, params);
}

template <typename Real>
void States::launch_merge(const Kernel& kernel, const Tensor& out, const Tensor& lse) const {
  CombineParams<Real> params{};
  params.out = out.mutable_data_ptr();
  params.lse = lse_data<Real>(lse);
  params.out_strides = out_strides_of(out, false);
  params.lse_strides = lse_strides_of(lse, false);
  ListedStates<Real> list;
  launch(kernel, params, list);
}

template <typename Real>
void States::launch_backward(const Kernel& kernel, const Tensor& dout, const Tensor& dlse,
                             const Tensor& douts, const Tensor& dlses) const {
  CombineBackwardParams<Real> params{};
  if (dout.defined()) {
    params.dout = dout.const_data_ptr();
    params.dout_strides = out_strides_of(dout, false);
  }
  if (dlse.defined()) {
    params.dlse = dlse.const_data_ptr<Real>();
    params.dlse_strides = lse_strides_of(dlse, false);
  }
  params.dout_partial = douts.mutable_data_ptr();
  params.dlse_partial = dlses.mutable_data_ptr<Real>();
  params.dout_partial_strides = out_strides_of(douts, true);
  params.dlse_partial_strides = lse_strides_of(dlses, true);
  ListedStates<Real> list;
  launch(kernel, params, list);
}

Tensor States::merge_into(const Tensor& out) const {
  const c10::DeviceGuard guard(out.device());
  const Kernel& kernel = select_kernel(Operation::combine, out, dtype_of(out, "out"), out.size(-1));
  const Tensor lse = at::empty(merged_lse_sizes(), lses_[0].options());
  if (out.numel() == 0) return lse;
  const States states = readable();
  if (lse.scalar_type() == at::kDouble) {
    states.launch_merge<double>(kernel, out, lse);
  } else {
    states.launch_merge<float>(kernel, out, lse);
  }
  return lse;
}

std::tuple<Tensor, Tensor> States::merge(at::ScalarType out_dtype) const {
  if (is_too_long()) return merged_each(parts()).merge(out_dtype);
  const Tensor out = at::empty(merged_out_sizes(), outs_[0].options().dtype(out_dtype));
  const Tensor lse = merge_into(out);
  return {out, lse};
}

std::tuple<Tensor, Tensor> States::backward(const std::optional<Tensor>& dout_in,
                                            const std::optional<Tensor>& dlse_in) const {
  check_same_device({is_stacked_ ? "out_partial" : "outs[0]", outs_[0]},
                    {{"dout", dout_in}, {"dlse", dlse_in}});
  // dout has the dtype of the merged out; without one there is nothing to tell it by, nor need to.
  check(dout_in.value_or(outs_[0]).scalar_type(), "dout");
  if (dout_in.has_value()) {
    TORCH_CHECK_VALUE(dout_in->sizes() == merged_out_sizes(), "dout: got shape ", dout_in->sizes(),
                      "; accepted is ", merged_out_sizes());
  }
  if (dlse_in.has_value()) {
    TORCH_CHECK_VALUE(dlse_in->sizes() == merged_lse_sizes(), "dlse: got shape ", dlse_in->sizes(),
                      "; accepted is ", merged_lse_sizes());
    TORCH_CHECK_TYPE(dlse_in->scalar_type() == lses_[0].scalar_type(), "dlse: got dtype ",
                     dlse_in->scalar_type(), "; accepted is ", lses_[0].scalar_type());
  }
  const c10::DeviceGuard guard(outs_[0].device());
  const Tensor dout = dout_in.has_value() ? with_last_stride_1(*dout_in) : Tensor();
  const Tensor dlse = dlse_in.value_or(Tensor());
  const auto stacked_sizes = [&](const Tensor& merged_like, at::IntArrayRef merged_sizes) {
    std::vector<int64_t> all{sizes().states};
    all.insert(all.end(), merged_sizes.begin(), merged_sizes.end());
    return at::empty(all, merged_like.options());
  };
  const Tensor douts = stacked_sizes(outs_[0], merged_out_sizes());
  const Tensor dlses = stacked_sizes(lses_[0], merged_lse_sizes());
  if (douts.numel() != 0) backward_into(dout, dlse, douts, dlses);
  return {douts, dlses};
}

void States::backward_into(const Tensor& dout, const Tensor& dlse, const Tensor& douts,
                           const Tensor& dlses) const {
  if (is_too_long()) {
    const auto optional = [](const Tensor& grad) {
      return grad.defined() ? std::optional<Tensor>(grad) : std::nullopt;
    };
    const std::vector<States> parts = this->parts();
    const auto [douts_of_parts, dlses_of_parts] =
        merged_each(parts).backward(optional(dout), optional(dlse));
    int64_t first = 0;
    for (size_t i = 0; i < parts.size(); ++i) {
      const int64_t count = parts[i].sizes().states;
      parts[i].backward_into(douts_of_parts[i], dlses_of_parts[i], douts.narrow(0, first, count),
                             dlses.narrow(0, first, count));
      first += count;
    }
    return;
  }
  const DType kernel_dtype = dtype_of(dout.defined() ? dout : outs_[0], "dout");
  const Kernel& kernel =
      select_kernel(Operation::combine_backward, outs_[0], kernel_dtype, outs_[0].size(-1));
  const States states = readable();
  if (dlses.scalar_type() == at::kDouble) {
    states.launch_backward<double>(kernel, dout, dlse, douts, dlses);
  } else {
    states.launch_backward<float>(kernel, dout, dlse, douts, dlses);
  }
}

}  // namespace neginf
