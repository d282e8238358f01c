// sm90/tile_order.h: CTAs that stay and CTAs that make room work on every tile exactly once.
#include "sm90/tile_order.h"

#include <random>
#include <vector>

#include "check.h"

namespace {

using namespace neginf::sm90;

void check_once(const TileOrder& order, int num_sms) {
  std::vector<int> times(order.tiles(), 0);
  const int ctas = order.ctas(num_sms);
  for (int cta = 0; cta < ctas; ++cta) {
    int own = 0;
    for_each_tile(order, cta, ctas, [&](int first, int size, int tile) {
      CHECK(first % order.group_size == 0 && first + size <= order.instances);
      CHECK(0 <= tile && tile < size * order.row_tiles);
      ++times.at(first * order.row_tiles + tile);
      ++own;
    });
    CHECK(own > 0 || order.tiles_per_cta == 0);
    CHECK(own <= order.tiles_per_cta || order.tiles_per_cta == 0);
  }
  for (const int count : times) CHECK(count == 1);
}

void test_every_tile_once() {
  std::mt19937 random(0);
  for (int trial = 0; trial < 2000; ++trial) {
    const int instances = 1 + random() % 40;
    const TileOrder order{static_cast<int>(1 + random() % 20), instances,
                          static_cast<int>(1 + random() % instances),
                          static_cast<int>(random() % 8)};
    check_once(order, 1 + random() % 50);
  }
}

void test_packed_sequences_share_out_all_tiles() {
  std::mt19937 random(0);
  for (int trial = 0; trial < 20000; ++trial) {
    const int batch = random() % (trial % 3 == 0 ? 2000 : 20);
    const int64_t rows = trial % 7 == 0 ? 0 : random() % (trial % 2 == 0 ? 2000000 : 5000);
    const int tile_size = 1 + random() % 192;
    const int tiles = static_cast<int>(rows / tile_size) + batch + 1;
    const auto packed = PackedTiles::of(tiles, batch, rows, tile_size);
    CHECK(packed.first(0) == 0 && packed.first(packed.sequences) == tiles);
    for (int sequence = 0; sequence < packed.sequences; ++sequence) {
      const int size = packed.first(sequence + 1) - packed.first(sequence);
      CHECK(0 <= size && size <= packed.most());
    }
  }
  // 8 whole tiles each, and the unused one.
  const auto equal = PackedTiles::of(145, 16, 16384, 128);
  CHECK(equal.first(1) == 9 && equal.first(16) == 144 && equal.most() == 9);
}

void test_ctas_stay_where_runs_would_be_short_or_few() {
  CHECK(choose_tiles_per_cta(2048, 16, true, 132) == 0);
  CHECK(choose_tiles_per_cta(500, 1000, true, 132) == 0);
  CHECK(choose_tiles_per_cta(0, 0, true, 132) == 0);
}

void test_runs_are_long_many_and_leave_no_more_idle() {
  const auto turns = [](int64_t tiles, int64_t run) {
    return ((tiles + run - 1) / run + 131) / 132 * run;
  };
  int chosen = 0;
  for (int64_t tiles = 1; tiles < 20000; tiles += 37) {
    for (const int64_t key_tiles : {0, 1, 5, 32, 93, 128, 300}) {
      for (const bool equal : {false, true}) {
        const int run = choose_tiles_per_cta(tiles, key_tiles, equal, 132);
        if (run == 0) continue;
        ++chosen;
        CHECK(run * key_tiles >= kKeyTilesPerRun || key_tiles == 0);
        CHECK((tiles + run - 1) / run >= 132 * kRunsPerSm);
        if (equal) CHECK(turns(tiles, run) <= turns(tiles, 1));
      }
    }
  }
  CHECK(chosen > 500);
}

}  // namespace

int main() {
  test_every_tile_once();
  test_packed_sequences_share_out_all_tiles();
  test_ctas_stay_where_runs_would_be_short_or_few();
  test_runs_are_long_many_and_leave_no_more_idle();
  return report();
}
