// The rope tile kernels for AVX-512 (F, BW, VL, DQ).
#include "native/rope/tile.hpp"

#if defined(__AVX512F__)
#  include "native/rope/wide.hpp"

namespace rlk::native::rope {
namespace {

using Isa = Wide<16>;
#  include "native/rope/tile.inl"

}  // namespace

constinit const Kernels kAvx512{rotate_any, split_any};

}  // namespace rlk::native::rope
#else
namespace rlk::native::rope {
constinit const Kernels kAvx512{};
}  // namespace rlk::native::rope
#endif
