// neginf::combine, combine_out and combine_backward: merging attention states over disjoint keys.
#include <ATen/MemoryOverlap.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include "torch/inputs.h"
#include "torch/states.h"

namespace neginf {

namespace {

using at::Tensor;
std::tuple<Tensor, Tensor> combine(const Tensor& out_partial, const Tensor& lse_partial,
                                   OptionalDType out_dtype) {
  const States states = States::stacked(out_partial, lse_partial);
  const at::ScalarType dtype = out_dtype.value_or(out_partial.scalar_type());
  states.check(dtype, "out_dtype");
  return states.merge(dtype);
}

// Rows are merged in no particular order, so none may be written where another is still to be read.
void check_own_memory(const Tensor& out, const Tensor& out_partial, const Tensor& lse_partial) {
  TORCH_CHECK_VALUE(
      at::has_internal_overlap(out) != at::MemOverlap::Yes,
      "out: got a tensor whose elements share memory; accepted is one place for each");
  for (const Argument& input :
       {Argument("out_partial", out_partial), Argument("lse_partial", lse_partial)}) {
    const auto overlap = at::get_overlap_status(out, *input.tensor);
    TORCH_CHECK_VALUE(
        overlap != at::MemOverlapStatus::Full && overlap != at::MemOverlapStatus::Partial,
        "out: got memory of ", input.name, "; accepted is memory of its own");
  }
}

Tensor combine_out(const Tensor& out_partial, const Tensor& lse_partial, Tensor out) {
  const States states = States::stacked(out_partial, lse_partial);
  states.check(out.scalar_type(), "out");
  check_same_device({"out_partial", out_partial}, {{"out", out}});
  TORCH_CHECK_VALUE(out.sizes() == states.merged_out_sizes(), "out: got shape ", out.sizes(),
                    "; accepted is ", states.merged_out_sizes());
  check_own_memory(out, out_partial, lse_partial);
  TORCH_CHECK_VALUE(out.stride(-1) == 1 || out.size(-1) == 1, "out: got last stride ",
                    out.stride(-1), "; accepted is 1");
  return states.merge_into(out);
}

std::tuple<Tensor, Tensor> combine_backward(const std::optional<Tensor>& dout,
                                            const std::optional<Tensor>& dlse,
                                            const Tensor& out_partial, const Tensor& lse_partial) {
  return States::stacked(out_partial, lse_partial).backward(dout, dlse);
}

std::tuple<Tensor, Tensor> combine_meta(const Tensor& out_partial, const Tensor& lse_partial,
                                        OptionalDType out_dtype) {
  check_same_device({"out_partial", out_partial}, {{"lse_partial", lse_partial}});
  const at::ScalarType dtype = out_dtype.value_or(out_partial.scalar_type());
  return {at::empty_symint(out_partial.sym_sizes().slice(1), out_partial.options().dtype(dtype)),
          at::empty_symint(lse_partial.sym_sizes().slice(1), lse_partial.options())};
}

Tensor combine_out_meta(const Tensor& out_partial, const Tensor& lse_partial, Tensor out) {
  check_same_device({"out_partial", out_partial}, {{"lse_partial", lse_partial}, {"out", out}});
  return at::empty_symint(lse_partial.sym_sizes().slice(1), lse_partial.options());
}

std::tuple<Tensor, Tensor> combine_backward_meta(const std::optional<Tensor>& dout,
                                                 const std::optional<Tensor>& dlse,
                                                 const Tensor& out_partial,
                                                 const Tensor& lse_partial) {
  check_same_device({"out_partial", out_partial},
                    {{"lse_partial", lse_partial}, {"dout", dout}, {"dlse", dlse}});
  return {at::empty_symint(out_partial.sym_sizes(), out_partial.options()),
          at::empty_symint(lse_partial.sym_sizes(), lse_partial.options())};
}

std::tuple<Tensor, Tensor> call_combine(const Tensor& out_partial, const Tensor& lse_partial,
                                        OptionalDType out_dtype) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("neginf::combine", "")
                             .typed<decltype(combine)>();
  return op.call(out_partial, lse_partial, out_dtype);
}

class Combine : public torch::autograd::Function<Combine> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx,
                                                const Tensor& out_partial,
                                                const Tensor& lse_partial,
                                                OptionalDType out_dtype) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto [out, lse] = call_combine(out_partial, lse_partial, out_dtype);
    ctx->save_for_backward({out_partial, lse_partial});
    ctx->set_materialize_grads(false);
    return {out, lse};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("neginf::combine_backward", "")
                               .typed<decltype(combine_backward)>();
    const auto saved = ctx->get_saved_variables();
    const auto optional = [](const Tensor& grad) {
      return grad.defined() ? std::optional<Tensor>(grad) : std::nullopt;
    };
    auto [dout_partial, dlse_partial] =
        op.call(optional(grads[0]), optional(grads[1]), saved[0], saved[1]);
    return {dout_partial, dlse_partial, Tensor()};
  }
};

std::tuple<Tensor, Tensor> combine_autograd(const Tensor& out_partial, const Tensor& lse_partial,
                                            OptionalDType out_dtype) {
  auto results = Combine::apply(out_partial, lse_partial, out_dtype);
  return {results[0], results[1]};
}

Tensor call_combine_out(const Tensor& out_partial, const Tensor& lse_partial, const Tensor& out) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("neginf::combine_out", "")
                             .typed<decltype(combine_out)>();
  return op.call(out_partial, lse_partial, out);
}

Tensor combine_out_autograd(const Tensor& out_partial, const Tensor& lse_partial, Tensor out) {
  using torch::autograd::isFwGradDefined;
  TORCH_CHECK_VALUE(!torch::autograd::compute_requires_grad(out_partial, lse_partial, out) &&
                        !isFwGradDefined(out_partial) && !isFwGradDefined(lse_partial) &&
                        !isFwGradDefined(out),
                    "out: got a destination together with inputs that need a gradient; accepted is "
                    "out=None, or a "
                    "call under torch.no_grad()");
  const at::AutoDispatchBelowAutograd guard;
  return call_combine_out(out_partial, lse_partial, out);
}

// A key of its own, because inference mode leaves out the Autograd key: a tensor saved for some
// backward must know even there that it was written to.
Tensor combine_out_in_place(const Tensor& out_partial, const Tensor& lse_partial, Tensor out) {
  Tensor lse = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return call_combine_out(out_partial, lse_partial, out);
  }();
  torch::autograd::impl::bump_version(out);
  return lse;
}

}  // namespace

TORCH_LIBRARY_IMPL(neginf, CPU, m) {
  m.impl("combine", combine);
  m.impl("combine_out", combine_out);
  m.impl("combine_backward", combine_backward);
}
TORCH_LIBRARY_IMPL(neginf, CUDA, m) {
  m.impl("combine", combine);
  m.impl("combine_out", combine_out);
  m.impl("combine_backward", combine_backward);
}
TORCH_LIBRARY_IMPL(neginf, Meta, m) {
  m.impl("combine", combine_meta);
  m.impl("combine_out", combine_out_meta);
  m.impl("combine_backward", combine_backward_meta);
}
TORCH_LIBRARY_IMPL(neginf, ADInplaceOrView, m) { m.impl("combine_out", combine_out_in_place); }
TORCH_LIBRARY_IMPL(neginf, Autograd, m) {
  m.impl("combine", combine_autograd);
  m.impl("combine_out", combine_out_autograd);
  m.impl("combine_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace neginf
