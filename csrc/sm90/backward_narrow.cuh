// The consumer of the sm90 backward up to head_dim 128: a warpgroup owns 64 of the keys.
//
// P^T and dS^T are the A operands of its dV and dK as they lie in its accumulators; for dQ alone it
// needs the dS of the other warpgroup. One step, in which the warpgroups meet once:
//
//   tensor cores   S dP           | dV           | dQ dK             | S' dP'
//   arithmetic          P    dS -> sdS | barrier |     dQ -> adder   |
//
// Two sdS let one warpgroup begin the next step while the other one still reads this one's.
//
// ptxas counts products on their way within a basic block only. So there is no branch while more
// than one of a kind that is waited for singly is on its way: a step begins and ends with none.
#pragma once

#include "backward_consumer.cuh"
#include "named_barrier.cuh"

namespace neginf::sm90 {

template <typename Traits>
class NarrowConsumer : BackwardConsumer<Traits> {
  using Base = BackwardConsumer<Traits>;
  using Base::shared_, Base::statistics;
  using typename Base::KeyGrad, typename Base::Operand, typename Base::QueryGrad,
      typename Base::Scores, typename Base::SlopedP;
  // The statistics of the rows before they are needed: while products read their operands, shared
  // memory answers late. With more rows there are no registers for it.
  static constexpr bool kReadsAhead = Traits::kBlockM == 64;

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    Base::for_each_gradient(dk_, dv_, [&](const KeyWork& work) __attribute__((always_inline)) {
      row_step_ = RowStep::first(work);
      while (uniform(!row_step_.is_last(work))) step(work);
      step(work);
    });
  }

 private:
  __device__ __forceinline__ void step(const KeyWork& work) {
    shared_.q_ring.wait_full(count_);
    shared_.dout_ring.wait_full(count_);
    Base::issue_s(count_, s_);
    Base::issue_dp(count_, dp_);
    const auto divisors = ahead([&] { return statistics(count_).divisor; });
    wait_for<1>(s_);
    Base::to_probabilities(work, row_step_, count_, divisors, s_, p_, sloped_);
    const auto deltas = ahead([&] { return statistics(count_).delta; });
    wait_for<0>(dp_);
    const Tensor exact = as_rows_and_columns(s_);
    const auto p_of = [&](int key, int pair) {
      if constexpr (Traits::kModifiesScores) {
        return unpack<typename Traits::Element>(sloped_.words[2 * pair + key]);
      } else {
        return make_float2(exact(key, 2 * pair), exact(key, 2 * pair + 1));
      }
    };
    Base::to_gradients(count_, p_of, deltas, dp_);
    if constexpr (!Traits::kModifiesScores) Base::round(s_, p_);
    Base::round(dp_, ds_);
    Base::share_ds(count_, ds_);
    Base::issue_dv(count_, p_, dv_);
    cutlass::arch::fence_view_async_shared();
    barrier_sync(BackwardBarrier::kConsumers, 128 * Traits::kWarpgroups);
    auto dq = query_gradient();
    Base::template issue_dq<0>(count_, dq);
    wait_for<1>(dv_);
    shared_.dout_ring.release(count_);
    Base::issue_dk(count_, ds_, dk_);
    wait_for<1>(dq);
    Base::hand_over(dq);
    wait_for<0>(dk_);
    shared_.q_ring.release(count_);
    ++count_;
    row_step_.advance(work);
  }

  __device__ __forceinline__ auto query_gradient() {
    using Layout = typename QueryGrad::layout_type;
    if constexpr (Traits::Tile::kOwnQueryGrad) {
      return make_tensor(dq_.data(), Layout{});
    } else {
      return make_tensor(dp_.data(), Layout{});
    }
  }

  // A function that gives the two of a pair of rows, read now or when it is called.
  template <class OfRows>
  static __device__ __forceinline__ auto ahead(const OfRows& of_rows) {
    if constexpr (kReadsAhead) {
      return [all = Base::read(of_rows())](int pair) { return all.pairs[pair]; };
    } else {
      return [of_rows](int pair) { return Base::pair_of(of_rows(), pair); };
    }
  }

  RowStep row_step_;
  int count_ = 0;  // of row tiles
  // Those of a step are members, too: as its own variables the compiler finds no registers for
  // them.
  Scores s_;   // S^T, P^T
  Scores dp_;  // dP^T, dS^T
  Operand p_;
  Operand ds_;
  SlopedP sloped_;
  QueryGrad dq_;
  KeyGrad dk_;
  KeyGrad dv_;
};

}  // namespace neginf::sm90
