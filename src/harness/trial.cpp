#include "src/harness/trial.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "registry/reference.hpp"
#include "src/harness/derived.hpp"
#include "src/harness/order.hpp"
#include "src/harness/promises/promises.hpp"
#include "src/resolve.hpp"
#include "src/sizes.hpp"
#include "src/text.hpp"

namespace rlk::harness {
namespace {

using Clock = std::chrono::steady_clock;
// Of a run that leaves nothing out: passes over the long lists of transforms, behind those over the usual ones.
constexpr std::size_t kWidePasses = 3;
double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Errors may be this many times as large.
registry::Bound times(registry::Bound b, double factor) {
  b.value *= factor, b.ulps *= factor, b.absolute *= factor, b.unrounded *= factor;
  return b;
}

// Whether a result's numbers are at most so large, and the others those of the truth.
bool within(const Array& got, const Array& truth, double most) {
  for (int64_t i = 0; i < got.numel(); ++i) {
    const double x = registry::load(got.dtype, got.bytes.data(), i),
                 y = registry::load(truth.dtype, truth.bytes.data(), i);
    if (std::isfinite(y) ? !(std::fabs(x) <= most) : std::isnan(y) ? !std::isnan(x) : x != y) return false;
  }
  return true;
}

// Rounded once, as a result is; in fp64. What lies beyond the range stays, for a result may end at its edge.
Array rounded(Array x, DType to) {
  for (int64_t i = 0; i < x.numel(); ++i) {
    const double y = registry::load(x.dtype, x.bytes.data(), i);
    std::byte raw[8] = {};
    registry::store(to, raw, 0, y);
    const double once = registry::load(to, raw, 0);
    if (std::isfinite(once)) registry::store(x.dtype, x.bytes.data(), i, once);
  }
  return x;
}

// Bounds are of the ops' own data: elsewhere errors may be this many times as large.
constexpr double kFew = 4;

// Elements of the truth become the result's where its inputs' last places could make them so: within what neighbours
// span, or once more as far.
void move_within_reach(Array& truth, const std::vector<Array>& neighbours, const Array& got) {
  for (int64_t i = 0; i < truth.numel(); ++i) {
    const double x = registry::load(got.dtype, got.bytes.data(), i);
    double least = registry::load(truth.dtype, truth.bytes.data(), i), most = least;
    bool same_kind = false;
    for (const Array& a : neighbours) {
      const double y = registry::load(a.dtype, a.bytes.data(), i);
      same_kind |= (std::isnan(x) && std::isnan(y)) || (std::isinf(x) && x == y);
      if (std::isfinite(y)) least = std::min(least, y), most = std::max(most, y);
    }
    const double reach = most - least;
    if (same_kind || (std::isfinite(least) && least - reach <= x && x <= most + reach))
      registry::store(truth.dtype, truth.bytes.data(), i, x);
  }
}

// And where what is no number is none in the library's result either.
void take_no_numbers(Array& truth, const Array& own, const Array& got) {
  for (int64_t i = 0; i < truth.numel(); ++i) {
    const double x = registry::load(got.dtype, got.bytes.data(), i),
                 y = registry::load(own.dtype, own.bytes.data(), i);
    if ((std::isnan(x) && std::isnan(y)) || (std::isinf(x) && x == y))
      registry::store(truth.dtype, truth.bytes.data(), i, x);
  }
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

Trial::Trial(const Target& target, const Plan& plan, double seconds, bool isolated, References& references,
             Record& record)
    : target_(target),
      plan_(plan),
      references_(references),
      record_(record),
      isolated_(isolated),
      start_(Clock::now()),
      seconds_(seconds) {}

bool Trial::going() const {
  return !(plan_.stop && plan_.stop->load()) && (seconds_ <= 0 || since(start_) < seconds_);
}

double Trial::patience(const Problem& p, double times) const {
  // However many calls one step stands for: what hangs is not waited for hours.
  return plan_.patience * (times > 1 ? 2 : 1) + 100 * references_.seconds_of(p) * std::max(1.0, times);
}

registry::Bound Trial::bound_of(const Problem& p, const char* result, DType dtype) const {
  if (p.ruled) return {registry::Bound::none, 0, 0};
  if (p.exact) return {registry::Bound::bits, 0, 0};
  return p.op->bound({result, target_.dtype, dtype, target_.entry.arithmetic, p.reduction});
}

bool Trial::near_truth(const Problem& p, std::size_t result, const registry::Bound& bound, const Array& got) {
  Array right = rounded(references_.truth_of(p).results[result], got.dtype);
  std::vector<Array> others;
  for (const Outcome& o : references_.neighbours_of(p))
    others.push_back(rounded(o.results[result], got.dtype));
  // What the library's own gives by a written rule is as near as that arithmetic comes.
  if (const Outcome* proved = references_.proved_of(p))
    others.push_back(rounded(proved->results[result], got.dtype));
  move_within_reach(right, others, got);
  if (const auto& own = references_.own_of(p); own && overflows(p))
    take_no_numbers(right, own->results[result], got);
  // Rows may be of one element, so that the peak is the whole result's.
  const double peak = peak_of(p, result, right);
  if (const double nothing = nothing_of(p, bound); peak <= nothing) return within(got, right, nothing);
  Array whole = right;
  for (int64_t i = 0; i < right.numel(); ++i) registry::store(right.dtype, whole.bytes.data(), i, peak);
  const registry::Bound b = times(bound, kFew);
  Difference where{};
  return Distance("", got.dtype, b).add(got, right, b, 0, where, {.instead = &whole}).empty();
}

// By the size of its errors a result that is nothing beside the call's others is measured by those: what its sums are made of
// cancels in exact arithmetic alone. Less than zero: not so.
double Trial::nothing_of(const Problem& p, const registry::Bound& bound) {
  if (bound.metric != registry::Bound::rms && bound.metric != registry::Bound::peak) return -1;
  double most = 0;
  for (const Array& a : references_.truth_of(p).results)
    if (a.dtype != DType::none) most = std::max(most, largest(a));
  return 0x1p-18 * most;
}
bool Trial::is_nothing(const Problem& p, std::size_t result, const registry::Bound& bound, const Array& got) {
  const Array& truth = references_.truth_of(p).results[result];
  const double nothing = nothing_of(p, bound);
  return largest(truth) <= nothing && within(got, truth, nothing);
}

// The largest number of a result.
double Trial::peak_of(const Problem& p, std::size_t result, const Array& right) {
  double peak = largest(right);
  // A few sums may all have cancelled: what sums of so many such terms are on average.
  constexpr int64_t kFewSums = 16;
  if (right.numel() < kFewSums)
    peak = std::max(peak, largest(references_.scale_of(p).results[result]) /
                              std::sqrt(static_cast<double>(std::max<int64_t>(1, p.reduction))));
  return peak;
}

// Whether numbers on the way may be too large for fp32.
bool Trial::overflows(const Problem& p) {
  for (const Outcome* o : {&references_.truth_of(p), &references_.scale_of(p)})
    for (const Array& a : o->results)
      if (largest(a) > 0x1p100) return true;
  return false;
}

void Trial::fail(Promise promise, const Problem& p, const std::string& transform, const std::string& result,
                 const Difference* where, std::string text) {
  Failure f = failure_of(target_.entry, plan_, promise, std::move(text));
  f.case_name = p.name;
  f.shape = p.shape_text();
  f.transform = transform;
  f.result = result;
  if (where) f.index = where->index, f.expected = where->expected, f.got = where->got, f.bits = where->bits;
  record_.fail(f);
}

bool Trial::healthy(const Problem& p, const std::string& transform, const Outcome& out) {
  judge_returns(*this);
  if (!judge_predicate(*this, p, transform, out)) return false;
  judge_purity(*this, p, transform, out);
  return true;
}

const Outcome* Trial::outcome_of(const Problem& p) const {
  const auto at = outcomes_.find(p.name + p.shape_text());
  return at == outcomes_.end() ? nullptr : &at->second;
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
  if (!is_derived(only)) op->cases({take, plan.seed});
  if (is_derived(only))
    derived_cases(*op, target.dtype, plan.seed, [&](const Derived& d) { take(d.given); }, only);
}

void Trial::collect() {
  const registry::Op* op = registry::find(target_.entry.op);
  const std::string only = plain_name(plan_.case_name);
  const auto take = [&](registry::Case c) {
    if (dtype_of_case(c, *op->schema) != target_.dtype) return;
    if (only.empty() ? c.large && !thorough() : c.name != only) return;
    items_.push_back({std::move(c), {}});
  };
  if (!is_derived(only)) op->cases({take, plan_.seed});
}

// Behind the op's own, on which nobody's patience hangs any more.
void Trial::derive() {
  const std::string only = plain_name(plan_.case_name);
  if (only.empty() ? plan_.passes == 1 : !is_derived(only)) return;
  if (!items_.empty() && problem_of(items_.front())) record_.begin_ours(*items_.front().problem);
  const auto& all =
      references_.derived_of(*registry::find(target_.entry.op), target_.dtype, plan_.seed, only);
  for (const Derived& d : all)
    if (only.empty() ? !d.given.large || thorough() : d.given.name == only)
      items_.push_back({d.given, {}, false, d.alone});
}

const Problem* Trial::problem_of(Item& item) {
  if (item.problem) return item.problem.get();
  auto p = references_.problem_of(*registry::find(target_.entry.op), item.given, plan_.seed);
  if (!p) {
    record_.note(std::string(p.status().message()));
    return nullptr;
  }
  item.problem = std::move(*p);
  return item.problem.get();
}

void Trial::run() {
  collect();
  if (items_.empty() && !is_derived(plan_.case_name)) {
    for (const Promise p : kPromises) record_.untried(p, "no case has this dtype");
  }
  std::size_t seen = 0;
  const auto look = [&] {
    for (; seen < items_.size() && going(); ++seen) {
      look_at(items_[seen]);
      if (items_[seen].given.large || is_derived(items_[seen].given.name)) forget(items_[seen]);
    }
  };
  look();
  if (seen == items_.size() && going()) derive();
  look();
  if (seen == items_.size() && going()) again();
  if (seen == items_.size() && going()) transforms();
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
  if (is_derived(p->name)) {
    record_.begin_ours(*p);
    if (!references_.own_of(*p)) return leave_out(item);
  }
  const auto wide = with_fp32_results(*p);
  if (!plan_.case_name.ends_with(kWide)) {
    call_and_judge(*p);
    if (default_choice(*p, target_.subject) == target_.entry.implementation) record_.default_for(p->name);
  }
  if (wide) call_and_judge(*wide);
}

// A derived case that is no call.
void Trial::leave_out(Item& item) {
  forget(item);
  item.invalid = true;
}

void Trial::forget(Item& item) {
  if (item.problem) {
    references_.leave(*item.problem);
    if (const auto wide = with_fp32_results(*item.problem)) references_.leave(*wide);
  }
  item.problem.reset();
}

void Trial::call_and_judge(const Problem& p) {
  if (!record_.begin(p, "", Step::judged, patience(p))) return;
  // A reference may have been this very call.
  const Outcome* const known = references_.call_of(p, *target_.subject.implementation);
  Outcome out = known ? *known : execute(p, target_.subject);
  if (!healthy(p, "", out)) {
    if (out.code == RLK_NO_IMPLEMENTATION && refusals_.size() < 4) refusals_.emplace_back(p, out.text);
    return;
  }
  record_.corpus(p.name, fmt::format("{:016x}", hash_of(out)));
  count_sizes(p);
  record_.begin_ours(p);
  // Bounds are for the ops' own data: where a rule has judged a derived case, they have nothing to add.
  if (judge_equal_bits(*this, p, out) && is_derived(p.name)) return;
  const Outcome& truth = references_.truth_of(p);
  if (truth.code != RLK_OK && is_derived(p.name)) return;  // no call after all
  if (truth.code != RLK_OK)
    record_.note(fmt::format("{} '{}': the reference failed: {}", target_.entry.op, p.name, truth.text));
  else
    judge_accuracy(*this, p, out);
  if (!p.large && !is_derived(p.name)) outcomes_.insert_or_assign(p.name + p.shape_text(), std::move(out));
}

// The op's own calls once more, backwards and, with time, in a drawn order: what an earlier call left behind is
// another one's then.
void Trial::again() {
  const std::string transform = kAnotherOrder;
  if (!plan_.case_name.empty()) return;
  if (!wants(transform)) return;
  std::vector<Item*> order;
  for (Item& item : items_)
    if (item.given.order_probe.empty() && !item.given.large && !item.invalid && !is_derived(item.given.name))
      order.insert(order.begin(), &item);
  const auto turn = [&] {
    for (Item* item : order) {
      const Problem* p = problem_of(*item);
      if (!p || !going() || !record_.begin(*p, transform, Step::judged, patience(*p))) continue;
      record_.transform_known(transform);
      judge_again(*this, *p, transform);
    }
  };
  turn();
  if (plan_.passes == 1) return;
  const registry::CaseSink draws([](const registry::Case&) {}, plan_.seed);
  for (std::size_t i = order.size(); i > 1; --i)
    std::swap(order[i - 1], order[static_cast<std::size_t>(draws.draw(0, static_cast<int64_t>(i) - 1))]);
  turn();
}

// Each transform comes `passes` times, each time on another case: pass by pass, so that a clock that ends
// early has seen each once. Without a number of passes first as often as at the normal budget, then with the
// long lists: sizes of batches to the thousands cost most of the time, and a case shows as much as another.
void Trial::transforms() {
  std::vector<Item*> list, brief;
  for (Item& item : items_)
    if (item.given.order_probe.empty() && !item.invalid && (!item.alone || !plan_.case_name.empty()))
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
  // Brief cases have few transforms of their own, so they take no part in the turns; and there are so many of them
  // that a short budget tries each transform on every third.
  const std::size_t share = plan_.passes == 1 ? 3 : 1;
  for (std::size_t i = 0; i < brief.size(); ++i)
    if (going()) vary_item(*brief[i], 0, {share, i % share, thorough()});
  const std::size_t stride = wants_all() ? 1 : std::max<std::size_t>(1, sorted.size());
  std::size_t pass = 0;
  const auto passes = [&](std::size_t count, bool wide) {
    for (std::size_t n = 0; n < std::min(stride, count); ++n, ++pass) {
      for (std::size_t c = 0; c < sorted.size(); ++c) {
        if (!going()) return;
        vary_item(*sorted[c].second, c, {stride, (c + pass) % stride, wide});
      }
      if (pass == 0) record_.complete();
    }
  };
  if (plan_.passes > 0 || !thorough())
    passes(plan_.passes > 0 ? static_cast<std::size_t>(plan_.passes) : stride, thorough());
  else
    passes(wants_all() ? 0 : Plan::kNormal, false), passes(kWidePasses, true);
}

// fp32 results show what rounding to 16 bits hides: where they exist they get every transform, and the
// rounded ones, which differ in their last step, every fourth, or none when not everything is wanted.
void Trial::vary_item(Item& item, std::size_t place, const Turn& turn) {
  const Problem* p = problem_of(item);
  if (!p) return;
  const auto wide = with_fp32_results(*p);
  const bool shown = wide && vary(*this, *wide, turn);
  if (plan_.case_name.ends_with(kWide)) return;
  if (!shown || !plan_.case_name.empty() || !plan_.transform.empty())
    vary(*this, *p, turn);
  else if (turn.wide)
    vary(*this, *p, {4 * turn.stride, 4 * turn.phase + place % 4, true});
  if (item.given.large || is_derived(item.given.name)) item.problem.reset();
}

}  // namespace rlk::harness
