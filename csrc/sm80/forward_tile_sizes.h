// Tile sizes of the sm80 kernels, with the measurements that chose them: H200, bf16, 16k tokens,
// hidden 2048, TFLOP/s at 2k / 4k / 16k, "spills" where ptxas has too few registers (sm_90).
//
//   head_dim  rows x keys  warps  full             causal
//   64        128 x 128    4      326 / 342 / 356  263 / 302 / 339
//   64        128 x 96     4      299 / 323 / 342  246 / 287 / 327
//   64        192 x 64     4      299 / 318 / 348  230 / 266 / 315
//   64        128 x 64     4      292 / 308 / 319  237 / 271 / 305
//   64        128 x 64     4      307 / 316 / 315  247 / 272 / 290  3 CTAs of 168 registers; spills
//   96        128 x 64     4      336 / 350 / 363  277 / 309 / 341
//   96        128 x 96     4      331 / 358 / 375  269 / 308 / 352  spills
//   128       128 x 48     4      356 / 372 / 386  289 / 320 / 356
//   128       128 x 64     4      352 / 366 / 377  288 / 317 / 347  spills
//   128       128 x 32     4      335 / 348 / 354  265 / 293 / 323
//   192       64 x 96      4      304 / 322 / 329  265 / 283 / 333
//   192       64 x 64      4      302 / 310 / 311  255 / 276 / 315
//   192       128 x 64     8      275 / 285 / 299  232 / 254 / 301
//   256       64 x 64      4      310 / 318 / 325  266 / 287 / 331
//   256       64 x 32      4      261 / 272 / 280  230 / 244 / 283
//   256       128 x 64     8      308 / 318 / 326  246 / 266 / 287
//   256       128 x 32     8      254 / 260 / 266  207 / 222 / 237
//
//   with softcap and ALiBi inside
//   64        128 x 64     4      288 / 302 / 314  235 / 266 / 300
//   64        192 x 64     4      292 / 308 / 332  218 / 249 / 299  spills
//   128       128 x 32     4      336 / 351 / 361  263 / 295 / 332
//   128       128 x 64     4      352 / 364 / 369  278 / 311 / 344  spills
//   128       128 x 64     8      254 / 263 / 271  214 / 237 / 274
//   128       64 x 64      4      281 / 294 / 303  243 / 269 / 304
//
// A warp with 32 rows reads each K and V fragment half as often as one with 16; from head_dim 192
// on its accumulators leave no room for that. Two CTAs on a multiprocessor beat one of twice the
// size: one multiplies while the other waits at a barrier. All fit the 99 KB of shared memory that
// a block has on sm86, sm89 and sm120, so nothing is chosen at run time. (Where a multiprocessor
// has less than twice the 96 KB of head_dim 192 and 256, as on sm80, only one of these CTAs runs at
// a time.)
#pragma once

#include "../common/split_heuristic.h"

namespace neginf::sm80 {

template <int kBlockM_, int kBlockN_, int kWarps_, int kBlocksPerSm_>
struct TileSizes {
  static constexpr int kBlockM = kBlockM_;  // query rows
  static constexpr int kBlockN = kBlockN_;  // keys
  static constexpr int kWarps = kWarps_;
  static constexpr int kBlocksPerSm = kBlocksPerSm_;  // that registers must allow
};

template <int kHeadDim, bool kModifiesScores>
struct ForwardTile;

template <bool kModifiesScores>
struct ForwardTile<64, kModifiesScores> : TileSizes<128, 128, 4, 2> {};
template <>
struct ForwardTile<64, true> : TileSizes<128, 64, 4, 2> {};

template <bool kModifiesScores>
struct ForwardTile<96, kModifiesScores> : TileSizes<128, 64, 4, 2> {};

template <bool kModifiesScores>
struct ForwardTile<128, kModifiesScores> : TileSizes<128, 48, 4, 2> {};
template <>
struct ForwardTile<128, true> : TileSizes<128, 32, 4, 2> {};

template <bool kModifiesScores>
struct ForwardTile<192, kModifiesScores> : TileSizes<64, 96, 4, 2> {};
template <>
struct ForwardTile<192, true> : TileSizes<64, 64, 4, 2> {};

template <bool kModifiesScores>
struct ForwardTile<256, kModifiesScores> : TileSizes<64, 64, 4, 2> {};

template <int kHeadDim>
constexpr BlockSizes forward_block(bool modifies_scores) {
  using Plain = ForwardTile<kHeadDim, false>;
  using Modifying = ForwardTile<kHeadDim, true>;
  return modifies_scores
             ? BlockSizes{Modifying::kBlockM, Modifying::kBlockN, Modifying::kBlocksPerSm}
             : BlockSizes{Plain::kBlockM, Plain::kBlockN, Plain::kBlocksPerSm};
}

}  // namespace neginf::sm80
