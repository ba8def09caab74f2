#include "src/harness/derived.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "registry/reference.hpp"
#include "src/harness/dimensions.hpp"
#include "src/harness/execute.hpp"
#include "src/harness/problem.hpp"

namespace rlk::harness {
namespace {

using registry::Case;
using registry::CaseTensor;
using registry::Fill;

constexpr const char* kMark = "; ";  // between a case's name and what is different

class Deriver {
 public:
  Deriver(const registry::Op& op, DType dtype, uint64_t seed, const std::function<void(Derived)>& take,
          std::string_view only)
      : op_(op), seed_(seed), take_(take), only_(only) {
    op.cases({[&](Case c) {
                if (dtype_of_case(c, *op.schema) == dtype && !c.sampled && !c.large && c.shared.empty() &&
                    c.order_probe.empty())
                  bases_.push_back(std::move(c));
              },
              seed});
    dimensions_.emplace(bases_);
  }

  void all() {
    larger();
    drawn_sizes();
    many_results();
    attributes();
    drawn_options();
    left_out();
    other_bounds();
    far_integers();
    nothing();
    other_dtypes();
    small_numbers();
    specials();
    orders_of_integers();
    repeated();
    shared();
    saved();
  }

 private:
  // The case's dimensions. Axes that one layout of several takes for the same size are found by trying: alone they cannot
  // be resized.
  std::vector<Extent> extents_of(const Case& c) const {
    const auto known = extents_.find(c.name);
    if (known != extents_.end()) return known->second;
    std::vector<Extent> all = dimensions_->of(c);
    const auto moves = [&](const Extent& e) {
      return std::any_of(std::begin(kLeast), std::end(kLeast), [&](int64_t n) {
        Case d = c;
        resize(d, e, n);
        return n != e.size(c) && admissible(d);
      });
    };
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (!all[i].resizable || moves(all[i])) continue;
      for (std::size_t j = i + 1; j < all.size(); ++j) {
        if (!all[j].resizable || all[j].size(c) != all[i].size(c)) continue;
        Extent both = all[i];
        both.places.insert(both.places.end(), all[j].places.begin(), all[j].places.end());
        both.ranges.insert(both.ranges.end(), all[j].ranges.begin(), all[j].ranges.end());
        if (!moves(both)) continue;
        all[i] = std::move(both);
        all.erase(all.begin() + static_cast<std::ptrdiff_t>(j));
        break;
      }
    }
    return extents_[c.name] = std::move(all);
  }
  static constexpr int64_t kLeast[] = {1, 2, 3, 16};

  // By what they are for: another case leaves them as they are.
  registry::CaseSink draws_for(const std::string& of, std::size_t turn) const {
    return {[](const Case&) {}, hash_bytes(of.data(), of.size(), seed_ + turn)};
  }

  // Of cases made from this one something is asked for.
  bool wanted(const Case& c) const { return only_.empty() || c.name == base_name(only_); }

  void emit(Case c, const std::string& difference, bool large = false, bool alone = false) {
    c.name += kMark + difference;
    emit_named(std::move(c), large, alone);
  }
  void emit_named(Case c, bool large, bool alone) {
    // Without a rule truths of inputs beside these must judge, which takes many times as long.
    if (alone && !op_.rule && without_rule_++ % 4 != 0) large = true;
    c.brief = true;
    c.large = large;
    if (!names_.insert(c.name).second) {
      // Another dimension left this tensor as it is.
      for (const CaseTensor& t : c.inputs) c.name += fmt::format(" [{}]", fmt::join(t.shape, ","));
      if (!names_.insert(c.name).second) return;
    }
    if (!only_.empty() && c.name != only_) return;
    if (admissible(c)) take_({std::move(c), alone});
  }

  // ---- one extent far larger, the others as small as they may be where the work would be too much

  void larger() {
    using Key = std::tuple<std::string, std::size_t, std::size_t>;  // argument, rank, axis
    std::set<Key> seen, sized;
    for (const Case& c : bases_) {
      const std::vector<Extent> extents = extents_of(c);
      std::vector<Extent> fresh;
      for (const Extent& e : extents) {
        const auto shape = [&](const Extent::Place& p) { return c.inputs[p.tensor].shape.size(); };
        const auto key = [&](const Extent::Place& p) {
          return Key(c.inputs[p.tensor].argument, shape(p), p.axis);
        };
        const auto known = [&](const Extent::Place& p) { return seen.contains(key(p)); };
        if (!e.resizable || std::all_of(e.places.begin(), e.places.end(), known)) continue;
        const Case little = least(c, extents, e);
        // The last axes are the same whatever stands before them.
        bool is_new = false;
        for (const auto& p : e.places)
          is_new |= sized.insert(Key(c.inputs[p.tensor].argument, 0, shape(p) - p.axis)).second;
        if (is_new) many_sizes(c, little, extents, e), fresh.push_back(e);
        const auto larger = enlarged(little, extents, e, 0x1p20);
        if (!larger) continue;
        for (const auto& p : e.places) seen.insert(key(p));
        const auto emit_larger = [&](const Case& d, bool large, bool alone = false) {
          const CaseTensor& t = d.inputs[e.places[0].tensor];
          emit(d, fmt::format("{}=[{}]", t.argument, fmt::join(t.shape, ",")), large, alone);
        };
        emit_larger(*larger, false);
        if (const auto largest = enlarged(little, extents, e, 0x1p24)) emit_larger(*largest, true, true);
      }
      every_size(c, extents, fresh);
      pairs_of_sizes(c, extents, fresh);
      joint_sizes(c, extents, fresh);
    }
  }

  // Every dimension has each size to 127 once, beside whichever the others have then, in as few calls as the work of one
  // allows.
  void every_size(const Case& c, const std::vector<Extent>& extents, const std::vector<Extent>& fresh) {
    constexpr int64_t kSizes = 127;  // a prime: steps of any width visit all
    const Case little = least(c, extents, {});
    for (int64_t i = 0; i < kSizes && !fresh.empty(); ++i) {
      std::vector<std::size_t> waiting(fresh.size()), next;
      std::iota(waiting.begin(), waiting.end(), std::size_t{0});
      for (; !waiting.empty(); waiting = std::exchange(next, {})) {
        Case d = little;
        for (const std::size_t j : waiting) {
          Case more = d;
          resize(more, fresh[j],
                 1 + (i * static_cast<int64_t>(2 * j + 1) + 11 * static_cast<int64_t>(j)) % kSizes);
          if (work_of(more, extents) <= 0x1p17 && elements_in(more) <= (1 << 15) && admissible(more))
            d = std::move(more);
          else
            next.push_back(j);
        }
        if (next.size() == waiting.size()) break;  // no call has them
        for (CaseTensor& t : d.inputs) quicken(t);
        const std::string shapes = shapes_of(d);
        emit(std::move(d), "sizes " + shapes, i % 2 == 1, true);
      }
    }
  }

  // Any two dimensions have sizes between any two of these bounds at once, beside whichever the others have then: a kernel
  // for so many rows may differ by width.
  void pairs_of_sizes(const Case& c, const std::vector<Extent>& extents, const std::vector<Extent>& fresh) {
    using Pair = std::array<std::size_t, 4>;  // a dimension and its range, another one and its
    const Case little = least(c, extents, {});
    const auto draws = draws_for(c.name, 13);
    std::set<Pair> open;
    for (std::size_t i = 0; i < fresh.size(); ++i)
      for (std::size_t j = i + 1; j < fresh.size(); ++j)
        for (std::size_t r = 0; r < kRanges * kRanges; ++r)
          if (op_.rule || std::max(r / kRanges, r % kRanges) < kFewRanges)
            open.insert({i, r / kRanges, j, r % kRanges});
    for (int made = 0; !open.empty();) {
      // The largest first: most kernels serve all sizes from some bound on.
      const auto largest = std::max_element(
          open.begin(), open.end(), [](const Pair& x, const Pair& y) { return x[1] + x[3] < y[1] + y[3]; });
      const auto [i, of_i, j, of_j] = *largest;
      open.erase(largest);
      Case d = little;
      if (!bring_into(d, extents, fresh[i], of_i, draws) || !bring_into(d, extents, fresh[j], of_j, draws))
        continue;  // no call has them
      const auto first = static_cast<std::size_t>(draws.draw(0, static_cast<int64_t>(fresh.size()) - 1));
      for (std::size_t k = 0; k < fresh.size(); ++k)
        if (const std::size_t other = (first + k) % fresh.size(); other != i && other != j)
          bring_into(d, extents, fresh[other], static_cast<std::size_t>(draws.draw(0, kRanges - 1)), draws);
      for (std::size_t k = 0; k < fresh.size(); ++k)
        for (std::size_t l = k + 1; l < fresh.size(); ++l)
          open.erase({k, range_of(fresh[k].size(d)), l, range_of(fresh[l].size(d))});
      for (CaseTensor& t : d.inputs) quicken(t);
      const std::string shapes = shapes_of(d);
      // At the normal budget the largest, and every eighth of the others.
      const bool large = made >= 6 && made % 8 != 0;
      if (auto other = op_.rule ? dressed(d, c, static_cast<std::size_t>(made)) : std::nullopt) {
        other->name += kMark + ("sizes " + shapes);  // the name of its own base, and what is different
        emit_named(std::move(*other), made >= 6, true);
      }
      emit(std::move(d), "sizes " + shapes, large, true);
      ++made;
    }
  }
  // Any two dimensions as large together as the work of one call allows, along their whole trade; and any three, of one
  // size or one of them longer: what differs where several are large differs nowhere that only one is. Each of the two
  // 16-bit dtypes has every second of them.
  void joint_sizes(const Case& c, const std::vector<Extent>& extents, const std::vector<Extent>& fresh) {
    const Case little = least(c, extents, {});
    const double most = op_.rule ? 0x1p21 : 0x1p18;
    const double side = std::cbrt(most / 2 / work_of(little, extents, 1));
    const auto draws = draws_for(c.name, 17);
    const DType dtype = little.inputs[0].dtype;
    int made = 0;
    const auto one = [&](const std::vector<std::pair<const Extent*, double>>& sizes, const Extent& rest) {
      ++made;
      if ((dtype == DType::f16 && made % 2) || (dtype == DType::bf16 && made % 2 == 0)) return;
      Case d = little;
      for (const auto& [e, n] : sizes)
        if (!grow(d, extents, *e, n, most, draws)) return;
      if (!grow(d, extents, rest, most / work_of(d, extents, 1), most, draws)) return;
      for (CaseTensor& t : d.inputs) quicken(t);
      const std::string shapes = shapes_of(d);
      emit(std::move(d), "joint " + shapes, true, true);
    };
    for (const Extent& x : fresh)
      for (const Extent& y : fresh) {
        if (&x >= &y) continue;
        for (double n : {32, 128, 512, 2048}) one({{&x, n}}, y);
        for (const Extent& z : fresh) {
          if (&y >= &z) continue;
          one({{&x, side}, {&y, side}}, z);
          one({{&x, side / 2}, {&y, side / 2}}, z);
        }
      }
  }
  // To about this size, or to the largest below it that the call, the room and the work allow; in turn a multiple of 16.
  bool grow(Case& c, const std::vector<Extent>& extents, const Extent& e, double n, double most,
            const registry::CaseSink& draws) const {
    constexpr double kLeastSize = 16;
    const auto fits = [&](int64_t size) {
      Case other = c;
      resize(other, e, size);
      if (work_of(other, extents, 8) > most || elements_in(other) > (1 << 22) || !admissible(other))
        return false;
      c = std::move(other);
      return true;
    };
    const bool odd = draws.draw(0, 1);
    for (; n >= kLeastSize; n *= 0.75) {
      const auto size = static_cast<int64_t>(n), sixteen = size / 16 * 16;
      if ((odd && fits(size - draws.draw(0, 3))) || fits(sixteen)) return true;
    }
    return false;
  }
  // Another of the op's cases, with these sizes: in turn those with other options and further operands.
  std::optional<Case> dressed(const Case& d, const Case& base, std::size_t turn) const {
    const auto has = [](const Case& c, const CaseTensor& t) {
      return std::any_of(c.inputs.begin(), c.inputs.end(), [&](const CaseTensor& u) {
        return u.argument == t.argument && u.shape.size() == t.shape.size() && u.dtype == t.dtype;
      });
    };
    std::map<std::string, const Case*> kinds;
    for (const Case& c : bases_)
      if (kind_of(c) != kind_of(base) &&
          std::none_of(c.inputs.begin(), c.inputs.end(),
                       [](const CaseTensor& t) {
                         return (t.fill.kind == Fill::values && !bounds(t)) || t.shape.empty();
                       }) &&
          std::all_of(d.inputs.begin(), d.inputs.end(), [&](const CaseTensor& t) { return has(c, t); }))
        kinds.try_emplace(kind_of(c), &c);
    if (kinds.empty()) return {};
    const Case& other = *std::next(kinds.begin(), static_cast<std::ptrdiff_t>(turn % kinds.size()))->second;
    Case out = other;
    out.exact = false;  // where a rule judges, its data may be any
    for (const Extent& e : extents_of(other))
      for (const auto& [tensor, axis] : e.places)
        for (const CaseTensor& t : d.inputs)
          if (e.resizable && t.argument == other.inputs[tensor].argument && t.shape[axis] != e.size(out))
            resize(out, e, t.shape[axis]);
    for (CaseTensor& t : out.inputs) quicken(t);
    if (work_of(out, extents_of(other), 8) > 0x1p20 || !admissible(out)) return {};
    const auto draws = draws_for(out.name + shapes_of(out), turn);
    if (draws.draw(0, 1)) lengthen(out, draws);
    return out;
  }
  // A window, a part of the vocabulary: to some share of the largest size.
  void lengthen(Case& c, const registry::CaseSink& draws) const {
    int64_t largest = 0;
    for (const CaseTensor& t : c.inputs)
      for (const int64_t n : t.shape) largest = std::max(largest, n);
    for (std::size_t i = 0; i < c.attributes.size(); ++i) {
      const auto* n = std::get_if<int64_t>(&c.attributes[i].second);
      if (!n || *n < 5 || largest < 64) continue;
      Case other = c;
      other.attributes[i].second = draws.draw(largest / 8, largest / 2);
      if (admissible(other)) c = std::move(other);
    }
  }
  static constexpr int64_t kBounds[] = {1, 17, 33, 65, 129, 193, 257, 1025, 8193};
  static constexpr std::size_t kRanges = std::size(kBounds) - 1;
  static constexpr std::size_t kFewRanges =
      6;  // where truths of inputs beside these must judge, which takes their time
  static std::size_t range_of(int64_t n) {
    return static_cast<std::size_t>(std::upper_bound(std::begin(kBounds), std::end(kBounds), n) -
                                    std::begin(kBounds)) -
           1;
  }
  // A drawn size of this range, or a multiple of 16, where the work allows it.
  bool bring_into(Case& c, const std::vector<Extent>& extents, const Extent& e, std::size_t range,
                  const registry::CaseSink& draws) const {
    for (int turn = 0; turn < 4; ++turn) {
      const int64_t n = draws.draw(kBounds[range], kBounds[range + 1] - 1), sixteen = n / 16 * 16;
      Case other = c;
      resize(other, e, turn % 2 == 0 && sixteen >= kBounds[range] ? sixteen : n);
      if (work_of(other, extents, 8) > 0x1p20 || elements_in(other) > (1 << 19) || !admissible(other))
        continue;
      c = std::move(other);
      return true;
    }
    return false;
  }

  // A row of fewer elements than these takes as long as one of so many.
  static double work_of(const Case& c, const std::vector<Extent>& extents, double least_row = 64) {
    // However short a row is, it takes some time; ids are looked up.
    const std::vector<int64_t>& shape = c.inputs[0].shape;
    double work =
        shape.empty() || static_cast<double>(shape.back()) >= least_row || integral(c.inputs[0].dtype)
            ? 1
            : least_row / static_cast<double>(std::max<int64_t>(1, shape.back()));
    for (const Extent& e : extents) work *= std::max<double>(1, static_cast<double>(e.size(c)));
    return work;
  }

  // Sizes close enough that no wide range lies between two; and tails of every length where all else is as small as
  // it may be. In turn with other options and further operands.
  void many_sizes(const Case& c, const Case& little, const std::vector<Extent>& extents, const Extent& e) {
    const auto draws = draws_for(little.name + little.inputs[e.places[0].tensor].argument, 7);
    const auto one = [&](int64_t n, bool large, std::size_t turn = 0, double most = 0x1p18) {
      Case d = little;
      resize(d, e, n);
      if (work_of(d, extents) > most || elements_in(d) > (most > 0x1p18 ? 1 << 20 : 1 << 19)) return false;
      for (CaseTensor& t : d.inputs) quicken(t);
      const CaseTensor& t = d.inputs[e.places[0].tensor];
      const std::string size = fmt::format("{}=[{}]", t.argument, fmt::join(t.shape, ","));
      if (auto other = turn % 4 == 1 && op_.rule ? dressed(d, c, turn / 4) : std::nullopt) {
        other->name += kMark + size;
        emit_named(std::move(*other), large, true);
      } else {
        emit(std::move(d), size, large, true);
      }
      return true;
    };
    // Each length to 127 was tried beside others: alone, by every third behind 32, other ones in each dtype.
    const int third = std::countr_zero(static_cast<uint32_t>(little.inputs[0].dtype)) % 3;
    for (int64_t n = 1; n < 128; ++n)
      if (n <= 32 || n % 3 == third) one(n, true);
    // Without a rule a case costs a truth and two more for every operand.
    const bool dear = !op_.rule && little.inputs.size() >= 6;
    int64_t from = 128, step = 0;
    for (int64_t to = from; to < (1 << 17); from = to) {
      to = from + from / (dear ? 8 : 24);
      // Most kernels ask for multiples of 16, and every other kernel is for all else.
      const int64_t n = draws.draw(from, to - 1), sixteen = n / 16 * 16;
      const auto turn = static_cast<std::size_t>(++step);
      if (!one(n, step % 2)) break;
      bool served = false;
      for (const int64_t m : kServed)
        if (m >= from && m < to) served = one(m, step % 2, turn);
      if (!served && sixteen != n) one(sixteen, step % 2, turn);
    }
    // Beyond: what models have, each in one of the dtypes. So many rows take as long as any.
    const bool rows =
        std::any_of(e.places.begin(), e.places.end(), [](const auto& p) { return p.tensor == 0; });
    for (std::size_t i = 0; i < std::size(kServed); ++i)
      if (kServed[i] >= from && i % 3 == static_cast<std::size_t>(third))
        one(kServed[i], true, 0, rows ? 0x1p19 : 0x1p24);
  }
  // Widths, heads times their width, feed-forward widths and vocabularies of models: some kernels are made for one of them.
  static constexpr int64_t kServed[] = {
      256,   320,   384,   512,   576,   640,    768,    896,    1024,   1152,   1280,   1536,
      1792,  2048,  2304,  2560,  2880,  3072,   3584,   4096,   4608,   5120,   6144,   7168,
      8192,  9216,  9728,  11008, 12288, 13824,  14336,  16384,  18432,  18944,  19456,  20480,
      24576, 28672, 32000, 50257, 65536, 102400, 128256, 131072, 151936, 163840, 201088, 262144};

  // Every other dimension as small as the schema lets it be.
  Case least(const Case& c, const std::vector<Extent>& extents, const Extent& e) const {
    Case out = c;
    for (const Extent& other : extents)
      for (int64_t n : kLeast) {
        if (&other == &e || !other.resizable || n >= other.size(out)) continue;
        Case smaller = out;
        resize(smaller, other, n);
        if (admissible(smaller)) out = std::move(smaller);
      }
    return out;
  }
  // The work of a call is at most the product of its dimensions.
  std::optional<Case> enlarged(const Case& c, const std::vector<Extent>& extents, const Extent& e,
                               double most) {
    const auto draws = draws_for(c.name + c.inputs[e.places[0].tensor].argument, e.places[0].axis);
    for (int exponent = 17; exponent >= 6; --exponent) {
      const int64_t drawn = (int64_t{1} << exponent) + draws.draw(1, int64_t{1} << (exponent - 2));
      for (int64_t n : {drawn, drawn / 16 * 16, drawn / 128 * 128}) {
        Case d = c;
        resize(d, e, n);
        if (work_of(d, extents) > most || static_cast<double>(elements_in(d)) > 2 * most || !admissible(d))
          continue;
        for (CaseTensor& t : d.inputs) quicken(t);
        return d;
      }
    }
    return {};
  }

  // ---- all dimensions at once

  void drawn_sizes() {
    const auto draws = draws_for(op_.schema->name, bases_.size());
    const auto draw = [&]() -> int64_t {
      switch (draws.draw(0, 3)) {
        case 0:
          return draws.draw(1, 8);
        case 1:
          return 16 * draws.draw(1, 12);
        case 2:
          return draws.draw(1, 64);
        default:
          return draws.draw(1, 300);
      }
    };
    int made = 0;
    for (int tried = 0; !bases_.empty() && tried < 200 && made < 24; ++tried) {
      const Case& c =
          bases_[static_cast<std::size_t>(draws.draw(0, static_cast<int64_t>(bases_.size()) - 1))];
      const std::vector<Extent> extents = extents_of(c);
      Case d = c;
      for (const Extent& e : extents)
        if (e.resizable && draws.draw(0, 3)) {
          Case other = d;
          resize(other, e, draw());
          if (work_of(other, extents) <= 0x1p20 && admissible(other)) d = std::move(other);
        }
      const std::string shapes = shapes_of(d);
      if (work_of(d, extents) != work_of(c, extents)) emit(std::move(d), "drawn " + shapes, made++ >= 4);
    }
  }

  static std::string shapes_of(const Case& c) {
    std::string shapes;
    for (const CaseTensor& t : c.inputs)
      shapes += fmt::format("{}[{}]", shapes.empty() ? "" : " ", fmt::join(t.shape, ","));
    return shapes;
  }

  // Millions of results of little work each: an error in one of a million.
  void many_results() {
    for (const Case& c : bases_) {
      if (c.exact || c.brief) continue;
      const std::vector<Extent> extents = extents_of(c);
      Case d = least(c, extents, {});
      for (const Extent& e : extents) {
        Case more = d;
        resize(more, e, 1448);
        if (e.resizable && work_of(more, extents) <= 0x1p28 && admissible(more) &&
            results_in(more) >= 100 * results_in(d) && results_in(more) <= (1 << 23))
          d = std::move(more);
      }
      if (results_in(d) < (1 << 20)) continue;
      for (CaseTensor& t : d.inputs) quicken(t);
      return emit(std::move(d), "millions of results", true, true);
    }
  }
  int64_t elements_in(const Case& c) const {
    int64_t n = results_in(c);
    for (const CaseTensor& t : c.inputs) n += Array{t.shape, DType::none, {}}.numel();
    return n;
  }
  int64_t results_in(const Case& c) const {
    const auto p = shell_of(c);
    const auto shapes = p ? result_shapes(*p) : p.status();
    int64_t n = 0;
    for (std::size_t i = 0; shapes && i < shapes->size(); ++i)
      if (p->results[i] != DType::none) n += Array{(*shapes)[i].shape, DType::none, {}}.numel();
    return n;
  }

  // Twelve draws an element are too many for so many elements; and a few integers of a long range are its end and others of
  // its far half.
  static void quicken(CaseTensor& t) {
    int64_t n = 1;
    for (int64_t d : t.shape) n *= d;
    Fill& f = t.fill;
    if (n > (1 << 12) && f.kind == Fill::normal && f.a == 0) f = {Fill::quick, 0, 1.7 * f.b};
    if (n < 8 && integral(t.dtype) && f.kind == Fill::integers && f.b - f.a > 64) {
      const auto from = static_cast<int64_t>((f.a + f.b) / 2), end = static_cast<int64_t>(f.b);
      const registry::CaseSink draws([](const Case&) {}, static_cast<uint64_t>(end));
      Fill few{Fill::values};
      while (std::ssize(few.list) < n) few.list.push_back(static_cast<double>(draws.draw(from, end - 1)));
      if (n > 1 || (n == 1 && draws.draw(0, 1)))
        few.list.back() = f.b - 1;  // which may be none that is allowed
      f = std::move(few);
    }
  }

  // Shapes without data; but integers are there, for they may decide shapes.
  Result<Problem> shell_of(const Case& c) const {
    Case empty;
    empty.name = c.name, empty.results = c.results, empty.attributes = c.attributes;
    for (const CaseTensor& t : c.inputs) {
      int64_t n = 1;
      for (int64_t d : t.shape)
        if (__builtin_mul_overflow(n, d, &n) || n > kMost)
          return Status(RLK_INVALID_ARGUMENT, fmt::format("{}: {} is too large", c.name, t.argument));
      const bool decides = integral(t.dtype) && n <= 4096;
      empty.inputs.push_back({t.argument, decides ? t.shape : std::vector<int64_t>(t.shape.size(), 0),
                              t.dtype, decides ? t.fill : Fill{}});
    }
    auto p = materialise(op_, empty, seed_);
    for (std::size_t i = 0; p && i < p->inputs.size(); ++i)
      for (const CaseTensor& t : c.inputs)
        if (p->inputs[i] && t.argument == op_.schema->arguments[i].name) p->inputs[i]->shape = t.shape;
    return p;
  }
  // By the schema. One dimension may be two axes of a tensor.
  bool admissible(const Case& c) const {
    const auto p = shell_of(c);
    return p && admitted(*p, kMost);
  }
  static constexpr int64_t kMost = int64_t{1} << 24;  // elements of a tensor

  // ---- one thing different, where it makes a difference

  void attributes() {
    const rlk_op_schema& s = *op_.schema;
    for (uint32_t i = 0; i < s.num_attributes; ++i) {
      const rlk_attribute& a = s.attributes[i];
      for (const auto& value : values_of(a))
        where_it_differs(
            [&](Case& c) {
              if (c.exact) return false;  // its data are made for the values it has
              for (auto& [name, old] : c.attributes)
                if (name == a.name) return old != value && (old = value, true);
              c.attributes.emplace_back(a.name, value);
              return true;
            },
            std::visit([&](const auto& x) { return fmt::format("{}={}", a.name, x); }, value));
    }
  }
  // Several of them at once, and operands that the case may do without or take from another one, until any three have met:
  // what one option forgets of another shows where both are set. Of the op's own cases those have that are there.
  void drawn_options() {
    constexpr int kMostTried = 400, kMostMade = 64, kChoices = 3;
    const auto draws = draws_for(op_.schema->name, bases_.size() + 1);
    Combinations met;
    for (const Case& c : bases_) met.add(options_of(c));
    int made = 0;
    for (int tried = 0; !bases_.empty() && tried < kMostTried && made < kMostMade;) {
      std::optional<Case> best;
      std::size_t most = 0;
      for (int i = 0; i < kChoices; ++i, ++tried)
        if (auto d = with_options(draws))
          if (const std::size_t fresh = met.fresh(options_of(*d)); fresh > most)
            most = fresh, best = std::move(d);
      if (!best) continue;
      met.add(options_of(*best));
      emit_named(std::move(*best), made >= 16, made >= 4);
      ++made;
    }
  }
  // A case with several options drawn; its name says which.
  std::optional<Case> with_options(const registry::CaseSink& draws) const {
    const rlk_op_schema& s = *op_.schema;
    const Case& c = bases_[static_cast<std::size_t>(draws.draw(0, std::ssize(bases_) - 1))];
    if ((!op_.rule && (c.exact || c.ruled)) || work_of(c, extents_of(c)) > 0x1p21) return {};
    Case d = c;
    d.exact = false;
    std::string difference;
    int changed = 0;
    const auto keep = [&](Case other, const std::string& text) {
      if (!admissible(other)) return;
      d = std::move(other), ++changed;
      difference += text;
    };
    for (uint32_t i = 0; i < s.num_arguments; ++i) {
      const rlk_argument& a = s.arguments[i];
      if (a.role != RLK_READ || !(a.flags & RLK_OPTIONAL) || draws.draw(0, 2)) continue;
      Case other = d;
      if (std::erase_if(other.inputs, [&](const CaseTensor& t) { return t.argument == a.name; }))
        keep(std::move(other), fmt::format(" no {}", a.name));
      else if (const auto t = borrowed(d, a.name, draws))
        other.inputs.push_back(*t), keep(std::move(other), fmt::format(" {}", a.name));
    }
    for (uint32_t i = 0; i < s.num_attributes; ++i) {
      const std::vector<Value> values = more_values_of(s.attributes[i]);
      if (values.empty() || draws.draw(0, 1)) continue;
      const Value& value = values[static_cast<std::size_t>(draws.draw(0, std::ssize(values) - 1))];
      Case other = d;
      std::erase_if(other.attributes, [&](const auto& x) { return x.first == s.attributes[i].name; });
      other.attributes.emplace_back(s.attributes[i].name, value);
      keep(std::move(other),
           std::visit([&](const auto& x) { return fmt::format(" {}={}", s.attributes[i].name, x); }, value));
    }
    if (changed == 0) return {};
    d.name += kMark + ("options" + difference);
    return d;
  }
  // An operand as another case has it, with sizes of this one: those of axes that are as long there. Numbers only: what
  // integers may be depends on what they belong to.
  std::optional<CaseTensor> borrowed(const Case& c, const std::string& argument,
                                     const registry::CaseSink& draws) const {
    const auto from = static_cast<std::size_t>(draws.draw(0, std::ssize(bases_) - 1));
    for (std::size_t i = 0; i < bases_.size(); ++i) {
      const Case& other = bases_[(from + i) % bases_.size()];
      const CaseTensor* t = tensor_of(other, argument);
      if (!t || integral(t->dtype) || t->fill.kind == Fill::values || !t->strides.empty()) continue;
      CaseTensor out = *t;
      out.batch_axis = -3;
      const bool whole = std::all_of(out.shape.begin(), out.shape.end(), [&](int64_t& n) {
        for (const CaseTensor& u : other.inputs)
          for (std::size_t a = 0; a < u.shape.size(); ++a)
            if (const CaseTensor* v = tensor_of(c, u.argument);
                &u != t && v && u.shape[a] == n && v->shape.size() == u.shape.size())
              return n = v->shape[a], true;
        return n == 1;
      });
      if (whole) return out;
    }
    return {};
  }
  static const CaseTensor* tensor_of(const Case& c, const std::string& argument) {
    const auto at = std::find_if(c.inputs.begin(), c.inputs.end(),
                                 [&](const CaseTensor& t) { return t.argument == argument; });
    return at == c.inputs.end() ? nullptr : &*at;
  }
  // Attributes that are not as usual, and which of the optional operands are there.
  std::vector<std::string> options_of(const Case& c) const {
    std::vector<std::string> out = unusual(c);
    const rlk_op_schema& s = *op_.schema;
    for (const auto& [name, value] : c.attributes)
      if (const auto* x = std::get_if<double>(&value); x && *x <= 0)
        std::replace(out.begin(), out.end(), name, name + (*x < 0 ? " negative" : " 0"));
    for (uint32_t i = 0; i < s.num_arguments; ++i)
      if (s.arguments[i].role == RLK_READ && s.arguments[i].flags & RLK_OPTIONAL)
        out.push_back((tensor_of(c, s.arguments[i].name) ? "" : "no ") + std::string(s.arguments[i].name));
    return out;
  }
  // Options that some case has, and any two and three of them together.
  class Combinations {
   public:
    void add(const std::vector<std::string>& options) {
      each(options, [&](auto three) { met_.insert(three); });
    }
    std::size_t fresh(const std::vector<std::string>& options) {
      std::size_t count = 0;
      each(options, [&](auto three) { count += !met_.contains(three); });
      return count;
    }

   private:
    using Three = std::array<std::size_t, 3>;
    template <class Take>
    void each(const std::vector<std::string>& options, Take take) {
      std::vector<std::size_t> n{0, 1};  // no option
      for (const std::string& option : options)
        n.push_back(number_.try_emplace(option, number_.size() + 2).first->second);
      std::sort(n.begin(), n.end());
      for (std::size_t i = 0; i < n.size(); ++i)
        for (std::size_t j = i + 1; j < n.size(); ++j)
          for (std::size_t k = j + 1; k < n.size(); ++k) take(Three{n[i], n[j], n[k]});
    }
    std::map<std::string, std::size_t> number_;
    std::set<Three> met_;
  };
  using Value = std::variant<int64_t, double, std::string>;
  static std::vector<Value> values_of(const rlk_attribute& a) {
    const double d = a.default_float;
    if (a.type == RLK_FLOAT) return {d == 0 ? 0.4 : 0.6 * d, d + 0.7, d + 1.2};
    if (a.type == RLK_FLAG) return {int64_t{!a.default_int}};
    if (a.type == RLK_INT) return {int64_t{1}, int64_t{3}, a.default_int + 5, (int64_t{1} << 20) + 7};
    std::vector<Value> words;
    for (std::string_view rest = a.choices ? a.choices : ""; !rest.empty();) {
      const auto bar = rest.find('|');
      words.emplace_back(std::string(rest.substr(0, bar)));
      rest = bar == rest.npos ? std::string_view() : rest.substr(bar + 1);
    }
    return words;
  }

  // And those at which something ends: none of it, a little, the other sign.
  static std::vector<Value> more_values_of(const rlk_attribute& a) {
    std::vector<Value> values = values_of(a);
    if (const double d = a.default_float; a.type == RLK_FLOAT) {
      values.insert(values.end(), {d == 0 ? 0.03 : 0.1 * d, -0.6 * d - 0.3});
      if (d != 0) values.emplace_back(0.0);
    }
    return values;
  }

  void left_out() {
    const rlk_op_schema& s = *op_.schema;
    for (uint32_t i = 0; i < s.num_arguments; ++i) {
      const rlk_argument& a = s.arguments[i];
      if (a.role != RLK_READ || !(a.flags & RLK_OPTIONAL)) continue;
      where_it_differs(
          [&](Case& c) {
            return std::erase_if(c.inputs, [&](const CaseTensor& t) { return t.argument == a.name; }) > 0;
          },
          fmt::format("no {}", a.name));
    }
  }

  // What is set to another value than the schema's, and what is there: cases of one kind take one path.
  std::string kind_of(const Case& c) const {
    std::string kind;
    for (const CaseTensor& t : c.inputs) kind += t.argument + " ";
    for (const std::string& option : unusual(c)) kind += option + " ";
    return kind;
  }
  // Attributes with another value than the schema's, and words with theirs.
  std::vector<std::string> unusual(const Case& c) const {
    std::vector<std::string> out;
    const rlk_op_schema& s = *op_.schema;
    for (const auto& [name, value] : c.attributes)
      for (uint32_t i = 0; i < s.num_attributes; ++i) {
        const rlk_attribute& a = s.attributes[i];
        if (name != a.name) continue;
        const auto* whole = std::get_if<int64_t>(&value);
        const auto* real = std::get_if<double>(&value);
        const auto* word = std::get_if<std::string>(&value);
        const bool usual = whole  ? *whole == a.default_int
                           : real ? *real == a.default_float
                                  : std::string_view(a.choices).starts_with(*word);
        if (!usual) out.push_back(word ? name + "=" + *word : name);
      }
    return out;
  }

  // Emits the first case of every kind that `change` changes and whose results differ then by more than roundings.
  template <class Change>
  void where_it_differs(Change change, const std::string& difference) {
    constexpr std::size_t kMostKinds = 24;
    if (!only_.empty() && !only_.ends_with(kMark + difference)) return;
    double spent = 0;
    std::set<std::string> kinds;
    for (std::size_t i = 0; i < bases_.size() && spent < 0x1p23 && kinds.size() < kMostKinds; ++i) {
      const std::string kind = kind_of(bases_[i]);
      if (kinds.contains(kind) || !wanted(bases_[i])) continue;
      Case c = bases_[i];
      const double work = work_of(c, extents_of(c));
      if (work > 0x1p19 || !change(c) || !admissible(c)) continue;
      const Outcome& before = results_of(i);
      spent += work;
      if (before.code != RLK_OK) continue;
      const auto p = materialise(op_, c, seed_);
      if (!p || !differ(before, execute_reference(*p, false))) continue;
      kinds.insert(kind);
      emit(std::move(c), difference, false, kinds.size() > 1);
    }
  }
  const Outcome& results_of(std::size_t base) {
    const auto [at, fresh] = results_.try_emplace(base);
    if (fresh)
      if (const auto p = materialise(op_, bases_[base], seed_)) at->second = execute_reference(*p, false);
    return at->second;
  }
  static bool differ(const Outcome& x, const Outcome& y) {
    if (y.code != RLK_OK || x.results.size() != y.results.size()) return false;
    for (std::size_t i = 0; i < x.results.size(); ++i) {
      const Array &a = x.results[i], &b = y.results[i];
      if (a.dtype != b.dtype || a.shape != b.shape) continue;
      double largest = 0, distance = 0;
      for (int64_t n = 0; n < a.numel(); ++n) {
        const double u = registry::load(a.dtype, a.bytes.data(), n),
                     v = registry::load(b.dtype, b.bytes.data(), n);
        if (!std::isfinite(u) || !std::isfinite(v)) continue;
        largest = std::max(largest, std::fabs(u)), distance = std::max(distance, std::fabs(u - v));
      }
      if (distance > 0.02 * largest) return true;
    }
    return false;
  }

  // ---- integers that decide where things are

  void other_bounds() {
    int made = 0;
    for (const Case& c : bases_) {
      if (std::none_of(c.inputs.begin(), c.inputs.end(), bounds) || made >= 6) continue;
      Case d = c;
      if (made % 2) more_sequences(d, made == 3 ? 100 : made == 5 ? 6000 : 8);
      for (CaseTensor& t : d.inputs)
        if (bounds(t)) cut_again(t.fill.list, made);
      ++made;
      // The longest sequence may be anywhere now.
      for (const CaseTensor& t : d.inputs)
        if (bounds(t) && c.reduction > 0)
          d.reduction = std::max(d.reduction, static_cast<int64_t>(t.fill.list.back()));
      emit(std::move(d), "cut elsewhere");
    }
    one_each();
  }
  // As a batch of first tokens, or of one step of each sequence, is packed.
  void one_each() {
    std::set<std::string> kinds;
    for (const Case& c : bases_) {
      const auto at = std::find_if(c.inputs.begin(), c.inputs.end(), bounds);
      if (at == c.inputs.end() || c.exact || kinds.size() >= 6 || kinds.contains(kind_of(c))) continue;
      const int64_t sequences = std::ssize(at->fill.list) - 1;
      Case d = c;
      for (const Extent& e : extents_of(c))
        if (e.resizable && static_cast<double>(e.size(c)) == at->fill.list.back()) resize(d, e, sequences);
      std::vector<double>& list = d.inputs[static_cast<std::size_t>(at - c.inputs.begin())].fill.list;
      for (std::size_t i = 0; i < list.size(); ++i) list[i] = static_cast<double>(i);
      if (sequences < 2 || !admissible(d)) continue;
      kinds.insert(kind_of(c));
      emit(std::move(d), "one each", kinds.size() > 1, true);
    }
  }
  void more_sequences(Case& c, int64_t least) {
    const auto some = std::find_if(c.inputs.begin(), c.inputs.end(), bounds);
    const int64_t before = some->shape[0] - 1, after = before + draws_for(c.name, 1).draw(least, least + 30);
    Case d = c;
    for (const Extent& e : extents_of(c))
      if (e.resizable && e.size(c) == before) resize(d, e, after);
    for (CaseTensor& t : d.inputs)
      if (bounds(t))
        t.shape[0] = after + 1,
        t.fill.list.insert(t.fill.list.end() - 1, static_cast<std::size_t>(after - before),
                           t.fill.list.back());
    if (admissible(d) && elements_in(d) <= (1 << 19)) c = std::move(d);
  }
  // In turn anywhere, with an empty last sequence, and with an empty first one.
  void cut_again(std::vector<double>& list, int turn) {
    const auto end = static_cast<int64_t>(list.back());
    const auto draws = draws_for(op_.schema->name, list.size() + static_cast<std::size_t>(turn));
    for (std::size_t i = 1; i + 1 < list.size(); ++i) list[i] = static_cast<double>(draws.draw(0, end));
    if (turn % 3 == 1) list[list.size() - 2] = static_cast<double>(end);
    if (turn % 3 == 2) list[1] = 0;
    std::sort(list.begin(), list.end());
  }

  // Ids of 64 bits whose low word is a token.
  void far_integers() {
    int made = 0;
    for (const Case& c : bases_) {
      Case d = c;
      bool any = false;
      for (CaseTensor& t : d.inputs) {
        if (t.dtype != DType::i64 || t.fill.kind != Fill::integers || t.fill.b <= 1) continue;
        Fill f{Fill::values};
        const auto draws = draws_for(c.name + t.argument, 0);
        const auto from = static_cast<int64_t>(t.fill.a), to = static_cast<int64_t>(t.fill.b) - 1;
        for (int i = 0; i < 7; ++i)
          f.list.push_back(static_cast<double>(draws.draw(from, to)) + (i == 1   ? 0x1p32
                                                                        : i == 4 ? -0x1p33
                                                                                 : 0));
        t.fill = std::move(f);
        any = true;
      }
      if (any && made++ < 2) emit(std::move(d), "far integers");
    }
  }

  // ---- an extent of 0

  void nothing() {
    std::set<std::tuple<std::string, std::size_t, std::size_t>> seen;  // argument, rank, axis
    for (const Case& c : bases_)
      for (const Extent& e : extents_of(c)) {
        bool fresh = false;
        for (const auto& [tensor, axis] : e.places)
          fresh |= seen.insert({c.inputs[tensor].argument, c.inputs[tensor].shape.size(), axis}).second;
        if (!fresh || !e.resizable || c.exact) continue;
        Case d = c;
        resize(d, e, 0);
        const CaseTensor& t = d.inputs[e.places[0].tensor];
        emit(d, fmt::format("{}=[{}]", t.argument, fmt::join(t.shape, ",")), false, true);
      }
  }

  // ---- an operand or a result of another dtype

  void other_dtypes() {
    const rlk_op_schema& s = *op_.schema;
    for (uint32_t i = 0; i < s.num_arguments; ++i)
      for (uint32_t bit = 1; bit < RLK_ALL_DTYPES; bit <<= 1) {
        const auto dtype = static_cast<DType>(bit);
        std::set<std::string> kinds;
        for (const Case& c : bases_) {
          const std::string kind = kind_of(c);
          if (c.exact || !(s.arguments[i].dtypes & bit) || dtype == DType::f64 || kinds.size() >= 24 ||
              kinds.contains(kind) || !wanted(c) || work_of(c, extents_of(c)) > 0x1p18)
            continue;
          Case d = c;
          if (!has_as(d, s.arguments[i].name, dtype) || dtype_of_case(d, s) != dtype_of_case(c, s)) continue;
          kinds.insert(kind);
          emit(std::move(d), fmt::format("{} in {}", s.arguments[i].name, name_of(dtype)),
               kinds.size() > (op_.rule ? 4 : 1), true);
        }
      }
  }
  // False: it is not there, or is of this dtype already.
  static bool has_as(Case& c, const std::string& name, DType dtype) {
    for (CaseTensor& t : c.inputs)
      if (t.argument == name)
        return t.dtype != dtype && integral(t.dtype) == integral(dtype) && (t.dtype = dtype, true);
    for (auto& [result, t] : c.results)
      if (result == name) return t != dtype && integral(t) == integral(dtype) && (t = dtype, true);
    return false;
  }

  // ---- numbers of another kind, in one argument at a time

  // Zeros between others, all zero, of the other sign, and so small that products are subnormal.
  void small_numbers() {
    std::set<std::string> seen;
    for (const Case& c : bases_)
      for (std::size_t i = 0; i < c.inputs.size(); ++i) {
        const CaseTensor& t = c.inputs[i];
        const std::string kind = t.argument + (op_.rule && has_rows(t) ? " in rows" : "");
        if (!wanted(c) || c.brief || c.exact || integral(t.dtype) || seen.contains(kind)) continue;
        if (work_of(c, extents_of(c)) > 0x1p19) continue;
        const auto p = materialise(op_, c, seed_);
        if (!p || p->inputs[argument(t.argument)]->numel() == 0) continue;
        seen.insert(kind);
        const Array& x = *p->inputs[argument(t.argument)];
        const double tiny = t.dtype == DType::f16 ? 0x1p-18 : 0x1p-128;
        const std::pair<const char*, double> factors[] = {
            {"some zeros in", 1}, {"zeros in", 0}, {"negative", -1}, {"tiny", tiny}};
        for (const auto& [what, factor] : factors) {
          Case d = c;
          Fill& f = d.inputs[i].fill;
          f = {Fill::values};
          for (int64_t n = 0; n < x.numel(); ++n)
            f.list.push_back(factor == 1 && n % 3 == 0 ? 0
                                                       : factor * registry::load(x.dtype, x.bytes.data(), n));
          emit(std::move(d), fmt::format("{} {}", what, t.argument));
        }
        orders(c, i, x);
        if (t.shape.size() == 1) first_is_one(c, i, x);
      }
  }
  // A factor that does nothing in the first row, and something in others.
  void first_is_one(const Case& c, std::size_t tensor, const Array& x) {
    Case d = c;
    Fill& f = d.inputs[tensor].fill;
    f = {Fill::values, 0, 0, {1}};
    for (int64_t n = 1; n < x.numel(); ++n) f.list.push_back(registry::load(x.dtype, x.bytes.data(), n));
    emit(std::move(d), fmt::format("first is 1 in {}", c.inputs[tensor].argument), false, true);
  }
  static bool has_rows(const CaseTensor& t) { return !t.shape.empty() && t.shape.back() >= 8; }
  // All equal, ascending, descending; and far from 1.
  void orders(const Case& c, std::size_t tensor, const Array& x) {
    std::vector<double> numbers;
    numbers.reserve(static_cast<std::size_t>(x.numel()));
    for (int64_t n = 0; n < x.numel(); ++n) numbers.push_back(registry::load(x.dtype, x.bytes.data(), n));
    if (std::any_of(numbers.begin(), numbers.end(), [](double y) { return !std::isfinite(y); })) return;
    const auto one = [&](const char* what, std::vector<double> list) {
      Case d = c;
      d.inputs[tensor].fill = {Fill::values, 0, 0, std::move(list)};
      emit(std::move(d), fmt::format("{} {}", what, c.inputs[tensor].argument), false, true);
    };
    one("equal", {numbers[0]});
    std::vector<double> far = numbers;
    const bool by_rows = op_.schema->arguments[0].batch_axis == -2;
    for (double& y : far) y *= x.dtype == DType::f16 ? 0x1p8 : by_rows ? 0x1p36 : 0x1p14;
    // What is infinite on the way is the arithmetic's affair: a distance from the truth would not say whose.
    if (by_rows || op_.rule) one("large", std::move(far));
    std::sort(numbers.begin(), numbers.end());
    one("ascending", numbers);
    std::reverse(numbers.begin(), numbers.end());
    one("descending", std::move(numbers));
  }

  // Ids, pages, lengths: ascending and descending; those that are drawn also all equal, and the ends of their range in turn.
  void orders_of_integers() {
    std::set<std::string> seen;
    for (const Case& c : bases_)
      for (std::size_t i = 0; i < c.inputs.size(); ++i) {
        const CaseTensor& t = c.inputs[i];
        const bool drawn = t.fill.kind == Fill::integers;
        if (!wanted(c) || c.exact || !integral(t.dtype) || bounds(t) ||
            (!drawn && t.fill.kind != Fill::values) || seen.contains(t.argument))
          continue;
        const auto p = materialise(op_, c, seed_);
        if (!p || p->inputs[argument(t.argument)]->numel() < 3) continue;
        seen.insert(t.argument);
        const Array& x = *p->inputs[argument(t.argument)];
        std::vector<double> numbers;
        numbers.reserve(static_cast<std::size_t>(x.numel()));
        for (int64_t n = 0; n < x.numel(); ++n) numbers.push_back(registry::load(x.dtype, x.bytes.data(), n));
        const auto one = [&](const char* what, std::vector<double> list) {
          Case d = c;
          d.inputs[i].fill = {Fill::values, 0, 0, std::move(list)};
          emit(std::move(d), fmt::format("{} {}", what, t.argument), false, true);
        };
        std::vector<double> sixteens = numbers;
        for (double& y : sixteens) y = 16 * std::floor(y / 16);
        if (sixteens != numbers && !drawn) one("sixteens in", std::move(sixteens));
        if (drawn) one("equal", {numbers[0]}), one("ends in", {t.fill.b - 1, t.fill.a, t.fill.b - 1});
        std::sort(numbers.begin(), numbers.end());
        one("ascending", numbers);
        std::reverse(numbers.begin(), numbers.end());
        one("descending", std::move(numbers));
      }
  }

  void specials() {
    // Where rows are not one by one, places that are masked may yet spoil a result.
    if (op_.schema->arguments[0].batch_axis != -2) return;
    std::set<std::string> seen;
    for (const Case& c : bases_)
      for (std::size_t i = 0; i < c.inputs.size(); ++i) {
        const CaseTensor& t = c.inputs[i];
        if (!wanted(c) || c.brief || c.exact || integral(t.dtype) || t.fill.kind == Fill::values ||
            seen.contains(t.argument))
          continue;
        const auto p = materialise(op_, c, seed_);
        if (!p) continue;
        seen.insert(t.argument);
        Case d = c;
        Fill& f = d.inputs[i].fill;
        f = {Fill::values};
        const Array& x = *p->inputs[argument(t.argument)];
        for (int64_t n = 0; n < x.numel(); ++n) f.list.push_back(registry::load(x.dtype, x.bytes.data(), n));
        const auto draws = draws_for(c.name + t.argument, 1);
        const double values[] = {NAN, INFINITY, -0.0, -INFINITY, 0x1p-24, 0x1p-140, 0};
        if (f.list.empty()) continue;
        for (const double value : values)
          f.list[static_cast<std::size_t>(draws.draw(0, x.numel() - 1))] = value;
        emit(std::move(d), fmt::format("special values in {}", t.argument));
      }
  }
  std::size_t argument(const std::string& name) const {
    std::size_t i = 0;
    while (name != op_.schema->arguments[i].name) ++i;
    return i;
  }

  // ---- elements that are one memory

  // Along an axis that is one slice seen many times, and in rows that overlap as windows do.
  void repeated() {
    std::set<std::tuple<std::string, std::size_t, std::size_t>> seen;  // argument, rank, axis
    for (const Case& c : bases_)
      for (std::size_t i = 0; i < c.inputs.size(); ++i) {
        const CaseTensor& t = c.inputs[i];
        if (!wanted(c) || c.exact || !reads(t) || integral(t.dtype) || t.fill.kind == Fill::values ||
            !(op_.schema->arguments[argument(t.argument)].flags & RLK_STRIDED) || !t.strides.empty() ||
            work_of(c, extents_of(c)) > 0x1p21)
          continue;
        for (std::size_t axis = 0; axis + 1 < t.shape.size(); ++axis) {
          if (t.shape[axis] < 2 || !seen.insert({t.argument, t.shape.size(), axis}).second) continue;
          repeat(c, i, axis, 0);
          if (axis + 2 == t.shape.size() && t.shape.back() > 1) repeat(c, i, axis, 1);
        }
      }
  }
  void repeat(const Case& c, std::size_t tensor, std::size_t axis, int64_t stride) {
    Case d = c;
    CaseTensor& t = d.inputs[tensor];
    const auto p = materialise(op_, c, seed_);
    if (!p || p->inputs[argument(t.argument)]->numel() == 0) return;
    const Array& x = *p->inputs[argument(t.argument)];
    t.strides.resize(t.shape.size());
    int64_t reach = 1;
    for (std::size_t a = t.shape.size(); a-- > 0;) {
      t.strides[a] = a == axis ? stride : reach;
      reach += (t.shape[a] - 1) * t.strides[a];
    }
    // As it is seen, for those who read it densely.
    Fill f{Fill::values};
    for (int64_t n = 0; n < x.numel(); ++n) {
      int64_t at = 0, rest = n;
      for (std::size_t a = t.shape.size(); a-- > 0; rest /= t.shape[a])
        at += rest % t.shape[a] * t.strides[a];
      f.list.push_back(registry::load(x.dtype, x.bytes.data(), at));
    }
    t.fill = std::move(f);
    emit(std::move(d), fmt::format("{} by stride {} in axis {}", c.inputs[tensor].argument, stride, axis),
         false, true);
  }

  void shared() {
    all_shared();
    std::set<std::pair<std::string, std::string>> seen;
    for (const Case& c : bases_)
      for (std::size_t i = 0; i < c.inputs.size(); ++i)
        for (std::size_t j = i + 1; j < c.inputs.size(); ++j) {
          const CaseTensor &x = c.inputs[i], &y = c.inputs[j];
          if (c.brief || c.exact || x.dtype != y.dtype || x.shape != y.shape ||
              x.batch_axis != y.batch_axis || seen.contains({x.argument, y.argument}) ||
              reads(x) != reads(y) || !reads(x))
            continue;
          seen.insert({x.argument, y.argument});
          Case d = c;
          d.shared = {{x.argument, y.argument}};
          emit(std::move(d), fmt::format("{} is {}", y.argument, x.argument), false, true);
        }
  }
  // Three or more: as many as any case has.
  void all_shared() {
    Case most;
    for (const Case& c : bases_)
      for (const CaseTensor& x : c.inputs) {
        Case d = c;
        for (const CaseTensor& y : c.inputs)
          if (&y != &x && y.dtype == x.dtype && y.shape == x.shape && y.batch_axis == x.batch_axis &&
              reads(x) && reads(y))
            d.shared.emplace_back(x.argument, y.argument);
        d.name += kMark + ("all of them " + x.argument);
        if (!c.exact && d.shared.size() > std::max<std::size_t>(1, most.shared.size())) most = std::move(d);
      }
    if (!most.shared.empty()) emit_named(std::move(most), false, true);
  }
  bool reads(const CaseTensor& t) const {
    return op_.schema->arguments[argument(t.argument)].role == RLK_READ;
  }

  // ---- a gradient beside what its forward keeps for it

  void saved() {
    for (const registry::Op& forward : registry::ops()) {
      if (!forward.schema->backward || std::string_view(forward.schema->backward) != op_.schema->name)
        continue;
      for (uint32_t i = 0; i < op_.schema->num_arguments; ++i)
        if (op_.schema->arguments[i].role == RLK_READ && op_.schema->arguments[i].flags & RLK_OPTIONAL)
          with_saved(forward, op_.schema->arguments[i].name);
    }
  }
  void with_saved(const registry::Op& forward, const std::string& name) {
    const rlk_op_schema& s = *forward.schema;
    std::set<std::string> kinds;
    for (uint32_t r = 0; r < s.num_arguments; ++r) {
      if (name != s.arguments[r].name || s.arguments[r].role != RLK_WRITE) continue;
      for (const Case& c : bases_) {
        const std::string kind = kind_of(c);
        if (kinds.size() >= 24 || kinds.contains(kind) || !wanted(c)) continue;
        const auto left = left_by(forward, c, name, r);
        if (!left) continue;
        kinds.insert(kind);
        Case d = c;
        d.inputs.push_back(*left);
        emit(std::move(d), "with " + name);
      }
    }
  }
  // Result `name` of the forward that a gradient's case belongs to.
  std::optional<CaseTensor> left_by(const registry::Op& forward, const Case& c, const std::string& name,
                                    uint32_t result) const {
    const rlk_op_schema& s = *forward.schema;
    const auto has = [](const auto* list, uint32_t n, const std::string& wanted) {
      return std::any_of(list, list + n, [&](const auto& x) { return wanted == x.name; });
    };
    Case f = c;
    f.batch_axes.clear();
    std::erase_if(f.inputs, [&](const CaseTensor& t) {
      return !has(s.arguments, s.num_arguments, t.argument) || t.argument == name;
    });
    std::erase_if(f.attributes, [&](const auto& a) { return !has(s.attributes, s.num_attributes, a.first); });
    f.results.clear();
    auto p = materialise(forward, f, seed_);
    if (!p) return {};
    // The gradient's data are the forward's.
    const auto own = materialise(op_, c, seed_);
    for (uint32_t i = 0; own && i < s.num_arguments; ++i)
      if (p->inputs[i]) p->inputs[i] = own->inputs[argument(s.arguments[i].name)];
    const auto shapes = result_shapes(*p);
    if (!shapes) return {};
    for (uint32_t i = 0; i < s.num_arguments; ++i)
      if (s.arguments[i].role == RLK_WRITE && (i == result || !(s.arguments[i].flags & RLK_OPTIONAL)))
        p->results[i] = (*shapes)[i].dtypes & RLK_F32 ? DType::f32 : c.inputs[0].dtype;
    const Outcome out = execute_reference(*p, false);
    if (out.code != RLK_OK) return {};
    const Array& a = out.results[result];
    CaseTensor t{name, a.shape, a.dtype, {Fill::values}};
    for (int64_t n = 0; n < a.numel(); ++n) t.fill.list.push_back(registry::load(a.dtype, a.bytes.data(), n));
    if (t.fill.list.empty() || std::isnan(t.fill.list[0])) return {};
    return t;
  }

  const registry::Op& op_;
  const uint64_t seed_;
  const std::function<void(Derived)>& take_;
  const std::string_view only_;
  std::vector<Case> bases_;
  std::optional<Dimensions> dimensions_;
  std::map<std::size_t, Outcome> results_;                      // of the reference, by base
  mutable std::map<std::string, std::vector<Extent>> extents_;  // by case
  std::set<std::string> names_;                                 // that are taken
  int without_rule_ = 0;                                        // cases that a distance alone will judge
};

}  // namespace

DType dtype_of_case(const Case& c, const rlk_op_schema& s) {
  for (uint32_t i = 0; i < s.num_arguments; ++i) {
    for (const CaseTensor& t : c.inputs)
      if (t.argument == s.arguments[i].name) return t.dtype;
    for (const auto& [name, dtype] : c.results)
      if (name == s.arguments[i].name) return dtype;
  }
  return DType::none;
}

void derived_cases(const registry::Op& op, DType dtype, uint64_t seed,
                   const std::function<void(Derived)>& take, std::string_view only) {
  Deriver(op, dtype, seed, take, only).all();
}

bool is_derived(std::string_view name) { return base_name(name).size() < name.size(); }
std::string_view base_name(std::string_view name) { return name.substr(0, name.find(kMark)); }

}  // namespace rlk::harness
