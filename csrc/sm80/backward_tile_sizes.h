#pragma once

namespace neginf::sm80 {

template <int kHeadDim>
struct BackwardTile;

template <>
struct BackwardTile<64> {
  static constexpr int kBlockM = 64;
  static constexpr int kBlockN = 128;
  static constexpr int kWarps = 4;
  static constexpr int kScoreWarpsKeys = 4;
  static constexpr int kKeyGradWarpsKeys = 4;
  static constexpr int kQueryGradWarpsRows = 2;
  static constexpr int kStagesDout = 2;
};

template <>
struct BackwardTile<128> {
  static constexpr int kBlockM = 64;
  static constexpr int kBlockN = 64;
  static constexpr int kWarps = 4;
  static constexpr int kScoreWarpsKeys = 2;
  static constexpr int kKeyGradWarpsKeys = 2;
  static constexpr int kQueryGradWarpsRows = 2;
  static constexpr int kStagesDout = 1;
};

}  // namespace neginf::sm80
