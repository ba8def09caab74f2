#include "native/attention/block.hpp"

namespace rlk::native::attn {
constinit const Engine kScalar = engine<float, 1>();
}  // namespace rlk::native::attn
