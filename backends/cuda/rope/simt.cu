// The rope kernels for NVIDIA GPUs.
#include "simt/rope/device.hpp"

namespace rlk::cuda {

simt::RopeLaunchers rope_portable();
simt::RopeLaunchers rope_portable() { return simt::rope_kernel::launchers(); }

}  // namespace rlk::cuda
