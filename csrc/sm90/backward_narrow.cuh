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
  // Of so many pairs of rows the statistics are read before they are needed: while products read
  // their operands, shared memory answers late. There are no registers for all of many rows.
  static constexpr int kPairsAhead = Traits::kBlockM == 64 ? 8 : 2;

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    Base::for_each_gradient(dk_, dv_, [&](const KeyWork& work) __attribute__((always_inline)) {
      int flags;
      look_ahead(count_);
      do {
        if (__any_sync(0xffffffffu, next_flags_ == kNotThere)) {
          shared_.q_ring.wait_full(count_);
          shared_.dout_ring.wait_full(count_);
          next_flags_ = Base::notes(count_).flags;
        }
        flags = uniform(next_flags_);
        // For most of them a copy of the step in which nothing is asked.
        if (!Traits::kModifiesScores && (flags & ~StepNotes::kIsLast) == 0) {
          step(work, 0);
        } else {
          step(work, flags);
        }
      } while ((flags & StepNotes::kIsLast) == 0);
    });
  }

 private:
  __device__ __forceinline__ void step(const KeyWork& work, int flags) {
    Base::issue_s(count_, s_);
    Base::issue_dp(count_, dp_);
    const auto divisors = ahead(statistics(count_).divisor);
    wait_for<1>(s_);
    Base::to_probabilities(work, count_, flags, divisors, s_, p_, sloped_);
    const auto deltas = ahead(statistics(count_).delta);
    wait_for<0>(dp_);
    const Tensor exact = as_rows_and_columns(s_);
    const auto p_of = [&](int key, int pair) {
      if constexpr (Traits::kModifiesScores) {
        return unpack<typename Traits::Element>(sloped_.words[2 * pair + key]);
      } else {
        return make_float2(exact(key, 2 * pair), exact(key, 2 * pair + 1));
      }
    };
    Base::to_gradients(flags, p_of, deltas, dp_);
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
    look_ahead(count_ + 1);
    wait_for<1>(dq);
    Base::hand_over(dq);
    wait_for<0>(dk_);
    shared_.q_ring.release(count_);
    ++count_;
  }

  // The flags of a tile if it is there.
  __device__ __forceinline__ void look_ahead(int count) {
    const int is_there = shared_.q_ring.is_full(count) & shared_.dout_ring.is_full(count);
    next_flags_ = kNotThere;
    asm volatile(
        "{\n"
        ".reg .pred is_there;\n"
        "setp.ne.s32 is_there, %1, 0;\n"
        "@is_there ld.shared.b32 %0, [%2];\n"
        "}"
        : "+r"(next_flags_)
        : "r"(is_there), "r"(cast_smem_ptr_to_uint(&Base::notes(count).flags))
        : "memory");
  }

  __device__ __forceinline__ auto query_gradient() {
    using Layout = typename QueryGrad::layout_type;
    if constexpr (Traits::Tile::kOwnQueryGrad) {
      return make_tensor(dq_.data(), Layout{});
    } else {
      return make_tensor(dp_.data(), Layout{});
    }
  }

  // A function that gives the two of a pair of rows, of which the first kPairsAhead are read now.
  template <class T>
  static __device__ __forceinline__ auto ahead(const T* of_rows) {
    return [of_rows, first = Base::template read<kPairsAhead>(of_rows)](int pair) {
      return pair < kPairsAhead ? first.pairs[pair] : Base::pair_of(of_rows, pair);
    };
  }

  static constexpr int kNotThere = -1;
  int next_flags_;
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
