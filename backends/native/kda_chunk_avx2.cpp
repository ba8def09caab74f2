#include "kda_engine.hpp"

namespace rlk::kda::chunked {
constinit const Engine kAvx2 = engine<simt::Float8, 8>("avx2");
}
