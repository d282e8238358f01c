#include "forward.cuh"

namespace neginf::sm80 {
namespace {

const RegisterForward<bfloat16_t, 96> bfloat16(Arch::sm80, DType::bfloat16, 96);
const RegisterForward<half_t, 96> float16(Arch::sm80, DType::float16, 96);

}  // namespace
}  // namespace neginf::sm80
