#include "backward.cuh"

namespace neginf::sm90 {
namespace {

const RegisterBackward<bfloat16_t, 256> bfloat16(Arch::sm90, DType::bfloat16, 256);
const RegisterBackward<half_t, 256> float16(Arch::sm90, DType::float16, 256);

}  // namespace
}  // namespace neginf::sm90
