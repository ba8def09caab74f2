// logp and its gradient by the written rules of lse128/l8 and sm90/ex2/lse2048/l8, and the joining of shards.
#include <string_view>

#include "registry/logp/lse128.hpp"
#include "registry/logp/lse2048.hpp"
#include "registry/logp/truth.hpp"
#include "registry/op.hpp"
#include "rlk/float_guard.hpp"
#include "rlk/ops.hpp"

namespace rlk::registry {

namespace {

using namespace lse128;
using logp::Target;

// Tiles of 2048 entries and the special function units' exponential.
constexpr std::string_view kByUnit = "sm90/ex2/lse2048/l8";
bool known(const RuleQuery& q) { return q.arithmetic == "lse128/l8" || q.arithmetic == kByUnit; }

float get(const Rows& t, int64_t row, int64_t i) { return static_cast<float>(t.get(row, i)); }
void set(const Out& t, int64_t row, int64_t i, float x) {
  if (t) Rows(t).set(row, i, t.dtype() == DType::f32 ? canonical(x) : x);
}

template <class Args>
Scale scale(const Args& a, int64_t row) {
  return scale_of(a.temperatures ? get(Rows(a.temperatures), 0, row) : static_cast<float>(a.temperature));
}

// Before the temperature, with the value of tanh.
template <class Args>
float entry(const Args& a, float z, float* y = nullptr) {
  using Round = decltype(a.logits_round);
  if (a.logits_round == Round::bf16) z = static_cast<float>(round_to(DType::bf16, z));
  if (a.logits_round == Round::fp16) z = static_cast<float>(round_to(DType::f16, z));
  const auto cap = static_cast<float>(a.softcap);
  if (cap == 0) return z;
  const float held = tanh32(z / cap);
  if (y) *y = held;
  return std::isinf(z) ? z : cap * held;
}

template <class Args>
std::vector<float> entries(const Args& a, const logp::Layout<Args>& call, int64_t row) {
  std::vector<float> z(static_cast<std::size_t>(call.here()), kNone);
  for (int64_t c = 0; c < call.here(); ++c)
    if (call.kept(row, c)) z[static_cast<std::size_t>(c)] = entry(a, get(Rows(a.logits), row, c));
  return z;
}

template <class Args>
Answer answer(const Args& a, const logp::Layout<Args>& call, int64_t row, bool by_unit) {
  if (call.target(row) != Target::token) return left_out(call.first());
  const Scale k = scale(a, row);
  const std::vector<float> z = entries(a, call, row);
  const int64_t at = call.column(row), vocab = a.vocab ? a.vocab : a.logits.dim(1);
  const auto sum = by_unit ? lse2048::reduce : lse128::reduce;
  return {sum(z, vocab, a.leaf_first, a.leaf_count, k), at < 0 ? kNone : z[static_cast<std::size_t>(at)], k};
}

template <class Args>
void write(const Args& a, int64_t row, const Answer& x) {
  set(a.logp, 0, row, x.logp());
  set(a.lse, 0, row, x.lse());
  set(a.entropy, 0, row, x.entropy());
  const float all[] = {x.state.m, x.state.s, x.state.u, x.target};
  for (int i = 0; i < 4; ++i) set(a.stats, row, i, std::isnan(x.state.s) ? NAN : all[i]);
}

}  // namespace

bool logp_rule(const RuleQuery& q) {
  if (!known(q)) return false;
  const FloatGuard guard;
  const auto& a = *reinterpret_cast<const Logp*>(q.slots);
  const logp::Layout call(a, a.logits.dim(1));
  const int64_t rows = a.logits.dim(0);
  for (int64_t m = 0; m < rows; ++m) write(a, m, answer(a, call, m, q.arithmetic == kByUnit));
  if (a.bad_count) Rows(a.bad_count).set(0, 0, static_cast<double>(call.bad(rows)));
  return true;
}

bool logp_bwd_rule(const RuleQuery& q) {
  if (!known(q)) return false;
  const FloatGuard guard;
  const auto& a = *reinterpret_cast<const LogpBwd*>(q.slots);
  const logp::Layout call(a, a.logits.dim(1));
  for (int64_t m = 0; m < a.logits.dim(0); ++m) {
    for (int64_t c = 0; c < a.logits.dim(1); ++c) set(a.d_logits, m, c, 0);
    if (call.target(m) != Target::token) continue;
    Answer x = answer(a, call, m, q.arithmetic == kByUnit);
    if (a.stats) x.state = {get(Rows(a.stats), m, 0), get(Rows(a.stats), m, 1), get(Rows(a.stats), m, 2)};
    const float g = (a.d_logp ? get(Rows(a.d_logp), 0, m) : 0) + 0.0f,  // -0 counts as +0
        h = (a.d_entropy ? get(Rows(a.d_entropy), 0, m) : 0) + 0.0f;
    for (int64_t c = 0; c < call.here(); ++c) {
      if (!call.kept(m, c)) continue;
      float y = 0;
      const float z = entry(a, get(Rows(a.logits), m, c), &y);
      const bool is_target = c == call.column(m);
      const float* entropy = a.d_entropy ? &h : nullptr;
      float d = q.arithmetic == kByUnit ? lse2048::gradient(x.state, x.k, z, is_target, g, entropy)
                                        : x.gradient(z, is_target, g, entropy);
      if (a.softcap != 0) d = d * std::fma(-y, y, 1.0f);
      set(a.d_logits, m, c, d);
    }
  }
  return true;
}

bool logp_merge_rule(const RuleQuery& q) {
  if (q.arithmetic != "lse128/l8") return false;
  const FloatGuard guard;
  const auto& a = *reinterpret_cast<const LogpMerge*>(q.slots);
  const Rows partials(a.partials);
  const int64_t parts = a.partials.dim(0), rows = a.partials.dim(1);
  for (int64_t m = 0; m < rows; ++m) {
    Scale k = scale(a, m);
    if (std::isnan(k.c))
      k = scale_of(1);  // parts with entries are NaN by now, others are of a row that is left out
    std::vector<State> all;
    float target = kNone;
    for (int64_t p = 0; p < parts; ++p) {
      const int64_t at = p * rows + m;
      all.push_back({get(partials, at, 0), get(partials, at, 1), get(partials, at, 2)});
      if (const float z = get(partials, at, 3); z != kNone) target = z;
    }
    write(a, m, Answer{pairwise(std::move(all), k), target, k});
  }
  return true;
}

}  // namespace rlk::registry
