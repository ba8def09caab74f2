// linear_logp on the CPU by lm_head and logp: a panel of lm_head's logits at a time, in cache, which logp's tiles take up.
//
// Whatever chain makes the logits, a panel has the bits of the whole, for an output of lm_head depends on its own row and
// column alone; and logp's leaves go on from panel to panel. So lm_head's own implementations are called, on parts of the
// operands: one source for every chain.
//
//   forward    512 rows by a panel of 2 MiB of logits; a leaf's panels one after another. The weight is read once for 512 rows
//   d_hidden   as many rows as 64 MiB of logits are whole rows of: logits, their gradient in place, lm_head_bwd
//   d_weight   as many columns as 64 MiB are of all rows; likewise. So the logits are computed a second time, where the rule's
//              alternative would keep an fp32 copy of the whole d_weight
#pragma once

#include <algorithm>
#include <cstring>

#include "arithmetic/logp/bind.hpp"
#include "native/logp/engine.hpp"
#include "rlk/workers.hpp"

namespace rlk::native::linear_logp {

using logp::Engine;
using lse128::Problem;
using lse128::State;
using workers::line;

inline constexpr std::int64_t kRows = 512, kCached = std::int64_t{2} << 20, kHeld = std::int64_t{64} << 20;

inline DType dtype_of(lse128::Type t) {
  return t == lse128::Type::f32 ? DType::f32 : t == lse128::Type::bf16 ? DType::bf16 : DType::f16;
}

// Rows [first, first + n) of a tensor whose rows lie along its first axis.
template <class View>
Tensor part(const View& t, std::int64_t first, std::int64_t n) {
  auto* data = const_cast<char*>(static_cast<const char*>(t.template data<char>())) +
               first * t.stride(0) * size_of(t.dtype());
  if (t.rank() == 1) return Tensor(data, {n}, t.dtype());
  return Tensor(data, {n, t.dim(1)}, t.dtype(), {kDLCPU, 0}, {t.stride(0), 1});
}

// How the rows and columns are cut.
template <class Args>
struct Cut {
  const Args& a;
  Problem p;
  std::int64_t size;  // of a logit

  explicit Cut(const Args& args) : a(args), p(lse128::options_of(args, args.weight.dim(0))) {
    size = rows::size_of(p.round);
  }
  // Of the forward.
  std::int64_t rows() const { return std::min(p.rows, kRows); }
  std::int64_t columns() const {
    const std::int64_t fit = kCached / (size * std::max<std::int64_t>(1, rows())) / lse128::kTile;
    return std::min(p.leaf, std::max<std::int64_t>(1, fit) * lse128::kTile);
  }
  // Of the gradients: whole rows of logits, and whole columns of them.
  std::int64_t whole_rows() const {
    return std::clamp<std::int64_t>(kHeld / (size * std::max<std::int64_t>(1, p.here)) / 16 * 16, 16, kRows);
  }
  std::int64_t whole_columns() const {
    return std::clamp<std::int64_t>(kHeld / (size * std::max<std::int64_t>(1, p.rows)) / 16 * 16, 16, 2048);
  }

  // Logits of rows [row, row + n) and columns [begin, end), as a call of lm_head.
  struct Logits {
    Tensor hidden, weight, bias, out;
    LmHead call;
  };
  void logits(std::int64_t row, std::int64_t n, std::int64_t begin, std::int64_t end, void* to,
              Logits& l) const {
    l.hidden = part(a.hidden, row, n), l.weight = part(a.weight, begin, end - begin);
    l.out = Tensor(to, {n, end - begin}, dtype_of(p.round));
    l.call = LmHead{.hidden = l.hidden, .weight = l.weight, .out = l.out};
    if (a.bias) l.bias = part(a.bias, begin, end - begin), l.call.bias = l.bias;
  }
};

// body(row, n) for runs of rows, body(begin, end) for runs of columns.
template <class Body>
void for_runs(std::int64_t n, std::int64_t each, Body body) {
  for (std::int64_t at = 0; at < n; at += each) body(at, std::min(each, n - at));
}
// body(leaf, begin, end) for the panels of the forward, ascending in every leaf.
template <class Args, class Body>
void for_panels(const Cut<Args>& cut, Body body) {
  for (int j = 0; j < cut.p.count; ++j)
    for (std::int64_t at = cut.p.leaf_begin(j); at < cut.p.leaf_end(j); at += cut.columns())
      body(j, at, std::min(cut.p.leaf_end(j), at + cut.columns()));
}

// Bytes that lm_head, or its backward, asks for.
template <class Part>
std::uint64_t bytes_of(const rlk_implementation& head, const Part& call, const rlk_request& r) {
  return head.workspace ? head.workspace(reinterpret_cast<const rlk_slot*>(&call), &r) : 0;
}
template <class Args>
std::uint64_t forward_bytes(const Cut<Args>& cut, const rlk_implementation& head, const rlk_request& r) {
  std::uint64_t most = 0;
  typename Cut<Args>::Logits l;
  for (std::int64_t n : {cut.rows(), cut.p.rows % kRows})
    for_panels(cut, [&](int, std::int64_t begin, std::int64_t end) {
      cut.logits(0, n, begin, end, nullptr, l);
      most = std::max(most, bytes_of(head, l.call, r));
    });
  return most;
}

// The pieces of a call's workspace, in order; without one it only counts.
struct Room {
  std::byte* base = nullptr;
  std::uint64_t used = 0;
  std::byte* take(std::int64_t bytes) {
    std::byte* piece = base ? base + used : nullptr;
    used += line(static_cast<std::uint64_t>(bytes));
    return piece;
  }
};

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
  for_runs(cut.p.rows, kRows, [&](std::int64_t first, std::int64_t n) {
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

inline std::uint64_t workspace(const LinearLogp& a, const rlk_implementation& head, const rlk_request& r) {
  const Cut cut(a);
  Room room;
  const ForwardRoom pieces(cut, room);
  return 64 + room.used + forward_bytes(cut, head, r);
}

inline rlk_code run(const LinearLogp& a, const Call& call, const Engine& engine,
                    const rlk_implementation& head) {
  Cut cut(a);
  lse128::add_results(cut.p, a);
  Room room{workers::shared_workspace(call)};
  const ForwardRoom pieces(cut, room);
  const rlk_code code =
      reduce(cut, engine, head, call, pieces, rest(call, room), cut.p.entropy || cut.p.stats,
             [&](std::int64_t row, const State& state, float target) {
               lse128::write(cut.p, row, {state, target, cut.p.scale(row)});
             });
  for (std::int64_t row = 0; row < cut.p.rows; ++row)
    if (cut.p.left_out(row)) lse128::write(cut.p, row, lse128::left_out(cut.p, row));
  if (a.bad_count) *a.bad_count.data<std::int32_t>() = logp::count_bad(cut.p);
  return code;
}

// ---- backward

// The gradients of one rectangle of logits, as a call of lm_head_bwd.
struct Back {
  Tensor d_out, hidden, weight, d_hidden, d_weight, d_bias;
  LmHeadBwd call;
};
using BackwardCut = Cut<LinearLogpBwd>;

inline void back(const BackwardCut& cut, const BackwardCut::Logits& l, bool to_hidden, std::int64_t row,
                 std::int64_t begin, Back& b) {
  const LinearLogpBwd& a = cut.a;
  const std::int64_t n = l.hidden.dl().shape[0], columns = l.weight.dl().shape[0];
  b.d_out = l.out, b.hidden = l.hidden, b.weight = l.weight;
  b.call = LmHeadBwd{.d_out = b.d_out, .hidden = b.hidden, .weight = b.weight};
  if (to_hidden) {
    b.d_hidden = part(a.d_hidden, row, n), b.call.d_hidden = b.d_hidden;
    return;
  }
  if (a.d_weight) b.d_weight = part(a.d_weight, begin, columns), b.call.d_weight = b.d_weight;
  if (a.d_bias) b.d_bias = part(a.d_bias, begin, columns), b.call.d_bias = b.d_bias;
}

// body(row, rows, begin, end, to_hidden) for every rectangle of logits that the gradients take.
template <class Body>
void for_rectangles(const BackwardCut& cut, Body body) {
  if (cut.a.d_hidden)
    for_runs(cut.p.rows, cut.whole_rows(),
             [&](std::int64_t row, std::int64_t n) { body(row, n, std::int64_t{0}, cut.p.here, true); });
  if (cut.a.d_weight || cut.a.d_bias)
    for_runs(cut.p.here, cut.whole_columns(), [&](std::int64_t begin, std::int64_t n) {
      body(std::int64_t{0}, cut.p.rows, begin, begin + n, false);
    });
}

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

inline std::uint64_t workspace(const LinearLogpBwd& a, const rlk_implementation& head,
                               const rlk_implementation& head_bwd, const rlk_request& r) {
  const BackwardCut cut(a);
  Room room, forward;
  const BackwardRoom pieces(cut, room);
  const ForwardRoom forward_pieces(cut, forward);
  std::uint64_t most = a.stats ? 0 : forward.used + forward_bytes(cut, head, r);
  BackwardCut::Logits l;
  Back b;
  for_rectangles(cut,
                 [&](std::int64_t row, std::int64_t n, std::int64_t begin, std::int64_t end, bool to_hidden) {
                   cut.logits(row, n, begin, end, nullptr, l);
                   back(cut, l, to_hidden, row, begin, b);
                   most = std::max({most, bytes_of(head, l.call, r), bytes_of(head_bwd, b.call, r)});
                 });
  return 64 + room.used + most;
}

// +0 where a gradient has rows that belong to no entry.
inline void clear_beyond(const Out& t, std::int64_t first) {
  const std::int64_t width = t.rank() == 1 ? 1 : t.dim(1);
  for (std::int64_t row = first; row < t.dim(0); ++row)
    std::memset(t.data<char>() + row * t.stride(0) * size_of(t.dtype()), 0,
                static_cast<std::size_t>(width * size_of(t.dtype())));
}

inline rlk_code run(const LinearLogpBwd& a, const Call& call, const Engine& engine,
                    const rlk_implementation& head, const rlk_implementation& head_bwd) {
  BackwardCut cut(a);
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
    code = reduce(cut, engine, head, call, pieces, rest(call, behind), cut.p.d_entropy != nullptr,
                  [&](std::int64_t row, const State& state, float) { at.states[row] = state; });
  }
  const std::span<std::byte> workspace = rest(call, room);
  for_rectangles(
      cut, [&](std::int64_t first, std::int64_t n, std::int64_t begin, std::int64_t end, bool to_hidden) {
        if (code != RLK_OK) return;
        BackwardCut::Logits l;
        Back b;
        cut.logits(first, n, begin, end, at.logits, l);
        code = call.run(head, l.call, workspace);
        if (code != RLK_OK) return;
        const Problem p = cut.p.part(first, n);
        call.parallel_for((n + 7) / 8, [&](std::int64_t block) {
          for (std::int64_t row = 8 * block; row < std::min(n, 8 * (block + 1)); ++row) {
            std::byte* data = at.logits + row * (end - begin) * cut.size;
            const std::int64_t last = p.left_out(row) ? begin : end;
            engine.gradient(p, {data, p.round, row, begin, last}, at.states[first + row], data, p.round, end);
          }
        });
        back(cut, l, to_hidden, first, begin, b);
        code = call.run(head_bwd, b.call, workspace);
      });
  if (a.d_weight) clear_beyond(a.d_weight, cut.p.here);
  if (a.d_bias) clear_beyond(a.d_bias, cut.p.here);
  return code;
}

}  // namespace rlk::native::linear_logp
