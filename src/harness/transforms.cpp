#include "src/harness/transforms.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>

#include "registry/reference.hpp"

namespace rlk::harness {
namespace {

std::vector<int64_t> iota(int64_t from, int64_t to) {
  std::vector<int64_t> v(static_cast<std::size_t>(std::max<int64_t>(0, to - from)));
  std::iota(v.begin(), v.end(), from);
  return v;
}

// A fixed permutation that moves every row.
std::vector<int64_t> permutation(int64_t n, uint64_t seed) {
  std::vector<int64_t> v = iota(0, n);
  for (int64_t i = n - 1; i > 0; --i) {
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    std::swap(v[static_cast<std::size_t>(i)],
              v[static_cast<std::size_t>(seed >> 33) % static_cast<std::size_t>(i + 1)]);
  }
  return v;
}

// SplitMix64 over a problem's name and seed: the same draws on every machine.
class Draw {
 public:
  Draw(const Problem& p, uint64_t salt) : state_(hash_bytes(p.name.data(), p.name.size(), p.seed ^ salt)) {}
  uint64_t bits() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }

 private:
  uint64_t state_;
};

bool floating(DType t) {
  return t == DType::f16 || t == DType::bf16 || t == DType::f32 || t == DType::f8_e4m3;
}
bool integral(DType t) { return t == DType::i32 || t == DType::i64; }

// Elements that the work on one row touches, roughly: its own and those all rows share.
int64_t row_cost(const Problem& p) {
  int64_t cost = 1;
  for (std::size_t i = 0; i < p.inputs.size(); ++i) {
    if (!p.inputs[i]) continue;
    const RowView v = row_view(p.inputs[i]->shape, p.batch_axis[i]);
    cost += p.batch_axis[i] == -1 ? p.inputs[i]->numel() : v.outer * v.inner;
  }
  return cost;
}

// Hands out variants while there are takers.
class Maker {
 public:
  Maker(const Problem& p, const Subject& subject, bool thorough, const VariantVisitor& visitor)
      : p_(p),
        subject_(subject),
        thorough_(thorough),
        visitor_(visitor),
        rows_(row_count(p)),
        most_(std::min(p.most_rows, (thorough ? int64_t{1} << 24 : int64_t{1} << 22) / row_cost(p))) {}

  void all() {
    memory();
    in_place();
    if (p_.brief) return few();
    manners();
    state();
    results();
    drawn(thorough_ ? 24 : 12);
    if (!rows_ || *rows_ == 0) return;
    batch_sizes();
    positions();
    neighbours();
    slices();
    padding();
    shapes();
    broadcast();
    if (subject_.services) streams();
  }

 private:
  // What is worth trying where a size or a value is the point.
  void few() {
    if (!subject_.services) same("threads", "3", {.threads = 3}), same("threads", "1", {.threads = 1});
    integers();
    if (!subject_.services && any_subnormal()) float_modes();
    drawn(thorough_ ? 4 : 2);
  }
  // Numbers that flushing to zero takes away.
  bool any_subnormal() const {
    for (const auto& a : p_.inputs)
      for (int64_t i = 0; a && floating(a->dtype) && i < a->numel(); ++i)
        if (const double x = std::fabs(registry::load(a->dtype, a->bytes.data(), i)); x > 0 && x < 0x1p-126)
          return true;
    return false;
  }
  // Offers a variant; `make` is called, and fills in what is not yet said of it, if it is wanted. It returns
  // false where there is no such variant.
  template <class Make>
  void offer(Variant v, Make make) {
    if (going_ && visitor_.wants(v.name()) && make(v)) going_ = visitor_.take(v);
  }
  void rows(const char* dimension, std::string text, std::vector<int64_t> source, Filler filler,
            Manner manner = {}) {
    if (source.empty()) return;
    offer({dimension, std::move(text), {}, std::move(source), std::move(manner)},
          [&](Variant& v) { return put(v, compose(p_, v.source, filler)); });
  }
  void same(const char* dimension, std::string text, Manner manner, int32_t users = 1, int32_t repeats = 1) {
    offer({dimension, std::move(text), {}, {}, std::move(manner), users, repeats},
          [&](Variant& v) { return put(v, p_); });
  }
  static bool put(Variant& v, std::optional<Problem> p) {
    if (p) v.problem = std::move(*p);
    return p.has_value();
  }

  // ---- the same problem in other places and surroundings

  void memory() {
    if (subject_.services) return;
    same("memory", "nothing behind the arrays", {.edge = WatchedMemory::end});
    same("memory", "nothing before the arrays", {.edge = WatchedMemory::start});
  }
  void in_place() {
    offer({"in place", "results where arguments lie", {}, {}, {.in_place = ~0u}},
          [&](Variant& v) { return !places_shared(p_).empty() && put(v, p_); });
    const std::size_t places = std::string_view(subject_.op->may_alias ? subject_.op->may_alias : "").empty()
                                   ? 0
                                   : places_shared(p_).size();
    for (std::size_t i = 0; places > 1 && i < places; ++i) {
      const char* result = subject_.op->arguments[places_shared(p_)[i].first].name;
      offer(
          {"in place", fmt::format("{} alone where an argument lies", result), {}, {}, {.in_place = 1u << i}},
          [&](Variant& v) { return put(v, p_); });
    }
  }
  void manners() {
    for (int64_t bytes : {2, 4, 8, 16, 32, 48, 64, 128})
      same("alignment", fmt::format("offset {}", bytes), {.offset = bytes});
    for (int64_t pad : {1, 8}) same("stride", fmt::format("row padding {}", pad), {.row_padding = pad});
    // A row of a far wider array, while these stay small.
    if (rows_in_all() <= 64) same("stride", "row padding 65521", {.row_padding = 65521});
    packed("arrays are parts of one", Packing::in_order);
    packed("arrays are parts of one, the last one first", Packing::last_first);
    const uint32_t traits = subject_.implementation->traits;
    if (traits & RLK_WORKSPACE_OPTIONAL)
      for (int64_t percent : {0, 50})
        same("workspace", fmt::format("{}% of it", percent), {.workspace_percent = percent});
    offer({"repeats", "again", {}, {}, {}, 1, thorough_ && row_cost(p_) < 50000 ? 100 : 3}, [&](Variant& v) {
      v.promise = Promise::repeats;
      return put(v, p_);
    });
    if (traits & RLK_STRICT) same("policy", "strict", {.precision = Precision::strict});
    if (traits & RLK_GOLDEN) same("policy", "golden", {.precision = Precision::golden});
    if (traits & RLK_DETERMINISTIC) same("policy", "deterministic", {.deterministic = true});
    if (subject_.op->backward) {
      same("policy", "needs a backward", {.needs_backward = true});
      same("policy", "all of it",
           {.precision = traits & RLK_STRICT ? Precision::strict : Precision::standard,
            .needs_backward = true,
            .deterministic = static_cast<bool>(traits & RLK_DETERMINISTIC)});
    }
    if (subject_.services) return;
    for (int32_t threads : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 16, 24, 32, 48, 64})
      same("threads", fmt::format("{}", threads), {.threads = threads});
    same("threads", "4 callers at once", {}, 4, thorough_ ? 10 : 2);
    // What one call leaves where another one looks is its own as long as both compute the same.
    offer({"threads", "4 callers of two problems", {}, {}, {}, 4, thorough_ ? 10 : 4}, [&](Variant& v) {
      v.beside = halved();
      return put(v, p_);
    });
    float_modes();
  }
  void packed(const char* text, Packing packing) {
    offer({"stride", text, {}, {}, {.packing = packing}}, [&](Variant& v) {
      const std::vector<Part> parts = arrays_shared(p_);
      for (std::size_t i = 0; i < parts.size(); ++i)
        if (parts[i].owner != i) return put(v, p_);
      return false;
    });
  }
  int64_t rows_in_all() const {
    int64_t rows = 0;
    for (const auto& a : p_.inputs)
      if (a && a->shape.size() >= 2 && a->shape.back() > 0) rows += a->numel() / a->shape.back();
    return rows;
  }
  // Flushing and rounding apart: what obeys one may ignore the other.
  void float_modes() {
    constexpr std::pair<const char*, uint32_t> kModes[] = {{"flush to zero", 0x8040},
                                                           {"flush results alone", 0x8000},
                                                           {"flush operands alone", 0x0040},
                                                           {"round toward zero", 0x6000},
                                                           {"round up", 0x4000},
                                                           {"round down", 0x2000}};
    for (const auto& [text, bits] : kModes)
      offer({"float environment", text, {}, {}, {.float_mode = bits}}, [&](Variant& v) {
        v.promise = Promise::strict;
        return put(v, p_);
      });
    // Invalid, zero divide, overflow: what feenableexcept is called with.
    offer({"float environment", "exceptions trap", {}, {}, {.traps = 0x0680}}, [&](Variant& v) {
      v.promise = Promise::strict;
      return put(v, p_);
    });
  }

  // ---- what an earlier call left behind: the same memory held other values

  // Where no array of this process has been before: who remembers addresses meets the changed values first.
  Manner elsewhere() { return {.offset = 1024 + 64 * ++elsewhere_}; }
  std::shared_ptr<Problem> changed(std::size_t argument, int64_t element) {
    auto q = std::make_shared<Problem>(p_);
    Array& a = *q->inputs[argument];
    const double x = registry::load(a.dtype, a.bytes.data(), element);
    registry::store(a.dtype, a.bytes.data(), element, std::isfinite(x) ? 0.5 * x + 0.0625 : 1);
    return q;
  }
  // Every number between the ends has its predecessor's value: what ascended does so still.
  std::shared_ptr<Problem> moved(std::size_t argument) {
    auto q = std::make_shared<Problem>(p_);
    Array& a = *q->inputs[argument];
    const auto size = static_cast<std::size_t>(size_of(a.dtype));
    std::memmove(a.bytes.data() + size, a.bytes.data(), a.bytes.size() - 2 * size);
    return q;
  }
  // What decides where things are: a plan made for an earlier call is none for this one.
  void integers() {
    for (std::size_t i = 0; i < p_.inputs.size(); ++i) {
      if (!p_.inputs[i] || !integral(p_.inputs[i]->dtype) || p_.inputs[i]->numel() < 3) continue;
      offer({"changed in place",
             fmt::format("{} moved by one", subject_.op->arguments[i].name),
             {},
             {},
             elsewhere()},
            [&](Variant& v) {
              auto before = moved(i);
              if (execute_reference(*before, false).code != RLK_OK) return false;
              v.manner.before = std::move(before);
              return put(v, p_);
            });
    }
  }
  void state() {
    Draw draw(p_, 1);
    for (std::size_t i = 0; i < p_.inputs.size(); ++i) {
      if (!p_.inputs[i] || !floating(p_.inputs[i]->dtype) || p_.inputs[i]->numel() == 0) continue;
      const int64_t n = p_.inputs[i]->numel();
      for (int64_t at : {int64_t{0}, n - 1, draw.below(n), draw.below(n)})
        after(fmt::format("{}[{}]", subject_.op->arguments[i].name, at), [&] { return changed(i, at); });
    }
    integers();
    after("everything", [&] { return halved(); });
  }
  std::shared_ptr<Problem> halved() const {
    auto all = std::make_shared<Problem>(p_);
    for (auto& a : all->inputs)
      for (int64_t i = 0; a && floating(a->dtype) && i < a->numel(); ++i)
        registry::store(a->dtype, a->bytes.data(), i, 0.5 * registry::load(a->dtype, a->bytes.data(), i));
    return all;
  }
  template <class Before>
  void after(std::string what, Before before) {
    offer({"changed in place", std::move(what), {}, {}, elsewhere()}, [&](Variant& v) {
      v.manner.before = before();
      return put(v, p_);
    });
  }

  // ---- fewer results: each left out, each alone

  void results() {
    std::vector<std::size_t> optional;
    for (std::size_t i = 0; i < p_.results.size(); ++i)
      if (p_.results[i] != DType::none && !p_.inputs[i] && subject_.op->arguments[i].flags & RLK_OPTIONAL)
        optional.push_back(i);
    const auto n = optional.size();
    if (n == 0) return;
    Draw draw(p_, 2);
    std::vector<uint64_t> kept;  // sets of those asked for
    const uint64_t all = (uint64_t{1} << n) - 1;
    for (std::size_t i = 0; i < n; ++i)
      kept.insert(kept.end(), {all & ~(uint64_t{1} << i), uint64_t{1} << i});
    for (int i = 0; i < (thorough_ ? 16 : 4); ++i) kept.push_back(draw.bits() & all);
    for (uint64_t set : kept) {
      std::vector<DType> wanted = p_.results;
      std::string text;
      for (std::size_t i = 0; i < n; ++i)
        if (!(set >> i & 1)) {
          wanted[optional[i]] = DType::none;
          text += fmt::format(" {}", subject_.op->arguments[optional[i]].name);
        }
      const bool any = std::any_of(wanted.begin(), wanted.end(), [](DType t) { return t != DType::none; });
      if (text.empty() || !any) continue;
      offer({"results", "without" + text, {}, {}, {}}, [&](Variant& v) {
        v.problem = p_;
        v.problem.results = std::move(wanted);
        // Results that belong together are the schema's to refuse.
        return execute_reference(v.problem, false).code == RLK_OK;
      });
    }
  }

  // ---- many things at once: batch, place, strides, threads, workspace, policy

  void drawn(int count) {
    for (int i = 0; i < count; ++i)
      offer({"drawn", fmt::format("{}", i), {}, {}, {}}, [&](Variant& v) {
        Draw draw(p_, 1000 + static_cast<uint64_t>(i));
        Manner& m = v.manner;
        m.draw = draw.bits() | 1;
        if (!subject_.services) m.threads = static_cast<int32_t>(draw.below(draw.below(16) ? 8 : 100));
        const uint32_t traits = subject_.implementation->traits;
        if (draw.below(3) == 0 && traits & RLK_STRICT) m.precision = Precision::strict;
        m.deterministic = draw.below(3) == 0 && traits & RLK_DETERMINISTIC;
        v.problem = p_;
        if (!p_.brief && rows_ && *rows_ > 0 && draw.below(4)) draw_rows(v, draw);
        return true;
      });
  }
  void draw_rows(Variant& v, Draw& draw) {
    const int64_t most = std::max<int64_t>(1, std::min<int64_t>(most_, draw.below(3) ? 40 : 700));
    std::vector<int64_t> source(static_cast<std::size_t>(1 + draw.below(most)));
    for (int64_t& s : source) s = draw.below(3) ? draw.below(*rows_) : -1;
    source[static_cast<std::size_t>(draw.below(static_cast<int64_t>(source.size())))] = draw.below(*rows_);
    constexpr Filler kFillers[] = {Filler::other, Filler::zeros, Filler::nan, Filler::infinity};
    auto q = compose(p_, source, kFillers[draw.below(4)]);
    if (!q) return;
    v.problem = std::move(*q);
    v.source = std::move(source);
    if (auto r = reshaped(v.problem, factors(static_cast<int64_t>(v.source.size()), 1 + draw.below(3), draw)))
      v.problem = std::move(*r);
  }
  // n as a product of `parts` factors.
  static std::vector<int64_t> factors(int64_t n, int64_t parts, Draw& draw) {
    std::vector<int64_t> out;
    for (; parts > 1; --parts) {
      std::vector<int64_t> divisors;
      for (int64_t d = 1; d <= n; ++d)
        if (n % d == 0) divisors.push_back(d);
      out.push_back(divisors[static_cast<std::size_t>(draw.below(static_cast<int64_t>(divisors.size())))]);
      n /= out.back();
    }
    out.push_back(n);
    return out;
  }

  // ---- rows

  void batch_sizes() {
    std::vector<int64_t> sizes{1,  2,  3,  4,  5,  6,  7,  8,   9,   15,  16,  17,  24,  31,  32,
                               33, 48, 61, 63, 64, 65, 96, 127, 128, 129, 192, 255, 256, 257, 384};
    if (thorough_)
      sizes.insert(sizes.end(), {40,  80,  112, 160, 320,  448,  509,  511,  512,  513,
                                 576, 640, 768, 960, 1000, 1024, 1152, 1536, 2048, 4096});
    Draw draw(p_, 3);
    for (int i = 0; i < (thorough_ ? 12 : 4); ++i) sizes.push_back(1 + draw.below(1000));
    for (int64_t m : sizes) {
      if (m > most_) continue;
      // The original's rows first, spread with fillers to m rows; or a part of them.
      std::vector<int64_t> source(static_cast<std::size_t>(m), -1);
      const int64_t kept = std::min(m, *rows_), step = m / kept;
      for (int64_t i = 0; i < kept; ++i) source[static_cast<std::size_t>(i * step)] = (i * 5 + m) % *rows_;
      source.back() = m % *rows_;  // the last row of a batch is where tails are
      rows("batch size", fmt::format("m={}", m), source, Filler::other);
    }
  }
  void positions() {
    // The probe stands at several places of one batch, rows of others between; together the batches reach
    // every place.
    const int64_t probe = *rows_ / 2,
                  last = !thorough_    ? 17
                         : most_ >= 64 ? 64
                                       : 16,
                  apart = thorough_ ? 8 : last;
    if (last > most_) return;
    for (int64_t group = 0; group < apart; ++group) {
      std::vector<int64_t> source(static_cast<std::size_t>(last), -1);
      for (int64_t block = 0; block * apart < last; ++block)
        source[static_cast<std::size_t>(block * apart + (block + group) % apart)] = probe;
      rows("position", fmt::format("row {} at {} of every {} of {}", probe, group, apart, last), source,
           Filler::other);
    }
    rows("position", "permutation", permutation(*rows_, p_.seed), Filler::other);
  }
  void neighbours() {
    for (Filler f :
         {Filler::zeros, Filler::copies, Filler::scaled, Filler::denormal, Filler::infinity, Filler::nan}) {
      std::vector<int64_t> source;
      for (int64_t r = 0; r < std::min<int64_t>(*rows_, 16); ++r) source.insert(source.end(), {r, -1});
      rows("neighbours", name_of(f), source, f);
    }
  }
  void slices() {
    for (int64_t offset : {0, 1, 2, 7, 8, 15, 16, 64})
      if (offset < *rows_) rows("slice", fmt::format("from {}", offset), iota(offset, *rows_), Filler::other);
    for (int64_t cut : {int64_t{1}, *rows_ / 2, *rows_ - 1})
      if (cut > 0 && cut < *rows_) rows("slice", fmt::format("up to {}", cut), iota(0, cut), Filler::other);
  }
  void padding() {
    std::vector<int64_t> extra{1, 3, 16, 127};
    if (thorough_) extra = {1, 2, 3, 5, 8, 15, 16, 31, 64, 100, 127};
    for (int64_t n : extra) {
      if (n > most_) continue;
      for (Filler f : {Filler::zeros, Filler::other, Filler::nan}) {
        std::vector<int64_t> source = iota(0, *rows_);
        source.insert(source.end(), static_cast<std::size_t>(n), -1);
        rows("padding", fmt::format("{} rows of {}", n, name_of(f)), source, f);
      }
    }
  }
  void shapes() {
    const int64_t n = *rows_;
    std::vector<std::vector<int64_t>> views{{n}, {1, n}, {n, 1}, {1, n, 1}};
    if (n % 2 == 0) views.insert(views.end(), {{2, n / 2}, {n / 2, 2}, {1, 2, n / 2}});
    if (n % 3 == 0) views.insert(views.end(), {{3, n / 3}, {n / 3, 1, 3}});
    if (n == 1) views.emplace_back();
    for (const auto& leading : views)
      offer({"shape view", fmt::format("leading axes [{}]", fmt::join(leading, ",")), {}, iota(0, n), {}},
            [&](Variant& v) { return put(v, reshaped(p_, leading)); });
  }
  // One row seen many times through stride 0.
  void broadcast() {
    for (int64_t r : {int64_t{0}, *rows_ - 1})
      rows("stride", fmt::format("row {} five times by stride 0", r), std::vector<int64_t>(5, r),
           Filler::other, {.broadcast = true});
  }
  void streams() {
    const rlk_device_services& d = *subject_.services;
    if (!d.stream_create || !d.stream_destroy) return;
    for (int i = 0; i < (thorough_ ? 8 : 2) && going_; ++i) {
      void* stream = nullptr;
      if (d.stream_create(&subject_.device, &stream) != RLK_OK) return;
      same("streams", fmt::format("stream {}", i), {.stream = stream});
      if (subject_.implementation->traits & RLK_CAPTURE_SAFE && d.capture_begin && d.capture_end &&
          d.graph_launch && d.graph_destroy)
        same("graphs", fmt::format("captured on stream {}", i), {.stream = stream, .graph = true});
      d.stream_destroy(&subject_.device, stream);
    }
  }

  const Problem& p_;
  const Subject& subject_;
  const bool thorough_;
  const VariantVisitor& visitor_;
  const std::optional<int64_t> rows_;
  const int64_t most_;  // rows of a batch that are worth their time
  int64_t elsewhere_ = 0;
  bool going_ = true;
};

}  // namespace

void for_variants(const Problem& p, const Subject& subject, bool thorough, const VariantVisitor& visitor) {
  Maker(p, subject, thorough, visitor).all();
}

}  // namespace rlk::harness
