// What every call is held to before anyone is asked to run it: the schema's tables, its infer function,
// overlaps.
#pragma once

#include "rlk/plugin.h"
#include "rlk/status.hpp"

namespace rlk {

enum class CheckData { yes, no };  // no: shapes only, for explain and infer; written arguments may be absent

// The slots of a question about shapes: what arguments in CPU memory hold may be imaginary, so their data are
// null. No other data may be read by a schema's infer or an implementation's supports. Lives on the stack of
// whoever asks; the slots must not outlive it.
class ShapesOnly {
 public:
  ShapesOnly(const rlk_op_schema& op, const rlk_slot* slots);
  // What results look like is asked of the read arguments alone, whichever results are there already.
  void without_results(const rlk_op_schema& op);
  const rlk_slot* slots() const noexcept { return slots_; }

 private:
  rlk_slot slots_[RLK_MAX_SLOTS];
  DLTensor hosts_[RLK_MAX_SLOTS];
};

// device: of the call, found from its arguments.
Status check_call(const rlk_op_schema& op, const rlk_slot* slots, CheckData data, DLDevice& device);

// Written ranges against read and written ones.
Status check_overlap(const rlk_op_schema& op, const rlk_slot* slots);

// Rank, sizes and strides of a tensor that no op's schema describes; `who` begins the message.
Status check_view(const DLTensor& tensor, std::string_view who);

// Runs infer after the checks of the read arguments.
Status infer_shapes(const rlk_op_schema& op, const rlk_slot* slots, rlk_shape* shapes);

// "cpu", "cuda", "hip"
const char* device_name(int32_t type) noexcept;
std::string shape_text(const DLTensor& t);
std::string dtype_set_text(uint32_t set);

// May the two arguments be the very same bytes? Declared by the schema as "out=x".
bool may_alias(const rlk_op_schema& op, uint32_t a, uint32_t b) noexcept;

}  // namespace rlk
