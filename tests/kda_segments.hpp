// KDA by segments: data that outlive a segment, the segment's map, and what gradients are made of. Runs on this machine's CPU or
// on a GPU.
#pragma once

#include <cmath>
#include <span>

#include "kda_promises.hpp"
#include "kda_seeds.hpp"

namespace kda_test {

inline constexpr std::int64_t kSegment = 4096;

// Gates near 1 and faint writes: memory that outlives a segment.
inline Case lasting(Shape shape, std::uint32_t seed) {
  shape.gate_scale = 1e-4f;
  Case c = random_case(shape, seed);
  if (shape.gate == rlk::kda::Gate::bounded) c.p.lower_bound = -1e-4;
  if (!shape.sigmoid) scale(c.in.at("beta"), 0.01f);
  return c;
}

// What a segment that is all of `c` makes of the unit matrix without values, a state of K columns.
inline Buffer move_of(const Case& c, const Run& forward) {
  const auto K = std::size_t(c.p.k_dim);
  Case t = cut(c, 0, kSegment, 0);
  t.in.erase("do"), t.in.erase("dht");
  t.p.v_dim = c.p.k_dim;
  t.in["v"] = Buffer(c.in.at("v").type, std::vector<float>(std::size_t(kSegment) * K));
  std::vector<float> unit(K * K);
  for (std::size_t d = 0; d < K; ++d) unit[d * K + d] = 1;
  t.in["h0"] = Buffer(Float::f32, unit);
  t.bind();
  forward(t);
  return t.out.at("ht");
}

// T S + A of states of c that lie either way, or T^T S + A.
inline Buffer joined(const Case& c, const Buffer& t, const Buffer& state, const Buffer& add, bool turned) {
  const auto K = std::size_t(c.p.k_dim), V = std::size_t(c.p.v_dim);
  const auto at = [&](std::size_t d, std::size_t j, std::size_t columns) {
    return c.p.v_first ? j * K + d : d * columns + j;
  };
  std::vector<float> out(K * V);
  for (std::size_t d = 0; d < K; ++d)
    for (std::size_t j = 0; j < V; ++j) {
      float x = 0;
      for (std::size_t m = 0; m < K; ++m)
        x = std::fma(t[turned ? at(m, d, K) : at(d, m, K)], state[at(m, j, V)], x);
      out[at(d, j, V)] = x + add[at(d, j, V)];
    }
  return {Float::f32, out};
}

// `all` ran by segments; its gradients are those of plain calls for the parts between bounds, each of which gets the gradient of
// the state behind it: a part's own, or where it is a segment the join with what it makes of none.
inline void check_gradients_of_parts(const Case& all, std::span<const std::int64_t> bounds,
                                     const Run& forward_by_segments, const Run& plain_forward,
                                     const Run& plain) {
  std::vector<Case> parts;
  Buffer state = all.in.at("h0");
  for (std::size_t i = 0; i + 1 < bounds.size(); ++i) {
    Case& c = parts.emplace_back(cut(all, bounds[i], bounds[i + 1], 0));
    c.in["h0"] = state;
    c.bind();
    forward_by_segments(c);
    state = c.out.at("ht");
  }
  Buffer behind = all.in.at("dht");
  for (std::size_t i = parts.size(); i-- > 0;) {
    CAPTURE(i);
    Case& c = parts[i];
    c.in["dht"] = behind;
    c.bind();
    plain(c);
    for (const char* name : {"o", "dq", "dk", "dv", "dg", "dbeta"}) {
      CAPTURE(name);
      CHECK(part(c, name, 0, c.p.tokens, 0) == part(all, name, bounds[i], bounds[i + 1], 0));
    }
    if (c.p.tokens < kSegment) {
      behind = c.out.at("dh0");
      continue;
    }
    Case w = cut(c, 0, kSegment, 0);
    w.in.erase("dht");
    w.bind();
    plain(w);
    behind = joined(c, move_of(c, plain_forward), behind, w.out.at("dh0"), true);
  }
  CHECK(all.out.at("dh0") == behind);
}

}  // namespace kda_test
