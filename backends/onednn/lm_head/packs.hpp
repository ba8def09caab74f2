// Weights that their owner declared constant, in oneDNN's own layout. The key is where the weight lies
// (address, shape, stride, dtype) and a version its owner counts; nothing is packed or kept without being
// asked for, so a weight that changes in place can only be served stale if its owner said it would not
// change. As a net under that, a sample of the weight's bytes is compared on every use.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "onednn/blocks.hpp"

namespace rlk::onednn {

struct WeightKey {
  const void* data = nullptr;
  std::int64_t rows = 0, depth = 0, stride = 0;
  Float type = Float::f32;
  Rule rule = Rule::kb1024;  // whose products it is packed for
  bool operator==(const WeightKey&) const = default;
};

struct Pack {
  WeightKey key;
  std::int64_t version = 0;
  std::uint64_t sample = 0;
  std::size_t panel_bytes = 0;
  std::unique_ptr<std::byte[], void (*)(std::byte*)> panels{nullptr, nullptr};

  const std::byte* panel(std::int64_t index) const {
    return panels.get() + static_cast<std::size_t>(index) * panel_bytes;
  }
};

// A hash of 64 places spread over the weight.
std::uint64_t sample_of(const WeightKey& key);

std::shared_ptr<const Pack> find_pack(const WeightKey& key);
void keep_pack(std::shared_ptr<const Pack> pack);  // replaces one of the same key
bool drop_pack(const WeightKey& key);              // of every rule
std::shared_ptr<Pack> new_pack(const WeightKey& key, std::int64_t version, const Blocks& blocks);

}  // namespace rlk::onednn
