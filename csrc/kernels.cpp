#include "kernels.h"

namespace neginf {

namespace {

// A function-local static: registration runs during static initialisation of other files.
std::vector<Kernel>& registry() {
  static std::vector<Kernel> kernels;
  return kernels;
}

}  // namespace

namespace detail {
void add_kernel(const Kernel& kernel) { registry().push_back(kernel); }
}  // namespace detail

const std::vector<Kernel>& built_kernels() { return registry(); }

const Kernel* find_kernel(Operation operation, Arch arch, DType dtype, int head_dim) {
  const Kernel* best = nullptr;
  for (const Kernel& kernel : registry()) {
    const bool fits = kernel.operation == operation && kernel.arch == arch &&
                      kernel.dtype == dtype && kernel.head_dim >= head_dim;
    if (fits && (best == nullptr || kernel.head_dim < best->head_dim)) best = &kernel;
  }
  return best;
}

const char* name(Operation operation) {
  switch (operation) {
    case Operation::forward: return "forward";
    case Operation::decode: return "decode";
    case Operation::append: return "append";
    case Operation::backward: return "backward";
    case Operation::combine: return "combine";
    case Operation::combine_backward: return "combine_backward";
  }
  return "?";
}

const char* name(Arch arch) {
  switch (arch) {
    case Arch::cpu: return "cpu";
    case Arch::cuda: return "cuda";
    case Arch::sm80: return "sm80";
    case Arch::sm90: return "sm90";
  }
  return "?";
}

const char* name(DType dtype) {
  switch (dtype) {
    case DType::float64: return "float64";
    case DType::float32: return "float32";
    case DType::bfloat16: return "bfloat16";
    case DType::float16: return "float16";
  }
  return "?";
}

}  // namespace neginf
