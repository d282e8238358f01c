// What the host asks about a GPU, cached because every call asks. No torch header, no CUDA header.
#pragma once

namespace neginf {

// 90 for compute capability 9.0.
int compute_capability(int device);

// Number of multiprocessors.
int num_sms(int device);

}  // namespace neginf
