#include "src/harness/trial.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "src/harness/order.hpp"
#include "src/harness/promises/promises.hpp"
#include "src/resolve.hpp"
#include "src/sizes.hpp"
#include "src/text.hpp"

namespace rlk::harness {
namespace {

using Clock = std::chrono::steady_clock;
double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Of the op's first argument that is there, as dispatch sees it.
DType dtype_of_case(const registry::Case& c, const rlk_op_schema& s) {
  for (uint32_t i = 0; i < s.num_arguments; ++i) {
    for (const registry::CaseTensor& t : c.inputs)
      if (t.argument == s.arguments[i].name) return t.dtype;
    for (const auto& [name, dtype] : c.results)
      if (name == s.arguments[i].name) return dtype;
  }
  return DType::none;
}

// What dispatch would choose for this call on the target's device under no policy at all.
std::string default_choice(const Problem& p, const Subject& subject) {
  const auto shapes = result_shapes(p);
  if (!shapes) return {};
  const rlk_op_schema& s = p.schema();
  const DLDevice device{static_cast<DLDeviceType>(subject.device.type), subject.device.id};
  std::vector<Tensor> tensors(s.num_arguments);
  std::vector<rlk_slot> slots(s.num_arguments + s.num_attributes);
  for (uint32_t i = 0; i < s.num_arguments; ++i) {
    const DLDevice where = s.arguments[i].flags & RLK_HOST ? DLDevice{kDLCPU, 0} : device;
    if (p.inputs[i])
      tensors[i] = Tensor(const_cast<std::byte*>(p.inputs[i]->bytes.data()), std::span(p.inputs[i]->shape),
                          p.inputs[i]->dtype, where, std::span(p.strides[i]));
    else if (p.results[i] != DType::none)
      tensors[i] = Tensor(nullptr, std::span((*shapes)[i].shape), p.results[i], where);
    else
      continue;
    slots[i].tensor = &tensors[i].dl();
  }
  std::copy(p.attributes.begin(), p.attributes.end(), slots.begin() + s.num_arguments);
  const Result<int32_t> op = find_op(s.name);
  if (!op) return {};
  return std::string(Resolver::resolve(*op, slots.data(), Policy::of({}), Ask::choice).id());
}

}  // namespace

uint64_t hash_of(const Outcome& out) {
  uint64_t hash = 14695981039346656037ull;
  for (const Array& a : out.results)
    if (a.dtype != DType::none) hash = hash_bytes(a.bytes.data(), a.bytes.size(), hash);
  return hash;
}

Trial::Trial(const Target& target, const Plan& plan, double seconds, bool isolated, Record& record)
    : target_(target),
      plan_(plan),
      record_(record),
      isolated_(isolated),
      start_(Clock::now()),
      seconds_(seconds) {}

bool Trial::going() const {
  return !(plan_.stop && plan_.stop->load()) && (seconds_ <= 0 || since(start_) < seconds_);
}

double Trial::patience(const Problem& p, double times) const {
  const auto at = reference_seconds_.find(p.name);
  return (plan_.patience + (at == reference_seconds_.end() ? 0 : 100 * at->second)) * std::max(1.0, times);
}

const Outcome& Trial::truth_of(const Problem& p) {
  const auto [it, fresh] = truths_.try_emplace(p.name);
  if (!fresh) return it->second;
  const auto before = Clock::now();
  it->second = execute_reference(p, !p.exact);
  reference_seconds_[p.name] = since(before);
  return it->second;
}

const Outcome& Trial::scale_of(const Problem& p) {
  const auto [it, fresh] = scales_.try_emplace(p.name);
  if (fresh) it->second = execute_reference(magnitudes(p), true);
  return it->second;
}

registry::Bound Trial::bound_of(const Problem& p, const char* result, DType dtype) const {
  if (p.ruled) return {registry::Bound::none, 0, 0};
  if (p.exact) return {registry::Bound::bits, 0, 0};
  return p.op->bound({result, target_.dtype, dtype, target_.entry.arithmetic, p.reduction});
}

void Trial::fail(Promise promise, const Problem& p, const std::string& transform, const std::string& result,
                 const Difference* where, std::string text) {
  Failure f;
  f.promise = promise;
  f.op = target_.entry.op;
  f.implementation = target_.entry.implementation;
  f.level = target_.entry.level;
  f.device = plan_.device;
  f.dtype = target_.entry.dtype;
  f.case_name = p.name;
  f.shape = p.shape_text();
  f.transform = transform;
  f.seed = plan_.seed;
  f.result = result;
  if (where) f.index = where->index, f.expected = where->expected, f.got = where->got, f.bits = where->bits;
  f.text = std::move(text);
  record_.fail(f);
}

bool Trial::healthy(const Problem& p, const std::string& transform, const Outcome& out) {
  record_.tried(Promise::returns);
  if (out.code == RLK_NO_IMPLEMENTATION) {
    record_.refused(Promise::predicate);
    return false;
  }
  record_.tried(Promise::predicate);
  if (out.code != RLK_OK) {
    fail(Promise::predicate, p, transform, {}, nullptr, out.text);
    return false;
  }
  record_.tried(Promise::purity);
  if (!out.broken.empty()) fail(Promise::purity, p, transform, {}, nullptr, out.broken);
  return true;
}

void Trial::count_sizes(const Problem& p) {
  for (std::size_t i = 0; i < p.inputs.size(); ++i)
    if (p.inputs[i]) {
      const auto [dimension, extent] = extent_of(p.schema().arguments[i], p.inputs[i]->shape);
      record_.size(dimension, extent);
    }
}

void first_problems(const Target& target, const Plan& plan, std::size_t count,
                    const std::function<bool(const Problem&)>& goes_on) {
  const registry::Op* op = registry::find(target.entry.op);
  const std::string only = plain_name(plan.case_name);
  const auto take = [&](const registry::Case& c) {
    if (count == 0 || !c.order_probe.empty() || dtype_of_case(c, *op->schema) != target.dtype) return;
    if (only.empty() ? c.large : c.name != only) return;
    if (const auto p = materialise(*op, c, plan.seed)) count = goes_on(*p) ? count - 1 : 0;
  };
  op->cases({take, plan.seed});
}

void Trial::collect() {
  const registry::Op* op = registry::find(target_.entry.op);
  const std::string only = plain_name(plan_.case_name);
  const auto take = [&](registry::Case c) {
    if (dtype_of_case(c, *op->schema) != target_.dtype) return;
    if (only.empty() ? c.large && !thorough() : c.name != only) return;
    items_.push_back({std::move(c), {}});
  };
  op->cases({take, plan_.seed});
}

const Problem* Trial::problem_of(Item& item) {
  if (item.problem) return &*item.problem;
  auto p = materialise(*registry::find(target_.entry.op), item.given, plan_.seed);
  if (!p) {
    record_.note(std::string(p.status().message()));
    return nullptr;
  }
  item.problem = std::move(*p);
  return &*item.problem;
}

void Trial::run() {
  collect();
  if (items_.empty()) {
    for (const Promise p : kPromises) record_.untried(p, "no case has this dtype");
  }
  bool whole = true;
  for (Item& item : items_) {
    if (!going()) whole = false;
    if (!whole) break;
    look_at(item);
    if (item.given.large) item.problem.reset();
  }
  if (whole) transforms();
  if (!missed_.empty() && !record_.knows_transform) {
    const std::vector<std::string_view> names(missed_.begin(), missed_.end());
    if (const auto near = nearest_name(plan_.transform, names); !near.empty())
      record_.transform_near(std::string(near));
  }
  if (isolated_ && plan_.transform.empty())
    for (const auto& [problem, reason] : refusals_)
      if (going()) try_refused(*this, problem, reason);
  record_.finish();
}

// The plain call: everything that needs no transform.
void Trial::look_at(Item& item) {
  const Problem* p = problem_of(item);
  if (!p) return;
  if (!item.given.order_probe.empty()) return judge_order(*this, *p, item.given.order_probe);
  const auto wide = with_fp32_results(*p);
  if (!plan_.case_name.ends_with(kWide)) {
    call_and_judge(*p);
    if (default_choice(*p, target_.subject) == target_.entry.implementation) record_.default_for(p->name);
  }
  if (wide) call_and_judge(*wide);
}

void Trial::call_and_judge(const Problem& p) {
  if (!record_.begin(p, "", Step::judged, patience(p))) return;
  const Outcome out = execute(p, target_.subject);
  if (!healthy(p, "", out)) {
    if (out.code == RLK_NO_IMPLEMENTATION && refusals_.size() < 4) refusals_.emplace_back(p, out.text);
    return;
  }
  record_.corpus(p.name, fmt::format("{:016x}", hash_of(out)));
  count_sizes(p);
  record_.begin_ours(p);
  judge_equal_bits(*this, p, out);
  const Outcome& truth = truth_of(p);
  if (truth.code != RLK_OK)
    record_.note(fmt::format("{} '{}': the reference failed: {}", target_.entry.op, p.name, truth.text));
  else
    judge_accuracy(*this, p, out);
}

// Each transform comes `passes` times, each time on another case: pass by pass, so that a clock that ends
// early has seen each once.
void Trial::transforms() {
  std::vector<Item*> list, brief;
  for (Item& item : items_)
    if (item.given.order_probe.empty())
      (item.given.brief || item.given.sampled ? brief : list).push_back(&item);
  // The cases with the most rows first.
  const auto rows = [&](Item* i) { return problem_of(*i) ? row_count(*i->problem).value_or(0) : 0; };
  std::vector<std::pair<int64_t, Item*>> sorted;
  for (Item* i : list) {
    sorted.emplace_back(rows(i), i);
    if (i->given.large) i->problem.reset();
  }
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  // Brief cases have few transforms of their own, so they take no part in the turns.
  for (Item* i : brief)
    if (going()) vary_item(*i, 0, 1, 0);
  const std::size_t stride = thorough() ? 1 : std::max<std::size_t>(1, sorted.size());
  const std::size_t passes =
      plan_.passes > 0 ? std::min(stride, static_cast<std::size_t>(plan_.passes)) : stride;
  for (std::size_t pass = 0; pass < passes; ++pass) {
    for (std::size_t c = 0; c < sorted.size(); ++c) {
      if (!going()) return;
      vary_item(*sorted[c].second, c, stride, (c + pass) % stride);
    }
    if (pass == 0) record_.complete();
  }
}

// fp32 results show what rounding to 16 bits hides: where they exist they get every transform, and the
// rounded ones, which differ in their last step, every fourth, or none when not everything is wanted.
void Trial::vary_item(Item& item, std::size_t turn, std::size_t stride, std::size_t phase) {
  const Problem* p = problem_of(item);
  if (!p) return;
  const auto wide = with_fp32_results(*p);
  const bool shown = wide && vary(*this, *wide, stride, phase);
  if (plan_.case_name.ends_with(kWide)) return;
  if (!shown || !plan_.case_name.empty() || !plan_.transform.empty())
    vary(*this, *p, stride, phase);
  else if (thorough())
    vary(*this, *p, 4, turn % 4);
  if (item.given.large) item.problem.reset();
}

}  // namespace rlk::harness
