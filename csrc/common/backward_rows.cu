#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "backward_rows.h"
#include "cuda_check.h"
#include "element.h"

namespace neginf {
namespace {

constexpr int kThreads = 256;
constexpr int kFinishThreads = 128;
constexpr int kPack = 8;  // elements of 16 bits that a thread reads at a time

// One CTA per row tile and head, tiles running fastest, by their number in the workspace.
struct TileOfBlock {
  RowTile tile;
  int head;

  static __device__ TileOfBlock of(const Problem<float>& problem, const BackwardRows& rows,
                                   int number) {
    const int head = number / rows.num_tiles;
    const int tile = number - head * rows.num_tiles;
    return {find_row_tile(problem, rows.tile_rows, tile), head};
  }

  __device__ Mask mask(const Problem<float>& problem) const {
    return mask_of(problem, tile.sequence, key_sequence(problem, tile.index));
  }

  __device__ int64_t offset(const Strides& strides, int row) const {
    return tile.index * strides.batch + head * strides.head +
           (tile.sequence.first_row + row) * strides.row;
  }

  __device__ int64_t lse_offset(const LseStrides& strides, int row) const {
    return tile.index * strides.batch + head * strides.head + tile.sequence.first_row + row;
  }
};

// Sum over `lanes` neighbouring lanes, a power of two.
__device__ __forceinline__ float reduce_lanes(float x, int lanes) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, distance);
  }
  return x;
}

// ----------------------------------------------------------------------------------------- prepare

// kLanes threads share a row. What hides latency is many warps, hence few registers: a thread that
// reads two rows at a time takes 72 of them, four rows 112, and both are slower.
template <typename Element, int kRows, int kLanes>
__global__ void __launch_bounds__(kThreads, 5)
    prepare_kernel(const __grid_constant__ BackwardParams<float> params,
                   const __grid_constant__ BackwardRows rows) {
  using Loaded = Pack<Element, kPack>;
  const Problem<float>& problem = params.problem;
  const int number = static_cast<int>(blockIdx.x);
  const TileOfBlock block = TileOfBlock::of(problem, rows, number);
  const RowTile& tile = block.tile;
  const Mask mask = block.mask(problem);

  RowStatistics<kRows>& statistics = *rows.statistics_of<kRows>(number);

  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int first = static_cast<int>(threadIdx.x) / kLanes;
  bool needs_care = false;
#pragma unroll 1
  for (int r = first; r < kRows; r += kThreads / kLanes) {
    const int row = tile.first_row + r;
    const bool exists = row < tile.sequence.length;
    // All loads before the first use; what was read for nothing is not used.
    Lse lse = Lse::empty();
    float dlse = 0.f;
    Loaded out{}, dout{};
    if (exists) {
      const int64_t lse_at = block.lse_offset(params.lse_strides, row);
      lse = params.lse[lse_at];
      if (params.dlse != nullptr) dlse = params.dlse[lse_at];
      if (lane * kPack < problem.head_dim_v) {
        out =
            *reinterpret_cast<const Loaded*>(static_cast<const Element*>(params.out) +
                                             block.offset(params.out_strides, row) + lane * kPack);
        dout =
            *reinterpret_cast<const Loaded*>(static_cast<const Element*>(params.dout) +
                                             block.offset(params.dout_strides, row) + lane * kPack);
      }
    }
    if (r == first && !rows.first_stores) {  // while the first loads are under way
      auto* dq = reinterpret_cast<float4*>(rows.dq_of(number));
      for (int i = threadIdx.x; i < kRows * rows.head_dim / 4; i += kThreads) dq[i] = float4{};
    }

    Divisor divisor = Divisor::out_of_bounds();
    float delta = 0.f;
    if (exists) {
      const bool sees_keys = !mask.keys_of_row(row).empty();
      divisor = Divisor::of(lse);
      if (!lse.is_empty()) {
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          const float o = to_float(out.at[i]);
          // Where a row sees no key its O is the constant 0, unless the Lse comes from a merge with
          // other keys: what is 0 in it owes nothing to dO, which may be NaN.
          if (sees_keys || o != 0.f) delta += o * to_float(dout.at[i]);
        }
        if (lane == 0) delta -= dlse;
      }
      needs_care |= sees_keys && lse.is_empty();
      needs_care |= !Log2Divisor(divisor).is_exact();
    }
    delta = reduce_lanes(delta, kLanes);
    needs_care |= !(delta - delta == 0.f);  // NaN or infinite
    if (lane == 0) {
      statistics.divisor[r] = Log2Divisor(divisor);
      statistics.delta[r] = delta;
    }
  }
  needs_care = __syncthreads_or(needs_care);
  if (threadIdx.x == 0) {
    statistics.needs_care = needs_care;
    rows.adds[number] = 0;
    if (number == 0) *rows.next_work = 0;
  }
}

// dsink = -sum_i exp(sink - L_i) * (D_i - dL_i), one CTA per sequence and head: the order of the
// sum is fixed.
template <int kRows>
__global__ void __launch_bounds__(kThreads)
    sink_gradient_kernel(const __grid_constant__ BackwardParams<float> params,
                         const __grid_constant__ BackwardRows rows) {
  const Problem<float>& problem = params.problem;
  const int index = static_cast<int>(blockIdx.x) / problem.num_heads;
  const int head = static_cast<int>(blockIdx.x) - index * problem.num_heads;
  const Sequence sequence = query_sequence(problem, index);
  const float sink = problem.sink[head];
  const Lse* lse = params.lse + index * params.lse_strides.batch + head * params.lse_strides.head +
                   sequence.first_row;
  const RowStatistics<kRows>* statistics = rows.statistics_of<kRows>(
      static_cast<int64_t>(head) * rows.num_tiles + first_row_tile(problem, kRows, index));

  float sum = 0.f;
  if (!is_masked(sink)) {
    for (int row = static_cast<int>(threadIdx.x); row < sequence.length; row += kThreads) {
      if (lse[row].is_empty()) continue;
      const float delta = statistics[row / kRows].delta[row % kRows];
      sum -= Divisor::of(lse[row]).probability(sink) * delta;
    }
  }
  __shared__ float of_warp[kThreads / 32];
  sum = reduce_lanes(sum, 32);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x < 32) {
    sum = threadIdx.x < kThreads / 32 ? of_warp[threadIdx.x] : 0.f;
    sum = reduce_lanes(sum, 32);
    if (threadIdx.x == 0) params.dsink[blockIdx.x] = sum;
  }
}

// ------------------------------------------------------------------------------------------ finish

template <typename Element, bool kTransposed>
__global__ void __launch_bounds__(kFinishThreads)
    finish_kernel(const __grid_constant__ BackwardParams<float> params,
                  const __grid_constant__ BackwardRows rows) {
  const Problem<float>& problem = params.problem;
  // The last heads first: their sums are in L2 still.
  const int number = static_cast<int>(gridDim.x - 1 - blockIdx.x);
  const TileOfBlock block = TileOfBlock::of(problem, rows, number);
  const RowTile& tile = block.tile;
  const Mask mask = block.mask(problem);
  const float* dq = rows.dq_of(number);
  Element* out = static_cast<Element*>(params.dq);

  // Eight columns of a row.
  const auto finish = [&](int r, int column, const auto& sum_of) {
    const int row = tile.first_row + r;
    if (row >= tile.sequence.rows || column >= problem.head_dim) return;
    float gradient[kPack] = {};
    // A key that only other rows see may have brought 0 * NaN.
    if (row < tile.sequence.length && !mask.keys_of_row(row).empty() &&
        !params.lse[block.lse_offset(params.lse_strides, row)].is_empty()) {
#pragma unroll
      for (int c = 0; c < kPack; ++c) gradient[c] = problem.softmax_scale * sum_of(c);
    }
    store(out + block.offset(params.dq_strides, row) + column, gradient);
  };
  const auto load = [&](int at, float (&to)[4]) {
    *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(dq + at);
  };

  if constexpr (kTransposed) {
    // A thread takes 16 columns of two rows, four neighbours eight rows.
    const int groups = rows.head_dim / 16;
    for (int i = threadIdx.x; i < rows.tile_rows / 2 * groups; i += kFinishThreads) {
      const int r = i / (4 * groups) * 8 + i % 4 * 2;
      const int column = i / 4 % groups * 16;
      float loaded[kPack][4];
#pragma unroll
      for (int c = 0; c < kPack; ++c) {
        load(dq_transposed_offset(r, column + c, rows.tile_rows), loaded[c]);
      }
#pragma unroll
      for (int which = 0; which < 4; ++which) {
        finish(r + which % 2, column + which / 2 * 8, [&](int c) { return loaded[c][which]; });
      }
    }
  } else {
    // A thread takes 8 columns of two rows, which are four float4 in dq. A warp takes 8
    // neighbouring threads' worth of rows and several neighbouring packs: whole lines there, and at
    // least 64 bytes of each row here.
    const int packs = problem.head_dim / kPack;
    for (int i = threadIdx.x; i < rows.tile_rows / 2 * packs; i += kFinishThreads) {
      const int r = i / (8 * packs) * 16 + i % 8;
      const int column = i / 8 % packs * kPack;
      float loaded[4][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) load(dq_piece_offset(r, column, j, rows.head_dim), loaded[j]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        finish(r + half * 8, column, [&](int c) {
          const int reg = half * 2 + c % 2;
          return kAddsVectors ? loaded[c / 2][reg] : loaded[reg][c / 2];
        });
      }
    }
  }
}

template <typename Function>
void dispatch_dtype(DType dtype, const Function& function) {
  if (dtype == DType::bfloat16) return function(__nv_bfloat16{});
  if (dtype == DType::float16) return function(__half{});
  throw std::logic_error("neginf: the GPU backward takes bfloat16 and float16");
}

template <typename Function>
auto dispatch_tile_rows(int tile_rows, const Function& function) {
  if (tile_rows == 32) return function(std::integral_constant<int, 32>{});
  if (tile_rows == 64) return function(std::integral_constant<int, 64>{});
  if (tile_rows == 80) return function(std::integral_constant<int, 80>{});
  if (tile_rows == 128) return function(std::integral_constant<int, 128>{});
  throw std::logic_error("neginf: no backward prepare for " + std::to_string(tile_rows) + " rows");
}

// Lanes for the elements of a row, kPack each.
template <typename Function>
void dispatch_lanes(int head_dim, const Function& function) {
  if (head_dim <= 8 * kPack) return function(std::integral_constant<int, 8>{});
  if (head_dim <= 16 * kPack) return function(std::integral_constant<int, 16>{});
  return function(std::integral_constant<int, 32>{});
}
static_assert(kMaxHeadDim <= 32 * kPack);

unsigned num_blocks(const BackwardParams<float>& params, const BackwardRows& rows) {
  return static_cast<unsigned>(params.problem.num_heads) * static_cast<unsigned>(rows.num_tiles);
}

}  // namespace

BackwardRows BackwardRows::allocate(const BackwardParams<float>& params, const Tile& tile) {
  BackwardRows rows{};
  rows.tile_rows = tile.rows;
  rows.head_dim = tile.head_dim;
  rows.transposed = tile.transposed;
  rows.first_stores = tile.first_stores;
  const int64_t tiles_per_head = num_row_tiles(params.problem, tile.rows);
  const int64_t tiles = tiles_per_head * params.problem.num_heads;
  if (tiles > std::numeric_limits<int>::max()) {
    throw std::runtime_error("neginf: backward: too many row tiles x heads: " +
                             std::to_string(tiles));
  }
  rows.num_tiles = static_cast<int>(tiles_per_head);
  // Each of the sizes before the last two is a multiple of 16.
  const int64_t dq_bytes = tiles * tile.rows * tile.head_dim * sizeof(float);
  const int64_t statistics_bytes = tiles * dispatch_tile_rows(tile.rows, [](auto kRows) {
                                     return sizeof(RowStatistics<kRows>);
                                   });
  const int64_t adds_bytes = tiles * sizeof(int);
  auto* memory = static_cast<char*>(params.workspace->allocate(
      dq_bytes + statistics_bytes + adds_bytes + static_cast<int64_t>(sizeof(int))));
  rows.dq = reinterpret_cast<float*>(memory);
  rows.statistics = memory + dq_bytes;
  rows.adds = reinterpret_cast<int*>(memory + dq_bytes + statistics_bytes);
  rows.next_work = rows.adds + tiles;
  return rows;
}

void prepare_backward(const BackwardParams<float>& params, const BackwardRows& rows, DType dtype) {
  const unsigned blocks = num_blocks(params, rows);
  const int sinks = params.dsink != nullptr ? params.problem.batch * params.problem.num_heads : 0;
  if (blocks == 0) {  // the main kernel still writes dK and dV
    cuda_check(cudaMemsetAsync(rows.next_work, 0, sizeof(int), params.stream), "backward prepare");
  }
  dispatch_tile_rows(rows.tile_rows, [&](auto kRows) {
    if (blocks > 0) {
      dispatch_dtype(dtype, [&](auto element) {
        dispatch_lanes(params.problem.head_dim_v, [&](auto kLanes) {
          prepare_kernel<decltype(element), kRows, kLanes>
              <<<blocks, kThreads, 0, params.stream>>>(params, rows);
        });
      });
      cuda_check(cudaGetLastError(), "backward prepare");
    }
    if (sinks > 0) {
      sink_gradient_kernel<kRows><<<sinks, kThreads, 0, params.stream>>>(params, rows);
      cuda_check(cudaGetLastError(), "backward of the sink");
    }
  });
}

void finish_backward(const BackwardParams<float>& params, const BackwardRows& rows, DType dtype) {
  const unsigned blocks = num_blocks(params, rows);
  if (blocks == 0) return;
  dispatch_dtype(dtype, [&](auto element) {
    const auto kernel = rows.transposed ? finish_kernel<decltype(element), true>
                                        : finish_kernel<decltype(element), false>;
    kernel<<<blocks, kFinishThreads, 0, params.stream>>>(params, rows);
  });
  cuda_check(cudaGetLastError(), "backward finish");
}

}  // namespace neginf
