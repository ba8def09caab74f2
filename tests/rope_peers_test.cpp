// labels: conformance
// The calls that registry/rope/README.md shows for users of other libraries, each against what that library
// computes, written from its definition; and every shape that DeepSpeed accepts.
#include "rlk/rlk.hpp"
#include "rope_support.hpp"

namespace {

// candle: [B,H,T,D], [B,H,T,D] with pairs side by side, [B,T,H,D]; tables [T',D/2] or [B,T',D/2]
rlk::Status candle_rope(rlk::In x, rlk::In cos, rlk::In sin, rlk::Out y) {
  return rlk::rope({.x = x, .cos = cos, .sin = sin, .out = y});
}
rlk::Status candle_rope_i(rlk::In x, rlk::In cos, rlk::In sin, rlk::Out y) {
  return rlk::rope_i({.x = x, .cos = cos, .sin = sin, .out = y});  // pairing = adjacent
}
rlk::Status candle_rope_thd(rlk::In x, rlk::In cos, rlk::In sin, rlk::Out y) {
  return rlk::rope_thd({.x = x, .cos = cos, .sin = sin, .out = y});  // layout = bshd
}

// DeepSpeed: [S,B,H,D] with tables [S,1,1,R], or [B,S,H,D] with [1,S,1,R]; the first R dims turn
rlk::Status deepspeed_apply_rotary_pos_emb(rlk::In t, rlk::In cos, rlk::In sin, rlk::Out y) {
  return rlk::apply_rotary_pos_emb({.x = t, .cos = cos, .sin = sin, .out = y});  // sbhd, full-width tables
}

// Megatron-LM: [S,B,H,nope+R], or packed [T,H,nope+R] with cu_seqlens; tables [max_S,1,1,R]
rlk::Status megatron_mla_rope_q(rlk::In t, rlk::In cos, rlk::In sin, rlk::In cu_seqlens, rlk::Out y,
                                bool inverse, bool remove_interleaving) {
  using Layout = rlk::RopeMlaQ::Layout;
  return rlk::fused_apply_mla_rope_for_q({.x = t,
                                          .cos = cos,
                                          .sin = sin,
                                          .cu_seqlens = cu_seqlens,
                                          .out = y,
                                          .layout = cu_seqlens ? Layout::thd : Layout::sbhd,
                                          .remove_interleaving = remove_interleaving,
                                          .inverse = inverse});
}
rlk::Status megatron_mla_rope_kv(rlk::In kv, rlk::In k_pos_emb, rlk::In cos, rlk::In sin, int64_t k_dim,
                                 rlk::Out key, rlk::Out value) {
  return rlk::fused_apply_mla_rope_for_kv(
      {.kv = kv, .k_pos_emb = k_pos_emb, .cos = cos, .sin = sin, .key = key, .value = value, .k_dim = k_dim});
}
// Its inverse in place, with remove_interleaving: for memory that nobody else reads. A pair's entry is the
// one in the first half of a row: cos and sin are views [max_S, R/2] of the tables.
rlk::Status megatron_inverse_in_place(rlk::InOut t, rlk::In cos, rlk::In sin, int64_t nope) {
  return rlk::rope_({.x = t,
                     .cos = cos,
                     .sin = sin,
                     .layout = rlk::RopeInPlace::Layout::sbhd,
                     .pairing = rlk::RopeInPlace::Pairing::adjacent,
                     .rotary_dim = 2 * cos.dim(-1),
                     .rotary_offset = nope,
                     .transpose = true});
}

// flash-attn: apply_rotary_emb on [B,S,H,D], or packed [T,H,D] with cu_seqlens; tables [S_ro,R/2], an offset
// for each sequence. What it calls conjugate is `transpose`.
rlk::Status flash_apply_rotary_emb(rlk::In x, rlk::In cos, rlk::In sin, bool interleaved,
                                   rlk::In seqlen_offsets, rlk::In cu_seqlens, rlk::Out y) {
  return rlk::rope({.x = x,
                    .cos = cos,
                    .sin = sin,
                    .starts = seqlen_offsets,
                    .cu_seqlens = cu_seqlens,
                    .out = y,
                    .layout = cu_seqlens ? rlk::Rope::Layout::thd : rlk::Rope::Layout::bshd,
                    .pairing = interleaved ? rlk::Rope::Pairing::adjacent : rlk::Rope::Pairing::half,
                    .rotary_dim = 2 * cos.dim(-1)});
}

// vLLM: rotary_embedding on q [N,heads,D] and k [N,kv_heads,D] in place, positions [N]; cos and sin are the
// two halves of cos_sin_cache [max_position,R], views [max_position,R/2] with row stride R
rlk::Status vllm_rotary_embedding(rlk::In positions, rlk::InOut q, rlk::InOut k, rlk::In cos, rlk::In sin,
                                  bool is_neox) {
  using Op = rlk::RopeInPlace;
  return rlk::rope_({.x = q,
                     .cos = cos,
                     .sin = sin,
                     .k = k,
                     .positions = positions,
                     .layout = Op::Layout::thd,
                     .pairing = is_neox ? Op::Pairing::half : Op::Pairing::adjacent,
                     .rotary_dim = 2 * cos.dim(-1)});
}

// Qwen2-VL: positions [3,B,S] of time, height and width, sections of 16, 24 and 24 pairs
rlk::Status qwen2_vl_rope(rlk::In x, rlk::In cos, rlk::In sin, rlk::In positions, rlk::Out y) {
  return rlk::rope({.x = x,
                    .cos = cos,
                    .sin = sin,
                    .positions = positions,
                    .out = y,
                    .mrope_t = 16,
                    .mrope_h = 24,
                    .mrope_w = 24});
}
// end of what the page shows

using namespace ropetest;

Tensor floats(Shape shape, std::uint64_t seed) {
  return Tensor(type_of(Float::f32), std::move(shape)).random(seed);
}
Tensor ints(std::vector<double> v) { return Tensor(kInt32, {std::int64_t(v.size())}).fill(v); }
Tensor like(const Tensor& t) { return Tensor(t.view.dtype, t.shape); }
std::string words(const rlk::Status& s) { return std::string(s.message()); }

// Columns [from, from + columns) of a table with `width` of them, as a view.
struct Columns {
  std::int64_t shape[2], strides[2];
  DLTensor view;
  Columns(Tensor& t, std::int64_t width, std::int64_t from, std::int64_t columns)
      : shape{t.size() / width, columns}, strides{width, 1}, view(*t.dl()) {
    view.ndim = 2, view.shape = shape, view.strides = strides;
    view.byte_offset += std::uint64_t(from) * 4;
  }
};

// A rotation row by row: x is rows of `dim`; pair p of row r has its members at in(p, 0) and in(p, 1), goes
// to out(p, 0) and out(p, 1), and turns by table entries at(r, p, 0) for the first and at(r, p, 1) for the
// second.
struct Oracle {
  std::int64_t dim = 0, pairs = 0;
  std::function<std::int64_t(std::int64_t, int)> in, out;
  std::function<std::int64_t(std::int64_t, std::int64_t, int)> at;
  bool transpose = false;

  bool matches(Tensor& x, Tensor& cos, Tensor& sin, Tensor& y) const {
    for (std::int64_t r = 0; r < x.size() / dim; ++r) {
      std::vector<double> want(static_cast<std::size_t>(dim));
      for (std::int64_t d = 0; d < dim; ++d) want[std::size_t(d)] = x.get(r * dim + d);
      for (std::int64_t p = 0; p < pairs; ++p) {
        const double a = x.get(r * dim + in(p, 0)), b = x.get(r * dim + in(p, 1));
        const std::int64_t first = at(r, p, 0), second = at(r, p, 1);
        const double c1 = cos.get(first), s1 = sin.get(first), c2 = cos.get(second), s2 = sin.get(second);
        want[std::size_t(out(p, 0))] = transpose ? a * c1 + b * s2 : a * c1 - b * s1;
        want[std::size_t(out(p, 1))] = transpose ? b * c2 - a * s1 : b * c2 + a * s2;
      }
      for (std::int64_t d = 0; d < dim; ++d)
        if (!(std::fabs(y.get(r * dim + d) - want[std::size_t(d)]) <= 1e-5)) return false;
    }
    return true;
  }
};

std::function<std::int64_t(std::int64_t, int)> halves(std::int64_t rotary, std::int64_t offset = 0) {
  return [=](std::int64_t p, int second) { return offset + p + second * (rotary / 2); };
}
std::function<std::int64_t(std::int64_t, int)> neighbours(std::int64_t offset = 0) {
  return [=](std::int64_t p, int second) { return offset + 2 * p + second; };
}

}  // namespace

TEST_CASE("peers: candle's rope, rope_i and rope_thd, with one table and with one for each sequence") {
  const std::int64_t B = 2, H = 3, T = 4, D = 8, rows = 5;
  for (bool batched : {false, true}) {
    Tensor cos = floats(batched ? Shape{B, rows, D / 2} : Shape{rows, D / 2}, 1), sin = floats(cos.shape, 2);
    const auto entry = [&](std::int64_t b, std::int64_t t, std::int64_t p) {
      return ((batched ? b * rows : 0) + t) * (D / 2) + p;
    };
    Tensor x = floats({B, H, T, D}, 3), y = like(x);
    Oracle o{D, D / 2, halves(D), halves(D),
             [&](std::int64_t r, std::int64_t p, int) { return entry(r / (H * T), r % T, p); }};
    CHECK(words(candle_rope(x.dl(), cos.dl(), sin.dl(), y.dl())) == "");
    CHECK(o.matches(x, cos, sin, y));
    CHECK(words(candle_rope_i(x.dl(), cos.dl(), sin.dl(), y.dl())) == "");
    CHECK_FALSE(o.matches(x, cos, sin, y));
    o.in = o.out = neighbours();
    CHECK(o.matches(x, cos, sin, y));
    Tensor u = floats({B, T, H, D}, 4), v = like(u);
    o.in = o.out = halves(D);
    o.at = [&](std::int64_t r, std::int64_t p, int) { return entry(r / (H * T), r / H % T, p); };
    CHECK(words(candle_rope_thd(u.dl(), cos.dl(), sin.dl(), v.dl())) == "");
    CHECK(o.matches(u, cos, sin, v));
  }
}

TEST_CASE("peers: Megatron-LM's query, packed or not, its inverse, and the inverse in place") {
  const std::int64_t S = 4, B = 2, H = 3, nope = 4, R = 8, D = nope + R;
  Tensor cos = floats({S + 2, 1, 1, R}, 5), sin = floats(cos.shape, 6);
  for (Tensor* t : {&cos, &sin})  // as Megatron-LM builds them: the second half is the first again
    for (std::int64_t i = 0; i < t->size(); ++i)
      if (i % R >= R / 2) t->set(i, t->get(i - R / 2));
  Tensor x = floats({S, B, H, D}, 7), y = like(x);
  Oracle o{D, R / 2, neighbours(nope), halves(R, nope),
           [&](std::int64_t r, std::int64_t p, int second) { return r / (B * H) * R + p + second * R / 2; }};
  CHECK(words(megatron_mla_rope_q(x.dl(), cos.dl(), sin.dl(), {}, y.dl(), false, false)) == "");
  CHECK(o.matches(x, cos, sin, y));
  o.out = o.in, o.transpose = true;
  CHECK(words(megatron_mla_rope_q(x.dl(), cos.dl(), sin.dl(), {}, y.dl(), true, true)) == "");
  CHECK(o.matches(x, cos, sin, y));
  Tensor turned = x;
  const Columns c(cos, R, 0, R / 2), s(sin, R, 0, R / 2);
  CHECK(words(megatron_inverse_in_place(turned.dl(), c.view, s.view, nope)) == "");
  CHECK(same_bits(turned, y));

  Tensor packed = floats({6, H, D}, 8), z = like(packed), cu = ints({0, 4, 6});
  o.out = halves(R, nope), o.transpose = false;
  o.at = [&](std::int64_t r, std::int64_t p, int second) {
    const std::int64_t token = r / H;
    return (token < 4 ? token : token - 4) * R + p + second * R / 2;
  };
  CHECK(words(megatron_mla_rope_q(packed.dl(), cos.dl(), sin.dl(), cu.dl(), z.dl(), false, false)) == "");
  CHECK(o.matches(packed, cos, sin, z));
}

TEST_CASE("peers: Megatron-LM's key and value: every head gets the rotated embedding") {
  const std::int64_t S = 3, B = 2, H = 2, k_dim = 4, v_dim = 6, R = 4;
  Tensor cos = floats({S, 1, 1, R}, 9), sin = floats(cos.shape, 10);
  Tensor kv = floats({S, B, H, k_dim + v_dim}, 11), emb = floats({S, B, 1, R}, 12);
  Tensor key = floats({S, B, H, k_dim + R}, 0), value = floats({S, B, H, v_dim}, 0);
  CHECK(words(megatron_mla_rope_kv(kv.dl(), emb.dl(), cos.dl(), sin.dl(), k_dim, key.dl(), value.dl())) ==
        "");
  Tensor shared(kv.view.dtype, {S, B, H, R}), turned = shared;
  int differ = 0;
  for (std::int64_t row = 0; row < S * B * H; ++row) {
    for (std::int64_t d = 0; d < R; ++d) {
      shared.set(row * R + d, emb.get(row / H * R + d));
      turned.set(row * R + d, key.get(row * (k_dim + R) + k_dim + d));
    }
    for (std::int64_t d = 0; d < k_dim + v_dim; ++d)
      differ += kv.bits(row * (k_dim + v_dim) + d) !=
                (d < k_dim ? key.bits(row * (k_dim + R) + d) : value.bits(row * v_dim + d - k_dim));
  }
  CHECK(differ == 0);
  const Oracle o{R, R / 2, neighbours(), halves(R), [&](std::int64_t r, std::int64_t p, int second) {
                   return r / (B * H) * R + p + second * R / 2;
                 }};
  CHECK(o.matches(shared, cos, sin, turned));
}

TEST_CASE("peers: flash-attn's offsets, packed or not, both pairings") {
  const std::int64_t B = 2, S = 3, H = 2, D = 12, R = 8;
  Tensor cos = floats({9, R / 2}, 13), sin = floats(cos.shape, 14), offsets = ints({5, 1});
  for (bool interleaved : {false, true}) {
    Oracle o{D, R / 2, interleaved ? neighbours() : halves(R), interleaved ? neighbours() : halves(R),
             [&](std::int64_t r, std::int64_t p, int) {
               return (std::int64_t(offsets.get(r / (S * H))) + r / H % S) * (R / 2) + p;
             }};
    Tensor x = floats({B, S, H, D}, 15), y = like(x);
    CHECK(words(flash_apply_rotary_emb(x.dl(), cos.dl(), sin.dl(), interleaved, offsets.dl(), {}, y.dl())) ==
          "");
    CHECK(o.matches(x, cos, sin, y));
    Tensor packed = floats({5, H, D}, 16), z = like(packed), cu = ints({0, 2, 5});
    o.at = [&](std::int64_t r, std::int64_t p, int) {
      const std::int64_t token = r / H, second = token >= 2;
      return (std::int64_t(offsets.get(second)) + token - 2 * second) * (R / 2) + p;
    };
    CHECK(words(flash_apply_rotary_emb(packed.dl(), cos.dl(), sin.dl(), interleaved, offsets.dl(), cu.dl(),
                                       z.dl())) == "");
    CHECK(o.matches(packed, cos, sin, z));
  }
}

TEST_CASE("peers: vLLM's cache and positions, q and k with heads of their own, in place") {
  const std::int64_t N = 5, D = 12, R = 8;
  Tensor cache = floats({10, R}, 17), at = Tensor(kInt64, {N}).fill({7, 0, 9, 3, 3});
  Tensor cos(cache.view.dtype, {10, R / 2}), sin = cos;
  for (std::int64_t i = 0; i < cache.size(); ++i)
    (i % R < R / 2 ? cos : sin).set(i / R * (R / 2) + i % (R / 2), cache.get(i));
  const Columns c(cache, R, 0, R / 2), s(cache, R, R / 2, R / 2);
  for (bool neox : {true, false}) {
    Tensor q = floats({N, 4, D}, 18), k = floats({N, 1, D}, 19), yq = q, yk = k;
    CHECK(words(vllm_rotary_embedding(at.dl(), yq.dl(), yk.dl(), c.view, s.view, neox)) == "");
    for (std::int64_t heads : {4, 1}) {
      const auto places = neox ? halves(R) : neighbours();
      const Oracle o{D, R / 2, places, places, [&](std::int64_t r, std::int64_t p, int) {
                       return std::int64_t(at.get(r / heads)) * (R / 2) + p;
                     }};
      CHECK(o.matches(heads == 4 ? q : k, cos, sin, heads == 4 ? yq : yk));
    }
  }
}

TEST_CASE("peers: Qwen2-VL's sections") {
  const std::int64_t B = 2, H = 2, S = 3, D = 128;
  Tensor cos = floats({20, D / 2}, 20), sin = floats(cos.shape, 21), at(kInt64, {3, B, S});
  for (std::int64_t i = 0; i < at.size(); ++i) at.set(i, double(i * 13 % 20));
  Tensor x = floats({B, H, S, D}, 22), y = like(x);
  CHECK(words(qwen2_vl_rope(x.dl(), cos.dl(), sin.dl(), at.dl(), y.dl())) == "");
  const Oracle o{D, D / 2, halves(D), halves(D), [&](std::int64_t r, std::int64_t p, int) {
                   const std::int64_t axis = p < 16 ? 0 : p < 40 ? 1 : 2, b = r / (H * S), t = r % S;
                   return std::int64_t(at.get((axis * B + b) * S + t)) * (D / 2) + p;
                 }};
  CHECK(o.matches(x, cos, sin, y));
}

TEST_CASE(
    "peers: every shape DeepSpeed accepts is served as it broadcasts, or refused; no table runs along the "
    "heads") {
  const std::int64_t D = 6;
  // All lists of `rank` sizes of 1 to 3.
  const auto shapes = [](int rank) {
    std::vector<Shape> all{{}};
    for (int i = 0; i < rank; ++i) {
      std::vector<Shape> longer;
      for (const Shape& s : all)
        for (std::int64_t n : {1, 2, 3}) longer.push_back(s), longer.back().push_back(n);
      all = longer;
    }
    return all;
  };
  int served = 0, refused = 0, along_heads = 0;
  for (int x_rank : {1, 2, 3})
    for (const Shape& lead : shapes(x_rank))
      for (int t_rank = 0; t_rank <= x_rank; ++t_rank)
        for (const Shape& table : shapes(t_rank)) {
          // What broadcasting accepts, aligned at the last axis.
          const int behind = x_rank - t_rank;
          bool accepted = true;
          for (int i = 0; i < t_rank; ++i)
            accepted = accepted &&
                       (table[std::size_t(i)] == 1 || table[std::size_t(i)] == lead[std::size_t(i + behind)]);
          if (!accepted) continue;
          const std::int64_t R = 4;
          const auto with = [](Shape s, std::int64_t n) { return s.push_back(n), s; };
          Tensor x = floats(with(lead, D), 23), y = like(x), cos = floats(with(table, R), 24),
                 sin = floats(cos.shape, 25);
          const rlk::Status status = deepspeed_apply_rotary_pos_emb(x.dl(), cos.dl(), sin.dl(), y.dl());
          CAPTURE(rlk::rotary::detail::shape_text(*x.dl()));
          CAPTURE(rlk::rotary::detail::shape_text(*cos.dl()));
          if (!status) {
            ++refused;
            CHECK(words(status).size() > 20);
            continue;
          }
          ++served;
          const auto index = [&](std::int64_t r, int axis) {  // of row r along an axis of `lead`
            for (int i = x_rank - 1; i > axis; --i) r /= lead[std::size_t(i)];
            return r % lead[std::size_t(axis)];
          };
          Oracle o{D, R / 2, halves(R), halves(R), [&](std::int64_t r, std::int64_t p, int second) {
                     std::int64_t row = 0;
                     for (int i = 0; i < t_rank; ++i)
                       row = row * table[std::size_t(i)] +
                             (table[std::size_t(i)] == 1 ? 0 : index(r, i + behind));
                     return row * R + p + second * (R / 2);
                   }};
          if (o.matches(x, cos, sin, y)) continue;
          // Sizes that happen to agree let broadcasting run along the heads. [rows,R] and [batch,rows,R] mean
          // rows of the sequence here.
          ++along_heads;
          CHECK(x_rank >= 2);
          CHECK(table.back() > 1);
          CHECK(table.back() == lead.back());
          o.at = [&](std::int64_t r, std::int64_t p, int second) {
            const std::int64_t batch = t_rank < 2 || table[0] == 1 ? 0 : index(r, 1);
            return (batch * table.back() + index(r, 0)) * R + p + second * (R / 2);
          };
          CHECK(o.matches(x, cos, sin, y));
        }
  MESSAGE("served ", served, ", refused ", refused, ", along the heads by broadcasting ", along_heads);
  CHECK(served > 100);
  CHECK(refused > 20);

  // What its callers pass is served whatever the sizes.
  for (const Shape& lead : shapes(3)) {
    const std::int64_t S = lead[0], B = lead[1];
    Tensor x = floats({S, B, lead[2], D}, 26), y = like(x);
    for (const Shape& table : {Shape{S, 4}, Shape{S, 1, 1, 4}, Shape{S, B, 1, 4}, Shape{1, B, 1, 4}}) {
      if (table == Shape{1, 1, 1, 4} && S > 1) continue;  // one row for several tokens
      Tensor cos = floats(table, 27);
      CAPTURE(rlk::rotary::detail::shape_text(*x.dl()));
      CAPTURE(rlk::rotary::detail::shape_text(*cos.dl()));
      CHECK(words(deepspeed_apply_rotary_pos_emb(x.dl(), cos.dl(), cos.dl(), y.dl())) == "");
    }
  }
  Tensor deep = floats({2, 2, 2, 2, D}, 28), out = like(deep), table = floats({2, 4}, 29);
  CHECK_FALSE(deepspeed_apply_rotary_pos_emb(deep.dl(), table.dl(), table.dl(), out.dl()));
  Tensor one = floats({4}, 30), x = floats({2, 2, 2, D}, 31), y = like(x);
  CHECK_FALSE(deepspeed_apply_rotary_pos_emb(x.dl(), one.dl(), one.dl(), y.dl()));
}
