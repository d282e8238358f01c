// What the two combine kernels share.
//
// A group of lanes merges a row. Each lane loads 16 bytes of a state at a time, or a single element
// where an address does not allow more, and of up to 8 states all that it needs before it uses any
// of it. Every lane computes by itself what these are worth: the lse of a row are few bytes, which
// the lanes of a group read at once, and no lane waits for another one. Of more states the lanes of
// a group share out the lse, and a lane loads 4 at a time.
//
// What limits a merge are not bytes in flight but instructions and what a warp waits for: at the
// rate of a copy a warp of an H200 has 310 instructions for 1.5 kB, such as a row of 2 float32
// states of d128 or as many bytes of narrower rows. This takes 130 to 180, all included.
//
// Neither strides nor alignment change a bit of a merged state.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "../params.h"
#include "element.h"
#include "merge_row.h"
#include "merge_states.h"

namespace neginf {

template <typename Element>
constexpr int kWide = kLoadBytes / static_cast<int>(sizeof(Element));

// What a lane loads of a row before it uses any of it: kPacks packs of kStates states. With
// kHoldsAll there are no more states than that.
template <int kStates_, int kPacks_, bool kHoldsAll_>
struct InFlight {
  static constexpr int kStates = kStates_;
  static constexpr int kPacks = kPacks_;
  static constexpr bool kHoldsAll = kHoldsAll_;
};

// Two packs: half as many lanes work out what the states of a row are worth. With four, rows have
// so few lanes that a load takes 32 or 64 bytes of each: 2 bfloat16 states of d64 merged at 0.66 of
// a copy's rate then, at 0.80 with two.
using TwoStates = InFlight<2, 2, true>;
using FourStates = InFlight<4, 2, true>;
using EightStates = InFlight<8, 1, true>;
using ManyStates = InFlight<4, 1, false>;

// A pack as it is loaded and stored, in whole registers.
struct alignas(16) Bits256 {
  uint4 halves[2];
};
template <int kBytes>
struct BitsOfSize;
template <>
struct BitsOfSize<32> {
  using Type = Bits256;
};
template <>
struct BitsOfSize<16> {
  using Type = uint4;
};
template <>
struct BitsOfSize<8> {
  using Type = uint2;
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
__device__ __forceinline__ Bits<Element, kVector> load_bits(const Element* from) {
  return *reinterpret_cast<const Bits<Element, kVector>*>(from);
}

template <int kVector, typename Element>
__device__ __forceinline__ void store_bits(Element* to, Bits<Element, kVector> bits) {
  *reinterpret_cast<Bits<Element, kVector>*>(to) = bits;
}

template <typename Element, int kVector>
__device__ __forceinline__ void unpack(float (&to)[kVector], const Bits<Element, kVector>& bits) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16> && kVector > 1) {
    // The upper half of a float: two instructions for two, which convert in three.
    unsigned pairs[kVector / 2];
    memcpy(pairs, &bits, sizeof pairs);
#pragma unroll
    for (int i = 0; i < kVector; i += 2) {
      to[i] = __uint_as_float(pairs[i / 2] << 16);
      to[i + 1] = __uint_as_float(pairs[i / 2] & 0xffff0000u);
    }
  } else {
    Pack<Element, kVector> pack;
    memcpy(&pack, &bits, sizeof pack);
#pragma unroll
    for (int i = 0; i < kVector; ++i) to[i] = to_float(pack.at[i]);
  }
}

template <typename Element, int kVector>
__device__ __forceinline__ Bits<Element, kVector> rounded(const float (&from)[kVector]) {
  Pack<Element, kVector> pack;
#pragma unroll
  for (int i = 0; i < kVector; ++i) round_to(pack.at[i], from[i]);
  Bits<Element, kVector> bits;
  memcpy(&bits, &pack, sizeof bits);
  return bits;
}

// 2, 4, ... or 32 neighbouring lanes. All lanes of a warp, whatever their group, must call the same
// functions together: shuffles of a part of a warp are many times slower.
class LaneGroup {
 public:
  explicit __device__ LaneGroup(int log2_lanes)
      : lanes(1 << log2_lanes),
        lane(static_cast<int>(threadIdx.x) & (lanes - 1)),
        index(static_cast<int>(threadIdx.x) >> log2_lanes),
        count(static_cast<int>(blockDim.x) >> log2_lanes) {}

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

  const int lanes;
  const int lane;   // which one of the group
  const int index;  // which group of the block
  const int count;  // groups in the block

 private:
  static constexpr unsigned kAllLanes = 0xffffffffu;
};

// Division of numbers below 2^31 by one of them, as a multiplication. That the multiplier is
// rounded up adds less than 1 / divisor to a quotient, which is too little to make it another one.
class DivisionBy {
 public:
  explicit DivisionBy(unsigned divisor) : divisor_(divisor) {
    while (uint64_t{1} << (shift_ - 31) < divisor) ++shift_;
    multiplier_ = static_cast<unsigned>(((uint64_t{1} << shift_) + divisor - 1) / divisor);
  }

  __device__ unsigned quotient(unsigned x) const {
    return static_cast<unsigned>(uint64_t{x} * multiplier_ >> shift_);
  }
  __device__ unsigned remainder(unsigned x, unsigned quotient) const {
    return x - quotient * divisor_;
  }

 private:
  unsigned divisor_;
  unsigned multiplier_;
  unsigned shift_ = 31;
};

// How a launch divides the rows.
struct MergeGrid {
  int log2_lanes;    // of a group
  bool along_batch;  // blocks take neighbours in the batch, else in a sequence
  DivisionBy heads;
  DivisionBy blocks_of_line;  // of positions or batch entries
  unsigned blocks;
};

struct BlockRow : MergeRow {
  bool exists;  // else the row is another one, and nothing may be written
};

// The rows of a block are neighbouring positions of one head, whose lse are neighbours in memory,
// or where sequences are short the same position of several; blocks go through the heads first,
// whose states are neighbours.
class RowsOfBlock {
 public:
  __device__ RowsOfBlock(const CombineInputs<float>& params, const MergeGrid& grid,
                         unsigned rows_per_block)
      : along_batch_(grid.along_batch), length_(along_batch_ ? params.batch : params.seqlen) {
    const unsigned block = grid.heads.quotient(blockIdx.x);
    head_ = grid.heads.remainder(blockIdx.x, block);
    line_ = grid.blocks_of_line.quotient(block);
    first_ = grid.blocks_of_line.remainder(block, line_) * rows_per_block;
  }

  __device__ BlockRow row(unsigned i) const {
    const bool exists = first_ + i < length_;
    const unsigned at = exists ? first_ + i : length_ - 1;
    return {{along_batch_ ? at : line_, along_batch_ ? line_ : at, head_}, exists};
  }

 private:
  bool along_batch_;
  unsigned length_;  // of a line
  unsigned line_, head_, first_;
};

// The lse of some states of a row.
template <int kStates>
class LseOfStates {
 public:
  // Of empty ones.
  __device__ LseOfStates() : LseOfStates(std::make_integer_sequence<int, kStates>()) {}

  // Of states first, first + 1, ... before `end`.
  template <typename StatesOfRow>
  __device__ void load(const StatesOfRow& states, int first, int end) {
#pragma unroll
    for (int i = 0; i < kStates; ++i) {
      if (first + i < end) at_[i] = states.lse(first + i);
    }
  }

  __device__ Merged<float> merged() const {
    const auto for_each_state = [&](const auto& use) {
#pragma unroll
      for (int i = 0; i < kStates; ++i) use(at_[i]);
    };
    const auto alone = [](float x) { return x; };
    return merge_by_lanes<float>(for_each_state, alone, alone);
  }

  __device__ void get_shares(MergeShare<float> (&shares)[kStates],
                             const Merged<float>& merged) const {
#pragma unroll
    for (int i = 0; i < kStates; ++i) shares[i] = MergeShare<float>::of(at_[i], merged);
  }

 private:
  template <int... i>
  explicit __device__ LseOfStates(std::integer_sequence<int, i...>)
      : at_{(static_cast<void>(i), Lse::empty())...} {}

  Lse at_[kStates];
};

// The merge of all states of a row by the lanes of a group, each of which reads some.
template <typename StatesOfRow>
__device__ Merged<float> merge_by_group(const StatesOfRow& states, int num_states,
                                        const LaneGroup& group) {
  const Lse first = group.lane < num_states ? states.lse(group.lane) : Lse::empty();
  const auto for_each_state = [&](const auto& use) {
    use(first);
#pragma unroll 1
    for (int s = group.lane + group.lanes; s < num_states; s += group.lanes) use(states.lse(s));
  };
  return merge_by_lanes<float>(
      for_each_state, [&](float x) { return group.max(x); }, [&](float x) { return group.sum(x); });
}

// States of a row at a pack of columns; zero if not loaded.
template <typename Partial, int kVector, int kStates>
struct LoadedStates {
  Bits<Partial, kVector> at[kStates];

  // States first, first + 1, ... for which is_wanted(0), (1), ...
  template <typename StatesOfRow, typename IsWanted>
  __device__ void load(const StatesOfRow& states, int first, int column,
                       const IsWanted& is_wanted) {
#pragma unroll
    for (int i = 0; i < kStates; ++i) {
      at[i] = {};
      if (is_wanted(i)) at[i] = load_bits<kVector>(states.out(first + i) + column);
    }
  }
};

// For a lane past the end of a row, which reads what the first lane does.
__device__ __forceinline__ int readable(int column, const CombineInputs<float>& params) {
  return column < params.head_dim ? column : 0;
}

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

// log2 of the lanes of a group: at least one for each state.
template <typename Partial, typename InFlight>
int log2_lanes_of_row(int head_dim) {
  int log2_lanes = 0;
  while ((1 << log2_lanes) < InFlight::kStates ||
         (log2_lanes < 5 && (kWide<Partial> * InFlight::kPacks << log2_lanes) < head_dim)) {
    ++log2_lanes;
  }
  return log2_lanes;
}

// use(an InFlight).
template <int kVector, typename Use>
void dispatch_in_flight(int num_states, const Use& use) {
  if constexpr (kVector > 1) {
    if (num_states <= TwoStates::kStates) return use(TwoStates{});
    if (num_states <= FourStates::kStates) return use(FourStates{});
  }
  if (num_states <= EightStates::kStates) return use(EightStates{});
  use(ManyStates{});
}

inline MergeGrid merge_grid(const CombineInputs<float>& params, int log2_lanes,
                            int rows_per_block) {
  const bool along_batch = params.seqlen < std::min(rows_per_block, params.batch);
  const auto [length, lines] =
      along_batch ? std::pair(params.batch, params.seqlen) : std::pair(params.seqlen, params.batch);
  const int64_t blocks_of_line = (length + int64_t{rows_per_block} - 1) / rows_per_block;
  const int64_t blocks = blocks_of_line * lines * params.num_heads;
  if (blocks > std::numeric_limits<int>::max()) {
    throw std::runtime_error("neginf: combine: more rows than a grid of blocks covers");
  }
  return {log2_lanes, along_batch, DivisionBy(params.num_heads),
          DivisionBy(static_cast<unsigned>(blocks_of_line)), static_cast<unsigned>(blocks)};
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
