// What a CTA of a GPU backward works on: a tile of keys, the rows that see any of them, and its
// turn to add to their dQ.
#pragma once

#include "backward_rows.h"
#include "row_tile.h"

namespace neginf {

// What a CTA works on. In shared memory, as in the forward.
struct KeyWork {
  RowTile keys;
  int head_k;
  int group;  // query heads per key head
  Sequence queries;
  Mask mask;
  Range visible_keys;    // of the sequence; others may hold NaN
  Range rows_with_keys;  // of the sequence; what others hold must not enter a product
  Range row_tiles;       // tiles with a row that sees one of the keys
  int start_tile;        // the one to begin with; after the last comes the first
  Range unmasked_tiles;  // tiles of which every row sees every key
  int first_tile;        // of the sequence, in BackwardRows

  // In the one-dimensional grid key tiles run fastest, so that neighbours share Q and dO in L2.
  // When each dQ is summed in order, the last tile of keys adds first: with a causal mask that is
  // the one that reaches a tile of rows first. `work` counts so that nobody waits for higher work.
  // By one thread, into shared memory: each value as soon as it is known, and what follows from it
  // reads it there. Who has 24 registers cannot hold all of them.
  __device__ __forceinline__ void find(const BackwardParams<float>& params,
                                       const BackwardRows& rows, int block_n, int work) {
    const auto forget = [] { asm volatile("" ::: "memory"); };
    const Problem<float>& problem = params.problem;
    const Problem<float> key_problem = keys_as_rows(problem);
    const int tiles = static_cast<int>(num_row_tiles(key_problem, block_n));
    int head = work / tiles;
    int tile = work - head * tiles;
    if (params.deterministic) {
      put_last_tiles_first(params, tiles, work, head, tile);
    } else if (problem.window_right >= 0) {
      put_long_tiles_first(params, tiles, work, head, tile);
    }
    head_k = head;
    group = problem.num_heads / problem.num_heads_k;
    forget();
    keys = find_row_tile(key_problem, block_n, tile);
    forget();
    queries = query_sequence(problem, keys.index);
    mask = mask_of(problem, queries, keys.sequence);
    forget();
    visible_keys = mask.visible_keys();
    rows_with_keys = mask.rows_of_keys({0, keys.sequence.length});
    forget();
    const int block_m = rows.tile_rows;
    row_tiles = tiles_covering(mask.rows_of_keys(keys.rows(block_n)), block_m);
    start_tile = row_tiles.begin;
    // Who begins elsewhere finds no dQ that another one is just storing for the first time.
    if (rows.first_stores) spread_starts(params);
    forget();
    // Rows past the end of the sequence are padding and do not count.
    const Range common = mask.rows_common_to_keys(keys.rows(block_n));
    const int common_end = common.end == queries.length ? common.end + block_m - 1 : common.end;
    unmasked_tiles = {(common.begin + block_m - 1) / block_m, common_end / block_m};
    forget();
    first_tile = first_row_tile(problem, block_m, keys.index);
  }

  // Lets tiles of keys that have the same rows begin with different ones, so that few add to the
  // same dQ at a time. When each dQ is summed in order, they follow each other anyhow.
  __device__ __forceinline__ void spread_starts(const BackwardParams<float>& params) {
    if (params.deterministic || params.problem.window_right >= 0) return;
    start_tile +=
        static_cast<int>(int64_t{row_tiles.size()} * keys.first_row / max(1, keys.sequence.rows));
  }

 private:
  // In order, the key tiles of a head add to a tile of dQ one behind the other, and keep that
  // distance from then on. So that a CTA which has ended a tile of keys goes on with one that is as
  // far behind, as many heads are worked on together as there are multiprocessors for all of their
  // tiles. With more heads, fewer CTAs share what they read.
  static __device__ void put_last_tiles_first(const BackwardParams<float>& params, int tiles,
                                              int work, int& head_k, int& tile) {
    const Problem<float>& problem = params.problem;
    // Packed sequences have different lengths and are not told apart.
    const int sequences = problem.cu_seqlens_k == nullptr ? problem.batch : 1;
    const int tiles_each = tiles / sequences;
    const int all = problem.num_heads_k * sequences;
    const int together = max(1, min(all, params.num_sms / tiles_each));
    const int first = work / (together * tiles_each) * together;
    const int members = min(together, all - first);
    const int number = work - first * tiles_each;
    const int sequence = first + number % members;
    head_k = sequence / sequences;
    tile = (sequence % sequences + 1) * tiles_each - 1 - number / members;
  }

  // With a causal mask the first tile of keys is the longest. Sequence by sequence that would leave
  // a few long ones to the end, when most multiprocessors are idle. So what runs last, a few CTAs
  // for each multiprocessor, is sorted: tile 0 of all sequences and heads among it, then tile 1...
  static __device__ void put_long_tiles_first(const BackwardParams<float>& params, int tiles,
                                              int work, int& head_k, int& tile) {
    constexpr int kSortedPerSm = 4;
    const Problem<float>& problem = params.problem;
    // Packed sequences have different lengths and are not told apart.
    const int sequences = problem.cu_seqlens_k == nullptr ? problem.batch : 1;
    const int tiles_each = tiles / sequences;
    const int all = problem.num_heads_k * sequences;
    const int sorted = min(all, (kSortedPerSm * params.num_sms + tiles_each - 1) / tiles_each);
    const int number = work - (all - sorted) * tiles_each;
    if (number < 0) return;
    const int sequence = all - sorted + number % sorted;
    head_k = sequence / sequences;
    tile = number / sorted + sequence % sequences * tiles_each;
  }
};

// One iteration: a tile of rows of one head.
struct RowStep {
  int head;
  int tile;  // in the sequence

  static __device__ RowStep first(const KeyWork& work) {
    return {work.head_k * work.group, work.start_tile};
  }
  __device__ bool is_first(const KeyWork& work) const {
    return tile == work.start_tile && head == work.head_k * work.group;
  }
  __device__ bool is_last(const KeyWork& work) const {
    return next_tile(work) == work.start_tile && head + 1 == (work.head_k + 1) * work.group;
  }

  // Row tiles of one head, then of the next one in the group.
  __device__ void advance(const KeyWork& work) {
    tile = next_tile(work);
    if (tile == work.start_tile) ++head;
  }

  // In BackwardRows.
  __device__ int number(const BackwardRows& rows, const KeyWork& work) const {
    return head * rows.num_tiles + work.first_tile + tile;
  }

 private:
  __device__ int next_tile(const KeyWork& work) const {
    return tile + 1 == work.row_tiles.end ? work.row_tiles.begin : tile + 1;
  }
};

__device__ __forceinline__ int load_acquire(const int* from) {
  int value;
  asm volatile("ld.global.acquire.gpu.b32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// If key tiles add to dQ of some rows one after the other, the last one first: how many come
// before.
__device__ __forceinline__ int order_of_adding(const KeyWork& work, const Range& rows,
                                               int block_n) {
  const Range tiles = tiles_covering(work.mask.keys_of_rows(rows), block_n);
  return tiles.end - 1 - work.keys.first_row / block_n;
}

}  // namespace neginf
