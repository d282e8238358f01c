// Where the keys of a sequence lie in a cache. The only reader of its tables: on the GPU nobody has
// checked them, so lengths are clamped to what there is room for, and a slot in an entry or page
// that does not exist holds no key.
#pragma once

#include "sequence.h"

namespace neginf {

// Row `row` of entry `entry` of the cache.
struct CacheRow {
  bool exists;
  int entry;
  int row;
};

// The keys of one sequence: key 0 is in slot first_row, which is counted within the sequence.
class CachedSequence {
 public:
  CachedSequence() = default;

  // With no key yet. `entry` is where its slots are, unless a page table says so.
  NEGINF_HOST_DEVICE CachedSequence(int index, int entry) : index_(index), entry_(entry) {}

  // index == batch: the rows that belong to no sequence, which have no keys.
  template <typename Real>
  static NEGINF_HOST_DEVICE CachedSequence of(const KeyCache& cache, const Problem<Real>& problem,
                                              int index) {
    if (index == problem.batch) return {};
    const int slots = problem.seqused_k != nullptr
                          ? clamped(problem.seqused_k[index], cache.capacity)
                          : cache.capacity;
    const int leftpad = cache.leftpad != nullptr ? clamped(cache.leftpad[index], slots) : 0;
    const int entry = cache.cache_batch_idx != nullptr ? cache.cache_batch_idx[index] : index;
    return CachedSequence({leftpad, slots - leftpad, slots - leftpad}, index, entry);
  }

  // What CacheRow of a slot is made of: an entry that nobody has checked. On its own, so that a
  // kernel can ask for it long before it uses it.
  NEGINF_HOST_DEVICE int entry_of(const KeyCache& cache, int slot) const {
    return cache.page_table == nullptr
               ? entry_
               : cache.page_table[index_ * cache.page_table_stride + slot / cache.entry_rows];
  }
  static NEGINF_HOST_DEVICE CacheRow row_of(const KeyCache& cache, int entry, int slot) {
    const int row = cache.page_table == nullptr ? slot : slot % cache.entry_rows;
    return {0 <= entry && entry < cache.num_entries, entry, row};
  }

  NEGINF_HOST_DEVICE CacheRow row_of_slot(const KeyCache& cache, int slot) const {
    return row_of(cache, entry_of(cache, slot), slot);
  }
  NEGINF_HOST_DEVICE CacheRow row(const KeyCache& cache, int key) const {
    return row_of_slot(cache, static_cast<int>(keys.first_row) + key);
  }

  Sequence keys{};

 private:
  NEGINF_HOST_DEVICE CachedSequence(const Sequence& keys, int index, int entry)
      : keys(keys), index_(index), entry_(entry) {}

  static NEGINF_HOST_DEVICE int clamped(int value, int most) {
    return value < 0 ? 0 : value < most ? value : most;
  }

  int index_ = 0;
  int entry_ = 0;
};

}  // namespace neginf
