// Cases that no op writes down, made from those that it does: an extent far larger than the others, an attribute at another
// value, an optional argument left out, sequences cut at other places, ids that are no token in 32 bits. What a call may be is
// the schema's to say, and what it gives the reference's.
#pragma once

#include <functional>
#include <string_view>

#include "registry/op.hpp"

namespace rlk::harness {

// Of the op's first argument that is there, as dispatch sees it.
DType dtype_of_case(const registry::Case& c, const rlk_op_schema& s);

struct Derived {
  registry::Case given;
  bool alone = false;  // one of so many that the call itself must do, without variations
};
// Cases derived from the op's own of one dtype, the same for the same seed on every machine. Some are no valid calls: the
// reference refuses them. With a name, those of this name alone, which takes less time.
void derived_cases(const registry::Op& op, DType dtype, uint64_t seed,
                   const std::function<void(Derived)>& take, std::string_view only = {});

// Whether a case of this name is a derived one, and the name of the one it was made from.
bool is_derived(std::string_view name);
std::string_view base_name(std::string_view name);

}  // namespace rlk::harness
