// The sizes of sm80's decode kernel where there is more shared memory.
#pragma once

#include "../sm80/decode_tile_sizes.h"

namespace neginf::sm90 {

template <int kHeadDim>
struct DecodeTile : sm80::DecodeTile<kHeadDim> {
  static constexpr int kStagesBesideQueries = 3;
  static constexpr int kBlocksPerSm = 2;
  static constexpr int kSharedBytes = 227 * 1024;
};

}  // namespace neginf::sm90
