// The index of the calling thread, as kernels should ask for it.
#pragma once

namespace neginf {

// CuTe computes coordinates in the type of the thread's index. An unsigned one compares wrongly
// with a bound that is negative, such as the rows left in a tile past the end of its sequence.
__device__ __forceinline__ int thread_index() { return static_cast<int>(threadIdx.x); }

// The same, but what is computed from it is computed again: loop invariants cost registers.
__device__ __forceinline__ int thread_index_again() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// Whether it is the one of its warp that does what one must do.
__device__ __forceinline__ bool is_first_lane() { return thread_index_again() % 32 == 0; }

}  // namespace neginf
