#include "../sm80/decode.cuh"
#include "decode_copies.cuh"
#include "decode_tile_sizes.h"

namespace neginf::sm90 {
namespace {

using Tile = DecodeTile<128>;
const sm80::RegisterDecode<cutlass::bfloat16_t, Tile, SliceCopies> bfloat16(Arch::sm90,
                                                                            DType::bfloat16, 128);
const sm80::RegisterDecode<cutlass::half_t, Tile, SliceCopies> float16(Arch::sm90, DType::float16,
                                                                       128);

}  // namespace
}  // namespace neginf::sm90
