// Merges the states of the tiles of a decode that several workers shared.
//
// A warp has some rows of a tile, or some columns of one row, and needs no other warp. A block has
// a warp for each quarter of a multiprocessor and fits beside the CTAs of the decode kernel:
// launched while that runs, it finds its tiles, then waits.
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

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
// By registers, 96 a thread: what a quarter of a multiprocessor has left beside 2 warps with 208.
constexpr int kBlocksPerSm = 5;
constexpr int kVector = 4;              // columns of a lane at a time
constexpr int kInFlight = 8;            // states whose columns a lane asks for at a time
constexpr int kMostLog2WarpsOfRow = 2;  // with many states and 128 columns each warp has some

constexpr unsigned kAllLanes = 0xffffffffu;

template <typename Operation>
__device__ __forceinline__ float reduce_warp(float x, const Operation& operation) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    x = operation(x, __shfl_xor_sync(kAllLanes, x, distance));
  }
  return x;
}

// Which rows a warp merges.
struct CombineGrid {
  // Where there are more tiles than workers, most are not shared: warps go by the workers then,
  // each of which begins one shared tile at most.
  bool by_workers;
  int tiles;              // or workers
  int used_rows;          // of a tile
  int rows_at_a_time;     // of a tile
  int log2_warps_of_row;  // these share out its columns
  int warps_of_tile;

  static CombineGrid of(const DecodeParams<float>& params, const DecodeGrid& grid) {
    const QueryPacking& packing = grid.tiles.packing;
    // Of packed sequences the host does not know the lengths.
    const int positions =
        params.problem.cu_seqlens_q == nullptr
            ? std::min(packing.positions, static_cast<int>(params.problem.total_q))
            : packing.positions;
    const int used_rows = packing.heads * positions;
    const bool by_workers = grid.even_workers > 0 && grid.even_workers < grid.num_tiles();
    const int64_t tiles = by_workers ? grid.even_workers : grid.num_tiles();
    // One block fits a multiprocessor beside the CTAs of the decode kernel.
    const int64_t room = std::max<int64_t>(1, int64_t{params.num_sms} * kWarps / tiles);
    int log2_warps_of_row = 0;
    while (log2_warps_of_row < kMostLog2WarpsOfRow &&
           int64_t{used_rows} << (log2_warps_of_row + 1) <= room) {
      ++log2_warps_of_row;
    }
    const int rows_at_a_time = static_cast<int>(
        std::min<int64_t>(used_rows, std::max<int64_t>(1, room >> log2_warps_of_row)));
    const int warps_of_tile = rows_at_a_time << log2_warps_of_row;
    if (tiles > std::numeric_limits<int>::max() / warps_of_tile - kWarps) {
      throw std::runtime_error("neginf: decode: more tiles than a grid of blocks covers");
    }
    return {by_workers,     static_cast<int>(tiles), used_rows,
            rows_at_a_time, log2_warps_of_row,       warps_of_tile};
  }

  int num_blocks() const { return (tiles * warps_of_tile + kWarps - 1) / kWarps; }
};

// A row of a shared tile.
template <typename Out>
struct SharedRow {
  int splits;
  int head_dim_v;
  int stride;  // from split to split, of out and of lse
  int lse_stride;
  const float* split_0;  // lies apart from the others
  const float* split_1;
  const Lse* lse_0;
  const Lse* lse_1;
  Out* out;
  Lse* lse;

  __device__ __forceinline__ Lse lse_of(int split) const {
    if (split >= splits) return Lse::empty();
    return split == 0 ? *lse_0 : lse_1[(split - 1) * lse_stride];
  }

  // Left to itself the compiler makes addresses where they are used, which is after the wait.
  __device__ __forceinline__ void make_addresses_now() {
    asm volatile("" : "+l"(split_0), "+l"(split_1), "+l"(lse_0), "+l"(lse_1), "+l"(out), "+l"(lse));
  }

  // Share `part` of its columns.
  __device__ __forceinline__ void merge(int part, int parts) const {
    // A sum goes by the number of states and by nothing else.
    if (splits <= kInFlight) {
      merge<1>(part, parts);
    } else if (splits <= 2 * kInFlight) {
      merge<2>(part, parts);
    } else {
      merge<4>(part, parts);
    }
  }

 private:
  // The more states there are, the more of them the lanes share out, and the fewer columns.
  template <int kStates>
  __device__ __forceinline__ void merge(int part, int parts) const {
    constexpr int kLanes = 32 / kStates;
    constexpr int kColumns = kLanes * kVector;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int first_state = lane / kLanes;
    const Lse lse_of_lane = lse_of(lane);
    Merged<float> merged{lse_of_lane, 0.f, 0.f};
#pragma unroll 1
    for (int first = part * kColumns; first < head_dim_v; first += parts * kColumns) {
      const int column = first + lane % kLanes * kVector;
      const bool inside = column < head_dim_v;
      float sum[kVector] = {};
#pragma unroll 1
      for (int base = 0; base < splits; base += kInFlight * kStates) {
        // States are asked for before it is known what they are worth.
        float states[kInFlight][kVector];
        const int left = inside ? splits - base - first_state : 0;
        const float* from = split_1 + int64_t{base + first_state - 1} * stride + column;
#pragma unroll
        for (int i = 0; i < kInFlight; ++i, from += kStates * stride) {
          if (i * kStates >= left) continue;
          load_values(states[i], i == 0 && base + first_state == 0 ? split_0 + column : from);
        }
        if (first == part * kColumns && base == 0) {
          merged = merge_by_lanes<float>(
              [&](const auto& use) {
                use(lse_of_lane);
#pragma unroll 1
                for (int s = lane + 32; s < splits; s += 32) use(lse_of(s));
              },
              [](float x) { return reduce_warp(x, running_max<float>); },
              [](float x) { return reduce_warp(x, [](float a, float b) { return a + b; }); });
        }
        // Lane i knows what state base + i is worth.
        const auto share =
            MergeShare<float>::of(base == 0 ? lse_of_lane : lse_of(base + lane), merged);
        const unsigned contributing = __ballot_sync(kAllLanes, share.contributes) >> first_state;
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          const MergeShare<float> of_state{
              (contributing >> i * kStates & 1) != 0,
              __shfl_sync(kAllLanes, share.weight, first_state + i * kStates)};
#pragma unroll
          for (int j = 0; j < kVector; ++j) {
            sum[j] = of_state.add_weighted(sum[j], states[i][j]);
          }
        }
      }
#pragma unroll
      for (int distance = 16; distance >= kLanes; distance /= 2) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) sum[j] += __shfl_xor_sync(kAllLanes, sum[j], distance);
      }
      if (inside && first_state == 0) store(out + column, sum);
    }
    if (part == 0 && lane == 0) *lse = merged.lse;
  }
};

// What a warp merges; in shared memory, as it is short of registers.
struct MergedTile {
  int sequence;
  Sequence queries;
  int first_row;  // in the sequence
  HeadTile heads;
  TileSplits splits;

  // Whether this number has a tile that is shared. By all lanes of a warp.
  static __device__ __forceinline__ bool find(const DecodeParams<float>& params,
                                              const DecodeGrid& grid, bool by_workers, int number,
                                              MergedTile& tile) {
    DecodePlan plan(params, grid);
    plan.divide();
    DecodeSegment segment;
    const bool found =
        by_workers ? plan.find_tile_begun_by(number, segment) : plan.find_tile(number, segment);
    if (!found || segment.splits.count == 1) return false;
    if (threadIdx.x % 32 == 0) {
      tile = {segment.sequence, segment.queries, segment.first_row,
              HeadTile::of(grid.tiles, segment.head_tile), segment.splits};
    }
    __syncwarp();
    return true;
  }
};

template <typename Out>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    combine_decode_kernel(const __grid_constant__ DecodeParams<float> params,
                          const __grid_constant__ DecodeGrid grid,
                          const __grid_constant__ DecodeSlots slots,
                          const __grid_constant__ CombineGrid warps) {
  const int warp = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  const int number = warp / warps.warps_of_tile;
  const int warp_of_tile = warp - number * warps.warps_of_tile;
  const int turn = warp_of_tile >> warps.log2_warps_of_row;
  const int part = warp_of_tile - (turn << warps.log2_warps_of_row);

  allow_dependent_launch();
  __shared__ MergedTile of_warps[kWarps];
  MergedTile& tile = of_warps[threadIdx.x / 32];
  if (number >= warps.tiles || !MergedTile::find(params, grid, warps.by_workers, number, tile)) {
    // This kernel must not end before the one that it merges for.
    wait_for_earlier_kernels();
    return;
  }
#pragma unroll 1
  for (int p = turn; p < warps.used_rows; p += warps.rows_at_a_time) {
    const int position = grid.tiles.packing.position_of(p);
    const int head_in_tile = p - position * grid.tiles.packing.heads;
    const int row = tile.first_row + position;
    if (head_in_tile >= tile.heads.heads || row >= tile.queries.rows) continue;
    const auto offset = [&](int64_t batch, int64_t head_stride, int64_t row_stride) {
      return tile.sequence * batch + (tile.heads.head + head_in_tile) * head_stride +
             (tile.queries.first_row + row) * row_stride;
    };
    SharedRow<Out> shared{
        tile.splits.count,
        slots.head_dim_v,
        slots.rows * slots.head_dim_v,
        slots.rows,
        slots.out_of(tile.splits.first_slot) + p * slots.head_dim_v,
        slots.out_of(tile.splits.second_slot) + p * slots.head_dim_v,
        slots.lse_of(tile.splits.first_slot) + p,
        slots.lse_of(tile.splits.second_slot) + p,
        static_cast<Out*>(params.out) +
            offset(params.out_strides.batch, params.out_strides.head, params.out_strides.row),
        params.lse + offset(params.lse_strides.batch, params.lse_strides.head, 1)};
    shared.make_addresses_now();
    wait_for_earlier_kernels();
    shared.merge(part, 1 << warps.log2_warps_of_row);
  }
  wait_for_earlier_kernels();  // if no row was one of the tile
}

template <typename Out>
void launch(const DecodeParams<float>& params, const DecodeGrid& grid, const DecodeSlots& slots) {
  const auto warps = CombineGrid::of(params, grid);
  prefer_shared_memory<combine_decode_kernel<Out>>();
  launch_dependent(combine_decode_kernel<Out>, static_cast<unsigned>(warps.num_blocks()), kThreads,
                   0, params.stream, params, grid, slots, warps);
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
