// Body of every rope tile kernel. Included once per instruction set, after `Isa` is defined, inside an
// anonymous namespace: nothing here may be shared between translation units that are compiled for different
// processors.
//
// Isa gives: V (vector of floats), kWidth, load(const T*), store<Stream>(T*, V), load_pairs(const T*, even,
// odd), store_pairs<Stream>(T*, even, odd), add, mul, fma, copy<Stream>(to, from, bytes), fence().

// Factors of the pairs of some tokens, converted and signed once, used by every head of a tile.
struct Factors {
  int pairs = 0, stride = 0, tokens = 0;  // pairs of a token held, entries between tokens, tokens held
  bool full = false;
  alignas(64) float c1[kFactors], m1[kFactors], c2[kFactors], m2[kFactors];

  const float* second() const { return full ? c2 : c1; }
};

inline void read_factors(const rlk::rotary::Geometry& g, std::int64_t batch, std::int64_t token, int first,
                         int pairs, float* c1, float* m1, float* c2, float* m2) {
  using namespace rlk::rotary;
  const rlk::rotary::Table& t = g.table;
  const std::int64_t cos0 = batch * t.cos_batch, sin0 = batch * t.sin_batch;
  std::int64_t row = row_of(g.rows, g.tokens, batch, token);
  for (int i = 0; i < pairs; ++i) {
    const int p = first + i;
    if (g.rows.axes > 1) row = row_of(g.rows, g.tokens, batch, token, axis_of(g.rows, p));
    if (row < 0) {  // allowed, or check_rows would have said so
      const Turn still = no_turn(g.transpose);
      c1[i] = still.c1, m1[i] = still.m1, c2[i] = still.c2, m2[i] = still.m2;
      continue;
    }
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
  const std::int64_t row = rlk::rotary::row_of(g.rows, g.tokens, batch, token);
  if (row < 0) {
    const rlk::rotary::Turn still = rlk::rotary::no_turn(g.transpose);
    for (int i = 0; i < pairs; ++i) c1[i] = still.c1, m1[i] = still.m1, m2[i] = still.m2;
    return;
  }
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

// Every 2W factors in the order in which Isa::load_pairs gives 2W elements.
inline void split_pairs(float* f, int pairs) {
  constexpr int W = Isa::kWidth;
  for (int i = 0; i + 2 * W <= pairs; i += 2 * W) {
    Isa::V even, odd;
    Isa::load_pairs(f + i, even, odd);
    Isa::template store<false>(f + i, even);
    Isa::template store<false>(f + i + W, odd);
  }
}

inline void read_box(const rlk::rotary::Geometry& g, std::int64_t batch, std::int64_t token,
                     std::int64_t token_end, int first, bool split, Factors& f) {
  const bool plain = g.table.type == rlk::Float::f32 && !g.table.full && g.rows.axes == 1;
  const int all = g.rotary_dim / 2;
  f.pairs = all - first < kPairs ? all - first : kPairs;
  f.stride = factor_stride(all);
  const std::int64_t room = kFactors / f.stride;
  f.tokens = static_cast<int>(token_end - token < room ? token_end - token : room);
  f.full = g.table.full;
  for (int t = 0; t < f.tokens; ++t) {
    float *c1 = f.c1 + t * f.stride, *m1 = f.m1 + t * f.stride, *c2 = f.c2 + t * f.stride,
          *m2 = f.m2 + t * f.stride;
    if (plain) {
      read_factors_plain(g, batch, token + t, first, f.pairs, c1, m1, m2);
    } else {
      read_factors(g, batch, token + t, first, f.pairs, c1, m1, c2, m2);
    }
    if (split) {
      for (float* factors : {c1, m1, m2}) split_pairs(factors, f.pairs);
      if (f.full) split_pairs(c2, f.pairs);
    }
  }
}

// 16-bit rows that are halves on both sides are read two vectors at a time, as even and odd elements: their
// factors lie split.
template <class In, class T, bool InAdjacent, bool OutAdjacent>
constexpr bool kSplit = Isa::kWidth > 1 && !InAdjacent && !OutAdjacent &&
                        std::is_same_v<In, rlk::simt::bf16> && std::is_same_v<T, rlk::simt::bf16>;

// Rows that are turned one after the other: the heads of a token, or the tokens of a head. `in` and `out` are
// the places of a row's first and second members (half) or of its first pair (adjacent, [1] unused).
struct Run {
  std::int64_t rows, x_step, y_step;
  std::int64_t next;  // from the start of this run to that of the next one
  int in[2], out[2];
  int factor_step;  // from a row's factors to the next one's
  bool pass;        // copy the dims that do not turn
};

// Rows that are fetched ahead, across the start of the next run: the processor's own prefetcher stops at a
// page and loses its way at every jump.
constexpr int kAhead = 4;

template <class T>
inline void prefetch(const T* p, int count) {
  constexpr int kLine = 64 / sizeof(T);
  for (int i = 0; i < count; i += kLine) __builtin_prefetch(p + i);
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

template <class In, class T, bool InAdjacent, bool OutAdjacent, bool Stream>
inline void rotate_run(const rlk::rotary::Geometry& g, const In* x, T* y, const Run& run, const Factors& f,
                       int t) {
  using V = Isa::V;
  constexpr int W = Isa::kWidth;
  const int pairs = f.pairs;
  const float *c1 = f.c1 + t * f.stride, *m1 = f.m1 + t * f.stride, *c2 = f.second() + t * f.stride,
              *m2 = f.m2 + t * f.stride;
  const auto turn = [&](int i, V a, V b, V& ya, V& yb) {
    ya = Isa::fma(a, Isa::load(c1 + i), Isa::mul(b, Isa::load(m1 + i)));
    yb = Isa::fma(b, Isa::load(c2 + i), Isa::mul(a, Isa::load(m2 + i)));
  };
  const int step = run.factor_step;
  const std::int64_t x_step = run.x_step, y_step = run.y_step, to_next = run.next - run.rows * run.x_step;
  const bool pass = run.pass;
  const In *x0 = x + run.in[0], *x1 = x + run.in[1];
  T *y0 = y + run.out[0], *y1 = y + run.out[1];
  for (std::int64_t row = run.rows; row > 0; --row) {
    if constexpr (std::is_same_v<In, T>) {
      if (pass) pass_through<T, Stream>(g, x0 - run.in[0], y0 - run.out[0]);
    }
    prefetch(x0 + kAhead * x_step + (row > kAhead ? 0 : to_next), 2 * pairs);
    int i = 0;
    if constexpr (kSplit<In, T, InAdjacent, OutAdjacent>) {
      for (; i + 2 * W <= pairs; i += 2 * W) {
        V a[2], b[2], ya[2], yb[2];
        Isa::load_pairs(x0 + i, a[0], a[1]);
        Isa::load_pairs(x1 + i, b[0], b[1]);
        turn(i, a[0], b[0], ya[0], yb[0]);
        turn(i + W, a[1], b[1], ya[1], yb[1]);
        Isa::template store_pairs<Stream>(y0 + i, ya[0], ya[1]);
        Isa::template store_pairs<Stream>(y1 + i, yb[0], yb[1]);
      }
    }
    for (; i + W <= pairs; i += W) {
      V a, b, ya, yb;
      if constexpr (InAdjacent) {
        Isa::load_pairs(x0 + 2 * i, a, b);
      } else {
        a = Isa::load(x0 + i), b = Isa::load(x1 + i);
      }
      turn(i, a, b, ya, yb);
      if constexpr (OutAdjacent) {
        Isa::template store_pairs<Stream>(y0 + 2 * i, ya, yb);
      } else {
        Isa::template store<Stream>(y0 + i, ya);
        Isa::template store<Stream>(y1 + i, yb);
      }
    }
    for (; i < pairs; ++i) {
      const float a = rlk::simt::to_float(InAdjacent ? x0[2 * i] : x0[i]);
      const float b = rlk::simt::to_float(InAdjacent ? x0[2 * i + 1] : x1[i]);
      float ya, yb;
      rlk::rotary::rotate({c1[i], m1[i], c2[i], m2[i]}, a, b, ya, yb);
      (OutAdjacent ? y0[2 * i] : y0[i]) = rlk::simt::from_float<T>(ya);
      (OutAdjacent ? y0[2 * i + 1] : y1[i]) = rlk::simt::from_float<T>(yb);
    }
    x0 += x_step, x1 += x_step, y0 += y_step, y1 += y_step;
    c1 += step, m1 += step, c2 += step, m2 += step;
  }
}

template <class T, bool InAdjacent, bool OutAdjacent, bool Stream>
void rotate_box(const rlk::rotary::Geometry& g, const Tile& tile, std::int64_t token, int first,
                const Factors& f) {
  const int second = g.offset + g.rotary_dim / 2 + first;
  Run run;
  run.in[0] = g.offset + (InAdjacent ? 2 * first : first), run.in[1] = second;
  run.out[0] = g.offset + (OutAdjacent ? 2 * first : first), run.out[1] = second;
  run.pass = first == 0 && !g.in_place && g.rotary_dim < g.head_dim;
  std::int64_t before = 0;  // heads of earlier parts
  for (int which = 0; which < g.parts; ++which) {
    const rlk::rotary::Part& part = g.part[which];
    const std::int64_t begin = tile.head > before ? tile.head - before : 0;
    const std::int64_t end = tile.head_end - before < part.heads ? tile.head_end - before : part.heads;
    before += part.heads;
    if (begin >= end) continue;
    const T* x = static_cast<const T*>(part.x) + tile.batch * part.x_batch + token * part.x_token +
                 begin * part.x_head;
    T* y = static_cast<T*>(part.y) + tile.batch * part.y_batch + token * part.y_token + begin * part.y_head;
    if (heads_are_far(part)) {
      run.rows = f.tokens, run.x_step = part.x_token, run.y_step = part.y_token, run.factor_step = f.stride;
      run.next = part.x_head;
      for (std::int64_t head = begin; head < end; ++head, x += part.x_head, y += part.y_head)
        rotate_run<T, T, InAdjacent, OutAdjacent, Stream>(g, x, y, run, f, 0);
    } else {
      run.rows = end - begin, run.x_step = part.x_head, run.y_step = part.y_head, run.factor_step = 0;
      run.next = part.x_token;
      for (int t = 0; t < f.tokens; ++t, x += part.x_token, y += part.y_token)
        rotate_run<T, T, InAdjacent, OutAdjacent, Stream>(g, x, y, run, f, t);
    }
  }
}

template <class T, bool InAdjacent, bool OutAdjacent, bool Stream>
void rotate_tile(const rlk::rotary::Geometry& g, const Tile& tile) {
  Factors f;
  for (std::int64_t token = tile.token; token < tile.token_end; token += f.tokens) {
    for (int first = 0; first < g.rotary_dim / 2; first += kPairs) {
      read_box(g, tile.batch, token, tile.token_end, first, kSplit<T, T, InAdjacent, OutAdjacent>, f);
      rotate_box<T, InAdjacent, OutAdjacent, Stream>(g, tile, token, first, f);
    }
  }
  if (Stream) Isa::fence();
}

template <class T, bool Stream>
void rotate_as(const rlk::rotary::Geometry& g, const Tile& tile) {
  const auto run =
      g.in_adjacent
          ? (g.out_adjacent ? &rotate_tile<T, true, true, Stream> : &rotate_tile<T, true, false, Stream>)
      : g.out_adjacent ? &rotate_tile<T, false, true, Stream>
                       : &rotate_tile<T, false, false, Stream>;
  run(g, tile);
}

inline void rotate_any(const rlk::rotary::Geometry& g, const Tile& tile) {
  switch (g.type) {
    case rlk::Float::f32:
      return tile.stream ? rotate_as<float, true>(g, tile) : rotate_as<float, false>(g, tile);
    case rlk::Float::bf16:
      return tile.stream ? rotate_as<rlk::simt::bf16, true>(g, tile)
                         : rotate_as<rlk::simt::bf16, false>(g, tile);
    default:
      return tile.stream ? rotate_as<rlk::simt::fp16, true>(g, tile)
                         : rotate_as<rlk::simt::fp16, false>(g, tile);
  }
}

#include "native/rope/split.inl"
