#include "forward.cuh"

namespace neginf::sm80 {
namespace {

const RegisterForward<bfloat16_t, 256> bfloat16(Arch::sm80, DType::bfloat16, 256);
const RegisterForward<half_t, 256> float16(Arch::sm80, DType::float16, 256);

}  // namespace
}  // namespace neginf::sm80
