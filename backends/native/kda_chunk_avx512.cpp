#include "kda_engine.hpp"

namespace rlk::kda::chunked {
constinit const Engine kAvx512 = engine<simt::Float16, 16>("avx512");
}
