// Tile sizes of the sm80 kernels, with the measurement that chose each. None is measured yet: these
// fit 255 registers without a spill and the 99 KB of shared memory that sm86, sm89 and sm120 have.
#pragma once

namespace neginf::sm80 {

template <int kHeadDim>
struct ForwardTile {
  static constexpr int kBlockM = 128;  // query rows
  static constexpr int kBlockN = 64;   // keys
  static constexpr int kWarps = 8;
};

}  // namespace neginf::sm80
