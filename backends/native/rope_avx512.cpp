// The rope tile kernels for AVX-512 (F, BW, VL, DQ).
#include "rope_tile.hpp"

#if defined(__AVX512F__)
#  include "rope_wide.hpp"

namespace rlk::native::rope {
namespace {

using Isa = Wide<16>;
#  include "rope_tile.inl"

}  // namespace

constinit const Kernels kAvx512{rotate_any, split_any};

}  // namespace rlk::native::rope
#else
namespace rlk::native::rope {
constinit const Kernels kAvx512{};
}  // namespace rlk::native::rope
#endif
