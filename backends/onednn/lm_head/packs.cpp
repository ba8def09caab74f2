#include "onednn/lm_head/packs.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>

#include "onednn/over_forks.hpp"
#include "rlk/machine.hpp"

namespace rlk::onednn {
namespace {

std::mutex& keeping() {
  static auto& mutex = *new std::mutex;
  held_over_forks<keeping>();
  return mutex;
}
// While that is held.
std::vector<std::shared_ptr<const Pack>>& kept() {
  static auto& packs = *new std::vector<std::shared_ptr<const Pack>>;
  return packs;
}
// When the plugin is loaded: a handler that is registered while another thread forks would miss that fork.
[[maybe_unused]] const auto& keeping_early = keeping();
[[maybe_unused]] const auto& kept_early = kept();

}  // namespace

std::uint64_t sample_of(const WeightKey& key) {
  constexpr std::int64_t kPlaces = 64;
  std::uint64_t hash = 1469598103934665603ull;
  const std::int64_t elements = key.rows * key.depth;
  if (elements == 0) return hash;
  const auto* base = static_cast<const unsigned char*>(key.data);
  for (std::int64_t i = 0; i < kPlaces; ++i) {
    const std::int64_t element = (elements - 1) / kPlaces * i + (i * 977) % (elements / kPlaces + 1);
    const unsigned char* at =
        base + (element / key.depth * key.stride + element % key.depth) * bytes_of(key.type);
    for (std::int64_t b = 0; b < bytes_of(key.type); ++b) hash = (hash ^ at[b]) * 1099511628211ull;
  }
  return hash;
}

std::shared_ptr<const Pack> find_pack(const WeightKey& key) {
  const std::lock_guard lock(keeping());
  for (const auto& pack : kept())
    if (pack->key == key) return pack;
  return nullptr;
}

void keep_pack(std::shared_ptr<const Pack> pack) {
  const std::lock_guard lock(keeping());
  std::erase_if(kept(), [&](const auto& p) { return p->key == pack->key; });
  kept().push_back(std::move(pack));
}

bool drop_pack(const WeightKey& key) {
  const std::lock_guard lock(keeping());
  return std::erase_if(kept(), [&](const auto& p) {
           WeightKey same = key;
           same.rule = p->key.rule;
           return p->key == same;
         }) != 0;
}

std::shared_ptr<Pack> new_pack(const WeightKey& key, std::int64_t version, const Blocks& blocks) {
  auto pack = std::make_shared<Pack>();
  pack->key = key;
  pack->version = version;
  pack->sample = sample_of(key);
  pack->panel_bytes = (blocks.kept_bytes() + 63) / 64 * 64;
  const std::size_t panels = static_cast<std::size_t>((key.rows + kPanel - 1) / kPanel);
  auto* memory = static_cast<std::byte*>(allocate(std::max<std::size_t>(1, panels * pack->panel_bytes)));
  if (memory == nullptr) throw std::bad_alloc();
  pack->panels = {memory, [](std::byte* p) { std::free(p); }};
  return pack;
}

}  // namespace rlk::onednn
