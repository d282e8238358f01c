// Which key tiles a CTA works on, and in which order.
#pragma once

#include "../mask.h"

namespace neginf {

// The key tiles of one CTA in the order they are visited: first those that need no mask, then the
// others, by starting at the first of the former and wrapping around.
struct KeyTiles {
  Range tiles;
  Range unmasked;  // lies within `tiles` also when it is empty

  static NEGINF_HOST_DEVICE KeyTiles of(const Mask& mask, Range rows, int block_n, int split,
                                        int num_splits) {
    const Range all = tiles_covering(mask.keys_of_rows(rows), block_n);
    return within(num_splits == 1 ? all : share_of(all, split, num_splits), mask, rows, block_n);
  }

  // Those that some of the rows see, which may need no mask where others do.
  NEGINF_HOST_DEVICE KeyTiles of_rows(const Mask& mask, Range rows, int block_n) const {
    return within(intersect(tiles, tiles_covering(mask.keys_of_rows(rows), block_n)), mask, rows,
                  block_n);
  }

  // They are walked through with nothing but the number of the tile: kNone when there is none left.
  static constexpr int kNone = -1;
  NEGINF_HOST_DEVICE int first() const { return tiles.empty() ? kNone : unmasked.begin; }
  NEGINF_HOST_DEVICE int after(int tile) const {
    const int next = tile + 1 < tiles.end ? tile + 1 : tiles.begin;
    return next == unmasked.begin ? kNone : next;
  }

 private:
  static NEGINF_HOST_DEVICE KeyTiles within(Range tiles, const Mask& mask, Range rows,
                                            int block_n) {
    const Range common = mask.keys_common_to_rows(rows);
    return {tiles,
            intersect(tiles, {(common.begin + block_n - 1) / block_n, common.end / block_n})};
  }
};

}  // namespace neginf
