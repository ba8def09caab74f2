// labels: conformance fibers
// The portable GPU kernels of sample and sample_verify on fibers: native's tokens and bits, at both wave sizes and in any
// thread order.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "arithmetic/sample/bind.hpp"
#include "rlk/half.hpp"
#include "rlk/ops.hpp"
#include "simt/sample/kernels.hpp"

namespace {

using rlk::DType;
using rlk::Tensor;

// Everything of a call, which both sides compute.
struct Results {
  std::vector<int64_t> token;
  std::vector<float> logp, raw;
  std::vector<int32_t> count, keep, bad, status;
  Results(std::size_t n, std::size_t v)
      : token(n, 7),
        logp(n, 7),
        raw(n, 7),
        count(n, 7),
        keep(n * ((v + 31) / 32), 7),
        bad(1, 7),
        status(n, 7) {}
  bool operator==(const Results& o) const {
    return token == o.token && same(logp, o.logp) && same(raw, o.raw) && count == o.count && keep == o.keep &&
           bad == o.bad && status == o.status;
  }
  static bool same(const std::vector<float>& a, const std::vector<float>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), [](float x, float y) {
      return std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y);
    });
  }
};

struct Inputs {
  int64_t n, v;
  DType type;
  std::vector<uint16_t> halves;
  std::vector<float> logits, temperature, top_p, min_p;
  std::vector<int32_t> top_k, stream;
  std::vector<int64_t> seed, position, token;

  Inputs(int64_t rows, int64_t columns, DType t, uint32_t seed_of) : n(rows), v(columns), type(t) {
    std::mt19937 random(seed_of);
    std::normal_distribution<float> normal(0, 2);
    for (int64_t i = 0; i < n * v; ++i) {
      // Ties, absent entries, and in the last row a NaN.
      float z = i % 7 == 3 ? std::round(normal(random)) : normal(random);
      if (i % 31 == 5) z = -INFINITY;
      if (i == n * v - 1 && n > 3) z = NAN;
      logits.push_back(z);
      halves.push_back(t == DType::bf16 ? rlk::float_to_bf16(z) : rlk::float_to_f16(z));
    }
    for (int64_t m = 0; m < n; ++m) {
      temperature.push_back(m % 5 == 2 ? 0.0f : 0.5f + 0.3f * static_cast<float>(m));
      top_p.push_back(m % 4 == 1 ? 1.0f : 0.9f - 0.2f * static_cast<float>(m % 3));
      min_p.push_back(m % 3 == 0 ? 0.0f : 0.01f);
      top_k.push_back(m % 3 == 1 ? 0 : static_cast<int32_t>(v / 2 + m));
      stream.push_back(static_cast<int32_t>(m));
      seed.push_back(0x123456789abcdef * m);
      position.push_back((int64_t{1} << 31) * m);
      token.push_back(m);
    }
  }
  Tensor rows() {
    return {type == DType::f32 ? static_cast<void*>(logits.data()) : halves.data(), {n, v}, type};
  }
};

template <class T>
Tensor view(std::vector<T>& x, DType t) {
  return {x.data(), {static_cast<int64_t>(x.size())}, t};
}

// sample(a) and sample_verify(b) over the same inputs.
template <class Run>
void both(Inputs& in, Results& out, bool filters, bool min_p_first, Run run) {
  const Tensor z = in.rows(), t = view(in.temperature, DType::f32), p = view(in.top_p, DType::f32),
               m = view(in.min_p, DType::f32), k = view(in.top_k, DType::i32),
               st = view(in.stream, DType::i32), s = view(in.seed, DType::i64),
               at = view(in.position, DType::i64), token = view(out.token, DType::i64),
               logp = view(out.logp, DType::f32), raw = view(out.raw, DType::f32),
               count = view(out.count, DType::i32), bad = view(out.bad, DType::i32),
               keep(out.keep.data(), {in.n, (in.v + 31) / 32}, DType::i32),
               recorded = view(in.token, DType::i64), status = view(out.status, DType::i32);
  rlk::Sample a{.logits = z, .temperature = t, .seed = s, .stream = st, .position = at, .token = token};
  a.logp = logp, a.logp_raw = raw, a.count = count, a.keep = keep, a.bad_count = bad;
  rlk::SampleVerify b{
      .logits = z, .temperature = t, .seed = s, .stream = st, .position = at, .token = recorded};
  b.logp = logp, b.logp_raw = raw, b.status = status;
  if (filters) a.top_k = b.top_k = k, a.top_p = b.top_p = p, a.min_p = b.min_p = m;
  if (min_p_first) {
    a.filter_order = b.filter_order = rlk::Sample::FilterOrder::min_p_first;
    a.softcap = b.softcap = 3;
    a.logits_round = b.logits_round = rlk::Sample::LogitsRound::bf16;
    a.raw_temperature = b.raw_temperature = false;
  }
  run(a, b);
}

}  // namespace

TEST_CASE("sample and sample_verify on fibers are native's tokens and bits") {
  const std::pair<int64_t, int64_t> shapes[] = {{6, 70}, {4, 1500}, {2, 17000}, {2, 5}, {3, 1}, {2, 0}};
  for (const auto& [n, v] : shapes)
    for (int form = 0; form < 3; ++form) {
      const DType t = form == 0 ? DType::f32 : form == 1 ? DType::bf16 : DType::f16;
      CAPTURE(n);
      CAPTURE(v);
      CAPTURE(form);
      Inputs in(n, v, t, static_cast<uint32_t>(v));
      const auto rows = static_cast<std::size_t>(n), columns = static_cast<std::size_t>(v);
      Results native(rows, columns);
      both(in, native, form > 0, form == 2, [](const rlk::Sample& a, const rlk::SampleVerify& b) {
        REQUIRE(rlk::sample(a, {.backend = "native.rows"}));
        REQUIRE(rlk::sample_verify(b, {.backend = "native.rows"}));
      });
      if (v > 1) in.token = native.token;  // verified where it is what was drawn, too
      for (int wave : {32, 64})
        for (auto order : {rlk_fiber::Order::ascending, rlk_fiber::Order::shuffled}) {
          rlk_fiber::wave_size = wave;
          rlk_fiber::order = order;
          both(in, native, form > 0, form == 2, [](const rlk::Sample&, const rlk::SampleVerify& b) {
            REQUIRE(rlk::sample_verify(b, {.backend = "native.rows"}));
          });
          Results device(rows, columns);
          both(in, device, form > 0, form == 2, [](const rlk::Sample& a, const rlk::SampleVerify& b) {
            rlk::simt::sample::launch(rlk::sampling::problem_of(a), nullptr);
            rlk::simt::sample::launch(rlk::sampling::problem_of(b), nullptr);
          });
          CAPTURE(wave);
          CHECK(device == native);
        }
    }
  rlk_fiber::wave_size = RLK_FIBER_WAVE;
  rlk_fiber::order = rlk_fiber::Order::ascending;
}
