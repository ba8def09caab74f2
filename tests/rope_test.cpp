// labels: conformance
// sources: rope_engines.cpp
// The rope family through the public face: names, calls in threads, what may alias what, and every refusal in
// words. What rotation itself promises is in rope_properties_test.cpp.
#include <type_traits>

#include "rlk/harness.hpp"
#include "rlk/rlk.hpp"
#include "rope_support.hpp"

using namespace ropetest;
using rlk::Status;

namespace {

constexpr Float kF32 = Float::f32;
Tensor floats(Shape shape, std::uint64_t seed, Float type = kF32, double low = -2, double high = 2) {
  return Tensor(type_of(type), std::move(shape)).random(seed, low, high);
}
Tensor empty_like(const Tensor& t) { return Tensor(t.view.dtype, t.shape); }
Tensor ints(std::vector<double> v, DLDataType type = kInt32) {
  return Tensor(type, {std::int64_t(v.size())}).fill(v);
}

std::string words(const Status& s) { return std::string(s.message()); }

// Tables of exact angles.
std::pair<Tensor, Tensor> tables(std::int64_t rows, std::int64_t dim) {
  Tensor cos(type_of(kF32), {rows, dim / 2}), sin(type_of(kF32), {rows, dim / 2});
  const Status s = rlk::rope_tables({.cos = cos.dl(), .sin = sin.dl(), .rotary_dim = dim, .rows = rows});
  REQUIRE(words(s) == "");
  return {cos, sin};
}

}  // namespace

static_assert(std::is_same_v<rlk::Rope::Layout, rlk::RopeMlaQ::Layout>);
static_assert(std::is_same_v<rlk::Rope::Layout, rlk::choice::Layout>);

TEST_CASE("rope: a member of a typed call lies in the slot that bears its name") {
  auto [cos, sin] = tables(8, 16);
  Tensor x = floats({2, 8, 8, 16}, 9), y = empty_like(x);
  const rlk::Rope a{
      .x = x.dl(), .cos = cos.dl(), .out = y.dl(), .pairing = rlk::Rope::Pairing::adjacent, .mrope_w = 7};
  const auto* slots = reinterpret_cast<const rlk_slot*>(&a);
  using Slot = rlk::Rope::Slot;
  CHECK(slots[Slot::x].tensor == x.dl());
  CHECK(slots[Slot::cos].tensor == cos.dl());
  CHECK(slots[Slot::sin].tensor == nullptr);
  CHECK(slots[Slot::out].tensor == y.dl());
  CHECK(slots[Slot::pairing].i == 1);
  CHECK(slots[Slot::mrope_w].i == 7);
}

TEST_CASE("rope: an alias means what its name means elsewhere") {
  auto [cos, sin] = tables(8, 16);
  Tensor x = floats({2, 8, 8, 16}, 9), y = empty_like(x), z = empty_like(x);
  rlk::Rope a{.x = x.dl(), .cos = cos.dl(), .sin = sin.dl(), .out = y.dl()};
  CHECK(words(rlk::rope_i(a)) == "");
  a.pairing = rlk::Rope::Pairing::adjacent, a.out = z.dl();
  CHECK(words(rlk::rope(a)) == "");
  CHECK(same_bits(y, z));
  CHECK(words(rlk::rope_thd({.x = x.dl(), .cos = cos.dl(), .sin = sin.dl(), .out = y.dl()})) == "");
  rlk::Rope b{
      .x = x.dl(), .cos = cos.dl(), .sin = sin.dl(), .out = z.dl(), .layout = rlk::Rope::Layout::bshd};
  CHECK(words(rlk::rope(b)) == "");
  CHECK(same_bits(y, z));

  // DeepSpeed's broadcasts: [S,1,1,R] against [S,B,H,D], and [1,S,1,R] against [B,S,H,D], by the same name.
  Tensor c1(type_of(kF32), {8, 1, 1, 16}), s1 = c1, c2(type_of(kF32), {1, 8, 1, 16}), s2 = c2;
  for (std::int64_t i = 0; i < 128; ++i) {
    const auto from = i / 16 * 8 + i % 8;
    c1.set(i, cos.get(from)), s1.set(i, sin.get(from)), c2.set(i, cos.get(from)), s2.set(i, sin.get(from));
  }
  CHECK(words(rlk::apply_rotary_pos_emb({.x = x.dl(), .cos = c2.dl(), .sin = s2.dl(), .out = y.dl()})) == "");
  CHECK(same_bits(y, z));
  Tensor t = floats({8, 2, 3, 16}, 10), u = empty_like(t), v = empty_like(t);
  CHECK(words(rlk::apply_rotary_pos_emb({.x = t.dl(), .cos = c1.dl(), .sin = s1.dl(), .out = u.dl()})) == "");
  rlk::Rope d{
      .x = t.dl(), .cos = cos.dl(), .sin = sin.dl(), .out = v.dl(), .layout = rlk::Rope::Layout::sbhd};
  CHECK(words(rlk::rope(d)) == "");
  CHECK(same_bits(u, v));
}

TEST_CASE("rope: a hundred calls give the same bits, and q and k in one call those of two") {
  auto [cos, sin] = tables(65, 64);
  Tensor q = floats({2, 24, 65, 64}, 11, Float::bf16), k = floats({2, 1, 65, 64}, 12, Float::bf16);
  Tensor yq = empty_like(q), yk = empty_like(k), first = yq, first_k = yk;
  rlk::Rope a{.x = q.dl(), .cos = cos.dl(), .sin = sin.dl(), .k = k.dl(), .out = yq.dl(), .k_out = yk.dl()};
  for (int i = 0; i < 100; ++i) {
    std::fill(yq.memory.begin(), yq.memory.end(), std::uint8_t{0xff});
    std::fill(yk.memory.begin(), yk.memory.end(), std::uint8_t{0xff});
    REQUIRE(rlk::rope(a, {.threads = 1 + i % 5}));
    if (i == 0) first = yq, first_k = yk;
    REQUIRE(yq.memory == first.memory);
    REQUIRE(yk.memory == first_k.memory);
  }
  CHECK(words(rlk::rope({.x = k.dl(), .cos = cos.dl(), .sin = sin.dl(), .out = yk.dl()})) == "");
  CHECK(yk.memory == first_k.memory);
}

TEST_CASE("rope: rotating in place what a backward will read fails loudly; out of place is right") {
  auto [cos, sin] = tables(4, 8);
  Tensor x = floats({1, 2, 4, 8}, 13), y = empty_like(x), g = floats(x.shape, 14);
  const auto before = x.memory;
  {
    const rlk::Saved saved(x.dl(), "attention's output");
    const Status s = rlk::rope_({.x = x.dl(), .cos = cos.dl(), .sin = sin.dl()});
    CHECK(s.code() == RLK_OVERLAP);
    CHECK(words(s).find("attention's output") != std::string::npos);
    CHECK(x.memory == before);
    CHECK(words(rlk::rope({.x = x.dl(), .cos = cos.dl(), .sin = sin.dl(), .out = y.dl()})) == "");
    CHECK(x.memory == before);
  }
  CHECK(words(rlk::rope_({.x = x.dl(), .cos = cos.dl(), .sin = sin.dl()})) == "");
  CHECK(same_bits(x, y));
  // The shared gradient buffer: backward may not write into what it reads.
  CHECK(rlk::rope_bwd({.d_out = g.dl(), .cos = cos.dl(), .sin = sin.dl(), .d_x = g.dl()}).code() ==
        RLK_OVERLAP);
  rlk::RopeInPlace moves{.x = x.dl(), .cos = cos.dl(), .sin = sin.dl()};
  moves.pairing = rlk::RopeInPlace::Pairing::adjacent_to_half;
  CHECK(words(rlk::rope_(moves)) ==
        "rope_: adjacent_to_half moves elements, so it cannot work in place; use rope");
}

TEST_CASE("rope: tables have no gradient, and asking for one is an error") {
  auto [cos, sin] = tables(4, 8);
  Tensor x = floats({1, 2, 4, 8}, 15), y = empty_like(x);
  const rlk::Rope a{.x = x.dl(), .cos = cos.dl(), .sin = sin.dl(), .out = y.dl()};
  CHECK(words(rlk::rope(a, {.needs_backward = true})) == "");
  CHECK_FALSE(rlk::rope(a, {.needs_backward = true, .gradients = "cos"}));
  CHECK_FALSE(rlk::rope_({.x = x.dl(), .cos = cos.dl(), .sin = sin.dl()}, {.needs_backward = true}));
}

TEST_CASE("rope: what does not fit is refused with both sides named") {
  Tensor x = floats({2, 3, 5, 128}, 16), y = empty_like(x), cos = floats({5, 32}, 17),
         sin = floats({5, 32}, 18);
  const auto say = [&](auto&& change) {
    rlk::Rope a{.x = x.dl(), .cos = cos.dl(), .sin = sin.dl(), .out = y.dl()};
    change(a);
    return words(rlk::rope(a));
  };
  CHECK(say([](auto& a) { a.rotary_dim = 128; }) ==
        "rope: cos has 32 columns, rotary_dim 128 needs 64 (or all of it, full width)");
  CHECK(say([](auto&) {}) ==
        "rope: cos has 32 columns, which is neither 128 (full width) nor half of it; set rotary_dim");
  CHECK(say([](auto& a) { a.rotary_dim = 63; }) == "rope: rotary_dim is 63, it must be even and positive");
  CHECK(say([](auto& a) { a.rotary_dim = 64, a.rotary_offset = 100; }) ==
        "rope: rotary_offset 100 + rotary_dim 64 exceeds the head dimension 128");
  Tensor few = floats({4, 32}, 19), few_sin = floats({4, 32}, 20), heads = floats({2, 3, 5, 32}, 21);
  CHECK(say([&](auto& a) { a.rotary_dim = 64, a.cos = few.dl(), a.sin = few_sin.dl(); }) ==
        "rope: cos has 4 rows, 5 tokens need 5");
  CHECK(say([&](auto& a) { a.rotary_dim = 64, a.cos = few.dl(); }) ==
        "rope: cos has shape [4,32], sin has shape [5,32]");
  CHECK(say([&](auto& a) {
          a.rotary_dim = 64, a.cos = heads.dl(), a.sin = heads.dl();
        }).find("which does not fit x of rank 4 in layout bhsd") != std::string::npos);
  Tensor positions = ints({0, 1, 2, 3, 5}), starts = ints({0, 1});
  CHECK(say([&](auto& a) { a.rotary_dim = 64, a.positions = positions.dl(); }) ==
        "rope: token 4 of batch 0 is at position 5, cos has 5 rows");
  Tensor padded = ints({-1, 0, 1, 2, 3}), none = floats({0, 32}, 22), none_sin = floats({0, 32}, 23);
  CHECK(say([&](auto& a) { a.rotary_dim = 64, a.positions = padded.dl(); }) ==
        "rope: token 0 of batch 0 is at position -1, cos has 5 rows; padding may stay as it is with "
        "negative=unrotated");
  CHECK(say([&](auto& a) {
          a.rotary_dim = 64, a.positions = padded.dl(), a.negative = rlk::Rope::Negative::unrotated;
        }) == "");
  CHECK(say([&](auto& a) {
          a.rotary_dim = 64, a.positions = padded.dl(), a.cos = none.dl(), a.sin = none_sin.dl();
        }) == "rope: cos has 0 rows, 5 tokens need one at least");
  Tensor half = floats({2, 3, 5, 128}, 24, Float::bf16), half_y = empty_like(half),
         other = floats({5, 64}, 25, Float::f16);
  CHECK(words(rlk::rope({.x = half.dl(), .cos = other.dl(), .sin = other.dl(), .out = half_y.dl()})) ==
        "rope: cos must be fp32 or have the dtype of x, which is bf16");
  CHECK(say([&](auto& a) { a.rotary_dim = 64, a.positions = positions.dl(), a.starts = starts.dl(); }) ==
        "rope: positions name every row already, starts cannot be given too");
  CHECK(say([&](auto& a) { a.rotary_dim = 64, a.cp_rank = 2, a.cp_size = 2; }) ==
        "rope: cp_rank 2 is outside cp_size 2");
  CHECK(say([&](auto& a) { a.rotary_dim = 64, a.cp_size = 2; }) ==
        "rope: cp_size 2 needs an even number of local tokens, x has 5");
  CHECK(say([&](auto& a) { a.rotary_dim = 64, a.mrope_t = 32; }) ==
        "rope: M-RoPE needs positions [3,T] or [3,B,T]");
  CHECK(say([&](auto& a) { a.rotary_dim = 64, a.k = x.dl(); }) == "rope: k is given, k_out is missing");
  CHECK(say([&](auto& a) { a.rotary_dim = 64, a.cu_seqlens = starts.dl(); }) ==
        "rope: cu_seqlens packs sequences into one batch, x has batch 2");
  CHECK(say([&](auto& a) { a.layout = rlk::Rope::Layout::thd; }).find("layout thd takes [T,H,D] or [T,D]") !=
        std::string::npos);
}

TEST_CASE("rope: an axis map says the same as sections") {
  Tensor x = floats({2, 6, 2, 24}, 22), y = empty_like(x), z = empty_like(x);
  Tensor cos = floats({30, 12}, 23), sin = floats({30, 12}, 24), at = Tensor(kInt64, {3, 2, 6});
  for (std::int64_t i = 0; i < at.size(); ++i) at.set(i, double(i * 7 % 30));
  Tensor map = ints({0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2});
  rlk::Rope a{.x = x.dl(), .cos = cos.dl(), .sin = sin.dl(), .positions = at.dl(), .out = y.dl()};
  a.layout = rlk::Rope::Layout::bshd, a.mrope_t = 2, a.mrope_h = 5, a.mrope_w = 5;
  CHECK(words(rlk::rope(a)) == "");
  a.mrope_t = a.mrope_h = a.mrope_w = 0, a.axis_map = map.dl(), a.out = z.dl();
  CHECK(words(rlk::rope(a)) == "");
  CHECK(same_bits(y, z));
}

TEST_CASE("golden: Megatron-LM's MLA key and value, forward and backward, on every engine") {
  const auto cases = golden::read(std::string(RLK_TEST_DATA) + "/rope/rope_megatron.safetensors");
  const auto& c = cases.at("mla_kv_split_sbhd");
  const auto make = [&](const char* name, Float type) {
    return Tensor(type_of(type), c.at(name).shape).fill(c.at(name).values);
  };
  for (Float type : {Float::f32, Float::bf16}) {
    Tensor kv = make("kv", type), emb = make("k_pos_emb", type), cos = make("cos", kF32),
           sin = make("sin", kF32);
    Tensor key(kv.view.dtype, c.at("key").shape), value(kv.view.dtype, c.at("value").shape);
    rlk::RopeMlaKv a{.kv = kv.dl(),
                     .k_pos_emb = emb.dl(),
                     .cos = cos.dl(),
                     .sin = sin.dl(),
                     .key = key.dl(),
                     .value = value.dl()};
    a.k_dim = 4;
    CHECK(words(rlk::rope_mla_kv(a)) == "");
    CHECK(outside(key, c.at("key").values, type, partner_of(12, 8, 4, false)) == 0);
    CHECK(outside(value, c.at("value").values, type, [](std::int64_t i) { return i; }) == 0);
    check_kv(reinterpret_cast<const rlk_slot*>(&a), false, key, value);

    Tensor gk = make("g_key", type), gv = make("g_value", type);
    Tensor dkv(kv.view.dtype, kv.shape), demb(kv.view.dtype, emb.shape);
    rlk::RopeMlaKvBwd b{.d_key = gk.dl(),
                        .d_value = gv.dl(),
                        .cos = cos.dl(),
                        .sin = sin.dl(),
                        .d_kv = dkv.dl(),
                        .d_k_pos_emb = demb.dl()};
    b.k_dim = 4;
    CHECK(words(rlk::rope_mla_kv_bwd(b)) == "");
    CHECK(outside(dkv, c.at("d_kv").values, type, [](std::int64_t i) { return i; }) == 0);
    CHECK(outside(demb, c.at("d_emb").values, type, partner_of(8, 8, 0, true)) == 0);
    check_kv(reinterpret_cast<const rlk_slot*>(&b), true, dkv, demb);
  }
}

TEST_CASE("golden: every frequency scaling, from position 0 to 131071") {
  using S = rlk::RopeTables::Scaling;
  int seen = 0;
  for (const auto& [name, c] : golden::read(std::string(RLK_TEST_DATA) + "/rope/rope_scaling.safetensors")) {
    CAPTURE(name);
    ++seen;
    const auto number = [&, &c = c](const char* key, double otherwise) {
      return c.parameters.contains(key) ? c.parameters[key].get<double>() : otherwise;
    };
    const auto has = [&, &name = name](const char* word) { return name.find(word) != std::string::npos; };
    Tensor positions = Tensor(kInt64, c.at("positions").shape).fill(c.at("positions").values);
    Tensor cos(type_of(kF32), c.at("cos").shape), sin(type_of(kF32), c.at("sin").shape), factors;
    rlk::RopeTables a{.cos = cos.dl(), .sin = sin.dl(), .positions = positions.dl()};
    a.rotary_dim = 2 * cos.shape[1];
    a.base = 1 / c.at("inv_freq").values[1];
    a.base = std::pow(a.base, double(a.rotary_dim) / 2);  // where the second frequency is not stretched
    a.base = std::fabs(a.base / 10000 - 1) < 1e-6    ? 10000
             : std::fabs(a.base / 500000 - 1) < 1e-6 ? 500000
                                                     : a.base;
    a.factor = number("factor", 1);
    a.original_max = std::int64_t(number("original", number("max_position_embeddings", 0)));
    if (has("linear")) a.scaling = S::linear, a.base = 10000;
    if (has("ntk_static")) a.scaling = S::ntk, a.base = 10000;
    if (has("dynamic"))
      a.scaling = S::dynamic, a.base = 10000, a.seq_len = std::int64_t(number("seq_len", 0));
    if (has("llama3")) a.scaling = S::llama3;
    if (has("yarn")) {
      a.scaling = S::yarn, a.mscale = number("mscale", 0), a.mscale_all_dim = number("mscale_all_dim", 0);
      a.truncate = !(c.parameters.contains("truncate") && !c.parameters["truncate"].get<bool>());
    }
    if (has("longrope")) {
      a.scaling = S::longrope, a.base = 10000;
      const auto list = c.parameters["ext_factors"].get<std::vector<double>>();
      factors = Tensor({kDLFloat, 64, 1}, {std::int64_t(list.size())}).fill(list);
      a.factors = factors.dl();
    }
    CHECK(words(rlk::rope_tables(a)) == "");
    CHECK(outside(cos, c.at("cos").values, kF32, [](std::int64_t i) { return i ^ 1; }) == 0);
    CHECK(outside(sin, c.at("sin").values, kF32, [](std::int64_t i) { return i ^ 1; }) == 0);
  }
  CHECK(seen == 13);
}

TEST_CASE("rope: the harness finds nothing on any op of the family") {
  const auto r = rlk::harness::verify({.op = "rope*", .implementation = "native", .passes = 1});
  for (std::size_t i = 0; i < r.failures.size() && i < 10; ++i) MESSAGE(r.failures[i].line());
  CHECK(r.failures.empty());
  CHECK(r.entries.size() >= 8);
}
