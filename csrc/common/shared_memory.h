// More than 48 KB of dynamic shared memory must be asked for, once per kernel and device.
#pragma once

#include <atomic>
#include <cstdint>

#include "cuda_check.h"

namespace neginf {

// Remembered, because asking again would cost every call part of a microsecond. Threads that race
// here ask twice, which does no harm.
template <auto* kKernel>
void allow_shared_memory(int bytes) {
  static std::atomic<std::uint64_t> asked{0};  // bit d: device d
  int device = 0;
  cuda_check(cudaGetDevice(&device), "cudaGetDevice");
  const std::uint64_t bit = device < 64 ? std::uint64_t{1} << device : 0;
  if ((asked.load(std::memory_order_relaxed) & bit) != 0) return;
  cuda_check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "shared memory of a kernel");
  asked.fetch_or(bit, std::memory_order_relaxed);
}

}  // namespace neginf
