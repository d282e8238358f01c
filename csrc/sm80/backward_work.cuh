// How the tiles that a CTA of the backward works on get into shared memory.
#pragma once

#include <cute/tensor.hpp>

#include "../common/backward_rows.h"
#include "../common/backward_scores.cuh"
#include "../common/backward_work.cuh"
#include "shared_tile.cuh"
#include "tiles.cuh"

namespace neginf::sm80 {

using namespace cute;

// Walks over the steps of a CTA and loads their tiles. It holds where this thread's first 16 bytes
// of the tiles of Q and dO are: computing that anew in every iteration takes longer than loading.
template <typename Traits>
class RowLoader {
  using Element = typename Traits::Element;
  using Shared = typename Traits::SharedQ;
  static constexpr int kRowsAtATime = Traits::kThreads / Traits::kThreadsPerRow;
  // A single stage of dO is loaded late, between products that hide the arithmetic.
  static constexpr bool kKeepsDoutPointer = Traits::kStagesDout > 1;

 public:
  __device__ RowLoader(const BackwardParams<float>& params, const BackwardRows& rows,
                       const KeyWork& work)
      : params_(params), rows_(rows), work_(work) {
    start_head(work.head_k * work.group);
  }

  __device__ const RowStep& step() const { return step_; }

  __device__ __forceinline__ void advance() {
    if (step_.tile + 1 == work_.row_tiles.end) {
      start_head(step_.head + 1);
      return;
    }
    ++step_.tile;
    q_ += Traits::kBlockM * params_.q_strides.row;
    if constexpr (kKeepsDoutPointer) dout_ += Traits::kBlockM * params_.dout_strides.row;
    find_whether_whole();
  }

  // Of the step. Read from global memory an iteration before it is needed; to compare it earlier
  // would be to wait for it.
  __device__ __forceinline__ int needs_care() const {
    return rows_.statistics_of<Traits::kBlockM>(number())->needs_care;
  }

  __device__ __forceinline__ void load_q(const Element* shared) const {
    load(q_, params_.q_strides.row, params_.problem.head_dim, shared);
  }

  __device__ __forceinline__ void load_dout(const Element* shared) const {
    const Element* from = kKeepsDoutPointer ? dout_ : pointer(params_.dout, params_.dout_strides);
    load(from, params_.dout_strides.row, params_.problem.head_dim_v, shared);
  }

  __device__ __forceinline__ void load_statistics(
      const RowStatistics<Traits::kBlockM>* shared) const {
    constexpr int kPieces = sizeof(*shared) / 16;
    static_assert(kPieces <= Traits::kThreads);
    const auto* from = rows_.statistics_of<Traits::kBlockM>(number());
    if (const int piece = thread_index(); piece < kPieces) {
      cp_async_16(cast_smem_ptr_to_uint(shared) + 16 * piece,
                  reinterpret_cast<const char*>(from) + 16 * piece, true);
    }
  }

 private:
  // Which 16 bytes of a tile are this thread's first.
  struct Piece {
    int row;
    int chunk;

    static __device__ __forceinline__ Piece of_thread() {
      const int thread = thread_index_again();
      return {thread / Traits::kThreadsPerRow, thread % Traits::kThreadsPerRow};
    }
  };

  __device__ int number() const { return step_.number(rows_, work_); }

  __device__ __forceinline__ const Element* pointer(const void* tensor,
                                                    const Strides& strides) const {
    const Piece mine = Piece::of_thread();
    const int64_t row = work_.queries.first_row + step_.tile * Traits::kBlockM + mine.row;
    return static_cast<const Element*>(tensor) + work_.keys.index * strides.batch +
           step_.head * strides.head + row * strides.row + mine.chunk * 8;
  }

  __device__ void start_head(int head) {
    step_ = {head, work_.row_tiles.begin};
    q_ = pointer(params_.q, params_.q_strides);
    if constexpr (kKeepsDoutPointer) dout_ = pointer(params_.dout, params_.dout_strides);
    find_whether_whole();
  }

  // Known before the barrier that the loads wait for.
  __device__ __forceinline__ void find_whether_whole() {
    const int first = step_.tile * Traits::kBlockM;
    is_whole_ = work_.rows_with_keys.begin <= first &&
                first + Traits::kBlockM <= work_.rows_with_keys.end &&
                params_.problem.head_dim_v == Traits::kHeadDim;
  }

  // Rows that see no key, and what lies past head_dim, become 0.
  __device__ __forceinline__ void load(const Element* from, int64_t row_stride, int head_dim,
                                       const Element* shared) const {
    const Piece mine = Piece::of_thread();
    const uint32_t to = cast_smem_ptr_to_uint(shared) + Shared::offset(mine.row, mine.chunk);
    const Range wanted = work_.rows_with_keys;
    const int first = step_.tile * Traits::kBlockM + mine.row;
    load_chunks<Shared, kRowsAtATime>(to, reinterpret_cast<const char*>(from),
                                      kRowsAtATime * 2 * row_stride, is_whole_, [&](int r, int b) {
                                        return wanted.contains(first + r) &&
                                               mine.chunk * 8 + b * Shared::kWidth < head_dim;
                                      });
  }

  const BackwardParams<float>& params_;
  const BackwardRows& rows_;
  const KeyWork& work_;
  RowStep step_;
  const Element* q_;
  const Element* dout_;
  // Every row sees a key, and head_dim_v, thus head_dim too, is kHeadDim: loads need no predicates.
  // One answer for Q and dO: a second one would be a register more.
  bool is_whole_;
};

template <typename Traits, typename Element>
__device__ __forceinline__ auto keys_of_work(Element* base, const Strides& strides,
                                             const KeyWork& work) {
  base += work.keys.index * strides.batch + work.head_k * strides.head +
          (work.keys.sequence.first_row + work.keys.first_row) * strides.row;
  return make_tensor(make_gmem_ptr(base), typename Traits::KeyTile{},
                     make_stride(strides.row, _1{}));
}

template <typename Traits>
__device__ __forceinline__ void load_keys(const void* tensor, const Strides& strides,
                                          typename Traits::Element* shared, const KeyWork& work,
                                          int head_dim) {
  using Element = typename Traits::Element;
  const int first_key = work.keys.first_row;
  load_tile<Traits>(keys_of_work<Traits>(static_cast<const Element*>(tensor), strides, work),
                    make_tensor(make_smem_ptr(shared), typename Traits::SharedK::Layout{}),
                    {work.visible_keys.begin - first_key, work.visible_keys.end - first_key},
                    head_dim);
}

// Their exponents are whole, so there is nothing left for the divisors in shared memory to do.
template <typename Traits>
__device__ __noinline__ void clear_careful_rows(CarefulRows rows, typename Traits::Element* q,
                                                typename Traits::Element* dout,
                                                RowStatistics<Traits::kBlockM>& statistics) {
  using Element = typename Traits::Element;
  Tensor sQ = make_tensor(make_smem_ptr(q), typename Traits::SharedQ::Layout{});
  Tensor sdO = make_tensor(make_smem_ptr(dout), typename Traits::SharedQ::Layout{});
  for (int i = thread_index(); i < Traits::kBlockM * Traits::kHeadDim; i += Traits::kThreads) {
    const int r = i / Traits::kHeadDim;
    if (!rows.must_clear(r)) continue;
    sQ(r, i % Traits::kHeadDim) = Element(0);
    sdO(r, i % Traits::kHeadDim) = Element(0);
  }
  for (int r = thread_index(); r < Traits::kBlockM; r += Traits::kThreads) {
    statistics.divisor[r] = Log2Divisor::none();
  }
}

}  // namespace neginf::sm80
