// The consumers of the sm90 backward from head_dim 192 on, where a warpgroup has registers for dK
// or for dV of 64 keys, not for both.
//
// Both warpgroups work on the same keys. One has S^T and dV, the other one dP^T and dK; each
// product with a whole head_dim in its result reads its B operand once, and P^T and dS^T are A
// operands from registers. Half the columns of dQ are either's. P^T goes from one to the other
// through shared memory as the registers of threads (sP), dS^T as an operand of dQ (sdS):
//
//   values  | dV S'   | P' -> sP | dQ(left)  -> adder | dV' S'' ...      a row tile ahead with P
//                          |          ^ sdS
//                          v          |
//   keys    | dP      | sP, dS -> sdS | dK dQ(right) -> adder | dP' ...
//
// Both sP and sdS have two buffers. sP(t + 2) is written behind the barrier of dS(t), before which
// sP(t) was read. sdS(t + 2) is written by the second warpgroup after it has fetched P(t + 2),
// which the first one makes after dQ(t).
#pragma once

#include "backward_consumer.cuh"
#include "named_barrier.cuh"

namespace neginf::sm90 {

template <typename Traits>
class WideConsumer : protected BackwardConsumer<Traits> {
 protected:
  using Base = BackwardConsumer<Traits>;
  using Base::Base;
  using Base::shared_;
  using typename Base::KeyGrad, typename Base::Operand, typename Base::QueryGrad,
      typename Base::Scores, typename Base::SharedStorage, typename Base::SlopedP;

  // body(work, turn) for all works, when K is there and the gradient 0.
  template <class Body>
  __device__ __forceinline__ void for_each_gradient(const Body& body) {
    for_each_work(shared_, [&](const KeyWork& work, int turn) __attribute__((always_inline)) {
      clear(gradient_);
      shared_.k_ring.wait_full(turn);
      body(work, turn);
    });
  }

  __device__ __forceinline__ void release_keys(int turn) {
    // Also who has not read V: releases must not get ahead of loads.
    shared_.v_ring.wait_full(turn);
    shared_.k_ring.release(turn);
    shared_.v_ring.release(turn);
  }

  // What this thread has or gets of P^T of a tile: every 128th of these.
  __device__ __forceinline__ uint4* shared_p(int count) const {
    return &shared_.p[count % 2][0][thread_index_again() % 128];
  }

  static __device__ __forceinline__ int of_step(int barrier, int count) {
    return barrier + count % 2;
  }
  static constexpr int kBoth = 128 * Traits::kWarpgroups;

  // A part of dQ of the row tile, while no other product runs.
  template <int kPart>
  __device__ __forceinline__ void add_query_gradient() {
    QueryGrad dq;
    Base::template issue_dq<kPart>(count_, dq);
    wait_for<0>(dq);
    Base::hand_over(dq);
  }

  int count_ = 0;     // of row tiles
  KeyGrad gradient_;  // dV or dK
};

// S^T, P^T, dV and the left half of the columns of dQ.
template <typename Traits>
class ValuesConsumer : WideConsumer<Traits> {
  using Wide = WideConsumer<Traits>;
  using typename Wide::Operand, typename Wide::Scores, typename Wide::SlopedP;
  using Wide::count_, Wide::gradient_, Wide::notes, Wide::shared_, Wide::statistics;

 public:
  using Wide::Wide;

  __device__ __forceinline__ void run() {
    Wide::for_each_gradient([&](const KeyWork& work, int turn) __attribute__((always_inline)) {
      if (uniform(work.row_tiles.size()) > 0) {
        shared_.q_ring.wait_full(count_);
        Scores s;
        Wide::issue_s(count_, s);
        flags_ = notes(count_).flags;
        const auto divisors = Wide::read(statistics(count_).divisor);
        wait_for<0>(s);
        share_probabilities(work, count_, divisors, s);
        while ((uniform(flags_) & StepNotes::kIsLast) == 0) step<true>(work);
        step<false>(work);
      }
      Wide::release_keys(turn);
      Wide::store_dv(work, gradient_);
    });
  }

 private:
  // When it begins, P of the row tile is there.
  template <bool kHasNext>
  __device__ __forceinline__ void step(const KeyWork& work) {
    shared_.dout_ring.wait_full(count_);
    if constexpr (kHasNext) {
      Scores s;
      Wide::issue_dv(count_, p_, gradient_);
      // Its place became free when the other warpgroup was past dK, not long ago.
      shared_.q_ring.wait_full(count_ + 1);
      Wide::issue_s(count_ + 1, s);
      flags_ = notes(count_ + 1).flags;
      const auto divisors = Wide::read(statistics(count_ + 1).divisor);
      wait_for<1>(gradient_);
      shared_.dout_ring.release(count_);
      wait_for<0>(s);
      share_probabilities(work, count_ + 1, divisors, s);
    } else {
      Wide::issue_dv(count_, p_, gradient_);
      wait_for<0>(gradient_);
      shared_.dout_ring.release(count_);
    }
    barrier_sync(Wide::of_step(BackwardBarrier::kGradients, count_), Wide::kBoth);
    Wide::template add_query_gradient<0>();
    if constexpr (Traits::kQueryGradParts == 2) Wide::template add_query_gradient<1>();
    ++count_;
  }

  // From S of tile number `count`, whose flags_ are at hand.
  template <class Divisors>
  __device__ __forceinline__ void share_probabilities(const KeyWork& work, int count,
                                                      const Divisors& divisors, Scores& s) {
    SlopedP sloped;
    Wide::to_probabilities(
        work, count, flags_, [&](int pair) { return divisors.pairs[pair]; }, s, p_, sloped);
    if constexpr (!Traits::kModifiesScores) Wide::round(s, p_);
    const Tensor rounded = recast<uint32_t>(p_);
    const auto word = [&](int i) {
      if constexpr (Traits::kModifiesScores) return sloped.words[i];
      return rounded(i);
    };
    uint4* const to = Wide::shared_p(count);
    CUTE_UNROLL
    for (int i = 0; i < Traits::kBlockM / 16; ++i) {
      to[i * 128] = make_uint4(word(4 * i), word(4 * i + 1), word(4 * i + 2), word(4 * i + 3));
    }
    barrier_arrive(Wide::of_step(BackwardBarrier::kProbabilities, count), Wide::kBoth);
    shared_.q_ring.release(count);
  }

  int flags_;
  Operand p_;
};

// dP^T, dS^T, dK and the right half of the columns of dQ.
template <typename Traits>
class KeysConsumer : WideConsumer<Traits> {
  using Wide = WideConsumer<Traits>;
  using typename Wide::Operand, typename Wide::QueryGrad, typename Wide::Scores;
  using Wide::count_, Wide::gradient_, Wide::notes, Wide::shared_, Wide::statistics;
  // See NarrowConsumer::kPairsAhead.
  static constexpr bool kReadsAhead = Traits::kHeadDim < 256;
  // The second part of dQ is handed over while the next dP runs: when it is there, its buffer still
  // has the first part.
  static constexpr bool kHoldsPart = Traits::kQueryGradParts == 2;

 public:
  using Wide::Wide;

  __device__ __forceinline__ void run() {
    Wide::for_each_gradient([&](const KeyWork& work, int turn) __attribute__((always_inline)) {
      shared_.v_ring.wait_full(turn);
      if (uniform(work.row_tiles.size()) > 0) add_rows();
      Wide::release_keys(turn);
      Wide::store_dk(work, gradient_);
    });
  }

 private:
  __device__ __forceinline__ void add_rows() {
    if constexpr (kHoldsPart) {
      bool is_last = step<false>();
      while (!is_last) is_last = step<true>();
      Wide::hand_over(held_);
    } else {
      while (!step<false>()) {
      }
    }
  }

  // Whether it was the last one of the work.
  template <bool kHasHeld>
  __device__ __forceinline__ bool step() {
    Scores dp;
    Operand p, ds;
    shared_.q_ring.wait_full(count_);
    shared_.dout_ring.wait_full(count_);
    Wide::issue_dp(count_, dp);
    const int flags = notes(count_).flags;
    [[maybe_unused]] typename Wide::template OfRows<float> deltas;
    if constexpr (kReadsAhead) deltas = Wide::read(statistics(count_).delta);
    if constexpr (kHasHeld) Wide::hand_over(held_);
    barrier_sync(Wide::of_step(BackwardBarrier::kProbabilities, count_), Wide::kBoth);
    fetch_probabilities(p);
    wait_for<0>(dp);
    shared_.dout_ring.release(count_);
    const Tensor words = recast<uint32_t>(p);
    Wide::to_gradients(
        flags,
        [&](int key, int pair) { return unpack<typename Traits::Element>(words(2 * pair + key)); },
        [&](int pair) {
          if constexpr (kReadsAhead) return deltas.pairs[pair];
          return Wide::pair_of(statistics(count_).delta, pair);
        },
        dp);
    Wide::round(dp, ds);
    Wide::share_ds(count_, ds);
    cutlass::arch::fence_view_async_shared();
    barrier_arrive(Wide::of_step(BackwardBarrier::kGradients, count_), Wide::kBoth);
    Wide::issue_dk(count_, ds, gradient_);
    barrier_sync(BackwardBarrier::kConsumers, 128);
    QueryGrad dq;
    Wide::template issue_dq<0>(count_, dq);
    wait_for<1>(gradient_);
    shared_.q_ring.release(count_);
    wait_for<0>(dq);
    Wide::hand_over(dq);
    if constexpr (kHoldsPart) {
      Wide::template issue_dq<1>(count_, held_);
      wait_for<0>(held_);
    }
    ++count_;
    return (uniform(flags) & StepNotes::kIsLast) != 0;
  }

  __device__ __forceinline__ void fetch_probabilities(Operand& p) const {
    const uint4* const from = Wide::shared_p(count_);
    Tensor words = recast<uint32_t>(p);
    CUTE_UNROLL
    for (int i = 0; i < Traits::kBlockM / 16; ++i) {
      const uint4 four = from[i * 128];
      words(4 * i) = four.x;
      words(4 * i + 1) = four.y;
      words(4 * i + 2) = four.z;
      words(4 * i + 3) = four.w;
    }
  }

  QueryGrad held_;  // part of dQ, if kHoldsPart
};

}  // namespace neginf::sm90
