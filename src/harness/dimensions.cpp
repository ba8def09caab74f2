#include "src/harness/dimensions.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace rlk::harness {

using registry::Case;
using registry::CaseTensor;
using registry::Fill;

bool integral(DType t) { return t == DType::i32 || t == DType::i64 || t == DType::u8; }

bool bounds(const CaseTensor& t) {
  const auto& x = t.fill.list;
  return integral(t.dtype) && t.fill.kind == Fill::values && x.size() > 1 && x[0] == 0 &&
         t.shape.size() == 1 && t.shape[0] == static_cast<int64_t>(x.size()) &&
         std::is_sorted(x.begin(), x.end());
}

namespace {
// In all cases that have both, and there are some.
bool equal(const std::map<const Case*, int64_t>& x, const std::map<const Case*, int64_t>& y) {
  bool any = false;
  for (const auto& [c, size] : x)
    if (const auto at = y.find(c); at != y.end()) {
      if (at->second != size) return false;
      any = true;
    }
  return any;
}
}  // namespace

Dimensions::Dimensions(const std::vector<Case>& cases) {
  for (const Case& c : cases)
    for (const CaseTensor& t : c.inputs)
      for (std::size_t a = 0; a < t.shape.size(); ++a) {
        const auto [at, fresh] = number_.try_emplace(key(c, t, a), number_.size());
        if (fresh) sizes_.emplace_back();
        sizes_[at->second][&c] = t.shape[a];
      }
  for (std::size_t i = 0; i < sizes_.size(); ++i) {
    first_.push_back(i);
    for (std::size_t j = 0; j < i && first_[i] == i; ++j)
      if (equal(sizes_[i], sizes_[j])) first_[i] = first_[j];
  }
}

std::vector<Extent> Dimensions::of(const Case& c) const {
  std::map<std::size_t, Extent> by_number;
  for (std::size_t t = 0; t < c.inputs.size(); ++t)
    for (std::size_t a = 0; a < c.inputs[t].shape.size(); ++a) {
      Extent& e = by_number[first_[number_.at(key(c, c.inputs[t], a))]];
      e.places.push_back({t, a});
      if (bounds(c.inputs[t]) || e.size(c) < 1) e.resizable = false;
    }
  std::vector<Extent> out;
  out.reserve(by_number.size());
  for (auto& [number, e] : by_number) out.push_back(std::move(e));
  const auto reduces = [&](const Extent& e) { return c.reduction == e.size(c); };
  for (Extent& e : out) {
    e.reduces = reduces(e);
    e.alone = std::count_if(out.begin(), out.end(), reduces) == 1;
  }
  for (std::size_t t = 0; t < c.inputs.size(); ++t)
    if (Extent* e = range_of(c, t, out)) e->ranges.push_back(t);
  return out;
}

// The extent that a tensor's integers end at, or near to: rather one of another tensor's than how many they are.
Extent* Dimensions::range_of(const Case& c, std::size_t tensor, std::vector<Extent>& all) {
  const Fill& f = c.inputs[tensor].fill;
  if (!integral(c.inputs[tensor].dtype) || f.kind != Fill::integers) return nullptr;
  Extent* best = nullptr;
  std::pair<bool, double> least{};
  for (Extent& e : all) {
    const bool own =
        std::any_of(e.places.begin(), e.places.end(), [&](const auto& p) { return p.tensor == tensor; });
    const std::pair<bool, double> distance{own, std::fabs(f.b - static_cast<double>(e.size(c)))};
    if (distance.second <= 4 && (!best || distance < least)) best = &e, least = distance;
  }
  return best;
}

Dimensions::Key Dimensions::key(const Case& c, const CaseTensor& t, std::size_t axis) {
  std::string arguments;
  for (const CaseTensor& other : c.inputs) arguments += other.argument + " ";
  return {arguments, t.argument, t.shape.size(), axis};
}

void resize(Case& c, const Extent& e, int64_t n) {
  const auto before = static_cast<double>(e.size(c)), after = static_cast<double>(n);
  for (const auto& [t, a] : e.places) c.inputs[t].shape[a] = n;
  for (const std::size_t t : e.ranges) c.inputs[t].fill.b += after - before;
  for (CaseTensor& t : c.inputs) {
    Fill& f = t.fill;
    if (integral(t.dtype) && f.kind == Fill::values && !f.list.empty() && before > 8 &&
        *std::max_element(f.list.begin(), f.list.end()) == before)
      for (double& x : f.list) x = std::floor(x * after / before);
    if (f.kind == Fill::normal && f.b == 1 / std::sqrt(before)) f.b = 1 / std::sqrt(after);
  }
  for (auto& [name, value] : c.attributes)
    if (auto* i = std::get_if<int64_t>(&value); i && before > 8 && static_cast<double>(*i) == before) *i = n;
  if (e.reduces) c.reduction = e.alone ? n : std::max(c.reduction, n);
}

}  // namespace rlk::harness
