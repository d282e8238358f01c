// Elements of 32 and 16 bits as float in registers, several at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

namespace neginf {

constexpr int kLoadBytes = 16;  // the most that one instruction loads

template <typename Element, int kVector>
struct alignas(std::min<int>(sizeof(Element) * kVector, kLoadBytes)) Pack {
  Element at[kVector];
};

// By name, because torch's default nvcc flags switch off the conversion operators of these types.
__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ void round_to(float& to, float x) { to = x; }
__device__ __forceinline__ void round_to(__nv_bfloat16& to, float x) { to = __float2bfloat16(x); }
__device__ __forceinline__ void round_to(__half& to, float x) { to = __float2half(x); }

template <int kVector, typename Element>
__device__ __forceinline__ void load_values(float (&to)[kVector], const Element* from) {
  const auto pack = *reinterpret_cast<const Pack<Element, kVector>*>(from);
#pragma unroll
  for (int i = 0; i < kVector; ++i) to[i] = to_float(pack.at[i]);
}

template <int kVector, typename Element>
__device__ __forceinline__ void store(Element* to, const float (&from)[kVector]) {
  Pack<Element, kVector> pack;
#pragma unroll
  for (int i = 0; i < kVector; ++i) round_to(pack.at[i], from[i]);
  *reinterpret_cast<Pack<Element, kVector>*>(to) = pack;
}

}  // namespace neginf
