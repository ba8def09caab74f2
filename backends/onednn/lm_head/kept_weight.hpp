// The op this backend adds: a weight's owner says that its bytes stay as they are, and oneDNN keeps it
// packed.
//
//   lm_head_weight(weight, version=1)                 packs it, unless this version is packed already
//   lm_head_weight(weight, version=2)                 its bytes have changed: packs it again
//   lm_head_weight(weight, action="drop")             forgets it; do this before freeing the memory
//
// The handle is the weight itself: address, shape, stride and dtype.
#pragma once

#include "rlk/tensor.hpp"

namespace rlk::onednn {

struct [[gnu::may_alias]] LmHeadWeight {
  static constexpr const char* kName = "lm_head_weight";
  In weight{};
  std::int64_t action = 0;  // keep, drop
  std::int64_t version = 0;
};
static_assert(sizeof(LmHeadWeight) == 3 * sizeof(rlk_slot));

extern const rlk_op_schema lm_head_weight_schema;
extern const rlk_implementation lm_head_weight_pack;

}  // namespace rlk::onednn
