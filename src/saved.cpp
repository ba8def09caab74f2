// Saved ranges and what they protect.
#include "src/saved.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <map>
#include <mutex>

#include "rlk/saved.hpp"
#include "src/check.hpp"
#include "src/footprint.hpp"
#include "src/fork_mutex.hpp"
#include "src/gate.hpp"
#include "src/registry.hpp"

namespace rlk {
namespace {

struct Entry {
  Footprint footprint;
  std::string name;
  Precision precision;  // in force when it was saved
};

// Ranges of one memory, by their lowest byte, apart by length: of all that are at most 2^k bytes long, only
// those that begin less than 2^k below a range can reach into it.
class Ranges {
 public:
  void add(const Footprint& f, uint64_t ticket) { classes_[length_class(f)].emplace(f.low(), ticket); }
  void remove(const Footprint& f, uint64_t ticket) {
    auto& of_length = classes_[length_class(f)];
    for (auto [it, end] = of_length.equal_range(f.low()); it != end; ++it)
      if (it->second == ticket) {
        of_length.erase(it);
        return;
      }
  }
  // Calls visit(ticket) for all that may share bytes with f, until it returns true.
  template <class Visit>
  bool any(const Footprint& f, Visit visit) const {
    for (std::size_t k = 0; k < classes_.size(); ++k) {
      const auto& of_length = classes_[k];
      if (of_length.empty()) continue;
      const uintptr_t longest = uintptr_t{1} << std::min<std::size_t>(k, 63);
      auto it = of_length.lower_bound(f.low() > longest ? f.low() - longest : 0);
      for (; it != of_length.end() && it->first < f.high(); ++it)
        if (visit(it->second)) return true;
    }
    return false;
  }

 private:
  static std::size_t length_class(const Footprint& f) {
    return static_cast<std::size_t>(std::bit_width(f.high() - f.low() - 1));
  }
  std::array<std::multimap<uintptr_t, uint64_t>, 65> classes_;
};

// Never destroyed: ranges may be released by what runs after main.
struct Table {
  ForkMutex mutex;
  std::map<uint64_t, Entry> entries;  // by ticket
  std::map<std::pair<int32_t, int32_t>, Ranges> memories;
  uint64_t next = 1;

  Ranges& memory(const Footprint& f) {
    return memories[{static_cast<int32_t>(f.device().device_type), f.device().device_id}];
  }
  // Calls visit(entry) for all that share bytes with f, until it returns true.
  template <class Visit>
  void meeting(const Footprint& f, Visit visit) {
    if (!f.empty())
      memory(f).any(f, [&](uint64_t ticket) {
        const Entry& e = entries.at(ticket);
        return e.footprint.meets(f) && visit(e);
      });
  }
};
Table& table() {
  static auto& all = *new Table;
  return all;
}

Status overlap(const char* op, const char* what, const Footprint& written) {
  Status found;
  table().meeting(written, [&](const Entry& e) {
    found = {RLK_OVERLAP, fmt::format("{}: {} is written and overlaps '{}', which is saved for a backward",
                                      op, what, e.name)};
    return true;
  });
  return found;
}

}  // namespace

Result<uint64_t> save_range(const DLTensor& tensor, std::string name) {
  if (Status s = check_view(tensor, "save: tensor"); !s) return s;
  const Footprint f(tensor);
  if (f.empty()) return uint64_t{0};
  Table& t = table();
  const std::lock_guard lock(t.mutex);
  const uint64_t ticket = t.next++;
  t.memory(f).add(f, ticket);
  t.entries.emplace_hint(t.entries.end(), ticket, Entry{f, std::move(name), PrecisionScope::current()});
  if (t.entries.size() == 1) set_saved_lives(true);
  return ticket;
}

void release_range(uint64_t ticket) {
  Table& t = table();
  const std::lock_guard lock(t.mutex);
  const auto it = t.entries.find(ticket);
  if (it == t.entries.end()) return;
  t.memory(it->second.footprint).remove(it->second.footprint, ticket);
  t.entries.erase(it);
  if (t.entries.empty()) set_saved_lives(false);
}

std::vector<SavedRange> saved_ranges() {
  Table& t = table();
  const std::lock_guard lock(t.mutex);
  std::vector<SavedRange> all;
  all.reserve(t.entries.size());
  for (const auto& [ticket, e] : t.entries)
    all.push_back({ticket, e.name, e.footprint.device(), e.footprint.low(),
                   e.footprint.high() - e.footprint.low(), e.precision});
  return all;
}

Status check_saved(const rlk_op_schema& op, const rlk_slot* slots, const Options& options) {
  const std::lock_guard lock(table().mutex);
  DLDevice device{kDLCPU, 0};
  for (uint32_t i = 0; i < op.num_arguments; ++i) {
    if (!slots[i].tensor) continue;
    if (!(op.arguments[i].flags & RLK_HOST)) device = slots[i].tensor->device;
    if (op.arguments[i].role == RLK_READ) continue;
    if (Status s = overlap(op.name, op.arguments[i].name, Footprint(*slots[i].tensor)); !s) return s;
  }
  if (!options.workspace) return {};
  return overlap(op.name, "workspace", Footprint(options.workspace, options.workspace_bytes, device));
}

Precision saved_precision(const rlk_op_schema& op, const rlk_slot* slots) {
  // Only a backward inherits: another reader of the tensor keeps its own policy.
  const auto& ops = snapshot().ops;
  if (std::none_of(ops.begin(), ops.end(), [&](const OpEntry& e) {
        return e.schema->backward && std::strcmp(e.schema->backward, op.name) == 0;
      }))
    return Precision::standard;
  Precision out = Precision::standard;
  const std::lock_guard lock(table().mutex);
  for (uint32_t i = 0; i < op.num_arguments; ++i)
    if (slots[i].tensor && op.arguments[i].role == RLK_READ)
      table().meeting(Footprint(*slots[i].tensor), [&](const Entry& e) {
        out = std::max(out, e.precision);
        return out == Precision::golden;
      });
  return out;
}

Saved::Saved(In tensor, std::string_view name)
    : id_(tensor ? check(save_range(*tensor.get(), std::string(name))) : 0) {}
Saved::~Saved() {
  if (id_) release_range(id_);
}

}  // namespace rlk
