#include "decode.cuh"

namespace neginf::sm80 {
namespace {

using Tile = DecodeTile<128>;
const RegisterDecode<cutlass::bfloat16_t, Tile> bfloat16(Arch::sm80, DType::bfloat16, 128);
const RegisterDecode<cutlass::half_t, Tile> float16(Arch::sm80, DType::float16, 128);

}  // namespace
}  // namespace neginf::sm80
