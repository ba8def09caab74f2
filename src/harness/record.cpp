#include "src/harness/record.hpp"

#include <algorithm>

#include "src/harness/wire.hpp"

namespace rlk::harness {
namespace {

// The fields of each struct, in the order in which they travel.
template <class Wire>
void fields(Wire& w, auto& s)
  requires std::is_same_v<std::remove_const_t<std::remove_reference_t<decltype(s)>>, Step>
{
  w(s.number, s.kind, s.case_name, s.shape, s.transform, s.patience);
}
template <class Wire>
void fields(Wire& w, auto& f)
  requires std::is_same_v<std::remove_const_t<std::remove_reference_t<decltype(f)>>, Failure>
{
  w(f.promise, f.op, f.implementation, f.level, f.device, f.dtype, f.case_name, f.shape, f.transform, f.seed,
    f.result, f.index, f.expected, f.got, f.bits, f.text, f.beside_others);
}
template <class Wire>
void fields(Wire& w, auto& a)
  requires std::is_same_v<std::remove_const_t<std::remove_reference_t<decltype(a)>>, Accuracy>
{
  w(a.result, a.dtype, a.metric, a.bound, a.bound_ulps, a.bound_absolute, a.worst, a.p999, a.share_exact,
    a.worst_ulps, a.elements, a.ulps, a.over_length);
}
template <class Wire>
void fields(Wire& w, auto& o)
  requires std::is_same_v<std::remove_const_t<std::remove_reference_t<decltype(o)>>, Order>
{
  w(o.argument, o.result, o.shape, o.by_rows, o.equal);
}

void merge(Accuracy& all, const Accuracy& one) {
  const auto total = static_cast<double>(all.elements + one.elements);
  if (total > 0)
    all.share_exact = (all.share_exact * static_cast<double>(all.elements) +
                       one.share_exact * static_cast<double>(one.elements)) /
                      total;
  all.bound = std::max(all.bound, one.bound);
  all.worst = std::max(all.worst, one.worst);
  all.p999 = std::max(all.p999, one.p999);
  all.worst_ulps = std::max(all.worst_ulps, one.worst_ulps);
  all.elements += one.elements;
  for (std::size_t i = 0; i < all.ulps.size(); ++i) all.ulps[i] += one.ulps[i];
  for (const auto& [length, error] : one.over_length) {
    const auto at = std::lower_bound(all.over_length.begin(), all.over_length.end(),
                                     std::pair<int64_t, double>{length, -1});
    if (at != all.over_length.end() && at->first == length)
      at->second = std::max(at->second, error);
    else
      all.over_length.insert(at, {length, error});
  }
}

}  // namespace

enum class Record::Event : int {
  step,
  tried,
  refused,
  unpromised,
  untried,
  fail,
  covered,
  size,
  accuracy,
  order,
  corpus,
  default_for,
  over_refused,
  note,
  transform_known,
  complete,
  finish
};

template <class... T>
void Record::tell(Event e, const T&... values) {
  if (!mirror) return;
  LineWriter line;
  line(e);
  [[maybe_unused]] const auto put = [&](const auto& value) {
    if constexpr (requires { fields(line, value); })
      fields(line, value);
    else
      line(value);
  };
  (put(values), ...);
  std::fprintf(mirror, "%s\n", line.text().c_str());
}

Failure failure_of(const Entry& target, const Plan& plan, Promise promise, std::string text) {
  Failure f;
  f.promise = promise;
  f.op = target.op;
  f.implementation = target.implementation;
  f.level = target.level;
  f.device = plan.device;
  f.dtype = target.dtype;
  f.seed = plan.seed;
  f.text = std::move(text);
  return f;
}

bool Record::begin(const Problem& p, std::string transform, Step::Kind kind, double patience) {
  const int64_t number = now.number + 1;
  now = {number, kind, p.name, p.shape_text(), std::move(transform), patience};
  if ((number < resume.from && kind != Step::base) || resume.dead.count(number)) return false;
  announce();
  return true;
}
void Record::begin_ours(const Problem& p) {
  now = {now.number, Step::ours, p.name, p.shape_text(), {}, 0};
  announce();
}
void Record::announce() {
  tell(Event::step, now);
  if (mirror) std::fflush(mirror);  // what comes next may end the process
}

void Record::tried(Promise p, int64_t n) {
  entry.promises[p].tried += n;
  tell(Event::tried, p, n);
}
void Record::refused(Promise p) {
  ++entry.promises[p].refused;
  tell(Event::refused, p);
}
void Record::unpromised(Promise p, const std::string& why) {
  entry.promises[p].promised = false;
  entry.promises[p].why = why;
  tell(Event::unpromised, p, why);
}
void Record::untried(Promise p, const std::string& why) {
  if (entry.promises[p].why.empty()) entry.promises[p].why = why;
  tell(Event::untried, p, why);
}
void Record::fail(const Failure& f) {
  Tally& tally = entry.promises[f.promise];
  ++tally.failed;
  if (tally.promised) failures.push_back(f);
  tell(Event::fail, f);
}
void Record::covered(const std::string& dimension) {
  ++entry.covered[dimension];
  tell(Event::covered, dimension);
}
void Record::size(const std::string& dimension, const std::vector<int64_t>& extent) {
  std::vector<int64_t>& known = entry.sizes[dimension];
  known.resize(std::max(known.size(), extent.size()));
  bool grown = false;
  for (std::size_t i = 0; i < extent.size(); ++i) {
    grown |= extent[i] > known[i];
    known[i] = std::max(known[i], extent[i]);
  }
  if (grown) tell(Event::size, dimension, extent);
}
void Record::accuracy(const Accuracy& a) {
  const auto same = [&](const Accuracy& other) {
    return other.result == a.result && other.dtype == a.dtype && other.metric == a.metric;
  };
  const auto at = std::find_if(entry.accuracy.begin(), entry.accuracy.end(), same);
  if (at == entry.accuracy.end())
    entry.accuracy.push_back(a);
  else
    merge(*at, a);
  tell(Event::accuracy, a);
}
void Record::order(const Order& o) {
  entry.orders.push_back(o);
  tell(Event::order, o);
}
void Record::corpus(const std::string& case_name, const std::string& hash) {
  entry.corpus[case_name] = hash;
  tell(Event::corpus, case_name, hash);
}
void Record::default_for(const std::string& case_name) {
  entry.default_for.push_back(case_name);
  tell(Event::default_for, case_name);
}
void Record::over_refused(const std::string& text) {
  entry.over_refused.push_back(text);
  tell(Event::over_refused, text);
}
void Record::note(const std::string& text) {
  notes.push_back(text);
  tell(Event::note, text);
}
void Record::transform_known(const std::string& name) {
  if (knows_transform) return;
  knows_transform = true;
  tell(Event::transform_known, name);
}
void Record::complete() {
  entry.complete = true;
  tell(Event::complete);
}
void Record::finish() {
  finished = true;
  tell(Event::finish);
  if (mirror) std::fflush(mirror);
}

bool Record::replay(std::string_view text) {
  LineReader line(text);
  Event e{};
  line(e);
  Promise p{};
  int64_t n = 0;
  std::string name, value;
  const auto known = [&] { return line.good() && static_cast<std::size_t>(p) < kPromises.size(); };
  switch (e) {
    case Event::step: {
      Step s;
      fields(line, s);
      return line.good() && (now = s, true);
    }
    case Event::tried:
      line(p, n);
      return known() && (tried(p, n), true);
    case Event::refused:
      line(p);
      return known() && (refused(p), true);
    case Event::unpromised:
      line(p, name);
      return known() && (unpromised(p, name), true);
    case Event::untried:
      line(p, name);
      return known() && (untried(p, name), true);
    case Event::fail: {
      Failure f;
      fields(line, f);
      p = f.promise;
      return known() && (fail(f), true);
    }
    case Event::covered:
      line(name);
      return line.good() && (covered(name), true);
    case Event::size: {
      std::vector<int64_t> extent;
      line(name, extent);
      return line.good() && (size(name, extent), true);
    }
    case Event::accuracy: {
      Accuracy a;
      fields(line, a);
      return line.good() && (accuracy(a), true);
    }
    case Event::order: {
      Order o;
      fields(line, o);
      return line.good() && (order(o), true);
    }
    case Event::corpus:
      line(name, value);
      return line.good() && (corpus(name, value), true);
    case Event::default_for:
      line(name);
      return line.good() && (default_for(name), true);
    case Event::over_refused:
      line(name);
      return line.good() && (over_refused(name), true);
    case Event::note:
      line(name);
      return line.good() && (note(name), true);
    case Event::transform_known:
      line(name);
      return line.good() && (transform_known(name), true);
    case Event::complete:
      return line.good() && (complete(), true);
    case Event::finish:
      return line.good() && (finish(), true);
  }
  return false;
}

}  // namespace rlk::harness
