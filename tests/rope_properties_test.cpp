// labels: conformance
// sources: rope_engines.cpp
// What rotation promises whoever computes it: every case here runs on every engine there is (plain, AVX2 and
// AVX-512, with cached and with streaming stores, and the GPU kernels on fibers in two orders), which must
// agree to the bit. Tables are random and off the unit circle unless a case is about angles, so that a
// transpose is not taken for an inverse; cotangents are random.
#include <sys/mman.h>

#include "native/rope/run.hpp"
#include "rlk/rlk.hpp"
#include "rope_support.hpp"

using namespace ropetest;
using rlk::rotary::Layout;
using rlk::rotary::Pairing;

namespace {

Tensor floats(Shape shape, std::uint64_t seed, Float type = Float::f32) {
  return Tensor(type_of(type), std::move(shape)).random(seed);
}
Tensor ints(std::vector<double> v, DLDataType type = kInt32) {
  return Tensor(type, {std::int64_t(v.size())}).fill(v);
}

Setting random_tables(Layout layout, Shape shape, std::uint64_t seed) {
  Setting s;
  s.attributes.layout = layout;
  s.cos = floats(shape, seed), s.sin = floats(std::move(shape), seed + 1);
  return s;
}

// Tables of exact angles for these positions.
Setting angles(Layout layout, std::vector<double> positions, std::int64_t dim) {
  Setting s;
  s.attributes.layout = layout;
  Tensor at = ints(std::move(positions), kInt64);
  s.cos = s.sin = Tensor(type_of(Float::f32), {at.size(), dim / 2});
  REQUIRE(rlk::rope_tables(
      {.cos = s.cos.dl(), .sin = s.sin.dl(), .positions = at.dl(), .rotary_dim = dim, .base = 500}));
  return s;
}

std::vector<double> first_rows(std::int64_t n) {
  std::vector<double> v;
  for (std::int64_t i = 0; i < n; ++i) v.push_back(double(i));
  return v;
}

Tensor rotate(Setting s, Tensor& x, bool backward = false) {
  Tensor y(x.view.dtype, x.shape);
  Tensors t = s.tensors();
  t.x = x.dl(), t.out = y.dl();
  s.attributes.backward = backward;
  CHECK(run_all(s.attributes, t, y) == "");
  return y;
}

// Element i of `part` is element from(i) of `whole`.
template <class From>
Tensor pick(Tensor& whole, Shape shape, From from) {
  Tensor part(whole.view.dtype, std::move(shape));
  for (std::int64_t i = 0; i < part.size(); ++i) part.set(i, whole.get(from(i)));
  return part;
}
template <class From>
int differing(Tensor& part, Tensor& whole, From from) {
  int count = 0;
  for (std::int64_t i = 0; i < part.size(); ++i) count += part.bits(i) != whole.bits(from(i));
  return count;
}

double dot(Tensor& a, Tensor& b) {
  double sum = 0;
  for (std::int64_t i = 0; i < a.size(); ++i) sum += a.get(i) * b.get(i);
  return sum;
}

// The formula in float64 for x [B,H,T,D], all dims turning, and what is added in it: with tables off the unit
// circle a result can be far smaller than its terms.
struct Formula {
  std::vector<double> value, terms;

  Formula(Setting& s, Tensor& x, bool transpose) : value(std::size_t(x.size())), terms(value) {
    const std::int64_t tokens = x.shape[2], dim = x.shape[3], half = dim / 2, width = s.cos.shape[1];
    const bool adjacent = s.attributes.pairing == Pairing::adjacent;
    for (std::int64_t row = 0; row < x.size() / dim; ++row) {
      for (std::int64_t p = 0; p < half; ++p) {
        const std::int64_t a = adjacent ? 2 * p : p, b = adjacent ? 2 * p + 1 : p + half;
        const std::int64_t at = row % tokens * width, first = at + (width == dim ? a : p),
                           second = at + (width == dim ? b : p);
        const double xa = x.get(row * dim + a), xb = x.get(row * dim + b);
        add(row * dim + a, xa * s.cos.get(first),
            transpose ? xb * s.sin.get(second) : -xb * s.sin.get(first));
        add(row * dim + b, xb * s.cos.get(second),
            transpose ? -xa * s.sin.get(first) : xa * s.sin.get(second));
      }
    }
  }
  void add(std::int64_t i, double one, double two) {
    value[std::size_t(i)] = one + two, terms[std::size_t(i)] = std::fabs(one) + std::fabs(two);
  }
  int outside(Tensor& got, Float type) const {
    int bad = 0;
    for (std::int64_t i = 0; i < got.size(); ++i) {
      const double want = value[std::size_t(i)];
      bad += !(std::fabs(got.get(i) - want) <= ulp(type, want) + 0x1p-20 * terms[std::size_t(i)]);
    }
    return bad;
  }
};

}  // namespace

TEST_CASE(
    "rope, every engine: the gradient is the transposed formula, and each likely mistake is told from it") {
  for (Float type : {Float::f32, Float::bf16, Float::f16})
    for (Pairing pairing : {Pairing::half, Pairing::adjacent})
      for (std::int64_t width : {32, 64}) {  // 64: full width, the halves differ
        Setting s = random_tables(Layout::bhsd, {7, width}, 100);
        s.attributes.pairing = pairing;
        Tensor g = floats({2, 3, 7, 64}, 102, type), dx = rotate(s, g, true), y = rotate(s, g);
        const Formula forward(s, g, false), transposed(s, g, true);
        CHECK(transposed.outside(dx, type) == 0);
        CHECK(forward.outside(y, type) == 0);
        // The forward reused; and with unequal halves the forward with the sine negated.
        CHECK(transposed.outside(y, type) > y.size() / 2);
        Setting negated = s;
        for (std::int64_t i = 0; i < s.sin.size(); ++i) negated.sin.set(i, -s.sin.get(i));
        Tensor reused = rotate(negated, g);
        const int wrong = transposed.outside(reused, type);
        CHECK((width == 64 ? wrong > y.size() / 2 : wrong == 0));
      }
}

TEST_CASE("rope, every engine: where a result cancels, the larger pair bounds its error, not its own") {
  // One pair a head, and tables whose halves differ: both members of a result may nearly vanish.
  Setting s = random_tables(Layout::bhsd, {4000, 2}, 104);
  Tensor x = floats({1, 40, 4000, 2}, 105), y = rotate(s, x), dx = rotate(s, x, true);
  const auto mate = [](std::int64_t i) { return i ^ 1; };
  const auto before = [&](std::int64_t i) { return std::hypot(x.get(i), x.get(i ^ 1)); };
  const Formula forward(s, x, false), transposed(s, x, true);
  CHECK(ropetest::outside(y, forward.value, Float::f32, mate, before) == 0);
  CHECK(ropetest::outside(dx, transposed.value, Float::f32, mate, before) == 0);
  CHECK(ropetest::outside(y, forward.value, Float::f32, mate) > 0);
  CHECK(ropetest::outside(dx, transposed.value, Float::f32, mate) > 0);
}

TEST_CASE("rope, every engine: <g, F x> = <F^T g, x> in every layout and pairing") {
  for (Layout layout : {Layout::bhsd, Layout::bshd, Layout::sbhd, Layout::thd})
    for (Pairing pairing : {Pairing::half, Pairing::adjacent, Pairing::adjacent_to_half})
      for (std::int64_t width : {12, 24}) {
        Setting s = random_tables(layout, {8, width}, 110);
        s.attributes.pairing = pairing, s.attributes.rotary_dim = 24, s.attributes.rotary_offset = 4;
        const Shape shape = layout == Layout::thd ? Shape{5, 4, 32} : Shape{3, 4, 5, 32};
        Tensor x = floats(shape, 112), g = floats(shape, 113), y = rotate(s, x), dx = rotate(s, g, true);
        const double forward = dot(g, y);
        CHECK(std::fabs(forward - dot(dx, x)) <= 1e-5 * (std::fabs(forward) + 10));
        if (pairing == Pairing::adjacent_to_half) continue;
        Tensor reused = rotate(s, g);  // what a backward that forgets to transpose gives
        CHECK(std::fabs(forward - dot(reused, x)) > 1e-2 * (std::fabs(forward) + 10));
      }
}

TEST_CASE(
    "rope, every engine: lengths are kept, the transpose turns back, and the other dims pass bit for bit") {
  const double m = 1.25;  // an attention factor
  Setting s = angles(Layout::bhsd, first_rows(9), 32);
  for (std::int64_t i = 0; i < s.cos.size(); ++i)
    s.cos.set(i, m * s.cos.get(i)), s.sin.set(i, m * s.sin.get(i));
  s.attributes.rotary_dim = 32, s.attributes.rotary_offset = 8;
  for (Pairing pairing : {Pairing::half, Pairing::adjacent}) {
    s.attributes.pairing = pairing;
    Tensor x = floats({2, 3, 9, 48}, 120), y = rotate(s, x), back = rotate(s, y, true);
    const auto partner = partner_of(48, 32, 8, pairing == Pairing::adjacent);
    for (std::int64_t i = 0; i < x.size(); ++i) {
      const std::int64_t mate = partner(i);
      if (mate == i) {
        CHECK(y.bits(i) == x.bits(i));
        CHECK(back.bits(i) == x.bits(i));
        continue;
      }
      const double pair = std::hypot(x.get(i), x.get(mate));
      CHECK(std::fabs(std::hypot(y.get(i), y.get(mate)) - m * pair) <= 0x1p-21 * m * pair);
      CHECK(std::fabs(back.get(i) - m * m * x.get(i)) <= 0x1p-21 * m * m * pair);
    }
    // The pass-through dims' gradient is the cotangent itself, not one.
    Tensor g = floats(x.shape, 121), dx = rotate(s, g, true);
    for (std::int64_t i = 0; i < x.size(); ++i)
      if (partner(i) == i) CHECK(dx.bits(i) == g.bits(i));
  }
}

TEST_CASE("rope, every engine: <R_i q, R_j k> depends on i - j only, up to position 131071") {
  const std::int64_t dim = 128;
  Tensor q = floats({1, dim}, 130), k = floats({1, dim}, 131);
  const auto score = [&](double i, double j) {
    Setting at_i = angles(Layout::bhsd, {i}, dim), at_j = angles(Layout::bhsd, {j}, dim);
    Tensor a = rotate(at_i, q), b = rotate(at_j, k);
    return dot(a, b);
  };
  const double near = score(7, 3);
  for (double shift : {1., 100., 65536. - 7, 131071. - 7})
    CHECK(score(7 + shift, 3 + shift) == doctest::Approx(near).epsilon(2e-5));
  CHECK(std::fabs(score(8, 3) - near) > 1e-3);
}

TEST_CASE("rope, every engine: half pairing is adjacent pairing of permuted dims") {
  Setting s = random_tables(Layout::bshd, {6, 16}, 140), t = s;
  t.attributes.pairing = Pairing::adjacent;
  const auto place = [](std::int64_t i) { return i / 32 * 32 + i % 32 % 2 * 16 + i % 32 / 2; };
  for (Float type : {Float::f32, Float::bf16}) {
    Tensor x = floats({2, 6, 3, 32}, 142, type), side_by_side = pick(x, x.shape, place);
    Tensor y = rotate(s, x), z = rotate(t, side_by_side);
    CHECK(differing(z, y, place) == 0);
  }
}

TEST_CASE("rope, every engine: narrower tables of fp32 data give the bits of their values in fp32") {
  for (Float narrow : {Float::bf16, Float::f16})
    for (Pairing pairing : {Pairing::half, Pairing::adjacent, Pairing::adjacent_to_half})
      for (std::int64_t width : {16, 32})
        for (bool starts : {false, true})
          for (bool backward : {false, true}) {
            Setting s = random_tables(Layout::bshd, {9, width}, 144);
            s.attributes.pairing = pairing;
            if (starts) s.starts = ints({3, 0});
            Setting wide = s;
            for (Tensor* t : {&s.cos, &s.sin}) {
              Tensor& upcast = t == &s.cos ? wide.cos : wide.sin;
              *t = floats(t->shape, t == &s.cos ? 144 : 145, narrow);
              for (std::int64_t i = 0; i < t->size(); ++i) upcast.set(i, t->get(i));
            }
            Tensor x = floats({2, 6, 3, 32}, 146), y = rotate(s, x, backward), z = rotate(wide, x, backward);
            CHECK(same_bits(y, z));
            Setting never_rounded = random_tables(Layout::bshd, {9, width}, 144);
            never_rounded.attributes.pairing = pairing, never_rounded.starts = s.starts;
            Tensor other = rotate(never_rounded, x, backward);
            CHECK_FALSE(same_bits(y, other));
          }
}

TEST_CASE("rope, every engine: at negative positions nothing turns where that is allowed, forward and back") {
  const std::int64_t row = 3 * 32;
  for (Float type : {Float::f32, Float::bf16, Float::f16})
    for (Pairing pairing : {Pairing::half, Pairing::adjacent})
      for (std::int64_t width : {16, 32})
        for (bool backward : {false, true}) {
          // Two sequences, padded on the left by four tokens and by none; the table has no row to spare.
          Setting s = random_tables(Layout::bshd, {6, width}, 147);
          s.attributes.pairing = pairing, s.attributes.negative = rlk::rotary::Negative::unrotated;
          Setting by_position = s;
          s.starts = ints({-4, 0});
          by_position.positions = Tensor(kInt64, {2, 6}).fill({-4, -3, -2, -1, 0, 1, 0, 1, 2, 3, 4, 5});
          Tensor x = floats({2, 6, 3, 32}, 148, type), y = rotate(s, x, backward),
                 z = rotate(by_position, x, backward);
          CHECK(same_bits(y, z));
          const auto padding = [](std::int64_t e) { return e; };
          Tensor still = pick(x, {4, 3, 32}, padding);
          CHECK(differing(still, y, padding) == 0);
          // The rest as if the padding were not there.
          for (std::int64_t b : {0, 1}) {
            const std::int64_t pad = b == 0 ? 4 : 0;
            const auto from = [&](std::int64_t e) { return (b * 6 + pad) * row + e; };
            Setting alone = random_tables(Layout::bshd, {6, width}, 147);
            alone.attributes.pairing = pairing;
            Tensor part = pick(x, {1, 6 - pad, 3, 32}, from), out = rotate(alone, part, backward);
            CHECK(differing(out, y, from) == 0);
            CHECK_FALSE(same_bits(out, part));
          }
        }
}

TEST_CASE("rope, every engine: in place, and pair by pair where pairs follow axes of their own") {
  Setting s = random_tables(Layout::bshd, {9, 12}, 149);
  s.attributes.negative = rlk::rotary::Negative::unrotated;
  s.attributes.mrope[0] = 2, s.attributes.mrope[1] = 5, s.attributes.mrope[2] = 5;
  s.positions = Tensor(kInt64, {3, 4}).fill({-1, 2, 3, 4, 5, -2, 3, -1, 1, 2, -7, 4});
  Tensor x = floats({1, 4, 2, 24}, 150), y = rotate(s, x);
  Setting clamped = s;
  for (std::int64_t i = 0; i < 12; ++i) clamped.positions.set(i, std::max(0.0, s.positions.get(i)));
  Tensor turned = rotate(clamped, x);
  for (std::int64_t e = 0; e < x.size(); ++e) {
    const std::int64_t pair = e % 12, token = e / 48, axis = pair < 2 ? 0 : pair < 7 ? 1 : 2;
    CHECK(y.bits(e) == (s.positions.get(axis * 4 + token) < 0 ? x : turned).bits(e));
  }
  s.attributes.in_place = true;
  for (const Engine& engine : engines()) {
    CAPTURE(engine.name);
    Tensor data = x;
    Tensors t = s.tensors();
    t.x = t.out = data.dl();
    Geometry g;
    REQUIRE(rlk::rotary::read(s.attributes, t, g) == "");
    engine.run(g);
    CHECK(same_bits(data, y));
  }
}

TEST_CASE("rope, every engine: packed sequences equal the loop over them, empty ones included") {
  Setting s = random_tables(Layout::thd, {40, 16}, 150);
  s.cu_seqlens = ints({0, 4, 4, 5, 11}), s.starts = ints({3, 9, 20, 0});
  for (bool backward : {false, true}) {
    Tensor x = floats({11, 2, 32}, 152, Float::bf16), y = rotate(s, x, backward);
    for (std::int64_t i = 0; i < 4; ++i) {
      const auto begin = std::int64_t(s.cu_seqlens.get(i)),
                 length = std::int64_t(s.cu_seqlens.get(i + 1)) - begin;
      if (length == 0) continue;
      const auto from = [&](std::int64_t e) { return begin * 64 + e; };
      Setting one = random_tables(Layout::bshd, {40, 16}, 150);
      one.starts = ints({s.starts.get(i)});
      Tensor part = pick(x, {1, length, 2, 32}, from), out = rotate(one, part, backward);
      CHECK(differing(out, y, from) == 0);
    }
  }
}

TEST_CASE("rope, every engine: the ranks of a context-parallel group together give the whole") {
  for (std::int64_t ranks : {2, 4})
    for (bool packed : {false, true})
      for (bool backward : {false, true}) {
        CAPTURE(ranks);
        // One sequence of `whole` tokens, or two packed ones of a third and two thirds of it.
        const std::int64_t unit = 2 * ranks, whole = 3 * unit, row = 3 * 16;
        std::vector<double> ends = packed ? std::vector<double>{0, double(unit), double(whole)}
                                          : std::vector<double>{0, double(whole)};
        Setting s = random_tables(packed ? Layout::thd : Layout::bshd, {whole, 8}, 160);
        if (packed) s.cu_seqlens = ints(ends);
        const auto shape = [&](std::int64_t tokens) {
          return packed ? Shape{tokens, 3, 16} : Shape{1, tokens, 3, 16};
        };
        Tensor x = floats(shape(whole), 162), y = rotate(s, x, backward);
        std::vector<int> covered(std::size_t(whole), 0);
        for (std::int64_t rank = 0; rank < ranks; ++rank) {
          std::vector<std::int64_t> tokens;  // of this rank: a chunk of each sequence's front and its mirror
          for (std::size_t i = 0; i + 1 < ends.size(); ++i) {
            const auto begin = std::int64_t(ends[i]),
                       chunk = (std::int64_t(ends[i + 1]) - begin) / (2 * ranks);
            for (std::int64_t first : {rank, 2 * ranks - 1 - rank})
              for (std::int64_t t = 0; t < chunk; ++t) tokens.push_back(begin + first * chunk + t);
          }
          for (auto t : tokens) ++covered[std::size_t(t)];
          const auto from = [&](std::int64_t e) { return tokens[std::size_t(e / row)] * row + e % row; };
          Setting mine = s;
          mine.attributes.cp_rank = rank, mine.attributes.cp_size = ranks;
          Tensor part = pick(x, shape(whole / ranks), from), out = rotate(mine, part, backward);
          CHECK(differing(out, y, from) == 0);
        }
        CHECK(covered == std::vector<int>(std::size_t(whole), 1));
      }
}

TEST_CASE("rope, every engine: one token of many sequences, each at its own position, equals each alone") {
  const std::int64_t batch = 5, row = 3 * 32;
  const std::vector<double> at{4, 0, 11, 7, 7};
  for (Layout layout : {Layout::bhsd, Layout::bshd, Layout::sbhd}) {
    const bool first = layout != Layout::sbhd;
    const auto shape = [&](std::int64_t b) {
      return layout == Layout::bhsd ? Shape{b, 3, 1, 32} : first ? Shape{b, 1, 3, 32} : Shape{1, b, 3, 32};
    };
    Setting by_start = random_tables(layout, {12, 16}, 170), by_position = by_start, by_table = by_start;
    by_start.starts = ints(at);
    by_position.positions = Tensor(kInt64, {batch, 1}).fill(at);
    const auto table = [&](Tensor& t) {
      return pick(t, {batch, 1, 16},
                  [&](std::int64_t i) { return std::int64_t(at[std::size_t(i / 16)]) * 16 + i % 16; });
    };
    by_table.cos = table(by_start.cos), by_table.sin = table(by_start.sin);
    Tensor x = floats(shape(batch), 172, Float::bf16), y = rotate(by_start, x);
    for (Setting* s : {&by_position, &by_table}) {
      Tensor z = rotate(*s, x);
      CHECK(same_bits(y, z));
    }
    for (std::int64_t b = 0; b < batch; ++b) {
      const auto from = [&](std::int64_t e) { return b * row + e; };
      Setting one = random_tables(layout, {12, 16}, 170);
      one.starts = ints({at[std::size_t(b)]});
      Tensor part = pick(x, shape(1), from), out = rotate(one, part);
      CHECK(differing(out, y, from) == 0);
    }
    // All at position 0, the mistake of who takes the batch for the sequence's start.
    Setting zero = random_tables(layout, {12, 16}, 170);
    Tensor wrong = rotate(zero, x);
    CHECK_FALSE(same_bits(y, wrong));
  }
}

TEST_CASE("rope, every engine: 24 heads and 1 head in one launch, each as if it were alone") {
  for (Layout layout : {Layout::bhsd, Layout::bshd})
    for (Float type : {Float::f32, Float::bf16})
      for (bool backward : {false, true}) {
        const bool tokens_inside = layout == Layout::bhsd;
        const auto shape = [&](std::int64_t heads) {
          return tokens_inside ? Shape{2, heads, 5, 64} : Shape{2, 5, heads, 64};
        };
        Setting s = random_tables(layout, {5, 32}, 180);
        s.attributes.backward = backward;
        Tensor q = floats(shape(24), 182, type), k = floats(shape(1), 183, type), yq = q, yk = k;
        Tensors t = s.tensors();
        t.x = q.dl(), t.k = k.dl(), t.out = yq.dl(), t.k_out = yk.dl();
        REQUIRE(run_all(s.attributes, t, yq, &yk) == "");
        for (Tensor* side : {&q, &k}) {
          const std::int64_t heads = side == &q ? 24 : 1;
          for (std::int64_t h = 0; h < heads; ++h) {
            const auto from = [&](std::int64_t e) {
              const std::int64_t d = e % 64, token = e / 64 % 5, b = e / 320;
              return tokens_inside ? ((b * heads + h) * 5 + token) * 64 + d
                                   : ((b * 5 + token) * heads + h) * 64 + d;
            };
            Tensor one = pick(*side, shape(1), from), out = rotate(s, one, backward);
            CHECK(differing(out, side == &q ? yq : yk, from) == 0);
          }
        }
      }
}

TEST_CASE("rope, every engine: tables longer than the sequence give what exact ones give, batched ones too") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (std::int64_t batch : {1, 3}) {  // 1: one table for all
    Setting exact = random_tables(Layout::bhsd, {batch, 5, 16}, 190), longer = exact;
    const auto stretch = [&](Tensor& t) {
      Tensor out(t.view.dtype, {batch, 9, 16});
      for (std::int64_t i = 0; i < out.size(); ++i) {
        const std::int64_t row = i / 16 % 9;
        out.set(i, row < 5 ? t.get((i / 144 * 5 + row) * 16 + i % 16) : nan);
      }
      return out;
    };
    longer.cos = stretch(exact.cos), longer.sin = stretch(exact.sin);
    for (bool backward : {false, true}) {
      Tensor x = floats({3, 2, 5, 32}, 192), y = rotate(exact, x, backward), z = rotate(longer, x, backward);
      CHECK(same_bits(y, z));
    }
  }
}

TEST_CASE("rope, every engine: positions 65536 and 131071 turn by the angles of a float64 computation") {
  const std::int64_t dim = 32, rows = 131072;
  Setting s = angles(Layout::thd, first_rows(rows), dim), by_start = s;
  s.positions = ints({65536, 131071, 0, 65535}, kInt64);
  Tensor x = floats({4, 2, dim}, 200), y = rotate(s, x);
  std::vector<double> want(std::size_t(x.size()));
  for (std::int64_t i = 0; i < x.size(); ++i) {
    const std::int64_t d = i % dim, pair = d % (dim / 2), mate = d < dim / 2 ? i + dim / 2 : i - dim / 2;
    const double angle = s.positions.get(i / (2 * dim)) * std::pow(500.0, -2.0 * double(pair) / double(dim));
    want[std::size_t(i)] =
        x.get(i) * std::cos(angle) + (d < dim / 2 ? -1 : 1) * x.get(mate) * std::sin(angle);
  }
  CHECK(outside(y, want, Float::f32, partner_of(dim, dim, 0, false)) == 0);
  by_start.cu_seqlens = ints({0, 1, 2, 4}), by_start.starts = ints({65536, 131071, 0});
  Tensor z = rotate(by_start, x);
  CHECK(differing(z, y, [](std::int64_t i) { return i; }) > 0);  // token 3 follows token 2
  for (std::int64_t i = 0; i < 3 * 2 * dim; ++i) CHECK(z.bits(i) == y.bits(i));

  Tensors t = s.tensors();
  Tensor far = ints({65536, 131072, 0, 0}, kInt64);
  t.x = x.dl(), t.positions = far.dl();
  CHECK(run_all(s.attributes, t, z) == "rope: token 1 of batch 0 is at position 131072, cos has 131072 rows");
}

TEST_CASE("rope, every engine: with [3,N] positions each pair follows its axis") {
  const std::int64_t tokens = 7, pairs = 12;
  Setting s = random_tables(Layout::thd, {30, pairs}, 210);
  Tensor at(kInt64, {3, tokens});
  for (std::int64_t i = 0; i < at.size(); ++i) at.set(i, double(i * i * 7 % 30));
  Tensor x = floats({tokens, 2, 2 * pairs}, 212, Float::bf16);
  Tensor by_axis[3];
  for (std::int64_t axis = 0; axis < 3; ++axis) {
    Setting one = s;
    one.positions = pick(at, {tokens}, [&](std::int64_t i) { return axis * tokens + i; });
    by_axis[axis] = rotate(one, x);
  }
  for (bool interleaved : {false, true}) {
    Setting three = s;
    three.positions = at;
    const std::int64_t section[3] = {interleaved ? 4 : 2, interleaved ? 4 : 5, interleaved ? 4 : 5};
    std::copy(section, section + 3, three.attributes.mrope);
    three.attributes.mrope_interleaved = interleaved;
    Tensor y = rotate(three, x);
    for (std::int64_t i = 0; i < y.size(); ++i) {
      const std::int64_t pair = i % pairs;
      const std::int64_t axis = interleaved ? pair % 3 : pair < 2 ? 0 : pair < 7 ? 1 : 2;
      CHECK(y.bits(i) == by_axis[axis].bits(i));
    }
    CHECK_FALSE(same_bits(y, by_axis[0]));
  }
}

TEST_CASE(
    "rope, every engine: strided and shifted x, g and results give the bits of contiguous ones, gaps "
    "untouched") {
  const Shape shape{2, 6, 3, 64};  // bshd, q inside rows of qkv: 9 heads of 64, and one more element a row
  const Shape strides{6 * 577, 577, 64, 1}, even{6 * 576, 576, 64, 1};
  Setting s = random_tables(Layout::bshd, {6, 32}, 220);
  for (Float type : {Float::f32, Float::bf16})
    for (bool backward : {false, true}) {
      Tensor x = floats(shape, 222, type), y = rotate(s, x, backward);
      const auto size = std::size_t(x.view.dtype.bits / 8);
      for (const Shape& in : {even, strides})
        for (std::size_t shift : {0, 1, 4, 8}) {
          Tensor far(x.view.dtype, shape, in, shift * size), out(x.view.dtype, shape, in, shift * size);
          far.fill(x.values());
          const auto before = far.memory;
          Setting t = s;
          t.attributes.backward = backward;
          Tensors with = t.tensors();
          with.x = far.dl();
          CHECK(run_all(t.attributes, with, out) == "");
          CHECK(same_bits(out, y));
          CHECK(far.memory == before);
          for (std::int64_t i = 0; i < out.size(); ++i) std::memset(out.at(i), 0xff, size);
          CHECK(std::count(out.memory.begin(), out.memory.end(), 0xff) == std::ptrdiff_t(out.memory.size()));
        }
    }
}

TEST_CASE("rope, every engine: offsets go beyond 2^31 elements") {
  const std::int64_t far = (std::int64_t{1} << 31) + 64;
  const auto bytes = std::size_t(2 * far);  // bf16; only the pages at both ends are ever touched
  void* memory[2];
  for (void*& p : memory) {
    p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
      MESSAGE("[skip] no 4 GiB of address space");
      return;
    }
  }
  Setting s = random_tables(Layout::bhsd, {1, 16}, 230);
  Tensor x = floats({2, 1, 1, 32}, 232, Float::bf16), y = rotate(s, x);
  for (int axis : {0, 1}) {  // far apart along the batch, and along the heads
    const std::int64_t shape[4] = {axis == 0 ? 2 : 1, axis == 1 ? 2 : 1, 1, 32};
    const std::int64_t strides[4] = {far - 32, far - 32, 32, 1};
    DLTensor in = *x.dl(), out = in;
    in.data = memory[0], out.data = memory[1];
    in.shape = out.shape = const_cast<std::int64_t*>(shape),
    in.strides = out.strides = const_cast<std::int64_t*>(strides);
    const auto end = [&](void* base, std::int64_t b) {
      return static_cast<std::uint8_t*>(base) + 2 * b * (far - 32);
    };
    for (std::int64_t b : {0, 1}) std::memcpy(end(memory[0], b), x.memory.data() + 64 * b, 64);
    Tensors t = s.tensors();
    t.x = &in, t.out = &out;
    Geometry g;
    REQUIRE(rlk::rotary::read(s.attributes, t, g) == "");
    for (const Engine& engine : engines()) {
      CAPTURE(engine.name);
      for (std::int64_t b : {0, 1}) std::memset(end(memory[1], b), 0xff, 64);
      engine.run(g);
      for (std::int64_t b : {0, 1}) CHECK(std::memcmp(end(memory[1], b), y.memory.data() + 64 * b, 64) == 0);
    }
  }
  for (void* p : memory) munmap(p, bytes);
}

TEST_CASE(
    "rope, every engine: y = rope(x) + w: the gradient of w is the incoming one, untouched by rope's "
    "backward") {
  Setting s = random_tables(Layout::bhsd, {4, 8}, 240);
  Tensor x = floats({2, 3, 4, 16}, 242), w = floats(x.shape, 243), g = floats(x.shape, 244);
  // L = <g, rope(x) + w>. An add hands its gradient on: d_w is g's own memory, and rope's backward reads it.
  Tensor& d_w = g;
  const auto before = g.memory;
  Tensor dx = rotate(s, g, true);
  CHECK(d_w.memory == before);
  // L is linear in x and w, so its gradients give all of it.
  Tensor y = rotate(s, x);
  const double loss = dot(g, y) + dot(g, w);
  CHECK(std::fabs(loss - dot(dx, x) - dot(d_w, w)) <= 1e-5 * (std::fabs(loss) + 10));

  // In place the transposed rotation would leave d_w rotated: that is refused while d_w is still to be read.
  rlk::RopeInPlace turn{.x = g.dl(), .cos = s.cos.dl(), .sin = s.sin.dl(), .transpose = true};
  {
    const rlk::Saved shared(d_w.dl(), "gradient of w");
    const rlk::Status refused = rlk::rope_(turn);
    CHECK(refused.code() == RLK_OVERLAP);
    CHECK(std::string(refused.message()).find("gradient of w") != std::string::npos);
    CHECK(d_w.memory == before);
    CHECK(rlk::rope_bwd({.d_out = g.dl(), .cos = s.cos.dl(), .sin = s.sin.dl(), .d_x = g.dl()}).code() ==
          RLK_OVERLAP);
    CHECK(d_w.memory == before);
  }
  REQUIRE(rlk::rope_(turn));  // nobody else holds it now: what the refusal prevented is that this differs
  CHECK(same_bits(g, dx));
  CHECK(std::fabs(loss - dot(dx, x) - dot(d_w, w)) > 1e-2 * (std::fabs(loss) + 10));
}

TEST_CASE("rope, every engine: in place gives the bits of out of place, and leaves the other dims alone") {
  for (Float type : {Float::f32, Float::bf16})
    for (Pairing pairing : {Pairing::half, Pairing::adjacent})
      for (std::int64_t rotary : {24, 128}) {
        Setting s = random_tables(Layout::bshd, {6, rotary / 2}, 245);
        s.attributes.pairing = pairing, s.attributes.rotary_dim = rotary;
        s.attributes.rotary_offset = rotary == 24 ? 4 : 0;
        Tensor x = floats({2, 6, 3, 128}, 247, type), y = rotate(s, x);
        s.attributes.in_place = true;
        for (const Engine& engine : engines()) {
          CAPTURE(engine.name);
          Tensor turned = x;
          Tensors t = s.tensors();
          t.x = t.out = turned.dl();
          Geometry g;
          REQUIRE(rlk::rotary::read(s.attributes, t, g) == "");
          engine.run(g);
          CHECK(same_bits(turned, y));
        }
      }
}

TEST_CASE("rope, every engine: a hundred launches give the same bits") {
  for (Float type : {Float::f32, Float::bf16})
    for (Pairing pairing : {Pairing::half, Pairing::adjacent, Pairing::adjacent_to_half}) {
      Setting s = random_tables(Layout::bhsd, {6, 32}, 250);
      s.attributes.pairing = pairing;
      Tensor q = floats({1, 5, 6, 64}, 252, type), k = floats({1, 1, 6, 64}, 253, type), yq = q, yk = k;
      Tensors t = s.tensors();
      t.x = q.dl(), t.k = k.dl(), t.out = yq.dl(), t.k_out = yk.dl();
      REQUIRE(run_all(s.attributes, t, yq, &yk) == "");
      const auto want_q = yq.memory, want_k = yk.memory;
      Geometry g;
      REQUIRE(rlk::rotary::read(s.attributes, t, g) == "");
      using namespace rlk::native::rope;
      const auto isa = rlk::native::widest(rlk_cpu_level());
      CHECK(plan(g, isa, Stores::streamed).stream);  // these engines do what their names say
      CHECK_FALSE(plan(g, isa, Stores::by_size).stream);
      for (const Engine& engine : engines()) {
        int differ = 0;
        for (int i = 0; i < 100; ++i) {
          std::fill(yq.memory.begin(), yq.memory.end(), std::uint8_t{0xff});
          std::fill(yk.memory.begin(), yk.memory.end(), std::uint8_t{0xff});
          engine.run(g);
          differ += yq.memory != want_q || yk.memory != want_k;
        }
        CAPTURE(engine.name);
        CHECK(differ == 0);
      }
    }
}
