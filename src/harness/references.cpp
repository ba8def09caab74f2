#include "src/harness/references.hpp"

#include <chrono>
#include <utility>

#include "src/harness/compare.hpp"

namespace rlk::harness {
namespace {

constexpr std::size_t kRoom = std::size_t{256} << 20;  // bytes of results that stay

std::optional<Outcome> own_results(const Problem& p, const rlk_implementation*& by) {
  for (const bool golden : {false, true})
    for (const OpEntry& entry : snapshot().ops)
      for (const ImplementationEntry& e : entry.implementations) {
        const rlk_implementation& i = *e.implementation;
        if (entry.schema != p.op->schema || e.backend->name != "native" ||
            static_cast<bool>(i.traits & RLK_GOLDEN) != golden)
          continue;
        const rlk_device cpu = Backend::current(e.backend->devices().front());
        by = &i;
        if (Outcome out = execute(p, {entry.schema, &i, e.backend, cpu, nullptr}); out.code == RLK_OK)
          return out;
      }
  return {};
}

}  // namespace

References::Key References::key_of(const Problem& p) { return {p.name, p.shape_text(), p.input_dtype()}; }

References::Known& References::known(const Problem& p) {
  only(*p.op);
  return known_[key_of(p)];
}

void References::only(const registry::Op& op) {
  if (op_ != &op) known_.clear(), made_.clear(), bytes_ = made_bytes_ = 0;
  op_ = &op;
}

Result<std::shared_ptr<const Problem>> References::problem_of(const registry::Op& op, const registry::Case& c,
                                                              uint64_t seed) {
  only(op);
  const Made key{c.name, dtype_of_case(c, *op.schema), seed};
  if (const auto at = made_.find(key); at != made_.end()) return at->second;
  auto fresh = materialise(op, c, seed);
  if (!fresh) return fresh.status();
  auto p = std::make_shared<const Problem>(std::move(*fresh));
  std::size_t bytes = 0;
  for (const auto& a : p->inputs) bytes += a ? a->bytes.size() : 0;
  if (made_bytes_ + bytes <= kRoom) made_.emplace(key, p), made_bytes_ += bytes;
  return p;
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
    k.own.emplace(own_results(p, k.own_by));
    if (*k.own) count(k, **k.own);
  }
  return *k.own;
}

const Outcome* References::proved_of(const Problem& p) {
  const auto& own = own_of(p);
  if (!own) return nullptr;
  const auto& rule = rule_of(p, known(p).own_by->arithmetic);
  if (!rule || !rule->written || own->results.size() != rule->outcome.results.size()) return nullptr;
  for (std::size_t i = 0; i < own->results.size(); ++i)
    if (own->results[i].dtype != DType::none && first_difference(rule->outcome.results[i], own->results[i]))
      return nullptr;
  return &*own;
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

const Outcome* References::call_of(const Problem& p, const rlk_implementation& by) const {
  const auto at = known_.find(key_of(p));
  if (op_ != p.op || at == known_.end()) return nullptr;
  const Known& k = at->second;
  if (k.own && *k.own && k.own_by == &by) return &**k.own;
  const auto rule = k.rules.find(std::string_view(by.arithmetic));
  const bool called = rule != k.rules.end() && rule->second && rule->second->called == &by;
  return called ? &rule->second->outcome : nullptr;
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
