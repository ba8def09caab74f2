// labels: conformance fibers
// The sum over ranks through each other's memory, on fibers: a thread for each rank, the bits of native's tp_sum in every way that
// parts travel, call after call on the same rings.
#include <doctest/doctest.h>

#include <cmath>
#include <memory>
#include <thread>
#include <vector>

#include "arithmetic/rows_bind.hpp"
#include "fiber_rows.hpp"
#include "src/python/peers/kernels.hpp"

namespace {

using namespace fiberrows;
using rlk::peers::Layout;
using rlk::peers::Sum;
using rlk::peers::Way;

constexpr int kRoom = 3;
constexpr int64_t kLanding = 1 << 20;  // bytes where parts may land

// Ranks, and the memory that all of them write.
struct Ranks {
  struct alignas(256) Line {
    std::byte bytes[256];
  };
  int count;
  std::vector<std::vector<Line>> memory;
  std::vector<std::uint32_t> late;

  explicit Ranks(int n) : count(n), late(static_cast<std::size_t>(n)) {
    const auto lines = static_cast<std::size_t>(landing() + kLanding) / sizeof(Line);
    for (int r = 0; r < n; ++r) {
      memory.emplace_back(lines);
      // Fresh memory is zero where numbers and flags lie and in `words`; elsewhere nobody reads what was not written.
      const auto parts = static_cast<std::size_t>(Layout{kRoom, n}.parts(0)) / sizeof(Line);
      for (std::size_t i = parts; i < lines; ++i) std::memset(&memory.back()[i], 0x7f, sizeof(Line));
    }
  }

  int64_t landing() const { return Layout{kRoom, count}.bytes() / 256 * 256 + 256; }
  float* landed(int rank, int from, int64_t each) {
    auto* bytes = reinterpret_cast<std::byte*>(memory[static_cast<std::size_t>(rank)].data());
    return reinterpret_cast<float*>(bytes + landing()) + from * each;
  }

  // Every rank's call, at the same time.
  void run(std::vector<Sum> calls) {
    std::vector<std::thread> threads;
    for (int r = 0; r < count; ++r)
      threads.emplace_back([&, r] {
        Sum& s = calls[static_cast<std::size_t>(r)];
        for (int p = 0; p < count; ++p) s.memory[p] = memory[static_cast<std::size_t>(p)].data();
        s.ranks = count, s.rank = r, s.room = kRoom;
        s.late = &late[static_cast<std::size_t>(r)], s.nanoseconds = 300'000'000'000;
        rlk_fiber::order = r % 2 != 0 ? rlk_fiber::Order::descending : rlk_fiber::Order::shuffled;
        rlk::peers::launch(s, nullptr);
      });
    for (std::thread& t : threads) t.join();
  }
};

struct Case {
  int64_t rows, width;
  Way way;
  bool spread = false, added = false;
  int chunk = rlk::peers::kChunk;
};

Sum call_of(const Case& c, int ranks, DType t) {
  Sum s;
  s.count = c.rows * c.width, s.width = c.width, s.chunk = c.chunk;
  s.type = static_cast<int>(rlk::rows::type_of(t)), s.spread = c.spread, s.way = static_cast<int>(c.way);
  const int64_t share = (c.rows + ranks - 1) / ranks * c.width,
                even = (s.count + 8 * ranks - 1) / (8 * ranks) * 8;
  s.each = c.spread ? share : even;
  const int64_t elements = c.way == Way::words ? s.count : s.each;
  const int64_t step = c.way == Way::words ? rlk::peers::kWordChunk : c.chunk;
  s.blocks = static_cast<int>(std::min<int64_t>(kRoom, (elements + step - 1) / step));
  return s;
}

// One sum of drawn parts on all ranks, beside native's.
void check(Ranks& ranks, const Case& c, DType t, std::mt19937& random) {
  const int n = ranks.count;
  Owned parts({n, c.rows, c.width}, DType::f32, random, 3);
  // What is no number, too large for 16 bits, and -0 from all ranks.
  auto* const x = reinterpret_cast<float*>(parts.bytes.data());
  x[0] = NAN, x[1] = INFINITY, x[2] = 3e38f;
  for (int64_t r = 0; r < n; ++r) x[r * c.rows * c.width + 3] = -0.0f;
  const Owned bias({c.width}, t, random), residual({c.rows, c.width}, t, random);
  Owned expected({c.rows, c.width}, t);
  rlk::TpSum whole{.partials = parts.tensor, .y = expected.tensor};
  if (c.added) whole.bias = bias.tensor, whole.residual = residual.tensor;
  REQUIRE(rlk::tp_sum(whole, {.backend = "native.tiles"}));

  const int64_t size = rlk::size_of(t), share = (c.rows + n - 1) / n;
  std::vector<std::unique_ptr<Owned>> found;
  std::vector<Sum> calls;
  std::vector<std::pair<int64_t, int64_t>> own;
  for (int r = 0; r < n; ++r) {
    const int64_t first = c.spread ? std::min(c.rows, r * share) : 0;
    const int64_t end = c.spread ? std::min(c.rows, (r + 1) * share) : c.rows;
    own.emplace_back(first, end);
    // One row more than there are: what lies behind stays.
    found.push_back(std::make_unique<Owned>(Shape{end - first + 1, c.width}, t));
    Sum s = call_of(c, n, t);
    const auto* const mine = reinterpret_cast<const float*>(parts.bytes.data()) + r * c.rows * c.width;
    if (c.way == Way::landed) {
      s.landing = ranks.landing();
      REQUIRE(n * s.each * 4 <= kLanding);
      for (int p = 0; p < n; ++p)
        std::copy(mine + std::min(s.count, p * s.each), mine + std::min(s.count, (p + 1) * s.each),
                  ranks.landed(p, r, s.each));
    } else {
      s.part = mine;
    }
    s.y = found.back()->bytes.data();
    if (c.added) s.bias = bias.bytes.data(), s.residual = residual.bytes.data() + first * c.width * size;
    calls.push_back(s);
  }
  ranks.run(calls);
  for (int r = 0; r < n; ++r) {
    const auto [first, end] = own[static_cast<std::size_t>(r)];
    const auto& bytes = found[static_cast<std::size_t>(r)]->bytes;
    const auto begin = expected.bytes.begin() + first * c.width * size;
    const auto used = (end - first) * c.width * size;
    CAPTURE(r);
    CHECK(std::equal(begin, begin + used, bytes.begin()));
    CHECK(std::all_of(bytes.begin() + used, bytes.end(), [](std::byte b) { return b == std::byte{0x7f}; }));
  }
}

}  // namespace

TEST_CASE("a sum over ranks through their memory is native's tp_sum, in every way and one after another") {
  std::mt19937 random(11);
  for (int n : {2, 4, 8}) {
    Ranks ranks(n);
    for (DType t : {DType::bf16, DType::f32, DType::f16})
      for (const Case& c :
           {Case{1, 8, Way::words}, Case{3, 4104, Way::words, false, true}, Case{9, 2048, Way::words},
            Case{1, 40, Way::shared}, Case{17, 2056, Way::shared, false, true, 512},
            Case{7, 136, Way::shared, true, true, 512}, Case{1, 1032, Way::shared, true},
            Case{2, 1032, Way::words}, Case{67, 1032, Way::shared, false, false, 1024},
            Case{33, 1032, Way::shared, true, false, 1024}, Case{67, 1032, Way::landed, false, true, 512},
            Case{1, 40, Way::landed}, Case{33, 1032, Way::landed, true, true, 512},
            Case{17, 2056, Way::shared, false, false, 512}, Case{9, 2048, Way::landed, false, false, 1024},
            Case{1, 1032, Way::landed, true}, Case{33, 1032, Way::landed}}) {
        CAPTURE(n);
        CAPTURE(rlk::name_of(t));
        CAPTURE(c.rows);
        CAPTURE(c.width);
        CAPTURE(static_cast<int>(c.way));
        check(ranks, c, t, random);
      }
    for (std::uint32_t late : ranks.late) CHECK(late == 0);
  }
}
