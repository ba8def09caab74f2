// logp on the CPU, for callers that have a row's logits piece by piece: lse128/l8, compiled once per instruction set, of which
// the choice changes no bit; and sm90/ex2/lse2048/l8.
#pragma once

#include "arithmetic/logp/logp.hpp"
#include "native/levels.hpp"

namespace rlk::native::logp {

using lse128::Matrix;
using lse128::Problem;
using lse128::State;

// Columns of one row: `data` is where the first of them lies.
struct Span {
  const void* data;
  lse128::Type type;
  std::int64_t row, begin, end;
};

struct Engine {
  std::int64_t tile;  // entries that are summed together
  // What joins `before`: tiles from span.begin on, which is the start of a leaf or whole tiles behind it. `bends`: with the
  // sum for the entropy.
  State (*fold)(const Problem& p, const Span& span, State before, bool bends);
  // The gradient of the span's entries, and +0 up to `columns`; in place where `to` is its data, in the same type or a narrower one.
  void (*gradient)(const Problem& p, const Span& span, const State& of_row, void* to, lse128::Type type,
                   std::int64_t columns);
};
extern const Engine kScalar, kAvx2, kAvx512;  // lse128/l8
extern const Engine kByUnit;                  // sm90/ex2/lse2048/l8

constexpr const Engine& engine_for(Isa isa) {
  return isa == Isa::avx512 ? kAvx512 : isa == Isa::avx2 ? kAvx2 : kScalar;
}

// What the row's target adds to what is known of it; `logit` is the target's, where it is among the columns.
inline float target_entry(const Problem& p, std::int64_t row, lse128::Type type, const void* logits,
                          std::int64_t at) {
  if (at < 0 || !p.kept(row, at)) return lse128::none();
  return lse128::capped<float>(p, rows::round_to(p.round, rows::load(type, logits, at)));
}

inline std::int32_t count_bad(const Problem& p) {
  std::int32_t n = 0;
  for (std::int64_t row = 0; row < p.rows; ++row) n += p.bad(row);
  return n;
}

}  // namespace rlk::native::logp
