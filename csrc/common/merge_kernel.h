// What the two combine kernels share.
//
//     columns   a group of lanes, the smallest power of two up to a warp that covers a row with
//               16-byte loads, walks over the states of its rows, one row at a time. Where an
//               address does not allow it the lanes load single elements.
//     states    the same lanes hold the lse of all those rows at once, a lane per state: with 8
//               states a warp merges 4 rows together. Weights go to the columns by shuffle.
//
// Neither depends on strides or alignment: they change no bit of a merged state.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "../params.h"
#include "element.h"
#include "merge_row.h"
#include "merge_states.h"

namespace neginf {

constexpr int kMergeThreads = 256;
template <typename Element>
constexpr int kWide = kLoadBytes / static_cast<int>(sizeof(Element));

// What a lane loads before it uses any of it: kStates states, a power of two, of kRows rows. With
// kHoldsAll there are no more states than that, and each has a lane that holds its lse: a row takes
// one turn, and no loop around it.
template <int kStates_, int kRows_, bool kHoldsAll_>
struct InFlight {
  static constexpr int kStates = kStates_;
  static constexpr int kRows = kRows_;
  static constexpr bool kHoldsAll = kHoldsAll_;
};

// Bytes per second of a copy's at 8 / 32 float32 states of d128: 4 states in flight 1.03 / 1.04, 8
// (which leaves registers for fewer warps) 1.04 / 1.03, 2 1.02 / 1.03, but 0.80 at 8 of bfloat16.
using ManyStates = InFlight<4, 1, false>;

// With few states not the bytes in flight are the limit but instructions. At the speed of a copy a
// warp of an H200 has 310 for a row of 2 states and 512 bytes, or several of fewer bytes, and for
// its share of what comes before its rows. ManyStates takes 330 to 490, of which idle states and
// loops are the most: 0.82 of a copy for float32, 0.49 to 0.68 for 16 bits.
using FourStates = InFlight<4, 1, true>;
template <int kRows>
using TwoStates = InFlight<2, kRows, true>;

// A pack as it is loaded, in whole registers until it is used.
template <int kBytes>
struct BitsOfSize;
template <>
struct BitsOfSize<16> {
  using Type = uint4;
};
template <>
struct BitsOfSize<4> {
  using Type = unsigned;
};
template <>
struct BitsOfSize<2> {
  using Type = unsigned short;
};
template <typename Element, int kVector>
using Bits = typename BitsOfSize<sizeof(Element) * kVector>::Type;

template <int kVector, typename Element>
__device__ __forceinline__ Bits<Element, kVector> load(const Element* from) {
  return *reinterpret_cast<const Bits<Element, kVector>*>(from);
}

template <typename Element, int kVector>
__device__ __forceinline__ void unpack(float (&to)[kVector], Bits<Element, kVector> bits) {
  Pack<Element, kVector> pack;
  memcpy(&pack, &bits, sizeof pack);
#pragma unroll
  for (int i = 0; i < kVector; ++i) to[i] = to_float(pack.at[i]);
}

// 1, 2, 4, ... or 32 neighbouring lanes. All lanes of a warp, whatever their group, must call the
// same functions together: shuffles of a part of a warp are many times slower.
class LaneGroup {
 public:
  explicit __device__ LaneGroup(int log2_lanes)
      : lanes(1 << log2_lanes),
        lane(static_cast<int>(threadIdx.x) & (lanes - 1)),
        index(static_cast<int>(threadIdx.x) >> log2_lanes),
        count(kMergeThreads >> log2_lanes) {}

  // Over the lanes of the group, which all get the same bits: a tree whose two sides commute.
  template <int kCount, typename Operation>
  __device__ void reduce(float (&x)[kCount], const Operation& operation) const {
#pragma unroll 1
    for (int distance = lanes >> 1; distance > 0; distance >>= 1) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        x[i] = operation(x[i], __shfl_xor_sync(kAllLanes, x[i], distance));
      }
    }
  }
  template <int kCount>
  __device__ void sum(float (&x)[kCount]) const {
    reduce(x, [](float a, float b) { return a + b; });
  }
  __device__ float sum(float x) const {
    float one[] = {x};
    sum(one);
    return one[0];
  }
  __device__ float max(float x) const {
    float one[] = {x};
    reduce(one, running_max<float>);
    return one[0];
  }

  // x of a lane of the group.
  __device__ float from_lane(float x, int i) const { return __shfl_sync(kAllLanes, x, i, lanes); }

  // Bit i is that of lane i of the group; zeros above.
  __device__ unsigned ballot(bool bit) const {
    return __ballot_sync(kAllLanes, bit) >> (threadIdx.x % 32 - lane) & kAllLanes >> (32 - lanes);
  }

  const int lanes;
  const int lane;   // which one of the group
  const int index;  // which group of the block
  const int count;  // groups in the block

 private:
  static constexpr unsigned kAllLanes = 0xffffffffu;
};

struct BlockRow : MergeRow {
  bool exists;  // else the row is the last one, and nothing may be written
};

NEGINF_HOST_DEVICE int64_t num_positions(const CombineInputs<float>& params) {
  return static_cast<int64_t>(params.batch) * params.seqlen;
}

// The rows of a block are neighbouring positions of one head, whose lse are neighbours in memory;
// blocks go through the heads first, whose states are.
class RowsOfBlock {
 public:
  __device__ RowsOfBlock(const CombineInputs<float>& params, int rows_per_block)
      : params_(params),
        head_(static_cast<int>(blockIdx.x % static_cast<unsigned>(params.num_heads))) {
    const int64_t first =
        static_cast<int64_t>(blockIdx.x / static_cast<unsigned>(params.num_heads)) * rows_per_block;
    batch_ = params.batch == 1 ? 0 : static_cast<unsigned>(first / params.seqlen);
    row_ = static_cast<unsigned>(first - static_cast<int64_t>(batch_) * params.seqlen);
  }

  __device__ BlockRow row(int i) const {
    const unsigned seqlen = params_.seqlen;
    unsigned batch = batch_;
    unsigned row = row_ + i;
    if (row >= seqlen) {
      batch += row / seqlen;  // in 32 bits, or it takes longer than the row
      row %= seqlen;
    }
    const bool exists = batch < static_cast<unsigned>(params_.batch);
    if (!exists) {
      batch = params_.batch - 1;
      row = seqlen - 1;
    }
    return {{static_cast<int>(batch), static_cast<int>(row), head_}, exists};
  }

 private:
  const CombineInputs<float>& params_;
  int head_;
  unsigned batch_, row_;  // of the first one
};

// What some states, one for each lane of a group, are to their merged rows.
class Shares {
 public:
  __device__ Shares(const MergeShare<float>& mine, const LaneGroup& group)
      : contributing_(group.ballot(mine.contributes)), weight_(mine.weight), group_(group) {}

  __device__ bool contributes(int lane) const { return contributing_ >> lane & 1; }
  __device__ MergeShare<float> of(int lane) const {
    return {contributes(lane), group_.from_lane(weight_, lane)};
  }
  __device__ MergeShare<float> mine() const { return {contributes(group_.lane), weight_}; }

 private:
  unsigned contributing_;  // a bit for each lane
  float weight_;
  const LaneGroup& group_;
};

// The states of the rows of a group. Lane i of the group holds states of row i / holders.lanes:
// i % holders.lanes, and every holders.lanes-th from there if that is too few lanes for a row.
// StatesOfRow: those of the lane's row.
template <typename StatesOfRow>
class HeldStates {
 public:
  static __device__ HeldStates of(const StatesOfRow& row, int num_states, const LaneGroup& group,
                                  const LaneGroup& holders) {
    const Lse first = holders.lane < num_states ? row.lse(holders.lane) : Lse::empty();
    HeldStates states(row, group, holders, first);
    const auto for_each_state = [&](const auto& use) {
    // Mostly one turn: unrolled, the loop would divide to count them.
#pragma unroll 1
      for (int s = holders.lane; s < num_states; s += holders.lanes) use(states.lse_of(s));
    };
    states.merged_ = merge_by_lanes<float>(
        for_each_state, [&](float x) { return holders.max(x); },
        [&](float x) { return holders.sum(x); });
    return states;
  }

  // Of the lane's row.
  __device__ Lse merged_lse() const { return merged_.lse; }

  // Of states base, base + 1, ... (one for each holder) before `end`.
  __device__ Shares shares(int base, int end) const {
    const int s = base + holders_.lane;
    return {MergeShare<float>::of(s < end ? lse_of(s) : Lse::empty(), merged_), group_};
  }

 private:
  __device__ HeldStates(const StatesOfRow& row, const LaneGroup& group, const LaneGroup& holders,
                        Lse first)
      : row_(row), group_(group), holders_(holders), first_(first), merged_{first, 0.f, 0.f} {}

  // The first lse of each lane stays in a register: where there is a lane for each state, none is
  // read twice.
  __device__ Lse lse_of(int s) const { return s == holders_.lane ? first_ : row_.lse(s); }

  StatesOfRow row_;
  const LaneGroup& group_;
  const LaneGroup& holders_;
  Lse first_;
  Merged<float> merged_;
};

// Whether every row of a tensor starts at an address that a pack needs.
template <int kVector, typename Element>
bool allows_pack(const void* base, const CombineStrides& strides) {
  constexpr int kElements = alignof(Pack<Element, kVector>) / sizeof(Element);
  return reinterpret_cast<std::uintptr_t>(base) % alignof(Pack<Element, kVector>) == 0 &&
         strides.split % kElements == 0 && strides.batch % kElements == 0 &&
         strides.row % kElements == 0 && strides.head % kElements == 0;
}

template <int kVector, typename Partial>
bool allow_pack(const StackedStates<float>& states, int) {
  return allows_pack<kVector, Partial>(states.out, states.out_strides);
}
template <int kVector, typename Partial>
bool allow_pack(const ListedStates<float>& states, int count) {
  return std::all_of(states.at, states.at + count, [](const auto& state) {
    return allows_pack<kVector, Partial>(state.out, state.out_strides);
  });
}

// How a launch divides the work.
struct MergeGrid {
  int log2_lanes;    // of a group
  int log2_holders;  // lanes for the states of one row; a group has as many rows as that leaves
  int64_t blocks;

  __host__ __device__ int rows_per_group() const { return 1 << (log2_lanes - log2_holders); }
};

template <typename Partial>
MergeGrid merge_grid(const CombineInputs<float>& params, int states_in_flight) {
  constexpr int64_t kManyBlocks = 1024;  // as fill any GPU: fewer rows a group before fewer blocks
  int log2_lanes = 0;
  while (log2_lanes < 5 && (kWide<Partial> << log2_lanes) < params.head_dim) ++log2_lanes;
  // Never so few holders that states in flight are of two rows.
  int log2_holders = 0;
  while ((1 << log2_holders) < std::max(params.num_splits, states_in_flight) &&
         log2_holders < log2_lanes) {
    ++log2_holders;
  }
  for (;; ++log2_holders) {
    const int64_t rows = kMergeThreads >> log2_holders;
    const int64_t blocks = (num_positions(params) + rows - 1) / rows * params.num_heads;
    if (log2_holders == log2_lanes || blocks >= kManyBlocks) {
      return {log2_lanes, log2_holders, blocks};
    }
  }
}

// use(an InFlight, its MergeGrid). Of two states, those of kRowsOfTwo rows are in flight.
template <typename Partial, int kVector, int kRowsOfTwo, typename Use>
void dispatch_in_flight(const CombineInputs<float>& params, const Use& use) {
  const auto holds_all = [&](auto in_flight, const MergeGrid& grid) {
    return params.num_splits <= std::min(in_flight.kStates, 1 << grid.log2_holders) &&
           grid.rows_per_group() >= in_flight.kRows;
  };
  const MergeGrid grid = merge_grid<Partial>(params, ManyStates::kStates);
  if constexpr (kVector > 1) {
    using Two = TwoStates<kRowsOfTwo>;
    const MergeGrid of_two = merge_grid<Partial>(params, Two::kStates);
    if (holds_all(Two{}, of_two)) return use(Two{}, of_two);
    if (holds_all(FourStates{}, grid)) return use(FourStates{}, grid);
  }
  use(ManyStates{}, grid);
}

inline unsigned checked_blocks(int64_t blocks) {
  if (blocks > std::numeric_limits<int>::max()) {
    throw std::runtime_error("neginf: combine: more rows than a grid of blocks covers");
  }
  return static_cast<unsigned>(blocks);
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
