// The native backend: its table is the one place that lists its implementations.

#include <iterator>

#include "native/levels.hpp"
#include "rlk/plugin.h"

namespace rlk {
namespace native {
#define RLK_IMPLEMENTATION(name) extern const rlk_implementation name;
#define RLK_LEVELS(name) extern const Levels name;
#include "native/implementations.def"
#undef RLK_IMPLEMENTATION
#undef RLK_LEVELS
}  // namespace native

namespace {
const rlk_implementation* const kImplementations[] = {
#define RLK_IMPLEMENTATION(name) &native::name,
#define RLK_LEVELS(name) &native::name[2], &native::name[1], &native::name[0],
#include "native/implementations.def"
#undef RLK_IMPLEMENTATION
#undef RLK_LEVELS
};
}  // namespace

extern const rlk_backend native_backend;
const rlk_backend native_backend = {sizeof(rlk_backend),
                                    RLK_ABI_MAJOR,
                                    RLK_ABI_MINOR,
                                    "native",
                                    RLK_VERSION,
                                    "plain C++ on the CPU, nothing to install",
                                    kImplementations,
                                    std::size(kImplementations),
                                    nullptr,
                                    0,
                                    nullptr,
                                    nullptr};

}  // namespace rlk
