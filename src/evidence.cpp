#include "src/evidence.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <vector>

#include "rlk/evidence.hpp"
#include "rlk/harness.hpp"
#include "src/fork_mutex.hpp"
#include "src/gate.hpp"
#include "src/identity.hpp"
#include "src/sizes.hpp"
#include "src/text.hpp"

#if __has_include(<nlohmann/json.hpp>)
#  include <nlohmann/json.hpp>
#  define RLK_READS_JSON 1
#endif

namespace rlk {
namespace {

// One entry of a certificate: whose promises were kept, on what, and up to which sizes.
struct Proof {
  std::string op, implementation, dtype, arithmetic, library, build, device, level, versions;
  std::map<std::string, std::vector<int64_t>> sizes;
};

ForkMutex mutex;
// Never destroyed: calls may come from static destructors.
std::vector<Proof>& proofs() {
  static auto& all = *new std::vector<Proof>;
  return all;
}

#ifdef RLK_READS_JSON
std::vector<Proof> read_proofs(const std::string& text) {
  const auto all = nlohmann::json::parse(text);
  const std::string library = all.at("build");
  std::vector<Proof> out;
  for (const auto& e : all.at("entries"))
    out.push_back({e.at("op"), e.at("implementation"), e.at("dtype"), e.at("arithmetic"), library,
                   e.at("build"), e.at("device"), e.at("level"), e.at("versions"),
                   e.at("sizes").get<std::map<std::string, std::vector<int64_t>>>()});
  return out;
}
#endif

constexpr const char* kNearest = "run rlk-dispatch --verify --certificate here and load what it writes";

rlk_verdict lacks(const char* why, int32_t argument = -1, int64_t a = 0, int64_t b = 0) {
  return {RLK_UNSUPPORTED, argument, why, kNearest, {a, b, 0, 0}};
}

// Dimension by dimension against the largest that was tried.
rlk_verdict judge_sizes(const Proof& p, const rlk_op_schema& op, const rlk_slot* slots) {
  for (uint32_t i = 0; i < op.num_arguments; ++i) {
    const DLTensor* t = slots[i].tensor;
    if (!t || op.arguments[i].role == RLK_WRITE) continue;
    const auto [dimension, extent] =
        extent_of(op.arguments[i], {t->shape, static_cast<std::size_t>(std::max(0, t->ndim))});
    const auto known = p.sizes.find(dimension);
    if (known == p.sizes.end())
      return lacks("its certificate covers no such argument of rank {0}", static_cast<int32_t>(i), t->ndim);
    for (std::size_t d = 0; d < extent.size(); ++d)
      if (d >= known->second.size() || extent[d] > known->second[d])
        return lacks("its certificate covers sizes up to {0} where this call has {1}",
                     static_cast<int32_t>(i), d < known->second.size() ? known->second[d] : 0, extent[d]);
  }
  return {RLK_OK, -1, nullptr, nullptr, {}};
}

}  // namespace

Status load_evidence(const std::string& path) {
#ifdef RLK_READS_JSON
  const auto refuse = [&](std::string_view why) {
    return Status(RLK_CONFIGURATION, fmt::format("evidence: {}: {}", rlk::quoted(path), why));
  };
  // Reading a directory throws.
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) return refuse("it is not a file");
  std::ifstream in(path, std::ios::binary);
  std::string text(std::istreambuf_iterator<char>(in), {});
  if (!in || text.empty()) return refuse("it cannot be read, or is empty");
  if (const Status s = harness::check_certificate(text); !s) return refuse(s.message());
  try {
    std::vector<Proof> found = read_proofs(text);
    const std::lock_guard lock(mutex);
    proofs().insert(proofs().end(), std::make_move_iterator(found.begin()),
                    std::make_move_iterator(found.end()));
  } catch (const nlohmann::json::exception&) {
    return refuse("it lacks members of a certificate, or has them with another type");
  }
  move_gate();
  return {};
#else
  return {RLK_UNSUPPORTED,
          fmt::format("evidence: {} cannot be read: this build was made without a JSON reader",
                      rlk::quoted(path))};
#endif
}

void clear_evidence() {
  {
    const std::lock_guard lock(mutex);
    proofs().clear();
  }
  move_gate();
}

rlk_verdict evidence_verdict(const rlk_op_schema& op, const rlk_slot* slots, const rlk_implementation& i,
                             const Backend& backend, const rlk_device& device, DType dtype) {
  const std::string build = build_of(backend);
  if (build.empty()) return lacks("its code has no build id, so no certificate can be known to be of it");
  const std::string library = library_build(), where = device_text(device), level = level_text(device),
                    versions = versions_text(backend, device);
  const std::lock_guard lock(mutex);
  if (proofs().empty()) return lacks("no certificate is loaded");
  // What the nearest certificate lacks, the last of these that any reaches.
  rlk_verdict nearest = lacks("no loaded certificate covers it with this dtype");
  int reached = 0;
  const auto offer = [&](int stage, const rlk_verdict& v) {
    if (stage >= reached) reached = stage, nearest = v;
  };
  for (const Proof& p : proofs()) {
    if (p.op != i.op || p.implementation != i.id || p.dtype != name_of(dtype) || p.arithmetic != i.arithmetic)
      continue;
    if (p.build != build || p.library != library)
      offer(1, lacks("its certificate is of another build of this code"));
    else if (p.device != where)
      offer(2, lacks("its certificate is of another device"));
    else if (p.level != level)
      offer(3, lacks("its certificate is of another instruction set than would run here"));
    else if (p.versions != versions)
      offer(4, lacks("its certificate is of another driver or vendor library"));
    else if (const rlk_verdict sizes = judge_sizes(p, op, slots); sizes.code == RLK_OK)
      return sizes;
    else
      offer(5, sizes);
  }
  return nearest;
}

}  // namespace rlk
