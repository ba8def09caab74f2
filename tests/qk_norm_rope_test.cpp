// labels: conformance
// qk_norm_rope is rms_norm of every head, then rope, then a copy, bit for bit.
#include <doctest/doctest.h>

#include <string>

#include "qk_norm_rope_case.hpp"

namespace {

using namespace qknr;

const rlk::Options kNative{.backend = "native.rows"};

// What a cache holds of n elements of the data's dtype: themselves, or RN(x RN(1 / factor)) as fp8.
void keep(const Case& c, const char* from, std::int64_t n, float factor, void* to) {
  if (c.cache == c.type) {
    std::memcpy(to, from, static_cast<std::size_t>(n * rlk::size_of(c.type)));
    return;
  }
  for (std::int64_t i = 0; i < n; ++i) {
    float x = 0;
    std::uint16_t half = 0;
    if (c.type == DType::f32)
      std::memcpy(&x, from + i * 4, 4);
    else
      std::memcpy(&half, from + i * 2, 2),
          x = c.type == DType::bf16 ? rlk::bf16_to_float(half) : rlk::f16_to_float(half);
    const float reciprocal = 1 / factor, product = x * reciprocal;
    static_cast<std::uint8_t*>(to)[i] = rlk::double_to_f8_e4m3(product);
  }
}

// What rms_norm, rope and a copy leave where the call leaves its results.
void composed(Case& c) {
  const Form& f = c.form;
  Tensors t(c);
  Memory qn(c.tokens * c.q_heads * c.size.dims, c.type), kn(c.tokens * c.k_heads * c.size.dims, c.type),
      turned(c.tokens * c.k_heads * c.size.dims, c.type);
  Tensor q = t.q, k = t.k;
  if (f.norm) {
    q = qn.view({c.tokens, c.q_heads, c.size.dims}), k = kn.view({c.tokens, c.k_heads, c.size.dims});
    const auto cast = f.early ? rlk::RmsNorm::Cast::early : rlk::RmsNorm::Cast::end;
    REQUIRE(rlk::rms_norm(
        {.x = t.q, .weight = t.q_weight, .y = q, .eps = 1e-5, .weight_offset = f.offset, .cast = cast},
        kNative));
    REQUIRE(rlk::rms_norm(
        {.x = t.k, .weight = t.k_weight, .y = k, .eps = 1e-5, .weight_offset = f.offset, .cast = cast},
        kNative));
  }
  const Tensor out = turned.view({c.tokens, c.k_heads, c.size.dims});
  const rlk::Status status =
      rlk::rope({.x = q,
                 .cos = t.cos,
                 .sin = t.sin,
                 .k = k,
                 .positions = t.positions,
                 .out = t.q_out,
                 .k_out = out,
                 .layout = rlk::Rope::Layout::thd,
                 .pairing = f.adjacent ? rlk::Rope::Pairing::adjacent : rlk::Rope::Pairing::half,
                 .rotary_dim = c.size.turned});
  REQUIRE_MESSAGE(status, status.message());
  const auto row_of = [](const Tensor& x, std::int64_t row, std::int64_t head) {
    const rlk::In view(x);
    return const_cast<char*>(view.data<char>()) +
           (row * view.stride(0) + head * view.stride(1)) * rlk::size_of(view.dtype());
  };
  const auto factor_of = [&](const Memory& factors, std::int64_t head) {
    float factor = 1;
    if (f.f8 > Fp8::plain) std::memcpy(&factor, factors.bytes.data() + (f.f8 == Fp8::each ? head * 4 : 0), 4);
    return factor;
  };
  for (std::int64_t token = 0; token < c.tokens; ++token)
    for (std::int64_t h = 0; h < c.k_heads; ++h) {
      const std::int64_t slot = c.slot[static_cast<std::size_t>(token)];
      const char* key = row_of(out, token, h);
      if (f.keys)
        std::memcpy(row_of(t.k_out, token, h), key,
                    static_cast<std::size_t>(c.size.dims * rlk::size_of(c.type)));
      if (!f.cached || slot < 0 || slot >= kPlaces) continue;
      keep(c, key, c.size.dims, factor_of(c.k_factors, h), row_of(t.keys, slot, h));
      if (f.values)
        keep(c, row_of(t.v, token, h), c.size.v_dims, factor_of(c.v_factors, h), row_of(t.values, slot, h));
    }
}

// All that a call may write.
std::vector<Bytes> written(const Case& c) {
  return {c.q_out.bytes, c.k_out.bytes, c.k_cache.bytes, c.v_cache.bytes};
}

}  // namespace

TEST_CASE("qk_norm_rope has the bits of rms_norm, rope and a copy") {
  std::mt19937 random(5);
  for (DType type : kTypes)
    for (const Heads& size : kHeads)
      for (const Form& form : kForms)
        for (std::int64_t tokens : {1, 6, 35}) {
          CAPTURE(rlk::name_of(type));
          CAPTURE(size.dims);
          CAPTURE(form.name);
          CAPTURE(tokens);
          Case c(form, size, type, tokens, random);
          composed(c);
          const auto expected = written(c);
          const auto product = c.product.bytes;
          for (const char* backend : {"native.rows", "native.rows.scalar"}) {
            c.forget();
            Tensors t(c);
            const rlk::Status status = rlk::qk_norm_rope(t.call(form), {.backend = backend});
            REQUIRE_MESSAGE(status, status.message());
            CHECK(written(c) == expected);
            CHECK(c.product.bytes == product);
          }
        }
}

TEST_CASE("qk_norm_rope has the bits of one token in any company, and at any number of threads") {
  std::mt19937 random(6);
  for (DType type : kTypes) {
    Case c(kForms[0], kHeads[0], type, 31, random);
    Tensors t(c);
    REQUIRE(rlk::qk_norm_rope(t.call(c.form), kNative));
    const auto expected = written(c);
    for (std::int32_t threads : {1, 3}) {
      c.forget();
      REQUIRE(rlk::qk_norm_rope(t.call(c.form), {.backend = "native.rows", .threads = threads}));
      CHECK(written(c) == expected);
    }
    c.forget();
    for (std::int64_t token = 0; token < c.tokens; ++token) {
      const auto one = [&](const Tensor& x) {
        const rlk::In view(x);
        std::vector<std::int64_t> shape, strides;
        for (int i = 0; i < view.rank(); ++i)
          shape.push_back(i == 0 ? 1 : view.dim(i)), strides.push_back(view.stride(i));
        return Tensor(
            const_cast<char*>(view.data<char>()) + token * view.stride(0) * rlk::size_of(view.dtype()),
            std::span(shape), view.dtype(), {kDLCPU, 0}, std::span(strides));
      };
      const Tensor q = one(t.q), k = one(t.k), v = one(t.v), positions = one(t.positions),
                   slots = one(t.slots), q_out = one(t.q_out), k_out = one(t.k_out);
      rlk::QkNormRope a = t.call(c.form);
      a.q = q, a.k = k, a.v = v, a.positions = positions, a.slots = slots, a.q_out = q_out, a.k_out = k_out;
      REQUIRE(rlk::qk_norm_rope(a, kNative));
    }
    CHECK(written(c) == expected);
  }
}

TEST_CASE("qk_norm_rope copies what neither turns nor is normalised bit for bit, NaNs too") {
  std::mt19937 random(7);
  for (DType type : kTypes) {
    Case c({.name = "no norm", .norm = false}, {16, 8, 16}, type, 2, random);
    const auto size = static_cast<std::size_t>(rlk::size_of(type));
    std::byte* nan = c.product.bytes.data() + 9 * size;
    std::fill_n(nan, size, std::byte{0xff});  // a NaN that is not the canonical one
    Tensors t(c);
    REQUIRE(rlk::qk_norm_rope(t.call(c.form), kNative));
    CHECK(std::memcmp(c.q_out.bytes.data() + 9 * size, nan, size) == 0);
  }
}

// Values of every sign, exponent and high fraction, beside and at the middle of two fp8 numbers, NaNs of every kind among them.
TEST_CASE("qk_norm_rope rounds values and plain keys to fp8 as host code does, at every level") {
  constexpr std::int64_t kTokens = kPlaces, kWidth = 256;
  std::mt19937 random(9);
  for (DType type : kTypes) {
    Case c({.name = "fp8", .norm = false, .f8 = Fp8::each}, {256, 2, kWidth}, type, kTokens, random, 1, 3);
    for (std::uint32_t first = 0; first < 0x10000; first += kTokens * 3 * kWidth) {
      auto at = first;
      for (std::int64_t token = 0; token < kTokens; ++token)
        for (std::int64_t i = 0; i < 3 * (256 + kWidth); ++i, ++at) {
          constexpr std::uint32_t kLow[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
          const std::uint32_t bits = type == DType::f32 ? at << 16 | kLow[random() % 6] : at;
          std::memcpy(c.product.bytes.data() + (token * c.row + 256 + i) * rlk::size_of(type), &bits,
                      static_cast<std::size_t>(rlk::size_of(type)));
        }
      c.forget();
      composed(c);
      const auto expected = written(c);
      for (const char* backend : {"native.rows", "native.rows.scalar", "native.golden"}) {
        CAPTURE(backend);
        c.forget();
        Tensors t(c);
        REQUIRE(rlk::qk_norm_rope(t.call(c.form), {.backend = backend}));
        CHECK(written(c)[3] == expected[3]);
        if (std::string(backend) != "native.golden") CHECK(written(c) == expected);
      }
    }
  }
}

TEST_CASE(
    "qk_norm_rope's fp8 caches hold 448 of what is beyond, one NaN, and what factors of any value make") {
  constexpr float kInf = INFINITY;
  struct Kept {
    float factor, x;
    int bits;
  };
  // Ties: 17/16 goes to 1, 19/16 to 5/4; 2^-10 to 0, 3 2^-10 to 2^-8; 464 is the one beyond the last. 10.9375 / 7 is one, too,
  // but 10.9375 RN(1 / 7) is above it.
  constexpr Kept kKept[] = {
      {1, 448, 0x7e},      {1, 464, 0x7e},       {1, 465, 0x7e},         {1, -kInf, 0xfe},
      {1, NAN, 0x7f},      {1, -NAN, 0x7f},      {1, -0.0f, 0x80},       {1, 0x11p-4f, 0x38},
      {1, 0x13p-4f, 0x3a}, {1, 0x1p-9f, 0x01},   {1, 0x1p-10f, 0x00},    {1, -0x3p-10f, 0x82},
      {1, 0x1p-6f, 0x08},  {1, 0x7.8p-9f, 0x08}, {0.5f, 0x1p-10f, 0x01}, {0x1p-100f, 0x1p-99f, 0x40},
      {7, 10.9375f, 0x3d}, {0, 1, 0x7e},         {0, 0, 0x7f},           {-2, 1, 0xb0},
      {kInf, 1, 0x00},     {NAN, 1, 0x7f},       {kInf, kInf, 0x7f},     {0x1p-149f, -1e-9f, 0xfe}};
  std::mt19937 random(10);
  for (const char* backend : {"native.rows", "native.rows.scalar", "native.golden"})
    for (const Kept& kept : kKept) {
      CAPTURE(kept.factor);
      CAPTURE(kept.x);
      Case c({.name = "fp8", .norm = false, .f8 = Fp8::one}, {4, 2, 16}, DType::f32, 1, random, 1, 1);
      c.k_factors.set(0, kept.factor), c.v_factors.set(0, kept.factor);
      for (std::int64_t i = 4; i < c.row; ++i) c.product.set(i, kept.x);
      Tensors t(c);
      REQUIRE(rlk::qk_norm_rope(t.call(c.form), {.backend = backend}));
      const auto first = static_cast<std::size_t>(c.slot[0]);
      CHECK(static_cast<int>(c.k_cache.bytes[first * 4 + 3]) == kept.bits);
      for (std::size_t i = 0; i < 16; ++i)
        CHECK(static_cast<int>(c.v_cache.bytes[first * 16 + i]) == kept.bits);
    }
}

TEST_CASE("qk_norm_rope says what is wrong with a call, and has written nothing") {
  std::mt19937 random(8);
  const Form form = kForms[0];
  Case c(form, {16, 8, 16}, DType::f32, 3, random);
  Tensors t(c);
  const auto before = written(c);
  Memory more(4096, DType::f32), halves(4096, DType::bf16), whole(64, DType::i64);
  for (std::int64_t i = 0; i < 64; ++i) whole.set(i, i == 1 ? kRows : 0);
  const auto refused = [&](auto change, const char* words) {
    rlk::QkNormRope a = t.call(form);
    change(a);
    const rlk::Status status = rlk::qk_norm_rope(a, kNative);
    CAPTURE(words);
    CHECK(status.code() == RLK_INVALID_ARGUMENT);
    CHECK_MESSAGE(std::string(status.message()).find(words) != std::string::npos, status.message());
    CHECK(written(c) == before);
  };
  const Tensor wide = more.view({c.tokens, c.q_heads, 258}), odd = more.view({kRows, 5}),
               narrow = more.view({15}), bf16 = halves.view({c.tokens, c.k_heads, 16}),
               far = whole.view({c.tokens}), long_ = whole.view({c.tokens + 1}), half = halves.view({16}),
               other = halves.view({kRows, 4});
  refused([&](auto& a) { a.q = wide; }, "q has D=258, it must be from 2 to 256");
  refused([&](auto& a) { a.k = bf16; }, "k is bf16, q is fp32");
  refused([&](auto& a) { a.k_weight = rlk::In(); }, "q_weight is given, k_weight is absent");
  refused([&](auto& a) { a.q_weight = a.k_weight = rlk::In(), a.weight_offset = true; },
          "weight_offset is 1");
  refused([&](auto& a) { a.q_weight = narrow; }, "q_weight has size 15 in dimension 0, expected 16");
  refused([&](auto& a) { a.q_weight = half; }, "q_weight is bf16, q is fp32");
  refused([&](auto& a) { a.cos = odd; }, "sin has size 4 in dimension 1, expected 5");
  refused([&](auto& a) { a.cos = other; }, "sin is fp32, cos is bf16");
  refused([&](auto& a) { a.cos = a.sin = other; }, "cos is bf16, q is fp32");
  refused([&](auto& a) { a.rotary_dim = 16; }, "cos has 4 columns, rotary_dim 16 needs 8");
  refused([&](auto& a) { a.rotary_dim = 7; }, "7 dims turn");
  refused([&](auto& a) { a.pairing = rlk::QkNormRope::Pairing::adjacent_to_half; },
          "it must be half or adjacent");
  refused([&](auto& a) { a.positions = long_; }, "positions has size 4 in dimension 0, expected 3");
  refused([&](auto& a) { a.positions = far; }, "token 1 is at position 50, cos has 50 rows");
  refused([&](auto& a) { a.slots = rlk::In(); }, "slots say where the caches are written");
  refused([&](auto& a) { a.v = rlk::In(); }, "v_cache is given, v is absent");
  refused([&](auto& a) { a.v_cache = rlk::InOut(); }, "v is given, v_cache is absent");
  refused([&](auto& a) { a.slots = long_; }, "slots has size 4 in dimension 0, expected 3");
  refused([&](auto& a) { a.eps = -1; }, "eps is -1");
  Memory bytes(4096, DType::f8_e4m3), factors(8, DType::f32);
  const Tensor keys = bytes.view({kPlaces, c.k_heads, 16}), half_keys = halves.view({kPlaces, c.k_heads, 16}),
               one = factors.view({1}), many = factors.view({c.k_heads + 1});
  refused([&](auto& a) { a.k_cache = half_keys; },
          "k_cache is bf16, q is fp32: it takes q's dtype or fp8_e4m3");
  refused([&](auto& a) { a.v = a.slots = rlk::In(), a.v_cache = a.k_cache = rlk::InOut(), a.k_scale = one; },
          "k_scale is given, k_cache is absent");
  refused([&](auto& a) { a.k_cache = keys; }, "v_cache is fp32, k_cache is fp8_e4m3: both have one dtype");
  refused([&](auto& a) { a.v_scale = one; }, "v_scale is given, v_cache is fp32, not fp8_e4m3");
  refused([&](auto& a) { a.k_cache = a.v_cache = keys, a.v_scale = many; }, "v_scale has size");
  rlk::QkNormRope overlapping = t.call(form);
  overlapping.q_out = rlk::Out(t.q);
  CHECK(rlk::qk_norm_rope(overlapping, kNative).code() == RLK_OVERLAP);
  CHECK(rlk::qk_norm_rope(t.call(form), {.needs_backward = true}).code() == RLK_UNSUPPORTED);
}
