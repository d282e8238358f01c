// Which tiles of a forward a CTA works on, and in which order.
//
// An instance is one head (or pack of heads) of one sequence and split; its row tiles share K and
// V. Instances come in groups, one group after the other; number t of a group is the t-th of its
// tiles (schedule.h). CTAs either stay or make room:
//
//   stay         as many CTAs as multiprocessors. Of a group with n CTAs, CTA c has tiles c,
//                2n - 1 - c, 2n + c, ...: where lengths fall steadily the sums come out even. When
//                the last row of these runs forward, the CTAs after it are behind by a tile, and
//                the next group begins with them. The next tile begins while the last one ends.
//   make room    CTA c has the c-th run of tiles_per_cta tiles. A multiprocessor takes the next CTA
//                when it is free.
//
// What is dealt beforehand waits for a multiprocessor that another kernel holds: if a transfer of
// NCCL holds some as the forward begins, CTAs that stay begin there when the transfer has ended,
// with a full share of the work. And a transfer that comes second waits for all of the forward, and
// holds multiprocessors of the other rank in the meantime. CTAs that make room are balanced by the
// hardware, which lets kernels of a higher priority in between them. The price is the start of a
// CTA, with nothing to compute until the first keys are there, so a run must be long.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../lse.h"

namespace neginf::sm90 {

struct TileOrder {
  int row_tiles;  // of an instance
  int instances;
  int group_size;     // in instances
  int tiles_per_cta;  // 0: CTAs stay

  NEGINF_HOST_DEVICE int tiles() const { return row_tiles * instances; }

  int ctas(int num_sms) const {
    return tiles_per_cta == 0 ? std::min(tiles(), num_sms)
                              : (tiles() + tiles_per_cta - 1) / tiles_per_cta;
  }
};

// The row tiles of packed sequences (row_tile.h), cut as if all were equally long. Their lengths
// are the GPU's to know; but this is only the order in which tiles come, and every tile does.
struct PackedTiles {
  int tiles;      // of all sequences
  int sequences;  // one more, for what is left over
  int64_t each;   // so many of a sequence, and one more; times 2^16

  static PackedTiles of(int tiles, int batch, int64_t rows, int tile_size) {
    return {tiles, batch + 1, batch == 0 ? 0 : (rows << 16) / tile_size / batch};
  }

  // The last sequence ends with the last tile.
  NEGINF_HOST_DEVICE int first(int sequence) const {
    return sequence == sequences ? tiles : sequence + static_cast<int>(sequence * each >> 16);
  }
  // No sequence has more.
  int most() const {
    return std::max(static_cast<int>((each + 0xffff) >> 16) + 1, tiles - first(sequences - 1));
  }
};

// So many key tiles in a run that the start of a CTA, as long as about two of them, is less than
// one percent.
constexpr int kKeyTilesPerRun = 256;
// So many runs for each multiprocessor that what the last ones leave idle is little.
constexpr int kRunsPerSm = 4;

// For `tiles` tiles of about `key_tiles` each. With `equal` ones a run must not leave more of the
// multiprocessors idle at the end than single tiles would.
inline int choose_tiles_per_cta(int64_t tiles, int64_t key_tiles, bool equal, int num_sms) {
  const auto turns = [&](int64_t run) {
    const int64_t runs = (tiles + run - 1) / run;
    return (runs + num_sms - 1) / num_sms * run;
  };
  const int64_t shortest = (kKeyTilesPerRun - 1) / std::max<int64_t>(key_tiles, 1) + 1;
  for (int64_t run = shortest; run * num_sms * kRunsPerSm <= tiles; ++run) {
    if (!equal || turns(run) <= turns(1)) return static_cast<int>(run);
  }
  return 0;
}

// Calls body(first, size, tile) for the tiles of CTA number `block` of `blocks`: number `tile` of
// the group that begins with instance `first` and has `size` of them.
template <class Body>
NEGINF_HOST_DEVICE void for_each_tile(const TileOrder& order, int block, int blocks,
                                      const Body& body) {
  // A run is all that a single CTA has between these.
  const int run = order.tiles_per_cta;
  const int begin = block * run;
  const int all = order.tiles();
  const int end = run == 0 || begin + run > all ? all : begin + run;
  const int ctas = run == 0 ? blocks : 1;
  int cta = run == 0 ? block : 0;  // counted from where the group begins
  const int first_group = begin / (order.group_size * order.row_tiles);
  for (int first = first_group * order.group_size; first * order.row_tiles < end;
       first += order.group_size) {
    const int before = first * order.row_tiles;
    const int left = order.instances - first;
    const int size = left < order.group_size ? left : order.group_size;
    const int tiles = size * order.row_tiles < end - before ? size * order.row_tiles : end - before;
    bool forward = true;
    int turn = begin > before ? begin - before : 0;
    for (; turn < tiles; turn += ctas, forward = !forward) {
      const int tile = turn + (forward ? cta : ctas - 1 - cta);
      if (tile < tiles) body(first, size, tile);
    }
    if (!forward) {
      cta -= tiles - (turn - ctas);
      if (cta < 0) cta += ctas;
    }
  }
}

}  // namespace neginf::sm90
