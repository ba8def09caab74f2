// linear_logp on the CPU by lm_head, logp and linear: a panel of lm_head's logits at a time, in cache, which logp's tiles take up.
//
// Whatever chain makes the logits, a panel has the bits of the whole, for an output of lm_head depends on its own row and
// column alone; and logp's leaves go on from panel to panel. So lm_head's own implementations are called, on parts of the
// operands: one source for every chain.
//
//   forward    512 rows by a panel of 2 MiB of logits; a leaf's panels one after another. The weight is read once for 512 rows
//   d_hidden   as many rows as 64 MiB of logits are whole rows of: logits, their gradient in place, linear_bwd
//   d_weight   as many columns as 64 MiB are of all rows; likewise. So the logits are computed a second time, where the rule's
//              alternative would keep an fp32 copy of the whole d_weight
#pragma once

#include <cstring>

#include "arithmetic/linear_logp/parts.hpp"
#include "native/logp/engine.hpp"
#include "rlk/workers.hpp"

namespace rlk::native::linear_logp {

using logp::Engine;
using lse128::Problem;
using lse128::State;
using namespace rlk::logp_parts;

// Panels are whole tiles of logp's rule.
inline Limits limits_for(const Engine& engine) { return {.tile = engine.tile}; }

// Bytes that lm_head, or linear_bwd, asks for.
template <class Part>
std::uint64_t bytes_of(const rlk_implementation& head, const Part& call, const rlk_request& r) {
  return head.workspace ? head.workspace(reinterpret_cast<const rlk_slot*>(&call), &r) : 0;
}
template <class Args>
std::uint64_t forward_bytes(const Cut<Args>& cut, const rlk_implementation& head, const rlk_request& r) {
  std::uint64_t most = 0;
  typename Cut<Args>::Logits l;
  for (std::int64_t n : {cut.rows(), cut.p.rows % cut.limits.rows})
    for_panels(cut, [&](int, std::int64_t begin, std::int64_t end) {
      cut.logits(0, n, begin, end, nullptr, l);
      most = std::max(most, bytes_of(head, l.call, r));
    });
  return most;
}

struct ForwardRoom {
  State* states;
  float* targets;
  std::byte* logits;
  template <class Args>
  ForwardRoom(const Cut<Args>& cut, Room& room)
      : states(
            reinterpret_cast<State*>(room.take(cut.rows() * lse128::kLeaves * std::int64_t{sizeof(State)}))),
        targets(reinterpret_cast<float*>(room.take(cut.rows() * std::int64_t{sizeof(float)}))),
        logits(room.take(cut.rows() * cut.columns() * cut.size)) {}
};

// What is left of the workspace behind `room`.
inline std::span<std::byte> rest(const Call& call, const Room& room) {
  const std::span<std::byte> all = call.workspace();
  return all.subspan(static_cast<std::size_t>(room.base - all.data()) + room.used);
}

// finish(row, state, target's logit) for every row that is not left out.
template <class Args, class Finish>
rlk_code reduce(const Cut<Args>& cut, const Engine& engine, const rlk_implementation& head, const Call& call,
                const ForwardRoom& at, std::span<std::byte> workspace, bool bends, Finish finish) {
  rlk_code code = RLK_OK;
  constexpr std::int64_t kEach = 8;
  for_runs(cut.p.rows, cut.limits.rows, [&](std::int64_t first, std::int64_t n) {
    if (code != RLK_OK) return;
    const Problem p = cut.p.part(first, n);
    std::fill_n(at.states, n * p.count, lse128::nothing());
    std::fill_n(at.targets, n, lse128::none());
    for_panels(cut, [&](int leaf, std::int64_t begin, std::int64_t end) {
      if (code != RLK_OK) return;
      typename Cut<Args>::Logits l;
      cut.logits(first, n, begin, end, at.logits, l);
      code = call.run(head, l.call, workspace);
      if (code != RLK_OK) return;
      call.parallel_for((n + kEach - 1) / kEach, [&](std::int64_t block) {
        for (std::int64_t row = block * kEach; row < std::min(n, (block + 1) * kEach); ++row) {
          if (p.left_out(row)) continue;
          const std::byte* data = at.logits + row * (end - begin) * cut.size;
          State& state = at.states[row * p.count + leaf];
          state = engine.fold(p, {data, p.round, row, begin, end}, state, bends);
          if (const std::int64_t c = p.column(row); c >= begin && c < end && p.kept(row, c))
            at.targets[row] = lse128::capped<float>(p, rows::load(p.round, data, c - begin));
        }
      });
    });
    if (code != RLK_OK) return;
    call.parallel_for((n + 63) / 64, [&](std::int64_t block) {
      for (std::int64_t row = block * 64; row < std::min(n, (block + 1) * 64); ++row)
        if (!p.left_out(row))
          finish(first + row, lse128::join_all(at.states + row * p.count, p.count, p.scale(row)),
                 at.targets[row]);
    });
  });
  return code;
}

// ---- forward

inline std::uint64_t workspace(const LinearLogp& a, const Engine& engine, const rlk_implementation& head,
                               const rlk_request& r) {
  const Cut cut(a, limits_for(engine));
  Room room;
  const ForwardRoom pieces(cut, room);
  return 64 + room.used + forward_bytes(cut, head, r);
}

inline rlk_code run(const LinearLogp& a, const Call& call, const Engine& engine,
                    const rlk_implementation& head) {
  Cut cut(a, limits_for(engine));
  lse128::add_results(cut.p, a);
  Room room{workers::shared_workspace(call)};
  const ForwardRoom pieces(cut, room);
  const rlk_code code =
      reduce(cut, engine, head, call, pieces, rest(call, room), cut.p.entropy || cut.p.stats,
             [&](std::int64_t row, const State& state, float target) {
               lse128::write(cut.p, row, {state, target, cut.p.scale(row)});
             });
  for (std::int64_t row = 0; row < cut.p.rows; ++row)
    if (cut.p.left_out(row)) lse128::write(cut.p, row, lse128::left_out(cut.p));
  if (a.bad_count) *a.bad_count.data<std::int32_t>() = logp::count_bad(cut.p);
  return code;
}

// ---- backward

// What does the products, and of what type the logits' gradient is: a matrix unit takes hidden's.
struct Products {
  const rlk_implementation &logits, &gradients;
  bool narrows = false;

  DType slope(const BackwardCut& cut) const { return narrows ? cut.a.hidden.dtype() : dtype_of(cut.p.round); }
};

struct BackwardRoom {
  State* states;  // of all rows
  std::byte* logits;
  BackwardRoom(const BackwardCut& cut, Room& room)
      : states(reinterpret_cast<State*>(room.take(cut.p.rows * std::int64_t{sizeof(State)}))) {
    std::int64_t most = 0;
    for_rectangles(cut, [&](std::int64_t, std::int64_t n, std::int64_t begin, std::int64_t end, bool) {
      most = std::max(most, n * (end - begin));
    });
    logits = room.take(most * cut.size);
  }
};

inline std::uint64_t workspace(const LinearLogpBwd& a, const Engine& engine, const Products& by,
                               const rlk_request& r) {
  const BackwardCut cut(a, limits_for(engine));
  Room room, forward;
  const BackwardRoom pieces(cut, room);
  const ForwardRoom forward_pieces(cut, forward);
  std::uint64_t most = a.stats ? 0 : forward.used + forward_bytes(cut, by.logits, r);
  BackwardCut::Logits l;
  Back b;
  for_rectangles(cut,
                 [&](std::int64_t row, std::int64_t n, std::int64_t begin, std::int64_t end, bool to_hidden) {
                   cut.logits(row, n, begin, end, nullptr, l);
                   back(cut, l, by.slope(cut), to_hidden, row, begin, b);
                   most = std::max({most, bytes_of(by.logits, l.call, r), bytes_of(by.gradients, b.call, r)});
                 });
  return 64 + room.used + most;
}

// Where a gradient has rows that belong to no entry: +0, added to what they were before.
inline void clear_beyond(const Out& t, const In& before, std::int64_t first) {
  const std::int64_t width = t.rank() == 1 ? 1 : t.dim(1);
  for (std::int64_t row = first; row < t.dim(0); ++row) {
    if (!before) {
      std::memset(t.data<char>() + row * t.stride(0) * size_of(t.dtype()), 0,
                  static_cast<std::size_t>(width * size_of(t.dtype())));
      continue;
    }
    for (std::int64_t i = 0; i < width; ++i)
      rows::store(rows::Type::f32, t.data<char>(), row * t.stride(0) + i,
                  0 + before.data<float>()[row * before.stride(0) + i]);
  }
}

// The gradient of a rectangle of logits in their place.
inline void bend(const BackwardCut& cut, const Call& call, const Engine& engine, const BackwardRoom& at,
                 const Back& b, std::int64_t first, std::int64_t begin) {
  const DLTensor& d = b.d_logits.dl();
  const std::int64_t n = d.shape[0], end = begin + d.shape[1];
  const auto slope = rows::type_of(b.call.d_y.dtype());
  const Problem p = cut.p.part(first, n);
  call.parallel_for((n + 7) / 8, [&](std::int64_t block) {
    for (std::int64_t row = 8 * block; row < std::min(n, 8 * (block + 1)); ++row) {
      std::byte* data = at.logits + row * (end - begin) * cut.size;
      const std::int64_t last = p.left_out(row) ? begin : end;
      engine.gradient(p, {data, p.round, row, begin, last}, at.states[first + row], data, slope, end);
    }
  });
}

inline rlk_code run(const LinearLogpBwd& a, const Call& call, const Engine& engine, const Products& by) {
  BackwardCut cut(a, limits_for(engine));
  lse128::add_cotangents(cut.p, a);
  Room room{workers::shared_workspace(call)};
  const BackwardRoom at(cut, room);
  rlk_code code = RLK_OK;
  for (std::int64_t row = 0; cut.p.given && row < cut.p.rows; ++row) {
    const float* s = cut.p.given + row * lse128::kStats;
    at.states[row] = {s[0], s[1], s[2]};
  }
  if (!cut.p.given) {
    Room behind = room;
    const ForwardRoom pieces(cut, behind);
    code = reduce(cut, engine, by.logits, call, pieces, rest(call, behind), cut.p.d_entropy != nullptr,
                  [&](std::int64_t row, const State& state, float) { at.states[row] = state; });
  }
  const std::span<std::byte> workspace = rest(call, room);
  for_rectangles(
      cut, [&](std::int64_t first, std::int64_t n, std::int64_t begin, std::int64_t end, bool to_hidden) {
        if (code != RLK_OK) return;
        BackwardCut::Logits l;
        Back b;
        cut.logits(first, n, begin, end, at.logits, l);
        back(cut, l, by.slope(cut), to_hidden, first, begin, b);
        code = call.run(by.logits, l.call, workspace);
        if (code != RLK_OK) return;
        bend(cut, call, engine, at, b, first, begin);
        code = call.run(by.gradients, b.call, workspace);
      });
  if (a.d_weight) clear_beyond(a.d_weight, a.d_weight_before, cut.p.here);
  if (a.d_bias) clear_beyond(a.d_bias, a.d_bias_before, cut.p.here);
  return code;
}

}  // namespace rlk::native::linear_logp
