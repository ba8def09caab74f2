// What no implementation of rope_tables serves, in shapes and dtypes alone.
#pragma once

#include "rlk/backend.hpp"
#include "rlk/ops.hpp"

namespace rlk::rotary {

inline rlk_verdict takes(const RopeTables& a, const rlk_request&) {
  if (a.cos && a.sin && a.cos.dtype() != a.sin.dtype())
    return refuse("cos and sin differ in dtype", {}, "give both the same dtype");
  if ((a.cos && a.cos.dtype() == DType::f64) || (a.sin && a.sin.dtype() == DType::f64))
    return refuse("fp64 results", {}, "ask for fp32");
  return kAccept;
}

}  // namespace rlk::rotary
