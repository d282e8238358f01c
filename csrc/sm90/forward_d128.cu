#include "forward.cuh"

namespace neginf::sm90 {
namespace {

const RegisterForward<bfloat16_t, 128> bfloat16(Arch::sm90, DType::bfloat16, 128);
const RegisterForward<half_t, 128> float16(Arch::sm90, DType::float16, 128);

}  // namespace
}  // namespace neginf::sm90
