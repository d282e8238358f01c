// Tensor maps: what the tensor memory accelerator must know to fetch tiles of q, k and v.
//
// A tile in shared memory consists of column blocks of one swizzle width; each is fetched by one
// instruction. Coordinates past a dimension's end, or negative, are filled with zeros. The rows of
// a sequence must end where the sequence ends, not where the buffer does: what follows may be
// another sequence or hold NaN. Therefore the row of a tensor is two dimensions of the same stride:
//
//     position in the tile, of which there are as many as a tile has    +    offset of the tile
//
// with the first one moved so far to its end that just the rows that exist are left (load_tile in
// tma.cuh). What that moves, the offset moves back; it must not be negative, so the map starts one
// tile in front of the tensor, where nothing is ever read.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "../common/cuda_check.h"
#include "../params.h"

namespace neginf::sm90 {

// The driver's encoder, found at run time so that the extension need not be linked with the driver.
inline auto tensor_map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cuda_check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                cudaEnableDefault, &found),
               "cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return encoder;
}

// What one instruction fetches: swizzle_columns x heads x positions elements. Row r of a tile is
// head r % heads of position r / heads; rows from heads * positions on are not fetched.
struct TensorBox {
  int swizzle_columns;
  int heads;
  int positions;
};

inline CUtensorMapSwizzle swizzle_of(int columns) {
  return columns == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
         : columns == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                         : CU_TENSOR_MAP_SWIZZLE_32B;
}

// The stride of a dimension of 16-bit elements. Without a second element it may be anything, also
// what a map refuses.
inline cuuint64_t byte_stride(int64_t stride, int64_t size) {
  return static_cast<cuuint64_t>(size > 1 ? 2 * stride : 16);
}

inline CUresult encode_map(CUtensorMap& map, DType dtype, const void* start,
                           const cuuint64_t (&dims)[5], const cuuint64_t (&byte_strides)[4],
                           const cuuint32_t (&box)[5], CUtensorMapL2promotion promotion) {
  const cuuint32_t element_strides[] = {1, 1, 1, 1, 1};
  return tensor_map_encoder()(
      &map,
      dtype == DType::float16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      5, const_cast<void*>(start), dims, byte_strides, box, element_strides,
      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_of(static_cast<int>(box[0])), promotion,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// Of a (batch, rows, heads, head_dim) tensor of 16-bit elements; dimensions of the map: column,
// head, position in the tile, offset of the tile, batch.
inline CUtensorMap tensor_map(const void* tensor, DType dtype, const Strides& strides, int batch,
                              int64_t rows, int heads, int head_dim, const TensorBox& box) {
  if (rows == 0) return {};  // nothing will be fetched
  const cuuint64_t row_bytes = byte_stride(strides.row, rows);
  const char* start = static_cast<const char*>(tensor) - box.positions * row_bytes;
  const cuuint64_t dims[] = {static_cast<cuuint64_t>(head_dim), static_cast<cuuint64_t>(heads),
                             static_cast<cuuint64_t>(box.positions),
                             static_cast<cuuint64_t>(rows + box.positions + 1),
                             static_cast<cuuint64_t>(batch)};
  const cuuint64_t byte_strides[] = {byte_stride(strides.head, heads), row_bytes, row_bytes,
                                     byte_stride(strides.batch, batch)};
  const cuuint32_t box_dims[] = {static_cast<cuuint32_t>(box.swizzle_columns),
                                 static_cast<cuuint32_t>(box.heads),
                                 static_cast<cuuint32_t>(box.positions), 1, 1};
  CUtensorMap map;
  const CUresult result = encode_map(map, dtype, start, dims, byte_strides, box_dims,
                                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("neginf: cuTensorMapEncodeTiled failed with error " +
                             std::to_string(static_cast<int>(result)));
  }
  return map;
}

}  // namespace neginf::sm90
