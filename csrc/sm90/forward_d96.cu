#include "forward.cuh"

namespace neginf::sm90 {
namespace {

const RegisterForward<bfloat16_t, 96> bfloat16(Arch::sm90, DType::bfloat16, 96);
const RegisterForward<half_t, 96> float16(Arch::sm90, DType::float16, 96);

}  // namespace
}  // namespace neginf::sm90
