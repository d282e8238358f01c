// Launching a kernel while the one before it still runs (programmatic dependent launch, sm90).
#pragma once

#include <cuda_runtime_api.h>

#include "cuda_check.h"
#include "device.h"

namespace neginf {

// From now on the kernel behind this one may start, up to its wait_for_earlier_kernels().
__device__ __forceinline__ void allow_dependent_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Until all that earlier kernels have written is there.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// A kernel that calls wait_for_earlier_kernels() before it reads or writes memory. Early on sm90
// only: later GPUs may run code that was made for sm80, in which there is no wait.
template <typename... Args>
void launch_dependent(void (*kernel)(Args...), unsigned blocks, unsigned threads, int shared_bytes,
                      CUstream_st* stream, const Args&... args) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = current_compute_capability() == 90 ? 1 : 0;
  cuda_check(cudaLaunchKernelEx(&config, kernel, args...), "dependent launch");
}

}  // namespace neginf
