// What a launch function is given. Plain structs: pointers, 64-bit strides in elements, no torch.
//
// Real is the type of accumulators, of the LSE and of every scalar: float, or double for the
// float64 CPU path. Tensors of the model's dtype are void*; the registry's key says which it is.
#pragma once

#include <cstdint>

#include "lse.h"
#include "mask.h"

struct CUstream_st;  // so that this header needs no CUDA header

namespace neginf {

// Of attention; states of any head_dim can be merged.
constexpr int kMaxHeadDim = 256;

enum class DType : int { float64, float32, bfloat16, float16 };

// Strides in elements of a (batch, seqlen, heads, head_dim) tensor whose last stride is 1. A
// (total, heads, head_dim) tensor has batch = 0.
struct Strides {
  int64_t batch;
  int64_t row;
  int64_t head;
};

// Element (batch, head, row) of an LSE-shaped buffer lies at batch * batch + head * head + row.
// Dense: (batch, num_heads, seqlen_q). Varlen: (num_heads, total_q), with batch = 0.
struct LseStrides {
  int64_t batch;
  int64_t head;
};

// The attention problem that forward and backward share. Nullable pointers say so.
template <typename Real>
struct Problem {
  int batch;
  int num_heads;    // query heads; a multiple of num_heads_k
  int num_heads_k;  // key/value heads
  int head_dim;     // of q and k
  int head_dim_v;   // of v and out, <= head_dim
  int seqlen_q;     // rows per sequence of a dense tensor; varlen: max_seqlen_q, a hint for grids
  int seqlen_k;     // likewise
  int64_t total_q;  // rows of the q buffer per batch entry: seqlen_q, or varlen: q.size(0)
  int64_t total_k;

  const int* cu_seqlens_q;  // (batch + 1), null: dense. Values are clamped, never trusted
  const int* cu_seqlens_k;  // (batch + 1), null: dense
  const int* seqused_q;     // (batch), null: every row is used
  const int* seqused_k;     // (batch), null: every row is used

  Real softmax_scale;          // > 0
  Real softcap;                // 0: none. score = softcap * tanh(q.k * softmax_scale / softcap)
  int window_left;             // < 0: unbounded
  int window_right;            // < 0: unbounded; 0: causal
  const Real* alibi_slopes;    // (num_heads) or (batch, num_heads), null: none
  int64_t alibi_batch_stride;  // 0 for (num_heads)
  const Real* sink;            // (num_heads), null: none
};

// What forward and backward read alike.
template <typename Real>
struct AttentionInputs {
  Problem<Real> problem;

  const void* q;  // (batch, seqlen_q, num_heads, head_dim) or (total_q, num_heads, head_dim)
  const void* k;  // (batch, seqlen_k, num_heads_k, head_dim) or (total_k, num_heads_k, head_dim)
  const void* v;  // as k, of head_dim_v
  Strides q_strides, k_strides, v_strides;
  LseStrides lse_strides;

  int num_sms;  // multiprocessors of the device, 0 on the CPU
  CUstream_st* stream;
};

template <typename Real>
struct ForwardParams : AttentionInputs<Real> {
  void* out;  // as q, of head_dim_v
  BasicLse<Real>* lse;
  Strides out_strides;

  // num_splits > 1: split s writes its state, as Real, to out_partial + s *
  // out_partial_split_stride and lse_partial + s * lse_partial_split_stride instead of out and lse.
  // Split 0 holds the sink.
  int num_splits;               // >= 1
  Real* out_partial;            // (num_splits, *out.shape), null when num_splits == 1
  BasicLse<Real>* lse_partial;  // (num_splits, *lse.shape), null when num_splits == 1
  Strides out_partial_strides;
  int64_t out_partial_split_stride;
  int64_t lse_partial_split_stride;  // within a split: lse_strides
};

// Device memory for the kernels of one launch, aligned to 256 bytes and not initialised. It lives
// until the work that the launch puts on the stream has run.
class Workspace {
 public:
  virtual void* allocate(int64_t bytes) = 0;

 protected:
  ~Workspace() = default;
};

// Keys and values as inference keeps them: (num_entries, rows, num_heads_k, head_dim), an entry
// being the room of one sequence or a page. Key j of sequence b is in slot leftpad[b] + j of that
// sequence. On the GPU nobody has checked the numbers in these tables (key_cache.h).
struct KeyCache {
  int num_entries;
  int entry_rows;  // of each entry: page_size, or the most slots of a sequence
  int capacity;    // slots of a sequence: entry_rows, or all pages of a row of the table

  const int* page_table;       // (batch, capacity / entry_rows), null: an entry is a sequence
  int64_t page_table_stride;   // of batch
  const int* cache_batch_idx;  // (batch), the entry of each sequence; null: its own number
  const int* leftpad;          // (batch), null: 0
};

// Attention of few query rows over a cache. problem.seqused_k counts slots, leftpad included; null:
// capacity.
template <typename Real>
struct DecodeParams : ForwardParams<Real> {
  KeyCache cache;
  // How the GPU divides the keys of a sequence: num_splits of ForwardParams, or 0 to divide all the
  // work evenly; with keys_per_split > 0 into shares of so many keys, whatever else there is.
  int keys_per_split;
  Workspace* workspace;
};

// Writes new keys and values behind those in a cache, and rotates the new keys and the queries
// (rotary position embedding). Tensors are of the registry's dtype, last strides 1.
struct AppendParams {
  int batch;
  int num_heads;
  int num_heads_k;
  int head_dim;
  int head_dim_v;
  int rotary_dim;             // even, <= head_dim; 0: no rotation, and q is not touched
  bool interleaved;           // pairs are (2 i, 2 i + 1), else (i, i + rotary_dim / 2)
  bool advances_q;            // row i of q is at the position of new key i, else of new key 0
  int64_t total_q;            // rows of q per batch entry, as in Problem
  int64_t total_new;          // likewise of k and v
  const int* cu_seqlens_q;    // (batch + 1), null: dense
  const int* cu_seqlens_new;  // (batch + 1), null: dense

  const void* q;    // as in AttentionInputs
  const void* k;    // (batch, seqlen_new, num_heads_k, head_dim) or (total_new, ...)
  const void* v;    // as k, of head_dim_v
  const void* cos;  // (num_positions, rotary_dim / 2)
  const void* sin;
  void* rotated_q;  // as q
  void* k_cache;
  void* v_cache;
  Strides q_strides, k_strides, v_strides, rotated_q_strides, k_cache_strides, v_cache_strides;
  int64_t num_positions;
  int64_t cos_stride, sin_stride;

  KeyCache cache;
  const int* cache_seqlens;   // (batch) slots in use before
  const int* rotary_seqlens;  // (batch) position of new key 0; null: cache_seqlens
  int* seqlens;               // (batch) slots in use afterwards
  CUstream_st* stream;
};

template <typename Real>
struct BackwardParams : AttentionInputs<Real> {
  const void* out;            // as q, of head_dim_v
  const void* dout;           // as out
  const BasicLse<Real>* lse;  // public values; never modified
  const Real* dlse;           // lse-shaped with lse_strides, null: zero
  void* dq;
  void* dk;
  void* dv;
  Real* dsink;  // (batch, num_heads), summed over batch by the caller; null without a sink
  Strides out_strides, dout_strides;
  Strides dq_strides, dk_strides, dv_strides;
  bool deterministic;
  Workspace* workspace;
};

// Strides in elements of combine's tensors; varlen tensors come with batch = 1.
struct CombineStrides {
  int64_t split;
  int64_t batch;
  int64_t row;
  int64_t head;
};

// States in one tensor, along its first dimension.
template <typename Real>
struct StackedStates {
  const void* out;            // (num_splits, batch, seqlen, num_heads, head_dim)
  const BasicLse<Real>* lse;  // (num_splits, batch, num_heads, seqlen), any strides
  CombineStrides out_strides, lse_strides;
};

// States in tensors of their own.
template <typename Real>
struct ListedStates {
  static constexpr int kMost = 16;  // 1.3 kB of kernel parameters

  struct State {
    const void* out;                          // (batch, seqlen, num_heads, head_dim)
    const BasicLse<Real>* lse;                // (batch, num_heads, seqlen), any strides
    CombineStrides out_strides, lse_strides;  // split unused
  };
  State at[kMost];
};

// What combine merges, row (batch, row, head) of every state into one.
template <typename Real>
struct CombineInputs {
  int num_splits;  // >= 0; no state at all gives (0, -inf)
  int batch;
  int seqlen;
  int num_heads;
  int head_dim;
  DType partial_dtype;  // of the states' out; the registry's key is the dtype of the merged out

  StackedStates<Real> stacked;
  const ListedStates<Real>* listed;  // on the host; null: they are stacked

  CUstream_st* stream;
};

template <typename Real>
struct CombineParams : CombineInputs<Real> {
  void* out;                                // (batch, seqlen, num_heads, head_dim)
  BasicLse<Real>* lse;                      // (batch, num_heads, seqlen), any strides
  CombineStrides out_strides, lse_strides;  // split unused
};

template <typename Real>
struct CombineBackwardParams : CombineInputs<Real> {
  const void* dout;    // as out, dtype of out; null: zero
  const Real* dlse;    // as lse; null: zero
  void* dout_partial;  // stacked, whatever the states are
  Real* dlse_partial;
  CombineStrides dout_strides, dlse_strides;  // split unused
  CombineStrides dout_partial_strides, dlse_partial_strides;
};

}  // namespace neginf
