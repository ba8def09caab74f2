// How a trace begins: by a call, or by RLK_TRACE.
#pragma once

#include "rlk/status.hpp"
#include "rlk/trace.h"

namespace rlk {

Status begin_trace(const char* name, const rlk_trace_options* given);

// Begins the trace that RLK_TRACE names; a file that cannot be opened is logged.
void trace_environment();

}  // namespace rlk
