// What oneDNN may use of this processor, and why it may not do what somebody asks of it.
#pragma once

#include <cstdint>
#include <string>

#include "onednn/rules.hpp"

namespace rlk::onednn {

// Holds oneDNN to an instruction set below the processor's, which RLK_CPU asks for; before its first product.
// Without such a cap oneDNN is left alone: its own variables then count.
void hold_to(std::int32_t cpu_level);

// "DNNL_MAX_CPU_ISA=AVX2": what somebody outside the process has taken from oneDNN; empty: nothing. It cannot
// be undone without taking it from the process's other users of oneDNN.
const std::string& ambient_limit();

// Why this rule's products cannot be had here at all; empty: they may be tried.
std::string cpu_refusal(Rule rule);
// Why there is no product of a kind, in oneDNN's word; why a product that there is may not be used.
std::string without_product(const char* what);
std::string other_order(Rule rule, std::int64_t depth);

}  // namespace rlk::onednn
