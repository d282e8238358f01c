// What must be asked for once per kernel and device.
#pragma once

#include <atomic>
#include <cstdint>

#include "cuda_check.h"

namespace neginf {

// Remembered, because asking again would cost every call part of a microsecond. Threads that race
// here ask twice, which does no harm.
template <auto* kKernel, cudaFuncAttribute kAttribute>
void set_attribute_once(int value, const char* what) {
  static std::atomic<std::uint64_t> asked{0};  // bit d: device d
  int device = 0;
  cuda_check(cudaGetDevice(&device), "cudaGetDevice");
  const std::uint64_t bit = device < 64 ? std::uint64_t{1} << device : 0;
  if ((asked.load(std::memory_order_relaxed) & bit) != 0) return;
  cuda_check(cudaFuncSetAttribute(kKernel, kAttribute, value), what);
  asked.fetch_or(bit, std::memory_order_relaxed);
}

// More than 48 KB of dynamic shared memory.
template <auto* kKernel>
void allow_shared_memory(int bytes) {
  set_attribute_once<kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize>(
      bytes, "shared memory of a kernel");
}

// A multiprocessor gives its memory to L1 or to shared memory, and is idle while it changes that: a
// small kernel between two that need much of the latter does well to want the same.
template <auto* kKernel>
void prefer_shared_memory() {
  set_attribute_once<kKernel, cudaFuncAttributePreferredSharedMemoryCarveout>(
      cudaSharedmemCarveoutMaxShared, "shared memory carveout of a kernel");
}

}  // namespace neginf
