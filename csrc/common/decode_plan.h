// How the CTAs of a decode kernel share out the keys of all sequences. Their lengths are known to
// the GPU only.
//
// The keys of a sequence are cut into blocks of block_n, counted from key 0. A tile of query rows
// has the blocks that its sequence sees, and at least one, in which its state is written even if
// there is no key.
//
//   even      All blocks of all tiles in a row, of which each worker takes an equal stretch. Most
//             tiles belong to one worker; those at the ends of a stretch are shared by several.
//             To begin a second tile takes time as well: where it makes stretches hardly longer,
//             all of a tile's stretches are its own.
//   by tile   A worker for each share of each tile, whatever other tiles there are, so that a
//             sequence always gets the same bits.
//
// Of a shared tile each split leaves a state in a slot.
#pragma once

#include <cstring>

#include "forward_work.h"
#include "key_cache.h"

namespace neginf {

// What the host knows of it.
struct DecodeGrid {
  ForwardGrid tiles;
  int log2_block_n;
  int row_tiles_of_sequence;  // 0: the sequences are packed
  int even_workers;           // 0: by tile
  float share_of_worker;      // 1 / even_workers or a little less
  int splits;                 // by tile: the most of a tile
  int blocks_per_split;       // by tile: 0 for `splits` equal shares

  NEGINF_HOST_DEVICE int64_t num_tiles() const {
    return int64_t{tiles.row_tiles} * tiles.head_tiles;
  }
  int64_t num_workers() const { return even_workers > 0 ? even_workers : num_tiles() * splits; }
  // Of an even worker one is for the tile that it begins in, and one for that which it ends in.
  int64_t num_slots() const { return even_workers > 0 ? 2 * int64_t{even_workers} : num_workers(); }
  bool may_split() const { return even_workers > 0 || splits > 1; }
};

// The states of a tile. The first may lie apart from the others, which follow one another.
struct TileSplits {
  int count;  // 1: the tile is not shared
  int first_slot;
  int second_slot;

  NEGINF_HOST_DEVICE int slot(int split) const {
    return split == 0 ? first_slot : second_slot + split - 1;
  }
};

// What one CTA does before it goes on to something else: some blocks of one tile.
struct DecodeSegment {
  int sequence;
  Sequence queries;
  CachedSequence cached;
  int first_row;  // in the sequence
  int head_tile;
  Range blocks;
  int split;
  TileSplits splits;
};

#if defined(__CUDACC__)

// For a warp, whose lanes must call everything together: lane i looks at every 32nd sequence from
// number i on. Until a CTA knows its place it reads nothing, and what it does to find it is one
// chain: each instruction waits for the one before, and its code comes from far away. So there are
// few, and no divisions where a quotient that is one too large does no harm.
class DecodePlan {
 public:
  __device__ __forceinline__ DecodePlan(const DecodeParams<float>& params, const DecodeGrid& grid)
      : params_(params), grid_(grid) {}

  // How much each worker gets. Before anything else.
  __device__ __forceinline__ void divide() {
    if (grid_.even_workers == 0) return;
    int total = 0;
    for_each_chunk([&] { total += mine_.units(); });
    total = sum(total);
    // With more tiles than workers there are not enough of these.
    if (grid_.num_tiles() <= grid_.even_workers && align(total)) return;
    workers_ = min(grid_.even_workers, total);
    if (workers_ == 0) return;
    share_ = quotient(total, workers_);
    longer_ = total - share_ * workers_;
  }

  // From now on next() gives the segments of this worker.
  __device__ __forceinline__ void begin(int worker) {
    worker_ = worker;
    if (worker >= workers_) return;
    unit_ = begin_of(worker);
    end_ = begin_of(worker + 1);
  }

  // Whether there is one more.
  __device__ __forceinline__ bool next(DecodeSegment& segment) {
    if (grid_.even_workers == 0) {
      const bool is_first = unit_++ == 0;
      const int tile = worker_ / grid_.splits;
      return is_first && share_of_tile(tile, worker_ - tile * grid_.splits, segment);
    }
    if (unit_ >= end_) return false;
    segment = of_unit(find(unit_), unit_);
    unit_ += segment_units_;
    return true;
  }

  // Where the states of a tile are, as its first segment. Numbers are those of find_row_tile, so
  // that there need not be such a tile.
  __device__ __forceinline__ bool find_tile(int tile, DecodeSegment& segment) {
    if (grid_.even_workers == 0) return share_of_tile(tile, 0, segment);
    const int row_tile = tile / grid_.tiles.head_tiles;
    const int head_tile = tile - row_tile * grid_.tiles.head_tiles;
    const RowTile rows = find_row_tile(params_.problem, grid_.tiles.packing.positions, row_tile);
    if (rows.first_row >= rows.sequence.rows) return false;
    const Tiles tiles = find_sequence(rows.index);
    const int in_sequence =
        head_tile * tiles.row_tiles + rows.first_row / grid_.tiles.packing.positions;
    const int unit = first_unit_ + in_sequence * tiles.units_of_tile;
    begin(worker_of(unit));
    segment = of_unit(tiles, unit);
    return true;
  }

  // The one shared tile, if any, whose first split a worker has: it ends its stretch.
  __device__ __forceinline__ bool find_tile_begun_by(int worker, DecodeSegment& segment) {
    begin(worker);
    if (unit_ >= end_) return false;
    const Tiles tiles = find(end_ - 1);
    const int in_tile = (end_ - 1 - first_unit_) % tiles.units_of_tile;
    segment = of_unit(tiles, max(unit_, end_ - 1 - in_tile));
    return segment.split == 0;
  }

 private:
  static constexpr unsigned kAllLanes = 0xffffffffu;
  static __device__ int lane() { return static_cast<int>(threadIdx.x & 31); }
  // Of numbers that are not negative: half as many instructions as with a sign.
  static __device__ int quotient(int a, int b) {
    return static_cast<int>(static_cast<unsigned>(a) / static_cast<unsigned>(b));
  }
  static __device__ __forceinline__ int sum(int x) { return __reduce_add_sync(kAllLanes, x); }

  // A sequence as the plan sees it.
  struct Tiles {
    Sequence queries;
    CachedSequence cached;
    int row_tiles;
    int count;  // of rows and heads
    Range blocks;
    int units_of_tile;

    __device__ int units() const { return count * units_of_tile; }

    __device__ __forceinline__ Tiles of_lane(int lane) const {
      Tiles tiles;
      int words[sizeof(Tiles) / sizeof(int)];
      memcpy(words, this, sizeof words);
#pragma unroll
      for (int& word : words) word = __shfl_sync(kAllLanes, word, lane);
      memcpy(&tiles, words, sizeof words);
      return tiles;
    }
  };

  __device__ __forceinline__ Tiles tiles_of(int index) const {
    const Problem<float>& problem = params_.problem;
    const int positions = grid_.tiles.packing.positions;
    const auto cached = CachedSequence::of(params_.cache, problem, index);
    const Sequence queries = query_sequence(problem, index);
    const Range visible = mask_of(problem, queries, cached.keys).visible_keys();
    const int round_up = (1 << grid_.log2_block_n) - 1;
    const Range blocks = visible.empty() ? Range{0, 0}
                                         : Range{visible.begin >> grid_.log2_block_n,
                                                 (visible.end + round_up) >> grid_.log2_block_n};
    const int row_tiles = grid_.row_tiles_of_sequence > 0
                              ? grid_.row_tiles_of_sequence
                              : (queries.rows + positions - 1) / positions;
    return {queries, cached, row_tiles, row_tiles * grid_.tiles.head_tiles, blocks, 0};
  }

  __device__ int num_sequences() const {
    return params_.problem.batch + (params_.problem.cu_seqlens_q != nullptr ? 1 : 0);
  }
  __device__ int num_chunks() const { return (num_sequences() + 31) / 32; }

  __device__ __forceinline__ void look_at(int chunk) {
    if (chunk == chunk_) return;
    chunk_ = chunk;
    const int last = num_sequences() - 1;
    const int index = 32 * chunk + lane();
    mine_ = tiles_of(min(index, last));
    if (index > last) mine_.count = 0;
    mine_.units_of_tile = units_of_tile(blocks_of_unit_, unit_reciprocal_);
  }

  // Calls f with each chunk in its turn, the first one last.
  template <typename F>
  __device__ __forceinline__ void for_each_chunk(const F& f) {
    int chunk = num_chunks() - 1;
#pragma unroll 1
    do {
      look_at(chunk);
      f();
    } while (--chunk >= 0);
  }

  // 1 / x or a little more.
  static __device__ __forceinline__ float reciprocal(int x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(__int2float_rd(x)));
    return __fmul_ru(result, 1.f + 0x1p-22f);
  }

  // Units of a tile of this lane's sequence. One too many, as there may be if it has millions of
  // blocks, is a unit without keys.
  __device__ __forceinline__ int units_of_tile(int blocks_of_unit, float reciprocal) const {
    const int blocks = max(1, mine_.blocks.size());
    return blocks_of_unit == 1
               ? blocks
               : __float2int_rz(__fmul_ru(__int2float_ru(blocks - 1), reciprocal)) + 1;
  }

  // Makes a unit the shortest stretch with which there are workers enough to give each one of a
  // single tile, if it is less than kTries blocks longer than need be, which is about what a second
  // tile costs.
  __device__ __forceinline__ bool align(int total) {
    constexpr int kTries = 4;
    const int shortest = __float2int_ru(__fmul_rd(__int2float_rd(total), grid_.share_of_worker));
    float reciprocals[kTries];
    int needed[kTries] = {};
#pragma unroll
    for (int i = 0; i < kTries; ++i) reciprocals[i] = reciprocal(shortest + i);
    for_each_chunk([&] {
#pragma unroll
      for (int i = 0; i < kTries; ++i) {
        needed[i] += mine_.count * units_of_tile(shortest + i, reciprocals[i]);
      }
    });
#pragma unroll
    for (int i = kTries - 1; i >= 0; --i) {
      needed[i] = sum(needed[i]);
      if (needed[i] > grid_.even_workers) continue;
      blocks_of_unit_ = shortest + i;
      unit_reciprocal_ = reciprocals[i];
      workers_ = needed[i];
    }
    mine_.units_of_tile = units_of_tile(blocks_of_unit_, unit_reciprocal_);
    return workers_ > 0;
  }

  // The first longer_ workers have a unit more than the others.
  __device__ int begin_of(int worker) const { return worker * share_ + min(worker, longer_); }
  __device__ int worker_of(int unit) const {
    if (share_ == 1 && longer_ == 0) return unit;
    const int of_longer = longer_ * (share_ + 1);
    return unit < of_longer ? quotient(unit, share_ + 1)
                            : longer_ + quotient(unit - of_longer, share_);
  }

  // The sequence that a unit belongs to, which comes after those asked for before. Also sets index_
  // and first_unit_.
  __device__ __forceinline__ Tiles find(int unit) {
    while (true) {
      const int mine = mine_.units();
      int through = mine;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int lower = __shfl_up_sync(kAllLanes, through, distance);
        if (lane() >= distance) through += lower;
      }
      const unsigned past = __ballot_sync(kAllLanes, units_before_ + through > unit);
      if (past != 0) {
        const int found = __ffs(static_cast<int>(past)) - 1;
        index_ = 32 * chunk_ + found;
        first_unit_ = units_before_ + __shfl_sync(kAllLanes, through - mine, found);
        return mine_.of_lane(found);
      }
      units_before_ += __shfl_sync(kAllLanes, through, 31);
      look_at(chunk_ + 1);
    }
  }

  __device__ __forceinline__ Tiles find_sequence(int index) {
    int before = 0;
    while (true) {
      if (32 * chunk_ + lane() < index) before += mine_.units();
      if (index < 32 * chunk_ + 32) break;
      look_at(chunk_ + 1);
    }
    index_ = index;
    first_unit_ = sum(before);
    return mine_.of_lane(index % 32);
  }

  // From a unit of sequence index_ on.
  __device__ __forceinline__ DecodeSegment of_unit(const Tiles& tiles, int unit) {
    const int size = tiles.units_of_tile;
    const int in_sequence = unit - first_unit_;
    const int tile = quotient(in_sequence, size);
    const int first = in_sequence - tile * size;
    segment_units_ = min(size - first, end_ - unit);
    const int head_tile = tiles.row_tiles == 1 ? tile : quotient(tile, tiles.row_tiles);
    const int row_tile = tile - head_tile * tiles.row_tiles;
    const int first_worker = first == 0 ? worker_ : worker_of(unit - first);
    const int last_worker = worker_of(unit - first + size - 1);
    // The state of a tile that begins inside its first worker's stretch is the second of that one.
    const bool begins_inside = unit - first > begin_of(first_worker);
    return {
        index_,
        tiles.queries,
        tiles.cached,
        row_tile * grid_.tiles.packing.positions,
        head_tile,
        intersect(tiles.blocks, {tiles.blocks.begin + first * blocks_of_unit_,
                                 tiles.blocks.begin + (first + segment_units_) * blocks_of_unit_}),
        worker_ - first_worker,
        {last_worker - first_worker + 1, first_worker + (begins_inside ? grid_.even_workers : 0),
         first_worker + 1}};
  }

  // By tile. Whether there is that share.
  __device__ __forceinline__ bool share_of_tile(int tile, int split, DecodeSegment& segment) const {
    const int row_tile = tile / grid_.tiles.head_tiles;
    const RowTile rows = find_row_tile(params_.problem, grid_.tiles.packing.positions, row_tile);
    if (rows.first_row >= rows.sequence.rows) return false;
    const Tiles tiles = tiles_of(rows.index);
    const Range blocks = tiles.blocks;
    const int share = grid_.blocks_per_split > 0
                          ? grid_.blocks_per_split
                          : max(1, (blocks.size() + grid_.splits - 1) / grid_.splits);
    // Shares of a given size are counted from key 0, so that those of a growing sequence stay.
    const int origin = grid_.blocks_per_split > 0 ? blocks.begin / share * share : blocks.begin;
    const int count = blocks.empty() ? 1 : (blocks.end - origin + share - 1) / share;
    segment = {rows.index,
               tiles.queries,
               tiles.cached,
               rows.first_row,
               tile - row_tile * grid_.tiles.head_tiles,
               intersect(blocks, {origin + split * share, origin + (split + 1) * share}),
               split,
               {count, tile * grid_.splits, tile * grid_.splits + 1}};
    return split < count;
  }

  const DecodeParams<float>& params_;
  const DecodeGrid& grid_;
  int worker_ = 0;
  int unit_ = 0;
  // Even:
  int end_ = 0;
  int blocks_of_unit_ = 1;
  float unit_reciprocal_ = 1.f;
  int workers_ = 0;
  int share_ = 1;
  int longer_ = 0;
  int chunk_ = -1;
  Tiles mine_{};          // sequence 32 * chunk_ + lane()
  int units_before_ = 0;  // those of the chunk
  int index_ = 0;
  int first_unit_ = 0;  // of sequence index_
  int segment_units_ = 0;
};

#endif

}  // namespace neginf
