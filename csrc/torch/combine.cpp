// neginf::combine, combine_out and combine_backward: merging attention states over disjoint keys.
#include <ATen/MemoryOverlap.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include "torch/backend.h"
#include "torch/inputs.h"

namespace neginf {

namespace {

using at::Tensor;
using OptionalDType = std::optional<at::ScalarType>;

// The four axes of the partials behind splits, varlen as one batch entry.
struct CombineShape {
  int64_t splits, batch, seqlen, heads, head_dim;
};

bool is_varlen(const Tensor& out_partial) { return out_partial.dim() == 4; }

bool is_supported(at::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kHalf ||
         dtype == at::kBFloat16;
}

// `dtype` is that of the merged out, known to the caller as the dtype of `dtype_argument`.
CombineShape check_partials(const Tensor& out_partial, const Tensor& lse_partial,
                            at::ScalarType dtype, const char* dtype_argument) {
  check_same_device({"out_partial", out_partial}, {{"lse_partial", lse_partial}});
  TORCH_CHECK_VALUE(out_partial.dim() == 4 || out_partial.dim() == 5, "out_partial: got ",
                    out_partial.dim(),
                    " dimensions; accepted are 5, (splits, batch, seqlen, heads, "
                    "head_dim), or 4, (splits, total, heads, head_dim)");
  const int64_t dim = out_partial.dim();
  const at::ScalarType accumulate = accumulate_type(out_partial.scalar_type());
  TORCH_CHECK_TYPE(lse_partial.scalar_type() == accumulate, "lse_partial: got dtype ",
                   lse_partial.scalar_type(), "; accepted is ", accumulate);
  TORCH_CHECK_TYPE(is_supported(out_partial.scalar_type()), "out_partial: got dtype ",
                   out_partial.scalar_type(),
                   "; accepted are float32, float16 and bfloat16, and on the CPU float64");
  TORCH_CHECK_TYPE(is_supported(dtype) && accumulate_type(dtype) == accumulate, dtype_argument,
                   ": got dtype ", dtype, "; accepted for out_partial of ",
                   out_partial.scalar_type(), " are ",
                   accumulate == at::kDouble ? "float64" : "float32, float16 and bfloat16");
  TORCH_CHECK_TYPE(!out_partial.is_cuda() || accumulate == at::kFloat,
                   "out_partial: got dtype float64 on ", out_partial.device(),
                   "; accepted are float32, float16 and bfloat16");
  std::vector<int64_t> expected = out_partial.sizes().slice(0, dim - 1).vec();
  std::swap(expected[dim - 2], expected[dim - 3]);  // heads before rows
  TORCH_CHECK_VALUE(lse_partial.sizes() == expected, "lse_partial: got shape ", lse_partial.sizes(),
                    "; accepted is ", at::IntArrayRef(expected), " for out_partial of shape ",
                    out_partial.sizes());
  TORCH_CHECK_VALUE(out_partial.size(-1) >= 1,
                    "out_partial: got head_dim 0; accepted is 1 or more");
  for (const int64_t size : out_partial.sizes()) {
    TORCH_CHECK_VALUE(size < kMaxSeqlen, "out_partial: got size ", size,
                      "; accepted is less than 2^30");
  }
  if (lse_partial.is_cpu()) {
    accumulate == at::kDouble ? check_public_values<double>(lse_partial, "lse_partial")
                              : check_public_values<float>(lse_partial, "lse_partial");
  }
  return {out_partial.size(0), is_varlen(out_partial) ? 1 : out_partial.size(1),
          out_partial.size(dim - 3), out_partial.size(dim - 2), out_partial.size(dim - 1)};
}

// Strides of (splits, batch, seqlen, heads, d) or (splits, total, heads, d).
CombineStrides out_partial_strides_of(const Tensor& tensor) {
  return {tensor.stride(0), is_varlen(tensor) ? 0 : tensor.stride(1), tensor.stride(-3),
          tensor.stride(-2)};
}

// Strides of (splits, batch, heads, seqlen) or (splits, heads, total).
CombineStrides lse_partial_strides_of(const Tensor& tensor) {
  return {tensor.stride(0), tensor.dim() == 3 ? 0 : tensor.stride(1), tensor.stride(-1),
          tensor.stride(-2)};
}

CombineStrides merged_out_strides_of(const Tensor& tensor) {
  return {0, tensor.dim() == 3 ? 0 : tensor.stride(0), tensor.stride(-3), tensor.stride(-2)};
}

CombineStrides merged_lse_strides_of(const Tensor& tensor) {
  return {0, tensor.dim() == 2 ? 0 : tensor.stride(0), tensor.stride(-1), tensor.stride(-2)};
}

Tensor with_last_stride_1(const Tensor& tensor) {
  return tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
}

template <typename Real>
void set_inputs(CombineInputs<Real>& inputs, const CombineShape& shape, const Tensor& out_partial,
                const Tensor& lse_partial) {
  inputs.num_splits = static_cast<int>(shape.splits);
  inputs.batch = static_cast<int>(shape.batch);
  inputs.seqlen = static_cast<int>(shape.seqlen);
  inputs.num_heads = static_cast<int>(shape.heads);
  inputs.head_dim = static_cast<int>(shape.head_dim);
  inputs.partial_dtype = dtype_of(out_partial, "out_partial");
  inputs.out_partial = out_partial.const_data_ptr();
  inputs.lse_partial = lse_data<Real>(lse_partial);
  inputs.out_partial_strides = out_partial_strides_of(out_partial);
  inputs.lse_partial_strides = lse_partial_strides_of(lse_partial);
  inputs.stream = current_stream(out_partial);
}

template <typename Real>
void launch_combine(const Kernel& kernel, const CombineShape& shape, const Tensor& out_partial,
                    const Tensor& lse_partial, const Tensor& out, const Tensor& lse) {
  CombineParams<Real> params{};
  set_inputs(params, shape, out_partial, lse_partial);
  params.out = out.mutable_data_ptr();
  params.lse = lse_data<Real>(lse);
  params.out_strides = merged_out_strides_of(out);
  params.lse_strides = merged_lse_strides_of(lse);
  launch(kernel, params);
}

template <typename Real>
void launch_combine_backward(const Kernel& kernel, const CombineShape& shape,
                             const Tensor& out_partial, const Tensor& lse_partial,
                             const Tensor& dout, const Tensor& dlse, const Tensor& dout_partial,
                             const Tensor& dlse_partial) {
  CombineBackwardParams<Real> params{};
  set_inputs(params, shape, out_partial, lse_partial);
  if (dout.defined()) {
    params.dout = dout.const_data_ptr();
    params.dout_strides = merged_out_strides_of(dout);
  }
  if (dlse.defined()) {
    params.dlse = dlse.const_data_ptr<Real>();
    params.dlse_strides = merged_lse_strides_of(dlse);
  }
  params.dout_partial = dout_partial.mutable_data_ptr();
  params.dlse_partial = dlse_partial.mutable_data_ptr<Real>();
  params.dout_partial_strides = out_partial_strides_of(dout_partial);
  params.dlse_partial_strides = lse_partial_strides_of(dlse_partial);
  launch(kernel, params);
}

// Writes into `out` and returns lse.
Tensor run_combine(const Tensor& out_partial_in, const Tensor& lse_partial, const Tensor& out,
                   const CombineShape& shape) {
  const c10::DeviceGuard guard(out.device());
  const Kernel& kernel =
      select_kernel(Operation::combine, out, dtype_of(out, "out"), shape.head_dim);
  const Tensor out_partial = with_last_stride_1(out_partial_in);
  const Tensor lse = at::empty(lse_partial.sizes().slice(1), lse_partial.options());
  if (out.numel() == 0) return lse;
  const auto launch_typed =
      lse.scalar_type() == at::kDouble ? launch_combine<double> : launch_combine<float>;
  launch_typed(kernel, shape, out_partial, lse_partial, out, lse);
  return lse;
}

std::tuple<Tensor, Tensor> combine(const Tensor& out_partial, const Tensor& lse_partial,
                                   OptionalDType out_dtype) {
  const at::ScalarType dtype = out_dtype.value_or(out_partial.scalar_type());
  const CombineShape shape = check_partials(out_partial, lse_partial, dtype, "out_dtype");
  const Tensor out = at::empty(out_partial.sizes().slice(1), out_partial.options().dtype(dtype));
  const Tensor lse = run_combine(out_partial, lse_partial, out, shape);
  return {out, lse};
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
  const CombineShape shape = check_partials(out_partial, lse_partial, out.scalar_type(), "out");
  check_same_device({"out_partial", out_partial}, {{"out", out}});
  TORCH_CHECK_VALUE(out.sizes() == out_partial.sizes().slice(1), "out: got shape ", out.sizes(),
                    "; accepted is ", out_partial.sizes().slice(1));
  check_own_memory(out, out_partial, lse_partial);
  TORCH_CHECK_VALUE(out.stride(-1) == 1 || out.size(-1) == 1, "out: got last stride ",
                    out.stride(-1), "; accepted is 1");
  return run_combine(out_partial, lse_partial, out, shape);
}

std::tuple<Tensor, Tensor> combine_backward(const std::optional<Tensor>& dout_in,
                                            const std::optional<Tensor>& dlse_in,
                                            const Tensor& out_partial_in,
                                            const Tensor& lse_partial) {
  check_same_device({"out_partial", out_partial_in}, {{"dout", dout_in}, {"dlse", dlse_in}});
  // dout has the dtype of the merged out; without one there is nothing to tell it by, nor need to.
  const at::ScalarType dtype = dout_in.value_or(out_partial_in).scalar_type();
  const CombineShape shape = check_partials(out_partial_in, lse_partial, dtype, "dout");
  if (dout_in.has_value()) {
    TORCH_CHECK_VALUE(dout_in->sizes() == out_partial_in.sizes().slice(1), "dout: got shape ",
                      dout_in->sizes(), "; accepted is ", out_partial_in.sizes().slice(1));
  }
  if (dlse_in.has_value()) {
    TORCH_CHECK_VALUE(dlse_in->sizes() == lse_partial.sizes().slice(1), "dlse: got shape ",
                      dlse_in->sizes(), "; accepted is ", lse_partial.sizes().slice(1));
    TORCH_CHECK_TYPE(dlse_in->scalar_type() == lse_partial.scalar_type(), "dlse: got dtype ",
                     dlse_in->scalar_type(), "; accepted is ", lse_partial.scalar_type());
  }
  const c10::DeviceGuard guard(out_partial_in.device());
  const Tensor dout = dout_in.has_value() ? with_last_stride_1(*dout_in) : Tensor();
  const Tensor dlse = dlse_in.value_or(Tensor());
  const Tensor out_partial = with_last_stride_1(out_partial_in);
  const DType kernel_dtype = dtype_of(dout.defined() ? dout : out_partial, "dout");
  const Kernel& kernel =
      select_kernel(Operation::combine_backward, out_partial, kernel_dtype, shape.head_dim);
  const Tensor dout_partial = at::empty(out_partial.sizes(), out_partial.options());
  const Tensor dlse_partial = at::empty(lse_partial.sizes(), lse_partial.options());
  if (dout_partial.numel() == 0) return {dout_partial, dlse_partial};
  const auto launch_typed = lse_partial.scalar_type() == at::kDouble
                                ? launch_combine_backward<double>
                                : launch_combine_backward<float>;
  launch_typed(kernel, shape, out_partial, lse_partial, dout, dlse, dout_partial, dlse_partial);
  return {dout_partial, dlse_partial};
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
