// The rows of a call of sample and its relatives, shared among workers.
#pragma once

#include <atomic>

#include "arithmetic/sample/bind.hpp"
#include "native/sample/engine.hpp"
#include "rlk/workers.hpp"

namespace rlk::native::sample {

template <class Args>
std::uint64_t workspace(const Args& a, const rlk_request& r) {
  const Problem p = sampling::problem_of(a);
  return workers::workspace_for(r.threads, p.rows, room_bytes(p));
}

// finish(row, what was drawn, the row's room) before results are written.
template <class Finish>
void draw_rows(const Problem& p, const Call& call, const Engine& engine, Finish finish) {
  std::atomic<std::int32_t> bad{0};
  workers::run_tasks(call, p.rows, room_bytes(p), 0, [&](std::int64_t row, std::byte* scratch) {
    const Room room = room_in(scratch, p);
    RowResult result = engine.draw(p, row, room);
    finish(row, result, room);
    sampling::write(p, row, result.drawn);
    if (result.drawn.token < 0) bad.fetch_add(1, std::memory_order_relaxed);
  });
  if (p.bad_count) *p.bad_count = bad.load();
}

// finish(row, what is kept, the row's room) at the last step, of rows that have a token.
template <class Finish>
void part_rows(const Problem& p, const Call& call, const Engine& engine, Finish finish) {
  workers::run_tasks(call, p.rows, room_bytes(p), 0, [&](std::int64_t row, std::byte* scratch) {
    const Room room = room_in(scratch, p);
    if (const auto kept = engine.part(p, row, room)) finish(row, *kept, room);
  });
}

}  // namespace rlk::native::sample
