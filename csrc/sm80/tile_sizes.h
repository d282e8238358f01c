// Tile sizes of the sm80 kernels, with the measurement that chose each: H200, bf16, 16k tokens,
// hidden 2048, 4k keys, full, TFLOP/s.
//
//   head_dim  warps  plain            with softcap and ALiBi inside
//   64        8      not measured     125
//   64        4      253              spills
//   128       8      259              198
//   128       4      spills           spills
//
// A warp with 32 rows reads each K and V fragment half as often as one with 16; where it would
// spill, it has 16. Shared memory fits the 99 KB of sm86, sm89 and sm120.
#pragma once

namespace neginf::sm80 {

template <int kHeadDim, bool kModifiesScores>
struct ForwardTile;

template <bool kModifiesScores>
struct ForwardTile<64, kModifiesScores> {
  static constexpr int kBlockM = 128;  // query rows
  static constexpr int kBlockN = 64;   // keys
  static constexpr int kWarps = kModifiesScores ? 8 : 4;
};

template <bool kModifiesScores>
struct ForwardTile<128, kModifiesScores> {
  static constexpr int kBlockM = 128;
  static constexpr int kBlockN = 64;
  static constexpr int kWarps = 8;
};

}  // namespace neginf::sm80
