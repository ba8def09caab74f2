// labels: conformance
// Sizes, offsets and counts at the end of 64 bits, and calls without a single element: refused with the
// argument and both values, asked about as when run, or done at once; never a byte outside a tensor.
#include <doctest/doctest.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "rlk/introspect.h"
#include "rlk/rlk.hpp"

namespace {

using rlk::DType;
using rlk::Tensor;
using Shape = std::vector<int64_t>;
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

// A tensor that can only be asked about.
Tensor imagined(Shape shape, DType type = DType::f32) {
  return Tensor(reinterpret_cast<void*>(uintptr_t{1} << 40), shape, type);
}
// A tensor without elements may have an address that nobody may read.
Tensor empty(Shape shape, DType type = DType::f32) { return imagined(std::move(shape), type); }

template <class Args>
std::string explained(const Args& args) {
  return std::string(rlk::resolve(args).status().message());
}
template <class Args>
std::string ran(const Args& args) {
  return std::string(rlk::run_slots(Args::kName, reinterpret_cast<const rlk_slot*>(&args), {}).message());
}

struct Floats {
  std::vector<float> data;
  Tensor view;
  explicit Floats(Shape shape, float value = 1) {
    int64_t n = 1;
    for (const int64_t s : shape) n *= s;
    data.assign(static_cast<std::size_t>(n), value);
    view = Tensor(data.data(), shape, DType::f32);
  }
};

}  // namespace

TEST_CASE("rope: an offset and a width whose sum overflows are refused, and nothing is written") {
  std::vector<float> memory(3 * 64 * 2, 1);
  Tensor x(memory.data() + 128, {1, 1, 2, 64}, DType::f32);
  Floats out({1, 1, 2, 64}), cos({4, 32}), sin({4, 32});
  for (const int64_t offset :
       {kMost - 63, kMost, std::numeric_limits<int64_t>::min(), int64_t{-1}, int64_t{65}}) {
    CAPTURE(offset);
    rlk::Rope a{
        .x = x, .cos = cos.view, .sin = sin.view, .out = out.view, .rotary_dim = 64, .rotary_offset = offset};
    const std::string want =
        "rope: rotary_offset is " + std::to_string(offset) + ", the head dimension is 64";
    CHECK(ran(a) == want);
    CHECK(explained(a) == want);
    rlk::RopeInPlace b{.x = x, .cos = cos.view, .sin = sin.view, .rotary_dim = 64, .rotary_offset = offset};
    CHECK(ran(b) == "rope_: rotary_offset is " + std::to_string(offset) + ", the head dimension is 64");
  }
  rlk::Rope wide{.x = x, .cos = cos.view, .sin = sin.view, .out = out.view, .rotary_dim = kMost - 1};
  CHECK(ran(wide) == "rope: rotary_offset 0 + rotary_dim 9223372036854775806 exceeds the head dimension 64");
  CHECK(memory == std::vector<float>(memory.size(), 1));
  CHECK(out.data == std::vector<float>(128, 1));
}

TEST_CASE("rope: a context-parallel group whose rows overflow is refused") {
  Floats x({1, 1, 2, 64}), out({1, 1, 2, 64}), cos({4, 32}), sin({4, 32});
  for (const int64_t rank : {int64_t{0}, int64_t{40}, int64_t{1} << 30}) {
    rlk::Rope a{.x = x.view,
                .cos = cos.view,
                .sin = sin.view,
                .out = out.view,
                .cp_rank = rank,
                .cp_size = int64_t{1} << 62};
    const char* want = "rope: cp_size is 4611686018427387904, at most 268435456 ranks are served";
    CHECK(ran(a) == want);
    CHECK(explained(a) == want);
  }
  rlk::Rope many{
      .x = x.view, .cos = cos.view, .sin = sin.view, .out = out.view, .cp_rank = 3, .cp_size = 1000};
  CHECK(ran(many) == "rope: cos has 4 rows, 2 tokens need 2000");
}

TEST_CASE("rope: sections of pairs whose sum overflows are refused") {
  Floats x({1, 1, 2, 64}), out({1, 1, 2, 64}), cos({4, 32}), sin({4, 32});
  std::vector<int64_t> places(6, 0);
  const Tensor positions(places.data(), {3, 2}, DType::i64);
  rlk::Rope a{.x = x.view, .cos = cos.view, .sin = sin.view, .positions = positions, .out = out.view};
  a.mrope_t = kMost, a.mrope_h = kMost, a.mrope_w = 34;
  const char* want =
      "rope: mrope_t, mrope_h, mrope_w are 9223372036854775807, 9223372036854775807, 34, their sum must be "
      "the 32 "
      "pairs of rotary_dim 64";
  CHECK(ran(a) == want);
  CHECK(explained(a) == want);
}

TEST_CASE("rope_mla_kv: a key width that overflows is refused") {
  Floats kv({2, 1, 1, 8}), emb({2, 1, 1, 4}), cos({4, 4}), sin({4, 4}), key({2, 1, 1, 8}),
      value({2, 1, 1, 4});
  rlk::RopeMlaKv a{.kv = kv.view,
                   .k_pos_emb = emb.view,
                   .cos = cos.view,
                   .sin = sin.view,
                   .key = key.view,
                   .value = value.view};
  a.k_dim = kMost;
  CHECK(ran(a) == "rope_mla_kv: kv has 8 columns, k_dim is 9223372036854775807");
  CHECK(explained(a) == ran(a));
  rlk::RopeMlaKvBwd b{.d_key = key.view,
                      .d_value = value.view,
                      .cos = cos.view,
                      .sin = sin.view,
                      .d_kv = kv.view,
                      .d_k_pos_emb = emb.view};
  b.k_dim = kMost - 1;
  CHECK(ran(b) == "rope_mla_kv_bwd: d_key has 8 columns, k_dim is 9223372036854775806");
  b.k_dim = -7;
  CHECK(ran(b) == "rope_mla_kv_bwd: k_dim is -7, it says how many columns of kv belong to the key");
}

TEST_CASE("dimensions beyond the 32 bits that kernels count in are refused, not cut") {
  const int64_t wide = (int64_t{1} << 32) + 64;
  const Tensor x = imagined({1, 1, 1, wide}, DType::bf16), y = imagined({1, 1, 1, wide}, DType::bf16);
  const Tensor table = imagined({1, 32});
  CHECK(explained(rlk::Rope{.x = x, .cos = table, .sin = table, .out = y, .rotary_dim = 64}) ==
        "rope: x has 4294967360 columns, at most 268435456 are served");
  const Tensor kv = imagined({1, 1, 1, wide}), emb = imagined({1, 1, 1, 64});
  CHECK(explained(rlk::RopeMlaKv{.kv = kv, .k_pos_emb = emb, .cos = table, .sin = table, .k_dim = 64}) ==
        "rope_mla_kv: kv has 4294967360 columns, at most 268435456 are served");

  const Tensor g = imagined({1, 1, int64_t{1} << 31}), gate = imagined({1, 1, int64_t{1} << 31});
  const Tensor a_log = imagined({1});
  CHECK(explained(rlk::KdaGate{.g = g, .a_log = a_log, .out = gate}) ==
        "kda_gate: g has HV=1, K=2147483648, at most 268435456 of each are served");
  const Tensor d_g = imagined({1, 1, int64_t{1} << 31});
  CHECK(explained(rlk::KdaGateBwd{.g = g, .a_log = a_log, .d_out = gate, .d_g = d_g}) ==
        "kda_gate_bwd: g has HV=1, K=2147483648, at most 268435456 of each are served");

  const int64_t heads = int64_t{1} << 32;
  const Tensor q = empty({0, 0, heads, 16}), beta = empty({0, 0, heads});
  CHECK(ran(rlk::KdaFwd{.q = q, .k = q, .v = q, .g = q, .beta = beta, .out = empty({0, 0, heads, 16})}) ==
        "kda_fwd: v has HV=4294967296 heads, q has H=4294967296, at most 268435456 are served");
}

TEST_CASE("calls without elements are done at once, however large the other sizes are") {
  const auto start = std::chrono::steady_clock::now();
  const int64_t large = int64_t{1} << 40, larger = int64_t{1} << 62;
  std::vector<int64_t> places(16, 0);
  const Tensor positions(places.data(), {16}, DType::i64), starts(places.data(), {0}, DType::i64);
  Floats cos({16, 32}), sin({16, 32});
  const auto rope = [&](Shape shape, rlk::In at = {}) {
    const Tensor x = empty(shape), y = empty(shape);
    const rlk::Rope a{.x = x, .cos = cos.view, .sin = sin.view, .positions = at, .out = y};
    CHECK(explained(a) == "");
    return ran(a);
  };
  CHECK(rope({large, 0, 16, 64}, positions) == "");
  CHECK(rope({large, 0, 16, 64}) == "");
  CHECK(rope({0, larger, 16, 64}) == "");
  CHECK(rope({0, 4, larger, 64}) == "");
  CHECK(rope({larger, larger, 0, 64}) == "");

  const Tensor kv = empty({0, larger, 1, 40}), emb = empty({0, larger, 1, 32}),
               key = empty({0, larger, 1, 40}), value = empty({0, larger, 1, 32});
  CHECK(ran(rlk::RopeMlaKv{.kv = kv,
                           .k_pos_emb = emb,
                           .cos = cos.view,
                           .sin = sin.view,
                           .key = key,
                           .value = value,
                           .k_dim = 8}) == "");

  const auto lm_head = [&](Shape hidden, Shape out, int64_t v, int64_t k) {
    return ran(rlk::LmHead{.hidden = empty(hidden), .weight = empty({v, k}), .out = empty(out)});
  };
  CHECK(lm_head({large, larger, 0}, {large, larger, 0}, 0, 0) == "");
  CHECK(lm_head({0, larger, 8}, {0, larger, 0}, 0, 8) == "");
  CHECK(lm_head({large, larger, 0, 8}, {large, larger, 0, 0}, 0, 8) == "");

  const auto kda = [&](int64_t b, int64_t t) {
    const Tensor q = empty({b, t, 1, 16}), beta = empty({b, t, 1}), out = empty({b, t, 1, 16});
    const rlk::KdaFwd forward{.q = q, .k = q, .v = q, .g = q, .beta = beta, .out = out};
    CHECK(explained(forward) == "");
    CHECK(ran(forward) == "");
    Floats d_a_log({1}, 7), a_log({1});
    const Tensor dq = empty({b, t, 1, 16});
    rlk::KdaBwd backward{
        .q = q, .k = q, .v = q, .g = q, .beta = beta, .a_log = a_log.view, .d_out = out, .d_q = dq};
    backward.d_a_log = d_a_log.view;
    backward.gate = rlk::KdaBwd::Gate::softplus;
    CHECK(ran(backward) == "");
    CHECK(d_a_log.data[0] == 0);  // a sum over no token
  };
  kda(large, 0);
  kda(0, larger);
  // Rows without columns, of ops whose kernels count rows.
  for (const int64_t rows : {large, larger}) {
    const Tensor x = empty({rows, 0}), stack = empty({2, rows, 0}), none = empty({0}),
                 nothing = empty({0, 0});
    const Tensor ids = empty({0}, DType::i32);
    CHECK(ran(rlk::Swiglu{.gate = x, .up = x, .out = x}) == "");
    CHECK(ran(rlk::SwigluBwd{.d_out = x, .gate = x, .up = x, .d_gate = x, .d_up = x}) == "");
    CHECK(ran(rlk::TpSum{.partials = stack, .y = x}) == "");
    CHECK(ran(rlk::EmbeddingBwd{.ids = ids, .d_out = nothing, .weight = x, .d_weight = x}) == "");
    const rlk::LinearLogpBwd head{
        .hidden = nothing, .weight = x, .target = ids, .d_logp = none, .d_weight = x};
    CHECK(ran(head).find("columns, at most 2147483647 are served") != std::string::npos);
  }
  const Tensor g = empty({0, larger, 4, 16}), decay = empty({0, larger, 4, 16});
  Floats a_log({4});
  CHECK(ran(rlk::KdaGate{.g = g, .a_log = a_log.view, .out = decay}) == "");
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(60));
}

TEST_CASE("kda without a token hands its states through") {
  Floats initial({2, 1, 4, 4}, 3), final({2, 1, 4, 4}, 7), d_final({2, 1, 4, 4}, 5),
      d_initial({2, 1, 4, 4}, 7);
  const Tensor q = empty({2, 0, 1, 4}), beta = empty({2, 0, 1}), out = empty({2, 0, 1, 4});
  rlk::KdaFwd forward{.q = q,
                      .k = q,
                      .v = q,
                      .g = q,
                      .beta = beta,
                      .initial_state = initial.view,
                      .out = out,
                      .final_state = final.view};
  CHECK(ran(forward) == "");
  CHECK(final.data == initial.data);
  rlk::KdaBwd backward{.q = q,
                       .k = q,
                       .v = q,
                       .g = q,
                       .beta = beta,
                       .d_out = out,
                       .d_final_state = d_final.view,
                       .d_initial_state = d_initial.view};
  CHECK(ran(backward) == "");
  CHECK(d_initial.data == d_final.data);
}

TEST_CASE("kda: factors that no fp32 number holds are refused") {
  Floats x({1, 2, 1, 4}), beta({1, 2, 1}), out({1, 2, 1, 4}), a_log({1});
  rlk::KdaFwd a{.q = x.view, .k = x.view, .v = x.view, .g = x.view, .beta = beta.view, .out = out.view};
  a.scale = 1e300;
  CHECK(ran(a) == "kda_fwd: scale is 1e+300, it must be a finite fp32 number, at most 3.40282e+38");
  a.scale = 0, a.gate = rlk::KdaFwd::Gate::bounded, a.lower_bound = -HUGE_VAL;
  CHECK(ran(a) == "kda_fwd: lower_bound is -inf, it must be a finite fp32 number, at most 3.40282e+38");
  a.lower_bound = -5;
  CHECK(ran(a) == "");
}

TEST_CASE("rope_tables: results of two dtypes are refused, asked about as when run") {
  Floats cos({4, 8});
  std::vector<uint16_t> half(32);
  const Tensor sin(half.data(), {4, 8}, DType::f16);
  const rlk::RopeTables a{.cos = cos.view, .sin = sin, .rotary_dim = 16, .rows = 4};
  CHECK(explained(a).find("cos and sin differ in dtype") != std::string::npos);
  CHECK(ran(a).find("cos and sin differ in dtype") != std::string::npos);
}

TEST_CASE("rope_tables: rules that divide by zero or leave the numbers are refused") {
  using S = rlk::RopeTables::Scaling;
  Floats cos({4, 8}), sin({4, 8});
  const auto say = [&](auto&& change) {
    rlk::RopeTables a{.cos = cos.view, .sin = sin.view, .rotary_dim = 16, .rows = 4};
    a.original_max = 4096;
    change(a);
    const std::string text = ran(a);
    CHECK(explained(a) == text);
    return text;
  };
  CHECK(say([](auto&) {}) == "");
  CHECK(say([](auto& a) { a.base = HUGE_VAL; }) ==
        "rope_tables: base is inf, it must be greater than 1 and at most 1e+30");
  CHECK(say([](auto& a) { a.base = NAN; }) ==
        "rope_tables: base is nan, it must be greater than 1 and at most 1e+30");
  CHECK(say([](auto& a) { a.attention_factor = -HUGE_VAL; }) ==
        "rope_tables: attention_factor is -inf, it must be from -1e+30 to 1e+30");
  CHECK(say([](auto& a) { a.scaling = S::linear, a.factor = HUGE_VAL; }) ==
        "rope_tables: factor is inf, it must be from 1.90735e-06 to 1e+30");
  CHECK(say([](auto& a) { a.scaling = S::yarn, a.beta_fast = 0; }) ==
        "rope_tables: beta_fast is 0, it must be from 1.90735e-06 to 1e+30");
  CHECK(say([](auto& a) { a.scaling = S::yarn, a.beta_slow = -1; }) ==
        "rope_tables: beta_slow is -1, it must be from 1.90735e-06 to 1e+30");
  CHECK(say([](auto& a) { a.scaling = S::yarn, a.mscale = NAN; }) ==
        "rope_tables: mscale is nan, it must be from -1e+30 to 1e+30");
  CHECK(say([](auto& a) { a.scaling = S::llama3, a.low_freq_factor = 4; }) ==
        "rope_tables: low_freq_factor and high_freq_factor are both 4, they must differ");
  CHECK(say([](auto& a) { a.scaling = S::llama3, a.high_freq_factor = 0; }) ==
        "rope_tables: high_freq_factor is 0, it must be from 1.90735e-06 to 1e+30");
  CHECK(say([](auto& a) { a.start = kMost; }) ==
        "rope_tables: start is 9223372036854775807 and rows is 4, positions are served from -2147483647 to "
        "2147483647");
  CHECK(
      say([](auto& a) { a.start = 2147483645; }) ==
      "rope_tables: start is 2147483645 and rows is 4, positions are served from -2147483647 to 2147483647");
  CHECK(say([](auto& a) { a.start = 2147483644; }) == "");
  Floats two_cos({4, 1}), two_sin({4, 1});
  for (const auto scaling : {S::ntk, S::dynamic})
    CHECK(say([&](auto& a) {
            a.cos = two_cos.view, a.sin = two_sin.view, a.rotary_dim = 2, a.scaling = scaling, a.factor = 4;
          }) == "rope_tables: rotary_dim is 2, this scaling needs at least 4");
}

TEST_CASE("rope_tables: what only the data show is refused when it runs") {
  Floats cos({2, 2}), sin({2, 2});
  std::vector<int64_t> places{0, int64_t{1} << 40};
  const Tensor positions(places.data(), {2}, DType::i64);
  CHECK(ran(rlk::RopeTables{.cos = cos.view, .sin = sin.view, .positions = positions, .rotary_dim = 4}) ==
        "rope_tables: positions[1] is 1099511627776, at most 2147483647 is served");
  Floats factors({2});
  factors.data = {1, 0};
  rlk::RopeTables a{.cos = cos.view, .sin = sin.view, .factors = factors.view, .rotary_dim = 4, .rows = 2};
  a.scaling = rlk::RopeTables::Scaling::longrope, a.original_max = 4096;
  CHECK(ran(a) == "rope_tables: these attributes give pair 1 the frequency inf, at most 524288 is served");
}

TEST_CASE("a question about shapes reads no data, not even those in CPU memory") {
  const Tensor x = imagined({1, 1, 4, 8}), cos = imagined({6, 4}), y = imagined({1, 1, 4, 8});
  const Tensor positions = imagined({3, 4}, DType::i64), axes = imagined({4}, DType::i32);
  const rlk::Rope a{.x = x, .cos = cos, .sin = cos, .positions = positions, .axis_map = axes, .out = y};
  CHECK(explained(a) == "");
  CHECK(rlk::infer(a, "out")->shape == Shape{1, 1, 4, 8});

  rlk_args* args = rlk_args_new("rope");
  rlk_args_tensor(args, "x", &x.dl());
  rlk_args_tensor(args, "cos", &cos.dl());
  rlk_args_tensor(args, "sin", &cos.dl());
  rlk_args_tensor(args, "positions", &positions.dl());
  rlk_args_tensor(args, "axis_map", &axes.dl());
  char* json = rlk_resolve_json(args, nullptr);
  REQUIRE(json != nullptr);
  CHECK(std::string(json).find("\"error\": \"\"") != std::string::npos);
  rlk_free(json);
  rlk_args_free(args);
}

TEST_CASE("rope: tokens and heads the other way round are logged once where they are unlikely") {
  std::vector<std::string> lines;
  rlk_set_log_sink(
      [](void* context, int32_t level, const char* text) {
        if (level == 3) static_cast<std::vector<std::string>*>(context)->push_back(text);
      },
      &lines);
  const auto call = [](Shape shape, int64_t rows, Shape k = {}) {
    const Tensor x = imagined(shape), y = imagined(shape), table = imagined({rows, 4});
    const Tensor k_in = k.empty() ? Tensor() : imagined(k), k_out = k_in;
    rlk::Rope a{.x = x, .cos = table, .sin = table, .out = y};
    if (!k.empty()) a.k = k_in, a.k_out = k_out;
    CHECK(explained(a) == "");
  };
  call({2, 32, 16, 8}, 4096);                 // a short prompt
  call({2, 32, 1, 8}, 4096);                  // one token
  call({2, 128, 128, 8}, 128);                // as many tokens as heads
  call({2, 128, 32, 8}, 128, {2, 8, 32, 8});  // k has fewer heads
  CHECK(lines == std::vector<std::string>{});
  call({2, 128, 32, 8}, 128);
  call({2, 4096, 32, 8}, 8192);
  rlk_set_log_sink(nullptr, nullptr);
  REQUIRE(lines.size() == 1);
  CHECK(lines[0] ==
        "rope: x is [2,128,32,8] in layout bhsd, so it has 128 heads and 32 tokens, and cos has 128 rows; "
        "data that "
        "lie [batch, tokens, heads, dim] need layout=bshd");
}
