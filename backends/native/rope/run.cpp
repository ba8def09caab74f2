#include "native/rope/run.hpp"

#include <algorithm>

#include "arithmetic/rope/math.hpp"

#if defined(__x86_64__)
#  include <immintrin.h>
#endif

namespace rlk::native::rope {
namespace {

// Results must not depend on a caller's flush-to-zero or rounding mode.
class DefaultFloatMode {
 public:
#if defined(__x86_64__)
  DefaultFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultFloatMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#endif
};

// Non-temporal stores pay once the result would sweep the caches anyway.
constexpr std::int64_t kStreamBytes = std::int64_t{16} << 20;
constexpr std::int64_t kTileBytes = std::int64_t{128} << 10;

bool streams(Stores stores, std::int64_t bytes) {
  return stores == Stores::streamed || (stores == Stores::by_size && bytes >= kStreamBytes);
}

// They need whole aligned vectors.
bool aligned(const rlk::rotary::Geometry& g) {
  const std::int64_t size = g.bytes_per_element();
  std::int64_t all = g.offset * size | g.rotary_dim / 2 * size;
  for (int i = 0; i < g.parts; ++i) {
    const auto& p = g.part[i];
    all |= static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(p.y)) | p.y_batch * size |
           p.y_token * size | p.y_head * size;
  }
  return all % 64 == 0;
}

const Kernels* kernels_for(Isa isa) {
  return isa == Isa::avx512 ? &kAvx512 : isa == Isa::avx2 ? &kAvx2 : &kScalar;
}

std::int64_t pieces(std::int64_t whole, std::int64_t piece) { return (whole + piece - 1) / piece; }

void count_tiles(const rlk::rotary::Geometry& g, TilePlan& p) {
  p.tiles_per_batch = pieces(g.tokens, p.tokens_per_tile) * p.head_tiles;
  p.tiles = p.heads == 0 ? 0 : g.batch * p.tiles_per_batch;
}

Tile tile_at(const rlk::rotary::Geometry& g, const TilePlan& p, std::int64_t index) {
  Tile tile;
  tile.batch = index / p.tiles_per_batch;
  const std::int64_t rest = index % p.tiles_per_batch;
  tile.token = rest / p.head_tiles * p.tokens_per_tile;
  tile.token_end = std::min(g.tokens, tile.token + p.tokens_per_tile);
  tile.head = rest % p.head_tiles * p.heads_per_tile;
  tile.head_end = std::min(p.heads, tile.head + p.heads_per_tile);
  tile.stream = p.stream;
  return tile;
}

}  // namespace

// A tile stays where memory runs on: some tokens of every head, or, where each head's tokens lie together, as
// many tokens as factors are held for and some of the heads.
TilePlan plan(const rlk::rotary::Geometry& g, Isa isa, Stores stores) {
  TilePlan p;
  p.kernels = kernels_for(isa);
  p.heads = p.heads_per_tile = g.part[0].heads + g.part[1].heads;
  const std::int64_t row_bytes = std::max<std::int64_t>(1, g.head_dim * g.bytes_per_element());
  const std::int64_t rows = std::max<std::int64_t>(1, kTileBytes / row_bytes);
  if (p.heads > 0 && heads_are_far(g.part[0])) {
    p.tokens_per_tile = std::clamp<std::int64_t>(g.tokens, 1, kFactors / factor_stride(g.rotary_dim / 2));
    p.heads_per_tile = std::clamp<std::int64_t>(rows / p.tokens_per_tile, 1, p.heads);
    p.head_tiles = pieces(p.heads, p.heads_per_tile);
  } else {
    p.tokens_per_tile = std::clamp<std::int64_t>(rows / std::max<std::int64_t>(1, p.heads), 1, 256);
  }
  count_tiles(g, p);
  p.stream = !g.in_place && aligned(g) && streams(stores, g.batch * g.tokens * p.heads * row_bytes);
  return p;
}

void run_tile(const rlk::rotary::Geometry& g, const TilePlan& p, std::int64_t index) {
  const DefaultFloatMode mode;
  p.kernels->tile(g, tile_at(g, p, index));
}

TilePlan plan(const rlk::rotary::KvGeometry& g, Isa isa, Stores stores) {
  TilePlan p;
  p.kernels = kernels_for(isa);
  p.heads = p.heads_per_tile = g.heads;
  const std::int64_t row = g.k_dim + g.v_dim + g.turn.rotary_dim;
  const std::int64_t token_bytes = std::max<std::int64_t>(1, g.heads * row * g.turn.bytes_per_element());
  p.tokens_per_tile = std::clamp<std::int64_t>(kTileBytes / token_bytes, 1, 256);
  count_tiles(g.turn, p);
  p.stream = streams(stores, g.turn.batch * g.turn.tokens * token_bytes);
  return p;
}

void run_tile(const rlk::rotary::KvGeometry& g, bool backward, const TilePlan& p, std::int64_t index) {
  const DefaultFloatMode mode;
  p.kernels->kv_tile(g, tile_at(g.turn, p, index), backward);
}

std::string check_rows(const char* op, const rlk::rotary::Geometry& g) {
  using rlk::rotary::detail::say;
  const auto& rows = g.rows;
  if (rows.positions.data == nullptr && rows.starts.data == nullptr && rows.cu_seqlens.data == nullptr)
    return {};
  std::int64_t before = 0;
  for (std::int64_t i = 0; rows.cu_seqlens.data != nullptr && i <= rows.sequences; ++i) {
    const std::int64_t at = rotary::integer_at(rows.cu_seqlens, i * rows.cu_stride);
    if (at < before) {
      return say("%s: cu_seqlens[%lld] = %lld is below its predecessor %lld", op, static_cast<long long>(i),
                 static_cast<long long>(at), static_cast<long long>(before));
    }
    if (at % (rows.cp_size > 1 ? 2 * rows.cp_size : 1) != 0) {
      return say("%s: cu_seqlens[%lld] = %lld is not a multiple of 2 * cp_size = %lld", op,
                 static_cast<long long>(i), static_cast<long long>(at),
                 static_cast<long long>(2 * rows.cp_size));
    }
    if (at / rows.cp_size > g.tokens) {
      return say("%s: cu_seqlens[%lld] = %lld, x has %lld tokens", op, static_cast<long long>(i),
                 static_cast<long long>(at), static_cast<long long>(g.tokens));
    }
    before = at;
  }
  for (std::int64_t b = 0; b < g.batch; ++b) {
    for (std::int64_t t = 0; t < g.tokens; ++t) {
      for (int axis = 0; axis < rows.axes; ++axis) {
        const std::int64_t row = rotary::row_of(rows, g.tokens, b, t, axis);
        if (row < 0 ? !rows.negative_stay : row >= rows.count) {
          return say("%s: token %lld of batch %lld is at position %lld, cos has %lld rows%s", op,
                     static_cast<long long>(t), static_cast<long long>(b), static_cast<long long>(row),
                     static_cast<long long>(rows.count),
                     row < 0 ? "; padding may stay as it is with negative=unrotated" : "");
        }
      }
    }
  }
  return {};
}

}  // namespace rlk::native::rope
