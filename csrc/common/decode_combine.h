// The states of tiles whose keys several workers share, and their merge.
#pragma once

#include "decode_plan.h"

namespace neginf {

// Device memory: a slot holds the state of one split of a tile.
struct DecodeSlots {
  int rows;  // of a tile
  int head_dim_v;
  float* out;  // (slots, rows, head_dim_v)
  Lse* lse;    // (slots, rows)

  static DecodeSlots allocate(const DecodeParams<float>& params, const DecodeGrid& grid, int rows);

  NEGINF_HOST_DEVICE float* out_of(int slot) const {
    return out + int64_t{slot} * rows * head_dim_v;
  }
  NEGINF_HOST_DEVICE Lse* lse_of(int slot) const { return lse + int64_t{slot} * rows; }
};

// Merges the states of every tile that has more than one. `dtype` is that of out.
void combine_decode(const DecodeParams<float>& params, const DecodeGrid& grid,
                    const DecodeSlots& slots, DType dtype);

}  // namespace neginf
