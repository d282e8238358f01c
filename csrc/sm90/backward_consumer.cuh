// What the consumers of the sm90 backward have in common: products, the arithmetic between them,
// and where results go. In which order, the narrow and the wide one say.
#pragma once

#include <cute/tensor.hpp>
#include <utility>

#include "../common/backward_scores.cuh"
#include "../common/backward_work.cuh"
#include "../common/convert.cuh"
#include "../common/thread_index.h"
#include "backward_adder.cuh"
#include "backward_traits.cuh"
#include "backward_works.cuh"
#include "wgmma.cuh"

namespace neginf::sm90 {

using namespace cute;

// Two neighbouring rows of a tile.
template <typename T>
struct alignas(8) Pair {
  T of[2];
};

// Everything is inlined: accumulators must stay in registers.
template <typename Traits>
class BackwardConsumer {
 public:
  // `warpgroup` is its number among the consumers, known to be uniform.
  __device__ __forceinline__ BackwardConsumer(const BackwardParams<float>& params,
                                              typename Traits::SharedStorage& shared, int warpgroup)
      : params_(params), shared_(shared), warpgroup_(warpgroup) {}

 protected:
  using Element = typename Traits::Element;
  using SharedStorage = typename Traits::SharedStorage;
  using ScoreMma = typename Traits::ScoreMma;
  using KeyGradMma = typename Traits::KeyGradMma;
  using QueryGradMma = typename Traits::QueryGradMma;
  using Statistics = RowStatistics<Traits::kBlockM>;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kHeadDim = Traits::kHeadDim;

  // What a thread has of each.
  using Scores = decltype(partition_fragment_C(ScoreMma{}, typename Traits::ScoreTile{}));
  using KeyGrad = decltype(partition_fragment_C(KeyGradMma{}, typename Traits::KeyGradTile{}));
  using QueryGrad =
      decltype(partition_fragment_C(QueryGradMma{}, typename Traits::QueryGradTile{}));
  // P^T or dS^T, rounded: an accumulator of scores is an operand as it is.
  using Operand = decltype(make_tensor<Element>(OperandLayout<kBlockM>{}));
  // P times the slope of the softcap, rounded as in an operand. If scores are modified, that and
  // not P is what dS is made from.
  struct SlopedP {
    uint32_t words[Traits::kModifiesScores ? kBlockM / 4 : 1];
  };

  // Who has no registers for what the compiler would make of it outside the loop works it out anew
  // each time.
  static __device__ __forceinline__ int consumer_thread() {
    return (Traits::Tile::kKeepsAddresses ? thread_index() : thread_index_again()) - 128;
  }

  // Which of the threads that compute S^T together.
  static __device__ __forceinline__ int key_thread() {
    return consumer_thread() % Traits::kKeyThreads;
  }
  __device__ __forceinline__ int first_key_thread() const {
    return Traits::kIsWide ? 0 : warpgroup_ * 128;
  }

  // Of who has both dK and dV of its keys: body(work) for all works that any row sees, with K and V
  // there and gradients to be added to.
  template <class Body>
  __device__ __forceinline__ void for_each_gradient(KeyGrad& dk, KeyGrad& dv, const Body& body) {
    for_each_work(shared_, [&](const KeyWork& work, int turn) __attribute__((always_inline)) {
      clear(dk);
      clear(dv);
      shared_.k_ring.wait_full(turn);
      shared_.v_ring.wait_full(turn);
      if (uniform(work.row_tiles.size()) > 0) body(work);
      shared_.k_ring.release(turn);
      shared_.v_ring.release(turn);
      store_dv(work, dv);
      store_dk(work, dk);
    });
  }

  __device__ __forceinline__ const Statistics& statistics(int count) const {
    return shared_.statistics[shared_.q_ring.stage(count)];
  }
  __device__ __forceinline__ const StepNotes& notes(int count) const {
    return shared_.notes[shared_.q_ring.stage(count)];
  }

  // ---- products

  // scores = K Q^T or V dO^T.
  template <class LayoutsOfRows>
  __device__ __forceinline__ void issue_scores(const Element* keys, const Element* rows, int stage,
                                               Scores& scores) const {
    // The compiler would keep the descriptors of K and V over the loop, and spill.
    if constexpr (Traits::kIsWide) asm volatile("" : "+l"(keys));
    Tensor sKeys = make_tensor(make_smem_ptr(keys), typename Traits::LayoutsK::Plain{});
    Tensor sRows = make_tensor(make_smem_ptr(rows), typename LayoutsOfRows::Plain{});
    ScoreMma mma;
    auto thread = mma.get_slice(first_key_thread());
    Tensor a = thread.partition_fragment_A(sKeys);
    Tensor b = thread.partition_fragment_B(sRows);
    issue<true>(mma, a(_, _, _, 0), b(_, _, _, stage), scores);
  }

  __device__ __forceinline__ void issue_s(int count, Scores& scores) const {
    issue_scores<typename Traits::LayoutsQ>(shared_.k, shared_.q[0], shared_.q_ring.stage(count),
                                            scores);
  }
  __device__ __forceinline__ void issue_dp(int count, Scores& scores) const {
    issue_scores<typename Traits::LayoutsDout>(shared_.v, shared_.dout[0],
                                               shared_.dout_ring.stage(count), scores);
  }

  // gradient += P^T dO or dS^T Q.
  template <class LayoutsOfRows>
  __device__ __forceinline__ void issue_key_gradient(const Operand& operand, const Element* rows,
                                                     int stage, KeyGrad& gradient) const {
    Tensor sRows = make_tensor(make_smem_ptr(rows), typename LayoutsOfRows::Transposed{});
    KeyGradMma mma;
    auto thread = mma.get_slice(first_key_thread());
    issue<false>(mma, operand, thread.partition_fragment_B(sRows(_, _, stage)), gradient);
  }

  __device__ __forceinline__ void issue_dv(int count, const Operand& p, KeyGrad& dv) const {
    issue_key_gradient<typename Traits::LayoutsDout>(p, shared_.dout[0],
                                                     shared_.dout_ring.stage(count), dv);
  }
  __device__ __forceinline__ void issue_dk(int count, const Operand& ds, KeyGrad& dk) const {
    issue_key_gradient<typename Traits::LayoutsQ>(ds, shared_.q[0], shared_.q_ring.stage(count),
                                                  dk);
  }

  // A part of the columns of dQ.
  template <int kPart, class Accumulator>
  __device__ __forceinline__ void issue_dq(int count, Accumulator& dq) const {
    Tensor sK = make_tensor(make_smem_ptr(shared_.k), typename Traits::LayoutsK::Transposed{});
    Tensor sKt = local_tile(sK, Shape<Int<Traits::kPartColumns>, Int<kBlockN>, _1>{},
                            make_coord(Int<kPart>{}, _0{}, _0{}));
    const auto ds = make_smem_ptr(shared_.ds[0]);
    const int stage = count % Traits::kStagesDs;
    QueryGradMma mma;
    auto thread = mma.get_slice(warpgroup_ * 128);
    if constexpr (Traits::kTransposesDq) {
      Tensor sdS = make_tensor(ds, typename Traits::LayoutsDs::Plain{});
      issue<true>(mma, thread.partition_fragment_A(sKt)(_, _, _, 0),
                  thread.partition_fragment_B(sdS)(_, _, _, stage), dq);
    } else {
      Tensor sdS = make_tensor(ds, typename Traits::LayoutsDs::Transposed{});
      issue<true>(mma, thread.partition_fragment_A(sdS)(_, _, _, stage),
                  thread.partition_fragment_B(sKt)(_, _, _, 0), dq);
    }
  }

  // ---- arithmetic

  static __device__ __forceinline__ void round(const Scores& scores, Operand& operand) {
    Tensor words = recast<uint32_t>(operand);
    CUTE_UNROLL
    for (int i = 0; i < size(words); ++i) {
      words(i) = pack<Element>(scores(2 * i), scores(2 * i + 1));
    }
  }

  // (keys, rows) of a tile of scores.
  static __device__ __forceinline__ auto score_coordinates() {
    Tensor tScS = ScoreMma{}
                      .get_slice(key_thread())
                      .partition_C(make_identity_tensor(typename Traits::ScoreTile{}));
    return as_rows_and_columns(tScS);
  }

  // This thread's rows come in pairs, two of every eight.
  static __device__ __forceinline__ int first_row_of_pair(int pair) {
    return consumer_thread() % 4 * 2 + 8 * pair;
  }
  template <class T>
  static __device__ __forceinline__ Pair<T> pair_of(const T* of_rows, int pair) {
    return *reinterpret_cast<const Pair<T>*>(of_rows + first_row_of_pair(pair));
  }

  // What belongs to the rows of this thread, or to the first kPairs pairs of them.
  template <class T, int kPairs = kBlockM / 8>
  struct OfRows {
    Pair<T> pairs[kPairs];
  };
  template <int kPairs = kBlockM / 8, class T>
  static __device__ __forceinline__ OfRows<T, kPairs> read(const T* of_rows) {
    return [&]<int... pair>(std::integer_sequence<int, pair...>) {
      return OfRows<T, kPairs>{{pair_of(of_rows, pair)...}};
    }(std::make_integer_sequence<int, kPairs>{});
  }

  // body(score, what belongs to its row) for the (keys, rows) of this thread.
  template <class KeysAndRows, class OfPair, class Body>
  static __device__ __forceinline__ void for_each_score(KeysAndRows& scores,
                                                        const OfPair& of_pair_number,
                                                        const Body& body) {
    CUTE_UNROLL
    for (int pair = 0; pair < kBlockM / 8; ++pair) {
      const auto of_pair = of_pair_number(pair);
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        CUTE_UNROLL
        for (int c = 0; c < 2; ++c) body(scores(c, 2 * pair + i), of_pair.of[i]);
      }
    }
  }

  // S^T of row tile number `count` to P^T, and that to an operand. `flags` are its notes'.
  // divisor_of(pair) is that of the statistics. If scores are modified, scores are left as they
  // are and `sloped` is made, too.
  template <class DivisorOf>
  __device__ __forceinline__ void to_probabilities(const KeyWork& work, int count, int flags,
                                                   const DivisorOf& divisor_of, Scores& scores,
                                                   Operand& p, SlopedP& sloped) const {
    if constexpr (Traits::kModifiesScores) {
      to_modified_probabilities(work, count, flags, scores, p, sloped);
      return;
    }
    Tensor keys_and_rows = as_rows_and_columns(scores);
    if (flags & StepNotes::kMasked) {
      const auto coordinates = score_coordinates();
      const int first_row = notes(count).step.tile * kBlockM;
      const auto row_of = [&](int r) { return first_row + get<1>(coordinates(0, r)); };
      const auto key_of = [&](int c) { return work.keys.first_row + get<0>(coordinates(c, 0)); };
      Tensor by_row = make_tensor(scores.data(), select<1, 0>(keys_and_rows.layout()));
      apply_mask_by_key(by_row, work.mask, row_of, key_of);
    }
    if (flags & StepNotes::kNeedsCare) {
      const CarefulRows rows = notes(count).rows;
      const float scale = params_.problem.softmax_scale;
      const auto careful_of = [&](int pair) {
        const int row = first_row_of_pair(pair);
        return Pair<Divisor>{{rows.divisor(row), rows.divisor(row + 1)}};
      };
      for_each_score(keys_and_rows, careful_of, [&](float& score, Divisor divisor) {
        score = exp2_approx(careful_exponent(divisor, score, scale));
      });
    } else {
      exponentiate(divisor_of, scores);
    }
  }

  // The same of a tile that is neither masked nor needs care.
  template <class DivisorOf>
  __device__ __forceinline__ void exponentiate(const DivisorOf& divisor_of, Scores& scores) const {
    const float scale_log2 = params_.problem.softmax_scale * kLog2e;
    Tensor keys_and_rows = as_rows_and_columns(scores);
    for_each_score(keys_and_rows, divisor_of, [&](float& score, Log2Divisor divisor) {
      score = exp2_approx(divisor.exponent(score, scale_log2));
    });
  }

  // One score after the other, as there are no registers for a tile of slopes.
  __device__ __forceinline__ void to_modified_probabilities(const KeyWork& work, int count,
                                                            int flags, const Scores& scores,
                                                            Operand& p, SlopedP& sloped) const {
    const bool masked = (flags & StepNotes::kMasked) != 0;
    const bool careful = (flags & StepNotes::kNeedsCare) != 0;
    const RowStep step = notes(count).step;
    const auto modifiers = ScoreModifiers::of(params_.problem, work.keys.index, step.head);
    const float scale_log2 = modifiers.scale * kLog2e;
    const auto coordinates = score_coordinates();
    const int first_row = step.tile * kBlockM;
    Tensor keys_and_rows = as_rows_and_columns(scores);
    Tensor words = recast<uint32_t>(p);
    CUTE_UNROLL
    for (int pair = 0; pair < kBlockM / 8; ++pair) {
      CUTE_UNROLL
      for (int c = 0; c < 2; ++c) {
        float of_rows[2];
        float sloped_of_rows[2];
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          const int row = first_row + get<1>(coordinates(c, 2 * pair + i));
          const int key = work.keys.first_row + get<0>(coordinates(c, 2 * pair + i));
          float score = keys_and_rows(c, 2 * pair + i);
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
            const Divisor divisor = notes(count).rows.divisor(row_in_tile);
            of_rows[i] = exp2_approx(careful_exponent(divisor, score, modifiers.scale));
          } else {
            const Log2Divisor divisor = statistics(count).divisor[row_in_tile];
            of_rows[i] = exp2_approx(divisor.exponent(score, scale_log2));
          }
          sloped_of_rows[i] = of_rows[i] == 0.f ? 0.f : of_rows[i] * slope;
        }
        words(2 * pair + c) = pack<Element>(of_rows[0], of_rows[1]);
        sloped.words[2 * pair + c] = pack<Element>(sloped_of_rows[0], sloped_of_rows[1]);
      }
    }
  }

  // dP^T to dS^T, in place. p_of(key, pair) are the probabilities of two rows.
  template <class POf, class DeltaOf>
  __device__ __forceinline__ void to_gradients(int flags, const POf& p_of, const DeltaOf& delta_of,
                                               Scores& dp) const {
    Tensor ds = as_rows_and_columns(dp);  // (keys, rows)
    const auto multiply = [&](const auto& product) {
      CUTE_UNROLL
      for (int pair = 0; pair < kBlockM / 8; ++pair) {
        const auto deltas = delta_of(pair);
        CUTE_UNROLL
        for (int c = 0; c < 2; ++c) {
          const float2 p = p_of(c, pair);
          ds(c, 2 * pair) = product(p.x, ds(c, 2 * pair) - deltas.of[0]);
          ds(c, 2 * pair + 1) = product(p.y, ds(c, 2 * pair + 1) - deltas.of[1]);
        }
      }
    };
    if (flags & StepNotes::kNeedsCare) {
      // Where delta or dP is NaN, a key of weight 0 gets 0 all the same.
      multiply([](float p, float x) { return p == 0.f ? 0.f : p * x; });
    } else {
      multiply([](float p, float x) { return p * x; });
    }
  }

  // ---- through shared memory

  // dS^T to where dQ takes it from, in 8 x 8 pieces: a warp has 16 keys, and rows are in blocks of
  // 64. Where dQ is transposed dS, whose keys are in blocks of 64. A fence must follow.
  __device__ __forceinline__ void share_ds(int count, const Operand& operand) const {
    const int thread = key_thread();
    const int lane = thread % 32;
    const int warp = thread / 32;
    const uint32_t line = 128;  // bytes
    const uint32_t tile = cast_smem_ptr_to_uint(shared_.ds[count % Traits::kStagesDs]);
    Tensor words = recast<uint32_t>(operand);
    CUTE_UNROLL
    for (int i = 0; i < kBlockM / 16; ++i) {
      if constexpr (Traits::kTransposesDq) {
        const int row = lane / 16 * 8 + lane % 8;
        const int piece = warp % 4 * 2 + lane / 8 % 2;  // of eight keys
        const uint32_t to =
            tile + (warp / 4 * kBlockM + 16 * i + row) * line + (piece ^ (row % 8)) * 16;
        asm volatile(
            "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
            "r"(words(4 * i)), "r"(words(4 * i + 1)), "r"(words(4 * i + 2)), "r"(words(4 * i + 3))
            : "memory");
      } else {
        const int key = warp * 16 + lane % 16;
        const int piece = i % 4 * 2 + lane / 16;  // of eight rows
        const uint32_t to = tile + (i / 4 * kBlockN + key) * line + (piece ^ (key % 8)) * 16;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                     "r"(words(4 * i)), "r"(words(4 * i + 1)), "r"(words(4 * i + 2)),
                     "r"(words(4 * i + 3))
                     : "memory");
      }
    }
  }

  // dQ, to the adder. As dq_piece_offset says: a lane's registers of eight columns (rows, if
  // transposed) lie together.
  template <class Accumulator>
  __device__ __forceinline__ void hand_over(const Accumulator& dq) const {
    using Handover = QueryGradHandover<Traits>;
    const int warp = consumer_thread() / 32;
    float* const of_warp = Handover::in_shared(shared_, warp / 4, warp % 4);
    Handover::await_free(warpgroup_);
    store_dq(dq, of_warp);
    cutlass::arch::fence_view_async_shared();
    Handover::say_full(warpgroup_);
  }

  template <class Accumulator>
  static __device__ __forceinline__ void store_dq(const Accumulator& dq, float* of_warp) {
    auto* to = reinterpret_cast<float4*>(of_warp + consumer_thread() % 32 * 4);
    CUTE_UNROLL
    for (int n = 0; n < size(dq) / 4; ++n) {
      to[n * 32] = make_float4(dq(4 * n), dq(4 * n + 1), dq(4 * n + 2), dq(4 * n + 3));
    }
  }

  // ---- epilogue

  // dK or dV in the dtype of k. A key that nobody sees gets exactly 0, whatever met its zeros.
  static __device__ __forceinline__ void store(void* tensor, const Strides& strides, int columns,
                                               float scale, const KeyWork& work,
                                               const KeyGrad& gradient) {
    const int thread = key_thread();
    Tensor tKcK = KeyGradMma{}.get_slice(thread).partition_C(
        make_identity_tensor(typename Traits::KeyGradTile{}));
    const auto coordinates = as_rows_and_columns(tKcK);
    const int quad_lane = thread % 4;
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
      for (int group = 0; group < kHeadDim / 32; ++group) {
        uint32_t chunk[4];
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int at = 4 * (4 * group + i) + 2 * r;
          chunk[i] =
              is_visible ? pack<Element>(gradient(at) * scale, gradient(at + 1) * scale) : 0u;
        }
        transpose_in_quad(chunk);
        const int column = 32 * group + 8 * quad_lane;
        if (key < work.keys.sequence.rows && column < columns) {
          *reinterpret_cast<uint4*>(to + column) =
              make_uint4(chunk[0], chunk[1], chunk[2], chunk[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void store_dv(const KeyWork& work, const KeyGrad& dv) const {
    store(params_.dv, params_.dv_strides, params_.problem.head_dim_v, 1.f, work, dv);
  }
  __device__ __forceinline__ void store_dk(const KeyWork& work, const KeyGrad& dk) const {
    store(params_.dk, params_.dk_strides, params_.problem.head_dim, params_.problem.softmax_scale,
          work, dk);
  }

  const BackwardParams<float>& params_;
  SharedStorage& shared_;
  const int warpgroup_;
};

}  // namespace neginf::sm90
