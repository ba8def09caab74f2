// The rope tile kernels for AVX2 with FMA and F16C.
#include "rope_tile.hpp"

#if defined(__AVX2__)
#  include "rope_wide.hpp"

namespace rlk::native::rope {
namespace {

using Isa = Wide<8>;
#  include "rope_tile.inl"

}  // namespace

constinit const Kernels kAvx2{rotate_any, split_any};

}  // namespace rlk::native::rope
#else
namespace rlk::native::rope {
constinit const Kernels kAvx2{};
}  // namespace rlk::native::rope
#endif
