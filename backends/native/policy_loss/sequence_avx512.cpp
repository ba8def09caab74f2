#include "native/policy_loss/sequence.hpp"

namespace rlk::native::policy_loss {
#if defined(__AVX512F__)
constinit const Engine kAvx512 = engine<simt::Float16, 16>();
#else
constinit const Engine kAvx512 = engine<float, 1>();
#endif
}  // namespace rlk::native::policy_loss
