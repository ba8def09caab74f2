// wgmma as the KDA recurrences use it: D[64 x N] (+)= A[64 x 16] B[16 x N], A and D in registers as mma
// fragments of 16 rows a warp, B 16 steps of a `rows` tile with 64 rows in shared memory. The bits are those
// of mma.sync. What `d` and `a` hold is wgmma's until the wait.
#pragma once

#include "kda_sm90_device.cuh"

namespace rlk::cuda::kda90 {

#define RLK_D32                                                           \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19" \
  ",%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define RLK_D64                                                                      \
  RLK_D32                                                                            \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51" \
  ",%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define RLK_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define RLK_16(i) RLK_4(i), RLK_4(i + 4), RLK_4(i + 8), RLK_4(i + 12)
#define RLK_IO32 RLK_16(0), RLK_16(16)
#define RLK_IO64 RLK_IO32, RLK_16(32), RLK_16(48)
#define RLK_MULTIPLY(width, count, operand, b, more, turned)                                        \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " more                                                \
               ", 0;\n"                                                                             \
               "wgmma.mma_async.sync.aligned.m64n" width "k16.f32.bf16.bf16 {" RLK_D##count         \
               "}, {" operand "}, " b ", p, 1, 1, " turned ";}"                                     \
               : RLK_IO##count                                                                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tile), "r"(static_cast<int>(add)), \
                 "n"(Turned ? 1 : 0))

template <bool Turned, int Size>
__device__ inline void multiply(float (&d)[Size], const std::uint32_t (&a)[4], std::uint64_t tile, bool add) {
  static_assert(Size == 32 || Size == 64);
  if constexpr (Size == 32) {
    RLK_MULTIPLY("64", 32, "%32,%33,%34,%35", "%36", "%37", "%38");
  } else {
    RLK_MULTIPLY("128", 64, "%64,%65,%66,%67", "%68", "%69", "%70");
  }
}

#undef RLK_MULTIPLY
#undef RLK_IO64
#undef RLK_IO32
#undef RLK_16
#undef RLK_4
#undef RLK_D64
#undef RLK_D32

// The tile's descriptor, shared memory counted in 16 bytes: rows of 128 bytes, their pieces permuted in
// groups of 8 rows; `panels`: 64 rows further the columns go on.
__device__ inline std::uint64_t tile_at(std::uint32_t address, int panels) {
  return std::uint64_t{1024 / 16 | 1u << 30} << 32 | (address >> 4 | panels << 16);
}
// d (+)= a tile[64 rows][16 columns at step ks]^T: the tile's rows are the result's columns.
template <int Size>
__device__ inline void times_rows(float (&d)[Size], const std::uint32_t (&a)[4], std::uint32_t tile, int ks,
                                  bool add = true) {
  multiply<false>(d, a, tile_at(tile + ks / 4 * 8192 + ks % 4 * 32, 1), add);
}
// d (+)= a tile[16 rows at step ks][columns].
template <int Size>
__device__ inline void times_columns(float (&d)[Size], const std::uint32_t (&a)[4], std::uint32_t tile,
                                     int ks, bool add = true) {
  multiply<true>(d, a, tile_at(tile + ks * 2048, 8192 / 16), add);
}

}  // namespace rlk::cuda::kda90
