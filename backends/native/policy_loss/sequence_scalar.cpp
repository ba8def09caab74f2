#include "native/policy_loss/sequence.hpp"

namespace rlk::native::policy_loss {
constinit const Engine kScalar = engine<float, 1>();
}  // namespace rlk::native::policy_loss
