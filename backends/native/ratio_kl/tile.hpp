// The body of each tile_<isa>.cpp: an Engine on vectors of the given type.
#pragma once

#include <algorithm>

#include "native/ratio_kl/engine.hpp"
#include "native/rows.hpp"

namespace rlk::native::ratio_kl {

template <class L, int W>
class Tile {
  using Row = native::Row<L, W>;

  static std::int64_t count(const RatioProblem& p, std::int64_t first) {
    return std::min(kTile, p.tokens - first);
  }
  static void read_mask(const RatioProblem& p, std::int64_t first, std::int64_t n, float* mask) {
    for (std::int64_t i = 0; i < n; ++i) mask[i] = p.mask.at(first + i);
  }

 public:
  static void forward(const RatioProblem& p, std::int64_t first) {
    alignas(64) float mask[kTile], out[kTile];
    const float *cm = mask, *logp = p.logp + first;
    const std::int64_t n = count(p, first);
    read_mask(p, first, n, mask);
    Row::map(
        n, [&p](auto m, auto now, auto old) { return loss32::ratio_of(p, m, now, old); }, out, cm, logp,
        p.old + first);
    Row::narrow(rows::Type::f32, out, p.ratio + first, n);
    if (!p.kl) return;
    Row::map(
        n, [&p](auto m, auto now, auto ref) { return loss32::kl_of(p, m, now, ref); }, out, cm, logp,
        p.ref + first);
    Row::narrow(rows::Type::f32, out, p.kl + first, n);
  }

  static void backward(const RatioProblem& p, std::int64_t first) {
    alignas(64) float mask[kTile], ratio[kTile] = {}, kl[kTile] = {};
    const float *cm = mask, *cr = ratio, *ck = kl, *logp = p.logp + first;
    const std::int64_t n = count(p, first);
    read_mask(p, first, n, mask);
    if (p.d_ratio)
      Row::map(
          n, [&p](auto m, auto now, auto old, auto d) { return loss32::through_ratio(p, m, now, old, d); },
          ratio, cm, logp, p.old + first, p.d_ratio + first);
    if (p.d_kl)
      Row::map(
          n, [&p](auto m, auto now, auto ref, auto d) { return loss32::through_kl(p, m, now, ref, d); }, kl,
          cm, logp, p.ref + first, p.d_kl + first);
    Row::map(n, [](auto a, auto b) { return a + b; }, ratio, cr, ck);
    Row::narrow(rows::Type::f32, ratio, p.d_logp + first, n);
  }
};

template <class L, int W>
constexpr Engine engine() {
  return {Tile<L, W>::forward, Tile<L, W>::backward};
}

}  // namespace rlk::native::ratio_kl
