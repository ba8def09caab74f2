// What this machine can execute: the one place that asks the processor, and the question of every part that
// chooses, lists, sizes or tests an implementation: can its code run here at all?
#pragma once

#include <cstdint>
#include <string_view>

#include "rlk/plugin.h"
#include "rlk/status.hpp"

namespace rlk {

// RLK_CPU_BASELINE ...: what the processor has, or less where RLK_CPU says so.
int32_t cpu_level();

// A level as RLK_CPU writes it: "avx512".
const char* cpu_word(int32_t level);

// Whether a value of RLK_CPU is one of its words; empty means no cap.
Status check_cpu_cap(std::string_view word);

// Accepted, or what the device lacks that the implementation's code is made of. It needs no arguments of a
// call: where this refuses, neither run nor workspace may be entered, whatever the call.
rlk_verdict machine_verdict(const rlk_implementation& implementation, const rlk_device& device);

}  // namespace rlk
