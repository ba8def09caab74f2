#include "src/evidence.hpp"

#include <fmt/format.h>

#include <fstream>
#include <mutex>
#include <set>

#include "rlk/evidence.hpp"
#include "src/build_id.hpp"
#include "src/gate.hpp"

#if __has_include(<nlohmann/json.hpp>)
#  include <nlohmann/json.hpp>
#  define RLK_READS_JSON 1
#endif

namespace rlk {
namespace {

std::mutex mutex;
// Keys of entries whose promises all held. Never destroyed: calls may be made after main.
std::set<std::string>& proved = *new std::set<std::string>;

std::string key_of(std::string_view op, std::string_view id, std::string_view dtype,
                   std::string_view arithmetic, std::string_view build, std::string_view device,
                   std::string_view versions) {
  return fmt::format("{}\n{}\n{}\n{}\n{}\n{}\n{}", op, id, dtype, arithmetic, build, device, versions);
}

}  // namespace

Status load_evidence(const std::string& path) {
#ifdef RLK_READS_JSON
  std::ifstream in(path);
  if (!in) return {RLK_CONFIGURATION, fmt::format("evidence: cannot read {}", path)};
  const auto json = nlohmann::json::parse(in, nullptr, false);
  if (json.is_discarded() || !json.is_object() || json.value("schema", 0) != 1 || !json.contains("entries"))
    return {RLK_CONFIGURATION, fmt::format("evidence: {} is not a certificate of this version", path)};
  try {
    std::set<std::string> keys;
    for (const auto& e : json["entries"])
      if (e.value("good", false))
        keys.insert(key_of(e.value("op", ""), e.value("implementation", ""), e.value("dtype", ""),
                           e.value("arithmetic", ""), e.value("build", ""), e.value("device", ""),
                           e.value("versions", "")));
    const std::lock_guard lock(mutex);
    proved.merge(keys);
  } catch (const nlohmann::json::exception& e) {
    return {RLK_CONFIGURATION, fmt::format("evidence: {}: {}", path, e.what())};
  }
  move_gate();
  return {};
#else
  return {RLK_UNSUPPORTED,
          fmt::format("evidence: {} cannot be read: this build was made without a JSON reader", path)};
#endif
}

void clear_evidence() {
  {
    const std::lock_guard lock(mutex);
    proved.clear();
  }
  move_gate();
}

bool evidence_covers(const rlk_implementation& i, Backend& backend, const rlk_device& device, DType dtype) {
  std::string versions;
  const rlk_backend& table = *backend.table;
  const auto* services =
      i.device_type != kDLCPU && table.struct_size >= sizeof(rlk_backend) ? table.services : nullptr;
  if (services && services->describe) {
    char text[512] = "";
    if (services->describe(&device, text, sizeof text) == RLK_OK) versions = text;
  }
  const std::string key = key_of(i.op, i.id, name_of(dtype), i.arithmetic,
                                 fmt::format("{:016x}", backend.build_id), device.name, versions);
  const std::lock_guard lock(mutex);
  return proved.count(key) != 0;
}

}  // namespace rlk
