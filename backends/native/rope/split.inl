// The key-value split of latent attention; the second part of tile.inl.

// `first` and `pairs` name a stretch of the rotary dims, whose two members lie at m0 and
// m1 of the side named by `adjacent`.
struct Members {
  int m0, m1, length;  // two runs of `length` elements; one run of twice that, at m0, when adjacent
};
inline Members members(bool adjacent, int first, int pairs, int rotary_dim) {
  return adjacent ? Members{2 * first, 2 * first + pairs, pairs}
                  : Members{first, rotary_dim / 2 + first, pairs};
}

// At least one side is adjacent: that is what the peers' ops do.
template <class In, class T>
void rotate_shared(const rlk::rotary::Geometry& g, const In* x, const Members& in, T* y, const Members& out,
                   const Factors& f, int t) {
  const Run one{1, 0, 0, 0, {in.m0, in.m1}, {out.m0, out.m1}, 0, false};
  const auto turn = !g.in_adjacent   ? &rotate_run<In, T, false, true, false>
                    : g.out_adjacent ? &rotate_run<In, T, true, true, false>
                                     : &rotate_run<In, T, true, false, false>;
  turn(g, x, y, one, f, t);
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
  for (std::int64_t token = tile.token; token < tile.token_end; token += f.tokens) {
    for (int first = 0; first < g.rotary_dim / 2; first += kPairs) {
      read_box(g, tile.batch, token, tile.token_end, first, false, f);
      const int pairs = f.pairs;
      const Members in = members(g.in_adjacent, first, pairs, g.rotary_dim);
      const Members out = members(g.out_adjacent, first, pairs, g.rotary_dim);
      const auto run = sizeof(T) * static_cast<std::size_t>(pairs);
      for (int t = 0; t < f.tokens; ++t) {
        T* emb = at(kv.emb, token + t);
        T* key = at(kv.key, token + t) + kv.k_dim;
        if (backward) {
          sum_heads(key + in.m0, kv.key.by_head, kv.heads, in.length, sum);
          sum_heads(key + in.m1, kv.key.by_head, kv.heads, in.length, sum + pairs);
          rotate_shared<float, T>(g, sum, {0, pairs, pairs}, emb, out, f, t);
          continue;
        }
        rotate_shared<T, T>(g, emb, in, turned, {0, pairs, pairs}, f, t);
        for (std::int64_t h = 0; h < kv.heads; ++h, key += kv.key.by_head) {
          Isa::template copy<Stream>(key + out.m0, turned, run);
          Isa::template copy<Stream>(key + out.m1, turned + pairs, run);
        }
      }
    }
    for (int t = 0; t < f.tokens; ++t) {
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
    case rlk::Float::f32:
      return tile.stream ? split_tile<float, true>(g, tile, backward)
                         : split_tile<float, false>(g, tile, backward);
    case rlk::Float::bf16:
      return tile.stream ? split_tile<rlk::simt::bf16, true>(g, tile, backward)
                         : split_tile<rlk::simt::bf16, false>(g, tile, backward);
    default:
      return tile.stream ? split_tile<rlk::simt::fp16, true>(g, tile, backward)
                         : split_tile<rlk::simt::fp16, false>(g, tile, backward);
  }
}
