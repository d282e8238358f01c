// What the two combine kernels share: one group of lanes per row, its lanes over head_dim.
//
// Lanes take kVector neighbouring elements at a time: four where every address allows it, else one.
// A group is the smallest power of two of lanes that covers the row, up to a warp.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>

#include "../params.h"
#include "element.h"

namespace neginf {

constexpr int kMergeThreads = 256;

// One merged row. Heads run fastest: neighbours in memory in the usual layout of O.
struct MergeRow {
  int batch;
  int row;
  int head;

  __device__ int64_t offset(const CombineStrides& strides) const {
    return batch * strides.batch + row * strides.row + head * strides.head;
  }
};

NEGINF_HOST_DEVICE int64_t num_merge_rows(const CombineInputs<float>& params) {
  return static_cast<int64_t>(params.batch) * params.seqlen * params.num_heads;
}

// Calls body(row, lane) for every row, once by each lane of a group.
template <typename Body>
__device__ __forceinline__ void for_each_merge_row(const CombineInputs<float>& params, int lanes,
                                                   const Body& body) {
  const int64_t rows = num_merge_rows(params);
  const int groups = kMergeThreads / lanes;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * groups + threadIdx.x / lanes; i < rows;
       i += static_cast<int64_t>(gridDim.x) * groups) {
    const int64_t position = i / params.num_heads;
    body(MergeRow{static_cast<int>(position / params.seqlen),
                  static_cast<int>(position % params.seqlen),
                  static_cast<int>(i % params.num_heads)},
         static_cast<int>(threadIdx.x % lanes));
  }
}

// Sum over the lanes of a group; groups of one warp may be at different places.
__device__ __forceinline__ float reduce_group(float x, int lanes) {
  const unsigned first_lane = threadIdx.x % 32 / lanes * lanes;
  const unsigned group = 0xffffffffu >> (32 - lanes) << first_lane;
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(group, x, distance);
  }
  return x;
}

// Whether every row of a tensor starts at an address that a pack of four needs.
template <typename Element>
bool allows_pack(const void* base, const CombineStrides& strides) {
  return reinterpret_cast<std::uintptr_t>(base) % sizeof(Pack<Element, 4>) == 0 &&
         strides.split % 4 == 0 && strides.batch % 4 == 0 && strides.row % 4 == 0 &&
         strides.head % 4 == 0;
}

// Calls launch(blocks, lanes) unless there is nothing to do.
template <int kVector, typename Launch>
void launch_merge(const CombineInputs<float>& params, const Launch& launch) {
  int lanes = 1;
  while (lanes < 32 && lanes * kVector < params.head_dim) lanes *= 2;
  const int64_t groups = kMergeThreads / lanes;
  const int64_t blocks = (num_merge_rows(params) + groups - 1) / groups;
  constexpr int64_t kMaxBlocks = std::numeric_limits<int>::max();
  if (blocks > 0) launch(static_cast<unsigned>(std::min(blocks, kMaxBlocks)), lanes);
}

template <typename Function>
void dispatch_partial_dtype(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::float32: return function(float{});
    case DType::bfloat16: return function(__nv_bfloat16{});
    case DType::float16: return function(__half{});
    case DType::float64: break;
  }
  throw std::runtime_error("neginf: combine on CUDA takes float32, bfloat16 and float16 partials");
}

}  // namespace neginf
