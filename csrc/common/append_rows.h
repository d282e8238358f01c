// Where new keys go in a cache, and the rotation of a row: what the CPU and the CUDA append share.
// Su et al., RoFormer (2021).
#pragma once

#include "key_cache.h"

namespace neginf {

// Rows of q or of new keys: which sequence one belongs to, and its number there.
struct NewRow {
  int sequence;  // batch: none
  int64_t row;   // in the sequence

  static NEGINF_HOST_DEVICE NewRow of(int64_t number, int batch, const int* cu_seqlens,
                                      int64_t total) {
    if (cu_seqlens == nullptr) {
      return {static_cast<int>(number / total), number % total};
    }
    int index = 0;
    for (int end = batch + 1; end - index > 1;) {
      const int middle = index + (end - index) / 2;
      if (Sequence::at(middle, batch, cu_seqlens, nullptr, total).first_row <= number) {
        index = middle;
      } else {
        end = middle;
      }
    }
    return {index, number - Sequence::at(index, batch, cu_seqlens, nullptr, total).first_row};
  }
};

// Of a sequence.
class AppendedSequence {
 public:
  NEGINF_HOST_DEVICE AppendedSequence(const AppendParams& params, int index)
      : first_slot_(clamped(params.cache_seqlens[index], params.cache.capacity)),
        first_position_(params.rotary_seqlens != nullptr ? params.rotary_seqlens[index]
                                                         : params.cache_seqlens[index]),
        entry_(params.cache.cache_batch_idx != nullptr ? params.cache.cache_batch_idx[index]
                                                       : index),
        index_(index) {}

  // Slots in use with all new keys, as far as there is room.
  NEGINF_HOST_DEVICE int length(const AppendParams& params) const {
    const int rows =
        Sequence::at(index_, params.batch, params.cu_seqlens_new, nullptr, params.total_new).rows;
    const int room = params.cache.capacity - first_slot_;
    return first_slot_ + (rows < room ? rows : room);
  }

  // Of new key `row`; it does not exist past the last slot or in a page that does not.
  NEGINF_HOST_DEVICE CacheRow cache_row(const AppendParams& params, int64_t row) const {
    if (row >= params.cache.capacity - first_slot_) return {false, 0, 0};
    const int slot = first_slot_ + static_cast<int>(row);
    return CachedSequence(index_, entry_).row_of_slot(params.cache, slot);
  }

  // The row of cos and sin.
  NEGINF_HOST_DEVICE int64_t position(const AppendParams& params, int64_t row) const {
    const int64_t position = first_position_ + row;
    return position < 0 ? 0 : position < params.num_positions ? position : params.num_positions - 1;
  }

 private:
  static NEGINF_HOST_DEVICE int clamped(int value, int most) {
    return value < 0 ? 0 : value < most ? value : most;
  }

  int first_slot_;
  int64_t first_position_;
  int entry_;
  int index_;
};

// Elements (first, second) of a row that pair number p of it are: those that turn together, and
// behind them two neighbours each, of which the last may not exist.
struct RotaryPair {
  int first;
  int second;
  bool turns;

  static NEGINF_HOST_DEVICE RotaryPair of(int p, int rotary_dim, bool interleaved) {
    const int half = rotary_dim / 2;
    if (p < half && !interleaved) return {p, p + half, true};
    return {2 * p, 2 * p + 1, p < half};
  }
};

template <typename Real>
struct Rotated {
  Real first;
  Real second;
};

template <typename Real>
NEGINF_HOST_DEVICE Rotated<Real> rotate(Real first, Real second, Real cos, Real sin) {
  return {first * cos - second * sin, first * sin + second * cos};
}

}  // namespace neginf
