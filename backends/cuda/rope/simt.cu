// The rope kernels for NVIDIA GPUs.
#include "simt/rope_device.hpp"

namespace rlk::cuda {

simt::RopeLaunchers rope_portable();
simt::RopeLaunchers rope_portable() { return simt::rope_kernel::launchers(); }

}  // namespace rlk::cuda
