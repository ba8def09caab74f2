// labels: plugins gpu
// links: registry
// lm_head on NVIDIA GPUs: what holds across streams, graphs, devices and threads, what memory a call takes,
// and that the sum in ranges of sm90/t25k16/r4 is what its rule says.
#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "rlk/half.hpp"
#include "rlk/rlk.hpp"

namespace {

using rlk::DType;
using rlk::Tensor;
using std::int64_t;

int device_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}
bool gpu() {
  if (device_count() > 0) return true;
  std::puts("[skip] no CUDA device");
  return false;
}
void check(cudaError_t e) { REQUIRE_MESSAGE(e == cudaSuccess, cudaGetErrorString(e)); }

// A dense matrix on a device; every byte 0xff, a NaN in every type, until it is filled.
struct Matrix {
  int64_t rows, columns;
  DType type;
  int device;
  std::shared_ptr<void> memory;

  Matrix(int64_t r, int64_t c, DType t, int on = 0) : rows(r), columns(c), type(t), device(on) {
    check(cudaSetDevice(device));
    void* data = nullptr;
    check(cudaMalloc(&data, bytes() + 256));
    memory = {data, [](void* p) { cudaFree(p); }};
    check(cudaMemset(data, 0xff, bytes() + 256));
  }
  std::size_t bytes() const { return static_cast<std::size_t>(rows * columns * rlk::size_of(type)); }
  char* at(int64_t row, int64_t column = 0) const {
    return static_cast<char*>(memory.get()) + (row * columns + column) * rlk::size_of(type);
  }
  Matrix& fill(unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    if (type == DType::f32) {
      std::vector<float> host(static_cast<std::size_t>(rows * columns));
      for (float& x : host) x = normal(random);
      check(cudaMemcpy(at(0), host.data(), bytes(), cudaMemcpyHostToDevice));
      return *this;
    }
    std::vector<std::uint16_t> host(static_cast<std::size_t>(rows * columns));
    for (auto& x : host)
      x = type == DType::bf16 ? rlk::float_to_bf16(normal(random)) : rlk::float_to_f16(normal(random));
    check(cudaMemcpy(at(0), host.data(), bytes(), cudaMemcpyHostToDevice));
    return *this;
  }
  Tensor view() const { return part(0, rows, 0, columns); }
  Tensor part(int64_t row, int64_t row_end, int64_t column, int64_t column_end) const {
    return Tensor(at(row, column), {row_end - row, column_end - column}, type, {kDLCUDA, device},
                  {columns, 1});
  }
  template <class T = std::uint8_t>
  std::vector<T> host() const {
    std::vector<T> out(bytes() / sizeof(T));
    check(cudaSetDevice(device));
    check(cudaMemcpy(out.data(), at(0), bytes(), cudaMemcpyDeviceToHost));
    return out;
  }
};

struct Stream {
  cudaStream_t handle = nullptr;
  Stream() { check(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking)); }
  ~Stream() { cudaStreamDestroy(handle); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
};

constexpr const char* kImplementations[] = {"cuda.sm90", "cuda.sm90_r4", "cuda.cublaslt", "cuda.fma32",
                                            "cuda.golden"};
constexpr int64_t kSpace = 64 << 20;

bool can_run(const std::string& id) {
  const Matrix h(8, 64, DType::bf16), w(64, 64, DType::bf16), y(8, 64, DType::f32);
  const Tensor th = h.view(), tw = w.view(), ty = y.view();
  return static_cast<bool>(rlk::lm_head({.hidden = th, .weight = tw, .out = ty}, {.backend = id}));
}

// A forward and a backward call of one implementation on operands of its own, with results of its own.
struct Work {
  Matrix hidden, weight, d_out, logits, d_hidden, d_weight, space;
  std::string id;

  Work(std::string which, int64_t m, int64_t k, int64_t v, unsigned seed, int device = 0,
       DType type = DType::bf16)
      : hidden(m, k, type, device),
        weight(v, k, type, device),
        d_out(m, v, type, device),
        logits(m, v, DType::f32, device),
        d_hidden(m, k, DType::f32, device),
        d_weight(v, k, DType::f32, device),
        space(1, kSpace, DType::u8, device),
        id(std::move(which)) {
    hidden.fill(seed), weight.fill(seed + 1), d_out.fill(seed + 2);
  }
  void clear() const {
    check(cudaSetDevice(logits.device));
    for (const Matrix* m : {&logits, &d_hidden, &d_weight}) check(cudaMemset(m->at(0), 0xff, m->bytes()));
    check(cudaDeviceSynchronize());
  }
  // False with the reason printed where a status is not ok: doctest's assertions stay in the test's thread.
  bool run(cudaStream_t stream) const {
    const Tensor h = hidden.view(), w = weight.view(), dy = d_out.view(), y = logits.view(),
                 dh = d_hidden.view(), dw = d_weight.view();
    const rlk::Options options{
        .stream = stream, .backend = id, .workspace = space.at(0), .workspace_bytes = space.bytes()};
    rlk::Status s = rlk::lm_head({.hidden = h, .weight = w, .out = y}, options);
    if (s)
      s = rlk::lm_head_bwd({.d_out = dy, .hidden = h, .weight = w, .d_hidden = dh, .d_weight = dw}, options);
    if (!s) std::printf("%s: %s\n", id.c_str(), std::string(s.message()).c_str());
    return static_cast<bool>(s);
  }
  // The library need not offer an admitted algorithm for every product; the others must serve what they take.
  bool served() const {
    const bool ran = run(nullptr);
    CHECK((ran || id == "cuda.cublaslt"));
    return ran;
  }
  std::vector<std::uint8_t> results() const {
    std::vector<std::uint8_t> all;
    for (const Matrix* m : {&logits, &d_hidden, &d_weight}) {
      const auto part = m->host();
      all.insert(all.end(), part.begin(), part.end());
    }
    return all;
  }
  std::vector<std::uint8_t> alone() const {
    clear();
    REQUIRE(run(nullptr));
    check(cudaDeviceSynchronize());
    return results();
  }
};

std::vector<std::unique_ptr<Work>> many(int device = 0) {
  std::vector<std::unique_ptr<Work>> all;
  unsigned seed = 1;
  for (const char* id : kImplementations) {
    if (!can_run(id)) continue;
    for (const int64_t m : {5, 70, 300}) {
      auto work = std::make_unique<Work>(id, m, 512, 1096, seed += 10, device);
      if (work->served()) all.push_back(std::move(work));
    }
  }
  return all;
}

}  // namespace

TEST_CASE(
    "every kernel agrees with the golden one within its rounding, at sizes and layouts that reach all of "
    "them") {
  if (!gpu()) return;
  for (const DType type : {DType::bf16, DType::f16, DType::f32})
    for (const auto& [k, v] : {std::pair<int64_t, int64_t>{264, 16904}, {263, 1001}})
      for (const int64_t m : {1, 17, 33, 65, 130, 300}) {
        const Work golden("cuda.golden", m, k, v, 3, 0, type);
        golden.alone();
        for (const char* id : kImplementations) {
          Work w(id, m, k, v, 3, 0, type);
          const Tensor h = w.hidden.view(), wt = w.weight.view(), y = w.logits.view();
          if (!rlk::lm_head({.hidden = h, .weight = wt, .out = y}, {.backend = id})) continue;  // GPU, dtype
          if (!w.served()) continue;
          w.alone();
          struct Pair {
            const Matrix &mine, &right;
            int64_t terms;
          };
          for (const auto& [mine, right, terms] :
               {Pair{w.logits, golden.logits, k}, Pair{w.d_hidden, golden.d_hidden, v},
                Pair{w.d_weight, golden.d_weight, m}}) {
            const auto a = mine.host<float>(), b = right.host<float>();
            float peak = 0, error = 0;
            for (std::size_t i = 0; i < a.size(); ++i) {
              peak = std::max(peak, std::fabs(b[i]));
              error = std::isfinite(a[i]) ? std::max(error, std::fabs(a[i] - b[i])) : INFINITY;
              if (error == INFINITY) break;
            }
            INFO(id, " ", rlk::name_of(type), " m=", m, " k=", k, " v=", v, " peak ", peak);
            CHECK(peak > 0);
            CHECK(error <= 1e-5f * std::max(1.0f, static_cast<float>(terms) / 4096) * peak);
          }
        }
      }
}

TEST_CASE("a row's bits are the same in every batch, whichever kernel serves it") {
  if (!gpu()) return;
  for (const char* id : kImplementations) {
    if (!can_run(id)) continue;
    const Work whole(id, 512, 4096, 520, 3);
    if (!whole.served()) continue;
    whole.alone();
    const auto logits = whole.logits.host(), d_hidden = whole.d_hidden.host();
    for (const int64_t m : {1, 16, 17, 33, 64, 65, 128, 256, 300}) {
      const Work w(id, m, 4096, 520, 3);
      if (!w.served()) continue;
      w.alone();
      const auto y = w.logits.host(), dh = w.d_hidden.host();
      INFO(id, " m=", m);
      CHECK(std::memcmp(y.data(), logits.data(), y.size()) == 0);
      CHECK(std::memcmp(dh.data(), d_hidden.data(), dh.size()) == 0);
    }
  }
}

TEST_CASE("calls on eight streams at once, from one thread and from four, give the bits of a call alone") {
  if (!gpu()) return;
  const auto works = many();
  REQUIRE(works.size() >= 6);
  std::vector<std::vector<std::uint8_t>> expected;
  for (const auto& w : works) expected.push_back(w->alone());
  std::vector<Stream> streams(8);
  for (const int threads : {1, 4}) {
    for (const auto& w : works) w->clear();
    std::atomic<int> failures = 0;
    std::vector<std::thread> users;
    for (int t = 0; t < threads; ++t)
      users.emplace_back([&, t] {
        for (int round = 0; round < 5; ++round)
          for (std::size_t i = static_cast<std::size_t>(t); i < works.size();
               i += static_cast<std::size_t>(threads))
            failures += !works[i]->run(streams[i % streams.size()].handle);
      });
    for (std::thread& u : users) u.join();
    check(cudaDeviceSynchronize());
    CHECK(failures == 0);
    for (std::size_t i = 0; i < works.size(); ++i) {
      INFO(works[i]->id, " m=", works[i]->hidden.rows, " threads=", threads);
      CHECK(works[i]->results() == expected[i]);
    }
  }
}

TEST_CASE("a thread whose first call to the GPU is ours gets the bits of any other") {
  if (!gpu()) return;
  for (const auto& w : many()) {
    const auto expected = w->alone();
    w->clear();
    bool ran = false;
    std::thread([&] { ran = w->run(nullptr); }).join();
    check(cudaDeviceSynchronize());
    INFO(w->id, " m=", w->hidden.rows);
    CHECK(ran);
    CHECK(w->results() == expected);
  }
}

TEST_CASE("a captured call replays to the bits of an eager one, also on operands that changed since") {
  if (!gpu()) return;
  for (const auto& w : many()) {
    INFO(w->id, " m=", w->hidden.rows);
    w->alone();  // a size's kernel is chosen outside of captures
    const Stream stream;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t recorded = nullptr;
    check(cudaStreamBeginCapture(stream.handle, cudaStreamCaptureModeThreadLocal));
    const bool ran = w->run(stream.handle);
    check(cudaStreamEndCapture(stream.handle, &graph));
    REQUIRE(ran);
    check(cudaGraphInstantiate(&recorded, graph, 0));
    for (const unsigned seed : {0u, 77u}) {
      if (seed != 0) w->hidden.fill(seed), w->weight.fill(seed + 1), w->d_out.fill(seed + 2);
      const auto eager = w->alone();
      w->clear();
      for (int replay = 0; replay < 3; ++replay) check(cudaGraphLaunch(recorded, stream.handle));
      check(cudaStreamSynchronize(stream.handle));
      CHECK(w->results() == eager);
    }
    cudaGraphExecDestroy(recorded);
    cudaGraphDestroy(graph);
  }
}

TEST_CASE("a call takes no device memory of its own: what is free stays free while calls run") {
  if (!gpu()) return;
  for (const char* id : kImplementations) {
    if (!can_run(id)) continue;
    const Work w(id, 200, 1024, 16384, 5);
    if (!w.served()) continue;
    w.alone();  // kernels and the library's handle are loaded once
    const auto free_now = [] {
      std::size_t free = 0, total = 0;
      check(cudaMemGetInfo(&free, &total));
      return free;
    };
    const Stream stream;
    const std::size_t before = free_now();
    std::size_t least = before;
    for (int i = 0; i < 20; ++i) {
      REQUIRE(w.run(stream.handle));
      least = std::min(least, free_now());  // the call is still running: launches do not wait
    }
    check(cudaStreamSynchronize(stream.handle));
    least = std::min(least, free_now());
    INFO(id);
    CHECK(before - least == 0);
  }
}

TEST_CASE("every device gives the same bits, whichever is current") {
  if (!gpu()) return;
  if (device_count() < 2) {
    std::puts("[skip] one CUDA device");
    return;
  }
  for (const char* id : kImplementations) {
    if (!can_run(id)) continue;
    const Work first(id, 130, 512, 1096, 9, 0), second(id, 130, 512, 1096, 9, 1);
    if (!first.served()) continue;
    first.clear(), second.clear();
    for (const int current : {0, 1, 0}) {
      check(cudaSetDevice(current));
      CHECK(first.run(nullptr));
      CHECK(second.run(nullptr));
    }
    for (const int d : {0, 1}) check(cudaSetDevice(d)), check(cudaDeviceSynchronize());
    INFO(id);
    CHECK(first.results() == second.results());
    check(cudaSetDevice(0));
  }
}

TEST_CASE(
    "sm90/t25k16/r4 is four sums of sm90/t25k16 added in order, at every size, workspace and alignment") {
  if (!gpu()) return;
  if (!can_run("cuda.sm90_r4")) {
    std::puts("[skip] needs a Hopper GPU");
    return;
  }
  for (const DType type : {DType::bf16, DType::f16})
    for (const auto& [k, n] : {std::pair<int64_t, int64_t>{4096, 1000}, {200, 4104}, {1992, 264}, {40, 72}}) {
      // Forward sums over k with n columns, d_hidden over k rows of the weight: the same numbers in both
      // layouts.
      constexpr int64_t kMost = 1030;
      Matrix x(kMost, k, type), forward_weight(n, k, type), backward_weight(k, n, type);
      x.fill(1), forward_weight.fill(2), backward_weight.fill(3);
      const Matrix none(kMost, n, type);
      const int64_t range = (k + 255) / 256 * 64;
      for (const bool backward : {false, true}) {
        const auto run = [&](const char* id, int64_t m, int64_t from, int64_t to, const Matrix& out,
                             const Matrix* space, bool as_asked = false) {
          const Tensor a = x.part(0, m, from, to), y = out.part(0, m, 0, n), h = none.part(0, m, 0, n),
                       fw = forward_weight.part(0, n, from, to), bw = backward_weight.part(from, to, 0, n);
          const rlk::LmHead forward_call{.hidden = a, .weight = fw, .out = y};
          const rlk::LmHeadBwd backward_call{.d_out = a, .hidden = h, .weight = bw, .d_hidden = y};
          rlk::Options options{.backend = id,
                               .workspace = space ? space->at(0) : nullptr,
                               .workspace_bytes = space ? space->bytes() : 0};
          if (as_asked) {
            const auto asked =
                backward ? rlk::workspace(backward_call, options) : rlk::workspace(forward_call, options);
            REQUIRE(asked);
            REQUIRE(*asked <= options.workspace_bytes);
            options.workspace_bytes = *asked;
          }
          const rlk::Status s =
              backward ? rlk::lm_head_bwd(backward_call, options) : rlk::lm_head(forward_call, options);
          INFO(id, ": ", s.message());
          REQUIRE(s);
          check(cudaDeviceSynchronize());
        };
        std::vector<float> expected;
        for (int64_t from = 0; from < k; from += range) {
          const Matrix part(kMost, n, DType::f32);
          run("cuda.sm90", kMost, from, std::min(k, from + range), part, nullptr);
          const auto sums = part.host<float>();
          if (expected.empty())
            expected = sums;
          else
            for (std::size_t i = 0; i < sums.size(); ++i) expected[i] += sums[i];
        }
        const Matrix space(1, 128 << 20, DType::u8);
        for (const int64_t m : {1, 2, 17, 64, 65, 128, 129, 192, 300, 600, 1030})
          for (const char* workspace : {"no", "all the", "plenty of"}) {
            const Matrix out(kMost, n, DType::f32);
            run("cuda.sm90_r4", m, 0, k, out, workspace[0] == 'n' ? nullptr : &space, workspace[0] == 'a');
            const auto got = out.host<float>();
            INFO(rlk::name_of(type), " k=", k, " n=", n, " m=", m, backward ? " backward" : " forward",
                 " with ", workspace, " workspace it asks for");
            CHECK(std::memcmp(got.data(), expected.data(), static_cast<std::size_t>(m * n) * 4) == 0);
          }
        // Rows that do not start on 16 bytes take another kernel.
        Matrix shifted(kMost, k + 1, type);
        check(cudaMemcpy2D(shifted.at(0), static_cast<std::size_t>(2 * (k + 1)), x.at(0),
                           static_cast<std::size_t>(2 * k), static_cast<std::size_t>(2 * k), kMost,
                           cudaMemcpyDeviceToDevice));
        for (const int64_t m : {3, 100}) {
          const Matrix out(m, n, DType::f32);
          const Tensor a = shifted.part(0, m, 0, k), y = out.view(), h = none.part(0, m, 0, n),
                       fw = forward_weight.view(), bw = backward_weight.view();
          const rlk::Options options{.backend = "cuda.sm90_r4"};
          const rlk::Status status =
              backward ? rlk::lm_head_bwd({.d_out = a, .hidden = h, .weight = bw, .d_hidden = y}, options)
                       : rlk::lm_head({.hidden = a, .weight = fw, .out = y}, options);
          REQUIRE(status);
          check(cudaDeviceSynchronize());
          CHECK(std::memcmp(out.host<float>().data(), expected.data(), static_cast<std::size_t>(m * n) * 4) ==
                0);
        }
      }
    }
}
