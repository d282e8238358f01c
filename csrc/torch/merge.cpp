// neginf::merge and merge_backward: merging attention states that are a list of tensors, each where
// it is and with the strides it has.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "torch/inputs.h"
#include "torch/states.h"

namespace neginf {

namespace {

using at::Tensor;
using at::TensorList;

std::tuple<Tensor, Tensor> merge_states(TensorList outs, TensorList lses, OptionalDType out_dtype) {
  const States states = States::listed(outs, lses);
  const at::ScalarType dtype = out_dtype.value_or(outs[0].scalar_type());
  states.check(dtype, "out_dtype");
  return states.merge(dtype);
}

std::tuple<Tensor, Tensor> merge_backward(const std::optional<Tensor>& dout,
                                          const std::optional<Tensor>& dlse, TensorList outs,
                                          TensorList lses) {
  return States::listed(outs, lses).backward(dout, dlse);
}

std::tuple<Tensor, Tensor> merge_meta(TensorList outs, TensorList lses, OptionalDType out_dtype) {
  States::listed(outs, lses).check_devices();
  const at::ScalarType dtype = out_dtype.value_or(outs[0].scalar_type());
  return {at::empty_symint(outs[0].sym_sizes(), outs[0].options().dtype(dtype)),
          at::empty_symint(lses[0].sym_sizes(), lses[0].options())};
}

std::tuple<Tensor, Tensor> merge_backward_meta(const std::optional<Tensor>& dout,
                                               const std::optional<Tensor>& dlse, TensorList outs,
                                               TensorList lses) {
  States::listed(outs, lses).check_devices();
  check_same_device({"outs[0]", outs[0]}, {{"dout", dout}, {"dlse", dlse}});
  const auto stacked = [](TensorList list) {
    std::vector<c10::SymInt> sizes{static_cast<int64_t>(list.size())};
    const auto of_one = list[0].sym_sizes();
    sizes.insert(sizes.end(), of_one.begin(), of_one.end());
    return at::empty_symint(sizes, list[0].options());
  };
  return {stacked(outs), stacked(lses)};
}

class Merge : public torch::autograd::Function<Merge> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx,
                                                TensorList outs, TensorList lses,
                                                OptionalDType out_dtype) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("neginf::merge", "")
                               .typed<decltype(merge_states)>();
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto [out, lse] = op.call(outs, lses, out_dtype);
    torch::autograd::variable_list saved = outs.vec();
    saved.insert(saved.end(), lses.begin(), lses.end());
    ctx->save_for_backward(std::move(saved));
    ctx->set_materialize_grads(false);
    return {out, lse};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("neginf::merge_backward", "")
                               .typed<decltype(merge_backward)>();
    const auto saved = ctx->get_saved_variables();
    const TensorList states(saved);
    const size_t count = states.size() / 2;
    const auto optional = [](const Tensor& grad) {
      return grad.defined() ? std::optional<Tensor>(grad) : std::nullopt;
    };
    const auto [douts, dlses] = op.call(optional(grads[0]), optional(grads[1]),
                                        states.slice(0, count), states.slice(count, count));
    torch::autograd::variable_list gradients = douts.unbind();
    for (const Tensor& dlse : dlses.unbind()) gradients.push_back(dlse);
    gradients.emplace_back();  // of out_dtype
    return gradients;
  }
};

std::tuple<Tensor, Tensor> merge_autograd(TensorList outs, TensorList lses,
                                          OptionalDType out_dtype) {
  auto results = Merge::apply(outs, lses, out_dtype);
  return {results[0], results[1]};
}

}  // namespace

TORCH_LIBRARY_IMPL(neginf, CPU, m) {
  m.impl("merge", merge_states);
  m.impl("merge_backward", merge_backward);
}
TORCH_LIBRARY_IMPL(neginf, CUDA, m) {
  m.impl("merge", merge_states);
  m.impl("merge_backward", merge_backward);
}
TORCH_LIBRARY_IMPL(neginf, Meta, m) {
  m.impl("merge", merge_meta);
  m.impl("merge_backward", merge_backward_meta);
}
TORCH_LIBRARY_IMPL(neginf, Autograd, m) {
  m.impl("merge", merge_autograd);
  m.impl("merge_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace neginf
