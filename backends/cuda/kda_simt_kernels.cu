// The portable KDA kernels for CUDA.
#include "simt/kda_device.hpp"

namespace rlk::cuda {

kda::Launchers kda_portable();
kda::Launchers kda_portable() { return kda::kernels::launchers(); }

}  // namespace rlk::cuda
