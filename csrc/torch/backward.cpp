// neginf::backward: gradients of (out, lse) with respect to q, k, v and the sink.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <vector>

#include "torch/backend.h"
#include "torch/inputs.h"
#include "torch/operators.h"
#include "torch/workspace.h"

namespace neginf {

namespace {

using at::Tensor;
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

void check_like(const Tensor& tensor, const char* argument, at::IntArrayRef sizes,
                at::ScalarType dtype) {
  TORCH_CHECK_VALUE(tensor.sizes() == sizes, argument, ": got shape ", tensor.sizes(),
                    "; accepted is ", sizes);
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, argument, ": got dtype ", tensor.scalar_type(),
                   "; accepted is ", dtype);
}

template <typename Real>
Gradients run_backward(const std::optional<Tensor>& dout_in, const std::optional<Tensor>& dlse_in,
                       const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out_in,
                       const Tensor& lse_in, const Options& options, const Shape& shape) {
  const c10::DeviceGuard guard(q.device());
  const ReadableInputs inputs(q, k, v, options);
  const Kernel& kernel = select_kernel(Operation::backward, q, dtype_of(q, "q"), inputs.head_dim());
  const Tensor out = readable(out_in);
  const Tensor dout =
      readable(dout_in.has_value() ? *dout_in : at::zeros(out_in.sizes(), q.options()));
  const Tensor lse = lse_in.contiguous();
  const Tensor dlse = dlse_in.has_value() ? dlse_in->contiguous() : Tensor();
  if (lse.is_cpu()) check_public_values<Real>(lse, "lse");

  const Tensor dq = at::empty(inputs.q.sizes(), q.options());
  const Tensor dk = at::empty(inputs.k.sizes(), q.options());
  const Tensor dv = at::empty(inputs.v.sizes(), q.options());
  const Tensor dsink = options.sink.has_value()
                           ? at::empty({shape.batch, shape.num_heads}, lse.options())
                           : Tensor();
  if (dq.numel() != 0 || dk.numel() != 0 || dsink.defined()) {
    BackwardParams<Real> params{};
    set_inputs(params, shape, options, inputs, lse);
    params.out = out.const_data_ptr();
    params.dout = dout.const_data_ptr();
    params.lse = lse_data<Real>(lse);
    params.dlse = dlse.defined() ? dlse.const_data_ptr<Real>() : nullptr;
    params.dq = dq.mutable_data_ptr();
    params.dk = dk.mutable_data_ptr();
    params.dv = dv.mutable_data_ptr();
    params.dsink = dsink.defined() ? dsink.mutable_data_ptr<Real>() : nullptr;
    params.out_strides = strides_of(out);
    params.dout_strides = strides_of(dout);
    params.dq_strides = strides_of(dq);
    params.dk_strides = strides_of(dk);
    params.dv_strides = strides_of(dv);
    params.deterministic = options.deterministic;
    TensorWorkspace workspace(q);
    params.workspace = &workspace;
    launch(kernel, params);
  }
  const auto unpadded = [](const Tensor& grad, int64_t head_dim) {
    return grad.size(-1) == head_dim ? grad : grad.narrow(-1, 0, head_dim).contiguous();
  };
  return {unpadded(dq, shape.head_dim), unpadded(dk, shape.head_dim),
          unpadded(dv, shape.head_dim_v),
          dsink.defined() ? dsink.sum(0).to(options.sink->scalar_type())
                          : at::empty({0}, lse.options())};
}

Gradients backward(const std::optional<Tensor>& dout, const std::optional<Tensor>& dlse,
                   const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                   const Tensor& lse, NEGINF_OPTIONS_PARAMETERS) {
  const Options options = NEGINF_OPTIONS;
  const Shape shape = check_inputs(q, k, v, options);
  check_same_device({"q", q}, {{"dout", dout}, {"dlse", dlse}, {"out", out}, {"lse", lse}});
  const at::ScalarType accumulate = accumulate_type(q.scalar_type());
  const std::vector<int64_t> lse_sizes =
      options.is_varlen() ? std::vector<int64_t>{shape.num_heads, shape.total_q}
                          : std::vector<int64_t>{shape.batch, shape.num_heads, shape.seqlen_q};
  const at::DimVector out_sizes = sizes_of_out(q, v);
  check_like(out, "out", out_sizes, q.scalar_type());
  check_like(lse, "lse", lse_sizes, accumulate);
  if (dout.has_value()) check_like(*dout, "dout", out_sizes, q.scalar_type());
  if (dlse.has_value()) check_like(*dlse, "dlse", lse_sizes, accumulate);
  return q.scalar_type() == at::kDouble
             ? run_backward<double>(dout, dlse, q, k, v, out, lse, options, shape)
             : run_backward<float>(dout, dlse, q, k, v, out, lse, options, shape);
}

Gradients backward_meta(const std::optional<Tensor>& dout, const std::optional<Tensor>& dlse,
                        const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                        const Tensor& lse, NEGINF_OPTIONS_PARAMETERS) {
  const Options options = NEGINF_OPTIONS;
  check_without_sizes(q, k, v, options);
  check_same_device({"q", q}, {{"dout", dout}, {"dlse", dlse}, {"out", out}, {"lse", lse}});
  const auto empty_like = [](const Tensor& tensor) {
    return at::empty_symint(tensor.sym_sizes(), tensor.options());
  };
  return {empty_like(q), empty_like(k), empty_like(v),
          options.sink.has_value() ? empty_like(*options.sink) : at::empty({0}, lse.options())};
}

}  // namespace

Gradients call_backward(const std::optional<Tensor>& dout, const std::optional<Tensor>& dlse,
                        const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                        const Tensor& lse, const Options& options) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("neginf::backward", "")
                             .typed<decltype(backward)>();
  return op.call(dout, dlse, q, k, v, out, lse, options.cu_seqlens_q, options.cu_seqlens_k,
                 options.seqused_q, options.seqused_k, options.max_seqlen_q, options.max_seqlen_k,
                 options.softmax_scale, options.causal, options.window_left, options.window_right,
                 options.softcap, options.alibi_slopes, options.sink, options.num_splits,
                 options.deterministic);
}

TORCH_LIBRARY_IMPL(neginf, CPU, m) { m.impl("backward", backward); }
TORCH_LIBRARY_IMPL(neginf, CUDA, m) { m.impl("backward", backward); }
TORCH_LIBRARY_IMPL(neginf, Meta, m) { m.impl("backward", backward_meta); }
// A gradient of the gradient ends in an error, not in silent zeros.
TORCH_LIBRARY_IMPL(neginf, Autograd, m) {
  m.impl("backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace neginf
