// The registry: which launch function serves (operation, architecture, dtype, head_dim).
//
// Every kernel file registers itself with a static RegisterKernel, so what is registered is what is
// built; Python, tests and error messages read it from here.
#pragma once

#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "params.h"

namespace neginf {

enum class Operation : int { forward, decode, append, backward, combine, combine_backward };

// cuda: plain CUDA without tensor-core instructions, runs on every GPU the build has code for.
enum class Arch : int { cpu, cuda, sm80, sm90 };

// For kernels that take any head_dim.
constexpr int kAnyHeadDim = std::numeric_limits<int>::max();

const char* name(Operation operation);
const char* name(Arch arch);
const char* name(DType dtype);

template <typename Params>
struct OperationOf;
template <typename Real>
struct OperationOf<ForwardParams<Real>> {
  static constexpr Operation value = Operation::forward;
};
template <typename Real>
struct OperationOf<DecodeParams<Real>> {
  static constexpr Operation value = Operation::decode;
};
template <>
struct OperationOf<AppendParams> {
  static constexpr Operation value = Operation::append;
};
template <typename Real>
struct OperationOf<BackwardParams<Real>> {
  static constexpr Operation value = Operation::backward;
};
template <typename Real>
struct OperationOf<CombineParams<Real>> {
  static constexpr Operation value = Operation::combine;
};
template <typename Real>
struct OperationOf<CombineBackwardParams<Real>> {
  static constexpr Operation value = Operation::combine_backward;
};

struct Kernel {
  Operation operation;
  Arch arch;
  DType dtype;
  int head_dim;  // the largest one it serves
  void (*launch)(const void* params);
};

// Everything in this build, in no particular order.
const std::vector<Kernel>& built_kernels();

// The kernel of this architecture with the smallest head_dim that fits; null when there is none.
const Kernel* find_kernel(Operation operation, Arch arch, DType dtype, int head_dim);

namespace detail {
void add_kernel(const Kernel& kernel);
}

// `static const RegisterKernel<ForwardParams<float>, run_forward> registered(Arch::sm80, ...)`
template <typename Params, void (*kLaunch)(const Params&)>
class RegisterKernel {
 public:
  RegisterKernel(Arch arch, DType dtype, int head_dim) {
    detail::add_kernel({OperationOf<Params>::value, arch, dtype, head_dim,
                        [](const void* params) { kLaunch(*static_cast<const Params*>(params)); }});
  }
};

// Calls a kernel that find_kernel returned. dtype float64 takes Params of double, all others of
// float: the caller's dispatch on dtype decides both at once.
template <typename Params>
void launch(const Kernel& kernel, const Params& params) {
  kernel.launch(&params);
}

}  // namespace neginf
