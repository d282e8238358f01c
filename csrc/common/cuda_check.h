// CUDA errors become exceptions: a library does not end its caller's process.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace neginf {

inline void cuda_check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("neginf: ") + what + ": " + cudaGetErrorString(error));
}

}  // namespace neginf
