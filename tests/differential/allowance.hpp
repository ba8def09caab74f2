// How far a result of a random call may be from the truth: the op's bound, and what only the data say of it.
#pragma once

#include <vector>

#include "operand.hpp"

namespace differential {

struct Truth {
  int32_t code = RLK_OK;
  std::vector<Array> results;  // by argument
};
// The reference of the call's op with these inputs, by argument and dense. Results are in fp64 where the op allows that,
// and NaN where the reference writes nothing.
Truth reference(const Call& call, const std::vector<Array>& inputs);

struct Allowance {
  rlk::registry::Bound bound;
  std::vector<double> scale;  // one magnitude for every element, by which relative errors are measured
};
Allowance allowance(const Call& call, const std::vector<Array>& inputs, std::size_t result,
                    const Array& truth, DType dtype, std::string_view arithmetic);

// Of elements that are there and no integers.
bool is_floating(const Array& a);

}  // namespace differential
