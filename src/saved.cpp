// Saved ranges and what they protect.
#include "src/saved.hpp"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <vector>

#include "rlk/options.hpp"
#include "rlk/saved.hpp"
#include "src/gate.hpp"
#include "src/registry.hpp"

namespace rlk {
namespace {

struct Entry {
  uint64_t id;
  ByteRange range;
  std::string name;
  Precision precision;  // in force when it was saved
};
std::mutex mutex;
std::vector<Entry> entries;
uint64_t next_id = 1;

}  // namespace

ByteRange range_of(const DLTensor& t) noexcept {
  const char* base = static_cast<const char*>(t.data) + t.byte_offset;
  int64_t low = 0, high = 0, step = 1;
  for (int32_t i = t.ndim; i-- > 0;) {
    if (t.shape[i] == 0) return {};
    const int64_t reach = (t.shape[i] - 1) * (t.strides ? t.strides[i] : step);
    (reach < 0 ? low : high) += reach;
    step *= t.shape[i];
  }
  const int64_t size = (int64_t{t.dtype.bits} * t.dtype.lanes + 7) / 8;
  return {base + low * size, base + (high + 1) * size};
}

uint64_t save_range(ByteRange range, std::string name) {
  std::lock_guard lock(mutex);
  entries.push_back({next_id, range, std::move(name), PrecisionScope::current()});
  if (entries.size() == 1) set_saved_lives(true);
  return next_id++;
}

void release_range(uint64_t id) {
  std::lock_guard lock(mutex);
  for (std::size_t i = 0; i < entries.size(); ++i)
    if (entries[i].id == id) {
      entries.erase(entries.begin() + static_cast<std::ptrdiff_t>(i));
      if (entries.empty()) set_saved_lives(false);
      return;
    }
}

std::string saved_overlap(ByteRange range) {
  std::lock_guard lock(mutex);
  for (const Entry& e : entries)
    if (e.range.meets(range)) return e.name;
  return {};
}

Precision saved_precision(const rlk_op_schema& op, const rlk_slot* slots) {
  // Only a backward inherits: another reader of the tensor keeps its own policy.
  bool backward = false;
  for (const OpEntry& e : snapshot().ops)
    backward |= e.schema->backward && std::strcmp(e.schema->backward, op.name) == 0;
  Precision out = Precision::standard;
  if (!backward) return out;
  std::lock_guard lock(mutex);
  for (uint32_t i = 0; i < op.num_arguments; ++i) {
    if (!slots[i].tensor || op.arguments[i].role != RLK_READ) continue;
    const ByteRange range = range_of(*slots[i].tensor);
    for (const Entry& e : entries)
      if (e.range.meets(range)) out = std::max(out, e.precision);
  }
  return out;
}

Saved::Saved(In tensor, std::string_view name)
    : id_(save_range(range_of(*tensor.get()), std::string(name))) {}
Saved::~Saved() {
  if (id_) release_range(id_);
}

}  // namespace rlk
