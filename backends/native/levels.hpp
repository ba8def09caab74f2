// One source, an implementation per instruction set.
//
// `<family>.scalar`, `<family>.avx2` and `<family>.avx512` differ in nothing but their vectors and give the
// same bits. Each is an implementation of its own, so that lists, certificates and evidence name the code
// that ran; the dispatcher takes the widest that the machine and RLK_CPU allow, also where a caller names the
// family. Rejected: one implementation that looks at the processor itself, which proves on one machine what
// another never runs.
#pragma once

#include <array>
#include <cstddef>

#include "rlk/backend.hpp"

namespace rlk::native {

enum class Isa { scalar, avx2, avx512 };
inline constexpr const char* kIsaWords[] = {"scalar", "avx2", "avx512"};
inline constexpr std::int32_t kIsaLevels[] = {0, RLK_CPU_AVX2, RLK_CPU_AVX512};

// The widest that may run at a level of rlk_device::arch.
constexpr Isa widest(std::int32_t level) {
  return level >= RLK_CPU_AVX512 ? Isa::avx512 : level >= RLK_CPU_AVX2 ? Isa::avx2 : Isa::scalar;
}

// A family's name as a template argument, and with an instruction set behind it as text that lives for ever.
template <std::size_t N>
struct Family {
  char text[N];
  constexpr Family(const char (&name)[N]) {  // implicit: <"native.golden">
    for (std::size_t i = 0; i < N; ++i) text[i] = name[i];
  }
};
template <Family F, Isa I>
inline constexpr auto kId = [] {
  std::array<char, sizeof F.text + 8> id{};
  std::size_t n = 0;
  for (const char* c = F.text; *c != '\0'; ++c) id[n++] = *c;
  id[n++] = '.';
  for (const char* c = kIsaWords[static_cast<int>(I)]; *c != '\0'; ++c) id[n++] = *c;
  return id;
}();

// The facts of a family with what its member of one instruction set adds.
template <Family F, Isa I>
constexpr Facts facts_at(Facts f) {
  f.id = kId<F, I>.data();
  f.priority += static_cast<std::int32_t>(I);
  f.min_arch = kIsaLevels[static_cast<int>(I)];
  return f;
}

// The facts of a family of pinned vector kernels; facts_at() completes them.
constexpr Facts pinned_facts(const char* doc, const char* arithmetic, std::uint32_t dtypes = kFloats) {
  return {
      .id = "", .doc = doc, .priority = 100, .arithmetic = arithmetic, .dtypes = dtypes, .traits = kPinned};
}
// Of a golden implementation.
constexpr Facts golden_facts(const char* doc, std::uint32_t dtypes = kFloats) {
  return {.id = "native.golden",
          .doc = doc,
          .priority = 0,
          .arithmetic = "fma64",
          .dtypes = dtypes,
          .traits = kPinned | RLK_GOLDEN};
}

// Of one on Intel's matrix unit.
constexpr Facts amx_facts(const char* doc, const char* arithmetic) {
  return {.id = "native.amx",
          .doc = doc,
          .priority = 210,
          .arithmetic = arithmetic,
          .dtypes = RLK_BF16,
          .traits = kPinned,
          .min_arch = RLK_CPU_AMX};
}

// Of what computes the same on any CPU; facts_at() completes them.
constexpr Facts amx_replay_facts(const char* arithmetic) {
  return {.id = "",
          .doc = "what Intel's matrix unit adds, on any CPU",
          .priority = 7,
          .arithmetic = arithmetic,
          .dtypes = RLK_BF16,
          .traits = kPinned};
}

// Of what VDPBF16PS computes, and of its replay on any CPU.
constexpr Facts pair_facts(const char* doc, const char* arithmetic) {
  return {.id = "native.avx512bf16",
          .doc = doc,
          .priority = 200,
          .arithmetic = arithmetic,
          .dtypes = RLK_BF16,
          .traits = kPinned,
          .min_arch = RLK_CPU_AVX512BF16};
}
constexpr Facts pair_replay_facts(const char* arithmetic) {
  return {.id = "",
          .doc = "what AVX512-BF16 adds, on any CPU",
          .priority = 3,
          .arithmetic = arithmetic,
          .dtypes = RLK_BF16,
          .traits = kPinned};
}

//   constinit const Levels rope =
//       by_level([]<Isa I>() { return implement<...>(facts_at<"native.vector", I>({...})); });
using Levels = std::array<rlk_implementation, 3>;
template <class Make>
constexpr Levels by_level(Make make) {
  return {
    make.template operator()<Isa::scalar>(),
    make.template operator()<Isa::avx2>(),
    make.template operator()<Isa::avx512>()
  };
}

}  // namespace rlk::native
