// The oneDNN backend's table.
#include <cstddef>
#include <cstdio>
#include <iterator>

#include "onednn/cpu.hpp"
#include "onednn/lm_head/kept_weight.hpp"
#include "onednn/products.hpp"
#include "rlk/plugin.h"

namespace rlk::onednn {

#define RLK_IMPLEMENTATION(name) extern const rlk_implementation name;
#include "onednn/implementations.def"
#undef RLK_IMPLEMENTATION

namespace {

const rlk_implementation* const kImplementations[] = {
#define RLK_IMPLEMENTATION(name) &name,
#include "onednn/implementations.def"
#undef RLK_IMPLEMENTATION
};
const rlk_op_schema* const kOps[] = {&lm_head_weight_schema};

// The start-up check: small products of one rule must reproduce it. Others are checked when they come.
int32_t devices(rlk_device* out, int32_t capacity, char* reason, size_t reason_size) {
  constexpr std::int64_t kDepth = 96;
  const Products& products = Products::of(Rule::kb256, Float::f32, kDepth, kDepth);
  if (!products.refusal.empty()) {
    std::snprintf(reason, reason_size, "%s", products.refusal.c_str());
    return 0;
  }
  if (capacity > 0) {
    out[0] = {};
    out[0].type = kDLCPU;
    std::snprintf(out[0].name, sizeof out[0].name, "cpu");
  }
  return 1;
}

#define RLK_TEXT2(x) #x
#define RLK_TEXT(x) RLK_TEXT2(x)

const rlk_backend kBackend = {
    sizeof(rlk_backend),
    RLK_ABI_MAJOR,
    RLK_ABI_MINOR,
    "onednn",
    RLK_VERSION,
    "oneDNN " RLK_TEXT(DNNL_VERSION_MAJOR) "." RLK_TEXT(DNNL_VERSION_MINOR) " on the CPU",
    kImplementations,
    std::size(kImplementations),
    kOps,
    std::size(kOps),
    devices,
    nullptr};

}  // namespace
}  // namespace rlk::onednn

extern "C" RLK_EXPORT const rlk_backend* rlk_backend_query(uint32_t host_abi_major, const rlk_host* host) {
  if (host_abi_major != RLK_ABI_MAJOR) return nullptr;
  const bool knows = host->struct_size > offsetof(rlk_host, cpu_level);
  if (knows && host->cpu_level) rlk::onednn::hold_to(host->cpu_level());
  return &rlk::onednn::kBackend;
}
