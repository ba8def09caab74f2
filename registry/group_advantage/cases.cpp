// Calls of group_advantage worth trying: every centre and scale, groups of all sizes, equal rewards, NaN and Inf.
#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "registry/op.hpp"

namespace rlk::registry {
namespace {

struct Config {
  const char* name = "plain";
  const char *center = "mean", *scale = "population_std", *eps_use = "add", *singleton = "zero";
  double eps = 1e-6;
  std::vector<double> offsets{0, 8, 16, 24, 40};
  int64_t more = 0;  // rewards behind the last group
  DType index = DType::i32;
  Fill rewards{};
  bool brief = false;
};

void emit(const CaseSink& sink, const Config& o) {
  Case c;
  const auto n = static_cast<int64_t>(o.offsets.back()) + o.more;
  c.name = fmt::format("{} {} {} {} {} B={}", o.name, o.center, o.scale, o.eps_use, o.singleton, n);
  c.attributes = {{"center", std::string(o.center)},
                  {"scale", std::string(o.scale)},
                  {"eps_use", std::string(o.eps_use)},
                  {"singleton", std::string(o.singleton)},
                  {"eps", o.eps}};
  c.inputs = {
      {"rewards", {n}, DType::f32, o.rewards},
      {"group_offsets", {static_cast<int64_t>(o.offsets.size())}, o.index, {Fill::values, 0, 0, o.offsets}}};
  c.results = {{"advantages", DType::f32}};
  c.brief = o.brief;
  sink(std::move(c));
}

}  // namespace

void group_advantage_cases(const CaseSink& sink) {
  for (const char* center : {"mean", "leave_one_out", "none"})
    for (const char* scale : {"population_std", "sample_std", "none"}) {
      emit(sink, {.center = center, .scale = scale});
      emit(sink, {.name = "uneven groups",
                  .center = center,
                  .scale = scale,
                  .eps_use = "clamp_min",
                  .singleton = "raw",
                  .eps = 0.5,
                  .offsets = {0, 0, 1, 3, 3, 20, 21, 64},
                  .index = DType::i64,
                  .brief = true});
      emit(sink, {.name = "right or wrong",
                  .center = center,
                  .scale = scale,
                  .offsets = {0, 1, 9, 17, 20, 64},
                  .rewards = {Fill::integers, 0, 2},
                  .brief = true});
    }
  for (const char* eps_use : {"add", "clamp_min"})
    for (double eps : {0.0, 1e-4})
      emit(sink, {.name = eps == 0 ? "equal rewards, eps 0" : "equal rewards",
                  .eps_use = eps_use,
                  .eps = eps,
                  .rewards = {Fill::constant, 0.1},
                  .brief = true});
  constexpr double inf = std::numeric_limits<double>::infinity();
  emit(sink,
       {.name = "special",
        .offsets = {0, 4, 8, 12, 16},
        .rewards = {Fill::values, 0, 0, {1, NAN, 2, 3, inf, 1, 2, 3, 1, 2, -inf, inf, 1e30, -1e30, 0, -0.0}},
        .brief = true});
  emit(sink, {.name = "large mean", .rewards = {Fill::normal, 1e4, 1e-2}, .brief = true});
  emit(sink, {.name = "no groups", .offsets = {0}, .brief = true});
  emit(sink, {.name = "rewards of no group", .offsets = {0, 8, 20}, .more = 30, .brief = true});
  std::vector<double> many{0};
  for (int g = 0; g < 600; ++g) many.push_back(many.back() + static_cast<double>(sink.draw(0, 16)));
  emit(sink, {.name = "drawn", .scale = "sample_std", .offsets = many, .brief = true});
}

Bound group_advantage_bound(const BoundQuery&) { return {Bound::elementwise, 0, 1}; }

}  // namespace rlk::registry
