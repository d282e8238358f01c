#include "backward.cuh"

namespace neginf::sm90 {
namespace {

const RegisterBackward<bfloat16_t, 192> bfloat16(Arch::sm90, DType::bfloat16, 192);
const RegisterBackward<half_t, 192> float16(Arch::sm90, DType::float16, 192);

}  // namespace
}  // namespace neginf::sm90
