// Deliberate errors in kda_fwd by segments of 4096 tokens. Maps and joins are made here of calls by chunks, as the page says
// that anybody can, with a place for every error: a Way is right as it stands, and each mutant changes one of its functions.
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <utility>
#include <vector>

#include "break.hpp"

namespace rlk::mutants {
namespace {

using Floats = std::vector<float>;

struct Way {
  static int64_t length() { return 4096; }  // of a segment
  // What segments are counted from, in a sequence whose first row this is.
  static int64_t origin(int64_t begin) { return begin; }
  static int64_t mapped(int64_t rows) { return rows; }  // rows of a segment that are in its map
  static bool applies(int64_t /*sequences and heads*/) { return true; }
  static bool maps_first() { return false; }    // joins maps with maps before a state
  static bool goes_on() { return false; }       // a sequence from the last one's state
  static bool last_is_whole() { return true; }  // maps a segment that nothing is behind
  static float element(const float* t, const float* s, int64_t n, int64_t step, float u) {
    float x = 0;
    for (int64_t m = 0; m < n; ++m) x = std::fma(t[m], s[m * step], x);
    return x + u;
  }
};

// Rows [first, first + rows) of sequence b of [B, T, ..].
template <bool W>
Tensor rows_of(const View<W>& t, int64_t b, int64_t first, int64_t rows) {
  std::vector<int64_t> shape{1, rows}, strides{t.stride(0), t.stride(1)};
  for (int32_t i = 2; i < t.rank(); ++i) shape.push_back(t.dim(i)), strides.push_back(t.stride(i));
  const int64_t at = (b * t.stride(0) + first * t.stride(1)) * size_of(t.dtype());
  return {const_cast<char*>(t.template data<char>()) + at, shape, t.dtype(), {kDLCPU, 0}, strides};
}

// T and U of every value head.
struct Map {
  Floats t, u;
};

template <class W>
class Segments {
 public:
  explicit Segments(const KdaFwd& a)
      : a_(a),
        heads_(a.v.dim(2)),
        k_(a.q.dim(3)),
        v_(a.v.dim(3)),
        sequences_(a.cu_seqlens ? a.cu_seqlens.dim(0) - 1 : a.q.dim(0)) {}

  void run() {
    Floats state;
    for (int64_t n = 0; n < sequences_; ++n) {
      const bool packed = static_cast<bool>(a_.cu_seqlens);
      const int64_t begin = packed ? static_cast<int64_t>(get(a_.cu_seqlens, n)) : 0,
                    end = packed ? static_cast<int64_t>(get(a_.cu_seqlens, n + 1)) : a_.q.dim(1);
      if (n == 0 || !W::goes_on()) state = initial(n);
      state = sequence(packed ? 0 : n, begin, end, state);
      final(n, state);
    }
  }

 private:
  // Returns the state behind it.
  Floats sequence(int64_t b, int64_t begin, int64_t end, Floats state) {
    const int64_t origin = W::origin(begin);
    const bool applies = W::applies(sequences_ * heads_);
    Floats first = state;
    Map all;
    for (int64_t at = begin; at < end;) {
      const int64_t stop =
          applies ? std::min(end, origin + ((at - origin) / W::length() + 1) * W::length()) : end;
      Floats behind = chunks(b, at, stop - at, state, a_.v, a_.out);
      const bool whole = applies && stop - at == W::length() && (stop < end || W::last_is_whole());
      if (whole) {
        const Map map = map_of(b, at, W::mapped(stop - at));
        all = all.t.empty() || !W::maps_first()
                  ? map
                  : Map{joined(map.t, all.t, {}, k_), joined(map.t, all.u, map.u, v_)};
        behind = W::maps_first() ? joined(all.t, first, all.u, v_) : joined(map.t, state, map.u, v_);
      }
      state = std::move(behind);
      at = stop;
    }
    return state;
  }

  // By chunks from a state [HV, K, columns]; returns the state behind them.
  Floats chunks(int64_t b, int64_t first, int64_t rows, Floats& state, const In& values, const Out& out) {
    const int64_t columns = values.dim(3);
    Floats behind(static_cast<std::size_t>(heads_ * k_ * columns));
    const Tensor q = rows_of(a_.q, b, first, rows), k = rows_of(a_.k, b, first, rows),
                 v = rows_of(values, b, first, rows), g = rows_of(a_.g, b, first, rows),
                 beta = rows_of(a_.beta, b, first, rows), o = rows_of(out, b, first, rows),
                 from(state.data(), {1, heads_, k_, columns}, DType::f32),
                 to(behind.data(), {1, heads_, k_, columns}, DType::f32);
    KdaFwd c = a_;
    c.q = q, c.k = k, c.v = v, c.g = g, c.beta = beta, c.out = o, c.initial_state = from, c.final_state = to;
    c.cu_seqlens = {}, c.state_v_first = false;
    (void)honest(c, "native.fma32");
    return behind;
  }
  Map map_of(int64_t b, int64_t first, int64_t rows) {
    const int64_t tokens = a_.q.dim(1), batch = a_.q.dim(0);
    Floats zeros(static_cast<std::size_t>(heads_ * k_ * v_)),
        unit(static_cast<std::size_t>(heads_ * k_ * k_));
    for (int64_t n = 0; n < heads_ * k_; ++n) unit[static_cast<std::size_t>(n * k_ + n % k_)] = 1;
    const auto elements = static_cast<std::size_t>(batch * tokens * heads_ * std::max(k_, v_));
    std::vector<double> nothing(elements), lost(elements);
    const Tensor none(nothing.data(), {batch, tokens, heads_, k_}, a_.v.dtype()),
        of_t(lost.data(), {batch, tokens, heads_, k_}, a_.out.dtype()),
        of_u(lost.data(), {batch, tokens, heads_, v_}, a_.out.dtype());
    return {chunks(b, first, rows, unit, none, of_t), chunks(b, first, rows, zeros, a_.v, of_u)};
  }

  // T S + U of every head, S [K, columns]; no U: zeros.
  Floats joined(const Floats& t, const Floats& s, const Floats& u, int64_t columns) const {
    Floats out(s.size());
    for (int64_t h = 0; h < heads_; ++h)
      for (int64_t d = 0; d < k_; ++d)
        for (int64_t j = 0; j < columns; ++j) {
          const auto at = static_cast<std::size_t>((h * k_ + d) * columns + j);
          out[at] = W::element(&t[static_cast<std::size_t>((h * k_ + d) * k_)],
                               &s[static_cast<std::size_t>(h * k_ * columns + j)], k_, columns,
                               u.empty() ? 0 : u[at]);
        }
    return out;
  }

  // Place of [d, j] of a head's state in the caller's.
  int64_t place_of(int64_t n, int64_t h, int64_t d, int64_t j) const {
    return (n * heads_ + h) * k_ * v_ + (a_.state_v_first ? j * k_ + d : d * v_ + j);
  }
  template <class Each>
  void each(int64_t n, Each one) const {
    for (int64_t h = 0, i = 0; h < heads_; ++h)
      for (int64_t d = 0; d < k_; ++d)
        for (int64_t j = 0; j < v_; ++j) one(static_cast<std::size_t>(i++), place_of(n, h, d, j));
  }
  Floats initial(int64_t n) const {
    Floats state(static_cast<std::size_t>(heads_ * k_ * v_));
    if (a_.initial_state)
      each(n, [&](std::size_t i, int64_t at) { state[i] = static_cast<float>(get(a_.initial_state, at)); });
    return state;
  }
  void final(int64_t n, const Floats& state) const {
    if (a_.final_state)
      each(n, [&](std::size_t i, int64_t at) { put(a_.final_state, at, canonical(state[i])); });
  }

  const KdaFwd& a_;
  const int64_t heads_, k_, v_, sequences_;
};

// Checked and computed by native.seg4096; then once more where there is a segment to be wrong in.
template <class W>
rlk_code by_segments(const KdaFwd& a) {
  if (const rlk_code code = honest(a, "native.seg4096")) return code;
  const bool keeps = a.chunk_states || a.chunk_inverses || a.chunk_records;
  if (a.q.dim(1) >= 4096 && !keeps && a.q.numel() > 0 && a.v.numel() > 0) Segments<W>(a).run();
  return RLK_OK;
}

constexpr const char* kId = "fma32/kda/seg4096";
constexpr const char
    *kTwo = "b=1 t=8256 h=1 hv=1 k=16 v=16 fp32 gate=zero beta=0.004,0,0.01,0.002",
    *kPacked = "b=1 t=4200 h=1 hv=1 k=16 v=16 fp32 gate=zero v-first packed 2 beta=0.004,0,0.01,0.002",
    *kLater = "b=1 t=4304 h=1 hv=1 k=16 v=16 fp32 gate=zero packed 2 beta=0.004,0,0.01,0.002";

struct EarlyState : Way {
  static int64_t mapped(int64_t rows) { return rows - 1; }
};
struct Shorter : Way {
  static int64_t length() { return 4032; }
};
struct InsideChunks : Way {
  static int64_t length() { return 4100; }
};
struct MapsFirst : Way {
  static bool maps_first() { return true; }
};
struct JoinedBackwards : Way {
  static float element(const float* t, const float* s, int64_t n, int64_t step, float u) {
    float x = 0;
    for (int64_t m = n; m-- > 0;) x = std::fma(t[m], s[m * step], x);
    return x + u;
  }
};
struct JoinedFromU : Way {
  static float element(const float* t, const float* s, int64_t n, int64_t step, float u) {
    float x = u;
    for (int64_t m = 0; m < n; ++m) x = std::fma(t[m], s[m * step], x);
    return x;
  }
};
struct LastByChunks : Way {
  static bool last_is_whole() { return false; }
};
struct GoesOn : Way {
  static bool goes_on() { return true; }
};
struct OfBatch : Way {
  static int64_t origin(int64_t) { return 0; }
};
struct IfFew : Way {
  static bool applies(int64_t chains) { return chains < 2; }
};

template <class W>
constexpr Entry changed(const char* id, const char* where, const char* error) {
  return alone<KdaFwd>([](const KdaFwd& a, const Call&) { return by_segments<W>(a); }, id, kId, "equal bits",
                       error, where, RLK_F32);
}

constinit const Entry kEntries[] = {
    changed<EarlyState>("mutant.kda_early_segment", kPacked,
                        "begins a segment at the state before the last row of the one before"),
    changed<Shorter>("mutant.kda_short_segments", kPacked, "cuts segments of 63 chunks"),
    changed<InsideChunks>("mutant.kda_uneven_segments", kTwo, "cuts segments inside a chunk"),
    changed<MapsFirst>("mutant.kda_maps_first", kTwo,
                       "joins the maps of segments before it takes a state through them"),
    changed<JoinedBackwards>("mutant.kda_join_backwards", kPacked,
                             "adds the products of a join from the last to the first"),
    changed<JoinedFromU>("mutant.kda_join_from_u", kPacked, "begins the sum of a join at U"),
    changed<LastByChunks>("mutant.kda_last_by_chunks", kPacked,
                          "takes the chunks' own state behind a sequence of whole segments"),
    changed<GoesOn>("mutant.kda_goes_on", kPacked,
                    "begins the second of packed sequences at the first one's state"),
    changed<OfBatch>("mutant.kda_segments_of_batch", kLater,
                     "counts segments from the first row of the call"),
    changed<IfFew>("mutant.kda_segments_if_few", kPacked,
                   "has segments only where there are fewer than two sequences and heads"),
};

// The segments as they are made here: what is caught above is the change.
constinit const Entry kControls[] = {[] {
  Entry e = alone<KdaFwd>([](const KdaFwd& a, const Call&) { return by_segments<Way>(a); },
                          "mutant.control_segments", kId, "", "", "", RLK_F32);
  e.implementation.doc = "a control";
  return e;
}()};

}  // namespace

Broken segments() { return {kEntries, kControls}; }

}  // namespace rlk::mutants
