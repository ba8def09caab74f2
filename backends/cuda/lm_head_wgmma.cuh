// The wgmma instruction at the widths the lm_head kernels use: D[64 x N] += A[64 x 16] * B[N x 16]^T, both
// operands from shared memory through matrix descriptors, D in registers. TransA / TransB say that the
// operand is row-contiguous ("MN-major") in shared memory. Inline assembly has to spell out its registers,
// which is what the macros do.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace rlk::cuda::hopper {

template <class T, int N, bool TransA, bool TransB>
struct Wgmma;

#define RLK_NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define RLK_NAMES_32 RLK_NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define RLK_NAMES_64                                                 \
  RLK_NAMES_32                                                       \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" \
  ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define RLK_NAMES_128                                                            \
  RLK_NAMES_64                                                                   \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"             \
  ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"             \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
  ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define RLK_FLOATS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define RLK_FLOATS_16(i) RLK_FLOATS_4(i), RLK_FLOATS_4(i + 4), RLK_FLOATS_4(i + 8), RLK_FLOATS_4(i + 12)
#define RLK_FLOATS_32(i) RLK_FLOATS_16(i), RLK_FLOATS_16(i + 16)
#define RLK_FLOATS_64(i) RLK_FLOATS_32(i), RLK_FLOATS_32(i + 32)
#define RLK_FLOATS_128(i) RLK_FLOATS_64(i), RLK_FLOATS_64(i + 64)

// The names after the registers: the descriptors, `accumulate`, whether each operand is transposed.
#define RLK_WGMMA_AS(width, count, type, a_name, b_name, accumulate_name, trans_names)           \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " accumulate_name                                  \
               ", 0;\n"                                                                          \
               "wgmma.mma_async.sync.aligned.m64n" #width "k16.f32." type " {" RLK_NAMES_##count \
               "}, " a_name ", " b_name ", p, 1, 1, " trans_names ";}"                           \
               : RLK_FLOATS_##count(0)                                                           \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(TransA ? 1 : 0),         \
                 "n"(TransB ? 1 : 0))

#define RLK_WGMMA(width, count, ...)                                                                \
  template <class T, bool TransA, bool TransB>                                                      \
  struct Wgmma<T, width, TransA, TransB> {                                                          \
    __device__ static __forceinline__ void run(float (&d)[count], std::uint64_t a, std::uint64_t b, \
                                               bool accumulate) {                                   \
      if constexpr (std::is_same_v<T, __half>)                                                      \
        RLK_WGMMA_AS(width, count, "f16.f16", __VA_ARGS__);                                         \
      else                                                                                          \
        RLK_WGMMA_AS(width, count, "bf16.bf16", __VA_ARGS__);                                       \
    }                                                                                               \
  };

RLK_WGMMA(32, 16, "%16", "%17", "%18", "%19, %20")
RLK_WGMMA(64, 32, "%32", "%33", "%34", "%35, %36")
RLK_WGMMA(128, 64, "%64", "%65", "%66", "%67, %68")
RLK_WGMMA(256, 128, "%128", "%129", "%130", "%131, %132")

#undef RLK_WGMMA
#undef RLK_WGMMA_AS
#undef RLK_FLOATS_128
#undef RLK_FLOATS_64
#undef RLK_FLOATS_32
#undef RLK_FLOATS_16
#undef RLK_FLOATS_4
#undef RLK_NAMES_128
#undef RLK_NAMES_64
#undef RLK_NAMES_32
#undef RLK_NAMES_16

}  // namespace rlk::cuda::hopper
