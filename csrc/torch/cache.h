// A cache of keys and values as the caller passes it: checked, and translated into params.
#pragma once

#include "torch/inputs.h"

namespace neginf {

struct CacheTables {
  std::optional<at::Tensor> page_table;
  std::optional<at::Tensor> cache_batch_idx;
  std::optional<at::Tensor> cache_leftpad;
};

// Sizes of a cache, once checked.
struct CacheShape {
  int64_t num_entries;
  int64_t entry_rows;
  int64_t capacity;  // slots of a sequence
};

// `batch` is the number of sequences. `q` is for dtype, heads and head_dim.
CacheShape check_cache(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache,
                       const CacheTables& tables, int64_t batch);

// Without values of tensors, which on the GPU nobody has checked.
void check_cache_devices(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache,
                         const CacheTables& tables);

// The tables must outlive the launch.
KeyCache key_cache(const CacheShape& shape, const CacheTables& tables);

}  // namespace neginf
