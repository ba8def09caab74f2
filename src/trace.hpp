// Recording calls: rlk/trace.h says for callers what a trace holds.
//
// While nothing is traced a call pays nothing: a trace sets a bit of the gate, so that no cached call matches
// and all of them come through run_under, which looks.
#pragma once

#include <string_view>

#include "src/prepared.hpp"

namespace rlk {

using RunPrepared = Status (*)(const Prepared&, const rlk_slot*, const Options&);

// Digests what the call reads, runs it, digests what it wrote, and appends the record. Whatever becomes of the
// record, the call's own status is what is returned.
Status run_traced(const Prepared& p, int32_t op, const rlk_slot* slots, const Options& options,
                  RunPrepared run);

}  // namespace rlk
