// The consumers of the sm90 forward: products, softmax, and how rows end.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/tensor.hpp>

#include "../common/convert.cuh"
#include "../common/forward_epilogue.cuh"
#include "../common/forward_work.h"
#include "../common/softmax.h"
#include "../common/thread_index.h"
#include "forward_traits.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

namespace neginf::sm90 {

using namespace cute;

// Among the consumers.
__device__ __forceinline__ int consumer_thread() { return thread_index_again() - 128; }

// The warpgroups issue in a fixed order, round and round. Each has a barrier on which it waits for
// the one before it.
template <int kWarpgroups>
struct Turns {
  static constexpr int kFirstBarrier = 1;  // 0 is __syncthreads
  int warpgroup;

  __device__ __forceinline__ void begin() const {
    if (warpgroup == kWarpgroups - 1) pass_on();
  }
  __device__ __forceinline__ void wait() const {
    cutlass::arch::NamedBarrier::sync(256, kFirstBarrier + warpgroup);
  }
  __device__ __forceinline__ void pass_on() const {
    const int next = warpgroup + 1 == kWarpgroups ? 0 : warpgroup + 1;
    cutlass::arch::NamedBarrier::arrive(256, kFirstBarrier + next);
  }
};

// ---------------------------------------------------------------------------------------- epilogue

// O in the dtype of q. The four lanes of a quad have two columns each of every eight; exchanged,
// each has all of some eights and writes 16 bytes, the quad 64 side by side.
template <typename Traits, class Accumulator, class Coordinates>
__device__ __forceinline__ void store_rows(const ForwardParams<float>& params,
                                           const ForwardWork& work, const Accumulator& tOrO,
                                           const Coordinates& coordinates) {
  using Element = typename Traits::Element;
  Tensor rounded = convert<Element>(tOrO);
  const int quad_lane = static_cast<int>(threadIdx.x) % 4;
  Tensor words = recast<uint32_t>(rounded);  // two columns each: (row, eight columns)
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    const ForwardWork::Row row = work.row(get<0>(coordinates(r, 0)));
    const bool exists = row.exists && row.position < work.tile.sequence.rows;
    Element* to = static_cast<Element*>(params.out) + work.offset(row, params.out_strides);
    CUTE_UNROLL
    for (int group = 0; group < Traits::kHeadDimV / 32; ++group) {
      uint32_t chunk[4];
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) chunk[i] = words(r + 2 * (4 * group + i));
      transpose_in_quad(chunk);
      const int column = 32 * group + 8 * quad_lane;
      if (exists && column < params.problem.head_dim_v) {
        *reinterpret_cast<uint4*>(to + column) = make_uint4(chunk[0], chunk[1], chunk[2], chunk[3]);
      }
    }
  }
}

// The same for the storer. `tile` is one of Q's, of whose rows this warpgroup's are read no more.
template <typename Traits, class Accumulator>
__device__ __forceinline__ void leave_rows(typename Traits::Element* tile, int consumer,
                                           const Accumulator& tOrO) {
  using Element = typename Traits::Element;
  Tensor sO = make_tensor(make_smem_ptr(tile), typename Traits::LayoutO{});
  auto smem_store =
      make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, typename Traits::OutputMma{});
  auto smem_thread = smem_store.get_slice(consumer);
  Tensor rounded = convert<Element>(tOrO);
  copy(smem_store, smem_thread.retile_S(rounded), smem_thread.partition_D(sO));
  tma_store_fence();
}

// The slopes of this thread's rows.
template <class Coordinates>
__device__ __forceinline__ void load_alibi_slopes(const Problem<float>& problem,
                                                  const ForwardWork& work,
                                                  const Coordinates& coordinates,
                                                  float (&slopes)[2]) {
  const float* of_batch = problem.alibi_slopes + work.tile.index * problem.alibi_batch_stride;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    const ForwardWork::Row row = work.row(get<0>(coordinates(r, 0)));
    slopes[r] = row.exists ? of_batch[row.head] : 0.f;
  }
}

// One consumer warpgroup. Everything is inlined: accumulators must stay in registers.
template <typename Traits>
class Consumer {
  using Element = typename Traits::Element;
  using SharedStorage = typename Traits::SharedStorage;
  template <bool kHalf>
  using ScoreMma = typename Traits::template ScoreMma<kHalf>;
  using OutputMma = typename Traits::OutputMma;
  template <bool kHalf>
  using ScoreTile = typename Traits::template ScoreTile<kHalf>;
  template <bool kHalf>
  using ScoreFragment = decltype(partition_fragment_C(ScoreMma<kHalf>{}, ScoreTile<kHalf>{}));
  using OutputTile = typename Traits::OutputTile;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kFirstLeaveBarrier = 4;  // after those of Turns
  // So many key tiles may be passed over between two S while V of the former is not released: no
  // more K are loaded then; and who holds the turn for O of the last of these waits for its V.
  static constexpr int kMostBetween = Traits::kStages - Traits::kTakesTurns;

 public:
  __device__ __forceinline__ Consumer(const ForwardParams<float>& params, const Launch& launch,
                                      SharedStorage& shared)
      : params_(params),
        launch_(launch),
        shared_(shared),
        // Uniform in the warpgroup, and known to be.
        warpgroup_(cutlass::canonical_warp_group_idx() - 1),
        turns_{warpgroup_},
        softmax_(params.problem.softmax_scale) {}

  __device__ __forceinline__ void run() {
    if constexpr (Traits::kTakesTurns) turns_.begin();
    int tile = KeyTiles::kNone;  // of row tile `turn_`, the one whose S is there
    while (true) {
      const bool has_begun = tile != KeyTiles::kNone;
      if (!has_begun) {
        shared_.work_ring.wait_full(turn_);
        if (is_end(turn_)) return;
      }
      begin_row_tile();
      if (!has_begun) {
        if (uniform(own(turn_).key.tiles.size()) == 0) {
          end_without_keys();
          continue;
        }
        tile = begin_scores();
      }
      first_step(tile);
      const int end = uniform(own(turn_).whole_end);
      // With three warpgroups there is no register for it.
      while (++tile < (Traits::kWarpgroups > 2 ? uniform(own(turn_).whole_end) : end)) {
        step<false>(tile);
      }
      if constexpr (Traits::kHalvesLast) {
        half_is_last_ = tile < uniform(own(turn_).key.tiles.end);
        if (half_is_last_) step<true>(tile);
      }
      tile = last_step();
    }
  }

 private:
  // ---- the work

  __device__ __forceinline__ const ForwardWork& work(int turn) const {
    return shared_.work[shared_.work_ring.stage(turn)];
  }
  __device__ __forceinline__ bool is_end(int turn) const {
    return uniform(shared_.is_end[shared_.work_ring.stage(turn)]) != 0;
  }

  __device__ __forceinline__ const OwnKeyTiles& own(int turn) const {
    return shared_.own[shared_.work_ring.stage(turn)][warpgroup_];
  }
  __device__ __forceinline__ bool is_masked(int tile) const {
    return !own(turn_).key.unmasked.contains(tile);
  }

  // ---- products

  // The accumulators of half the keys are the first ones.
  template <bool kHalf>
  __device__ __forceinline__ auto accumulated_scores() {
    return make_tensor(tSrS_.data(), typename ScoreFragment<kHalf>::layout_type{});
  }

  template <bool kHalf>
  __device__ __forceinline__ void issue_scores(int k_count) {
    Tensor sQ = make_tensor(make_smem_ptr(shared_.q[0]), typename Traits::LayoutQ{});
    Tensor sK =
        make_tensor(make_smem_ptr(shared_.k[0]), typename Traits::template LayoutK<kHalf>{});
    ScoreMma<kHalf> mma;
    auto thread = mma.get_slice(warpgroup_ * 128);
    Tensor tSrQ = thread.partition_fragment_A(sQ);  // descriptors, (MMA, M, K, stage)
    Tensor tSrK = thread.partition_fragment_B(sK);
    Tensor tSrS = accumulated_scores<kHalf>();
    issue<true>(mma, tSrQ(_, _, _, shared_.q_ring.stage(q_count_)),
                tSrK(_, _, _, shared_.k_ring.stage(k_count)), tSrS);
  }

  template <bool kIsLast>
  __device__ __forceinline__ void issue_output() {
    Tensor sVt = make_tensor(make_smem_ptr(shared_.v[0]), typename Traits::LayoutVTransposed{});
    OutputMma mma;
    Tensor tOrV = mma.get_slice(warpgroup_ * 128).partition_fragment_B(sVt);
    shared_.v_ring.wait_full(count_);
    Tensor tOrVt = tOrV(_, _, _, shared_.v_ring.stage(count_));
    if constexpr (kIsLast && Traits::kHalvesLast) {
      constexpr int kBlocks = decltype(size<2>(tOrP_))::value;
      warpgroup_fence_operand(tOrO_);
      issue_blocks<0, kBlocks / 2>(mma, tOrP_, tOrVt, tOrO_);
      if (!half_is_last_) issue_blocks<kBlocks / 2, kBlocks>(mma, tOrP_, tOrVt, tOrO_);
    } else {
      issue<false>(mma, tOrP_, tOrVt, tOrO_);
    }
  }

  // ---- steps

  // The next key tiles are not needed, nor their turns to issue. K and V one after the other, as
  // they are loaded.
  __device__ __forceinline__ void skip_tiles(int skipped) {
    CUTE_NO_UNROLL
    for (int i = 0; i < skipped; ++i) {
      if constexpr (Traits::kTakesTurns) {
        turns_.wait();
        turns_.pass_on();
      }
      skip_key(count_);
      skip_value();
    }
  }
  __device__ __forceinline__ void skip_key(int count) {
    shared_.k_ring.wait_full(count);
    shared_.k_ring.release(count);
  }
  __device__ __forceinline__ void skip_value() {
    shared_.v_ring.wait_full(count_);
    shared_.v_ring.release(count_++);
  }

  // A row tile none of whose keys matter to this warpgroup. It ends before it passes over them: so
  // the storer need not wait for that.
  __device__ __forceinline__ void end_without_keys() {
    const int skipped = uniform(own(turn_).before);
    const bool has_q = skipped > 0;
    if (has_q) {
      shared_.q_ring.wait_full(q_count_);
      if constexpr (!Traits::kStoresThroughQ) shared_.q_ring.release(q_count_);
      ++q_count_;
    }
    end_row_tile(end_softmax(shared_.endings[shared_.work_ring.stage(turn_)]), has_q);
    skip_tiles(skipped);
  }

  // S of the first key tile, where last_step has not begun with it. Returns its number.
  __device__ __forceinline__ int begin_scores() {
    skip_tiles(uniform(own(turn_).before));
    shared_.q_ring.wait_full(q_count_);
    shared_.k_ring.wait_full(count_);
    issue_scores<false>(count_);
    wait_for<0>(tSrS_);
    return uniform(own(turn_).key.tiles.begin);
  }

  // S of the first key tile becomes P.
  __device__ __forceinline__ void first_step(int tile) {
    const bool masked = is_masked(tile);
    shared_.k_ring.release(count_);
    Tensor scores = as_rows_and_columns(tSrS_);
    modify_and_mask(tile, masked, scores);
    softmax_.raise_maximum(softmax_.maxima(scores), [](int, float) {});
    softmax_.exponentiate(scores);
    to_operand<false>();
  }

  // O of the key tile before; S and P of this one, with kHalf of half its keys.
  template <bool kHalf>
  __device__ __forceinline__ void step(int tile) {
    const bool masked = kHalf || is_masked(tile);  // asked for before the products
    shared_.k_ring.wait_full(count_ + 1);
    if constexpr (Traits::kTakesTurns) turns_.wait();
    issue_scores<kHalf>(count_ + 1);
    issue_output<false>();
    if constexpr (Traits::kTakesTurns) turns_.pass_on();
    wait_for<1>(tSrS_);
    shared_.k_ring.release(count_ + 1);
    Tensor scores = as_rows_and_columns(accumulated_scores<kHalf>());
    modify_and_mask(tile, masked, scores);
    const auto maxima = softmax_.maxima(scores);
    // O was issued when S was, and is nearly there: to issue a product takes until the one before
    // it is done. In branches, so that the compiler moves nothing from before the wait behind it.
    if (softmax_.outgrown_by(maxima)) {
      wait_for<0>(tOrO_);
      Tensor output = as_rows_and_columns(tOrO_);
      softmax_.raise_maximum(maxima, [&](int r, float factor) { multiply_row(output, r, factor); });
    } else {
      wait_for<0>(tOrO_);
    }
    shared_.v_ring.release(count_++);
    softmax_.exponentiate(scores);
    to_operand<kHalf>();
  }

  // O of the last key tile, and meanwhile S of the next row tile's first. Returns the number of
  // that one, or kNone if the next row tile has not begun so.
  __device__ __forceinline__ int last_step() {
    // All that is read from shared memory is asked for before the product, which keeps it busy.
    const RowEndings endings = shared_.endings[shared_.work_ring.stage(turn_)];
    // Where there are turns, before them: three warpgroups lack the registers for doing it while
    // the products run, and to two it is the same.
    RowScales<2> scales;
    if constexpr (Traits::kTakesTurns) scales = end_softmax(endings);
    if constexpr (!Traits::kStoresThroughQ) shared_.q_ring.release(q_count_);
    ++q_count_;
    const int skipped = uniform(own(turn_).after);
    if constexpr (Traits::kStagesQ > 1) {
      shared_.work_ring.wait_full(turn_ + 1);
      const Range next = own(turn_ + 1).key.tiles;
      const int between = skipped + uniform(own(turn_ + 1).before);  // the two S
      const int first = uniform(next.begin);
      const bool begins = uniform(next.size()) != 0 && between <= kMostBetween;
      if constexpr (Traits::kTakesTurns) turns_.wait();
      issue_output<true>();
      if (begins) {
        CUTE_NO_UNROLL
        for (int i = 1; i <= between; ++i) {
          // Others may have to issue before more K can be loaded.
          if constexpr (Traits::kTakesTurns) turns_.pass_on();
          skip_key(count_ + i);
          if constexpr (Traits::kTakesTurns) turns_.wait();
        }
        shared_.q_ring.wait_full(q_count_);
        shared_.k_ring.wait_full(count_ + 1 + between);
      }
      // Also where nothing begins, of what lies there: the compiler must know what is on its way.
      issue_scores<false>(count_ + 1 + between);
      if constexpr (Traits::kTakesTurns) turns_.pass_on();
      if constexpr (!Traits::kTakesTurns) scales = end_softmax(endings);
      wait_for<1>(tOrO_);
      shared_.v_ring.release(count_++);
      if (begins) {
        for (int i = 0; i < between; ++i) skip_value();
      } else {
        skip_tiles(skipped);
      }
      end_row_tile(scales, true);
      wait_for<0>(tSrS_);
      return begins ? first : KeyTiles::kNone;
    } else {
      if constexpr (Traits::kTakesTurns) turns_.wait();
      issue_output<true>();
      if constexpr (Traits::kTakesTurns) turns_.pass_on();
      if constexpr (!Traits::kTakesTurns) scales = end_softmax(endings);
      wait_for<0>(tOrO_);
      shared_.v_ring.release(count_++);
      skip_tiles(skipped);
      end_row_tile(scales, false);
      return KeyTiles::kNone;
    }
  }

  // ---- arithmetic

  __device__ __forceinline__ void begin_row_tile() {
    if constexpr (Traits::kModifiesScores) {
      const Problem<float>& problem = params_.problem;
      modifiers_ = ScoreModifiers::of(problem, work(turn_).tile.index, work(turn_).head);
      if (modifiers_.has_alibi) {
        load_alibi_slopes(problem, work(turn_), output_coordinates(), slopes_);
      }
      softmax_ = OnlineSoftmax<2>(modifiers_.scale);
    } else {
      softmax_ = OnlineSoftmax<2>(params_.problem.softmax_scale);
    }
    clear(tOrO_);
  }

  // What happens to the scores of a key tile before the softmax.
  template <class Scores>
  __device__ __forceinline__ void modify_and_mask(int tile, bool masked, Scores& scores) {
    const ForwardWork& work = this->work(turn_);
    if (!masked && !Traits::kModifiesScores) return;
    Tensor tScS = ScoreMma<false>{}
                      .get_slice(consumer_thread())
                      .partition_C(make_identity_tensor(ScoreTile<false>{}));
    Tensor coordinates = as_rows_and_columns(tScS);
    const auto position_of = [&](int r) {
      return work.packing.position_of(get<0>(coordinates(r, 0)));
    };
    const auto key_of = [&](int c) { return tile * kBlockN + get<1>(coordinates(0, c)); };
    if constexpr (Traits::kModifiesScores) {
      if (modifiers_.has_softcap) modifiers_.apply_softcap(scores);
      if (modifiers_.has_alibi) {
        const auto slope_of = [&](int r) { return slopes_[r]; };
        const auto row_of = [&](int r) { return work.tile.first_row + position_of(r); };
        modifiers_.apply_alibi(scores, slope_of, work.mask, row_of, key_of);
      }
    }
    if (masked) {
      const TileMask& mask = shared_.mask[shared_.work_ring.stage(turn_)];
      apply_mask_by_bits(scores, [&](int r) { return mask.keys_of(position_of(r), key_of(0)); });
    }
  }

  template <bool kHalf>
  __device__ __forceinline__ void to_operand() {
    Tensor words = recast<uint32_t>(tOrP_);
    CUTE_UNROLL
    for (int i = 0; i < size(words) / (kHalf ? 2 : 1); ++i)
      words(i) = pack<Element>(tSrS_(2 * i), tSrS_(2 * i + 1));
  }

  __device__ __forceinline__ RowScales<2> end_softmax(const RowEndings& endings) {
    return neginf::end_softmax(params_, endings, softmax_, output_coordinates());
  }

  // With `has_q`, number q_count_ - 1 is that of the row tile.
  __device__ __forceinline__ void end_row_tile(const RowScales<2>& scales, bool has_q) {
    const ForwardWork& work = this->work(turn_);
    const auto coordinates = output_coordinates();
    Tensor output = as_rows_and_columns(tOrO_);
    end_output(scales, output);
    if (params_.num_splits > 1) {
      store_partial(params_, work, output, coordinates);
    } else if (has_q && leaves_through_q<Traits>(params_, launch_.schedule.grid.packing)) {
      // The other warps' part of S may still be reading it.
      cutlass::arch::NamedBarrier::sync(128, kFirstLeaveBarrier + warpgroup_);
      leave_rows<Traits>(shared_.q[shared_.q_ring.stage(q_count_ - 1)], consumer_thread(), tOrO_);
    } else {
      store_rows<Traits>(params_, work, tOrO_, coordinates);
    }
    if (Traits::kStoresThroughQ && has_q) shared_.out_ring.fill_by_thread(q_count_ - 1);
    shared_.work_ring.release_by_thread(turn_++);
  }

  static __device__ __forceinline__ auto output_coordinates() {
    Tensor tOcO =
        OutputMma{}.get_slice(consumer_thread()).partition_C(make_identity_tensor(OutputTile{}));
    return as_rows_and_columns(tOcO);
  }

  const ForwardParams<float>& params_;
  const Launch& launch_;
  SharedStorage& shared_;
  const int warpgroup_;
  const Turns<Traits::kWarpgroups> turns_;
  int turn_ = 0;               // of row tiles
  int q_count_ = 0;            // of row tiles with keys
  int count_ = 0;              // of key tiles
  bool half_is_last_ = false;  // of the row tile's key tiles: the last one is half multiplied

  ScoreFragment<false> tSrS_;
  decltype(make_tensor<Element>(OperandLayout<kBlockN>{})) tOrP_;
  decltype(partition_fragment_C(OutputMma{}, OutputTile{})) tOrO_;
  OnlineSoftmax<2> softmax_;
  ScoreModifiers modifiers_;  // these two only with kModifiesScores
  float slopes_[2];
};

}  // namespace neginf::sm90
