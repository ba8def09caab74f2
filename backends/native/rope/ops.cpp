// The rope family on the CPU: arguments to Geometry, Geometry to tiles, tiles to threads. Memory traffic is
// one read and one write per element; tables are read once per tile and kept in the first-level cache for all
// heads.
#include "rlk/ops.hpp"

#include "arithmetic/rope/table_math.hpp"
#include "arithmetic/rope/verdict.hpp"
#include "native/rope/run.hpp"
#include "rlk/backend.hpp"

namespace rlk::native {
namespace {

using rotary::Form;

// The geometry reads calls by position: these are the schemas'.
constexpr bool same(int64_t slot, int64_t position) { return slot == position; }
template <class Op, int64_t First>
constexpr bool kSameSlots = [] {
  using S = typename Op::Slot;
  using namespace rotary;
  return same(S::cos, kCos) && same(S::sin, kSin) && same(S::positions, kPositions) &&
         same(S::starts, kStarts) && same(S::cu_seqlens, kCuSeqlens) && same(S::axis_map, kAxisMap) &&
         same(S::layout, First + kLayout) && same(S::pairing, First + kPairing) &&
         same(S::table, First + kTable) && same(S::rotary_dim, First + kRotaryDim) &&
         same(S::rotary_offset, First + kRotaryOffset) && same(S::transpose, First + kTranspose) &&
         same(S::cp_rank, First + kCpRank) && same(S::cp_size, First + kCpSize) &&
         same(S::mrope_t, First + kMropeT) && same(S::mrope_h, First + kMropeH) &&
         same(S::mrope_w, First + kMropeW) && same(S::mrope_interleaved, First + kMropeInterleaved) &&
         same(S::negative, First + kNegative);
}();
static_assert(kSameSlots<Rope, rotary::kRopeArguments> && kSameSlots<RopeBwd, rotary::kRopeArguments> &&
              kSameSlots<RopeInPlace, rotary::kOut>);
static_assert(same(Rope::Slot::x, rotary::kX) && same(Rope::Slot::k, rotary::kK) &&
              same(Rope::Slot::out, rotary::kOut) && same(Rope::Slot::k_out, rotary::kKOut));
static_assert(same(RopeBwd::Slot::d_out, rotary::kX) && same(RopeBwd::Slot::d_k_out, rotary::kK) &&
              same(RopeBwd::Slot::d_x, rotary::kOut) && same(RopeBwd::Slot::d_k, rotary::kKOut));
static_assert(same(RopeInPlace::Slot::x, rotary::kX) && same(RopeInPlace::Slot::k, rotary::kK));

template <class Args>
const rlk_slot* slots(const Args& a) {
  return reinterpret_cast<const rlk_slot*>(&a);
}

template <Isa I>
rlk_code turn(const char* op, const std::string& error, const rotary::Geometry& g, const Call& call) {
  if (!error.empty()) return call.fail(RLK_INVALID_ARGUMENT, error);
  if (g.empty()) return RLK_OK;
  if (const auto rows = rope::check_rows(op, g); !rows.empty()) return call.fail(RLK_INVALID_ARGUMENT, rows);
  const auto plan = rope::plan(g, I);
  call.parallel_for(plan.tiles, [&](int64_t i) { rope::run_tile(g, plan, i); });
  return RLK_OK;
}

template <class Args, Form F, Isa I>
rlk_code run_rope(const Args& a, const Call& call) {
  rotary::Geometry g;
  const auto error = read_rope(slots(a), F, g);
  return turn<I>(Args::kName, error, g, call);
}

template <class Args, bool Backward, Isa I>
rlk_code run_mla_q(const Args& a, const Call& call) {
  rotary::Geometry g;
  const auto error = read_mla_q(slots(a), Backward, g);
  return turn<I>(Args::kName, error, g, call);
}

template <class Args, bool Backward, Isa I>
rlk_code run_mla_kv(const Args& a, const Call& call) {
  rotary::KvGeometry g;
  if (const auto error = read_mla_kv(slots(a), Backward, g); !error.empty())
    return call.fail(RLK_INVALID_ARGUMENT, error);
  if (g.empty()) return RLK_OK;
  if (const auto rows = rope::check_rows(Args::kName, g.turn); !rows.empty()) {
    return call.fail(RLK_INVALID_ARGUMENT, rows);
  }
  const auto plan = rope::plan(g, I);
  call.parallel_for(plan.tiles, [&](int64_t i) { rope::run_tile(g, Backward, plan, i); });
  return RLK_OK;
}

rlk_code run_tables(const RopeTables& a, const Call& call) {
  rotary::RotaryTable t;
  if (const auto error = rotary::read_tables(slots(a), t); !error.empty())
    return call.fail(RLK_INVALID_ARGUMENT, error);
  for (int64_t row = 0; row < t.rows && t.positions.data; ++row)
    if (const int64_t at = rotary::integer_at(t.positions, row * t.position_stride);
        !rotary::served_position(at))
      return call.fail(RLK_INVALID_ARGUMENT,
                       rotary::detail::say("rope_tables: positions[%lld] is %lld, at most %lld is served",
                                           static_cast<long long>(row), static_cast<long long>(at),
                                           static_cast<long long>(rotary::kMostPosition)));
  call.parallel_for(t.rows, [&](int64_t row) {
    for (int pair = 0; pair < t.pairs; ++pair) rotary::table_entry(t, row, pair);
  });
  return RLK_OK;
}

constexpr Facts facts(const char* doc, const char* arithmetic = "rope32") {
  return {.id = "native.scalar",
          .doc = doc,
          .priority = 100,
          .arithmetic = arithmetic,
          .dtypes = kFloats,
          .traits = kPinned | RLK_GOLDEN};
}
template <Isa I>
constexpr Facts vector(const char* doc) {
  return facts_at<"native.vector", I>(facts(doc));
}

}  // namespace

extern const Levels rope_vector, rope_bwd_vector, rope_in_place_vector, rope_mla_q_vector,
    rope_mla_q_bwd_vector, rope_mla_kv_vector, rope_mla_kv_bwd_vector;
constinit const Levels rope_vector = by_level([]<Isa I>() {
  return implement<Rope, run_rope<Rope, Form::out_of_place, I>>(
      vector<I>("tiles of tokens and heads, all cores"));
});
constinit const Levels rope_bwd_vector = by_level([]<Isa I>() {
  return implement<RopeBwd, run_rope<RopeBwd, Form::backward, I>>(vector<I>("the transposed rotation"));
});
constinit const Levels rope_in_place_vector = by_level([]<Isa I>() {
  return implement<RopeInPlace, run_rope<RopeInPlace, Form::in_place, I>>(
      vector<I>("touches only the rotary dims"));
});
constinit const Levels rope_mla_q_vector = by_level([]<Isa I>() {
  return implement<RopeMlaQ, run_mla_q<RopeMlaQ, false, I>>(vector<I>("the trailing dims turn"));
});
constinit const Levels rope_mla_q_bwd_vector = by_level([]<Isa I>() {
  return implement<RopeMlaQBwd, run_mla_q<RopeMlaQBwd, true, I>>(vector<I>("the transposed rotation"));
});
constinit const Levels rope_mla_kv_vector = by_level([]<Isa I>() {
  return implement<RopeMlaKv, run_mla_kv<RopeMlaKv, false, I>>(
      vector<I>("copies, and one rotation per token"));
});
constinit const Levels rope_mla_kv_bwd_vector = by_level([]<Isa I>() {
  return implement<RopeMlaKvBwd, run_mla_kv<RopeMlaKvBwd, true, I>>(
      vector<I>("copies, and an fp32 sum over heads"));
});

extern const rlk_implementation rope_tables_exact;
const rlk_implementation rope_tables_exact = implement<RopeTables, run_tables, rotary::takes>(
    facts("fp64 with the project's own functions", "rope_tables64"));

}  // namespace rlk::native
