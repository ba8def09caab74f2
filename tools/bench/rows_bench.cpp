// Ops that read and write rows once, on the CPU, against a copy of the same bytes by memcpy on one thread, measured in turn
// in the same run. Buffers rotate through 1 GB, so that nothing is found in a cache. Figures are medians of the rounds, a
// ratio is the median of each round's ratio. Processor time, so that other work on the machine counts little.
//
//   rows_bench [rounds=15 [rows=4096 [width=4096]]]
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "rlk/rlk.hpp"
#include "timing.hpp"

namespace {

using rlk::DType;
using rlk::Tensor;

constexpr std::size_t kRotate = std::size_t{1} << 30;
const rlk::Options kOneThread{.threads = 1};

// Tensors [rows, width] cut from one piece of memory in turn.
class Room {
 public:
  Room(std::int64_t rows, std::int64_t width, DType type)
      : rows_(rows), width_(width), type_(type), memory_(kRotate / sizeof(Line)) {
    for (std::size_t i = 0; i < kRotate; i += 2) {  // numbers near 1 in fp32 and in bf16
      const auto v = static_cast<std::uint16_t>(0x3f80u | (i * 2654435761u >> 7 & 0x8007u));
      std::memcpy(data() + i, &v, 2);
    }
  }
  std::size_t bytes() const { return static_cast<std::size_t>(rows_ * width_ * rlk::size_of(type_)); }
  std::byte* take() {
    if (next_ + bytes() > kRotate) next_ = 0;
    std::byte* p = data() + next_;
    next_ += bytes();
    return p;
  }
  Tensor tensor() { return {take(), {rows_, width_}, type_}; }

 private:
  std::int64_t rows_, width_;
  DType type_;
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::byte* data() { return memory_.front().bytes; }
  std::vector<Line> memory_;
  std::size_t next_ = 0;
};

struct Entry {
  const char* name;
  int tensors;  // read and written
  std::function<void(Room&)> run;
};

void measure(Room& room, DType type, const Entry& e, int rounds) {
  std::vector<double> times, ratios;
  for (int round = 0; round <= rounds; ++round) {
    double copied = 0;
    const int pairs = (e.tensors + 1) / 2;
    for (int i = 0; i < pairs; ++i) {
      std::byte *to = room.take(), *from = room.take();
      copied += milliseconds(CLOCK_PROCESS_CPUTIME_ID, [&] { std::memcpy(to, from, room.bytes()); });
    }
    copied *= e.tensors / (2.0 * pairs);
    const double taken = milliseconds(CLOCK_PROCESS_CPUTIME_ID, [&] { e.run(room); });
    if (round == 0) continue;  // warms up
    times.push_back(taken), ratios.push_back(copied / taken);
  }
  fmt::print("{:5} {:28} {:8.2f} {:8.1f} {:6.2f}\n", rlk::name_of(type), e.name, median(times),
             1e-6 * static_cast<double>(room.bytes()) * e.tensors / median(times), median(ratios));
}

// What logp has for each row; tokens are all 0.
struct Tokens {
  std::vector<std::int64_t> target;
  std::vector<float> results;
  std::int64_t rows;
  explicit Tokens(std::int64_t n)
      : target(static_cast<std::size_t>(n)), results(static_cast<std::size_t>(6 * n)), rows(n) {}
  Tensor targets() { return {target.data(), {rows}, DType::i64}; }
  Tensor stats() { return {results.data(), {rows, 4}, DType::f32}; }
  Tensor logp() { return {results.data() + 4 * rows, {rows}, DType::f32}; }
  Tensor entropy() { return {results.data() + 5 * rows, {rows}, DType::f32}; }
};

// The logits are read, and by the gradient, which has the stats, read and written.
std::vector<Entry> logp_entries(Tokens& t) {
  return {
      {"logp", 1,
       [&t](Room& r) {
         rlk::check(rlk::logp({.logits = r.tensor(), .target = t.targets(), .logp = t.logp()}, kOneThread));
       }},
      {"logp, entropy, stats", 1,
       [&t](Room& r) {
         rlk::check(rlk::logp({.logits = r.tensor(),
                               .target = t.targets(),
                               .logp = t.logp(),
                               .entropy = t.entropy(),
                               .stats = t.stats()},
                              kOneThread));
       }},
      {"logp_bwd", 2,
       [&t](Room& r) {
         const Tensor logits = r.tensor(), d_logits = r.tensor();
         rlk::check(rlk::logp_bwd({.logits = logits,
                                   .target = t.targets(),
                                   .stats = t.stats(),
                                   .d_logp = t.logp(),
                                   .d_logits = d_logits},
                                  kOneThread));
       }},
  };
}

// One sequence of all rows.
Tensor sequence(const Tensor& t, DType type) {
  return {t.dl().data, {1, t.dl().shape[0], t.dl().shape[1]}, type};
}

std::vector<Entry> entries(std::int64_t width, DType type, std::vector<float>& numbers) {
  const Tensor weight(numbers.data(), {width}, type);
  return {
      {"rms_norm", 2,
       [=](Room& r) {
         const Tensor x = r.tensor(), y = r.tensor();
         rlk::check(rlk::rms_norm({.x = x, .weight = weight, .y = y}, kOneThread));
       }},
      {"rms_norm, residual", 4,
       [=](Room& r) {
         const Tensor x = r.tensor(), residual = r.tensor(), y = r.tensor(), sum = r.tensor();
         rlk::check(
             rlk::rms_norm({.x = x, .weight = weight, .residual = residual, .y = y, .sum = sum}, kOneThread));
       }},
      {"rms_norm_bwd", 3,
       [=, &numbers](Room& r) {
         const Tensor d_y = r.tensor(), x = r.tensor(), d_x = r.tensor();
         const Tensor d_weight(numbers.data() + width, {width}, type);
         rlk::check(rlk::rms_norm_bwd(
             {.d_y = d_y, .x = x, .weight = weight, .d_x = d_x, .d_weight = d_weight}, kOneThread));
       }},
      {"swiglu", 3,
       [](Room& r) {
         const Tensor gate = r.tensor(), up = r.tensor(), out = r.tensor();
         rlk::check(rlk::swiglu({.gate = gate, .up = up, .out = out}, kOneThread));
       }},
      {"swiglu_bwd", 5,
       [](Room& r) {
         const Tensor d = r.tensor(), gate = r.tensor(), up = r.tensor(), d_gate = r.tensor(),
                      d_up = r.tensor();
         rlk::check(rlk::swiglu_bwd({.d_out = d, .gate = gate, .up = up, .d_gate = d_gate, .d_up = d_up},
                                    kOneThread));
       }},
      {"short_conv", 2,
       [=, &numbers](Room& r) {
         const Tensor x = sequence(r.tensor(), type), y = sequence(r.tensor(), type);
         const Tensor filter(numbers.data(), {width, 4}, type);
         rlk::check(rlk::short_conv({.x = x, .weight = filter, .y = y}, kOneThread));
       }},
      {"short_conv_bwd", 3,
       [=, &numbers](Room& r) {
         const Tensor x = sequence(r.tensor(), type), d_y = sequence(r.tensor(), type),
                      d_x = sequence(r.tensor(), type);
         const Tensor filter(numbers.data(), {width, 4}, type),
             d_filter(numbers.data() + 4 * width, {width, 4}, type);
         rlk::check(rlk::short_conv_bwd(
             {.x = x, .weight = filter, .d_y = d_y, .d_x = d_x, .d_weight = d_filter}, kOneThread));
       }},
  };
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 15;
  const std::int64_t rows = argc > 2 ? std::atoll(argv[2]) : 4096,
                     width = argc > 3 ? std::atoll(argv[3]) : 4096;
  if (rounds <= 0 || rows <= 0 || width <= 0 || rows * width > std::int64_t{1} << 25) {
    fmt::print(stderr, "usage: rows_bench [rounds [rows [width]]], at most 2^25 elements\n");
    return 2;
  }
  fmt::print(
      "[{}, {}], one thread, ms of processor time, median of {}; ratio: copy of as many bytes over op\n",
      rows, width, rounds);
  fmt::print("{:5} {:28} {:>8} {:>8} {:>6}\n", "dtype", "op", "ms", "GB/s", "ratio");
  for (const DType type : {DType::bf16, DType::f32}) {
    Room room(rows, width, type);
    std::vector<float> numbers(static_cast<std::size_t>(8 * width), 1.0f);
    for (const Entry& e : entries(width, type, numbers)) measure(room, type, e, rounds);
    Tokens tokens(rows);
    for (const Entry& e : logp_entries(tokens)) measure(room, type, e, rounds);
  }
}
