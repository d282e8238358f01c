// What a CTA of decode works on, what it has in shared memory, and how a warp loads its keys. What
// it does with them is in decode.cuh.
#pragma once

#include <cute/tensor.hpp>

#include "../common/decode_plan.h"
#include "../common/thread_index.h"
#include "../kernels.h"
#include "decode_tile_sizes.h"
#include "shared_tile.cuh"
#include "tiles.cuh"

namespace neginf::sm80 {

using namespace cute;

// ------------------------------------------------------------------------------------------- work

// In shared memory, as the accumulators need the registers.
struct DecodeWork : ForwardWork {
  CachedSequence cached;
  Range blocks;
  Range visible;  // keys that some row sees
  Range common;   // keys that every row sees

  static __device__ __forceinline__ DecodeWork of(const DecodeParams<float>& params,
                                                  const DecodeGrid& grid,
                                                  const DecodeSegment& segment) {
    const RowTile tile{segment.sequence, segment.queries, segment.first_row};
    const auto [head, heads, head_k] = HeadTile::of(grid.tiles, segment.head_tile);
    const Mask mask = mask_of(params.problem, segment.queries, segment.cached.keys);
    const Range rows = tile.rows(grid.tiles.packing.positions);
    return {{tile,
             grid.tiles.packing,
             head,
             heads,
             head_k,
             segment.split,
             segment.cached.keys,
             mask,
             {}},
            segment.cached,
            segment.blocks,
            mask.keys_of_rows(rows),
            mask.keys_common_to_rows(rows)};
  }

  // Rows from here on are nobody's.
  __device__ __forceinline__ int used_rows() const {
    return min(packing.positions, tile.sequence.rows - tile.first_row) * packing.heads;
  }
};

// ------------------------------------------------------------------------------------------ traits

template <typename Element_, typename Tile_, int kRows_, template <int> class Copies_>
struct DecodeTraits {
  using Element = Element_;
  using Tile = Tile_;
  static constexpr DType kDType =
      std::is_same_v<Element, half_t> ? DType::float16 : DType::bfloat16;
  static constexpr int kHeadDim = Tile::kHeadDim;
  static constexpr int kRows = kRows_;
  // In registers there is room for Q beside O only if both are small.
  static constexpr bool kSharesQueries = kRows * kHeadDim > 16 * 128;
  static constexpr int kKeys = Tile::kKeys;
  static constexpr int kStages = kSharesQueries ? Tile::kStagesBesideQueries : Tile::kStages;
  using Copies = Copies_<kStages>;
  static constexpr int kWarps = Tile::kWarps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlockN = Tile::kBlockN;
  static constexpr int kM = kRows / 16;
  static constexpr int kRowsPerThread = 2 * kM;

  using MmaAtom = std::conditional_t<std::is_same_v<Element, half_t>, SM80_16x8x16_F32F16F16F32_TN,
                                     SM80_16x8x16_F32BF16BF16F32_TN>;
  using WarpMma =
      decltype(make_tiled_mma(MmaAtom{}, Layout<Shape<_1, _1, _1>>{}, cute::Tile<_16, _16, _16>{}));
  using ScoreTile = Shape<Int<kRows>, Int<kKeys>>;
  using OutputTile = Shape<Int<kRows>, Int<kHeadDim>>;
  using SharedKeys = SharedTile<kKeys, kHeadDim>;
  using SharedQueries = SharedTile<kRows, kHeadDim>;

  struct Slice {
    alignas(1024) Element k[kKeys * kHeadDim];
    alignas(1024) Element v[kKeys * kHeadDim];
  };
  // 8 columns more, so that the rows of a quad column meet different banks.
  static constexpr int kOutputStride = kHeadDim + 8;
  struct SharedStorage {
    union Room {
      Slice ring[kStages];
      float output[kRows * kOutputStride];  // once the keys of a segment are done
    } of_warp[kWarps];
    alignas(128) Element q[kSharesQueries ? kRows * kHeadDim : 8];
    unsigned keys_of_slice[kWarps][kStages];  // a bit for each key that exists
    float row_max[kWarps][kRows];
    float row_sum[kWarps][kRows];
    bool has_work;
    DecodeWork work;
    TileSplits splits;
    typename Copies::Barriers barriers[kWarps];
  };
  static_assert(sizeof(SharedStorage) * Tile::kBlocksPerSm <= Tile::kSharedBytes);
};

// ------------------------------------------------------------------------------------------ loader

// What could load a slice of which every row exists in one go: nothing.
template <int kStages>
struct NoSliceCopies {
  struct Maps {
    template <typename Tile>
    static Maps of(const DecodeParams<float>&, DType) {
      return {};
    }
  };
  struct Barriers {};

  __device__ __forceinline__ NoSliceCopies(const Maps&, Barriers&) {}
  static __device__ __forceinline__ bool are_usable() { return false; }
  template <class Slice>
  __device__ __forceinline__ void issue(const Slice&, int, int, int, int) {}
  __device__ __forceinline__ void skip(int) {}
  __device__ __forceinline__ void wait(int) {}
  static __device__ __forceinline__ void fence() {}
};

// A warp's loads of its slices of a segment, in order.
template <typename Traits>
class SliceLoader {
  using Element = typename Traits::Element;
  using SharedKeys = typename Traits::SharedKeys;
  static constexpr int kKeys = Traits::kKeys;
  static constexpr int kRowsPerPass = 32 / SharedKeys::kChunks;

 public:
  __device__ __forceinline__ SliceLoader(const DecodeParams<float>& params,
                                         typename Traits::Copies& copies,
                                         typename Traits::SharedStorage& shared, int warp)
      : params_(params), copies_(copies), shared_(shared), work_(shared.work), warp_(warp) {}

  // The entry of a slice, long before it is issued.
  __device__ __forceinline__ void look_up(int first_key) {
    if (first_key < work_.visible.end && is_in_one_entry()) {
      entry_ = work_.cached.entry_of(params_.cache, slot_of(first_key));
    }
  }

  // The slice that was looked up, if the segment has it, and looks up the next one.
  __device__ __forceinline__ void issue(int first_key, int stage) {
    if (first_key < work_.blocks.end * Traits::kBlockN) {
      const Slice& slice = shared_.of_warp[warp_].ring[stage];
      unsigned& keys_of_slice = shared_.keys_of_slice[warp_][stage];
      if (is_in_one_entry()) {
        issue_from_entry(first_key, stage, slice, keys_of_slice);
      } else {
        copies_.skip(stage);
        issue_row_by_row(first_key, slice, keys_of_slice);
      }
      look_up(first_key + Traits::kBlockN);
    }
  }

 private:
  using Slice = typename Traits::Slice;

  __device__ __forceinline__ int slot_of(int key) const {
    return static_cast<int>(work_.keys.first_row) + key;
  }

  // Whether no slice crosses the end of a page.
  __device__ __forceinline__ bool is_in_one_entry() const {
    const KeyCache& cache = params_.cache;
    return cache.page_table == nullptr ||
           (cache.entry_rows % kKeys == 0 && work_.keys.first_row % kKeys == 0);
  }

  // What a lane loads in each pass over the rows of a slice.
  struct Mine {
    int row;
    int chunk;

    __device__ __forceinline__ Mine() {
      const int lane = thread_index_again() % 32;
      row = lane / SharedKeys::kChunks;
      chunk = lane % SharedKeys::kChunks;
    }
  };

  __device__ __forceinline__ void issue_from_entry(int first_key, int stage, const Slice& slice,
                                                   unsigned& keys_of_slice) {
    const CacheRow first = CachedSequence::row_of(params_.cache, entry_, slot_of(first_key));
    const Range& visible = work_.visible;
    const Range wanted =
        first.exists ? intersect({0, kKeys}, {visible.begin - first_key, visible.end - first_key})
                     : Range{0, 0};
    if (thread_index() % 32 == 0) keys_of_slice = bits(wanted.end) & ~bits(wanted.begin);
    if (copies_.are_usable() && wanted.size() == kKeys) {
      copies_.issue(slice, stage, first.entry, first.row, work_.head_k);
      return;
    }
    copies_.skip(stage);
    const Mine mine;
    const auto load = [&](const Element* to, const void* from, const Strides& strides,
                          int head_dim) {
      const char* at = source(from, strides, first.entry, first.row + mine.row, mine);
      const int64_t pass = kRowsPerPass * 2 * strides.row;
      CUTE_UNROLL
      for (int r = 0; r < kKeys; r += kRowsPerPass, at += pass) {
        load_row(to, at, r, mine, wanted.contains(r + mine.row), head_dim);
      }
    };
    load(slice.k, params_.k, params_.k_strides, params_.problem.head_dim);
    load(slice.v, params_.v, params_.v_strides, params_.problem.head_dim_v);
  }

  __device__ __forceinline__ void issue_row_by_row(int first_key, const Slice& slice,
                                                   unsigned& keys_of_slice) {
    const Mine mine;
    unsigned keys = 0;
    CUTE_NO_UNROLL
    for (int r = 0; r < kKeys; r += kRowsPerPass) {
      const int key = first_key + r + mine.row;
      const bool visible = work_.visible.contains(key);
      const CacheRow at = visible ? work_.cached.row(params_.cache, key) : CacheRow{false, 0, 0};
      keys |= static_cast<unsigned>(at.exists) << (r + mine.row);
      load_row(slice.k, source(params_.k, params_.k_strides, at.entry, at.row, mine), r, mine,
               at.exists, params_.problem.head_dim);
      load_row(slice.v, source(params_.v, params_.v_strides, at.entry, at.row, mine), r, mine,
               at.exists, params_.problem.head_dim_v);
    }
    keys = __reduce_or_sync(0xffffffffu, keys);
    if (thread_index() % 32 == 0) keys_of_slice = keys;
  }

  __device__ __forceinline__ const char* source(const void* from, const Strides& strides, int entry,
                                                int row, const Mine& mine) const {
    return static_cast<const char*>(from) +
           2 * (entry * strides.batch + row * strides.row + work_.head_k * strides.head) +
           mine.chunk * 16;
  }

  // A lane's chunks of row r + mine.row of the slice.
  __device__ __forceinline__ void load_row(const Element* to, const char* from, int r,
                                           const Mine& mine, bool wanted, int head_dim) const {
    const uint32_t address =
        cast_smem_ptr_to_uint(to) + SharedKeys::offset(r + mine.row, mine.chunk);
    CUTE_UNROLL
    for (int b = 0; b < SharedKeys::kBlocks; ++b) {
      cp_async_16(address + b * SharedKeys::kBlockBytes, from + b * SharedKeys::kRowBytes,
                  wanted && mine.chunk * 8 + b * SharedKeys::kWidth < head_dim);
    }
  }

  // The lowest `count` ones.
  static __device__ __forceinline__ unsigned bits(int count) {
    return count == 32 ? 0xffffffffu : (1u << count) - 1;
  }

  const DecodeParams<float>& params_;
  typename Traits::Copies& copies_;
  typename Traits::SharedStorage& shared_;
  const DecodeWork& work_;
  int warp_;
  int entry_ = -1;
};

}  // namespace neginf::sm80
