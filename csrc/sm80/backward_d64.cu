#include "backward.cuh"

namespace neginf::sm80 {
namespace {

const RegisterBackward<bfloat16_t, 64> bfloat16(Arch::sm80, DType::bfloat16, 64);
const RegisterBackward<half_t, 64> float16(Arch::sm80, DType::float16, 64);

}  // namespace
}  // namespace neginf::sm80
