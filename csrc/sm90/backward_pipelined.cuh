// The consumers of the sm90 backward for head_dim 64: two warpgroups of 64 keys each that take
// turns with their products, and a third one that has dQ.
//
// Who issues products is held up until nearly all of them have run. So arithmetic can hide only
// behind products of others, and no two warpgroups may do it at the same time:
//
//   first    S' dP' | dK dV | P'  dS' -> sdS |              | S" dP" | dK' dV' | P" ...
//             turn  v                            turn ^     v
//   second          | S' dP' | dK dV | P'  dS' -> sdS |     | S" dP" | dK' dV' | P" ...
//   dQ              |  dQ -> sdQ                            |  dQ' -> sdQ
//   adder                   sdQ -> memory
//
// A step computes S^T, P^T, dP^T and dS^T of a row tile, and dK and dV of the one before, of which
// P^T and dS^T are operands in registers; V is one for the whole work. dS of a step is said to be
// there when the next step's products have been issued: then nobody waits for its stores.
//
// What stands between one product and the next is what counts, so in a plain step, which is most of
// them, nothing there waits for shared memory: divisors are read before the products, dP^T begins
// at -delta, and whether the next step is a plain one is known.
//
// ptxas counts products on their way within a basic block only. So a tile that is masked or needs
// care, which takes branches, waits for all of them.
#pragma once

#include "../common/thread_index.h"
#include "backward_consumer.cuh"
#include "named_barrier.cuh"

namespace neginf::sm90 {

// Passes dS of a step from the two consumers to the warpgroup of dQ, and its buffer back. Each of
// them waits for the buffer on its own barrier, not to wait for the other one.
struct GradientsHandover {
  static constexpr int kBuffers = 2;
  static constexpr int kConsumers = 2;
  static constexpr int kFullThreads = 128 * (kConsumers + 1);
  static constexpr int kFreeThreads = 128 * 2;

  static __device__ __forceinline__ void say_full(int count) {
    barrier_arrive(PipelinedBarrier::kGradientsFull + count % kBuffers, kFullThreads);
  }
  static __device__ __forceinline__ void await_full(int count) {
    barrier_sync(PipelinedBarrier::kGradientsFull + count % kBuffers, kFullThreads);
  }
  static __device__ __forceinline__ void say_free(int count) {
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      barrier_arrive(free_barrier(count, consumer), kFreeThreads);
    }
  }
  static __device__ __forceinline__ void await_free(int count, int consumer) {
    barrier_sync(free_barrier(count, consumer), kFreeThreads);
  }

 private:
  static __device__ __forceinline__ int free_barrier(int count, int consumer) {
    return PipelinedBarrier::kGradientsFree + kBuffers * consumer + count % kBuffers;
  }
};

// Passes a tile of dQ from its warpgroup to the adder, and the buffer back. A buffer is full by the
// stores of threads and free by a lane's word, as that lane alone waits for the copy engine.
struct PipelinedQueryGradHandover {
  static constexpr int kBuffers = 3;
  static constexpr int kThreads = 128 + 32;

  static __device__ __forceinline__ void say_full(int count) {
    barrier_arrive(full_barrier(count), kThreads);
  }
  static __device__ __forceinline__ void await_full(int count) {
    barrier_sync(full_barrier(count), kThreads);
  }
  static __device__ __forceinline__ void say_free(ReadBarrier (&free)[kBuffers], int count) {
    free[count % kBuffers].arrive();
  }
  static __device__ __forceinline__ void await_free(ReadBarrier (&free)[kBuffers], int count) {
    free[count % kBuffers].wait(count / kBuffers % 2);
  }

 private:
  // Two are enough for three buffers: before the adder has met the warpgroup on one of them, it
  // does not say that the buffer of the next tile but one is free.
  static __device__ __forceinline__ int full_barrier(int count) {
    return PipelinedBarrier::kQueryGradFull + count % 2;
  }
};

template <typename Traits>
class PipelinedConsumer : BackwardConsumer<Traits> {
  using Base = BackwardConsumer<Traits>;
  using Base::shared_, Base::statistics;
  using typename Base::KeyGrad, typename Base::Operand, typename Base::Scores,
      typename Base::SlopedP;
  // V of the warpgroup's keys.
  using Values = decltype(make_tensor<typename Traits::Element>(OperandLayout<Traits::kHeadDim>{}));
  static_assert(!Traits::kModifiesScores);

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    if (Base::warpgroup() == 1) pass_turn();
    Base::for_each_gradient(dk_, dv_, [&](const KeyWork& work) __attribute__((always_inline)) {
      fetch_v();
      add_all_rows(work);
    });
    end_barriers();
  }

 private:
  // A barrier must not be left half complete: what was said and nobody waits for any more.
  __device__ __forceinline__ void end_barriers() const {
    for (int buffer = 0; buffer < GradientsHandover::kBuffers; ++buffer) {
      GradientsHandover::await_free(buffer, Base::warpgroup());
    }
    if (Base::warpgroup() == 0) await_turn();
  }

  __device__ __forceinline__ void add_all_rows(const KeyWork& work) {
    row_step_ = RowStep::first(work);
    row_tiles_ = uniform_range(work.row_tiles);
    unmasked_tiles_ = uniform_range(work.unmasked_tiles);
    int left = uniform(work.row_tiles.size() * work.group);
    await_rows(count_);
    start(work);
    while (--left > 0) {
      advance();
      if (next_is_plain()) {
        plain_step();
      } else {
        general_step(work);
      }
    }
    finish();
  }

  // ---- steps. P^T, not yet rounded, and dS^T of tile number `count_` are there before and after.

  __device__ __forceinline__ void start(const KeyWork& work) {
    await_turn();
    Base::issue_s(count_, s_);
    issue_dp<true>(count_);
    pass_turn();
    wait_for<0>(s_);
    warpgroup_fence_operand(dp_);
    to_gradients(work, count_);
  }

  __device__ __forceinline__ void plain_step() {
    const int next = count_ + 1;
    const auto divisors = Base::read(statistics(next).divisor);
    begin_at_delta(next);
    issue_all<false>();
    look_ahead(next + 1);
    say_shared(count_);
    wait_for<1>(s_);
    warpgroup_fence_operand(dp_);
    warpgroup_fence_operand(dk_);
    Base::exponentiate([&](int pair) { return divisors.pairs[pair]; }, s_);
    CUTE_UNROLL
    for (int i = 0; i < size(dp_); ++i) dp_(i) *= s_(i);
    share(next);
    wait_for<0>(dv_);
    end_step();
  }

  __device__ __forceinline__ void general_step(const KeyWork& work) {
    issue_all<true>();
    say_shared(count_);
    wait_for<0>(s_);
    warpgroup_fence_operand(dp_);
    warpgroup_fence_operand(dk_);
    warpgroup_fence_operand(dv_);
    to_gradients(work, count_ + 1);
    end_step();
  }

  __device__ __forceinline__ void finish() {
    Base::round(s_, p_);
    await_turn();
    Base::issue_dk(count_, ds_, dk_);
    Base::issue_dv(count_, p_, dv_);
    pass_turn();
    say_shared(count_);
    wait_for<0>(dv_);
    warpgroup_fence_operand(dk_);
    end_step();
  }

  __device__ __forceinline__ void end_step() {
    shared_.q_ring.release(count_);
    shared_.dout_ring.release(count_);
    ++count_;
  }

  // ---- products

  // With kClears dP^T anew, otherwise added to what is there.
  template <bool kClears>
  __device__ __forceinline__ void issue_all() {
    const int next = count_ + 1;
    Base::round(s_, p_);
    await_turn();
    Base::issue_s(next, s_);
    issue_dp<kClears>(next);
    pass_turn();
    Base::issue_dk(count_, ds_, dk_);
    Base::issue_dv(count_, p_, dv_);
  }

  template <bool kClears>
  __device__ __forceinline__ void issue_dp(int count) {
    Tensor sdO = make_tensor(make_smem_ptr(shared_.dout[0]), typename Traits::LayoutsDout::Plain{});
    typename Traits::FromRegistersMma mma;
    Tensor b = mma.get_slice(Base::first_key_thread()).partition_fragment_B(sdO);
    issue<kClears>(mma, v_, b(_, _, _, shared_.dout_ring.stage(count)), dp_);
  }

  __device__ __forceinline__ void begin_at_delta(int count) {
    Tensor dp = as_rows_and_columns(dp_);
    const auto delta_of = [&](int pair) { return Base::pair_of(statistics(count).delta, pair); };
    Base::for_each_score(dp, delta_of, [](float& x, float delta) { x = -delta; });
  }

  // A lane's address is that of eight columns of a key, of which a row of shared memory has eight.
  __device__ __forceinline__ void fetch_v() {
    static_assert(Traits::kHeadDim == 64 && Traits::kSwizzleColumnsK == 64);
    const int thread = thread_index_again() - 128;
    const int key = thread / 32 * 16 + thread % 16;
    const uint32_t of_key = cast_smem_ptr_to_uint(shared_.v[Base::key_stage_]) + key * 128;
    Tensor words = recast<uint32_t>(v_);
    CUTE_UNROLL
    for (int i = 0; i < Traits::kHeadDim / 16; ++i) {
      const int piece = i * 2 + thread % 32 / 16;
      const uint32_t from = of_key + (piece ^ (key % 8)) * 16;
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words(4 * i)), "=r"(words(4 * i + 1)), "=r"(words(4 * i + 2)),
                     "=r"(words(4 * i + 3))
                   : "r"(from)
                   : "memory");
    }
  }

  __device__ __forceinline__ void await_turn() const {
    barrier_sync(PipelinedBarrier::kTurn + Base::warpgroup(), 128 * 2);
  }
  __device__ __forceinline__ void pass_turn() const {
    barrier_arrive(PipelinedBarrier::kTurn + 1 - Base::warpgroup(), 128 * 2);
  }

  // ---- arithmetic

  // S^T of row_step_, which is tile number `count`, to P^T, and dP^T to dS^T.
  __device__ __forceinline__ void to_gradients(const KeyWork& work, int count) {
    SlopedP none;
    const auto divisor_of = [&](int pair) {
      return Base::pair_of(statistics(count).divisor, pair);
    };
    Base::to_probabilities(work, row_step_, count, divisor_of, s_, p_, none);
    const Tensor exact = as_rows_and_columns(s_);
    const auto p_of = [&](int key, int pair) {
      return make_float2(exact(key, 2 * pair), exact(key, 2 * pair + 1));
    };
    const auto delta_of = [&](int pair) { return Base::pair_of(statistics(count).delta, pair); };
    Base::to_gradients(count, p_of, delta_of, dp_);
    share(count);
    look_ahead(count + 1);
  }

  // To sdS; say_shared must follow.
  __device__ __forceinline__ void share(int count) {
    Base::round(dp_, ds_);
    GradientsHandover::await_free(count, Base::warpgroup());
    Base::share_ds(count, ds_);
  }
  __device__ __forceinline__ void say_shared(int count) const {
    cutlass::arch::fence_view_async_shared();
    GradientsHandover::say_full(count);
  }

  // ---- the next row tile

  static __device__ __forceinline__ Range uniform_range(const Range& range) {
    return {uniform(range.begin), uniform(range.end)};
  }

  // As RowStep does it, with what is in registers.
  __device__ __forceinline__ void advance() {
    if (++row_step_.tile == row_tiles_.end) {
      row_step_.tile = row_tiles_.begin;
      ++row_step_.head;
    }
  }

  __device__ __forceinline__ void await_rows(int count) const {
    shared_.q_ring.wait_full(count);
    shared_.dout_ring.wait_full(count);
  }

  // Without a branch, and without a read of what is not there yet.
  __device__ __forceinline__ void look_ahead(int count) {
    is_there_ = shared_.q_ring.is_full(count) & shared_.dout_ring.is_full(count);
    asm volatile(
        "{\n"
        ".reg .pred is_there;\n"
        "setp.ne.s32 is_there, %1, 0;\n"
        "@is_there ld.shared.b32 %0, [%2];\n"
        "}"
        : "+r"(needs_care_)
        : "r"(is_there_), "r"(cast_smem_ptr_to_uint(&statistics(count).needs_care))
        : "memory");
  }

  __device__ __forceinline__ bool next_is_plain() {
    const int next = count_ + 1;
    if (!__all_sync(0xffffffffu, is_there_)) {
      await_rows(next);
      needs_care_ = statistics(next).needs_care;
    }
    return unmasked_tiles_.contains(row_step_.tile) && uniform(needs_care_) == 0;
  }

  RowStep row_step_;
  Range row_tiles_;
  Range unmasked_tiles_;
  int is_there_;        // of the next one
  int needs_care_ = 0;  // likewise
  int count_ = 0;       // of row tiles
  Scores s_;            // S^T, P^T
  Scores dp_;           // dP^T, dS^T
  Values v_;
  Operand p_;
  Operand ds_;
  KeyGrad dk_;
  KeyGrad dv_;
};

template <typename Traits>
class QueryGradConsumer : BackwardConsumer<Traits> {
  using Base = BackwardConsumer<Traits>;
  using Base::shared_;
  using Handover = PipelinedQueryGradHandover;
  static_assert(Traits::kStagesDs == GradientsHandover::kBuffers);

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    for (int buffer = 0; buffer < GradientsHandover::kBuffers; ++buffer) {
      GradientsHandover::say_free(buffer);
    }
    int count = 0;
    for_each_work(shared_, [&](const KeyWork& work, int turn) __attribute__((always_inline)) {
      Base::key_stage_ = shared_.k_ring.stage(turn);
      shared_.k_ring.wait_full(turn);
      for (int left = uniform(work.row_tiles.size() * work.group); left > 0; --left) {
        step(count);
        ++count;
      }
      shared_.k_ring.release(turn);
    });
  }

 private:
  __device__ __forceinline__ void step(int count) const {
    typename Base::QueryGrad dq;
    GradientsHandover::await_full(count);
    Base::template issue_dq<0>(count, dq);
    wait_for<0>(dq);
    GradientsHandover::say_free(count);
    constexpr int kTile = Traits::kBlockM * Traits::kHeadDim;
    float* const tile = shared_.dq + count % Handover::kBuffers * kTile;
    Handover::await_free(shared_.dq_free, count);
    Base::store_dq(dq, tile + Base::consumer_thread() / 32 % 4 * (kTile / 4));
    cutlass::arch::fence_view_async_shared();
    Handover::say_full(count);
  }
};

// What QueryGradAdder does, in any order and from three buffers: while one is added, which takes
// two thirds of a step, the next one is filled.
template <typename Traits>
class PipelinedAdder {
  using Handover = PipelinedQueryGradHandover;
  static_assert(Traits::kStagesDq == Handover::kBuffers);
  static constexpr int kTile = Traits::kBlockM * Traits::kHeadDim;
  static constexpr int kPiece = kTile / 8;

 public:
  __device__ __forceinline__ PipelinedAdder(const BackwardRows& rows,
                                            typename Traits::SharedStorage& shared)
      : rows_(rows), shared_(shared) {}

  __device__ __forceinline__ void run() {
    if (is_first_lane()) Handover::say_free(shared_.dq_free, 0);
    int count = 0;
    for_each_work(shared_, [&](const KeyWork& work, int) {
      for_each_step(work, [&](const RowStep& step) {
        add(count, rows_.dq_of(step.number(rows_, work)));
        ++count;
      });
    });
    if (is_first_lane()) cute::tma_store_wait<0>();
  }

 private:
  __device__ __forceinline__ void add(int count, float* to) const {
    // The tile before the last one has been read, and its buffer is the next one's.
    if (is_first_lane()) {
      cute::tma_store_wait<1>();
      Handover::say_free(shared_.dq_free, count + 1);
    }
    __syncwarp();
    Handover::await_full(count);
    if (is_first_lane()) {
      const float* const from = shared_.dq + count % Handover::kBuffers * kTile;
      // In pieces, between which the copy engine loads the next tiles.
#pragma unroll 1
      for (int at = 0; at < kTile; at += kPiece) {
        add_bulk(to + at, from + at, kPiece * sizeof(float));
      }
      cute::tma_store_arrive();
    }
    __syncwarp();
  }

  const BackwardRows& rows_;
  typename Traits::SharedStorage& shared_;
};

}  // namespace neginf::sm90
