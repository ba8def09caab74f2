// sample and sample_verify on the CPU: sample/philox-g1 by instruction set, and golden, whose log-probabilities are in fp64.
//
// Bytes: a row is read once; what is kept of it, twelve bytes an entry, lies in a worker's scratch.
#include <cmath>

#include "arithmetic/sample/bind.hpp"
#include "native/sample/rows.hpp"

namespace rlk::native {
namespace {

using sample::draw_rows;
using sample::engine_for;
using sample::part_rows;
using sample::Room;
using sample::RowResult;
using sample::workspace;
using sampling::Problem;
using sampling::problem_of;

template <class Args, Isa I>
rlk_code run(const Args& a, const Call& call) {
  draw_rows(problem_of(a), call, engine_for(I), [](std::int64_t, RowResult&, const Room&) {});
  return RLK_OK;
}

template <Isa I>
rlk_code run_part(const SamplePart& a, const Call& call) {
  part_rows(problem_of(a), call, engine_for(I), [](std::int64_t, const sampling::Kept&, const Room&) {});
  return RLK_OK;
}

void merge_digit(const sampling::MergeProblem& p, std::int64_t row, std::int64_t* next) {
  if (!sampling::begin_digit(p, row, next)) return;
  const int bins = 1 << sampling::digit_bits(p.digit);
  if (p.digit == 0) {
    std::uint64_t total = 0;
    for (int b = 0; p.step == sampling::Step::top_p && b < bins; ++b) total += p.bin(row, b);
    if (p.step == sampling::Step::top_p)
      next[sampling::kStateTarget] = static_cast<std::int64_t>(sampling::first_target(p, row, total));
  }
  const std::uint64_t target = p.step == sampling::Step::top_p
                                   ? static_cast<std::uint64_t>(next[sampling::kStateTarget])
                                   : sampling::first_target(p, row, 0);
  auto before = static_cast<std::uint64_t>(next[p.slots().before]);
  int bin = 0;
  while (target > 0 && bin < bins) {
    const std::uint64_t here = p.bin(row, bin);
    if (before + here >= target) break;
    before += here, ++bin;
  }
  sampling::end_digit(p, row, target, target > 0 && bin < bins ? bin : -1, before, next);
}

rlk_code run_merge(const SampleMerge& a, const Call&) {
  const sampling::MergeProblem p = problem_of(a);
  std::int32_t bad = 0;
  for (std::int64_t row = 0; row < p.rows; ++row) {
    std::int64_t next[sampling::kStateWidth];
    if (p.step == sampling::Step::token) {
      bad += !sampling::merge_token(p, row);
      continue;
    }
    if (p.step == sampling::Step::largest)
      sampling::merge_largest(p, row, next);
    else
      merge_digit(p, row, next);
    if (p.next) std::copy_n(next, sampling::kStateWidth, p.next + row * p.next_stride);
  }
  if (p.bad_count) *p.bad_count = bad;
  return RLK_OK;
}

// ---- golden

// Of the token among the kept entries.
double log_probability(const Problem& p, const RowResult& r, const Room& room, const sampling::Kept& kept,
                       float tau) {
  const auto distance = [&](std::int64_t i) { return (double{room.z[i]} - double{r.most}) * double{tau}; };
  double sum = 0;
  for (std::int64_t i = 0; i < p.vocab; ++i)
    if (kept.has(room.z[i], static_cast<std::int32_t>(i)) &&
        (kept.least <= 0 || room.weight[i] >= kept.least))
      sum += std::exp(distance(i));
  return distance(r.drawn.token) - std::log(sum);
}

rlk_code run_golden(const Sample& a, const Call& call) {
  const Problem p = problem_of(a);
  draw_rows(p, call, sample::kScalar, [&](std::int64_t row, RowResult& r, const Room& room) {
    if (r.drawn.token < 0) return;
    const sampling::Parameters at = sampling::parameters_of(p, row);
    if (p.logp) r.drawn.logp = static_cast<float>(log_probability(p, r, room, r.kept, at.tau));
    if (p.logp_raw) r.drawn.logp_raw = static_cast<float>(log_probability(p, r, room, {}, at.raw_tau));
  });
  return RLK_OK;
}

constexpr Facts kRows = pinned_facts("a row in cache, radix selects, vectors of scores", "sample/philox-g1");

}  // namespace

extern const Levels sample_rows, sample_verify_rows;
constinit const Levels sample_rows = by_level([]<Isa I>() {
  return implement<Sample, run<Sample, I>, nullptr, workspace<Sample>>(facts_at<"native.rows", I>(kRows));
});
constinit const Levels sample_verify_rows = by_level([]<Isa I>() {
  return implement<SampleVerify, run<SampleVerify, I>, nullptr, workspace<SampleVerify>>(
      facts_at<"native.rows", I>(kRows));
});

extern const Levels sample_part_rows;
constinit const Levels sample_part_rows = by_level([]<Isa I>() {
  return implement<SamplePart, run_part<I>, nullptr, workspace<SamplePart>>(
      facts_at<"native.rows", I>(kRows));
});

extern const rlk_implementation sample_merge_rows;
constinit const rlk_implementation sample_merge_rows =
    implement<SampleMerge, run_merge>({.id = "native.rows",
                                       .doc = "bins of all parts added",
                                       .priority = 100,
                                       .arithmetic = "sample/philox-g1",
                                       .dtypes = RLK_I64,
                                       .traits = kPinned});

extern const rlk_implementation sample_golden;
constinit const rlk_implementation sample_golden =
    implement<Sample, run_golden, nullptr, workspace<Sample>>(golden_facts("log-probabilities in fp64"));

}  // namespace rlk::native
