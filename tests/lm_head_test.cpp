// labels: conformance
// links: registry
// lm_head through the public face, on every implementation of this machine's CPU: what the result is, what it
// may not depend on, and that one arithmetic id means one set of bits.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "rlk/half.hpp"
#include "rlk/rlk.hpp"

namespace {

using rlk::DType;
using rlk::Tensor;
using Shape = std::vector<std::int64_t>;

std::uint16_t encode(DType t, float x) {
  return t == DType::bf16 ? rlk::float_to_bf16(x) : rlk::float_to_f16(x);
}
float decode(DType t, std::uint16_t x) {
  return t == DType::bf16 ? rlk::bf16_to_float(x) : rlk::f16_to_float(x);
}

// A dense tensor that owns its memory.
struct Buffer {
  DType type = DType::f32;
  Shape shape;
  std::vector<std::uint8_t> bytes;

  Buffer() = default;
  Buffer(DType t, Shape s) : type(t), shape(std::move(s)) {
    bytes.assign(static_cast<std::size_t>(count() * rlk::size_of(t)), 0xff);  // all ones: a NaN in every type
  }
  std::int64_t count() const {
    std::int64_t n = 1;
    for (const std::int64_t d : shape) n *= d;
    return n;
  }
  float get(std::int64_t i) const {
    if (type == DType::f32) {
      float x;
      std::memcpy(&x, &bytes[static_cast<std::size_t>(4 * i)], 4);
      return x;
    }
    std::uint16_t h;
    std::memcpy(&h, &bytes[static_cast<std::size_t>(2 * i)], 2);
    return decode(type, h);
  }
  void set(std::int64_t i, float x) {
    if (type == DType::f32) {
      std::memcpy(&bytes[static_cast<std::size_t>(4 * i)], &x, 4);
      return;
    }
    const std::uint16_t h = encode(type, x);
    std::memcpy(&bytes[static_cast<std::size_t>(2 * i)], &h, 2);
  }
  Buffer& fill(const std::function<float()>& next) {
    for (std::int64_t i = 0; i < count(); ++i) set(i, next());
    return *this;
  }
  Tensor view() { return Tensor(bytes.data(), shape, type); }
  // Rows [from, to) of a matrix.
  Tensor rows(std::int64_t from, std::int64_t to) {
    return Tensor(bytes.data() + from * shape.back() * rlk::size_of(type), {to - from, shape.back()}, type);
  }
};

struct Random {
  std::mt19937 engine;
  std::normal_distribution<float> normal;
  explicit Random(unsigned seed) : engine(seed) {}
  float operator()() { return normal(engine); }
};

Buffer random(DType t, Shape shape, unsigned seed) {
  return Buffer(t, std::move(shape)).fill([r = Random(seed)]() mutable { return r(); });
}

Buffer run(const std::string& id, Buffer& hidden, Buffer& weight, Buffer* bias, DType out_type,
           int threads = 0) {
  Shape shape = hidden.shape;
  shape.back() = weight.shape[0];
  Buffer out(out_type, shape);
  const Tensor h = hidden.view(), w = weight.view(), b = bias ? bias->view() : Tensor(), y = out.view();
  rlk::LmHead args{.hidden = h, .weight = w, .out = y};
  if (bias) args.bias = b;
  const rlk::Status status = rlk::lm_head(args, {.backend = id, .threads = threads});
  INFO(id, ": ", status.message());
  CHECK(status);
  return out;
}

struct Choice {
  std::string id, arithmetic;
};

// The implementations that would run this call.
std::vector<Choice> usable(DType type, std::int64_t k, std::int64_t v) {
  Buffer hidden(type, {1, k}), weight(type, {v, k}), out(DType::f32, {1, v});
  const Tensor h = hidden.view(), w = weight.view(), y = out.view();
  std::vector<Choice> found;
  const rlk::Resolution r = rlk::resolve(rlk::LmHead{.hidden = h, .weight = w, .out = y});
  for (const rlk::Candidate& c : r.candidates())
    if (c.implementation && c.verdict.code == RLK_OK && c.implementation->device_type == kDLCPU)
      found.push_back({std::string(c.id), c.implementation->arithmetic});
  return found;
}

// The rules, as spec and pages say them.
template <std::size_t kBlock>
float chains(const std::vector<float>& a, const std::vector<float>& b) {
  float total = 0;
  for (std::size_t first = 0; first < a.size(); first += kBlock) {
    float sum = 0;
    for (std::size_t k = first; k < std::min(a.size(), first + kBlock); ++k) sum = std::fma(a[k], b[k], sum);
    total = first ? total + sum : sum;
  }
  return total;
}
constexpr auto kb1024 = chains<1024>, kb256 = chains<256>;
float chain64(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (std::size_t k = 0; k < a.size(); ++k) sum = std::fma(double{a[k]}, double{b[k]}, sum);
  return static_cast<float>(sum);
}
float amx(std::vector<float> a, std::vector<float> b) {
  if (a.size() > 4096) {  // blocks of 4096, added in order
    const auto cut = [](const std::vector<float>& x, std::size_t i) {
      return std::vector<float>(x.begin() + static_cast<std::ptrdiff_t>(i),
                                x.begin() + static_cast<std::ptrdiff_t>(std::min(x.size(), i + 4096)));
    };
    float total = amx(cut(a, 0), cut(b, 0));
    for (std::size_t i = 4096; i < a.size(); i += 4096) total += amx(cut(a, i), cut(b, i));
    return total;
  }
  const auto flush = [](float x) {
    return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.f, x) : x;
  };
  while (a.size() % 32) a.push_back(0), b.push_back(0);
  float total = 0;
  for (std::size_t first = 0; first < a.size(); first += 32) {
    float even = 0, odd = 0;
    for (std::size_t k = first; k < first + 32; k += 2) {
      even = flush(std::fma(flush(a[k]), flush(b[k]), even));
      odd = flush(std::fma(flush(a[k + 1]), flush(b[k + 1]), odd));
    }
    total = flush(total + flush(even + odd));
  }
  return total;
}

// Normal numbers: pairs_test.cpp has the others.
float pairs(std::vector<float> a, std::vector<float> b) {
  const std::size_t block = a.size() <= 1024 ? 512 : 1024;
  if (a.size() % 2) a.push_back(0), b.push_back(0);
  float total = 0;
  for (std::size_t first = 0; first < a.size(); first += block) {
    float sum = 0;
    for (std::size_t k = first; k < std::min(a.size(), first + block); k += 2)
      sum = std::fma(a[k], b[k], std::fma(a[k + 1], b[k + 1], sum));
    total = first ? total + sum : sum;
  }
  return total;
}

std::vector<float> row(const Buffer& m, std::int64_t i) {
  std::vector<float> x(static_cast<std::size_t>(m.shape.back()));
  for (std::size_t k = 0; k < x.size(); ++k) x[k] = m.get(i * m.shape.back() + static_cast<std::int64_t>(k));
  return x;
}

constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f16};

}  // namespace

TEST_CASE("every implementation computes what its arithmetic id says, whatever the tails of K and V") {
  for (const DType type : kTypes)
    for (const auto& [k, v] : {std::pair<std::int64_t, std::int64_t>{1, 1},
                               {31, 3},
                               {96, 129},
                               {1023, 40},
                               {1025, 17},
                               {2049, 130},
                               {7168, 5},
                               {8200, 3}})
      for (const Choice& c : usable(type, k, v)) {
        INFO(c.id, " ", rlk::name_of(type), " k=", k, " v=", v);
        Buffer hidden = random(type, {3, k}, 1), weight = random(type, {v, k}, 2);
        const Buffer before_h = hidden, before_w = weight;
        const Buffer out = run(c.id, hidden, weight, nullptr, DType::f32);
        CHECK(hidden.bytes == before_h.bytes);
        CHECK(weight.bytes == before_w.bytes);
        const auto rule = c.arithmetic == "fma64"          ? chain64
                          : c.arithmetic == "fma32/kb1024" ? kb1024
                          : c.arithmetic == "fma32/kb256"  ? kb256
                                                           : nullptr;
        for (std::int64_t m = 0; m < 3; ++m)
          for (std::int64_t n = 0; n < v; ++n) {
            const auto a = row(hidden, m), b = row(weight, n);
            if (rule)
              REQUIRE(out.get(m * v + n) == rule(a, b));
            else if (c.arithmetic == "amx/k32")
              REQUIRE(out.get(m * v + n) == amx(a, b));
            else if (c.arithmetic == "avx512bf16/kb1024")
              REQUIRE(out.get(m * v + n) == pairs(a, b));
            else
              REQUIRE(out.get(m * v + n) == doctest::Approx(chain64(a, b)).epsilon(1e-4).scale(std::sqrt(k)));
          }
        // Taller products have the same bits, also where K is summed in blocks.
        Buffer taller = random(type, {37, k}, 1);
        const Buffer more = run(c.id, taller, weight, nullptr, DType::f32);
        CHECK(std::memcmp(more.bytes.data(), out.bytes.data(), out.bytes.size()) == 0);
      }
}

TEST_CASE("all ones give exactly K, so no tail of K is dropped") {
  for (const DType type : kTypes)
    for (const std::int64_t k : {1, 15, 33, 100, 1024, 1030, 4096})
      for (const Choice& c : usable(type, k, 20)) {
        Buffer hidden = Buffer(type, {2, k}).fill([] { return 1.f; }),
               weight = Buffer(type, {20, k}).fill([] { return 1.f; });
        const Buffer out = run(c.id, hidden, weight, nullptr, DType::f32);
        for (std::int64_t i = 0; i < out.count(); ++i) {
          INFO(c.id, " k=", k);
          REQUIRE(out.get(i) == static_cast<float>(k));
        }
      }
}

TEST_CASE(
    "a row's bits do not depend on the batch, its place, its neighbours, the threads or the leading shape") {
  constexpr std::int64_t kM = 197, kK = 1100, kV = 300;
  for (const DType type : kTypes) {
    Buffer hidden = random(type, {kM, kK}, 3), weight = random(type, {kV, kK}, 4);
    for (const Choice& c : usable(type, kK, kV)) {
      if (c.id.find(".scalar") != c.id.npos) continue;  // the same code per row by construction, and slow
      INFO(c.id, " ", rlk::name_of(type));
      const Buffer all = run(c.id, hidden, weight, nullptr, DType::f32);
      const auto same_rows = [&](const Buffer& part, std::int64_t from) {
        return std::memcmp(part.bytes.data(), all.bytes.data() + from * kV * 4, part.bytes.size()) == 0;
      };
      for (const std::int64_t m : {1, 2, 4, 5, 13, 31, 32, 33, 64, 65, 96, 127, 128, 129}) {
        const std::int64_t from = (m * 7) % (kM - m);
        Buffer part(type, {m, kK});
        std::memcpy(part.bytes.data(), hidden.bytes.data() + from * kK * rlk::size_of(type),
                    part.bytes.size());
        CHECK(same_rows(run(c.id, part, weight, nullptr, DType::f32), from));
      }
      for (const int threads : {1, 3, 16})
        CHECK(same_rows(run(c.id, hidden, weight, nullptr, DType::f32, threads), 0));
      Buffer poisoned = hidden;  // rows 1, 3, 5 ... become NaN or infinite
      for (std::int64_t i = kK; i < poisoned.count(); i += 2 * kK)
        for (std::int64_t j = 0; j < kK; ++j) poisoned.set(i + j, j % 3 ? INFINITY : NAN);
      const Buffer beside = run(c.id, poisoned, weight, nullptr, DType::f32);
      for (std::int64_t m = 0; m < kM; m += 2)
        REQUIRE(std::memcmp(&beside.bytes[static_cast<std::size_t>(m * kV * 4)],
                            &all.bytes[static_cast<std::size_t>(m * kV * 4)], kV * 4) == 0);
      for (std::int64_t j = 0; j < kV; ++j) {  // a NaN is the canonical one
        std::uint32_t bits;
        std::memcpy(&bits, &beside.bytes[static_cast<std::size_t>((kV + j) * 4)], 4);
        REQUIRE(bits == 0x7fffffffu);
      }
    }
  }
}

TEST_CASE("a NaN is written as the canonical one in 16 bits too, whatever NaN an operand has") {
  constexpr std::int64_t kK = 70, kV = 43;  // columns beyond whole vectors
  for (const DType type : {DType::bf16, DType::f16})
    for (const std::uint16_t nan : {0x7fff, 0xffff, 0x7fa1, 0xff81}) {
      Buffer weight = random(type, {kV, kK}, 8), bias = random(type, {kV}, 9);
      for (const Choice& c : usable(type, kK, kV))
        for (const std::int64_t rows : {1, 3, 7, 40}) {
          Buffer hidden = random(type, {rows, kK}, 7);
          for (std::int64_t i = 0; i < rows; ++i)
            std::memcpy(&hidden.bytes[static_cast<std::size_t>(2 * (i * kK + i % kK))], &nan, 2);
          for (Buffer* const with : {static_cast<Buffer*>(nullptr), &bias}) {
            const Buffer out = run(c.id, hidden, weight, with, type);
            INFO(c.id, " ", rlk::name_of(type), " ", rows, " rows");
            for (std::size_t i = 0; i < out.bytes.size(); i += 2) {
              std::uint16_t bits;
              std::memcpy(&bits, &out.bytes[i], 2);
              REQUIRE(bits == 0x7fff);
            }
          }
        }
    }
}

TEST_CASE("rows and columns may be slices of larger matrices") {
  constexpr std::int64_t kM = 40, kK = 70, kV = 150;
  for (const DType type : kTypes)
    for (const Choice& c : usable(type, kK, kV)) {
      INFO(c.id, " ", rlk::name_of(type));
      Buffer hidden = random(type, {kM, kK + 9}, 5), weight = random(type, {kV, kK + 5}, 6);
      Buffer h(type, {kM, kK}), w(type, {kV, kK});
      for (std::int64_t i = 0; i < kM; ++i)
        for (std::int64_t k = 0; k < kK; ++k) h.set(i * kK + k, hidden.get(i * (kK + 9) + k + 4));
      for (std::int64_t j = 0; j < kV; ++j)
        for (std::int64_t k = 0; k < kK; ++k) w.set(j * kK + k, weight.get(j * (kK + 5) + k + 1));
      const Buffer dense = run(c.id, h, w, nullptr, DType::f32);

      Buffer out(DType::f32, {kM, kV + 3});
      const auto size = rlk::size_of(type);
      const Tensor hs(hidden.bytes.data() + 4 * size, {4, 10, kK}, type, {kDLCPU, 0},
                      {10 * (kK + 9), kK + 9, 1});
      const Tensor ws(weight.bytes.data() + size, {kV, kK}, type, {kDLCPU, 0}, {kK + 5, 1});
      const Tensor ys(out.bytes.data(), {4, 10, kV}, DType::f32, {kDLCPU, 0}, {10 * (kV + 3), kV + 3, 1});
      const rlk::Status status = rlk::lm_head({.hidden = hs, .weight = ws, .out = ys}, {.backend = c.id});
      INFO(status.message());
      REQUIRE(status);
      for (std::int64_t i = 0; i < kM; ++i) {
        CHECK(std::memcmp(&out.bytes[static_cast<std::size_t>(i * (kV + 3) * 4)],
                          &dense.bytes[static_cast<std::size_t>(i * kV * 4)], kV * 4) == 0);
        for (std::int64_t j = kV; j < kV + 3; ++j) CHECK(std::isnan(out.get(i * (kV + 3) + j)));  // untouched
      }
    }
}

TEST_CASE("a bias is added after the product is rounded, and the sum is rounded again") {
  constexpr std::int64_t kM = 5, kK = 130, kV = 140;
  for (const DType type : kTypes)
    for (const DType out_type : {DType::f32, type})
      for (const Choice& c : usable(type, kK, kV)) {
        Buffer hidden = random(type, {kM, kK}, 7), weight = random(type, {kV, kK}, 8),
               bias = random(type, {kV}, 9);
        const Buffer without = run(c.id, hidden, weight, nullptr, out_type),
                     with = run(c.id, hidden, weight, &bias, out_type);
        for (std::int64_t i = 0; i < with.count(); ++i) {
          Buffer sum(out_type, {1});
          sum.set(0, without.get(i) + bias.get(i % kV));
          INFO(c.id, " ", rlk::name_of(type), "->", rlk::name_of(out_type));
          REQUIRE(with.get(i) == sum.get(0));
        }
        Buffer rounded(out_type, {1});
        rounded.set(0, run(c.id, hidden, weight, nullptr, DType::f32).get(3));
        if (c.arithmetic != "fma64")
          CHECK(without.get(3) == rounded.get(0));  // fp64 sums round once, not through fp32
      }
}

TEST_CASE("subnormal inputs count in fp32 arithmetic and are zero where the id says so") {
  Buffer hidden = Buffer(DType::bf16, {1, 64}).fill([] { return 0x1p100f; });
  Buffer weight = Buffer(DType::bf16, {2, 64}).fill([] { return 0x1p-130f; });
  for (const Choice& c : usable(DType::bf16, 64, 2)) {
    INFO(c.id);
    CHECK(run(c.id, hidden, weight, nullptr, DType::f32).get(0) ==
          (c.arithmetic == "amx/k32" || c.arithmetic == "avx512bf16/kb1024" ? 0.f : 0x1p-24f));
  }
}

TEST_CASE("an empty batch and an empty vocabulary give an empty result") {
  for (const Choice& c : usable(DType::bf16, 64, 2)) {
    Buffer none(DType::bf16, {0, 64}), some = random(DType::bf16, {2, 64}, 1),
                                       weight = random(DType::bf16, {2, 64}, 1),
                                       nothing(DType::bf16, {0, 64});
    CHECK(run(c.id, none, weight, nullptr, DType::f32).count() == 0);
    CHECK(run(c.id, some, nothing, nullptr, DType::f32).count() == 0);
  }
}

namespace {

// The native chains that this process may run: by every instruction set it has, each a candidate of its own.
std::vector<Choice> usable_backward(DType type) {
  Buffer d_out(type, {1, 2}), hidden(type, {1, 2}), weight(type, {2, 2}), out(DType::f32, {1, 2});
  const Tensor a = d_out.view(), b = hidden.view(), c = weight.view(), x = out.view();
  std::vector<Choice> found;
  const rlk::Resolution r = rlk::resolve(rlk::LmHeadBwd{.d_out = a, .hidden = b, .weight = c, .d_hidden = x});
  for (const rlk::Candidate& candidate : r.candidates()) {
    if (!candidate.implementation || candidate.verdict.code != RLK_OK) continue;
    const std::string id(candidate.id), arithmetic = candidate.implementation->arithmetic;
    if (id.rfind("native.", 0) == 0 && (arithmetic == "fma64" || arithmetic == "fma32/kb1024"))
      found.push_back({id, arithmetic});
  }
  // Two at every level up to this process's, scalar included.
  const std::int32_t level = rlk_cpu_level();
  CHECK(found.size() == (level >= RLK_CPU_AVX512 ? 6u : level >= RLK_CPU_AVX2 ? 4u : 2u));
  return found;
}

}  // namespace

TEST_CASE("the backward's three results are the chains they promise, at every layout and thread count") {
  constexpr std::int64_t kM = 21, kK = 75, kV = 1043;  // d_hidden sums over V: two blocks of 1024
  for (const DType type : kTypes)
    for (const Choice& choice : usable_backward(type)) {
      const std::string& id = choice.id;
      Buffer d_out = random(type, {3, 7, kV}, 11), hidden = random(type, {3, 7, kK}, 12),
             weight = random(type, {kV, kK}, 13);
      Buffer first[3];
      for (const int threads : {1, 5}) {
        Buffer dh(DType::f32, {3, 7, kK}), dw(DType::f32, {kV, kK}), db(DType::f32, {kV});
        const Tensor a = d_out.view(), b = hidden.view(), c = weight.view(), x = dh.view(), y = dw.view(),
                     z = db.view();
        const rlk::Status status = rlk::lm_head_bwd(
            {.d_out = a, .hidden = b, .weight = c, .d_hidden = x, .d_weight = y, .d_bias = z},
            {.backend = id, .threads = threads});
        INFO(id, " ", status.message());
        REQUIRE(status);
        const auto rule = choice.arithmetic == "fma64" ? chain64 : kb1024;
        const auto column = [](const Buffer& m, std::int64_t j, std::int64_t rows) {
          std::vector<float> x(static_cast<std::size_t>(rows));
          for (std::int64_t i = 0; i < rows; ++i)
            x[static_cast<std::size_t>(i)] = m.get(i * m.shape.back() + j);
          return x;
        };
        for (std::int64_t m = 0; m < kM; m += 4)
          for (std::int64_t k = 0; k < kK; ++k)
            REQUIRE(dh.get(m * kK + k) == rule(row(d_out, m), column(weight, k, kV)));
        for (std::int64_t v = 0; v < kV; v += 97)
          for (std::int64_t k = 0; k < kK; ++k)
            REQUIRE(dw.get(v * kK + k) == rule(column(d_out, v, kM), column(hidden, k, kM)));
        for (std::int64_t v = 0; v < kV; ++v)
          REQUIRE(db.get(v) == rule(column(d_out, v, kM), std::vector<float>(kM, 1.f)));
        if (threads == 1)
          first[0] = dh, first[1] = dw, first[2] = db;
        else
          CHECK((first[0].bytes == dh.bytes && first[1].bytes == dw.bytes && first[2].bytes == db.bytes));
      }
    }
}

namespace {

void backward_on_amx(const std::string& id) {
  struct Size {
    std::int64_t m, k, v;
  };
  // Tails of everything; then more than one depth block of V, of M, and more rows than go at once.
  for (const auto& [m, k, v] :
       {Size{1, 1, 1}, Size{21, 75, 301}, Size{40, 140, 4200}, Size{4130, 33, 140}, Size{600, 130, 64}}) {
    // Rows a little apart, so that nothing is dense by chance.
    Buffer d_out = random(DType::bf16, {m, v + 3}, 31), hidden = random(DType::bf16, {m, k + 1}, 32),
           weight = random(DType::bf16, {v, k + 2}, 33);
    const Tensor a(d_out.bytes.data(), {m, v}, DType::bf16, {kDLCPU, 0}, {v + 3, 1}),
        b(hidden.bytes.data(), {m, k}, DType::bf16, {kDLCPU, 0}, {k + 1, 1}),
        c(weight.bytes.data(), {v, k}, DType::bf16, {kDLCPU, 0}, {k + 2, 1});
    Buffer first[3];
    for (const int threads : {1, 3}) {
      Buffer dh(DType::f32, {m, k}), dw(DType::f32, {v, k}), db(DType::f32, {v});
      const Tensor x = dh.view(), y = dw.view(), z = db.view();
      const rlk::Status status =
          rlk::lm_head_bwd({.d_out = a, .hidden = b, .weight = c, .d_hidden = x, .d_weight = y, .d_bias = z},
                           {.backend = id, .threads = threads});
      if (!status && status.code() != RLK_INVALID_ARGUMENT) {
        MESSAGE("[skip] " << id << " does not run here: " << std::string(status.message()));
        return;
      }
      INFO(status.message(), " m=", m, " k=", k, " v=", v);
      REQUIRE(status);
      if (threads != 1) {
        CHECK((first[0].bytes == dh.bytes && first[1].bytes == dw.bytes && first[2].bytes == db.bytes));
        continue;
      }
      const auto line = [](const Buffer& t, std::int64_t start, std::int64_t step, std::int64_t count) {
        std::vector<float> x;
        for (std::int64_t i = 0; i < count; ++i) x.push_back(t.get(start + i * step));
        return x;
      };
      const std::int64_t rows = std::max<std::int64_t>(1, m / 23), cols = std::max<std::int64_t>(1, v / 29);
      for (std::int64_t i = 0; i < m; i += rows)
        for (std::int64_t j = 0; j < k; ++j)
          REQUIRE(dh.get(i * k + j) == amx(line(d_out, i * (v + 3), 1, v), line(weight, j, k + 2, v)));
      for (std::int64_t i = 0; i < v; i += cols)
        for (std::int64_t j = 0; j < k; ++j)
          REQUIRE(dw.get(i * k + j) == amx(line(d_out, i, v + 3, m), line(hidden, j, k + 1, m)));
      for (std::int64_t i = 0; i < v; ++i)
        REQUIRE(db.get(i) ==
                kb1024(line(d_out, i, v + 3, m), std::vector<float>(static_cast<std::size_t>(m), 1.f)));
      first[0] = dh, first[1] = dw, first[2] = db;
    }
  }
}

}  // namespace

TEST_CASE("the backward on AMX is the chains it promises, at every layout, batch and thread count") {
  for (const std::string id : {"native.replay_amx", "native.amx", "onednn.bf16"}) backward_on_amx(id);
}

// ---- a weight kept packed

namespace {

rlk::Status keep(Buffer& weight, const char* action, std::int64_t version) {
  rlk_args* args = rlk_args_new("lm_head_weight");
  if (!args) return {RLK_UNKNOWN_NAME, "lm_head_weight needs the oneDNN backend"};
  const Tensor w = weight.view();
  rlk_args_tensor(args, "weight", &w.dl());
  rlk_args_string(args, "action", action);
  rlk_args_int(args, "version", version);
  const rlk_code code = rlk_run(args, nullptr);
  rlk_args_free(args);
  return code == RLK_OK ? rlk::Status() : rlk::Status(code, rlk_last_error());
}

}  // namespace

TEST_CASE("a weight kept packed gives the same bits, and a changed one is never served stale") {
  constexpr std::int64_t kK = 100, kV = 300;
  for (const auto& [type, id] : {std::pair{DType::f32, "onednn.f32"},
                                 {DType::bf16, "onednn.bf16"},
                                 {DType::bf16, "onednn.avx512bf16"}}) {
    bool here = false;
    for (const Choice& c : usable(type, kK, kV)) here = here || c.id == id;
    if (!here) {
      MESSAGE("[skip] " << std::string(id) << " does not run here");
      continue;
    }
    Buffer hidden = random(type, {70, kK}, 21), weight = random(type, {kV, kK}, 22),
           other = random(type, {kV, kK}, 23);
    const Buffer plain = run(id, hidden, weight, nullptr, DType::f32),
                 changed = run(id, hidden, other, nullptr, DType::f32);
    const rlk::Status kept = keep(weight, "keep", 1);
    INFO(kept.message());
    REQUIRE(kept);
    CHECK(run(id, hidden, weight, nullptr, DType::f32).bytes == plain.bytes);

    weight.bytes = other.bytes;  // behind its back, although it was declared constant
    Buffer out(DType::f32, {70, kV});
    const Tensor h = hidden.view(), w = weight.view(), y = out.view();
    const rlk::Status stale = rlk::lm_head({.hidden = h, .weight = w, .out = y}, {.backend = id});
    CHECK_FALSE(static_cast<bool>(stale));
    CHECK(std::string(stale.message()).find("weight has changed since lm_head_weight kept version 1") !=
          std::string::npos);

    REQUIRE(keep(weight, "keep", 2));
    CHECK(run(id, hidden, weight, nullptr, DType::f32).bytes == changed.bytes);
    REQUIRE(keep(weight, "drop", 0));
    CHECK(run(id, hidden, weight, nullptr, DType::f32).bytes == changed.bytes);
  }
}

TEST_CASE("columns that oneDNN takes several panels at a time are the promised ones, kept packed or not") {
  struct Size {
    std::int64_t m, k, v;
  };
  for (const auto& [type, id] : {std::pair{DType::f32, "onednn.f32"}, {DType::bf16, "onednn.bf16"}})
    // Four panels at a time, the last ones two and incomplete; two at a time and two depth blocks; several
    // heights, so one panel at a time.
    for (const auto& [m, k, v] : {Size{9, 40, 4296}, Size{3, 4100, 2100}, Size{200, 40, 2100}}) {
      std::uint32_t state = 1;
      const auto next = [&] {
        state = state * 1664525u + 1013904223u;
        return static_cast<float>(static_cast<std::int32_t>(state)) * 0x1p-31f;
      };
      Buffer hidden = Buffer(type, {m, k}).fill(next), weight = Buffer(type, {v, k}).fill(next);
      bool here = false;
      for (const Choice& c : usable(type, k, v)) here = here || c.id == id;
      if (!here) {
        MESSAGE("[skip] " << std::string(id) << " does not run here");
        continue;
      }
      INFO(id, " m=", m, " k=", k, " v=", v);
      const Buffer out = run(id, hidden, weight, nullptr, DType::f32, 1);
      const auto rule = [&](std::int64_t i, std::int64_t j) {
        const auto a = row(hidden, i), b = row(weight, j);
        return type == DType::f32 ? kb1024(a, b) : id == std::string("onednn.bf16") ? amx(a, b) : pairs(a, b);
      };
      for (const std::int64_t i : {std::int64_t{0}, m - 1})
        for (std::int64_t j = 0; j < v; j += 31) REQUIRE(out.get(i * v + j) == rule(i, j));
      for (const int threads : {2, 16})
        CHECK(run(id, hidden, weight, nullptr, DType::f32, threads).bytes == out.bytes);
      REQUIRE(keep(weight, "keep", 1));
      for (const int threads : {1, 2, 16})
        CHECK(run(id, hidden, weight, nullptr, DType::f32, threads).bytes == out.bytes);
      REQUIRE(keep(weight, "drop", 0));
    }
}
