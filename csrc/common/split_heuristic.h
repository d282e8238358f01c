// How many ways to split the keys when the caller asks for num_splits = 0.
#pragma once

namespace neginf {

// Into what a forward kernel cuts its problem.
struct BlockSizes {
  int queries;
  int keys;
  int per_sm;  // CTAs at a time
};

// `tiles` is the number of thread blocks without splitting, `key_tiles` how many key tiles each of
// them walks through, `num_slots` how many blocks the GPU runs at a time. Splitting pays only while
// slots stand idle: the partial states cost a round trip through memory and a combine. Takes the
// fewest splits whose last wave is at least 85 % as full as the fullest one reachable.
inline int automatic_num_splits(long long tiles, int key_tiles, int num_slots, int max_splits) {
  if (num_slots == 0 || tiles == 0 || tiles * 5 >= num_slots * 4LL) return 1;
  const int limit = key_tiles < max_splits ? key_tiles : max_splits;
  const auto fill = [&](int splits) {
    const long long blocks = tiles * splits;
    const long long waves = (blocks + num_slots - 1) / num_slots;
    return static_cast<double>(blocks) / static_cast<double>(waves * num_slots);
  };
  double best = 0;
  for (int splits = 1; splits <= limit; ++splits) best = fill(splits) > best ? fill(splits) : best;
  for (int splits = 1; splits <= limit; ++splits) {
    if (fill(splits) >= 0.85 * best) return splits;
  }
  return 1;
}

}  // namespace neginf
