#include "backend.h"

#include <c10/util/Exception.h>

#include <mutex>
#include <set>
#include <sstream>

#ifdef NEGINF_WITH_CUDA
#include <c10/cuda/CUDAStream.h>

#include "common/device.h"
#endif

namespace neginf {

namespace {

std::mutex forced_mutex;
std::optional<std::string> forced_backend;

// The architectures whose kernels run on the tensor's device, best first.
std::vector<Arch> archs_for(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return {Arch::cpu};
#ifdef NEGINF_WITH_CUDA
  if (tensor.is_cuda()) {
    const int capability = compute_capability(tensor.get_device());
    // sm90 binaries use instructions that no other architecture has.
    if (capability == 90) return {Arch::sm90, Arch::sm80, Arch::cuda};
    if (capability >= 80) return {Arch::sm80, Arch::cuda};
  }
#endif
  return {};
}

std::vector<Arch> candidate_archs(const at::Tensor& tensor) {
  const std::vector<Arch> available = archs_for(tensor);
  const std::optional<std::string> forced = get_backend();
  if (!forced.has_value()) return available;
  std::vector<Arch> allowed;
  for (const Arch arch : available) {
    // Plain-CUDA helper kernels belong to every GPU back-end.
    if (*forced == name(arch) || (*forced != "cpu" && arch == Arch::cuda)) allowed.push_back(arch);
  }
  TORCH_CHECK_VALUE(!allowed.empty() && *forced == name(allowed.front()), "back-end '", *forced,
                    "' is forced, but it cannot run tensors on ", tensor.device(),
                    "; move the tensors or lift NEGINF_BACKEND / neginf.backend(...)");
  return allowed;
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
  const std::lock_guard<std::mutex> lock(forced_mutex);
  forced_backend = std::move(backend);
}

std::optional<std::string> get_backend() {
  const std::lock_guard<std::mutex> lock(forced_mutex);
  return forced_backend;
}

const Kernel& select_kernel(Operation operation, const at::Tensor& tensor, DType dtype,
                            int64_t head_dim) {
  const Kernel* kernel =
      find_kernel(operation, candidate_archs(tensor), dtype, static_cast<int>(head_dim));
  TORCH_CHECK_NOT_IMPLEMENTED(
      kernel != nullptr, "neginf has no ", name(operation), " kernel for ", name(dtype),
      " with head_dim ", head_dim, " on ", tensor.device(), ". This build holds for ",
      name(operation), ": ", contents_of_build(operation),
      ". Reinstall with NEGINF_BACKENDS and NEGINF_HEAD_DIMS set to what you need "
      "(`python -m neginf info` prints the command).");
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
