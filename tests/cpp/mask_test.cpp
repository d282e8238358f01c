// mask.h against brute force over all small problems, and at the ends of its number range.
#include "mask.h"

#include <vector>

#include "check.h"

namespace {

using namespace neginf;

// The definition, word for word, in a type that cannot overflow.
bool brute_sees(const Mask& mask, long row, long key) {
  if (row < 0 || row >= mask.seqlen_q || key < 0 || key >= mask.seqlen_k) return false;
  const long diagonal = row + static_cast<long>(mask.seqlen_k) - mask.seqlen_q;
  if (mask.window_left >= 0 && key < diagonal - mask.window_left) return false;
  if (mask.window_right >= 0 && key > diagonal + mask.window_right) return false;
  return true;
}

void check_same_set(Range got, const std::vector<bool>& expected) {
  CHECK(got.begin <= got.end);
  CHECK(got.size() == 0 || (got.begin >= 0 && got.end <= static_cast<int>(expected.size())));
  bool same = true;
  for (int i = 0; i < static_cast<int>(expected.size()); ++i) {
    same = same && got.contains(i) == expected[i];
  }
  CHECK(same);
}

void check_rows(const Mask& mask, Range rows) {
  std::vector<bool> any(mask.seqlen_k, false);
  std::vector<bool> all(mask.seqlen_k, true);
  bool has_row = false;
  for (int row = rows.begin; row < rows.end; ++row) {
    if (row >= mask.seqlen_q) continue;  // padding of the last tile
    has_row = true;
    for (int key = 0; key < mask.seqlen_k; ++key) {
      any[key] = any[key] || brute_sees(mask, row, key);
      all[key] = all[key] && brute_sees(mask, row, key);
    }
  }
  if (!has_row) all.assign(mask.seqlen_k, false);
  check_same_set(mask.keys_of_rows(rows), any);
  check_same_set(mask.keys_common_to_rows(rows), all);
}

void check_keys(const Mask& mask, Range keys) {
  std::vector<bool> any(mask.seqlen_q, false);
  std::vector<bool> all(mask.seqlen_q, true);
  for (int row = 0; row < mask.seqlen_q; ++row) {
    for (int key = keys.begin; key < keys.end; ++key) {
      any[row] = any[row] || brute_sees(mask, row, key);
      all[row] = all[row] && brute_sees(mask, row, key);
    }
  }
  check_same_set(mask.rows_of_keys(keys), any);
  if (!keys.empty()) check_same_set(mask.rows_common_to_keys(keys), all);
}

void check_mask(const Mask& mask) {
  CHECK(mask.offset() == mask.seqlen_k - mask.seqlen_q);
  std::vector<bool> visible(mask.seqlen_k, false);
  for (int row = -1; row <= mask.seqlen_q; ++row) {
    std::vector<bool> seen(mask.seqlen_k, false);
    for (int key = -1; key <= mask.seqlen_k; ++key) {
      const bool sees = brute_sees(mask, row, key);
      CHECK(mask.sees(row, key) == sees);
      if (sees) seen[key] = visible[key] = true;
    }
    check_same_set(mask.keys_of_row(row), seen);
  }
  check_same_set(mask.visible_keys(), visible);
  for (int begin = 0; begin <= mask.seqlen_q; ++begin) {
    for (int end = begin; end <= mask.seqlen_q + 2; ++end) check_rows(mask, {begin, end});
  }
  for (int begin = 0; begin <= mask.seqlen_k; ++begin) {
    for (int end = begin; end <= mask.seqlen_k + 2; ++end) check_keys(mask, {begin, end});
  }
}

void test_every_small_mask() {
  for (int seqlen_q = 0; seqlen_q <= 5; ++seqlen_q) {
    for (int seqlen_k = 0; seqlen_k <= 6; ++seqlen_k) {
      for (int left = -1; left <= 7; ++left) {
        for (int right = -1; right <= 7; ++right) {
          check_mask({seqlen_q, seqlen_k, left, right});
        }
      }
    }
  }
}

void test_tiles_covering() {
  for (int tile = 1; tile <= 5; ++tile) {
    for (int begin = 0; begin <= 11; ++begin) {
      for (int end = begin; end <= 11; ++end) {
        std::vector<bool> expected(12, false);
        for (int i = begin; i < end; ++i) expected[i / tile] = true;
        check_same_set(tiles_covering({begin, end}, tile), expected);
      }
    }
  }
}

void test_shares_cover_and_are_disjoint() {
  for (int begin = 0; begin <= 3; ++begin) {
    for (int size = 0; size <= 12; ++size) {
      for (int num_splits = 1; num_splits <= 16; ++num_splits) {
        std::vector<int> owners(begin + size + 1, 0);
        const int most = (size + num_splits - 1) / num_splits;
        for (int split = 0; split < num_splits; ++split) {
          const Range share = share_of({begin, begin + size}, split, num_splits);
          CHECK(share.begin <= share.end);
          CHECK(share.size() <= most);
          for (int i = share.begin; i < share.end; ++i) {
            CHECK(begin <= i && i < begin + size);
            ++owners[i];
          }
        }
        for (int i = begin; i < begin + size; ++i) CHECK(owners[i] == 1);
      }
    }
  }
}

void test_intersect() {
  CHECK(intersect({0, 5}, {3, 9}).size() == 2);
  CHECK(intersect({0, 5}, {3, 9}).begin == 3);
  CHECK(intersect({0, 3}, {5, 9}).empty());
  CHECK(intersect({5, 9}, {0, 3}).size() == 0);
  CHECK(intersect({0, 3}, {3, 9}).empty());
}

// Built with -fsanitize=undefined: an overflow ends the program.
void test_number_range() {
  const int most = kMaxSeqlen - 1;
  for (const int seqlen_q : {0, 1, most}) {
    for (const int seqlen_k : {0, 1, most}) {
      for (const int left : {-1, 0, 1, most}) {
        for (const int right : {-1, 0, 1, most}) {
          const Mask mask{seqlen_q, seqlen_k, left, right};
          for (const int row : {0, 1, seqlen_q / 2, seqlen_q - 1, seqlen_q}) {
            const Range keys = mask.keys_of_row(row);
            for (const long key : {0L, 1L, seqlen_k / 2L, seqlen_k - 1L, long{seqlen_k}}) {
              CHECK(keys.contains(static_cast<int>(key)) == brute_sees(mask, row, key));
              CHECK(mask.sees(row, static_cast<int>(key)) == brute_sees(mask, row, key));
            }
          }
          const Range keys = mask.keys_of_rows({0, most});
          CHECK(keys.begin == mask.visible_keys().begin && keys.end == mask.visible_keys().end);
          CHECK(mask.keys_common_to_rows({0, most}).size() <= keys.size());
          for (const Range range : {Range{0, 1}, Range{seqlen_k / 2, seqlen_k}, Range{0, most}}) {
            const Range rows = mask.rows_of_keys(range);
            for (const long row : {0L, seqlen_q / 2L, seqlen_q - 1L}) {
              const Range seen = intersect(mask.keys_of_row(static_cast<int>(row)), range);
              CHECK(rows.contains(static_cast<int>(row)) == !seen.empty());
              if (!range.empty()) {
                const Range common = mask.rows_common_to_keys(range);
                CHECK(common.contains(static_cast<int>(row)) == (seen.size() == range.size()));
              }
            }
          }
          for (const int tile : {1, 64, 256}) {
            CHECK(tiles_covering(keys, tile).end <= most / tile + 1);
          }
          for (const int num_splits : {1, 7, 256}) {
            long covered = 0;
            for (int split = 0; split < num_splits; ++split) {
              covered += share_of(keys, split, num_splits).size();
            }
            CHECK(covered == keys.size());
          }
        }
      }
    }
  }
}

}  // namespace

int main() {
  test_every_small_mask();
  test_tiles_covering();
  test_shares_cover_and_are_disjoint();
  test_intersect();
  test_number_range();
  return report();
}
