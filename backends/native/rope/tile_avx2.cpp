// The rope tile kernels for AVX2 with FMA and F16C.
#include "native/rope/tile.hpp"

#if defined(__AVX2__)
#  include "native/rope/wide.hpp"

namespace rlk::native::rope {
namespace {

using Isa = Wide<8>;
#  include "native/rope/tile.inl"

}  // namespace

constinit const Kernels kAvx2{rotate_any, split_any};

}  // namespace rlk::native::rope
#else
namespace rlk::native::rope {
constinit const Kernels kAvx2{};
}  // namespace rlk::native::rope
#endif
