// Whether a loaded certificate covers an implementation here and now.
#pragma once

#include "rlk/tensor.hpp"
#include "src/backend.hpp"

namespace rlk {

// Accepted, or what the loaded certificates lack: the implementation and dtype, this build, this device or
// the sizes of this call.
rlk_verdict evidence_verdict(const rlk_op_schema& op, const rlk_slot* slots,
                             const rlk_implementation& implementation, const Backend& backend,
                             const rlk_device& device, DType dtype);

}  // namespace rlk
