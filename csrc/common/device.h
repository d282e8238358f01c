// What the host asks about a GPU, cached because every call asks. No torch header, no CUDA header.
#pragma once

#include <cstddef>

namespace neginf {

// 90 for compute capability 9.0.
int compute_capability(int device);
int current_compute_capability();  // of the current device

// Number of multiprocessors.
int num_sms(int device);

// Bytes of shared memory that a block on the current device can have.
std::size_t max_shared_memory();

}  // namespace neginf
