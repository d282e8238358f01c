// What happens to a score between q.k and exp, besides the mask. One formula for all back-ends:
//     s = softcap(q.k * softmax_scale) - alibi_slope * |i + seqlen_k - seqlen_q - j|
// Masking comes last, so that a key the row does not see weighs exactly 0 whatever the softcap.
#pragma once

#include "../lse.h"

namespace neginf {

// `offset` is Mask::offset(): the distance is measured from the bottom-right diagonal.
template <typename Real>
NEGINF_HOST_DEVICE Real alibi_bias(Real slope, int row, int key, int offset) {
  const int distance = row + offset - key;
  return -slope * static_cast<Real>(distance < 0 ? -distance : distance);
}

}  // namespace neginf
