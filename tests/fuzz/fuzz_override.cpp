// The RLK_BACKEND parser on any bytes: never crashes, never throws, and keeps its promises about what it
// returns.
#include <cstdint>
#include <cstdlib>

#include "rlk/printable.hpp"
#include "src/override.hpp"

namespace {

const rlk::KnownNames kNames{
    {"chunk_kda", "kda_bwd", "kda_fwd", "lm_head", "lm_head_bwd", "rope", "rope_", "rope_bwd", "rope_i"},
    {{"chunk_kda", "kda_fwd"}, {"rope_i", "rope"}},
    {"cuda", "hip", "native", "onednn"},
    {"cuda.simt", "cuda.sm90", "native.avx512", "native.golden"}};

void promise(bool kept) {
  if (!kept) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  const std::string_view spec(reinterpret_cast<const char*>(data), size);
  const rlk::Override parsed = rlk::Override::parse(spec, "RLK_BACKEND", kNames);
  if (!parsed.error()) {
    promise(parsed.rules().empty());
    promise(parsed.error().message().substr(0, 20) == "RLK_BACKEND, column ");
    // A message goes to terminals and logs: one line, whatever the spec held.
    promise(rlk::is_printable(parsed.error().message()));
  }
  for (const rlk::OverrideRule& rule : parsed.rules()) {
    promise(!rule.chain.empty() && !rule.selector.empty());
    promise(spec.substr(rule.column - 1, rule.text.size()) == rule.text);
  }
  for (const std::string_view op : {"kda_fwd", "lm_head", "rope", "rope_"})
    for (const std::string_view device : {"cpu", "cuda"})
      if (const rlk::OverrideRule* rule = parsed.find(op, device)) {
        promise(rlk::glob_match(rule->selector, op));
        promise(rule->device.empty() || rule->device == device);
        // An exact name can lose to nothing but the same name with a device.
        for (const rlk::OverrideRule& other : parsed.rules())
          if (other.selector == op && other.device.empty()) promise(rule->selector == op);
      }
  return 0;
}
