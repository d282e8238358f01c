// Which (position, query head) pairs share a tile of query rows.
//
// Usually a tile is kBlockM positions of one head. When the sequences are so short that at least
// half of it would be empty, and several query heads read the same keys, a tile takes `heads` of
// them: its row p is position p / heads of head p % heads. Rows from positions * heads on are
// unused. A group of more heads than a tile has rows is shared by head_tiles tiles.
#pragma once

#include "../lse.h"

namespace neginf {

struct QueryPacking {
  int heads;       // query heads side by side in a tile, 1: not packed
  int positions;   // of the sequence in a tile
  int head_tiles;  // tiles across the query heads of one key head
  int reciprocal;  // 2^16 / heads, rounded up

  // seqlen_q may be a hint: whatever it is, the tiles cover every row.
  static NEGINF_HOST_DEVICE QueryPacking of(int64_t seqlen_q, int num_heads, int num_heads_k,
                                            int block_m) {
    const int group = num_heads / num_heads_k;
    if (seqlen_q > block_m / 2) return {1, block_m, group, 1 << 16};
    return of_group(group, block_m);
  }

  // As many of the query heads of one key head as a tile holds.
  static NEGINF_HOST_DEVICE QueryPacking of_group(int group, int block_m) {
    const int head_tiles = (group + block_m - 1) / block_m;
    const int heads = (group + head_tiles - 1) / head_tiles;
    return {heads, block_m / heads, head_tiles, 65535 / heads + 1};
  }

  // Of row p of a tile. The product with the reciprocal is exact while p and heads are below 256,
  // and cheaper than a division inside the loop over keys.
  NEGINF_HOST_DEVICE int position_of(int p) const { return p * reciprocal >> 16; }
};

}  // namespace neginf
