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
      tile = tiles - 1 - tile;
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
    forget();
    // Rows past the end of the sequence are padding and do not count.
    const Range common = mask.rows_common_to_keys(keys.rows(block_n));
    const int common_end = common.end == queries.length ? common.end + block_m - 1 : common.end;
    unmasked_tiles = {(common.begin + block_m - 1) / block_m, common_end / block_m};
    forget();
    first_tile = first_row_tile(problem, block_m, keys.index);
  }

 private:
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
    return {work.head_k * work.group, work.row_tiles.begin};
  }
  __device__ bool is_first(const KeyWork& work) const {
    return tile == work.row_tiles.begin && head == work.head_k * work.group;
  }
  __device__ bool is_last(const KeyWork& work) const {
    return tile + 1 == work.row_tiles.end && head + 1 == (work.head_k + 1) * work.group;
  }

  // Row tiles of one head, then of the next one in the group.
  __device__ void advance(const KeyWork& work) {
    if (++tile == work.row_tiles.end) {
      tile = work.row_tiles.begin;
      ++head;
    }
  }

  // In BackwardRows.
  __device__ int number(const BackwardRows& rows, const KeyWork& work) const {
    return head * rows.num_tiles + work.first_tile + tile;
  }
};

// Lets key tiles add to a tile of dQ one after the other, the last one first.
struct OrderedAdds {
  int* adds;  // null: in any order
  int turn;

  static __device__ OrderedAdds of(const BackwardParams<float>& params, const BackwardRows& rows,
                                   const KeyWork& work, const RowStep& step, int block_n) {
    if (!params.deterministic) return {nullptr, 0};
    const int first_row = step.tile * rows.tile_rows;
    const Range tiles =
        tiles_covering(work.mask.keys_of_rows({first_row, first_row + rows.tile_rows}), block_n);
    return {rows.adds + step.number(rows, work), tiles.end - 1 - work.keys.first_row / block_n};
  }

  // By one thread, if there is an order.
  __device__ void wait_for_turn() const {
    int done;
    do {
      asm volatile("ld.global.acquire.gpu.b32 %0, [%1];" : "=r"(done) : "l"(adds) : "memory");
    } while (done != turn);
  }

  // By one thread, if there is an order, after all that add have passed a fence.
  __device__ void pass_on() const {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(adds) : "memory");
  }
};

}  // namespace neginf
