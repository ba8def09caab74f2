// Loops that the compiler turns into vector code of the processor at hand; no arithmetic depends on it.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#  define RLK_WIDE __attribute__((target_clones("avx512f", "avx2", "default"), optimize("O3")))
#else
#  define RLK_WIDE
#endif
