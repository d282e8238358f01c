// Where the rows of one sequence lie in a dense or packed buffer. The only reader of cu_seqlens and
// seqused: on the GPU nobody has checked them, so every value is clamped to the buffer here.
#pragma once

#include "../params.h"

namespace neginf {

struct Sequence {
  int64_t first_row;  // in the buffer, after the batch stride
  int rows;           // rows the buffer has for this sequence
  int length;         // rows in use, <= rows

  // The entry after the last one, index == batch, holds what is left of a packed buffer: rows that
  // belong to no sequence. Its length is 0.
  static NEGINF_HOST_DEVICE Sequence at(int index, int batch, const int* cu_seqlens,
                                        const int* seqused, int64_t total) {
    int64_t begin = 0;
    int64_t end = total;
    if (cu_seqlens != nullptr) {
      begin = index == 0 ? 0 : clamp(cu_seqlens[index], 0, total);
      end = index == batch ? total : clamp(cu_seqlens[index + 1], begin, total);
    }
    const int rows = static_cast<int>(end - begin);
    int length = rows;
    if (index == batch) {
      length = 0;
    } else if (seqused != nullptr) {
      length = static_cast<int>(clamp(seqused[index], 0, rows));
    }
    return {begin, rows, length};
  }

 private:
  static NEGINF_HOST_DEVICE int64_t clamp(int64_t value, int64_t low, int64_t high) {
    return value < low ? low : value > high ? high : value;
  }
};

template <typename Real>
NEGINF_HOST_DEVICE Sequence query_sequence(const Problem<Real>& problem, int index) {
  return Sequence::at(index, problem.batch, problem.cu_seqlens_q, problem.seqused_q,
                      problem.total_q);
}

template <typename Real>
NEGINF_HOST_DEVICE Sequence key_sequence(const Problem<Real>& problem, int index) {
  return Sequence::at(index, problem.batch, problem.cu_seqlens_k, problem.seqused_k,
                      problem.total_k);
}

template <typename Real>
NEGINF_HOST_DEVICE Mask mask_of(const Problem<Real>& problem, const Sequence& queries,
                                const Sequence& keys) {
  return {queries.length, keys.length, problem.window_left, problem.window_right};
}

}  // namespace neginf
