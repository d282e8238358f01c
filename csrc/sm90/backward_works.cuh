// The works of a CTA of the sm90 backward, as everyone but the claimer and the loader goes through
// them.
#pragma once

#include "../common/backward_work.cuh"
#include "wgmma.cuh"

namespace neginf::sm90 {

// body(work, turn) for all works, one after the other. By whole warps.
template <class SharedStorage, class Body>
__device__ __forceinline__ void for_each_work(SharedStorage& shared, const Body& body) {
  for (int turn = 0;; ++turn) {
    shared.work_ring.wait_full(turn);
    const int slot = shared.work_ring.stage(turn);
    if (uniform(shared.is_end[slot]) != 0) return;
    body(shared.work[slot], turn);
    shared.work_ring.release_by_thread(turn);
  }
}

// body(step) for all row tiles of a work.
template <class Body>
__device__ __forceinline__ void for_each_step(const KeyWork& work, const Body& body) {
  RowStep step = RowStep::first(work);
  for (int left = work.row_tiles.size() * work.group; left > 0; --left) {
    body(step);
    step.advance(work);
  }
}

}  // namespace neginf::sm90
