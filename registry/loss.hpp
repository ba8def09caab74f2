// What the schemas and references of the loss ops share: checks of tokens and options, and masks.
#pragma once

#include <limits>

#include "registry/schema.hpp"

namespace rlk::registry {

inline constexpr uint32_t kMasks = RLK_BOOL | RLK_U8 | RLK_F32;
inline constexpr uint32_t kLogs = RLK_F32 | RLK_F64;  // of results; fp64 is the reference's

// t has the shape of the base.
inline int32_t expect_shape(const rlk_host* host, const char* op, const char* name, const DLTensor* t,
                            const char* base, const DLTensor* like) {
  if (!t) return RLK_OK;
  if (t->ndim != like->ndim)
    return fail(host, "{}: {} has rank {}, {} has rank {}", op, name, t->ndim, base, like->ndim);
  for (int32_t i = 0; i < t->ndim; ++i)
    if (dim(t, i) != dim(like, i))
      return fail(host, "{}: {} has size {} in dimension {}, {} has {}", op, name, dim(t, i), i, base,
                  dim(like, i));
  return RLK_OK;
}

struct Option {
  const char* name;
  double value, least, most;
};
inline int32_t check_options(const rlk_host* host, const char* op, std::initializer_list<Option> options) {
  for (const Option& o : options)
    if (!(o.value >= o.least && o.value <= o.most))
      return fail(host, "{}: {} is {}, it must be from {:g} to {:g}", op, o.name, o.value, o.least, o.most);
  return RLK_OK;
}

inline constexpr double kMostLog = 80;  // exponentials of it, and their products with 1e3, are finite

}  // namespace rlk::registry
