// Operators that call one another go through the dispatcher, so that tracing sees every step.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "torch/options.h"

namespace neginf {

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> call_backward(
    const std::optional<at::Tensor>& dout, const std::optional<at::Tensor>& dlse,
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
    const at::Tensor& lse, const Options& options);

}  // namespace neginf
