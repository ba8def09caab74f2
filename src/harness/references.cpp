#include "src/harness/references.hpp"

#include <chrono>
#include <utility>

namespace rlk::harness {
namespace {

constexpr std::size_t kRoom = std::size_t{256} << 20;  // bytes of results that stay

std::optional<Outcome> own_results(const Problem& p) {
  for (const bool golden : {false, true})
    for (const OpEntry& entry : snapshot().ops)
      for (const ImplementationEntry& e : entry.implementations) {
        const rlk_implementation& i = *e.implementation;
        if (entry.schema != p.op->schema || e.backend->name != "native" ||
            static_cast<bool>(i.traits & RLK_GOLDEN) != golden)
          continue;
        const rlk_device cpu = Backend::current(e.backend->devices().front());
        if (Outcome out = execute(p, {entry.schema, &i, e.backend, cpu, nullptr}); out.code == RLK_OK)
          return out;
      }
  return {};
}

}  // namespace

References::Key References::key_of(const Problem& p) { return {p.name, p.shape_text(), p.input_dtype()}; }

References::Known& References::known(const Problem& p) {
  if (op_ != p.op) known_.clear(), bytes_ = 0;
  op_ = p.op;
  return known_[key_of(p)];
}

void References::count(Known& k, const Outcome& out) {
  for (const Array& a : out.results) k.bytes += a.bytes.size(), bytes_ += a.bytes.size();
}

const Outcome& References::truth_of(const Problem& p) {
  Known& k = known(p);
  if (k.truth) return *k.truth;
  const auto before = std::chrono::steady_clock::now();
  k.truth = execute_reference(p, !p.exact);
  k.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - before).count();
  count(k, *k.truth);
  return *k.truth;
}

const Outcome& References::scale_of(const Problem& p) {
  Known& k = known(p);
  if (!k.scale) count(k, *(k.scale = execute_reference(magnitudes(p), true)));
  return *k.scale;
}

const std::vector<Outcome>& References::neighbours_of(const Problem& p) {
  Known& k = known(p);
  if (!k.neighbours.empty()) return k.neighbours;
  for (const Problem& q : neighbours(p))
    if (Outcome out = execute_reference(q, true); out.code == RLK_OK)
      count(k, k.neighbours.emplace_back(std::move(out)));
  return k.neighbours;
}

const std::optional<Outcome>& References::own_of(const Problem& p) {
  Known& k = known(p);
  if (!k.own) {
    k.own.emplace(own_results(p));
    if (*k.own) count(k, **k.own);
  }
  return *k.own;
}

const std::optional<Ruled>& References::rule_of(const Problem& p, std::string_view arithmetic) {
  Known& k = known(p);
  auto at = k.rules.find(arithmetic);
  if (at == k.rules.end()) {
    at = k.rules.emplace(arithmetic, by_rule(p, arithmetic)).first;
    if (at->second) count(k, at->second->outcome);
  }
  return at->second;
}

const std::vector<Derived>& References::derived_of(const registry::Op& op, DType dtype, uint64_t seed,
                                                   const std::string& only) {
  std::tuple from(&op, dtype, seed, only);
  if (derived_from_ == from) return derived_;
  derived_.clear(), derived_from_ = std::move(from);
  derived_cases(op, dtype, seed, [&](Derived d) { derived_.push_back(std::move(d)); }, only);
  return derived_;
}

double References::seconds_of(const Problem& p) const {
  const auto at = known_.find(key_of(p));
  return op_ != p.op || at == known_.end() ? 0 : at->second.seconds;
}

void References::leave(const Problem& p) {
  const auto at = known_.find(key_of(p));
  if (op_ != p.op || at == known_.end() || bytes_ <= kRoom) return;
  bytes_ -= at->second.bytes;
  known_.erase(at);
}

}  // namespace rlk::harness
