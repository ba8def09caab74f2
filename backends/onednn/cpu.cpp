#include "onednn/cpu.hpp"

#include <cstdlib>
#include <dnnl.hpp>

#include "rlk/plugin.h"

#if defined(__x86_64__)
#  include <cpuid.h>
#endif

namespace rlk::onednn {
namespace {

using dnnl::cpu_isa;

// One bit an instruction set, all below it included.
unsigned bits(cpu_isa isa) { return static_cast<unsigned>(isa); }
bool at_least(cpu_isa isa) { return (bits(dnnl::get_effective_cpu_isa()) & bits(isa)) == bits(isa); }

const char* name_here() {
  return at_least(cpu_isa::avx512_core_amx)    ? "AMX"
         : at_least(cpu_isa::avx512_core_bf16) ? "AVX512-BF16"
         : at_least(cpu_isa::avx512_core)      ? "AVX-512"
         : at_least(cpu_isa::avx2)             ? "AVX2"
                                               : "SSE4.1 or AVX";
}

std::string under_limit() { return ambient_limit().empty() ? "" : ", under " + ambient_limit(); }

}  // namespace

void hold_to(std::int32_t level) {
  if (!ambient_limit().empty()) return;
#if defined(__x86_64__)
  // oneDNN's limit is asked nothing: the question would fix it.
  unsigned a = 0, b = 0, c = 0, amx = 0;
  const bool has_amx = __get_cpuid_count(7, 0, &a, &b, &c, &amx) && (amx >> 24 & 1);
  if (level < RLK_CPU_AVX2 && __builtin_cpu_supports("avx2"))
    dnnl::set_max_cpu_isa(cpu_isa::sse41);
  else if (level < RLK_CPU_AVX512 && __builtin_cpu_supports("avx512f"))
    dnnl::set_max_cpu_isa(cpu_isa::avx2);
  else if (level < RLK_CPU_AVX512BF16 && __builtin_cpu_supports("avx512bf16"))
    dnnl::set_max_cpu_isa(cpu_isa::avx512_core_vnni);
  else if (level < RLK_CPU_AMX && has_amx)
    dnnl::set_max_cpu_isa(cpu_isa::avx512_core_bf16);
#endif
}

const std::string& ambient_limit() {
  static const std::string limit = [] {
    for (const char* name : {"ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"})
      if (const char* value = secure_getenv(name)) return std::string(name) + "=" + value;
    return std::string();
  }();
  return limit;
}

std::string cpu_refusal(Rule rule) {
  if (rule == Rule::k32 && !at_least(cpu_isa::avx512_core_amx))
    return std::string("needs AMX, oneDNN has ") + name_here() + " here" + under_limit();
  if (rule == Rule::pairs) {
    if (at_least(cpu_isa::avx512_core_amx)) return "oneDNN has AMX here, and uses it for bf16";
    if (!at_least(cpu_isa::avx512_core_bf16))
      return std::string("needs AVX512-BF16, oneDNN has ") + name_here() + " here" + under_limit();
    return {};
  }
  if (rule != Rule::k32 && !at_least(cpu_isa::avx2))
    return std::string("needs AVX2 (fused multiply-adds), oneDNN has ") + name_here() + " here" +
           under_limit();
  return {};
}

std::string without_product(const char* what) {
  return std::string("oneDNN has no such product with ") + name_here() + " (" + what + ")" + under_limit();
}

std::string other_order(Rule rule, std::int64_t depth) {
  return "with " + std::string(name_here()) + " oneDNN adds " + std::to_string(depth) +
         " products in another order than " + name_of(rule) + under_limit();
}

}  // namespace rlk::onednn
