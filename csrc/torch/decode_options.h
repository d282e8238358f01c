// The arguments of decode after q and the cache, named once: as schema, as parameters, as the
// initialiser of a Decode, and as they are passed on.
#pragma once

#include "torch/options.h"

#define NEGINF_DECODE_SCHEMA                                                                    \
  "Tensor? cache_seqlens, Tensor? page_table, Tensor? cache_batch_idx, Tensor? cache_leftpad, " \
  "Tensor? cu_seqlens_q, SymInt? max_seqlen_q, float? softmax_scale, bool causal, "             \
  "int window_left, int window_right, float softcap, Tensor? alibi_slopes, Tensor? sink, "      \
  "int num_splits, int keys_per_split"

#define NEGINF_DECODE_PARAMETERS                                                                   \
  const std::optional<at::Tensor>&cache_seqlens, const std::optional<at::Tensor>&page_table,       \
      const std::optional<at::Tensor>&cache_batch_idx,                                             \
      const std::optional<at::Tensor>&cache_leftpad, const std::optional<at::Tensor>&cu_seqlens_q, \
      std::optional<c10::SymInt> max_seqlen_q, std::optional<double> softmax_scale, bool causal,   \
      int64_t window_left, int64_t window_right, double softcap,                                   \
      const std::optional<at::Tensor>&alibi_slopes, const std::optional<at::Tensor>&sink,          \
      int64_t num_splits, int64_t keys_per_split

#define NEGINF_DECODE_ARGUMENTS                                                                  \
  cache_seqlens, page_table, cache_batch_idx, cache_leftpad, cu_seqlens_q, max_seqlen_q,         \
      softmax_scale, causal, window_left, window_right, softcap, alibi_slopes, sink, num_splits, \
      keys_per_split

#define NEGINF_DECODE_OPTIONS                                                                  \
  {{cu_seqlens_q, std::nullopt, std::nullopt, cache_seqlens, max_seqlen_q, std::nullopt,       \
    softmax_scale, causal, window_left, window_right, softcap, alibi_slopes, sink, num_splits, \
    false},                                                                                    \
   {page_table, cache_batch_idx, cache_leftpad},                                               \
   keys_per_split}
