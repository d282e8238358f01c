// What a CTA of a GPU forward works on: a tile of query rows and its share of the keys.
#pragma once

#include "key_tiles.h"
#include "query_packing.h"
#include "row_tile.h"

namespace neginf {

// Into how many tiles the query rows and heads of a problem are cut.
struct ForwardGrid {
  QueryPacking packing;
  int row_tiles;
  int head_tiles;
  int group;  // query heads per key head

  static ForwardGrid of(const Problem<float>& problem, int block_m) {
    const auto packing =
        QueryPacking::of(problem.seqlen_q, problem.num_heads, problem.num_heads_k, block_m);
    return {packing, static_cast<int>(num_row_tiles(problem, packing.positions)),
            problem.num_heads_k * packing.head_tiles, problem.num_heads / problem.num_heads_k};
  }
};

// The query heads of a tile.
struct HeadTile {
  int head;   // of row 0
  int heads;  // <= packing.heads
  int head_k;

  static NEGINF_HOST_DEVICE HeadTile of(const ForwardGrid& grid, int head_tile) {
    const QueryPacking& packing = grid.packing;
    const int head_k = packing.head_tiles == 1 ? head_tile : head_tile / packing.head_tiles;
    const int head_in_group = (head_tile - head_k * packing.head_tiles) * packing.heads;
    const int heads_left = grid.group - head_in_group;
    return {head_k * grid.group + head_in_group,
            heads_left < packing.heads ? heads_left : packing.heads, head_k};
  }
};

// Row p of a tile that has `heads` heads, counted from row 0.
struct RowInTile {
  bool exists;
  int position;
  int head;

  static __device__ RowInTile of(const QueryPacking& packing, int heads, int p) {
    const int position = packing.position_of(p);
    const int head = p - position * packing.heads;
    const bool exists = (position < packing.positions) & (head < heads);
    return {exists, position, head};
  }
};

struct ForwardWork {
  RowTile tile;  // its rows are positions of the sequence
  QueryPacking packing;
  int head;   // of row 0
  int heads;  // in this tile, <= packing.heads
  int head_k;
  int split;
  Sequence keys;
  Mask mask;  // of the query rows and `keys`
  KeyTiles key_tiles;

  template <int kBlockM, int kBlockN>
  static __device__ ForwardWork of(const Problem<float>& problem, const ForwardGrid& grid,
                                   int row_tile, int head_tile, int split, int num_splits) {
    const QueryPacking& packing = grid.packing;
    // A constant tile size makes shifts of divisions.
    const RowTile tile = packing.heads == 1 ? find_row_tile(problem, kBlockM, row_tile)
                                            : find_row_tile(problem, packing.positions, row_tile);
    const HeadTile heads = HeadTile::of(grid, head_tile);
    // Key 0 is the first one that any row sees: masks are aligned to the last key, so that dropping
    // keys in front changes nothing.
    Sequence keys = key_sequence(problem, tile.index);
    const int unseen = mask_of(problem, tile.sequence, keys).visible_keys().begin;
    keys = {keys.first_row + unseen, keys.rows - unseen, keys.length - unseen};
    const Mask mask = mask_of(problem, tile.sequence, keys);
    return {tile,
            packing,
            heads.head,
            heads.heads,
            heads.head_k,
            split,
            keys,
            mask,
            KeyTiles::of(mask, tile.rows(packing.positions), kBlockN, split, num_splits)};
  }

  // Row p of the tile. Where it does not exist, it belongs to nobody or to another tile.
  struct Row {
    bool exists;
    int position;  // in the sequence
    int head;
  };
  __device__ Row row(int p) const {
    const RowInTile row = RowInTile::of(packing, heads, p);
    return {row.exists, tile.first_row + row.position, head + row.head};
  }

  // Of a row in q, or in a tensor with the same rows and heads.
  __device__ int64_t offset(const Row& row, const Strides& strides) const {
    return tile.index * strides.batch + row.head * strides.head +
           (tile.sequence.first_row + row.position) * strides.row;
  }
};

}  // namespace neginf
