// Nodes of autograd's graph are held by std::shared_ptr in torch 2.11 and by intrusive_ptr in 2.14;
// the type says which.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>

namespace neginf {

template <typename T>
auto make_node() {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, T>) {
    return c10::make_intrusive<T>();
  } else {
    // Found through T's base, torch::autograd::Node; frees long chains without recursion.
    return std::shared_ptr<T>(new T(), [](T* node) { deleteNode(node); });
  }
}

}  // namespace neginf
