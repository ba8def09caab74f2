// labels: conformance
// A row's bits do not know how many rows there are. The classic trap is a vocabulary, or a depth, cut into as many parts as
// keep the processor busy with so few rows. Every native implementation, by name: each instruction set that is here.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "rlk/half.hpp"
#include "rlk/ops.hpp"
#include "src/registry.hpp"

namespace {

using rlk::DType;
using rlk::Tensor;

// From one row over every width of vectors and of tiles; the last ones where logits come in panels of 512 rows.
constexpr std::int64_t kCounts[] = {1,  2,  3,  4,  5,   7,   8,   9,   15,  16,  17,  24,  31,  32,
                                    33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 600};
constexpr std::int64_t kMost = 600, kDepth = 4, kColumns = 8300, kNarrow = 300;
// Of logits that are given: what few rows are cut into leaves for.
constexpr std::int64_t kMostLogits = 66, kVocabulary = 33104;
// On more threads there would be few rows always.
constexpr std::int32_t kThreads = 4;

// [rows, width], dense.
struct Matrix {
  std::int64_t width;
  DType type;
  std::vector<std::byte> bytes;

  Matrix(std::int64_t rows, std::int64_t columns, DType t)
      : width(columns),
        type(t),
        bytes(static_cast<std::size_t>(rows * columns * rlk::size_of(t)), std::byte{0x7f}) {}
  Matrix(std::int64_t rows, std::int64_t columns, DType t, std::mt19937& random, float deviation)
      : Matrix(rows, columns, t) {
    std::normal_distribution<float> normal(0, deviation);
    fill([&] { return normal(random); });
  }
  template <class T>
  Matrix(DType t, const std::vector<T>& list) : Matrix(static_cast<std::int64_t>(list.size()), 1, t) {
    std::memcpy(bytes.data(), list.data(), bytes.size());
  }
  template <class Next>
  void fill(Next next) {
    const auto size = static_cast<std::size_t>(rlk::size_of(type));
    for (std::size_t i = 0; i < bytes.size(); i += size) {
      const float x = next();
      const std::uint16_t half = type == DType::bf16 ? rlk::float_to_bf16(x) : rlk::float_to_f16(x);
      std::memcpy(bytes.data() + i, type == DType::f32 ? static_cast<const void*>(&x) : &half, size);
    }
  }
  std::size_t row() const { return static_cast<std::size_t>(width * rlk::size_of(type)); }
  std::byte* at(std::int64_t first) { return bytes.data() + static_cast<std::size_t>(first) * row(); }
  Tensor rows(std::int64_t first, std::int64_t n) { return {at(first), {n, width}, type}; }
  Tensor list(std::int64_t first, std::int64_t n) { return {at(first), {n}, type}; }
};

struct Inputs {
  Matrix hidden, weight, bias, logits, target, seed, position, temperature, top_p;
  Inputs(DType t, std::mt19937& random)
      : hidden(kMost, kDepth, t, random, 1),
        weight(kColumns, kDepth, t, random, 0.5f),
        bias(1, kColumns, t, random, 1),
        logits(kMostLogits, kVocabulary, t),
        target(DType::i64, drawn(random)),
        seed(DType::i64, drawn(random)),
        position(DType::i64, drawn(random)),
        temperature(DType::f32, std::vector<float>(kMost, 0.75f)),
        top_p(DType::f32, std::vector<float>(kMost, 0.9f)) {
    std::uint32_t bits = 1;
    logits.fill([&] {
      bits = bits * 1664525u + 1013904223u;
      return static_cast<float>(bits >> 8) * 0x1p-20f - 8;
    });
  }
  static std::vector<std::int64_t> drawn(std::mt19937& random) {
    std::vector<std::int64_t> all;
    for (std::int64_t i = 0; i < kMost; ++i) all.push_back(static_cast<std::int64_t>(random() % kColumns));
    return all;
  }
};

using Results = std::vector<Matrix>;  // one row for every row of the call
struct Op {
  const char* name;
  std::int64_t most;
  std::function<Results(std::int64_t)> room;
  // Of `n` rows from `first` on.
  std::function<rlk::Status(Inputs&, std::int64_t first, std::int64_t n, Results&, const rlk::Options&)> call;
};

Tensor of(const Matrix& all, std::int64_t columns) {
  return {const_cast<std::byte*>(all.bytes.data()), {columns}, all.type};
}

const Op kOps[] = {
    {"lm_head", kMost, [](std::int64_t n) { return Results{{n, kNarrow, DType::f32}}; },
     [](Inputs& in, std::int64_t first, std::int64_t n, Results& out, const rlk::Options& options) {
       return rlk::lm_head({.hidden = in.hidden.rows(first, n),
                            .weight = in.weight.rows(0, kNarrow),
                            .bias = of(in.bias, kNarrow),
                            .out = out[0].rows(0, n)},
                           options);
     }},
    {"linear", kMost, [](std::int64_t n) { return Results{{n, kNarrow, DType::f32}}; },
     [](Inputs& in, std::int64_t first, std::int64_t n, Results& out, const rlk::Options& options) {
       return rlk::linear({.x = in.hidden.rows(first, n),
                           .weight = in.weight.rows(0, kNarrow),
                           .bias = of(in.bias, kNarrow),
                           .y = out[0].rows(0, n)},
                          options);
     }},
    {"logp", kMostLogits,
     [](std::int64_t n) {
       return Results{{n, 1, DType::f32}, {n, 1, DType::f32}, {n, 1, DType::f32}, {n, 4, DType::f32}};
     },
     [](Inputs& in, std::int64_t first, std::int64_t n, Results& out, const rlk::Options& options) {
       return rlk::logp({.logits = in.logits.rows(first, n),
                         .target = in.target.list(first, n),
                         .logp = out[0].list(0, n),
                         .lse = out[1].list(0, n),
                         .entropy = out[2].list(0, n),
                         .stats = out[3].rows(0, n)},
                        options);
     }},
    {"linear_logp", kMost,
     [](std::int64_t n) {
       return Results{{n, 1, DType::f32}, {n, 1, DType::f32}, {n, 1, DType::f32}, {n, 4, DType::f32}};
     },
     [](Inputs& in, std::int64_t first, std::int64_t n, Results& out, const rlk::Options& options) {
       return rlk::linear_logp({.hidden = in.hidden.rows(first, n),
                                .weight = in.weight.rows(0, kColumns),
                                .bias = of(in.bias, kColumns),
                                .target = in.target.list(first, n),
                                .logp = out[0].list(0, n),
                                .lse = out[1].list(0, n),
                                .entropy = out[2].list(0, n),
                                .stats = out[3].rows(0, n)},
                               options);
     }},
    {"sample", kMostLogits,
     [](std::int64_t n) {
       return Results{{n, 1, DType::i64}, {n, 1, DType::f32}, {n, 1, DType::f32}, {n, 1, DType::i32}};
     },
     [](Inputs& in, std::int64_t first, std::int64_t n, Results& out, const rlk::Options& options) {
       return rlk::sample({.logits = in.logits.rows(first, n),
                           .temperature = in.temperature.list(first, n),
                           .top_p = in.top_p.list(first, n),
                           .seed = in.seed.list(first, n),
                           .position = in.position.list(first, n),
                           .token = out[0].list(0, n),
                           .logp = out[1].list(0, n),
                           .logp_raw = out[2].list(0, n),
                           .count = out[3].list(0, n)},
                          options);
     }},
};

// The first row that differs from the same row of the whole; -1: none.
std::int64_t differs(Results& part, Results& whole, std::int64_t first, std::int64_t n) {
  for (std::size_t r = 0; r < whole.size(); ++r)
    for (std::int64_t i = 0; i < n; ++i)
      if (std::memcmp(part[r].at(i), whole[r].at(first + i), whole[r].row()) != 0) return first + i;
  return -1;
}

}  // namespace

TEST_CASE("a row has the same bits among one to 600 rows, by every native implementation") {
  std::mt19937 random(61);
  std::map<DType, Inputs> inputs;
  for (const DType t : {DType::f32, DType::bf16, DType::f16}) inputs.emplace(t, Inputs(t, random));
  for (const Op& op : kOps) {
    std::set<std::string> tried;
    for (const rlk::OpEntry& entry : rlk::snapshot().ops)
      for (const rlk::ImplementationEntry& e : entry.implementations) {
        if (std::string(entry.schema->name) != op.name || e.backend->name != "native") continue;
        const std::string id = e.implementation->id;
        const bool slow = id.find("replay") != id.npos || id.find("golden") != id.npos;
        for (auto& [type, in] : inputs) {
          const rlk::Options options{.backend = id, .threads = kThreads};
          Results whole = op.room(op.most);
          const rlk::Status status = op.call(in, 0, op.most, whole, options);
          if (status.code() == RLK_NO_IMPLEMENTATION) continue;  // another dtype's, or another processor's
          REQUIRE_MESSAGE(status, status.message());
          tried.insert(id);
          bool last = false;
          for (const std::int64_t n : kCounts) {
            last = !last;
            if (n > op.most || (slow && n != 1 && n != 17 && n != 64)) continue;
            const std::int64_t first = last ? op.most - n : 0;
            Results part = op.room(n);
            REQUIRE(op.call(in, first, n, part, options));
            const std::int64_t row = differs(part, whole, first, n);
            CHECK_MESSAGE(row < 0, std::string(op.name), " ", id, " ", std::string(rlk::name_of(type)),
                          ": row ", row, " of ", op.most, " has other bits among ", n);
          }
        }
      }
    CAPTURE(std::string(op.name));
    CHECK(tried.size() >= 2);
  }
}
