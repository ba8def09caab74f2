// wgmma, a warpgroup's asynchronous tensor-core products: D[64 x N] (+)= A[64 x 16] B[16 x N] with D in
// registers, B in shared memory through a matrix descriptor, A likewise or in registers as mma fragments of
// 16 rows a warp. The bits are those of mma.sync.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace rlk::cuda::hopper {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int Left>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Left) : "memory");
}

// Until wgmma_wait the accumulators belong to the tensor cores; unless told so for each, the compiler moves
// what uses them ahead of the wait, and then waits after every single instruction instead.
template <int Size>
__device__ __forceinline__ void wgmma_fence_operand(float (&d)[Size]) {
#pragma unroll
  for (int i = 0; i < Size; ++i) asm volatile("" : "+f"(d[i]));
}

enum class Swizzle : std::uint32_t { none = 0, bytes128 = 1, bytes64 = 2, bytes32 = 3 };

// How wgmma finds an operand in shared memory: where it starts, and how far apart its 8 x 8 cores lie in the
// two directions, all in 16 bytes. `start` has 14 bits.
struct Descriptor {
  std::uint32_t low, high;

  __device__ __forceinline__ Descriptor(std::uint32_t start, std::uint32_t leading, std::uint32_t stride,
                                        Swizzle swizzle)
      : low(start | leading << 16), high(stride | static_cast<std::uint32_t>(swizzle) << 30) {}
  // `steps` times 16 bytes further on.
  __device__ __forceinline__ std::uint64_t at(std::uint32_t steps) const {
    return std::uint64_t{high} << 32 | (low + steps);
  }
};

// Inline assembly has to spell out its registers, which is what the macros do: the numbers of 16, 32, 48,
// 64 or 128 accumulators, and the accumulators themselves.
#define RLK_NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define RLK_NAMES_32 RLK_NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define RLK_NAMES_48 RLK_NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
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
#define RLK_FLOATS_48(i) RLK_FLOATS_32(i), RLK_FLOATS_16(i + 32)
#define RLK_FLOATS_64(i) RLK_FLOATS_32(i), RLK_FLOATS_32(i + 32)
#define RLK_FLOATS_128(i) RLK_FLOATS_64(i), RLK_FLOATS_64(i + 64)

// `a_name` .. `trans_names`: the numbers of the operands behind the accumulators, which `...` lists: A, B,
// whether to accumulate, whether each operand in shared memory is transposed.
#define RLK_WGMMA(width, count, type, a_name, b_name, accumulate_name, trans_names, ...)         \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " accumulate_name                                  \
               ", 0;\n"                                                                          \
               "wgmma.mma_async.sync.aligned.m64n" #width "k16.f32." type " {" RLK_NAMES_##count \
               "}, " a_name ", " b_name ", p, 1, 1, " trans_names ";}"                           \
               : RLK_FLOATS_##count(0)                                                           \
               : __VA_ARGS__)

#define RLK_WGMMA_SHARED(width, count, ...)                                                                \
  do {                                                                                                     \
    if constexpr (std::is_same_v<T, __half>)                                                               \
      RLK_WGMMA(width, count, "f16.f16", __VA_ARGS__, "l"(a), "l"(b), "r"(static_cast<int>(accumulate)),   \
                "n"(TransA ? 1 : 0), "n"(TransB ? 1 : 0));                                                 \
    else                                                                                                   \
      RLK_WGMMA(width, count, "bf16.bf16", __VA_ARGS__, "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), \
                "n"(TransA ? 1 : 0), "n"(TransB ? 1 : 0));                                                 \
  } while (false)

// Both operands of type T from shared memory. Trans: the operand is row-contiguous ("MN-major") there.
template <class T, bool TransA, bool TransB, int Size>
__device__ __forceinline__ void wgmma(float (&d)[Size], std::uint64_t a, std::uint64_t b, bool accumulate) {
  static_assert(Size == 16 || Size == 32 || Size == 48 || Size == 64 || Size == 128,
                "N is 32, 64, 96, 128 or 256");
  if constexpr (Size == 16)
    RLK_WGMMA_SHARED(32, 16, "%16", "%17", "%18", "%19, %20");
  else if constexpr (Size == 32)
    RLK_WGMMA_SHARED(64, 32, "%32", "%33", "%34", "%35, %36");
  else if constexpr (Size == 48)
    RLK_WGMMA_SHARED(96, 48, "%48", "%49", "%50", "%51, %52");
  else if constexpr (Size == 64)
    RLK_WGMMA_SHARED(128, 64, "%64", "%65", "%66", "%67, %68");
  else
    RLK_WGMMA_SHARED(256, 128, "%128", "%129", "%130", "%131, %132");
}

#define RLK_WGMMA_REGISTERS(width, count, type, ...)                                             \
  RLK_WGMMA(width, count, type, __VA_ARGS__, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), \
            "r"(static_cast<int>(accumulate)), "n"(TransB ? 1 : 0))
#define RLK_WGMMA_REGISTERS_OF(width, count, ...)                  \
  do {                                                             \
    if constexpr (std::is_same_v<T, __half>)                       \
      RLK_WGMMA_REGISTERS(width, count, "f16.f16", __VA_ARGS__);   \
    else                                                           \
      RLK_WGMMA_REGISTERS(width, count, "bf16.bf16", __VA_ARGS__); \
  } while (false)

// A in registers, as T like B.
template <class T, bool TransB, int Size>
__device__ __forceinline__ void wgmma(float (&d)[Size], const std::uint32_t (&a)[4], std::uint64_t b,
                                      bool accumulate) {
  static_assert(Size == 16 || Size == 32 || Size == 48 || Size == 64 || Size == 128,
                "N is 32, 64, 96, 128 or 256");
  if constexpr (Size == 16)
    RLK_WGMMA_REGISTERS_OF(32, 16, "{%16,%17,%18,%19}", "%20", "%21", "%22");
  else if constexpr (Size == 32)
    RLK_WGMMA_REGISTERS_OF(64, 32, "{%32,%33,%34,%35}", "%36", "%37", "%38");
  else if constexpr (Size == 48)
    RLK_WGMMA_REGISTERS_OF(96, 48, "{%48,%49,%50,%51}", "%52", "%53", "%54");
  else if constexpr (Size == 64)
    RLK_WGMMA_REGISTERS_OF(128, 64, "{%64,%65,%66,%67}", "%68", "%69", "%70");
  else
    RLK_WGMMA_REGISTERS_OF(256, 128, "{%128,%129,%130,%131}", "%132", "%133", "%134");
}
template <bool TransB, int Size>
__device__ __forceinline__ void wgmma(float (&d)[Size], const std::uint32_t (&a)[4], std::uint64_t b,
                                      bool accumulate) {
  wgmma<__nv_bfloat16, TransB>(d, a, b, accumulate);
}

#undef RLK_WGMMA_REGISTERS_OF
#undef RLK_WGMMA_REGISTERS
#undef RLK_WGMMA_SHARED
#undef RLK_WGMMA
#undef RLK_FLOATS_128
#undef RLK_FLOATS_48
#undef RLK_FLOATS_64
#undef RLK_FLOATS_32
#undef RLK_FLOATS_16
#undef RLK_FLOATS_4
#undef RLK_NAMES_128
#undef RLK_NAMES_48
#undef RLK_NAMES_64
#undef RLK_NAMES_32
#undef RLK_NAMES_16

}  // namespace rlk::cuda::hopper
