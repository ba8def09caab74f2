// The portable KDA kernels for AMD GPUs.
#include "simt/kda/device.hpp"

namespace rlk::hip {

kda::Launchers kda_portable();
kda::Launchers kda_portable() { return kda::kernels::launchers(); }

}  // namespace rlk::hip
