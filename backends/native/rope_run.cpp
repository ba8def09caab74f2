#include "rope_run.hpp"

#include <algorithm>

#include "../simt/rope_math.hpp"

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

// Non-temporal stores need whole aligned vectors, and pay once the result would sweep the caches anyway.
constexpr std::int64_t kStreamBytes = std::int64_t{16} << 20;
constexpr std::int64_t kTileBytes = std::int64_t{128} << 10;

bool may_stream(const rlk::rotary::Geometry& g, std::int64_t bytes) {
  const std::int64_t size = g.bytes_per_element();
  if (bytes < kStreamBytes || g.in_place) return false;
  std::int64_t all = g.offset * size | g.rotary_dim / 2 * size;
  for (int i = 0; i < g.parts; ++i) {
    const auto& p = g.part[i];
    all |= static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(p.y)) | p.y_batch * size |
           p.y_token * size | p.y_head * size;
  }
  return all % 64 == 0;
}

}  // namespace

Isa best_isa() {
#if defined(__x86_64__)
  static const Isa isa = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
      return Isa::avx512;
    }
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")
               ? Isa::avx2
               : Isa::scalar;
  }();
  return isa;
#else
  return Isa::scalar;
#endif
}

namespace {

TilePlan cut(const rlk::rotary::Geometry& g, std::int64_t token_bytes, Isa isa) {
  TilePlan p;
  p.tile = isa == Isa::avx512 ? &tile_avx512 : isa == Isa::avx2 ? &tile_avx2 : &tile_scalar;
  p.kv_tile = isa == Isa::avx512 ? &kv_tile_avx512 : isa == Isa::avx2 ? &kv_tile_avx2 : &kv_tile_scalar;
  p.tokens_per_tile = std::clamp<std::int64_t>(kTileBytes / std::max<std::int64_t>(1, token_bytes), 1, 256);
  p.tiles_per_batch = (g.tokens + p.tokens_per_tile - 1) / p.tokens_per_tile;
  p.tiles = g.batch * p.tiles_per_batch;
  return p;
}

Tile tile_at(const rlk::rotary::Geometry& g, const TilePlan& p, std::int64_t index) {
  Tile tile;
  tile.batch = index / p.tiles_per_batch;
  tile.token = index % p.tiles_per_batch * p.tokens_per_tile;
  tile.token_end = std::min(g.tokens, tile.token + p.tokens_per_tile);
  tile.stream = p.stream;
  return tile;
}

}  // namespace

TilePlan plan(const rlk::rotary::Geometry& g, Isa isa) {
  const std::int64_t heads = g.part[0].heads + g.part[1].heads;
  const std::int64_t token_bytes = heads * g.head_dim * g.bytes_per_element();
  TilePlan p = cut(g, token_bytes, isa);
  if (heads == 0) p.tiles = 0;
  p.stream = may_stream(g, g.batch * g.tokens * token_bytes);
  return p;
}

void run_tile(const rlk::rotary::Geometry& g, const TilePlan& p, std::int64_t index) {
  const DefaultFloatMode mode;
  p.tile(g, tile_at(g, p, index));
}

TilePlan plan(const rlk::rotary::KvGeometry& g, Isa isa) {
  const std::int64_t row = g.k_dim + g.v_dim + g.turn.rotary_dim;
  const std::int64_t token_bytes = g.heads * row * g.turn.bytes_per_element();
  TilePlan p = cut(g.turn, token_bytes, isa);
  if (g.heads == 0) p.tiles = 0;
  p.stream = g.turn.batch * g.turn.tokens * token_bytes >= kStreamBytes;
  return p;
}

void run_tile(const rlk::rotary::KvGeometry& g, bool backward, const TilePlan& p, std::int64_t index) {
  const DefaultFloatMode mode;
  p.kv_tile(g, tile_at(g.turn, p, index), backward);
}

std::string check_rows(const char* op, const rlk::rotary::Geometry& g) {
  using rlk::rotary::detail::say;
  const auto& rows = g.rows;
  if (rows.positions.data == nullptr && rows.starts.data == nullptr && rows.cu_seqlens.data == nullptr)
    return {};
  std::int64_t before = 0;
  for (std::int64_t i = 0; rows.cu_seqlens.data != nullptr && i <= rows.sequences; ++i) {
    const std::int64_t at = simt::integer_at(rows.cu_seqlens, i * rows.cu_stride);
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
        const std::int64_t row = simt::row_of(rows, g.tokens, b, t, axis);
        if (row < 0 || row >= rows.count) {
          return say("%s: token %lld of batch %lld is at position %lld, cos has %lld rows", op,
                     static_cast<long long>(t), static_cast<long long>(b), static_cast<long long>(row),
                     static_cast<long long>(rows.count));
        }
      }
    }
  }
  return {};
}

}  // namespace rlk::native::rope
