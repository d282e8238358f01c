// Memory for kernels from torch's allocator.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <vector>

#include "params.h"

namespace neginf {

// Hands out tensors of bytes; the allocator keeps their memory for the stream until the kernels
// queued on it have run.
class TensorWorkspace final : public Workspace {
 public:
  explicit TensorWorkspace(const at::Tensor& like) : options_(like.options().dtype(at::kByte)) {}

  void* allocate(int64_t bytes) override {
    return tensors_.emplace_back(at::empty({bytes}, options_)).mutable_data_ptr();
  }

 private:
  at::TensorOptions options_;
  std::vector<at::Tensor> tensors_;
};

}  // namespace neginf
