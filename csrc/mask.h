// Which keys does row i see? The one definition, for the CPU and for every GPU kernel.
//
// Causal masks and windows are aligned to the bottom-right corner: the last row is level with the
// last key. Row i sees key j iff
//     0 <= i < seqlen_q,  0 <= j < seqlen_k,
//     i + seqlen_k - seqlen_q - window_left <= j <= i + seqlen_k - seqlen_q + window_right
// where a negative side is unbounded and causal is window_right = 0. Row ranges and key ranges are
// therefore intervals, and the union over neighbouring rows is an interval too.
#pragma once

#include "lse.h"

namespace neginf {

// Lengths and window sides stay below this, so that the sums in this file fit an int.
constexpr int kMaxSeqlen = 1 << 30;

// The integers begin <= i < end; begin == end is the empty range.
struct Range {
  int begin;
  int end;

  NEGINF_HOST_DEVICE int size() const { return end - begin; }
  NEGINF_HOST_DEVICE bool empty() const { return end <= begin; }
  NEGINF_HOST_DEVICE bool contains(int i) const { return begin <= i && i < end; }
};

// Lies within `a` also when it is empty.
NEGINF_HOST_DEVICE Range intersect(Range a, Range b) {
  const int begin = a.begin > b.begin ? a.begin : b.begin;
  const int end = a.end < b.end ? a.end : b.end;
  return begin < end ? Range{begin, end} : Range{a.begin, a.begin};
}

// The tiles of `tile_size` that hold at least one element of `range`.
NEGINF_HOST_DEVICE Range tiles_covering(Range range, int tile_size) {
  if (range.empty()) return {0, 0};
  return {range.begin / tile_size, (range.end + tile_size - 1) / tile_size};
}

// Share number `split` of `num_splits` near-equal contiguous shares; empty when there are more
// splits than elements.
NEGINF_HOST_DEVICE Range share_of(Range range, int split, int num_splits) {
  const int share = (range.size() + num_splits - 1) / num_splits;
  const int begin = range.begin + split * share;
  return intersect(range, {begin, begin + share});
}

struct Mask {
  int seqlen_q;
  int seqlen_k;
  int window_left;   // < 0: unbounded
  int window_right;  // < 0: unbounded; 0: causal

  NEGINF_HOST_DEVICE bool sees(int row, int key) const { return keys_of_row(row).contains(key); }

  NEGINF_HOST_DEVICE Range keys_of_row(int row) const {
    if (row < 0 || row >= seqlen_q) return {0, 0};
    return intersect({0, seqlen_k}, {first_key(row), last_key(row) + 1});
  }

  // Keys that at least one of the rows sees.
  NEGINF_HOST_DEVICE Range keys_of_rows(Range rows) const {
    rows = intersect(rows, {0, seqlen_q});
    if (rows.empty()) return {0, 0};
    return intersect({0, seqlen_k}, {first_key(rows.begin), last_key(rows.end - 1) + 1});
  }

  // Keys that every one of the rows sees: a tile inside this range needs no mask. Rows past
  // seqlen_q are padding and do not count.
  NEGINF_HOST_DEVICE Range keys_common_to_rows(Range rows) const {
    rows = intersect(rows, {0, seqlen_q});
    if (rows.empty()) return {0, 0};
    return intersect({0, seqlen_k}, {first_key(rows.end - 1), last_key(rows.begin) + 1});
  }

  // Keys that any row of the sequence sees. What lies outside belongs to nobody: it may hold NaN
  // and must not enter a product.
  NEGINF_HOST_DEVICE Range visible_keys() const { return keys_of_rows({0, seqlen_q}); }

  // Rows that see at least one of the keys.
  NEGINF_HOST_DEVICE Range rows_of_keys(Range keys) const {
    keys = intersect(keys, {0, seqlen_k});
    if (keys.empty()) return {0, 0};
    // Row i sees key j iff i + offset - left <= j <= i + offset + right.
    const int first = window_right < 0 ? 0 : keys.begin - offset() - window_right;
    const int last = window_left < 0 ? seqlen_q - 1 : keys.end - 1 - offset() + window_left;
    return intersect({0, seqlen_q}, {first, last + 1});
  }

  // Rows that see every one of the keys.
  NEGINF_HOST_DEVICE Range rows_common_to_keys(Range keys) const {
    if (keys.begin < 0 || keys.end > seqlen_k) return {0, 0};
    const int first = window_right < 0 ? 0 : keys.end - 1 - offset() - window_right;
    const int last = window_left < 0 ? seqlen_q - 1 : keys.begin - offset() + window_left;
    return intersect({0, seqlen_q}, {first, last + 1});
  }

  // The key on the diagonal of row i is i + offset().
  NEGINF_HOST_DEVICE int offset() const { return seqlen_k - seqlen_q; }

 private:
  NEGINF_HOST_DEVICE int first_key(int row) const {
    return window_left < 0 ? 0 : row + offset() - window_left;
  }
  NEGINF_HOST_DEVICE int last_key(int row) const {
    return window_right < 0 ? seqlen_k - 1 : row + offset() + window_right;
  }
};

}  // namespace neginf
