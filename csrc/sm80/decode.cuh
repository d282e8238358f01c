// Attention of few query rows over a long cache, with mma.sync and cp.async. Reading K and V takes
// all the time there is, so that this kernel serves every GPU from sm80 on. On sm90 slices that are
// whole come by tensor maps (sm90/decode_copies.cuh).
//
// A tile has kRows query rows of one sequence: all heads that share a key head, for as many
// positions as fit. decode_plan.h says which keys a CTA attends to, one segment after the other.
// Inside it the warps share out the keys and not the rows: each has a softmax of its own over every
// kWarps-th slice of kKeys keys, loads its slices itself and waits for nobody.
//
//   global     K, V  (row by row, as pages go)                        out, lse or a slot
//              | cp.async, kStages - 1 slices ahead                            ^
//   shared     ring[warp][stage]                          states of the warps -'
//              | ldmatrix                                    ^
//   registers  S = Q K^T -> mask -> softmax -> O += P V -----'   Q: comes with the first slice
//
// A row's bits depend on its own keys only: not on other rows of the tile, nor on other sequences
// unless these move the ends of segments.
#pragma once

#include <cute/tensor.hpp>
#include <limits>
#include <stdexcept>
#include <string>

#include "../common/cuda_check.h"
#include "../common/decode_combine.h"
#include "../common/decode_plan.h"
#include "../common/dependent_launch.cuh"
#include "../common/shared_memory.h"
#include "../common/softmax.h"
#include "../kernels.h"
#include "decode_loader.cuh"
#include "shared_tile.cuh"
#include "tiles.cuh"

namespace neginf::sm80 {

using namespace cute;

// ---------------------------------------------------------------------------------------- mainloop

// The first `rows` rows of Q to shared memory, by `threads` threads.
template <typename Traits>
__device__ __forceinline__ void issue_queries(const DecodeParams<float>& params,
                                              const DecodeWork& work, const void* buffer, int rows,
                                              int thread, int threads) {
  using SharedQueries = typename Traits::SharedQueries;
  const int chunk = thread % SharedQueries::kChunks;
  CUTE_NO_UNROLL
  for (int p = thread / SharedQueries::kChunks; p < rows; p += threads / SharedQueries::kChunks) {
    const DecodeWork::Row row = work.row(p);
    const bool exists = row.exists && row.position < work.tile.sequence.length;
    const uint32_t to = cast_smem_ptr_to_uint(buffer) + SharedQueries::offset(p, chunk);
    const char* from =
        static_cast<const char*>(params.q) + 2 * work.offset(row, params.q_strides) + chunk * 16;
    CUTE_UNROLL
    for (int b = 0; b < SharedQueries::kBlocks; ++b) {
      cp_async_16(to + b * SharedQueries::kBlockBytes, from + b * SharedQueries::kRowBytes,
                  exists && chunk * 8 + b * SharedQueries::kWidth < params.problem.head_dim);
    }
  }
}

// The rows of Q as A operands. They come with a warp's first slice, behind it, and in the stage
// that is to be filled next.
template <typename Traits>
class QueryOperand {
  static constexpr int kHeadDim = Traits::kHeadDim;
  static_assert(Traits::kSharesQueries || Traits::kRows <= Traits::kKeys);

 public:
  static __device__ __forceinline__ void issue(const DecodeParams<float>& params,
                                               const DecodeWork& work,
                                               typename Traits::SharedStorage& shared, int warp) {
    issue_queries<Traits>(params, work, buffer(shared, warp), work.used_rows(),
                          thread_index_again() % 32, 32);
  }
  __device__ __forceinline__ void arrive(const DecodeWork& work,
                                         typename Traits::SharedStorage& shared, int warp) {
    using Operand = OperandA<typename Traits::SharedQueries, 1>;
    const int lane = thread_index_again() % 32;
    const uint32_t address = cast_smem_ptr_to_uint(buffer(shared, warp)) + Operand::begin(lane, 0);
    const int used_rows = work.used_rows();
    CUTE_UNROLL
    for (int k = 0; k < kHeadDim / 16; ++k) {
      CUTE_UNROLL
      for (int m = 0; m < Traits::kM; ++m) {
        ldmatrix(at_[k][m], Operand::at(address, m, k));
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          if (16 * m + i % 2 * 8 + lane / 4 >= used_rows) at_[k][m][i] = 0;
        }
      }
    }
  }
  __device__ __forceinline__ void begin_slice() {}
  __device__ __forceinline__ void operator()(int m, int k, uint32_t (&a)[4]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) a[i] = at_[k][m][i];
  }

 private:
  static __device__ __forceinline__ const void* buffer(const typename Traits::SharedStorage& shared,
                                                       int warp) {
    return shared.of_warp[warp].ring[Traits::kStages - 1].k;
  }

  uint32_t at_[kHeadDim / 16][Traits::kM][4];
};

// The same where registers are too few: all warps read one copy.
template <typename Traits>
class SharedQueryOperand {
  using Operand = OperandA<typename Traits::SharedQueries, 1>;

 public:
  static __device__ __forceinline__ void issue(const DecodeParams<float>& params,
                                               const DecodeWork& work,
                                               typename Traits::SharedStorage& shared, int) {
    issue_queries<Traits>(params, work, shared.q, Traits::kRows, thread_index_again(),
                          Traits::kThreads);
  }
  __device__ __forceinline__ void arrive(const DecodeWork&, typename Traits::SharedStorage& shared,
                                         int) {
    address_ = cast_smem_ptr_to_uint(shared.q) + Operand::begin(thread_index() % 32, 0);
    __syncthreads();
  }
  // Addresses are made again for every slice, as there is no register to keep them.
  __device__ __forceinline__ void begin_slice() { forget(address_); }
  __device__ __forceinline__ void operator()(int m, int k, uint32_t (&a)[4]) const {
    ldmatrix(a, Operand::at(address_, m, k));
  }

 private:
  uint32_t address_;
};

template <typename Traits, class Output, class Softmax>
__device__ __forceinline__ void attend(const DecodeParams<float>& params, const DecodeWork& work,
                                       const ScoreModifiers& modifiers,
                                       const float (&slopes)[Traits::kRowsPerThread], int warp,
                                       typename Traits::Copies& copies,
                                       typename Traits::SharedStorage& shared, Output& tOrO,
                                       Softmax& softmax) {
  using Element = typename Traits::Element;
  using SharedKeys = typename Traits::SharedKeys;
  using OperandK = OperandB<SharedKeys, 1>;
  using OperandV = TransposedOperandB<SharedKeys, 1>;
  constexpr int kKeys = Traits::kKeys;
  constexpr int kStages = Traits::kStages;
  constexpr int kHeadDim = Traits::kHeadDim;

  const int begin = work.blocks.begin * Traits::kBlockN + warp * kKeys;
  const int end = work.blocks.end * Traits::kBlockN;
  SliceLoader<Traits> loader(params, copies, shared, warp);
  loader.look_up(begin);
  std::conditional_t<Traits::kSharesQueries, SharedQueryOperand<Traits>, QueryOperand<Traits>>
      queries;

  typename Traits::WarpMma mma;
  Tensor output = make_tensor(tOrO.data(), rows_and_columns(tOrO.layout()));
  const int lane = thread_index() % 32;
  constexpr int kAhead = (kStages - 1) * Traits::kBlockN;
  int stage = 1;
  CUTE_NO_UNROLL
  for (int first_key = begin - kAhead; first_key < end; first_key += Traits::kBlockN) {
    cp_async_wait<kStages - 2>();
    __syncwarp();
    loader.issue(first_key + kAhead, stage == 0 ? kStages - 1 : stage - 1);
    if (first_key < begin) {
      if (first_key + kAhead == begin) queries.issue(params, work, shared, warp);
      cp_async_fence();
      if (first_key + Traits::kBlockN == begin) {
        cp_async_wait<kStages - 2>();
        __syncwarp();
        queries.arrive(work, shared, warp);
        copies.fence();
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
      continue;
    }
    cp_async_fence();
    const typename Traits::Slice& slice = shared.of_warp[warp].ring[stage];
    const uint32_t k_address = cast_smem_ptr_to_uint(slice.k) + OperandK::begin(lane, 0);
    const uint32_t v_address = cast_smem_ptr_to_uint(slice.v) + OperandV::begin(lane, 0);
    const unsigned keys = shared.keys_of_slice[warp][stage];
    copies.wait(stage);
    stage = stage + 1 == kStages ? 0 : stage + 1;

    Tensor tSrS = partition_fragment_C(mma, typename Traits::ScoreTile{});
    clear(tSrS);
    queries.begin_slice();
    multiply_stepwise<kHeadDim / 16, kKeys / 16, Traits::kM>(
        mma, tSrS, queries,
        [&](int n, int k, uint32_t (&b)[4]) { ldmatrix(b, OperandK::at(k_address, n, k)); });

    Tensor scores = make_tensor(tSrS.data(), rows_and_columns(tSrS.layout()));
    Tensor tScS =
        mma.get_slice(lane).partition_C(make_identity_tensor(typename Traits::ScoreTile{}));
    Tensor coordinates = make_tensor(tScS.data(), rows_and_columns(tScS.layout()));
    const auto row_of = [&](int r) {
      return work.tile.first_row + work.packing.position_of(get<0>(coordinates(r, 0)));
    };
    const auto key_of = [&](int c) { return first_key + get<1>(coordinates(0, c)); };
    if (modifiers.has_softcap) modifiers.apply_softcap(scores);
    if (modifiers.has_alibi) {
      modifiers.apply_alibi(scores, [&](int r) { return slopes[r]; }, work.mask, row_of, key_of);
    }
    if (!(work.common.begin <= first_key && first_key + kKeys <= work.common.end)) {
      apply_mask(scores, work.mask, row_of, key_of);
    }
    if (keys != (kKeys == 32 ? 0xffffffffu : (1u << kKeys) - 1)) {
      copies.fence();
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c) {
        if (keys >> get<1>(coordinates(0, c)) & 1) continue;
        CUTE_UNROLL
        for (int r = 0; r < size<0>(scores); ++r) scores(r, c) = masked_score<float>();
      }
    }
    softmax.raise_each_maximum(softmax.maxima(scores),
                               [&](int r, float factor) { multiply_row(output, r, factor); });
    softmax.exponentiate(scores);

    Tensor tSrP = convert<Element>(tSrS);
    Tensor tOrP = make_tensor(tSrP.data(), accumulator_as_operand(tSrP.layout()));
    Tensor operand = recast<uint32_t>(tOrP);  // (4, M, K)
    multiply_stepwise<kKeys / 16, kHeadDim / 16, Traits::kM>(
        mma, tOrO,
        [&](int m, int k, uint32_t (&a)[4]) {
          CUTE_UNROLL
          for (int i = 0; i < 4; ++i) a[i] = operand(i, m, k);
        },
        [&](int n, int k, uint32_t (&b)[4]) {
          ldmatrix_transposed(b, OperandV::at(v_address, n, k));
        });
  }
  // What follows writes where the slices were.
  cp_async_wait<0>();
  __syncwarp();
}

// ---------------------------------------------------------------------------------------- epilogue

// The softmax of a row over all warps.
template <typename Traits>
struct MergedRow {
  float factor[Traits::kWarps];  // what a warp's O is worth
  Finalized<float> finalized;

  __device__ __forceinline__ MergedRow(const typename Traits::SharedStorage& shared, int row,
                                       bool in_use, float scale)
      : finalized{Lse::empty(), 0.f, false} {
    float maximum = masked_score<float>();
    CUTE_UNROLL
    for (int w = 0; w < Traits::kWarps; ++w) {
      maximum = running_max(maximum, shared.row_max[w][row]);
    }
    float sum = 0.f;
    CUTE_UNROLL
    for (int w = 0; w < Traits::kWarps; ++w) {
      factor[w] = exp2_approx((shared.row_max[w][row] - softmax_shift(maximum)) * (scale * kLog2e));
      sum += shared.row_sum[w][row] * factor[w];
    }
    finalized = finalize(maximum, in_use ? sum : 0.f, scale);
  }
};

template <typename Traits, class Accumulator, class Softmax>
__device__ __forceinline__ void write(const DecodeParams<float>& params, const DecodeSlots& slots,
                                      const TileSplits& splits, const DecodeWork& work, float scale,
                                      int warp, const Softmax& softmax, const Accumulator& tOrO,
                                      typename Traits::SharedStorage& shared) {
  using Element = typename Traits::Element;
  constexpr int kStride = Traits::kOutputStride;
  typename Traits::WarpMma mma;
  const int lane = thread_index() % 32;
  Tensor output = make_tensor(tOrO.data(), rows_and_columns(tOrO.layout()));
  Tensor tOcO =
      mma.get_slice(lane).partition_C(make_identity_tensor(typename Traits::OutputTile{}));
  Tensor coordinates = make_tensor(tOcO.data(), rows_and_columns(tOcO.layout()));
  const Sequence& sequence = work.tile.sequence;
  const int used_rows = work.used_rows();

  float* to = shared.of_warp[warp].output;
  CUTE_UNROLL
  for (int r = 0; r < size<0>(output); ++r) {
    const float sum = softmax.row_sum(r);
    const int row = get<0>(coordinates(r, 0));
    if (row >= used_rows) continue;
    if (lane % 4 == 0) {
      shared.row_max[warp][row] = softmax.row_max(r);
      shared.row_sum[warp][row] = sum;
    }
    CUTE_UNROLL
    for (int c = 0; c < size<1>(output); c += 2) {
      *reinterpret_cast<float2*>(to + row * kStride + get<1>(coordinates(r, c))) =
          make_float2(output(r, c), output(r, c + 1));
    }
  }
  __syncthreads();

  // Lane i knows how row warp + i * kWarps ends.
  static_assert(Traits::kRows / Traits::kWarps <= 32);
  const bool is_shared = splits.count > 1;
  const int slot = splits.slot(work.split);
  const int my_row = warp + lane * Traits::kWarps;
  const DecodeWork::Row my = work.row(my_row);
  const bool in_use = my.exists && my.position < sequence.length;
  MergedRow<Traits> merged(shared, min(my_row, used_rows - 1), in_use, scale);
  Finalized<float>& my_end = merged.finalized;
  // Of the splits of a tile, the first holds the sink.
  if (params.problem.sink != nullptr && work.split == 0 && in_use) {
    my_end = merge_sink(my_end, params.problem.sink[my.head]);
  }
  if (my_row < used_rows && my.exists) {
    Lse& lse =
        is_shared
            ? slots.lse_of(slot)[my_row]
            : params.lse[work.tile.index * params.lse_strides.batch +
                         my.head * params.lse_strides.head + sequence.first_row + my.position];
    lse = my_end.lse;
  }

  CUTE_UNROLL
  for (int w = 0; w < Traits::kWarps; ++w) merged.factor[w] *= my_end.scale;
  const unsigned seeing_rows = __ballot_sync(0xffffffffu, my_end.sees_keys);
  // Calls use(p, column, four columns of row p) for those of this lane.
  const auto for_each_row = [&](const auto& use) {
#pragma unroll 1
    for (int p = warp, i = 0; p < used_rows; p += Traits::kWarps, ++i) {
      float factor[Traits::kWarps];
      CUTE_UNROLL
      for (int w = 0; w < Traits::kWarps; ++w) {
        factor[w] = __shfl_sync(0xffffffffu, merged.factor[w], i);
      }
      const bool sees_keys = (seeing_rows >> i & 1) != 0;
      CUTE_UNROLL
      for (int first = 0; first < Traits::kHeadDim; first += 4 * 32) {
        const int column = first + 4 * lane;
        if (column >= params.problem.head_dim_v) break;
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
        CUTE_UNROLL
        for (int w = 0; w < Traits::kWarps; ++w) {
          const auto part =
              *reinterpret_cast<const float4*>(shared.of_warp[w].output + p * kStride + column);
          sum.x += part.x * factor[w];
          sum.y += part.y * factor[w];
          sum.z += part.z * factor[w];
          sum.w += part.w * factor[w];
        }
        use(p, column, sees_keys ? sum : make_float4(0.f, 0.f, 0.f, 0.f));
      }
    }
  };
  if (is_shared) {
    float* out = slots.out_of(slot);
    for_each_row([&](int p, int column, const float4& sum) {
      *reinterpret_cast<float4*>(out + p * params.problem.head_dim_v + column) = sum;
    });
  } else {
    for_each_row([&](int p, int column, const float4& sum) {
      const DecodeWork::Row row = work.row(p);
      if (!row.exists) return;
      *reinterpret_cast<uint2*>(static_cast<Element*>(params.out) +
                                work.offset(row, params.out_strides) + column) =
          make_uint2(pack<Element>(sum.x, sum.y), pack<Element>(sum.z, sum.w));
    });
  }
}

// ------------------------------------------------------------------------------------------ kernel

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::Tile::kBlocksPerSm)
    decode_kernel(const __grid_constant__ DecodeParams<float> params,
                  const __grid_constant__ DecodeGrid grid,
                  const __grid_constant__ DecodeSlots slots,
                  const __grid_constant__ typename Traits::Copies::Maps maps) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(shared_memory);
  const int warp = thread_index() / 32;
  typename Traits::Copies copies(maps, shared.barriers[warp]);
  wait_for_earlier_kernels();
  DecodePlan plan(params, grid);
  if (warp == 0) {
    plan.divide();
    plan.begin(static_cast<int>(blockIdx.x));
  }

  while (true) {
    if (warp == 0) {
      DecodeSegment segment;
      const bool has_work = plan.next(segment);
      if (thread_index() == 0) {
        shared.has_work = has_work;
        if (has_work) {
          shared.work = DecodeWork::of(params, grid, segment);
          shared.splits = segment.splits;
        }
      }
    }
    __syncthreads();
    if (!shared.has_work) return;
    // Not before the plan: the merge makes one too, and its code would compete for the same cache.
    allow_dependent_launch();
    const DecodeWork& work = shared.work;
    // The compiler would make what goes by the problem alone before the plan, and delay that.
    Problem<float> problem = params.problem;
    asm volatile("" : "+f"(problem.softmax_scale), "+f"(problem.softcap));
    const auto modifiers = ScoreModifiers::of(problem, work.tile.index, work.head);
    typename Traits::WarpMma mma;
    float slopes[Traits::kRowsPerThread] = {};
    if (modifiers.has_alibi) {
      CUTE_UNROLL
      for (int r = 0; r < Traits::kRowsPerThread; ++r) {
        const DecodeWork::Row row = work.row(thread_index() % 32 / 4 + 8 * r);
        slopes[r] =
            row.exists
                ? params.problem
                      .alibi_slopes[work.tile.index * params.problem.alibi_batch_stride + row.head]
                : 0.f;
      }
    }
    Tensor tOrO = partition_fragment_C(mma, typename Traits::OutputTile{});
    clear(tOrO);
    OnlineSoftmax<Traits::kRowsPerThread> softmax(modifiers.scale);
    attend<Traits>(params, work, modifiers, slopes, warp, copies, shared, tOrO, softmax);
    write<Traits>(params, slots, shared.splits, work, modifiers.scale, warp, softmax, tOrO, shared);
    copies.fence();
    __syncthreads();
  }
}

template <typename Traits>
void launch_decode(const DecodeParams<float>& params) {
  const DecodeGrid grid = decode_grid<typename Traits::Tile>(params, Traits::kRows);
  if (grid.num_tiles() == 0) return;
  if (grid.num_workers() > std::numeric_limits<int>::max()) {
    throw std::runtime_error("neginf: decode: too many tiles x splits: " +
                             std::to_string(grid.num_workers()));
  }
  const DecodeSlots slots = DecodeSlots::allocate(params, grid, Traits::kRows);
  constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  allow_shared_memory<decode_kernel<Traits>>(kSharedBytes);
  launch_dependent(
      decode_kernel<Traits>, static_cast<unsigned>(grid.num_workers()), Traits::kThreads,
      kSharedBytes, params.stream, params, grid, slots,
      Traits::Copies::Maps::template of<typename Traits::Tile>(params, Traits::kDType));
  if (grid.may_split()) combine_decode(params, grid, slots, Traits::kDType);
}

// Pointers are aligned to 16 bytes, head_dim, head_dim_v and the strides of row, head and batch are
// multiples of 8 elements; head_dim_v <= head_dim <= Tile::kHeadDim.
template <typename Element, typename Tile, template <int> class Copies>
void run_decode(const DecodeParams<float>& params) {
  const Problem<float>& problem = params.problem;
  const int64_t rows = int64_t{problem.seqlen_q} * (problem.num_heads / problem.num_heads_k);
  if constexpr (Tile::kMostRows > 16) {
    if (rows > 16)
      return launch_decode<DecodeTraits<Element, Tile, Tile::kMostRows, Copies>>(params);
  }
  launch_decode<DecodeTraits<Element, Tile, 16, Copies>>(params);
}

template <typename Element, typename Tile, template <int> class Copies = NoSliceCopies>
using RegisterDecode = RegisterKernel<DecodeParams<float>, run_decode<Element, Tile, Copies>>;

}  // namespace neginf::sm80
