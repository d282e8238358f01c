#include "backward.cuh"

namespace neginf::sm90 {
namespace {

const RegisterBackward<bfloat16_t, 64> bfloat16(Arch::sm90, DType::bfloat16, 64);
const RegisterBackward<half_t, 64> float16(Arch::sm90, DType::float16, 64);

}  // namespace
}  // namespace neginf::sm90
