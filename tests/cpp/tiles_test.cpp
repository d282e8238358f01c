// common/row_tile.h, common/query_packing.h and common/key_tiles.h: what CTAs work on covers every
// row of every head, and every key that a row sees, exactly once.
#include <climits>
#include <random>
#include <vector>

#include "check.h"
#include "common/key_tiles.h"
#include "common/query_packing.h"
#include "common/row_tile.h"

namespace {

using namespace neginf;

constexpr int kTileSize = 16;

std::vector<int> rows_written(const Problem<float>& problem) {
  const int buffers = problem.cu_seqlens_q != nullptr ? 1 : problem.batch;
  std::vector<int> written(buffers * problem.total_q, 0);
  for (int64_t t = 0; t < num_row_tiles(problem, kTileSize); ++t) {
    const RowTile tile = find_row_tile(problem, kTileSize, static_cast<int>(t));
    const Sequence& sequence = tile.sequence;
    const int64_t buffer = problem.cu_seqlens_q != nullptr ? 0 : tile.index * problem.total_q;
    CHECK(0 <= tile.index && tile.index <= problem.batch);
    CHECK(tile.first_row >= 0);
    for (int row = tile.first_row; row < tile.first_row + kTileSize && row < sequence.rows; ++row) {
      const int64_t at = buffer + sequence.first_row + row;
      const bool inside = 0 <= at && at < static_cast<int64_t>(written.size());
      CHECK(inside);
      if (inside) ++written[at];
    }
  }
  return written;
}

void check_once(const Problem<float>& problem) {
  for (const int times : rows_written(problem)) CHECK(times == 1);
}

void test_dense_rows() {
  for (int batch = 0; batch <= 3; ++batch) {
    for (int rows = 0; rows <= 3 * kTileSize + 1; ++rows) {
      Problem<float> problem{};
      problem.batch = batch;
      problem.total_q = rows;
      check_once(problem);
    }
  }
}

void test_packed_rows() {
  std::mt19937 random(0);
  for (int trial = 0; trial < 2000; ++trial) {
    std::vector<int> cu_seqlens = {0};
    const int batch = random() % 9;
    for (int b = 0; b < batch; ++b) {
      const int length = random() % 3 == 0 ? 0 : random() % (3 * kTileSize);
      cu_seqlens.push_back(cu_seqlens.back() + length);
    }
    Problem<float> problem{};
    problem.batch = batch;
    problem.cu_seqlens_q = cu_seqlens.data();
    problem.total_q = cu_seqlens.back() + random() % (2 * kTileSize);
    check_once(problem);
  }
}

// Nobody promises which rows are written then, only that all of them lie in the buffer.
void test_garbage_stays_in_the_buffer() {
  const std::vector<int> values = {INT_MIN, -1, 0, 7, 40, 41, INT_MAX};
  for (const int a : values) {
    for (const int b : values) {
      for (const int c : values) {
        const std::vector<int> cu_seqlens = {a, b, c};
        Problem<float> problem{};
        problem.batch = 2;
        problem.cu_seqlens_q = cu_seqlens.data();
        problem.total_q = 40;
        rows_written(problem);
      }
    }
  }
}

// Parts of the rows: no key that they see is missed, and no tile is taken for unmasked wrongly.
void check_tiles_of_rows(const Mask& mask, const KeyTiles& tiles, Range rows, int block_n) {
  const int part = rows.size() / 3;
  for (int begin = rows.begin; begin < rows.end; begin += part + 1) {
    const KeyTiles mine = tiles.of_rows(mask, {begin, begin + part + 1}, block_n);
    CHECK(tiles.tiles.begin <= mine.tiles.begin && mine.tiles.end <= tiles.tiles.end);
    for (int tile = tiles.tiles.begin; tile < tiles.tiles.end; ++tile) {
      for (int key = tile * block_n; key < (tile + 1) * block_n; ++key) {
        for (int row = begin; row < begin + part + 1 && row < mask.seqlen_q; ++row) {
          CHECK(!mask.sees(row, key) || mine.tiles.contains(tile));
          CHECK(!mine.unmasked.contains(tile) || mask.sees(row, key));
        }
      }
    }
  }
}

void test_key_tiles() {
  std::mt19937 random(0);
  const int block_n = 8;
  for (int trial = 0; trial < 20000; ++trial) {
    const int seqlen_q = random() % 40, seqlen_k = random() % 60;
    const Mask mask{seqlen_q, seqlen_k, static_cast<int>(random() % 30) - 1,
                    static_cast<int>(random() % 30) - 1};
    const int first_row = random() % 48;
    const Range rows{first_row, first_row + kTileSize};
    const int num_splits = 1 + random() % 5;
    std::vector<int> visits(seqlen_k / block_n + 1, 0);
    for (int split = 0; split < num_splits; ++split) {
      const KeyTiles tiles = KeyTiles::of(mask, rows, block_n, split, num_splits);
      int visited = 0;
      for (int tile = tiles.first(); tile != KeyTiles::kNone; tile = tiles.after(tile)) {
        CHECK(tiles.tiles.contains(tile));
        // The kernels take every tile after the first masked one for masked.
        CHECK(tiles.unmasked.contains(tile) == (visited < tiles.unmasked.size()));
        if (++visited > tiles.tiles.size()) break;
        ++visits[tile];
        for (int key = tile * block_n; key < (tile + 1) * block_n; ++key) {
          for (int row = rows.begin; row < rows.end && row < seqlen_q; ++row) {
            CHECK(!tiles.unmasked.contains(tile) || mask.sees(row, key));
          }
        }
      }
      check_tiles_of_rows(mask, tiles, rows, block_n);
    }
    for (int key = 0; key < seqlen_k; ++key) {
      bool seen = false;
      for (int row = rows.begin; row < rows.end; ++row) seen = seen || mask.sees(row, key);
      CHECK(visits[key / block_n] <= 1);
      CHECK(!seen || visits[key / block_n] == 1);
    }
  }
}

// Every (position, query head) pair of a sequence is in exactly one row of one tile.
void test_query_packing() {
  for (const int block_m : {64, 128, 192}) {
    for (const int group : {1, 2, 3, 5, 8, 20, 63, 64, 65, 127, 128, 129, 130, 192, 193, 500}) {
      for (int positions = 0; positions <= block_m; ++positions) {
        const auto packing = QueryPacking::of(positions, 2 * group, 2, block_m);
        CHECK(packing.heads * packing.positions <= block_m);
        CHECK(packing.heads == 1 || positions <= block_m / 2);
        std::vector<int> rows(positions * group, 0);
        for (int first = 0; first < positions; first += packing.positions) {
          for (int head_tile = 0; head_tile < packing.head_tiles; ++head_tile) {
            for (int p = 0; p < packing.heads * packing.positions; ++p) {
              CHECK(packing.position_of(p) == p / packing.heads);
              const int position = first + packing.position_of(p);
              const int head = head_tile * packing.heads + p % packing.heads;
              if (position < positions && head < group) ++rows[position * group + head];
            }
          }
        }
        for (const int times : rows) CHECK(times == 1);
        for (int p = packing.heads * packing.positions; p < block_m; ++p) {
          CHECK(packing.position_of(p) >= packing.positions);
        }
      }
    }
  }
}

}  // namespace

int main() {
  test_dense_rows();
  test_packed_rows();
  test_garbage_stays_in_the_buffer();
  test_key_tiles();
  test_query_packing();
  return report();
}
