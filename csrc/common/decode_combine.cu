// Merges the states of the tiles of a decode that several workers shared.
//
// A block has some rows of a tile, and its warps share out these or the states of one, whatever
// there is more of. It is so small that it fits beside the CTAs of the decode kernel: launched
// while that runs, it finds its tile, then waits.
#include <algorithm>
#include <limits>
#include <stdexcept>
#include <type_traits>

#include "decode_combine.h"
#include "dependent_launch.cuh"
#include "element.h"
#include "merge_row.h"
#include "shared_memory.h"

namespace neginf {
namespace {

constexpr int kWarps = 2;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocksPerSm = 8;  // by registers
constexpr int kVector = 4;       // columns of a lane at a time
constexpr int kInFlight = 8;     // states whose columns a lane asks for at a time

constexpr unsigned kAllLanes = 0xffffffffu;

template <typename Operation>
__device__ __forceinline__ float reduce_warp(float x, const Operation& operation) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    x = operation(x, __shfl_xor_sync(kAllLanes, x, distance));
  }
  return x;
}

struct CombineGrid {
  // Where there are more tiles than workers, most are not shared: blocks go by the workers then,
  // each of which begins one shared tile at most.
  bool by_workers;
  int used_rows;       // of a tile
  int blocks_of_tile;  // which take turns with its rows
  int warps_of_row;
};

template <typename Out>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    combine_decode_kernel(const __grid_constant__ DecodeParams<float> params,
                          const __grid_constant__ DecodeGrid grid,
                          const __grid_constant__ DecodeSlots slots,
                          const __grid_constant__ CombineGrid blocks) {
  __shared__ float of_warps[kWarps][32 * kVector];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int number = static_cast<int>(blockIdx.x) / blocks.blocks_of_tile;
  const int block_of_tile = static_cast<int>(blockIdx.x) - number * blocks.blocks_of_tile;

  DecodePlan plan(params, grid);
  DecodeSegment segment;
  const bool found = blocks.by_workers ? plan.find_tile_begun_by(number, segment)
                                       : plan.find_tile(number, segment);
  // Also where there is nothing to do: this kernel must not end before the one that it merges for.
  wait_for_earlier_kernels();
  if (!found || segment.splits.count == 1) return;

  const TileSplits& splits = segment.splits;
  const QueryPacking& packing = grid.tiles.packing;
  const HeadTile heads = HeadTile::of(grid.tiles, segment.head_tile);
  const int rows_at_a_time = kWarps / blocks.warps_of_row;
  const int part = warp % blocks.warps_of_row;
  for (int first_row = block_of_tile * rows_at_a_time; first_row < blocks.used_rows;
       first_row += blocks.blocks_of_tile * rows_at_a_time) {
    const int p = first_row + warp / blocks.warps_of_row;
    const int position = packing.position_of(p);
    const int head_in_tile = p - position * packing.heads;
    const int head = heads.head + head_in_tile;
    const int row = segment.first_row + position;
    const bool exists =
        p < blocks.used_rows && head_in_tile < heads.heads && row < segment.queries.rows;
    const int count = exists ? splits.count : 0;
    const auto offset = [&](int64_t batch, int64_t head_stride, int64_t row_stride) {
      return segment.sequence * batch + head * head_stride +
             (segment.queries.first_row + row) * row_stride;
    };

    const auto lse_of = [&](int split) {
      return split < count ? slots.lse_of(splits.slot(split))[p] : Lse::empty();
    };
    const Lse first_lse = lse_of(lane);
    Merged<float> merged{first_lse, 0.f, 0.f};
    Out* out = static_cast<Out*>(params.out) +
               offset(params.out_strides.batch, params.out_strides.head, params.out_strides.row);
#pragma unroll 1
    for (int first = 0; first < slots.head_dim_v; first += 32 * kVector) {
      const int column = first + lane * kVector;
      const bool inside = column < slots.head_dim_v;
      float sum[kVector] = {};
#pragma unroll 1
      for (int base = 0; base < count; base += 32) {
        // Lane i knows what state base + i is worth.
        unsigned contributing = 0;
        float weight = 0.f;
        const int end = min(32, count - base);
#pragma unroll 1
        for (int split = part; split < end; split += kInFlight * blocks.warps_of_row) {
          // States are asked for before it is known what they are worth.
          float states[kInFlight][kVector];
#pragma unroll
          for (int i = 0; i < kInFlight; ++i) {
            const int s = split + i * blocks.warps_of_row;
            if (s >= end || !inside) continue;
            load_values(states[i],
                        slots.out_of(splits.slot(base + s)) + p * slots.head_dim_v + column);
          }
          if (first == 0 && base == 0 && split == part) {
            merged = merge_by_lanes<float>(
                [&](const auto& use) {
                  use(first_lse);
#pragma unroll 1
                  for (int s = lane + 32; s < count; s += 32) use(lse_of(s));
                },
                [](float x) { return reduce_warp(x, running_max<float>); },
                [](float x) { return reduce_warp(x, [](float a, float b) { return a + b; }); });
          }
          if (split == part) {
            const auto share =
                MergeShare<float>::of(base == 0 ? first_lse : lse_of(base + lane), merged);
            contributing = __ballot_sync(kAllLanes, share.contributes);
            weight = share.weight;
          }
#pragma unroll
          for (int i = 0; i < kInFlight; ++i) {
            const int s = split + i * blocks.warps_of_row;
            const MergeShare<float> share{(contributing >> (s % 32) & 1) != 0,
                                          __shfl_sync(kAllLanes, weight, s)};
            if (s >= end) continue;
#pragma unroll
            for (int j = 0; j < kVector; ++j) sum[j] += share.weighted(states[i][j]);
          }
        }
      }
      if (blocks.warps_of_row > 1) {
        store(of_warps[warp] + lane * kVector, sum);
        __syncthreads();
#pragma unroll 1
        for (int w = 1; part == 0 && w < blocks.warps_of_row; ++w) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) sum[i] += of_warps[warp + w][lane * kVector + i];
        }
        __syncthreads();
      }
      if (exists && inside && part == 0) store(out + column, sum);
    }
    if (exists && part == 0 && lane == 0) {
      params.lse[offset(params.lse_strides.batch, params.lse_strides.head, 1)] = merged.lse;
    }
  }
}

template <typename Out>
void launch(const DecodeParams<float>& params, const DecodeGrid& grid, const DecodeSlots& slots) {
  const QueryPacking& packing = grid.tiles.packing;
  // Of packed sequences the host does not know the lengths.
  const int positions = params.problem.cu_seqlens_q == nullptr
                            ? std::min(packing.positions, static_cast<int>(params.problem.total_q))
                            : packing.positions;
  const int used_rows = packing.heads * positions;
  const bool by_workers = grid.even_workers > 0 && grid.even_workers < grid.num_tiles();
  const int64_t tiles = by_workers ? grid.even_workers : grid.num_tiles();
  // By the mean number of states.
  const int64_t states = std::min<int64_t>(grid.num_workers() / tiles, kWarps);
  int warps_of_row = 1;
  while (warps_of_row * 2 <= states) warps_of_row *= 2;
  // One block fits a multiprocessor beside the CTAs of the decode kernel.
  const int rows_at_a_time = kWarps / warps_of_row;
  const int64_t room = std::max<int64_t>(1, params.num_sms / tiles);
  const int blocks_of_tile =
      static_cast<int>(std::min<int64_t>(room, (used_rows + rows_at_a_time - 1) / rows_at_a_time));
  const int64_t blocks = tiles * blocks_of_tile;
  if (blocks > std::numeric_limits<int>::max()) {
    throw std::runtime_error("neginf: decode: more tiles than a grid of blocks covers");
  }
  prefer_shared_memory<combine_decode_kernel<Out>>();
  launch_dependent(combine_decode_kernel<Out>, static_cast<unsigned>(blocks), kThreads,
                   params.stream, params, grid, slots,
                   CombineGrid{by_workers, used_rows, blocks_of_tile, warps_of_row});
}

}  // namespace

DecodeSlots DecodeSlots::allocate(const DecodeParams<float>& params, const DecodeGrid& grid,
                                  int rows) {
  const int head_dim_v = params.problem.head_dim_v;
  DecodeSlots slots{rows, head_dim_v, nullptr, nullptr};
  if (!grid.may_split()) return slots;
  const auto allocate = [&](auto*& to, int64_t count) {
    using Pointer = std::remove_reference_t<decltype(to)>;
    to = static_cast<Pointer>(params.workspace->allocate(count * int64_t{sizeof *to}));
  };
  const int64_t states = grid.num_slots() * rows;
  allocate(slots.out, states * head_dim_v);
  allocate(slots.lse, states);
  return slots;
}

void combine_decode(const DecodeParams<float>& params, const DecodeGrid& grid,
                    const DecodeSlots& slots, DType dtype) {
  dtype == DType::float16 ? launch<__half>(params, grid, slots)
                          : launch<__nv_bfloat16>(params, grid, slots);
}

}  // namespace neginf
