// neginf::forward: implementation for the CPU and CUDA, shapes for fake tensors, and autograd.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "common/split_heuristic.h"
#include "torch/backend.h"
#include "torch/inputs.h"
#include "torch/operators.h"

namespace neginf {

namespace {

using at::Tensor;

// Stand-ins for the kernels' tile sizes: automatic splitting is decided before a kernel is chosen.
constexpr int64_t kNominalBlockM = 64;
constexpr int64_t kNominalBlockN = 128;

int resolve_num_splits(int64_t num_splits, const Shape& shape, int num_sms) {
  if (num_splits != 0) return static_cast<int>(num_splits);
  const int64_t row_tiles = (shape.seqlen_q + kNominalBlockM - 1) / kNominalBlockM;
  const int64_t key_tiles = (shape.seqlen_k + kNominalBlockN - 1) / kNominalBlockN;
  return automatic_num_splits(shape.batch * shape.num_heads * row_tiles,
                              static_cast<int>(key_tiles), num_sms, kMaxSplits);
}

// Merges the partial states of all splits into out and lse.
template <typename Real>
void combine_splits(const ForwardParams<Real>& forward, const Shape& shape, const Tensor& out,
                    DType dtype) {
  CombineParams<Real> params{};
  params.num_splits = forward.num_splits;
  // A packed buffer is one batch entry of total_q rows.
  params.batch = out.dim() == 4 ? static_cast<int>(shape.batch) : 1;
  params.seqlen = static_cast<int>(shape.total_q);
  params.num_heads = static_cast<int>(shape.num_heads);
  params.head_dim = static_cast<int>(out.size(-1));
  params.partial_dtype = std::is_same_v<Real, double> ? DType::float64 : DType::float32;
  params.out_partial = forward.out_partial;
  params.lse_partial = forward.lse_partial;
  params.out = forward.out;
  params.lse = forward.lse;
  const Strides& partial = forward.out_partial_strides;
  params.out_partial_strides = {forward.out_partial_split_stride, partial.batch, partial.row,
                                partial.head};
  params.out_strides = {0, forward.out_strides.batch, forward.out_strides.row,
                        forward.out_strides.head};
  params.lse_strides = {0, forward.lse_strides.batch, 1, forward.lse_strides.head};
  params.lse_partial_strides = params.lse_strides;
  params.lse_partial_strides.split = forward.lse_partial_split_stride;
  params.stream = forward.stream;
  launch(select_kernel(Operation::combine, out, dtype, params.head_dim), params);
}

template <typename Real>
std::tuple<Tensor, Tensor> run_forward(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                                       const Options& options, const Shape& shape) {
  const c10::DeviceGuard guard(q_in.device());
  const DType dtype = dtype_of(q_in, "q");
  const at::ScalarType accumulate = accumulate_type(q_in.scalar_type());
  const int64_t head_dim = padded_head_dim(q_in, shape.head_dim);
  const Kernel& kernel = select_kernel(Operation::forward, q_in, dtype, head_dim);
  const Tensor q = readable(q_in), k = readable(k_in), v = readable(v_in);
  const ProblemTensors tensors = problem_tensors(options, accumulate);

  const Tensor out = at::empty(q.sizes(), q.options());
  const bool varlen = options.is_varlen();
  const Tensor lse =
      varlen ? at::empty({shape.num_heads, shape.total_q}, q.options().dtype(accumulate))
             : at::empty({shape.batch, shape.num_heads, shape.seqlen_q},
                         q.options().dtype(accumulate));
  if (out.numel() != 0) {
    ForwardParams<Real> params{};
    params.problem = make_problem<Real>(shape, options, tensors);
    params.problem.head_dim = static_cast<int>(head_dim);
    params.q = q.const_data_ptr();
    params.k = k.const_data_ptr();
    params.v = v.const_data_ptr();
    params.out = out.mutable_data_ptr();
    params.lse = lse_data<Real>(lse);
    params.q_strides = strides_of(q);
    params.k_strides = strides_of(k);
    params.v_strides = strides_of(v);
    params.out_strides = strides_of(out);
    params.lse_strides = lse_strides_of(lse);
    params.num_sms = num_sms(q);
    params.stream = current_stream(q);
    params.num_splits = resolve_num_splits(options.num_splits, shape, params.num_sms);
    if (params.num_splits == 1) {
      launch(kernel, params);
    } else {
      const Tensor out_partial =
          at::empty({params.num_splits, out.numel()}, out.options().dtype(accumulate));
      const Tensor lse_partial = at::empty({params.num_splits, lse.numel()}, lse.options());
      params.out_partial = out_partial.mutable_data_ptr<Real>();
      params.lse_partial = lse_data<Real>(lse_partial);
      params.out_partial_strides = params.out_strides;
      params.out_partial_split_stride = out.numel();
      params.lse_partial_split_stride = lse.numel();
      launch(kernel, params);
      combine_splits(params, shape, out, dtype);
    }
  }
  if (head_dim == shape.head_dim) return {out, lse};
  return {out.narrow(-1, 0, shape.head_dim).contiguous(), lse};
}

std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                   NEGINF_OPTIONS_PARAMETERS) {
  const Options options = NEGINF_OPTIONS;
  const Shape shape = check_inputs(q, k, v, options);
  return q.scalar_type() == at::kDouble ? run_forward<double>(q, k, v, options, shape)
                                        : run_forward<float>(q, k, v, options, shape);
}

std::tuple<Tensor, Tensor> forward_meta(const Tensor& q, const Tensor& k, const Tensor& v,
                                        NEGINF_OPTIONS_PARAMETERS) {
  const Options options = NEGINF_OPTIONS;
  check_devices(q, k, v, options);
  TORCH_CHECK_VALUE(q.dim() == (options.is_varlen() ? 3 : 4), "q: got ", q.dim(), " dimensions");
  const Tensor out = at::empty_symint(q.sym_sizes(), q.options());
  const auto lse_options = q.options().dtype(accumulate_type(q.scalar_type()));
  if (options.is_varlen()) {
    return {out, at::empty_symint({q.sym_size(1), q.sym_size(0)}, lse_options)};
  }
  return {out, at::empty_symint({q.sym_size(0), q.sym_size(2), q.sym_size(1)}, lse_options)};
}

std::tuple<Tensor, Tensor> call_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                        const Options& options) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("neginf::forward", "")
                             .typed<decltype(forward)>();
  return op.call(q, k, v, options.cu_seqlens_q, options.cu_seqlens_k, options.seqused_q,
                 options.seqused_k, options.max_seqlen_q, options.max_seqlen_k,
                 options.softmax_scale, options.causal, options.window_left, options.window_right,
                 options.softcap, options.alibi_slopes, options.sink, options.num_splits,
                 options.deterministic);
}

// What the backward needs again of an Options: its tensors go into save_for_backward, where
// autograd checks that nobody changes them, and the rest into one object. As one entry of
// saved_data for each field it cost a fifth of the host time of a call that records a gradient.
struct SavedOptions : torch::CustomClassHolder {
  Options options;  // without its tensors

  static torch::autograd::variable_list tensors_of(const Options& options) {
    return {options.cu_seqlens_q.value_or(Tensor()), options.cu_seqlens_k.value_or(Tensor()),
            options.seqused_q.value_or(Tensor()),    options.seqused_k.value_or(Tensor()),
            options.alibi_slopes.value_or(Tensor()), options.sink.value_or(Tensor())};
  }

  static c10::IValue rest_of(Options options) {
    options.cu_seqlens_q = options.cu_seqlens_k = options.seqused_q = options.seqused_k =
        options.alibi_slopes = options.sink = std::nullopt;
    auto saved = c10::make_intrusive<SavedOptions>();
    saved->options = std::move(options);
    return c10::IValue::make_capsule(std::move(saved));
  }

  // `tensors` points at what tensors_of returned.
  static Options join(const c10::IValue& rest, const Tensor* tensors) {
    Options options = c10::static_intrusive_pointer_cast<SavedOptions>(rest.toCapsule())->options;
    for (std::optional<Tensor>* field :
         {&options.cu_seqlens_q, &options.cu_seqlens_k, &options.seqused_q, &options.seqused_k,
          &options.alibi_slopes, &options.sink}) {
      if (tensors->defined()) *field = *tensors;
      ++tensors;
    }
    return options;
  }
};

class Attention : public torch::autograd::Function<Attention> {
 public:
  // `sink` stands beside `options`, which holds it too, so that autograd sees it as an input.
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx,
                                                const Tensor& q, const Tensor& k, const Tensor& v,
                                                const std::optional<Tensor>& sink,
                                                const Options& options) {
    (void)sink;
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto [out, lse] = call_forward(q, k, v, options);
    torch::autograd::variable_list saved{q, k, v, out, lse};
    const auto tensors = SavedOptions::tensors_of(options);
    saved.insert(saved.end(), tensors.begin(), tensors.end());
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["options"] = SavedOptions::rest_of(options);
    ctx->set_materialize_grads(false);
    return {out, lse};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Options options = SavedOptions::join(ctx->saved_data["options"], saved.data() + 5);
    const auto optional = [](const Tensor& grad) {
      return grad.defined() ? std::optional<Tensor>(grad) : std::nullopt;
    };
    auto [dq, dk, dv, dsink] = call_backward(optional(grads[0]), optional(grads[1]), saved[0],
                                             saved[1], saved[2], saved[3], saved[4], options);
    return {dq, dk, dv, options.sink.has_value() ? dsink : Tensor(), Tensor()};
  }
};

std::tuple<Tensor, Tensor> forward_autograd(const Tensor& q, const Tensor& k, const Tensor& v,
                                            NEGINF_OPTIONS_PARAMETERS) {
  const Options options = NEGINF_OPTIONS;
  const bool needs_grad =
      at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad() ||
                                     (sink.has_value() && sink->requires_grad()));
  if (!needs_grad) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return call_forward(q, k, v, options);
  }
  auto results = Attention::apply(q, k, v, sink, options);
  return {results[0], results[1]};
}

}  // namespace

TORCH_LIBRARY_IMPL(neginf, CPU, m) { m.impl("forward", forward); }
TORCH_LIBRARY_IMPL(neginf, CUDA, m) { m.impl("forward", forward); }
TORCH_LIBRARY_IMPL(neginf, Meta, m) { m.impl("forward", forward_meta); }
TORCH_LIBRARY_IMPL(neginf, Autograd, m) { m.impl("forward", forward_autograd); }

}  // namespace neginf
