// Body of every rope tile kernel. Included once per instruction set, after `Isa` is defined, inside an
// anonymous namespace: nothing here may be shared between translation units that are compiled for different
// processors.
//
// Isa gives: V (vector of floats), kWidth, load(const T*), store<Stream>(T*, V), add, mul, fma,
// deinterleave(v0, v1, a, b), interleave(a, b, v0, v1), copy<Stream>(to, from, bytes), fence().

constexpr int kPairs = 256;  // pairs whose factors are held at once
constexpr int kTokens = 16;  // tokens whose factors are held at once: 16 KiB each of c1, m1 for 256 pairs

// Factors of up to kTokens tokens, converted and signed once, used by every head.
struct Factors {
  alignas(64) float c1[kTokens][kPairs], m1[kTokens][kPairs], c2[kTokens][kPairs], m2[kTokens][kPairs];
};

inline void read_factors(const rlk::rotary::Geometry& g, std::int64_t batch, std::int64_t token, int first,
                         int pairs, float* c1, float* m1, float* c2, float* m2) {
  using namespace rlk::simt;
  const rlk::rotary::Table& t = g.table;
  const std::int64_t cos0 = batch * t.cos_batch, sin0 = batch * t.sin_batch;
  std::int64_t row = row_of(g.rows, g.tokens, batch, token);
  for (int i = 0; i < pairs; ++i) {
    const int p = first + i;
    if (g.rows.axes > 1) row = row_of(g.rows, g.tokens, batch, token, axis_of(g.rows, p));
    const std::int64_t c = cos0 + row * t.cos_row + std::int64_t{p} * t.step;
    const std::int64_t s = sin0 + row * t.sin_row + std::int64_t{p} * t.step;
    const Turn turned =
        turn(table_value(t.cos, t.type, c), table_value(t.sin, t.type, s),
             table_value(t.cos, t.type, c + t.second), table_value(t.sin, t.type, s + t.second), g.transpose);
    c1[i] = turned.c1, m1[i] = turned.m1, c2[i] = turned.c2, m2[i] = turned.m2;
  }
}

// The usual case, an fp32 half-width table and one row per token, without the per-pair bookkeeping.
inline void read_factors_plain(const rlk::rotary::Geometry& g, std::int64_t batch, std::int64_t token,
                               int first, int pairs, float* c1, float* m1, float* m2) {
  const std::int64_t row = rlk::simt::row_of(g.rows, g.tokens, batch, token);
  const float* c =
      static_cast<const float*>(g.table.cos) + batch * g.table.cos_batch + row * g.table.cos_row + first;
  const float* s =
      static_cast<const float*>(g.table.sin) + batch * g.table.sin_batch + row * g.table.sin_row + first;
  if (g.transpose) {
    for (int i = 0; i < pairs; ++i) c1[i] = c[i], m1[i] = s[i], m2[i] = -s[i];
  } else {
    for (int i = 0; i < pairs; ++i) c1[i] = c[i], m1[i] = -s[i], m2[i] = s[i];
  }
}

inline void read_box(const rlk::rotary::Geometry& g, std::int64_t batch, std::int64_t token, int tokens,
                     int first, int pairs, Factors& f) {
  const bool plain = g.table.type == rlk::rotary::Float::f32 && !g.table.full && g.rows.axes == 1;
  for (int t = 0; t < tokens; ++t) {
    if (plain) {
      read_factors_plain(g, batch, token + t, first, pairs, f.c1[t], f.m1[t], f.m2[t]);
    } else {
      read_factors(g, batch, token + t, first, pairs, f.c1[t], f.m1[t], f.c2[t], f.m2[t]);
    }
  }
}

// One row of one head: `pairs` pairs. x0, x1 are the places of first and second members (half) or of the
// first pair and the pair kWidth / 2 on (adjacent, x1 unused).
template <class In, class T, bool InAdjacent, bool OutAdjacent, bool Stream>
inline void rotate_row(const In* x0, const In* x1, T* y0, T* y1, int pairs, const float* c1, const float* m1,
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
void rotate_box(const rlk::rotary::Geometry& g, std::int64_t batch, std::int64_t token, int tokens, int first,
                int pairs, const Factors& f) {
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
      rotate_row<T, T, InAdjacent, OutAdjacent, Stream>(from + in0, from + in1, to + out0, to + out1, pairs,
                                                        f.c1[t], f.m1[t], g.table.full ? f.c2[t] : f.c1[t],
                                                        f.m2[t]);
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
  for (std::int64_t token = tile.token; token < tile.token_end; token += kTokens) {
    const int tokens = static_cast<int>(tile.token_end - token < kTokens ? tile.token_end - token : kTokens);
    for (int first = 0; first < all; first += kPairs) {
      const int pairs = all - first < kPairs ? all - first : kPairs;
      read_box(g, tile.batch, token, tokens, first, pairs, f);
      const auto box =
          g.in_adjacent
              ? (g.out_adjacent ? &rotate_box<T, true, true, Stream> : &rotate_box<T, true, false, Stream>)
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
      return tile.stream ? rotate_tile<rlk::simt::bf16, true>(g, tile)
                         : rotate_tile<rlk::simt::bf16, false>(g, tile);
    default:
      return tile.stream ? rotate_tile<rlk::simt::fp16, true>(g, tile)
                         : rotate_tile<rlk::simt::fp16, false>(g, tile);
  }
}

// The key-value split. `first` and `pairs` name a stretch of the rotary dims, whose two members lie at m0 and
// m1 of the side named by `adjacent`.
struct Members {
  int m0, m1, length;  // two runs of `length` elements; one run of twice that, at m0, when adjacent
};
inline Members members(bool adjacent, int first, int pairs, int rotary_dim) {
  return adjacent ? Members{2 * first, 2 * first + pairs, pairs}
                  : Members{first, rotary_dim / 2 + first, pairs};
}

template <class In, class T>
void rotate_shared(const rlk::rotary::Geometry& g, const In* x0, const In* x1, T* y0, T* y1, int pairs,
                   const Factors& f, int t) {
  const float* c2 = g.table.full ? f.c2[t] : f.c1[t];
  const auto turn =
      g.in_adjacent
          ? (g.out_adjacent ? &rotate_row<In, T, true, true, false> : &rotate_row<In, T, true, false, false>)
      : g.out_adjacent ? &rotate_row<In, T, false, true, false>
                       : &rotate_row<In, T, false, false, false>;
  turn(x0, x1, y0, y1, pairs, f.c1[t], f.m1[t], c2, f.m2[t]);
}

// Sum over heads, ascending, in fp32.
template <class T>
void sum_heads(const T* x, std::int64_t by_head, std::int64_t heads, int length, float* sum) {
  constexpr int W = Isa::kWidth;
  int i = 0;
  for (; i + W <= length; i += W) {
    auto total = Isa::load(x + i);
    for (std::int64_t h = 1; h < heads; ++h) total = Isa::add(total, Isa::load(x + h * by_head + i));
    Isa::template store<false>(sum + i, total);
  }
  for (; i < length; ++i) {
    float total = rlk::simt::to_float(x[i]);
    for (std::int64_t h = 1; h < heads; ++h) total += rlk::simt::to_float(x[h * by_head + i]);
    sum[i] = total;
  }
}

template <class T, bool Stream>
void split_tile(const rlk::rotary::KvGeometry& kv, const Tile& tile, bool backward) {
  const rlk::rotary::Geometry& g = kv.turn;
  Factors f;
  alignas(64) T turned[2 * kPairs];
  alignas(64) float sum[2 * kPairs];
  const auto at = [&](const rlk::rotary::Strided& s, std::int64_t t) {
    return static_cast<T*>(s.data) + tile.batch * s.by_batch + t * s.by_token;
  };
  const auto k_bytes = sizeof(T) * static_cast<std::size_t>(kv.k_dim);
  const auto v_bytes = sizeof(T) * static_cast<std::size_t>(kv.v_dim);
  for (std::int64_t token = tile.token; token < tile.token_end; token += kTokens) {
    const int tokens = static_cast<int>(tile.token_end - token < kTokens ? tile.token_end - token : kTokens);
    for (int first = 0; first < g.rotary_dim / 2; first += kPairs) {
      const int pairs = g.rotary_dim / 2 - first < kPairs ? g.rotary_dim / 2 - first : kPairs;
      read_box(g, tile.batch, token, tokens, first, pairs, f);
      const Members in = members(g.in_adjacent, first, pairs, g.rotary_dim);
      const Members out = members(g.out_adjacent, first, pairs, g.rotary_dim);
      const auto run = sizeof(T) * static_cast<std::size_t>(pairs);
      for (int t = 0; t < tokens; ++t) {
        T* emb = at(kv.emb, token + t);
        T* key = at(kv.key, token + t) + kv.k_dim;
        if (backward) {
          sum_heads(key + in.m0, kv.key.by_head, kv.heads, in.length, sum);
          sum_heads(key + in.m1, kv.key.by_head, kv.heads, in.length, sum + pairs);
          rotate_shared<float, T>(g, sum, sum + pairs, emb + out.m0, emb + out.m1, pairs, f, t);
          continue;
        }
        rotate_shared<T, T>(g, emb + in.m0, emb + in.m1, turned, turned + pairs, pairs, f, t);
        for (std::int64_t h = 0; h < kv.heads; ++h, key += kv.key.by_head) {
          Isa::template copy<Stream>(key + out.m0, turned, run);
          Isa::template copy<Stream>(key + out.m1, turned + pairs, run);
        }
      }
    }
    for (int t = 0; t < tokens; ++t) {
      T *both = at(kv.kv, token + t), *key = at(kv.key, token + t), *value = at(kv.value, token + t);
      for (std::int64_t h = 0; h < kv.heads; ++h) {
        Isa::template copy<Stream>(backward ? both : key, backward ? key : both, k_bytes);
        Isa::template copy<Stream>(backward ? both + kv.k_dim : value, backward ? value : both + kv.k_dim,
                                   v_bytes);
        both += kv.kv.by_head, key += kv.key.by_head, value += kv.value.by_head;
      }
    }
  }
  if (Stream) Isa::fence();
}

inline void split_any(const rlk::rotary::KvGeometry& g, const Tile& tile, bool backward) {
  switch (g.turn.type) {
    case rlk::rotary::Float::f32:
      return tile.stream ? split_tile<float, true>(g, tile, backward)
                         : split_tile<float, false>(g, tile, backward);
    case rlk::rotary::Float::bf16:
      return tile.stream ? split_tile<rlk::simt::bf16, true>(g, tile, backward)
                         : split_tile<rlk::simt::bf16, false>(g, tile, backward);
    default:
      return tile.stream ? split_tile<rlk::simt::fp16, true>(g, tile, backward)
                         : split_tile<rlk::simt::fp16, false>(g, tile, backward);
  }
}
