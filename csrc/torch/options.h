// The arguments after q, k, v that forward and backward share, in the order of the schema.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>

namespace neginf {

struct Options {
  std::optional<at::Tensor> cu_seqlens_q;
  std::optional<at::Tensor> cu_seqlens_k;
  std::optional<at::Tensor> seqused_q;
  std::optional<at::Tensor> seqused_k;
  std::optional<c10::SymInt> max_seqlen_q;
  std::optional<c10::SymInt> max_seqlen_k;
  std::optional<double> softmax_scale;
  bool causal;
  int64_t window_left;
  int64_t window_right;
  double softcap;
  std::optional<at::Tensor> alibi_slopes;
  std::optional<at::Tensor> sink;
  int64_t num_splits;
  bool deterministic;

  bool is_varlen() const { return cu_seqlens_q.has_value(); }
};

}  // namespace neginf

// An operator's C++ signature must list its arguments one by one. These three name the list once:
// as schema, as parameters, and as the initialiser of an Options.
#define NEGINF_OPTIONS_SCHEMA                                                              \
  "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "     \
  "SymInt? max_seqlen_q, SymInt? max_seqlen_k, float? softmax_scale, bool causal, "        \
  "int window_left, int window_right, float softcap, Tensor? alibi_slopes, Tensor? sink, " \
  "int num_splits, bool deterministic"

#define NEGINF_OPTIONS_PARAMETERS                                                                  \
  const std::optional<at::Tensor>&cu_seqlens_q, const std::optional<at::Tensor>&cu_seqlens_k,      \
      const std::optional<at::Tensor>&seqused_q, const std::optional<at::Tensor>&seqused_k,        \
      std::optional<c10::SymInt> max_seqlen_q, std::optional<c10::SymInt> max_seqlen_k,            \
      std::optional<double> softmax_scale, bool causal, int64_t window_left, int64_t window_right, \
      double softcap, const std::optional<at::Tensor>&alibi_slopes,                                \
      const std::optional<at::Tensor>&sink, int64_t num_splits, bool deterministic

#define NEGINF_OPTIONS                                                                            \
  ::neginf::Options {                                                                             \
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, softmax_scale,  \
        causal, window_left, window_right, softcap, alibi_slopes, sink, num_splits, deterministic \
  }
