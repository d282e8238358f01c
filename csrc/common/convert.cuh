// Accumulators rounded to the dtype of the model.
#pragma once

#include <cutlass/numeric_conversion.h>

#include <cute/tensor.hpp>

namespace neginf {

// Two rounded numbers in one register, the first one below.
template <typename Element>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t packed;
  if constexpr (std::is_same_v<Element, cutlass::half_t>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

// Back to two numbers.
template <typename Element>
__device__ __forceinline__ float2 unpack(uint32_t packed) {
  if constexpr (std::is_same_v<Element, cutlass::half_t>) {
    float2 both;
    asm("cvt.f32.f16 %0, %1;" : "=f"(both.x) : "h"(static_cast<uint16_t>(packed)));
    asm("cvt.f32.f16 %0, %1;" : "=f"(both.y) : "h"(static_cast<uint16_t>(packed >> 16)));
    return both;
  } else {
    return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};
  }
}

template <typename Element, class Fragment>
__device__ __forceinline__ auto convert(const Fragment& from) {
  using namespace cute;
  Tensor to = make_tensor<Element>(from.layout());
  Tensor words = recast<uint32_t>(to);
  CUTE_UNROLL
  for (int i = 0; i < size(words); ++i) words(i) = pack<Element>(from(2 * i), from(2 * i + 1));
  return to;
}

}  // namespace neginf
