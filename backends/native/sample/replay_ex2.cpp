// sample with log-probabilities as Hopper's special function units give them, on any processor: sample/philox-g1 with the sums of
// sm90/ex2/lse2048/l8. For proof.
#include "arithmetic/sample/sums.hpp"
#include "native/logp/engine.hpp"
#include "native/sample/rows.hpp"

namespace rlk::native {
namespace {

using sample::draw_rows;
using sample::part_rows;
using sample::Room;
using sample::RowResult;
using sampling::Kept;
using sampling::Part;
using sampling::Problem;
using sampling::problem_of;

// Of the row's entries, of which those of -inf take no part.
Part sum(const Problem& call, float temperature, const float* z) {
  lse128::Problem p = sampling::sums_of(call);
  p.round = lse128::Type::f32, p.cap = 0, p.temperature = temperature;  // z was rounded and capped
  lse128::State leaves[lse128::kLeaves];
  for (int j = 0; j < p.count; ++j) {
    const std::int64_t begin = p.leaf_begin(j), end = p.leaf_end(j);
    leaves[j] =
        logp::kByUnit.fold(p, {z + begin, lse128::Type::f32, 0, begin, end}, lse128::nothing(), false);
  }
  return sampling::part_of(lse128::join_all(leaves, p.count, p.scale(0)));
}

// Of all entries, then of those that are kept; the others are absent from then on.
struct Sums {
  Part all, kept;
  Sums(const Problem& p, std::int64_t row, const Kept& k, const Room& room) {
    const sampling::Parameters at = sampling::parameters_of(p, row);
    const float temperature = sampling::temperature_of(p, at, row);
    all = sum(p, p.raw_temperature ? temperature : 1.0f, room.z);
    for (std::int64_t i = 0; i < p.vocab; ++i)
      if (!k.has(room.z[i], static_cast<std::int32_t>(i)) || (k.least > 0 && room.weight[i] < k.least))
        room.z[i] = lse128::none();
    kept = sum(p, temperature, room.z);
  }
};

template <class Args>
rlk_code run(const Args& a, const Call& call) {
  const Problem p = problem_of(a);
  draw_rows(p, call, sample::kScalar, [&](std::int64_t row, RowResult& r, const Room& room) {
    if (r.drawn.token < 0 || !(p.wants_logp() || p.wants_raw())) return;
    const sampling::Parameters at = sampling::parameters_of(p, row);
    const float z = room.z[r.drawn.token];
    const Sums sums(p, row, r.kept, room);
    r.drawn.logp = sampling::log_probability(z, sums.kept, at.tau);
    r.drawn.logp_raw = sampling::log_probability(z, sums.all, at.raw_tau);
  });
  return RLK_OK;
}

rlk_code run_part(const SamplePart& a, const Call& call) {
  const Problem p = problem_of(a);
  part_rows(p, call, sample::kScalar, [&](std::int64_t row, const Kept& kept, const Room& room) {
    const Sums sums(p, row, kept, room);
    sampling::put(p.partials + row * p.partials_stride, sums.kept, sums.all);
  });
  return RLK_OK;
}

constexpr Facts kReplay{
    .id = "native.replay_sm90_ex2",
    .doc = "log-probabilities with the bits of Hopper's special function units on any CPU",
    .priority = 20,
    .arithmetic = "sample/philox-g1/ex2/lse2048/l8",
    .dtypes = kFloats,
    .traits = kPinned};

}  // namespace

extern const rlk_implementation sample_replay_ex2, sample_verify_replay_ex2, sample_part_replay_ex2;
constinit const rlk_implementation sample_replay_ex2 =
    implement<Sample, run<Sample>, nullptr, sample::workspace<Sample>>(kReplay);
constinit const rlk_implementation sample_verify_replay_ex2 =
    implement<SampleVerify, run<SampleVerify>, nullptr, sample::workspace<SampleVerify>>(kReplay);
constinit const rlk_implementation sample_part_replay_ex2 =
    implement<SamplePart, run_part, nullptr, sample::workspace<SamplePart>>(kReplay);

}  // namespace rlk::native
