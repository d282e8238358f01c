// common/sequence.h: good input gives the documented rows, garbage never leaves the buffer.
#include "common/sequence.h"

#include <climits>
#include <cstdlib>
#include <vector>

#include "check.h"
#include "common/score.h"

namespace {

using namespace neginf;

void check_equal(Sequence got, int64_t first_row, int rows, int length) {
  CHECK(got.first_row == first_row);
  CHECK(got.rows == rows);
  CHECK(got.length == length);
}

void test_dense() {
  const std::vector<int> used = {4, 0, 7};
  for (int i = 0; i < 3; ++i) {
    check_equal(Sequence::at(i, 3, nullptr, nullptr, 7), 0, 7, 7);
    check_equal(Sequence::at(i, 3, nullptr, used.data(), 7), 0, 7, used[i]);
  }
}

void test_packed() {
  const std::vector<int> cu_seqlens = {0, 3, 3, 8};
  const std::vector<int> used = {2, 0, 5};
  check_equal(Sequence::at(0, 3, cu_seqlens.data(), nullptr, 10), 0, 3, 3);
  check_equal(Sequence::at(1, 3, cu_seqlens.data(), nullptr, 10), 3, 0, 0);
  check_equal(Sequence::at(2, 3, cu_seqlens.data(), nullptr, 10), 3, 5, 5);
  check_equal(Sequence::at(0, 3, cu_seqlens.data(), used.data(), 10), 0, 3, 2);
  check_equal(Sequence::at(2, 3, cu_seqlens.data(), used.data(), 10), 3, 5, 5);
  // Rows of no sequence; seqused has no entry for them.
  check_equal(Sequence::at(3, 3, cu_seqlens.data(), used.data(), 10), 8, 2, 0);
  const std::vector<int> no_sequence = {0};
  check_equal(Sequence::at(0, 0, no_sequence.data(), nullptr, 10), 0, 10, 0);
}

void test_garbage_is_clamped() {
  const int64_t total = 10;
  const std::vector<int> values = {INT_MIN, -1, 0, 4, 10, 11, INT_MAX};
  for (const int a : values) {
    for (const int b : values) {
      for (const int c : values) {
        for (const int used : values) {
          const std::vector<int> cu_seqlens = {a, b, c};
          const std::vector<int> seqused = {used, used};
          std::vector<bool> owned(total, false);
          for (int index = 0; index <= 2; ++index) {
            const Sequence sequence =
                Sequence::at(index, 2, cu_seqlens.data(), seqused.data(), total);
            CHECK(0 <= sequence.first_row && sequence.first_row + sequence.rows <= total);
            CHECK(0 <= sequence.length && sequence.length <= sequence.rows);
            CHECK(index < 2 || sequence.length == 0);
            for (int row = 0; row < sequence.rows; ++row) owned[sequence.first_row + row] = true;
          }
          for (const bool is_owned : owned) CHECK(is_owned);  // so that every row is written
          const Sequence dense = Sequence::at(1, 2, nullptr, seqused.data(), total);
          CHECK(dense.first_row == 0 && dense.rows == total);
          CHECK(0 <= dense.length && dense.length <= total);
        }
      }
    }
  }
}

void test_mask_of_problem() {
  const std::vector<int> cu_seqlens_q = {0, 2, 6};
  const std::vector<int> cu_seqlens_k = {0, 0, 9};
  const std::vector<int> seqused_k = {0, 5};
  Problem<float> problem{};
  problem.batch = 2;
  problem.total_q = 7;
  problem.total_k = 9;
  problem.cu_seqlens_q = cu_seqlens_q.data();
  problem.cu_seqlens_k = cu_seqlens_k.data();
  problem.seqused_k = seqused_k.data();
  problem.window_left = 3;
  problem.window_right = 0;
  const Sequence queries = query_sequence(problem, 1);
  const Sequence keys = key_sequence(problem, 1);
  check_equal(queries, 2, 4, 4);
  check_equal(keys, 0, 9, 5);
  const Mask mask = mask_of(problem, queries, keys);
  CHECK(mask.seqlen_q == 4 && mask.seqlen_k == 5);
  CHECK(mask.window_left == 3 && mask.window_right == 0);
}

void test_alibi() {
  const int offset = 3;
  for (int row = 0; row < 4; ++row) {
    for (int key = 0; key < 8; ++key) {
      CHECK(alibi_bias(0.5, row, key, offset) == -0.5 * std::abs(row + offset - key));
    }
  }
  CHECK(alibi_bias(0.25f, 0, 3, 3) == 0);
}

}  // namespace

int main() {
  test_dense();
  test_packed();
  test_garbage_is_clamped();
  test_mask_of_problem();
  test_alibi();
  return report();
}
