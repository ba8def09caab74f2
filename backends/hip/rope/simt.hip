// The rope kernels for AMD GPUs.
#include "simt/rope/device.hpp"

namespace rlk::hip {

simt::RopeLaunchers rope_portable();
simt::RopeLaunchers rope_portable() { return simt::rope_kernel::launchers(); }

}  // namespace rlk::hip
