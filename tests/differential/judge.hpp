// How far a result may be from the truth, and by what it is measured.
#pragma once

#include <string>

#include "operand.hpp"

namespace differential {

// Empty, or the first element outside the bound in words. `scale`: one magnitude for every element of the
// truth, by whose peak in a row relative errors are measured.
std::string judge(const Array& got, const Array& truth, const std::vector<double>& scale,
                  const rlk::registry::Bound& bound);

}  // namespace differential
