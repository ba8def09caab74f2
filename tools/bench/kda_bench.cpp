// KDA on the CPU: the chunked form against the recurrent one, forward and backward, decode against a
// plain copy of the state, and steps with cached rows. Medians of the repetitions (step beside decode: lower quartiles of
// processor time); the recurrent form runs on fewer tokens, since its
// time is linear in them.
//
//   kda_bench [tokens=2048] [heads=8] [width=128] [repetitions=5]
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <random>
#include <string>
#include <vector>

#include "rlk/rlk.hpp"

namespace {

std::vector<float> normal(std::size_t n, float deviation, std::uint32_t seed) {
  std::mt19937 bits(seed);
  std::normal_distribution<float> distribution(0, deviation);
  std::vector<float> x(n);
  for (float& value : x) value = distribution(bits);
  return x;
}

template <class Body>
double median_ms(int repetitions, Body body) {
  std::vector<double> times;
  for (int i = 0; i < repetitions; ++i) {
    const auto start = std::chrono::steady_clock::now();
    body();
    times.push_back(
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

struct Times {
  double forward, backward;
};

Times measure(const char* implementation, std::int64_t T, std::int64_t H, std::int64_t K, int repetitions) {
  const auto rows = static_cast<std::size_t>(T * H), n = rows * static_cast<std::size_t>(K);
  const float unit = 1 / std::sqrt(static_cast<float>(K));
  std::vector<float> q = normal(n, unit, 1), k = normal(n, unit, 2), v = normal(n, 1, 3),
                     g = normal(n, 0.1f, 4), beta = normal(rows, 1, 5), d_out = normal(n, 1, 6), out(n),
                     d_q(n), d_k(n), d_v(n), d_g(n), d_beta(rows);
  for (float& x : g) x = -std::fabs(x);
  const auto view = [&](std::vector<float>& x) {
    return rlk::Tensor(x.data(), {1, T, H, K}, rlk::DType::f32);
  };
  const rlk::Tensor tq = view(q), tk = view(k), tv = view(v), tg = view(g), t_out = view(out),
                    td_out = view(d_out), td_q = view(d_q), td_k = view(d_k), td_v = view(d_v),
                    td_g = view(d_g), t_beta(beta.data(), {1, T, H}, rlk::DType::f32),
                    td_beta(d_beta.data(), {1, T, H}, rlk::DType::f32);
  const rlk::KdaFwd forward{
      .q = tq, .k = tk, .v = tv, .g = tg, .beta = t_beta, .out = t_out, .beta_sigmoid = true};
  const rlk::KdaBwd backward{.q = tq,
                             .k = tk,
                             .v = tv,
                             .g = tg,
                             .beta = t_beta,
                             .d_out = td_out,
                             .d_q = td_q,
                             .d_k = td_k,
                             .d_v = td_v,
                             .d_g = td_g,
                             .d_beta = td_beta,
                             .beta_sigmoid = true};
  rlk::Options options;
  options.backend = implementation;
  return {median_ms(repetitions, [&] { rlk::check(rlk::kda_fwd(forward, options)); }),
          median_ms(repetitions, [&] { rlk::check(rlk::kda_bwd(backward, options)); })};
}

void decode(std::int64_t B, std::int64_t H, std::int64_t K, bool v_first, int repetitions) {
  const auto rows = static_cast<std::size_t>(B * H), n = rows * static_cast<std::size_t>(K);
  const float unit = 1 / std::sqrt(static_cast<float>(K));
  std::vector<float> q = normal(n, unit, 1), k = normal(n, unit, 2), v = normal(n, 1, 3), g(n, -0.1f),
                     beta(rows, 0.5f), out(n), state = normal(n * static_cast<std::size_t>(K), 1, 7),
                     next(state.size());
  const auto view = [&](std::vector<float>& x) { return rlk::Tensor(x.data(), {B, H, K}, rlk::DType::f32); };
  const rlk::Tensor tq = view(q), tk = view(k), tv = view(v), tg = view(g), t_out = view(out),
                    t_beta(beta.data(), {B, H}, rlk::DType::f32),
                    before(state.data(), {B, H, K, K}, rlk::DType::f32),
                    after(next.data(), {B, H, K, K}, rlk::DType::f32);
  rlk::KdaDecode call{
      .q = tq, .k = tk, .v = tv, .g = tg, .beta = t_beta, .state = before, .out = t_out, .state_out = after};
  call.state_v_first = v_first;
  rlk::Options options;
  options.backend = "native.fma32";
  const double time = median_ms(repetitions, [&] { rlk::check(rlk::kda_decode(call, options)); });
  const double copy =
      median_ms(repetitions, [&] { std::memcpy(next.data(), state.data(), state.size() * sizeof(float)); });
  const double gigabytes = 2e-9 * sizeof(float) * static_cast<double>(state.size());
  fmt::print(
      "decode  B={} H={} K=V={} {}  {:8.3f} ms  {:6.2f} us a head  {:6.2f} GB/s  (copy, one thread: {:.2f} "
      "GB/s)\n",
      B, H, K, v_first ? "[V,K]" : "[K,V]", time, 1e3 * time / static_cast<double>(B * H),
      gigabytes / time * 1e3, gigabytes / copy * 1e3);
}

// A call of kda_step over `tokens` tokens of every sequence, with its tensors.
struct StepCall {
  std::vector<float> q, k, v, g, beta, out, state, cache;
  std::vector<std::int64_t> cached;
  std::vector<rlk::Tensor> tensors;
  rlk::KdaStep args;

  StepCall(std::int64_t B, std::int64_t H, std::int64_t K, std::int64_t tokens, bool v_first)
      : cached(static_cast<std::size_t>(B), 0) {
    const auto count = static_cast<std::size_t>(B * tokens * H), n = count * static_cast<std::size_t>(K);
    const float unit = 1 / std::sqrt(static_cast<float>(K));
    q = normal(n, unit, 1), k = normal(n, unit, 2), v = normal(n, 1, 3), g.assign(n, -0.1f);
    beta.assign(count, 0.5f), out.resize(n), state = normal(static_cast<std::size_t>(B * H * K * K), 1, 7);
    tensors.reserve(10);
    const auto keep = [&](void* data, std::initializer_list<std::int64_t> shape,
                          rlk::DType type) -> const rlk::Tensor& {
      return tensors.emplace_back(data, shape, type);
    };
    const auto view = [&](std::vector<float>& x) -> const rlk::Tensor& {
      return keep(x.data(), {B, tokens, H, K}, rlk::DType::f32);
    };
    args.q = view(q), args.k = view(k), args.v = view(v), args.g = view(g), args.out = view(out);
    args.beta = keep(beta.data(), {B, tokens, H}, rlk::DType::f32);
    args.rows = keep(cached.data(), {B}, rlk::DType::i64);
    args.state = keep(state.data(), {B, H, K, K}, rlk::DType::f32);
    args.state_v_first = v_first;
    const auto kept = rlk::check(rlk::infer(args, "cache"));
    cache.assign(static_cast<std::size_t>(B * H * kept.shape[2]), 0);
    args.cache = keep(cache.data(), {B, H, kept.shape[2]}, rlk::DType::f32);
  }
};

// kda_step where `rows` rows of a chunk of 64 are cached, `tokens` at once.
void step(std::int64_t B, std::int64_t H, std::int64_t K, std::int64_t rows, std::int64_t tokens,
          bool v_first, int repetitions) {
  StepCall call(B, H, K, tokens, v_first);
  std::fill(call.cached.begin(), call.cached.end(), rows);
  const rlk::Options options{.backend = "native.fma32"};
  const double time = median_ms(repetitions, [&] { rlk::check(rlk::kda_step(call.args, options)); });
  fmt::print("step    B={} H={} K=V={} {} rows={:2} tokens={:2}  {:8.3f} ms  {:6.2f} us a token and head\n",
             B, H, K, v_first ? "[V,K]" : "[K,V]", rows, tokens, time,
             1e3 * time / static_cast<double>(B * tokens * H));
}

// Lower quartile of this thread's processor time.
template <class Body>
double quiet_us(int repetitions, Body body) {
  std::vector<double> times;
  for (int i = 0; i < repetitions; ++i) {
    const std::clock_t start = std::clock();
    body();
    times.push_back(1e6 * static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 4];
}

// 64 tokens of H heads one after the other, the first of which closes a chunk, beside as many kda_decode; one thread.
void step_and_decode(std::int64_t H, std::int64_t K, int repetitions) {
  StepCall call(1, H, K, 1, false);
  const rlk::Options options{.backend = "native.fma32", .threads = 1};
  const double steps = quiet_us(repetitions, [&] {
    for (call.cached[0] = 64; call.cached[0] != 0; call.cached[0] = (call.cached[0] % 64 + 1) % 64)
      rlk::check(rlk::kda_step(call.args, options));
  });
  const auto view = [&](std::vector<float>& x) { return rlk::Tensor(x.data(), {1, H, K}, rlk::DType::f32); };
  const rlk::Tensor q = view(call.q), k = view(call.k), v = view(call.v), g = view(call.g),
                    out = view(call.out), beta(call.beta.data(), {1, H}, rlk::DType::f32),
                    state(call.state.data(), {1, H, K, K}, rlk::DType::f32);
  const rlk::KdaDecode decode{
      .q = q, .k = k, .v = v, .g = g, .beta = beta, .state = state, .out = out, .state_out = state};
  const double decodes = quiet_us(repetitions, [&] {
    for (int i = 0; i < 64; ++i) rlk::check(rlk::kda_decode(decode, options));
  });
  const double each = 1 / static_cast<double>(64 * H);
  fmt::print(
      "step    H={} K=V={} [K,V], average over a chunk {:.2f} us a token and head, decode {:.2f}: {:.2f} of "
      "its speed\n",
      H, K, steps * each, decodes * each, decodes / steps);
}

}  // namespace

int main(int argc, char** argv) {
  const auto argument = [&](int i, std::int64_t fallback) {
    return argc > i ? std::atoll(argv[i]) : fallback;
  };
  const std::int64_t T = argument(1, 2048), H = argument(2, 8), K = argument(3, 128);
  const int repetitions = static_cast<int>(argument(4, 5));
  const std::int64_t part = std::max<std::int64_t>(T / 16, 1);
  const double times = static_cast<double>(T) / static_cast<double>(part);
  const Times fast = measure("native.fma32", T, H, K, repetitions);
  Times slow = measure("native.golden", part, H, K, 1);
  slow = {slow.forward * times, slow.backward * times};
  const auto row = [&](const char* name, const Times& t) {
    fmt::print("{:13}  T={} H={} K=V={}  forward {:9.2f} ms  backward {:9.2f} ms\n", name, T, H, K, t.forward,
               t.backward);
  };
  row("native.golden", slow);
  row("native.fma32", fast);
  fmt::print("chunked over recurrent: {:.1f}x forward, {:.1f}x backward\n", slow.forward / fast.forward,
             slow.backward / fast.backward);
  decode(8, 32, K, false, repetitions);
  decode(8, 32, K, true, repetitions);
  for (std::int64_t rows : {0, 1, 15, 31, 47, 63, 64}) step(8, 32, K, rows, 1, false, repetitions);
  for (std::int64_t heads : {1, 32, 256}) step_and_decode(heads, K, 2 * repetitions);
  step(8, 32, K, 31, 1, true, repetitions);
  step(8, 32, K, 31, 4, false, repetitions);
  step(8, 32, K, 0, 64, false, repetitions);
}
