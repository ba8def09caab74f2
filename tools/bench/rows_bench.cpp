// Ops that read and write rows once, on the CPU, against a copy of the same bytes by memcpy on one thread, measured in turn
// in the same run. Buffers rotate through 1 GB, so that nothing is found in a cache. Figures are medians of the rounds, a
// ratio is the median of each round's ratio. Processor time, so that other work on the machine counts little.
//
//   rows_bench [rounds=15 [rows=4096 [width=4096 [OP...]]]]     only what begins with one of these words
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string_view>
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
  Tensor tensor() { return {take(), {rows_, width_}, type_}; }
  // In fp32, in memory of one tensor or of two.
  Tensor tensor32() { return {take(type_ == DType::f32 ? 1 : 2), {rows_, width_}, DType::f32}; }
  std::int64_t elements() const { return rows_ * width_; }
  std::byte* take() { return take(1); }
  std::byte* take(int count) {
    if (next_ + static_cast<std::size_t>(count) * bytes() > kRotate) next_ = 0;
    std::byte* p = data() + next_;
    next_ += static_cast<std::size_t>(count) * bytes();
    return p;
  }

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

// A table of twice as many rows as there are tokens; the gradient writes all of it.
std::vector<Entry> embedding_entries(std::int64_t rows, std::int64_t width, DType type,
                                     std::vector<std::int64_t>& ids) {
  ids.resize(static_cast<std::size_t>(rows));
  for (std::size_t i = 0; i < ids.size(); ++i)
    ids[i] = static_cast<std::int64_t>(i * 2654435761u % static_cast<std::size_t>(2 * rows));
  const Tensor tokens(ids.data(), {rows}, DType::i64);
  return {
      {"embedding", 2,
       [=](Room& r) {
         const Tensor weight(r.take(2), {2 * rows, width}, type), out = r.tensor();
         rlk::check(rlk::embedding({.ids = tokens, .weight = weight, .out = out}, kOneThread));
       }},
      {"embedding_bwd", 3,
       [=](Room& r) {
         const Tensor weight(r.take(2), {2 * rows, width}, type),
             d_weight(r.take(2), {2 * rows, width}, type), d_out = r.tensor();
         rlk::check(rlk::embedding_bwd(
             {.ids = tokens, .d_out = d_out, .weight = weight, .d_weight = d_weight}, kOneThread));
       }},
  };
}

// Partial sums of four devices are in fp32 whatever the result is.
std::vector<Entry> tp_sum_entries(DType type) {
  const int wide = type == DType::f32 ? 1 : 2;
  return {
      {"tp_sum of 4", 4 * wide + 1,
       [](Room& r) {
         const Tensor p0 = r.tensor32(), p1 = r.tensor32(), p2 = r.tensor32(), p3 = r.tensor32(),
                      y = r.tensor();
         rlk::check(rlk::tp_sum({.partials = p0, .y = y, .p1 = p1, .p2 = p2, .p3 = p3}, kOneThread));
       }},
      {"tp_sum_bwd of 4", 4 * wide + 1,
       [](Room& r) {
         const Tensor p0 = r.tensor32(), p1 = r.tensor32(), p2 = r.tensor32(), p3 = r.tensor32(),
                      d_y = r.tensor(), p = r.tensor32();
         rlk::check(rlk::tp_sum_bwd(
             {.d_y = d_y, .partials = p, .d_partials = p0, .d_p1 = p1, .d_p2 = p2, .d_p3 = p3}, kOneThread));
       }},
  };
}

// A number a token, in fp32: each row is a sequence, each 16 tokens a group.
std::vector<Entry> loss_entries(std::int64_t rows, std::int64_t elements, std::vector<float>& numbers,
                                std::vector<std::int32_t>& offsets) {
  for (std::int64_t i = 0; i <= elements; i += 16) offsets.push_back(static_cast<std::int32_t>(i));
  const Tensor groups(offsets.data(), {static_cast<std::int64_t>(offsets.size())}, DType::i32);
  numbers.resize(std::max(numbers.size(), static_cast<std::size_t>(5 * rows + 1)));
  const Tensor loss(numbers.data(), {1}, DType::f32), totals(numbers.data() + 1, {rows, 5}, DType::f32);
  return {
      {"ratio_kl", 5,
       [](Room& r) {
         const Tensor logp = r.tensor(), old = r.tensor(), ref = r.tensor(), ratio = r.tensor(),
                      kl = r.tensor();
         rlk::check(rlk::ratio_kl({.logp = logp, .old_logp = old, .ref_logp = ref, .ratio = ratio, .kl = kl},
                                  kOneThread));
       }},
      {"ratio_kl_bwd", 6,
       [](Room& r) {
         const Tensor logp = r.tensor(), old = r.tensor(), ref = r.tensor(), d_ratio = r.tensor(),
                      d_kl = r.tensor(), d_logp = r.tensor();
         rlk::check(rlk::ratio_kl_bwd({.logp = logp,
                                       .old_logp = old,
                                       .ref_logp = ref,
                                       .d_ratio = d_ratio,
                                       .d_kl = d_kl,
                                       .d_logp = d_logp},
                                      kOneThread));
       }},
      {"policy_loss", 4,
       [=](Room& r) {
         const Tensor logp = r.tensor(), old = r.tensor(), advantages = r.tensor(), factor = r.tensor();
         rlk::check(rlk::policy_loss({.logp = logp,
                                      .old_logp = old,
                                      .advantages = advantages,
                                      .loss = loss,
                                      .totals = totals,
                                      .factor = factor},
                                     kOneThread));
       }},
      {"policy_loss_bwd", 2,
       [=](Room& r) {
         const Tensor factor = r.tensor(), d_logp = r.tensor();
         rlk::check(rlk::policy_loss_bwd({.d_loss = loss, .factor = factor, .d_logp = d_logp}, kOneThread));
       }},
      {"group_advantage of 16", 2,
       [=](Room& r) {
         const Tensor rewards(r.take(), {elements}, DType::f32), advantages(r.take(), {elements}, DType::f32);
         rlk::check(rlk::group_advantage(
             {.rewards = rewards, .group_offsets = groups, .advantages = advantages}, kOneThread));
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
    fmt::print(stderr, "usage: rows_bench [rounds [rows [width [OP...]]]], at most 2^25 elements\n");
    return 2;
  }
  fmt::print(
      "[{}, {}], one thread, ms of processor time, median of {}; ratio: copy of as many bytes over op\n",
      rows, width, rounds);
  fmt::print("{:5} {:28} {:>8} {:>8} {:>6}\n", "dtype", "op", "ms", "GB/s", "ratio");
  const auto wanted = [&](const std::string_view name) {
    return argc <= 4 ||
           std::any_of(argv + 4, argv + argc, [&](const char* op) { return name.starts_with(op); });
  };
  for (const DType type : {DType::bf16, DType::f32}) {
    Room room(rows, width, type);
    std::vector<float> numbers(static_cast<std::size_t>(8 * width), 1.0f), sums;
    Tokens tokens(rows);
    std::vector<std::int64_t> ids;
    std::vector<std::int32_t> offsets;
    std::vector<Entry> all = entries(width, type, numbers);
    const auto add = [&](const std::vector<Entry>& more) { all.insert(all.end(), more.begin(), more.end()); };
    add(logp_entries(tokens));
    add(embedding_entries(rows, width, type, ids));
    add(tp_sum_entries(type));
    if (type == DType::f32) add(loss_entries(rows, room.elements(), sums, offsets));
    for (const Entry& e : all)
      if (wanted(e.name)) measure(room, type, e, rounds);
  }
}
