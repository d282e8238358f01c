#include <vector>

#include "cuda_check.h"
#include "device.h"

namespace neginf {

namespace {

struct Device {
  int compute_capability;
  int num_sms;
  int max_shared_memory;
};

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  cuda_check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

std::vector<Device> query_devices() {
  int count = 0;
  cuda_check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  std::vector<Device> devices;
  for (int device = 0; device < count; ++device) {
    devices.push_back({attribute(cudaDevAttrComputeCapabilityMajor, device) * 10 +
                           attribute(cudaDevAttrComputeCapabilityMinor, device),
                       attribute(cudaDevAttrMultiProcessorCount, device),
                       attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device)});
  }
  return devices;
}

const Device& device_at(int device) {
  static const std::vector<Device> devices = query_devices();
  return devices.at(device);
}

}  // namespace

int compute_capability(int device) { return device_at(device).compute_capability; }

int num_sms(int device) { return device_at(device).num_sms; }

int current_compute_capability() {
  int device = 0;
  cuda_check(cudaGetDevice(&device), "cudaGetDevice");
  return compute_capability(device);
}

std::size_t max_shared_memory() {
  int device = 0;
  cuda_check(cudaGetDevice(&device), "cudaGetDevice");
  return device_at(device).max_shared_memory;
}

}  // namespace neginf
