#include "backend.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <set>
#include <span>
#include <sstream>

#ifdef NEGINF_WITH_CUDA
#include <c10/cuda/CUDAStream.h>

#include "common/device.h"
#endif

namespace neginf {

namespace {

std::atomic<std::optional<Arch>> forced_arch;

// The architectures whose kernels run on the tensor's device, best first.
std::span<const Arch> archs_for(const at::Tensor& tensor) {
  static constexpr Arch kCpu[] = {Arch::cpu};
  if (tensor.is_cpu()) return kCpu;
#ifdef NEGINF_WITH_CUDA
  static constexpr Arch kGpu[] = {Arch::sm90, Arch::sm80, Arch::cuda};
  const int capability = tensor.is_cuda() ? compute_capability(tensor.get_device()) : 0;
  if (capability == 90) return kGpu;
  if (capability >= 80) return std::span(kGpu).subspan(1);
#endif
  return {};
}

bool is_allowed(Arch arch, Arch forced) {
  // Plain-CUDA helper kernels belong to every GPU back-end.
  return arch == forced || (arch == Arch::cuda && forced != Arch::cpu);
}

void check_forced_arch_runs(Arch forced, std::span<const Arch> archs, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(std::find(archs.begin(), archs.end(), forced) != archs.end(), "back-end '",
                    name(forced), "' is forced, but it cannot run tensors on ", tensor.device(),
                    "; move the tensors or lift NEGINF_BACKEND / neginf.backend(...)");
}

std::string contents_of_build(Operation operation) {
  std::ostringstream text;
  bool any = false;
  for (const Arch arch : {Arch::cpu, Arch::cuda, Arch::sm80, Arch::sm90}) {
    std::set<std::string> entries;
    for (const Kernel& kernel : built_kernels()) {
      if (kernel.operation != operation || kernel.arch != arch) continue;
      std::string entry = name(kernel.dtype);
      if (kernel.head_dim != kAnyHeadDim) entry += " head_dim " + std::to_string(kernel.head_dim);
      entries.insert(entry);
    }
    if (entries.empty()) continue;
    text << (any ? "; " : "") << name(arch) << ":";
    for (const std::string& entry : entries)
      text << (entry == *entries.begin() ? " " : ", ") << entry;
    any = true;
  }
  return any ? text.str() : "nothing";
}

}  // namespace

void set_backend(std::optional<std::string> backend) {
  if (!backend.has_value()) {
    forced_arch = std::nullopt;
    return;
  }
  for (const Arch arch : {Arch::cpu, Arch::sm80, Arch::sm90}) {
    if (*backend == name(arch)) {
      forced_arch = arch;
      return;
    }
  }
  TORCH_CHECK_VALUE(false, "backend: got '", *backend, "'; accepted are cpu, sm80 and sm90");
}

std::optional<std::string> get_backend() {
  const std::optional<Arch> forced = forced_arch;
  return forced.has_value() ? std::optional<std::string>(name(*forced)) : std::nullopt;
}

const Kernel& select_kernel(Operation operation, const at::Tensor& tensor, DType dtype,
                            int64_t head_dim) {
  const std::span<const Arch> archs = archs_for(tensor);
  const std::optional<Arch> forced = forced_arch;
  if (forced.has_value()) check_forced_arch_runs(*forced, archs, tensor);
  const Kernel* kernel = nullptr;
  for (const Arch arch : archs) {
    if (forced.has_value() && !is_allowed(arch, *forced)) continue;
    kernel = find_kernel(operation, arch, dtype, static_cast<int>(head_dim));
    if (kernel != nullptr) break;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      kernel != nullptr, "neginf has no ", name(operation), " kernel for ", name(dtype),
      " with head_dim ", head_dim, " on ", tensor.device(), ". This build holds for ",
      name(operation), ": ", contents_of_build(operation),
      ". What this version has and the build lacks comes by reinstalling with NEGINF_BACKENDS "
      "and NEGINF_HEAD_DIMS (`python -m neginf info` prints the command).");
  return *kernel;
}

CUstream_st* current_stream(const at::Tensor& tensor) {
#ifdef NEGINF_WITH_CUDA
  if (tensor.is_cuda()) return c10::cuda::getCurrentCUDAStream(tensor.get_device()).stream();
#endif
  (void)tensor;
  return nullptr;
}

int num_sms(const at::Tensor& tensor) {
#ifdef NEGINF_WITH_CUDA
  if (tensor.is_cuda()) return num_sms(static_cast<int>(tensor.get_device()));
#endif
  (void)tensor;
  return 0;
}

DType dtype_of(const at::Tensor& tensor, const char* argument) {
  switch (tensor.scalar_type()) {
    case at::kDouble: return DType::float64;
    case at::kFloat: return DType::float32;
    case at::kBFloat16: return DType::bfloat16;
    case at::kHalf: return DType::float16;
    default: break;
  }
  TORCH_CHECK_TYPE(false, argument, ": got dtype ", tensor.scalar_type(),
                   "; accepted are float16 and bfloat16, and on the CPU float32 and float64");
}

}  // namespace neginf
