// Attention forward with mma.sync and cp.async: for sm80, and as PTX for newer GPUs.
//
// A CTA owns kBlockM query rows, of one head or of several (query_packing.h), and of their keys the
// share of one split. All warps load, all multiply; each has its own rows, so the softmax needs no
// exchange between warps.
//
//   global       Q          K             V                               out, lse
//                | cp.async | cp.async    | cp.async                         ^
//   shared       sQ         sK            sV                      sO (= sQ) -'
//                | ldmatrix | ldmatrix    | ldmatrix.trans            ^
//   registers    '--> S = Q K^T -> mask -> softmax -> P --> O += P V -'
//
// There is one buffer for K and one for V. In iteration t each is loaded while the other is read:
//
//   wait, barrier | load V(t), S | mask, maximum | wait, barrier | load K(t+1), exp, O
//        |                                             |
//   K(t) is there, and all warps                  V(t) is there, and all warps
//   are past O(t-1): sV is free                   are past S(t): sK is free
//
// While one CTA waits, another one of the same multiprocessor multiplies. What this costs is
// registers: accumulators take up to 192 of 255, which is why addresses are made by hand, why
// everything that is needed once per tile is made anew each time, and why softcap and ALiBi are a
// second kernel.
//
// A tile without keys runs the loop zero times and leaves through the same epilogue.
#pragma once

#include <cute/tensor.hpp>
#include <limits>

#include "../common/cuda_check.h"
#include "../common/forward_epilogue.cuh"
#include "../common/forward_work.h"
#include "../common/shared_memory.h"
#include "../common/softmax.h"
#include "../kernels.h"
#include "forward_tile_sizes.h"
#include "shared_tile.cuh"
#include "tiles.cuh"

namespace neginf::sm80 {

using namespace cute;

// -------------------------------------------------------------------------------------------- work

// It lives in shared memory: the accumulators need the registers, and most of this is read once per
// tile.
struct Work : ForwardWork {
  // Others may hold NaN, which P = 0 would not undo in P V.
  Range visible_keys;
  const char* first_key;  // K and V of key 0, for this head
  const char* first_value;

  // In the one-dimensional grid row tiles run fastest, so that neighbours share K and V in L2, and
  // backwards: under a causal mask the last tile is the longest. Then come head tile and split.
  template <int kBlockM, int kBlockN>
  static __device__ Work of(const ForwardParams<float>& params, const ForwardGrid& grid) {
    const int block = static_cast<int>(blockIdx.x);
    const int head_and_split = block / grid.row_tiles;
    const int row_tile = grid.row_tiles - 1 - (block - head_and_split * grid.row_tiles);
    // Divisions that the usual case needs not are worth a branch: a CTA waits for this.
    const int split = params.num_splits == 1 ? 0 : head_and_split / grid.head_tiles;
    const auto work = ForwardWork::of<kBlockM, kBlockN>(params.problem, grid, row_tile,
                                                        head_and_split - split * grid.head_tiles,
                                                        split, params.num_splits);
    const auto first_row = [&](const void* tensor, const Strides& strides) {
      return static_cast<const char*>(tensor) +
             2 * (work.tile.index * strides.batch + work.keys.first_row * strides.row +
                  work.head_k * strides.head);
    };
    return {work, work.mask.visible_keys(), first_row(params.k, params.k_strides),
            first_row(params.v, params.v_strides)};
  }
};

// ------------------------------------------------------------------------------------------ traits

template <typename Element_, int kHeadDim_, bool kModifiesScores_,
          typename Tile = ForwardTile<kHeadDim_, kModifiesScores_>>
struct ForwardTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kModifiesScores = kModifiesScores_;
  static constexpr int kBlockM = Tile::kBlockM;
  static constexpr int kBlockN = Tile::kBlockN;
  static constexpr int kWarps = Tile::kWarps;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kBlocksPerSm = Tile::kBlocksPerSm;
  static_assert(kHeadDim % 32 == 0, "smaller head_dims are padded");
  using ScoreTile = Shape<Int<kBlockM>, Int<kBlockN>>;
  using OutputTile = Shape<Int<kBlockM>, Int<kHeadDim>>;

  using MmaAtom = std::conditional_t<std::is_same_v<Element, half_t>, SM80_16x8x16_F32F16F16F32_TN,
                                     SM80_16x8x16_F32BF16BF16F32_TN>;
  using TiledMma = decltype(make_tiled_mma(MmaAtom{}, Layout<Shape<Int<kWarps>, _1, _1>>{},
                                           cute::Tile<Int<16 * kWarps>, _16, _16>{}));
  static constexpr int kRowsPerThread = 2 * kBlockM / (16 * kWarps);

  using SharedQ = SharedTile<kBlockM, kHeadDim>;
  using SharedKV = SharedTile<kBlockN, kHeadDim>;
  using SmemStore = Copy_Atom<UniversalCopy<uint32_t>, Element>;

  struct SharedStorage {
    alignas(128) Element q[kBlockM * kHeadDim];  // the epilogue puts O here
    alignas(128) Element k[kBlockN * kHeadDim];
    alignas(128) Element v[kBlockN * kHeadDim];
    float alibi_slopes[kModifiesScores ? kBlockM : 1];  // of each row
    Work work;
  };
  static_assert(sizeof(SharedStorage) <= 99 * 1024, "what sm86, sm89 and sm120 have");
};

// ------------------------------------------------------------------------------- global to shared

// How the 16-byte chunks of a tile in shared memory are shared out: a thread has one column of each
// column block and every kRowsPerPass-th row.
template <typename Traits, class Shared>
struct ThreadChunks {
  static constexpr int kRowsPerPass = Traits::kThreads / Shared::kChunks;
  static_assert(Shared::kTileRows % kRowsPerPass == 0);
  int row;  // the first one
  int chunk;

  __device__ __forceinline__ ThreadChunks() {
    const int thread = thread_index_again();
    row = thread / Shared::kChunks;
    chunk = thread % Shared::kChunks;
  }

  __device__ __forceinline__ uint32_t address(const typename Traits::Element* tile) const {
    return cast_smem_ptr_to_uint(tile) + Shared::offset(row, chunk);
  }
  // Elements of column block b at or after head_dim do not exist.
  __device__ __forceinline__ bool within(int head_dim, int b) const {
    return chunk * 8 + b * Shared::kWidth < head_dim;
  }
};

// Calls body(r, row, offset) for rows mine.row + r of the tile, offset being that of the row in a
// tensor with these strides.
template <typename Traits, class Mine, class Body>
__device__ __forceinline__ void for_each_row(const Work& work, const Mine& mine,
                                             const Strides& strides, const Body& body) {
  Work::Row row = work.row(mine.row);
  int64_t offset = work.offset(row, strides);
  const bool packed = work.packing.heads != 1;
  CUTE_UNROLL
  for (int r = 0; r < Traits::kBlockM; r += mine.kRowsPerPass) {
    if (packed) {
      row = work.row(mine.row + r);
      offset = work.offset(row, strides);
    }
    body(r, row, offset);
    row.position += mine.kRowsPerPass;
    offset += mine.kRowsPerPass * strides.row;
  }
}

template <typename Traits>
__device__ __forceinline__ void load_queries(const ForwardParams<float>& params, const Work& work,
                                             const typename Traits::Element* buffer) {
  using Shared = typename Traits::SharedQ;
  const ThreadChunks<Traits, Shared> mine;
  const uint32_t to = mine.address(buffer);
  for_each_row<Traits>(
      work, mine, params.q_strides, [&](int r, const Work::Row& row, int64_t offset) {
        const char* from = static_cast<const char*>(params.q) + 2 * offset + mine.chunk * 16;
        const bool wanted = row.exists && row.position < work.tile.sequence.length;
        CUTE_UNROLL
        for (int b = 0; b < Shared::kBlocks; ++b) {
          cp_async_16(to + r * Shared::kRowBytes + b * Shared::kBlockBytes,
                      from + b * Shared::kRowBytes,
                      wanted && mine.within(params.problem.head_dim, b));
        }
      });
}

// The load of one tile of K or V. It is made before the barrier behind which the buffer is free:
// the latency of what it reads passes while the warp waits.
template <typename Traits>
class KeyLoad {
 public:
  // `first_row` is the row of key 0.
  __device__ __forceinline__ KeyLoad(const char* first_row, int64_t row_stride,
                                     const typename Traits::Element* buffer, const Work& work,
                                     int first_key) {
    to_ = mine_.address(buffer);
    from_ = first_row + (first_key + mine_.row) * (2 * row_stride) + mine_.chunk * 16;
    visible_ = {work.visible_keys.begin - first_key, work.visible_keys.end - first_key};
  }

  // Only tiles at the end of what the sequence sees need predicates.
  __device__ __forceinline__ void issue(int64_t row_stride, int head_dim) {
    constexpr int kRowsPerPass = ThreadChunks<Traits, Shared>::kRowsPerPass;
    const bool is_whole =
        visible_.begin <= 0 && Traits::kBlockN <= visible_.end && head_dim == Traits::kHeadDim;
    load_chunks<Shared, kRowsPerPass>(
        to_, from_, kRowsPerPass * 2 * row_stride, is_whole, [&](int r, int b) {
          return visible_.contains(mine_.row + r) && mine_.within(head_dim, b);
        });
  }

 private:
  using Shared = typename Traits::SharedKV;
  ThreadChunks<Traits, Shared> mine_;
  const char* from_;
  uint32_t to_;
  Range visible_;  // which rows of the tile the sequence sees
};

// ---------------------------------------------------------------------------------------- mainloop

template <typename Traits, class Output, class Softmax>
__device__ __forceinline__ void mainloop(const ForwardParams<float>& params, const Work& work,
                                         const ScoreModifiers& modifiers,
                                         typename Traits::SharedStorage& shared, Output& tOrO,
                                         Softmax& softmax) {
  using Element = typename Traits::Element;
  using SharedQ = typename Traits::SharedQ;
  using SharedKV = typename Traits::SharedKV;
  constexpr int kBlockN = Traits::kBlockN;
  constexpr int kHeadDim = Traits::kHeadDim;
  constexpr int kM = Traits::kBlockM / (16 * Traits::kWarps);
  using ScoreTile = typename Traits::ScoreTile;

  typename Traits::TiledMma mma;
  Tensor output = make_tensor(tOrO.data(), rows_and_columns(tOrO.layout()));

  using OperandQ = OperandA<SharedQ, Traits::kWarps>;
  using OperandK = OperandB<SharedKV, 1>;
  using OperandV = TransposedOperandB<SharedKV, 1>;
  const int lane = thread_index() % 32;
  const int warp = thread_index() / 32;
  uint32_t q_address = cast_smem_ptr_to_uint(shared.q) + OperandQ::begin(lane, warp);
  uint32_t k_address = cast_smem_ptr_to_uint(shared.k) + OperandK::begin(lane, 0);
  uint32_t v_address = cast_smem_ptr_to_uint(shared.v) + OperandV::begin(lane, 0);

  const auto k_load = [&](int tile) __attribute__((always_inline)) {
    return KeyLoad<Traits>(work.first_key, params.k_strides.row, shared.k, work, tile * kBlockN);
  };
  const auto v_load = [&](int tile) __attribute__((always_inline)) {
    return KeyLoad<Traits>(work.first_value, params.v_strides.row, shared.v, work, tile * kBlockN);
  };
  // All warps are at the same place, and what this thread has loaded has arrived. `make` makes the
  // load that follows: before the barrier, so that its latencies pass while the warp waits, where
  // registers are to spare.
  const auto barrier_then = [&](const auto& make) __attribute__((always_inline)) {
    if constexpr (Traits::kRowsPerThread == 2) {
      auto load = make();
      cp_async_wait<0>();
      __syncthreads();
      return load;
    } else {
      cp_async_wait<0>();
      __syncthreads();
      return make();
    }
  };
  const KeyTiles& tiles = work.key_tiles;
  int tile = tiles.first();

  // Inlined by force: in a call the accumulators would live in memory.
  const auto step = [&](auto masked) __attribute__((always_inline)) {
    // K(t) is there, and all warps are past O(t-1).
    auto load_v = barrier_then([&] { return v_load(tile); });
    load_v.issue(params.v_strides.row, params.problem.head_dim_v);
    Tensor tSrS = partition_fragment_C(mma, ScoreTile{});
    clear(tSrS);
    forget(q_address);
    forget(k_address);
    multiply_stepwise<kHeadDim / 16, kBlockN / 16, kM>(
        mma, tSrS,
        [&](int m, int k, uint32_t (&a)[4]) { ldmatrix(a, OperandQ::at(q_address, m, k)); },
        [&](int n, int k, uint32_t (&b)[4]) { ldmatrix(b, OperandK::at(k_address, n, k)); });

    Tensor scores = make_tensor(tSrS.data(), rows_and_columns(tSrS.layout()));
    if constexpr (masked || Traits::kModifiesScores) {
      Tensor tScS =
          mma.get_slice(thread_index_again()).partition_C(make_identity_tensor(ScoreTile{}));
      Tensor coordinates = make_tensor(tScS.data(), rows_and_columns(tScS.layout()));
      const auto row_of = [&](int r) {
        return work.tile.first_row + work.packing.position_of(get<0>(coordinates(r, 0)));
      };
      const auto key_of = [&](int c) { return tile * kBlockN + get<1>(coordinates(0, c)); };
      if constexpr (Traits::kModifiesScores) {
        if (modifiers.has_softcap) modifiers.apply_softcap(scores);
        if (modifiers.has_alibi) {
          const auto slope_of = [&](int r) {
            return shared.alibi_slopes[get<0>(coordinates(r, 0))];
          };
          modifiers.apply_alibi(scores, slope_of, work.mask, row_of, key_of);
        }
      }
      if constexpr (masked) apply_mask(scores, work.mask, row_of, key_of);
    }
    const auto maxima = softmax.maxima(scores);
    if (softmax.outgrown_by(maxima)) {
      softmax.raise_maximum(maxima, [&](int r, float factor) { multiply_row(output, r, factor); });
    }

    tile = tiles.after(tile);
    // V(t) is there, and all warps are past S(t).
    auto load_k = barrier_then([&] { return k_load(tile); });
    if (tile != KeyTiles::kNone) {
      load_k.issue(params.k_strides.row, params.problem.head_dim);
    }
    softmax.exponentiate(scores);
    Tensor tSrP = convert<Element>(tSrS);
    Tensor tOrP = make_tensor(tSrP.data(), accumulator_as_operand(tSrP.layout()));
    Tensor operand = recast<uint32_t>(tOrP);  // (4, M, K)
    forget(v_address);
    multiply_stepwise<kBlockN / 16, kHeadDim / 16, kM>(
        mma, tOrO,
        [&](int m, int k, uint32_t (&a)[4]) {
          CUTE_UNROLL
          for (int i = 0; i < 4; ++i) a[i] = operand(i, m, k);
        },
        [&](int n, int k, uint32_t (&b)[4]) {
          ldmatrix_transposed(b, OperandV::at(v_address, n, k));
        });
  };

  load_queries<Traits>(params, work, shared.q);
  if (tile != KeyTiles::kNone) {
    k_load(tile).issue(params.k_strides.row, params.problem.head_dim);
  }
  while (tiles.unmasked.contains(tile)) step(false_type{});
  while (tile != KeyTiles::kNone) step(true_type{});

  // The epilogue writes where Q was.
  cp_async_wait<0>();
  __syncthreads();
}

// ---------------------------------------------------------------------------------------- epilogue

// O in the dtype of q, through shared memory so that it leaves in 16-byte pieces.
template <typename Traits, class Accumulator>
__device__ __forceinline__ void store_output(const ForwardParams<float>& params, const Work& work,
                                             const Accumulator& tOrO,
                                             typename Traits::SharedStorage& shared) {
  using Element = typename Traits::Element;
  using Shared = typename Traits::SharedQ;

  Tensor sO = make_tensor(make_smem_ptr(shared.q), typename Shared::Layout{});
  auto smem_store = make_tiled_copy_C(typename Traits::SmemStore{}, typename Traits::TiledMma{});
  auto smem_thread = smem_store.get_slice(thread_index_again());
  Tensor rounded = convert<Element>(tOrO);
  copy(smem_store, smem_thread.retile_S(rounded), smem_thread.partition_D(sO));
  __syncthreads();

  const ThreadChunks<Traits, Shared> mine;
  const char* from = reinterpret_cast<const char*>(shared.q) + Shared::offset(mine.row, mine.chunk);
  for_each_row<Traits>(
      work, mine, params.out_strides, [&](int r, const Work::Row& row, int64_t offset) {
        if (!row.exists || row.position >= work.tile.sequence.rows) return;
        char* to = static_cast<char*>(params.out) + 2 * offset + mine.chunk * 16;
        CUTE_UNROLL
        for (int b = 0; b < Shared::kBlocks; ++b) {
          if (mine.within(params.problem.head_dim_v, b)) {
            *reinterpret_cast<uint4*>(to + b * Shared::kRowBytes) = *reinterpret_cast<const uint4*>(
                from + r * Shared::kRowBytes + b * Shared::kBlockBytes);
          }
        }
      });
}

// ------------------------------------------------------------------------------------------ kernel

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSm)
    forward_kernel(const __grid_constant__ ForwardParams<float> params,
                   const __grid_constant__ ForwardGrid grid) {
  extern __shared__ __align__(128) char shared_memory[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(shared_memory);
  using OutputTile = typename Traits::OutputTile;

  if (threadIdx.x == 0) shared.work = Work::of<Traits::kBlockM, Traits::kBlockN>(params, grid);
  __syncthreads();
  const Work& work = shared.work;
  const auto modifiers = ScoreModifiers::of(params.problem, work.tile.index, work.head);
  if constexpr (Traits::kModifiesScores) {
    // Visible to all after the first barrier of the mainloop.
    for (int p = thread_index(); modifiers.has_alibi && p < Traits::kBlockM;
         p += Traits::kThreads) {
      const Work::Row row = work.row(p);
      shared.alibi_slopes[p] =
          row.exists
              ? params.problem
                    .alibi_slopes[work.tile.index * params.problem.alibi_batch_stride + row.head]
              : 0.f;
    }
  }
  typename Traits::TiledMma mma;
  Tensor tOrO = partition_fragment_C(mma, OutputTile{});  // ((2, 2), M, head_dim / 8)
  clear(tOrO);
  OnlineSoftmax<Traits::kRowsPerThread> softmax(
      Traits::kModifiesScores ? modifiers.scale : params.problem.softmax_scale);
  mainloop<Traits>(params, work, modifiers, shared, tOrO, softmax);

  Tensor output = make_tensor(tOrO.data(), rows_and_columns(tOrO.layout()));
  Tensor tOcO = mma.get_slice(thread_index_again()).partition_C(make_identity_tensor(OutputTile{}));
  Tensor coordinates = make_tensor(tOcO.data(), rows_and_columns(tOcO.layout()));
  end_output(end_softmax(params, RowEndings::of(params, work), softmax, coordinates), output);
  if (params.num_splits > 1) {
    store_partial(params, work, output, coordinates);
  } else {
    store_output<Traits>(params, work, tOrO, shared);
  }
}

// Pointers are aligned to 16 bytes, head_dim, head_dim_v and the strides of row, head and batch are
// multiples of 8 elements; head_dim_v <= head_dim <= kHeadDim.
template <typename Traits>
void launch_forward(const ForwardParams<float>& params) {
  const Problem<float>& problem = params.problem;
  const ForwardGrid grid = ForwardGrid::of(problem, Traits::kBlockM);
  const int64_t blocks =
      num_row_tiles(problem, grid.packing.positions) * grid.head_tiles * params.num_splits;
  if (blocks == 0) return;
  if (blocks > std::numeric_limits<int>::max()) {
    throw std::runtime_error("neginf: sm80 forward: too many row tiles x heads x splits: " +
                             std::to_string(blocks));
  }
  constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  allow_shared_memory<forward_kernel<Traits>>(kSharedBytes);
  forward_kernel<Traits>
      <<<static_cast<unsigned>(blocks), Traits::kThreads, kSharedBytes, params.stream>>>(params,
                                                                                         grid);
  cuda_check(cudaGetLastError(), "sm80 forward");
}

template <typename Element, int kHeadDim>
void run_forward(const ForwardParams<float>& params) {
  const bool modifies_scores =
      params.problem.softcap != 0.f || params.problem.alibi_slopes != nullptr;
  modifies_scores ? launch_forward<ForwardTraits<Element, kHeadDim, true>>(params)
                  : launch_forward<ForwardTraits<Element, kHeadDim, false>>(params);
}

template <typename Element, int kHeadDim>
using RegisterForward = RegisterKernel<ForwardParams<float>, run_forward<Element, kHeadDim>>;

}  // namespace neginf::sm80
