#include "backward.cuh"

namespace neginf::sm80 {
namespace {

const RegisterBackward<bfloat16_t, 128> bfloat16(Arch::sm80, DType::bfloat16, 128);
const RegisterBackward<half_t, 128> float16(Arch::sm80, DType::float16, 128);

}  // namespace
}  // namespace neginf::sm80
