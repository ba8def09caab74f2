// Body of every rope tile kernel. Included once per instruction set, after `Isa` is defined, inside an anonymous
// namespace: nothing here may be shared between translation units that are compiled for different processors.
//
// Isa gives: V (vector of floats), kWidth, load(const T*), store<Stream>(T*, V), mul, fma, deinterleave(v0, v1, a, b),
// interleave(a, b, v0, v1), copy<Stream>(to, from, bytes), fence().

constexpr int kPairs = 256;  // pairs whose factors are held at once
constexpr int kTokens = 16;  // tokens whose factors are held at once: 16 KiB each of c1, m1 for 256 pairs

// Factors of up to kTokens tokens, converted and signed once, used by every head.
struct Factors {
  alignas(64) float c1[kTokens][kPairs], m1[kTokens][kPairs], c2[kTokens][kPairs], m2[kTokens][kPairs];
};

inline void read_factors(const rlk::rotary::Geometry& g, std::int64_t batch, std::int64_t token, int first, int pairs,
                         float* c1, float* m1, float* c2, float* m2) {
  using namespace rlk::simt;
  const rlk::rotary::Table& t = g.table;
  const std::int64_t cos0 = batch * t.cos_batch, sin0 = batch * t.sin_batch;
  std::int64_t row = row_of(g.rows, g.tokens, batch, token);
  for (int i = 0; i < pairs; ++i) {
    const int p = first + i;
    if (g.rows.axes > 1) row = row_of(g.rows, g.tokens, batch, token, axis_of(g.rows, p));
    const std::int64_t c = cos0 + row * t.cos_row + std::int64_t{p} * t.step;
    const std::int64_t s = sin0 + row * t.sin_row + std::int64_t{p} * t.step;
    const Turn turned = turn(table_value(t.cos, t.type, c), table_value(t.sin, t.type, s),
                             table_value(t.cos, t.type, c + t.second), table_value(t.sin, t.type, s + t.second),
                             g.transpose);
    c1[i] = turned.c1, m1[i] = turned.m1, c2[i] = turned.c2, m2[i] = turned.m2;
  }
}

// The usual case, an fp32 half-width table and one row per token, without the per-pair bookkeeping.
inline void read_factors_plain(const rlk::rotary::Geometry& g, std::int64_t batch, std::int64_t token, int first,
                               int pairs, float* c1, float* m1, float* m2) {
  const std::int64_t row = rlk::simt::row_of(g.rows, g.tokens, batch, token);
  const float* c = static_cast<const float*>(g.table.cos) + batch * g.table.cos_batch + row * g.table.cos_row + first;
  const float* s = static_cast<const float*>(g.table.sin) + batch * g.table.sin_batch + row * g.table.sin_row + first;
  if (g.transpose) {
    for (int i = 0; i < pairs; ++i) c1[i] = c[i], m1[i] = s[i], m2[i] = -s[i];
  } else {
    for (int i = 0; i < pairs; ++i) c1[i] = c[i], m1[i] = -s[i], m2[i] = s[i];
  }
}

// One row of one head: `pairs` pairs. x0, x1 are the places of first and second members (half) or of the first pair
// and the pair kWidth / 2 on (adjacent, x1 unused).
template <class T, bool InAdjacent, bool OutAdjacent, bool Stream>
inline void rotate_row(const T* x0, const T* x1, T* y0, T* y1, int pairs, const float* c1, const float* m1,
                       const float* c2, const float* m2) {
  using V = Isa::V;
  constexpr int W = Isa::kWidth;
  int i = 0;
  for (; i + W <= pairs; i += W) {
    V a, b;
    if constexpr (InAdjacent) {
      Isa::deinterleave(Isa::load(x0 + 2 * i), Isa::load(x0 + 2 * i + W), a, b);
    } else {
      a = Isa::load(x0 + i), b = Isa::load(x1 + i);
    }
    const V ya = Isa::fma(a, Isa::load(c1 + i), Isa::mul(b, Isa::load(m1 + i)));
    const V yb = Isa::fma(b, Isa::load(c2 + i), Isa::mul(a, Isa::load(m2 + i)));
    if constexpr (OutAdjacent) {
      V low, high;
      Isa::interleave(ya, yb, low, high);
      Isa::template store<Stream>(y0 + 2 * i, low);
      Isa::template store<Stream>(y0 + 2 * i + W, high);
    } else {
      Isa::template store<Stream>(y0 + i, ya);
      Isa::template store<Stream>(y1 + i, yb);
    }
  }
  for (; i < pairs; ++i) {
    const float a = rlk::simt::to_float(InAdjacent ? x0[2 * i] : x0[i]);
    const float b = rlk::simt::to_float(InAdjacent ? x0[2 * i + 1] : x1[i]);
    float ya, yb;
    rlk::simt::rotate({c1[i], m1[i], c2[i], m2[i]}, a, b, ya, yb);
    (OutAdjacent ? y0[2 * i] : y0[i]) = rlk::simt::from_float<T>(ya);
    (OutAdjacent ? y0[2 * i + 1] : y1[i]) = rlk::simt::from_float<T>(yb);
  }
}

// The dims that do not turn.
template <class T, bool Stream>
inline void pass_through(const rlk::rotary::Geometry& g, const T* x, T* y) {
  const int behind = g.offset + g.rotary_dim;
  if (g.offset > 0) Isa::copy<Stream>(y, x, sizeof(T) * static_cast<std::size_t>(g.offset));
  if (behind < g.head_dim) {
    Isa::copy<Stream>(y + behind, x + behind, sizeof(T) * static_cast<std::size_t>(g.head_dim - behind));
  }
}

template <class T, bool InAdjacent, bool OutAdjacent, bool Stream>
void rotate_box(const rlk::rotary::Geometry& g, std::int64_t batch, std::int64_t token, int tokens, int first, int pairs,
                const Factors& f) {
  const int half = g.rotary_dim / 2;
  const int in0 = g.offset + (InAdjacent ? 2 * first : first), in1 = g.offset + half + first;
  const int out0 = g.offset + (OutAdjacent ? 2 * first : first), out1 = g.offset + half + first;
  const bool pass = first == 0 && !g.in_place && g.rotary_dim < g.head_dim;
  for (int which = 0; which < g.parts; ++which) {
    const rlk::rotary::Part& part = g.part[which];
    const T* x = static_cast<const T*>(part.x) + batch * part.x_batch + token * part.x_token;
    T* y = static_cast<T*>(part.y) + batch * part.y_batch + token * part.y_token;
    const auto row = [&](std::int64_t head, int t) {
      const T* from = x + head * part.x_head + t * part.x_token;
      T* to = y + head * part.y_head + t * part.y_token;
      if (pass) pass_through<T, Stream>(g, from, to);
      rotate_row<T, InAdjacent, OutAdjacent, Stream>(from + in0, from + in1, to + out0, to + out1, pairs, f.c1[t],
                                                     f.m1[t], g.table.full ? f.c2[t] : f.c1[t], f.m2[t]);
    };
    if (part.x_head > part.x_token) {  // heads are far apart: stay in one for all tokens of the box
      for (std::int64_t head = 0; head < part.heads; ++head) {
        for (int t = 0; t < tokens; ++t) row(head, t);
      }
    } else {
      for (int t = 0; t < tokens; ++t) {
        for (std::int64_t head = 0; head < part.heads; ++head) row(head, t);
      }
    }
  }
}

template <class T, bool Stream>
void rotate_tile(const rlk::rotary::Geometry& g, const Tile& tile) {
  Factors f;
  const int all = g.rotary_dim / 2;
  const bool plain = g.table.type == rlk::rotary::Float::f32 && !g.table.full && g.rows.axes == 1;
  for (std::int64_t token = tile.token; token < tile.token_end; token += kTokens) {
    const int tokens = static_cast<int>(tile.token_end - token < kTokens ? tile.token_end - token : kTokens);
    for (int first = 0; first < all; first += kPairs) {
      const int pairs = all - first < kPairs ? all - first : kPairs;
      for (int t = 0; t < tokens; ++t) {
        if (plain) {
          read_factors_plain(g, tile.batch, token + t, first, pairs, f.c1[t], f.m1[t], f.m2[t]);
        } else {
          read_factors(g, tile.batch, token + t, first, pairs, f.c1[t], f.m1[t], f.c2[t], f.m2[t]);
        }
      }
      const auto box = g.in_adjacent    ? (g.out_adjacent ? &rotate_box<T, true, true, Stream>
                                                          : &rotate_box<T, true, false, Stream>)
                       : g.out_adjacent ? &rotate_box<T, false, true, Stream>
                                        : &rotate_box<T, false, false, Stream>;
      box(g, tile.batch, token, tokens, first, pairs, f);
    }
  }
  if (Stream) Isa::fence();
}

inline void rotate_any(const rlk::rotary::Geometry& g, const Tile& tile) {
  switch (g.type) {
    case rlk::rotary::Float::f32:
      return tile.stream ? rotate_tile<float, true>(g, tile) : rotate_tile<float, false>(g, tile);
    case rlk::rotary::Float::bf16:
      return tile.stream ? rotate_tile<rlk::simt::bf16, true>(g, tile) : rotate_tile<rlk::simt::bf16, false>(g, tile);
    default:
      return tile.stream ? rotate_tile<rlk::simt::fp16, true>(g, tile) : rotate_tile<rlk::simt::fp16, false>(g, tile);
  }
}
