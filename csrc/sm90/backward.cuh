// Attention backward with WGMMA and the tensor memory accelerator, for sm90.
//
// A CTA works on one tile of kBlockN keys of a key head after the other, and for each on the tiles
// of kBlockM query rows that see any of them, of every query head in the group. Everything of size
// keys x rows is computed transposed. Up to head_dim 128 two consumer warpgroups own 64 of the keys
// each, and P^T and dS^T are operands as they lie in the accumulators (kKeepsP):
//
//     S^T = K Q^T          P = exp(S - L)         dV += P^T dO
//     dP^T = V dO^T        dS = P (dP - delta)    dK += dS^T Q      dQ += dS K
//
//   claimer      next work, by an atomic counter                            (backward_loader.cuh)
//   loader       K Q V dO | Q dO | Q dO | ...                               TMA
//   shared       work[2]  sK sV   sQ[3] statistics[3]  sdO[3]  sdS  sdQ
//   consumers    S, dP -> P, dS (registers) -> dV, dK;  dS -> sdS -> dQ -> sdQ
//   adder        sdQ -> memory, in order if deterministic                   bulk add
//
// One step of a warpgroup; only for dQ it needs the dS of the other:
//
//   tensor cores  dP        | dV             | dQ dK        | S' dP'
//   arithmetic    P         | dS -> sdS | barrier     | -> sdQ  |     P'
//
// ptxas counts products on their way within a basic block only. So there is no branch while more
// than one is on its way, and at the end of a step that is dP.
//
// From head_dim 192 on, dK and dV of 64 keys are too much for the registers of a warpgroup. There
// both work on the same 64 keys: each has half the columns of dK, dV and dQ, and half the rows of
// S^T and dP^T, which both need as operands:
//
//     S^T, dP^T  | rows of 0 | rows of 1 |   -> sP, sdS ->   dK, dV, dQ  | columns of 0 | of 1 |
//
//   tensor cores  dP            | dV             | dQ dK         | S' dP'
//   arithmetic    P -> sP | bar | dS -> sdS | bar     | dQ -> sdQ     | dQ -> sdQ |     P'
//
// If shared memory is short, dQ leaves in two parts, the second beside S' and dP'. Where registers
// allow it, S' is issued with dQ and dK instead (kEarlyScores).
//
// Softcap and ALiBi are a second kernel, as in the forward.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cute/tensor.hpp>
#include <limits>
#include <utility>

#include "../common/backward_rows.h"
#include "../common/backward_scores.cuh"
#include "../common/backward_work.cuh"
#include "../common/convert.cuh"
#include "../common/cuda_check.h"
#include "../common/shared_memory.h"
#include "../common/thread_index.h"
#include "../kernels.h"
#include "backward_loader.cuh"
#include "backward_traits.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

namespace neginf::sm90 {

using namespace cute;

// Two neighbouring rows of a tile.
template <typename T>
struct alignas(8) Pair {
  T of[2];
};

// ---------------------------------------------------------------------------------------- consumer

// One consumer warpgroup. Everything is inlined: accumulators must stay in registers.
template <typename Traits>
class BackwardConsumer {
  using Element = typename Traits::Element;
  using SharedStorage = typename Traits::SharedStorage;
  using ScoreMma = typename Traits::ScoreMma;
  using KeyGradMma = typename Traits::KeyGradMma;
  using QueryGradMma = typename Traits::QueryGradMma;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kScoreRows = Traits::kScoreRows;
  // The statistics of the rows before they are needed: while products read their operands, shared
  // memory answers late. Not everywhere are there registers for it.
  static constexpr bool kReadsAhead = Traits::kKeepsP && kBlockM == 64;

 public:
  __device__ __forceinline__ BackwardConsumer(const BackwardParams<float>& params,
                                              const BackwardRows& rows, SharedStorage& shared)
      : params_(params), rows_(rows), shared_(shared) {}

  __device__ __forceinline__ void run() {
    for (;; ++turn_) {
      shared_.work_ring.wait_full(turn_);
      const int slot = shared_.work_ring.stage(turn_);
      if (uniform(shared_.is_end[slot]) != 0) return;
      const KeyWork& work = shared_.work[slot];
      clear(tKrK_);
      clear(tVrV_);
      if (uniform(work.row_tiles.size()) > 0) {
        step_ = {work.head_k * work.group, work.row_tiles.begin};
        begin();
        while (uniform(!step_.is_last(work))) step<true>(work);
        step<false>(work);
      } else {
        shared_.k_ring.wait_full(turn_);
        shared_.v_ring.wait_full(turn_);
        shared_.k_ring.release(turn_);
        shared_.v_ring.release(turn_);
      }
      store(params_.dv, params_.dv_strides, params_.problem.head_dim_v, 1.f, work, tVrV_);
      store(params_.dk, params_.dk_strides, params_.problem.head_dim, params_.problem.softmax_scale,
            work, tKrK_);
      shared_.work_ring.release(turn_);
    }
  }

 private:
  static constexpr int kConsumers = 1;  // barrier; 0 is __syncthreads

  // Worked out anew each time: what the compiler would make of it outside the loop takes registers.
  static __device__ __forceinline__ int warpgroup() {
    return uniform(thread_index_again() / 128 - 1);
  }

  // K or V of both warpgroups, whose descriptors are worked out anew for the same reason.
  static __device__ __forceinline__ const Element* keys_of_both(const Element* tile) {
    if constexpr (!Traits::kKeepsP) asm volatile("" : "+l"(tile));
    return tile;
  }

  // What all consumers have written to shared memory may be multiplied afterwards.
  static __device__ __forceinline__ void share() {
    cutlass::arch::fence_view_async_shared();
    cutlass::arch::NamedBarrier::sync(128 * Traits::kWarpgroups, kConsumers);
  }

  // ---- products

  __device__ __forceinline__ void issue_scores(int count) {
    Tensor sK =
        make_tensor(make_smem_ptr(keys_of_both(shared_.k)), typename Traits::LayoutsK::Plain{});
    Tensor sQ = make_tensor(make_smem_ptr(shared_.q[0]), typename Traits::LayoutsQ::Plain{});
    ScoreMma mma;
    auto thread = mma.get_slice(warpgroup() * 128);
    Tensor tSrK = thread.partition_fragment_A(sK);
    Tensor tSrQ = thread.partition_fragment_B(sQ);
    issue<true>(mma, tSrK(_, _, _, 0), tSrQ(_, _, _, shared_.q_ring.stage(count)), tSrS_);
  }

  __device__ __forceinline__ void issue_dp(int count) {
    Tensor sV =
        make_tensor(make_smem_ptr(keys_of_both(shared_.v)), typename Traits::LayoutsK::Plain{});
    Tensor sdO = make_tensor(make_smem_ptr(shared_.dout[0]), typename Traits::LayoutsDout::Plain{});
    ScoreMma mma;
    auto thread = mma.get_slice(warpgroup() * 128);
    Tensor tPrV = thread.partition_fragment_A(sV);
    Tensor tPrdO = thread.partition_fragment_B(sdO);
    issue<true>(mma, tPrV(_, _, _, 0), tPrdO(_, _, _, shared_.dout_ring.stage(count)), tPrP_);
  }

  __device__ __forceinline__ void issue_dv() {
    Tensor sdOt =
        make_tensor(make_smem_ptr(shared_.dout[0]), typename Traits::LayoutsDout::Transposed{});
    issue_key_gradient(shared_.p, sdOt(_, _, shared_.dout_ring.stage(count_)), tVrV_);
  }

  __device__ __forceinline__ void issue_dk() {
    Tensor sQt = make_tensor(make_smem_ptr(shared_.q[0]), typename Traits::LayoutsQ::Transposed{});
    issue_key_gradient(shared_.ds, sQt(_, _, shared_.q_ring.stage(count_)), tKrK_);
  }

  // accumulator += P^T or dS^T, from operand_ or where it is shared, times B.
  template <class B, class Accumulator>
  __device__ __forceinline__ void issue_key_gradient(const Element* scores, const B& sB,
                                                     Accumulator& accumulator) {
    KeyGradMma mma;
    auto thread = mma.get_slice(warpgroup() * 128);
    Tensor b = thread.partition_fragment_B(sB);
    if constexpr (Traits::kKeepsP) {
      issue<false>(mma, operand_, b, accumulator);
    } else {
      Tensor sScores = make_tensor(make_smem_ptr(scores), typename Traits::LayoutsP::Plain{});
      issue<false>(mma, thread.partition_fragment_A(sScores(_, _, 0)), b, accumulator);
    }
  }

  __device__ __forceinline__ void issue_dq() {
    Tensor sdS = make_tensor(make_smem_ptr(shared_.ds), typename Traits::LayoutsP::Transposed{});
    Tensor sKt = make_tensor(make_smem_ptr(shared_.k), typename Traits::LayoutsK::Transposed{});
    QueryGradMma mma;
    auto thread = mma.get_slice(warpgroup() * 128);
    Tensor tQrdS = thread.partition_fragment_A(sdS);
    Tensor tQrK = thread.partition_fragment_B(sKt);
    Tensor tQrQ = query_gradient();
    issue<true>(mma, tQrdS(_, _, _, 0), tQrK(_, _, _, 0), tQrQ);
  }

  // ---- steps

  // S and dP of the first row tile.
  __device__ __forceinline__ void begin() {
    shared_.k_ring.wait_full(turn_);
    shared_.q_ring.wait_full(count_);
    shared_.v_ring.wait_full(turn_);
    shared_.dout_ring.wait_full(count_);
    issue_scores(count_);
    if constexpr (kReadsAhead) divisors_ = read(statistics(count_).divisor);
    wait_for<0>(tSrS_);
    issue_dp(count_);
  }

  // When it begins, S of this row tile is there and dP is on its way.
  template <bool kHasNext>
  __device__ __forceinline__ void step(const KeyWork& work) {
    if constexpr (Traits::kKeepsP) {
      multiply_kept<kHasNext>(work);
    } else {
      multiply_shared<kHasNext>(work);
    }
    shared_.q_ring.release(count_);
    if constexpr (!kHasNext) {
      shared_.k_ring.release(turn_);
      shared_.v_ring.release(turn_);
    }
    ++count_;
    step_.advance(work);
  }

  template <bool kHasNext>
  __device__ __forceinline__ void multiply_kept(const KeyWork& work) {
    to_probabilities(work);
    if constexpr (kHasNext) {
      shared_.q_ring.wait_full(count_ + 1);
      shared_.dout_ring.wait_full(count_ + 1);
    }
    [[maybe_unused]] OfRows<float> deltas;
    if constexpr (kReadsAhead) deltas = read(statistics(count_).delta);
    wait_for<0>(tPrP_);
    if constexpr (!Traits::kModifiesScores) round_to_operand(tSrS_);
    issue_dv();
    to_gradients([&](int pair) {
      if constexpr (kReadsAhead) return deltas.pairs[pair];
      return pair_of(statistics(count_).delta, pair);
    });
    wait_for<0>(tVrV_);
    round_to_operand(tPrP_);
    store_operand(shared_.ds);
    share();
    issue_dq();
    issue_dk();
    wait_for<1>(tPrP_);
    if constexpr (Traits::kOwnQueryGrad) warpgroup_fence_operand(tQrQ_);
    hand_over_query_gradient<0>();
    wait_for<0>(tKrK_);
    if constexpr (kHasNext) {
      issue_scores(count_ + 1);
      issue_dp(count_ + 1);
      if constexpr (kReadsAhead) divisors_ = read(statistics(count_ + 1).divisor);
      wait_for<1>(tSrS_);
    }
    shared_.dout_ring.release(count_);
  }

  // As multiply_kept. The barrier for P also says that all are past dK and dQ of the step before,
  // which read sdS, and that for dS that all are past dV, which reads sP.
  template <bool kHasNext>
  __device__ __forceinline__ void multiply_shared(const KeyWork& work) {
    static_assert(Traits::kOwnQueryGrad);
    constexpr bool kEarlyScores = kHasNext && Traits::Tile::kEarlyScores;
    to_probabilities(work);
    if constexpr (!Traits::kModifiesScores) round_to_operand(tSrS_);
    store_operand(shared_.p);
    share();
    wait_for<0>(tPrP_);
    issue_dv();
    to_gradients([&](int pair) { return pair_of(statistics(count_).delta, pair); });
    wait_for<0>(tVrV_);
    shared_.dout_ring.release(count_);
    round_to_operand(tPrP_);
    store_operand(shared_.ds);
    if constexpr (kHasNext) shared_.q_ring.wait_full(count_ + 1);
    share();
    issue_dq();
    if constexpr (kEarlyScores) issue_scores(count_ + 1);
    issue_dk();
    wait_for<kEarlyScores ? 2 : 1>(tQrQ_);
    hand_over_query_gradient<0>();
    wait_for<0>(tKrK_);
    if constexpr (kHasNext) {
      if constexpr (kEarlyScores) {
        warpgroup_fence_operand(tSrS_);
      } else {
        issue_scores(count_ + 1);
      }
      shared_.dout_ring.wait_full(count_ + 1);
      issue_dp(count_ + 1);
    }
    if constexpr (Traits::kQueryGradParts == 2) hand_over_query_gradient<1>();
    if constexpr (kHasNext && !kEarlyScores) wait_for<1>(tSrS_);
  }

  // ---- arithmetic

  template <class Accumulator>
  __device__ __forceinline__ void round_to_operand(const Accumulator& accumulator) {
    Tensor words = recast<uint32_t>(operand_);
    CUTE_UNROLL
    for (int i = 0; i < size(words); ++i) {
      words(i) = pack<Element>(accumulator(2 * i), accumulator(2 * i + 1));
    }
  }

  // (keys, rows) of a tile of scores.
  static __device__ __forceinline__ auto score_coordinates() {
    const int thread = thread_index_again() - 128;
    Tensor tScS = ScoreMma{}.get_slice(thread).partition_C(
        make_identity_tensor(typename Traits::ScoreTile{}));
    return as_rows_and_columns(tScS);
  }

  // This thread's rows come in pairs, two of every eight.
  template <class T>
  static __device__ __forceinline__ Pair<T> pair_of(const T* of_rows, int pair) {
    const int thread = thread_index_again();
    const int first = thread % 4 * 2 + (Traits::kKeepsP ? 0 : (thread / 128 - 1) * kScoreRows);
    return *reinterpret_cast<const Pair<T>*>(of_rows + first + 8 * pair);
  }

  // What belongs to the rows of this thread.
  template <class T>
  struct OfRows {
    Pair<T> pairs[kScoreRows / 8];
  };
  template <class T>
  static __device__ __forceinline__ OfRows<T> read(const T* of_rows) {
    return [&]<int... pair>(std::integer_sequence<int, pair...>) {
      return OfRows<T>{{pair_of(of_rows, pair)...}};
    }(std::make_integer_sequence<int, kScoreRows / 8>{});
  }
  __device__ __forceinline__ const RowStatistics<kBlockM>& statistics(int count) const {
    return shared_.statistics[shared_.q_ring.stage(count)];
  }

  // body(score, what belongs to its row) for the (keys, rows) of this thread.
  template <class Scores, class OfPair, class Body>
  static __device__ __forceinline__ void for_each_score(Scores& scores,
                                                        const OfPair& of_pair_number,
                                                        const Body& body) {
    CUTE_UNROLL
    for (int pair = 0; pair < kScoreRows / 8; ++pair) {
      const auto of_pair = of_pair_number(pair);
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        CUTE_UNROLL
        for (int c = 0; c < 2; ++c) body(scores(c, 2 * pair + i), of_pair.of[i]);
      }
    }
  }

  // S to P, in place. If scores are modified, rounded P to operand_ and P times its slope to
  // sloped_.
  __device__ __forceinline__ void to_probabilities(const KeyWork& work) {
    const int stage = shared_.q_ring.stage(count_);
    const bool masked = !work.unmasked_tiles.contains(step_.tile);
    const bool careful = statistics(count_).needs_care != 0;
    const float scale = params_.problem.softmax_scale;
    if constexpr (Traits::kModifiesScores) {
      modify_scores(work, masked, careful, stage);
      return;
    }
    Tensor scores = as_rows_and_columns(tSrS_);  // (keys, rows)
    if (masked) {
      const auto coordinates = score_coordinates();
      const int first_row = step_.tile * kBlockM;
      const auto row_of = [&](int r) { return first_row + get<1>(coordinates(0, r)); };
      const auto key_of = [&](int c) { return work.keys.first_row + get<0>(coordinates(c, 0)); };
      Tensor by_row = make_tensor(scores.data(), select<1, 0>(scores.layout()));
      apply_mask_by_key(by_row, work.mask, row_of, key_of);
    }
    if (careful) {
      const auto divisor_of = [&](int pair) { return pair_of(shared_.careful[stage], pair); };
      for_each_score(scores, divisor_of, [&](float& score, Divisor divisor) {
        score = careful_probability(score, scale, divisor);
      });
    } else {
      const float scale_log2 = scale * kLog2e;
      const auto divisor_of = [&](int pair) {
        if constexpr (kReadsAhead) return divisors_.pairs[pair];
        return pair_of(statistics(count_).divisor, pair);
      };
      for_each_score(scores, divisor_of, [&](float& score, Log2Divisor divisor) {
        score = exp2_approx(divisor.exponent(score, scale_log2));
      });
    }
  }

  // Without contraction: s must be rounded as the Lse was.
  static __device__ __forceinline__ float careful_probability(float raw, float scale,
                                                              Divisor divisor) {
    return exp2_approx(divisor.exponent(__fmul_rn(raw, scale)) * kLog2e);
  }

  // One score after the other, as there are no registers for a tile of slopes.
  __device__ __forceinline__ void modify_scores(const KeyWork& work, bool masked, bool careful,
                                                int stage) {
    const auto modifiers = ScoreModifiers::of(params_.problem, work.keys.index, step_.head);
    const float scale_log2 = modifiers.scale * kLog2e;
    const auto coordinates = score_coordinates();
    const int first_row = step_.tile * kBlockM;
    Tensor scores = as_rows_and_columns(tSrS_);  // (keys, rows)
    Tensor words = recast<uint32_t>(operand_);
    CUTE_UNROLL
    for (int pair = 0; pair < kScoreRows / 8; ++pair) {
      CUTE_UNROLL
      for (int c = 0; c < 2; ++c) {
        float p[2];
        float sloped[2];
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          const int row = first_row + get<1>(coordinates(c, 2 * pair + i));
          const int key = work.keys.first_row + get<0>(coordinates(c, 2 * pair + i));
          float score = scores(c, 2 * pair + i);
          float slope = 1.f;
          if (modifiers.has_softcap) {
            score = tanh_approx(score * modifiers.softcap_factor);
            slope = 1.f - score * score;
          }
          if (modifiers.has_alibi) {
            score = score * modifiers.alibi_factor +
                    alibi_bias(modifiers.alibi_slope, row, key, work.mask.offset());
          }
          if (masked && !work.mask.sees(row, key)) score = masked_score<float>();
          const int row_in_tile = row - first_row;
          if (careful) {
            p[i] = careful_probability(score, modifiers.scale, shared_.careful[stage][row_in_tile]);
          } else {
            const Log2Divisor divisor = shared_.statistics[stage].divisor[row_in_tile];
            p[i] = exp2_approx(divisor.exponent(score, scale_log2));
          }
          sloped[i] = p[i] == 0.f ? 0.f : p[i] * slope;
        }
        words(2 * pair + c) = pack<Element>(p[0], p[1]);
        sloped_[2 * pair + c] = pack<Element>(sloped[0], sloped[1]);
      }
    }
  }

  // dP to dS. P is taken from where it is rounded: no registers for both.
  template <class DeltaOf>
  __device__ __forceinline__ void to_gradients(const DeltaOf& delta_of) {
    Tensor rounded = recast<uint32_t>(operand_);
    Tensor ds = as_rows_and_columns(tPrP_);  // (keys, rows)
    const auto p_of = [&](int c, int pair) {
      if constexpr (Traits::kModifiesScores) {
        return unpack<Element>(sloped_[2 * pair + c]);
      } else {
        return unpack<Element>(rounded(2 * pair + c));
      }
    };
    const auto multiply = [&](const auto& product) {
      CUTE_UNROLL
      for (int pair = 0; pair < kScoreRows / 8; ++pair) {
        const auto deltas = delta_of(pair);
        CUTE_UNROLL
        for (int c = 0; c < 2; ++c) {
          const float2 p = p_of(c, pair);
          ds(c, 2 * pair) = product(p.x, ds(c, 2 * pair) - deltas.of[0]);
          ds(c, 2 * pair + 1) = product(p.y, ds(c, 2 * pair + 1) - deltas.of[1]);
        }
      }
    };
    if (statistics(count_).needs_care != 0) {
      // Where delta or dP is NaN, a key of weight 0 gets 0 all the same.
      multiply([](float p, float x) { return p == 0.f ? 0.f : p * x; });
    } else {
      multiply([](float p, float x) { return p * x; });
    }
  }

  // operand_ to a tile of P^T or dS^T in shared memory, in 8 x 8 pieces: a warp has 16 keys.
  __device__ __forceinline__ void store_operand(Element* tile) {
    const int thread = thread_index_again() - 128;
    const int lane = thread % 32;
    const int warp = thread / 32;
    const int key = (Traits::kKeepsP ? warp : warp % 4) * 16 + lane % 16;
    const int first = Traits::kKeepsP ? 0 : warp / 4 * (kScoreRows / 16);  // of 16 query rows
    const uint32_t row_bytes = 128;  // of a block of 64 query rows
    const uint32_t of_key = cast_smem_ptr_to_uint(tile) + key * row_bytes;
    const int piece = lane / 16;
    Tensor words = recast<uint32_t>(operand_);
    CUTE_UNROLL
    for (int i = 0; i < kScoreRows / 16; ++i) {
      const int at = first + i;
      const uint32_t to =
          of_key + at / 4 * (kBlockN * row_bytes) + ((at % 4 * 2 + piece) ^ (key % 8)) * 16;
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                   "r"(words(4 * i)), "r"(words(4 * i + 1)), "r"(words(4 * i + 2)),
                   "r"(words(4 * i + 3))
                   : "memory");
    }
  }

  // ---- dQ

  // In the registers of dP.
  __device__ __forceinline__ auto query_gradient() {
    using Layout =
        decltype(partition_fragment_C(QueryGradMma{}, typename Traits::QueryGradTile{}).layout());
    if constexpr (Traits::kOwnQueryGrad) {
      return make_tensor(tQrQ_.data(), Layout{});
    } else {
      return make_tensor(tPrP_.data(), Layout{});
    }
  }

  // As dq_piece_offset says: a lane's registers of eight columns lie together.
  template <int kPart>
  __device__ __forceinline__ void hand_over_query_gradient() {
    using Handover = QueryGradHandover<Traits>;
    constexpr int kColumnBlocks = Handover::kPiece / 128;
    const int thread = thread_index_again() - 128;
    const int warp = thread / 32;
    const int piece = Traits::kCutsRows ? warp : warp % 4 * Traits::kWarpgroups + warp / 4;
    Tensor tQrQ = query_gradient();
    auto* to = reinterpret_cast<float4*>(shared_.dq + piece * Handover::kPiece + thread % 32 * 4);
    // Both warpgroups: where P is kept, it also says that dS has been read by both.
    Handover::await_free();
    CUTE_UNROLL
    for (int n = 0; n < kColumnBlocks; ++n) {
      const int at = 4 * (kPart * kColumnBlocks + n);
      to[n * 32] = make_float4(tQrQ(at), tQrQ(at + 1), tQrQ(at + 2), tQrQ(at + 3));
    }
    cutlass::arch::fence_view_async_shared();
    Handover::say_full();
  }

  // ---- epilogue

  // dK or dV in the dtype of k. A key that nobody sees gets exactly 0, whatever met its zeros.
  template <class Accumulator>
  __device__ __forceinline__ void store(void* tensor, const Strides& strides, int columns,
                                        float scale, const KeyWork& work,
                                        const Accumulator& accumulator) {
    const int thread = thread_index_again() - 128;
    Tensor tKcK = KeyGradMma{}.get_slice(thread).partition_C(
        make_identity_tensor(typename Traits::KeyGradTile{}));
    const auto coordinates = as_rows_and_columns(tKcK);
    const int quad_lane = thread % 4;
    const int first_column = Traits::kKeepsP ? 0 : thread / 128 * Traits::kKeyGradColumns;
    Element* const of_work = static_cast<Element*>(tensor) + work.keys.index * strides.batch +
                             work.head_k * strides.head +
                             (work.keys.sequence.first_row + work.keys.first_row) * strides.row;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int key_in_tile = get<0>(coordinates(r, 0));
      const int key = work.keys.first_row + key_in_tile;
      const bool is_visible = work.visible_keys.contains(key);
      Element* const to = of_work + key_in_tile * strides.row;
      CUTE_UNROLL
      for (int group = 0; group < Traits::kKeyGradColumns / 32; ++group) {
        uint32_t chunk[4];
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int at = 4 * (4 * group + i) + 2 * r;
          chunk[i] =
              is_visible ? pack<Element>(accumulator(at) * scale, accumulator(at + 1) * scale) : 0u;
        }
        transpose_in_quad(chunk);
        const int column = first_column + 32 * group + 8 * quad_lane;
        if (key < work.keys.sequence.rows && column < columns) {
          *reinterpret_cast<uint4*>(to + column) =
              make_uint4(chunk[0], chunk[1], chunk[2], chunk[3]);
        }
      }
    }
  }

  const BackwardParams<float>& params_;
  const BackwardRows& rows_;
  SharedStorage& shared_;
  RowStep step_;
  OfRows<Log2Divisor> divisors_;
  int turn_ = 0;   // of key tiles
  int count_ = 0;  // of row tiles

  decltype(partition_fragment_C(ScoreMma{}, typename Traits::ScoreTile{})) tSrS_;  // S^T, P^T
  decltype(partition_fragment_C(ScoreMma{},
                                typename Traits::ScoreTile{})) tPrP_;    // dP^T, dS^T, then dQ
  decltype(make_tensor<Element>(OperandLayout<kScoreRows>{})) operand_;  // P^T, then dS^T
  uint32_t
      sloped_[Traits::kModifiesScores ? kScoreRows / 4 : 1];  // P times the slope of the softcap
  decltype(partition_fragment_C(QueryGradMma{}, typename Traits::QueryGradTile{})) tQrQ_;
  decltype(partition_fragment_C(KeyGradMma{}, typename Traits::KeyGradTile{})) tKrK_;  // dK
  decltype(partition_fragment_C(KeyGradMma{}, typename Traits::KeyGradTile{})) tVrV_;  // dV
};

// ------------------------------------------------------------------------------------------ kernel

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams<float> params,
                    const __grid_constant__ BackwardRows rows,
                    const __grid_constant__ BackwardLaunch launch) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<typename Traits::SharedStorage*>(shared_memory);

  if (threadIdx.x == 0) {
    constexpr int kConsumerWarps = 4 * Traits::kWarpgroups;
    shared.work_ring.init(kConsumerWarps + 2);  // and the two producer warps
    shared.loaded.init(1);
    shared.k_ring.init(kConsumerWarps);
    shared.v_ring.init(kConsumerWarps);
    shared.q_ring.init(kConsumerWarps);
    shared.dout_ring.init(kConsumerWarps);
    shared.uncleared.init(1);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    if (threadIdx.x < 32) {
      Loader<Traits>(params, rows, launch, shared).run();
    } else if (threadIdx.x == 32) {
      claim_work<Traits>(params, rows, launch.works, shared);
    } else if (threadIdx.x >= 64 && threadIdx.x < 96) {
      add_query_gradients<Traits>(params, rows, shared);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    BackwardConsumer<Traits>(params, rows, shared).run();
  }
}

// Pointers are aligned to 16 bytes, head_dim and the strides of row, head and batch are multiples
// of 8 elements; head_dim_v <= head_dim <= kHeadDim.
template <typename Traits>
void launch_backward(const BackwardParams<float>& params, const BackwardRows& rows) {
  constexpr DType kDType =
      std::is_same_v<typename Traits::Element, half_t> ? DType::float16 : DType::bfloat16;
  const Problem<float>& problem = params.problem;
  const int64_t works = num_row_tiles(keys_as_rows(problem), Traits::kBlockN) * problem.num_heads_k;
  if (works == 0) return;
  if (works > std::numeric_limits<int>::max() / 2) {
    throw std::runtime_error("neginf: sm90 backward: too many key tiles x heads: " +
                             std::to_string(works));
  }
  BackwardLaunch launch;
  launch.works = static_cast<int>(works);
  const int batch_q = problem.cu_seqlens_q != nullptr ? 1 : problem.batch;
  const int batch_k = problem.cu_seqlens_k != nullptr ? 1 : problem.batch;
  const TensorBox of_rows{Traits::kSwizzleColumns, 1, Traits::kBlockM};
  const TensorBox of_keys{Traits::kSwizzleColumnsK, 1, Traits::kBlockN};
  launch.q = tensor_map(params.q, kDType, params.q_strides, batch_q, problem.total_q,
                        problem.num_heads, problem.head_dim, of_rows);
  launch.dout = tensor_map(params.dout, kDType, params.dout_strides, batch_q, problem.total_q,
                           problem.num_heads, problem.head_dim_v, of_rows);
  launch.k = tensor_map(params.k, kDType, params.k_strides, batch_k, problem.total_k,
                        problem.num_heads_k, problem.head_dim, of_keys);
  launch.v = tensor_map(params.v, kDType, params.v_strides, batch_k, problem.total_k,
                        problem.num_heads_k, problem.head_dim_v, of_keys);

  constexpr int kSharedBytes = sizeof(typename Traits::SharedStorage);
  allow_shared_memory<backward_kernel<Traits>>(kSharedBytes);
  const int ctas = std::min(launch.works, params.num_sms);
  backward_kernel<Traits>
      <<<ctas, Traits::kThreads, kSharedBytes, params.stream>>>(params, rows, launch);
  cuda_check(cudaGetLastError(), "sm90 backward");
}

template <typename Traits>
void run_tiles(const BackwardParams<float>& params) {
  constexpr DType kDType =
      std::is_same_v<typename Traits::Element, half_t> ? DType::float16 : DType::bfloat16;
  const auto rows = BackwardRows::allocate(params, Traits::kBlockM, Traits::kHeadDim);
  prepare_backward(params, rows, kDType);
  launch_backward<Traits>(params, rows);
  finish_backward(params, rows, kDType);
}

template <typename Element, int kHeadDim>
void run_backward(const BackwardParams<float>& params) {
  using Plain = BackwardTraits<Element, kHeadDim, BackwardTile<kHeadDim, false>, false>;
  using ModifiesScores = BackwardTraits<Element, kHeadDim, BackwardTile<kHeadDim, true>, true>;
  const bool modifies_scores =
      params.problem.softcap != 0.f || params.problem.alibi_slopes != nullptr;
  modifies_scores ? run_tiles<ModifiesScores>(params) : run_tiles<Plain>(params);
}

template <typename Element, int kHeadDim>
using RegisterBackward = RegisterKernel<BackwardParams<float>, run_backward<Element, kHeadDim>>;

}  // namespace neginf::sm90
