#include "native/sample/row.hpp"

namespace rlk::native::sample {
constinit const Engine kScalar = engine<float, 1>();
}  // namespace rlk::native::sample
