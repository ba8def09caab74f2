// The portable KDA kernels for CUDA.
#include "simt/kda/device.hpp"

namespace rlk::cuda {

rlk::kda::Launchers kda_portable();
rlk::kda::Launchers kda_portable() { return rlk::kda::kernels::launchers(); }

}  // namespace rlk::cuda
