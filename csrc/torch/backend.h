// Which back-end serves a tensor, and the facts of its device.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "kernels.h"

namespace neginf {

// Forces one back-end for the whole process; nullopt returns to the automatic choice.
void set_backend(std::optional<std::string> backend);
std::optional<std::string> get_backend();

// The kernel for tensors like `tensor`. Throws NotImplementedError, naming what this build holds
// and how to add what is missing, when there is none.
const Kernel& select_kernel(Operation operation, const at::Tensor& tensor, DType dtype,
                            int64_t head_dim);

CUstream_st* current_stream(const at::Tensor& tensor);  // null on the CPU
int num_sms(const at::Tensor& tensor);                  // 0 on the CPU

DType dtype_of(const at::Tensor& tensor, const char* argument);

}  // namespace neginf
