// neginf::forward: implementation for the CPU and CUDA, shapes for fake tensors, and autograd.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <array>
#include <mutex>
#include <string>
#include <vector>

#include "common/query_packing.h"
#include "common/split_heuristic.h"
#include "sm80/forward_tile_sizes.h"
#include "sm90/forward_tile_sizes.h"
#include "torch/backend.h"
#include "torch/inputs.h"
#include "torch/node.h"
#include "torch/operators.h"

namespace neginf {

namespace {

using at::Tensor;

template <int kHeadDim>
BlockSizes forward_block(Arch arch, int head_dim_v, bool modifies_scores) {
  return arch == Arch::sm90 ? sm90::forward_block<kHeadDim>(head_dim_v, modifies_scores)
                            : sm80::forward_block<kHeadDim>(modifies_scores);
}

BlockSizes forward_block(const Kernel& kernel, int head_dim_v, bool modifies_scores) {
  switch (kernel.head_dim) {
    case 64: return forward_block<64>(kernel.arch, head_dim_v, modifies_scores);
    case 96: return forward_block<96>(kernel.arch, head_dim_v, modifies_scores);
    case 128: return forward_block<128>(kernel.arch, head_dim_v, modifies_scores);
    case 192: return forward_block<192>(kernel.arch, head_dim_v, modifies_scores);
    default: return forward_block<256>(kernel.arch, head_dim_v, modifies_scores);
  }
}

// Must cut the problem into tiles as launch_forward does.
int resolve_num_splits(const Options& options, const Shape& shape, const Kernel& kernel,
                       int num_sms) {
  if (options.num_splits != 0) return static_cast<int>(options.num_splits);
  if (num_sms == 0) return 1;
  const bool modifies_scores = options.softcap != 0 || options.alibi_slopes.has_value();
  const BlockSizes block =
      forward_block(kernel, static_cast<int>(shape.head_dim_v), modifies_scores);
  const auto packing = QueryPacking::of(shape.seqlen_q, static_cast<int>(shape.num_heads),
                                        static_cast<int>(shape.num_heads_k), block.queries);
  const int64_t row_tiles = (shape.seqlen_q + packing.positions - 1) / packing.positions;
  const int64_t key_tiles = (shape.seqlen_k + block.keys - 1) / block.keys;
  return automatic_num_splits(shape.batch * shape.num_heads_k * packing.head_tiles * row_tiles,
                              static_cast<int>(key_tiles), num_sms * block.per_sm, kMaxSplits);
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
  params.stacked.out = forward.out_partial;
  params.stacked.lse = forward.lse_partial;
  params.out = forward.out;
  params.lse = forward.lse;
  const Strides& partial = forward.out_partial_strides;
  params.stacked.out_strides = {forward.out_partial_split_stride, partial.batch, partial.row,
                                partial.head};
  params.out_strides = {0, forward.out_strides.batch, forward.out_strides.row,
                        forward.out_strides.head};
  params.lse_strides = {0, forward.lse_strides.batch, 1, forward.lse_strides.head};
  params.stacked.lse_strides = params.lse_strides;
  params.stacked.lse_strides.split = forward.lse_partial_split_stride;
  params.stream = forward.stream;
  launch(select_kernel(Operation::combine, out, dtype, params.head_dim), params);
}

template <typename Real>
std::tuple<Tensor, Tensor> run_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                       const Options& options, const Shape& shape) {
  const c10::DeviceGuard guard(q.device());
  const DType dtype = dtype_of(q, "q");
  const ReadableInputs inputs(q, k, v, options);
  const Kernel& kernel = select_kernel(Operation::forward, q, dtype, inputs.head_dim());

  const auto accumulate = q.options().dtype(accumulate_type(q.scalar_type()));
  const Tensor out = at::empty(sizes_of_out(inputs.q, inputs.v), q.options());
  const Tensor lse = options.is_varlen()
                         ? at::empty({shape.num_heads, shape.total_q}, accumulate)
                         : at::empty({shape.batch, shape.num_heads, shape.seqlen_q}, accumulate);
  if (out.numel() != 0) {
    ForwardParams<Real> params{};
    set_inputs(params, shape, options, inputs, lse);
    params.out = out.mutable_data_ptr();
    params.out_strides = strides_of(out);
    params.lse = lse_data<Real>(lse);
    params.num_splits = resolve_num_splits(options, shape, kernel, params.num_sms);
    if (params.num_splits == 1) {
      launch(kernel, params);
    } else {
      const Tensor out_partial = at::empty({params.num_splits, out.numel()}, accumulate);
      const Tensor lse_partial = at::empty({params.num_splits, lse.numel()}, accumulate);
      params.out_partial = out_partial.mutable_data_ptr<Real>();
      params.lse_partial = lse_data<Real>(lse_partial);
      params.out_partial_strides = params.out_strides;
      params.out_partial_split_stride = out.numel();
      params.lse_partial_split_stride = lse.numel();
      launch(kernel, params);
      combine_splits(params, shape, out, dtype);
    }
  }
  if (inputs.head_dim_v() == shape.head_dim_v) return {out, lse};
  return {out.narrow(-1, 0, shape.head_dim_v).contiguous(), lse};
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
  check_without_sizes(q, k, v, options);
  const int64_t dim = options.is_varlen() ? 3 : 4;
  for (const auto& [tensor, argument] : {std::pair(&q, "q"), std::pair(&v, "v")}) {
    TORCH_CHECK_VALUE(tensor->dim() == dim, argument, ": got ", tensor->dim(),
                      " dimensions; accepted are ", dim);
  }
  const auto head_dim = q.sym_size(-1).maybe_as_int();
  const auto head_dim_v = v.sym_size(-1).maybe_as_int();
  if (head_dim.has_value() && head_dim_v.has_value()) check_head_dim_v(*head_dim, *head_dim_v);
  at::SymDimVector out_sizes(q.sym_sizes());
  out_sizes.back() = v.sym_size(-1);
  const Tensor out = at::empty_symint(out_sizes, q.options());
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

// The node of autograd's graph, written as torch's own generated ones are.
// torch::autograd::Function is shorter, but recording one took twice as long as recording the node
// of torch's attention.
class AttentionNode : public torch::autograd::Node {
 public:
  // Makes `out` and `lse` outputs of a new node, whose inputs are q, k, v and the sink.
  static void record(const Tensor& q, const Tensor& k, const Tensor& v, const Options& options,
                     const Tensor& out, const Tensor& lse) {
    const auto node = make_node<AttentionNode>();
    node->set_next_edges(torch::autograd::collect_next_edges(q, k, v, options.sink));
    torch::autograd::set_history(out, node);
    torch::autograd::set_history(lse, node);
    node->save(q, k, v, options, out, lse);
  }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto self = getptr();
    const auto optional = [](const Tensor& grad) {
      return grad.defined() ? std::optional<Tensor>(grad) : std::nullopt;
    };
    Options options = options_;
    auto saved = option_tensors_.begin();
    for (std::optional<Tensor>* field : tensors_of(options)) {
      if (field->has_value()) *field = (saved++)->unpack();
    }
    auto [dq, dk, dv, dsink] =
        call_backward(optional(grads[0]), optional(grads[1]), q_.unpack(), k_.unpack(), v_.unpack(),
                      out_.unpack(self), lse_.unpack(self), options);
    return {dq, dk, dv, options.sink.has_value() ? dsink : Tensor()};
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable* saved : {&q_, &k_, &v_, &out_, &lse_}) saved->reset_data();
    for (SavedVariable& saved : option_tensors_) saved.reset_data();
  }

  std::string name() const override { return "NeginfAttentionBackward"; }

 private:
  using SavedVariable = torch::autograd::SavedVariable;

  static std::array<std::optional<Tensor>*, 6> tensors_of(Options& options) {
    return {&options.cu_seqlens_q, &options.cu_seqlens_k, &options.seqused_q,
            &options.seqused_k,    &options.alibi_slopes, &options.sink};
  }

  void save(const Tensor& q, const Tensor& k, const Tensor& v, const Options& options,
            const Tensor& out, const Tensor& lse) {
    q_ = SavedVariable(q, /*is_output=*/false);
    k_ = SavedVariable(k, false);
    v_ = SavedVariable(v, false);
    out_ = SavedVariable(out, /*is_output=*/true);
    lse_ = SavedVariable(lse, true);
    options_ = options;
    for (std::optional<Tensor>* field : tensors_of(options_)) {
      if (!field->has_value()) continue;
      option_tensors_.emplace_back(**field, false);
      **field = Tensor();
    }
  }

  SavedVariable q_, k_, v_, out_, lse_;
  Options options_;  // an undefined tensor holds the place of each one in option_tensors_
  std::vector<SavedVariable> option_tensors_;
};

std::tuple<Tensor, Tensor> forward_autograd(const Tensor& q, const Tensor& k, const Tensor& v,
                                            NEGINF_OPTIONS_PARAMETERS) {
  const Options options = NEGINF_OPTIONS;
  using torch::autograd::isFwGradDefined;
  TORCH_CHECK_NOT_IMPLEMENTED(!isFwGradDefined(q) && !isFwGradDefined(k) && !isFwGradDefined(v) &&
                                  !isFwGradDefined(sink) && !isFwGradDefined(alibi_slopes),
                              "neginf has no forward-mode derivative");
  auto [out, lse] = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return call_forward(q, k, v, options);
  }();
  if (torch::autograd::compute_requires_grad(q, k, v, sink)) {
    AttentionNode::record(q, k, v, options, out, lse);
  }
  return {out, lse};
}

}  // namespace

TORCH_LIBRARY_IMPL(neginf, CPU, m) { m.impl("forward", forward); }
TORCH_LIBRARY_IMPL(neginf, CUDA, m) { m.impl("forward", forward); }
TORCH_LIBRARY_IMPL(neginf, Meta, m) { m.impl("forward", forward_meta); }
TORCH_LIBRARY_IMPL(neginf, Autograd, m) { m.impl("forward", forward_autograd); }

}  // namespace neginf
