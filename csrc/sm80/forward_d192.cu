#include "forward.cuh"

namespace neginf::sm80 {
namespace {

const RegisterForward<bfloat16_t, 192> bfloat16(Arch::sm80, DType::bfloat16, 192);
const RegisterForward<half_t, 192> float16(Arch::sm80, DType::float16, 192);

}  // namespace
}  // namespace neginf::sm80
