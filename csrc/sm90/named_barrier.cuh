// The hardware's barriers of a CTA, by number: some threads say that they have come, others wait
// until `threads` have. Number 0 is that of __syncthreads.
#pragma once

namespace neginf::sm90 {

__device__ __forceinline__ void barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Comes, and waits.
__device__ __forceinline__ void barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace neginf::sm90
