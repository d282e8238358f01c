// Which key tiles a CTA works on, and in which order.
#pragma once

#include "../mask.h"

namespace neginf {

// The key tiles of one CTA in the order they are visited: first those that need no mask, then the
// others, by starting at the first of the former and wrapping around.
struct KeyTiles {
  Range tiles;
  Range unmasked;

  static NEGINF_HOST_DEVICE KeyTiles of(const Mask& mask, Range rows, int block_n, int split,
                                        int num_splits) {
    const Range tiles =
        share_of(tiles_covering(mask.keys_of_rows(rows), block_n), split, num_splits);
    const Range common = mask.keys_common_to_rows(rows);
    const Range unmasked =
        intersect(tiles, {(common.begin + block_n - 1) / block_n, common.end / block_n});
    return {tiles, unmasked};
  }

  NEGINF_HOST_DEVICE int size() const { return tiles.size(); }

  // The tile of iteration t.
  NEGINF_HOST_DEVICE int at(int t) const {
    const int tile = unmasked.begin + t;
    return tile < tiles.end ? tile : tile - tiles.size();
  }
};

}  // namespace neginf
