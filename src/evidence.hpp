// Whether a loaded certificate covers an implementation here and now.
#pragma once

#include "rlk/tensor.hpp"
#include "src/backend.hpp"

namespace rlk {

bool evidence_covers(const rlk_implementation& implementation, Backend& backend, const rlk_device& device,
                     DType dtype);

}  // namespace rlk
