#include "torch/cache.h"

#include <c10/util/Exception.h>

namespace neginf {

void check_cache_devices(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache,
                         const CacheTables& tables) {
  check_same_device({"q", q}, {{"k_cache", k_cache},
                               {"v_cache", v_cache},
                               {"page_table", tables.page_table},
                               {"cache_batch_idx", tables.cache_batch_idx},
                               {"cache_leftpad", tables.cache_leftpad}});
  check_dtype({"k_cache", k_cache}, q);
  check_dtype({"v_cache", v_cache}, q);
  check_q_dtype(q);
}

CacheShape check_cache(const at::Tensor& q, const at::Tensor& k_cache, const at::Tensor& v_cache,
                       const CacheTables& tables, int64_t batch) {
  check_cache_devices(q, k_cache, v_cache, tables);
  const bool is_paged = tables.page_table.has_value();
  for (const Argument& cache : {Argument("k_cache", k_cache), Argument("v_cache", v_cache)}) {
    TORCH_CHECK_VALUE(cache.tensor->dim() == 4, cache.name, ": got ", cache.tensor->dim(),
                      " dimensions; accepted are 4, ",
                      is_paged ? "(num_pages, page_size, num_heads_k, head_dim)"
                               : "(batch, seqlen, num_heads_k, head_dim)");
    for (int64_t d = 0; d < 4; ++d) check_size(cache.tensor->size(d), cache.name);
  }
  TORCH_CHECK_VALUE(k_cache.sizes().slice(0, 3) == v_cache.sizes().slice(0, 3),
                    "v_cache: got shape ", v_cache.sizes(), "; accepted is the shape of k_cache, ",
                    k_cache.sizes(), ", up to head_dim");
  TORCH_CHECK_VALUE(q.size(-1) == k_cache.size(-1), "k_cache: got head_dim ", k_cache.size(-1),
                    "; accepted is the head_dim of q, ", q.size(-1));
  TORCH_CHECK_VALUE(1 <= q.size(-1) && q.size(-1) <= kMaxHeadDim, "q: got head_dim ", q.size(-1),
                    "; accepted are 1 to ", kMaxHeadDim);
  TORCH_CHECK_VALUE(1 <= v_cache.size(-1) && v_cache.size(-1) <= q.size(-1),
                    "v_cache: got head_dim ", v_cache.size(-1),
                    "; accepted are 1 to the head_dim of q, ", q.size(-1));
  TORCH_CHECK_VALUE(q.size(-2) >= 1 && k_cache.size(2) >= 1 && q.size(-2) % k_cache.size(2) == 0,
                    "q: got ", q.size(-2), " heads; accepted is a positive multiple of the ",
                    k_cache.size(2), " heads of k_cache");

  CacheShape shape{k_cache.size(0), k_cache.size(1), k_cache.size(1)};
  if (is_paged) {
    const at::Tensor& table = *tables.page_table;
    TORCH_CHECK_TYPE(table.scalar_type() == at::kInt, "page_table: got dtype ", table.scalar_type(),
                     "; accepted is int32");
    TORCH_CHECK_VALUE(table.dim() == 2 && table.size(0) == batch, "page_table: got shape ",
                      table.sizes(), "; accepted is [", batch, ", pages of a sequence]");
    TORCH_CHECK_VALUE(table.size(1) <= 1 || table.stride(1) == 1, "page_table: got strides ",
                      table.strides(), "; accepted are rows whose pages are neighbours");
    TORCH_CHECK_VALUE(shape.entry_rows >= 1, "k_cache: got pages of ", shape.entry_rows,
                      " rows; accepted are 1 or more");
    TORCH_CHECK_VALUE(!tables.cache_batch_idx.has_value(),
                      "cache_batch_idx: got a tensor together with a page_table; accepted is one "
                      "of them");
    shape.capacity = table.size(1) * shape.entry_rows;
    check_size(shape.capacity, "page_table, slots of a sequence");
  } else if (!tables.cache_batch_idx.has_value()) {
    TORCH_CHECK_VALUE(shape.num_entries == batch, "k_cache: got batch ", shape.num_entries,
                      "; accepted is that of q, ", batch, ", or a cache_batch_idx");
  }
  check_int32_vector(tables.cache_batch_idx, "cache_batch_idx", batch);
  check_int32_vector(tables.cache_leftpad, "cache_leftpad", batch);
  return shape;
}

KeyCache key_cache(const CacheShape& shape, const CacheTables& tables) {
  const auto data = [](const std::optional<at::Tensor>& tensor) {
    return tensor.has_value() ? tensor->const_data_ptr<int>() : nullptr;
  };
  return {static_cast<int>(shape.num_entries),
          static_cast<int>(shape.entry_rows),
          static_cast<int>(shape.capacity),
          data(tables.page_table),
          tables.page_table.has_value() ? tables.page_table->stride(0) : 0,
          data(tables.cache_batch_idx),
          data(tables.cache_leftpad)};
}

}  // namespace neginf
