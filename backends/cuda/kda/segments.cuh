// Where the segments of a call lie, for sm90/kda64/seg4096 and the backward's sm90/kda64/f64/seg4096.
#pragma once

#include "cuda/kda/device.cuh"

namespace rlk::cuda::kda {

constexpr std::int64_t kSegment = 4096;  // tokens

// Whole segments of all sequences, at most; and pieces: those and what is left behind them, which may be nothing.
inline std::int64_t map_count(const Params& p) {
  return p.cu_seqlens ? p.tokens / kSegment : p.sequences * (p.tokens / kSegment);
}
inline std::int64_t piece_count(const Params& p) { return map_count(p) + p.sequences; }

__device__ inline std::int64_t whole_segments(const Job& p, int n) {
  return sequence_length(p, n) / kSegment;
}
// The first map of sequence n. Packed sequences never meet: floor(a) + floor(b) <= floor(a + b).
__device__ inline std::int64_t first_map(const Job& p, int n) {
  return p.cu_seqlens ? p.cu_seqlens[n] / kSegment : n * (p.tokens / kSegment);
}

// The piece of the same.
__device__ inline std::int64_t first_piece(const Job& p, int n) { return first_map(p, n) + n; }

// Whole segments whose map the forward needs: not the last where nothing is behind it.
__device__ inline int needed_maps(const Job& p, int n) {
  const std::int64_t whole = whole_segments(p, n);
  return static_cast<int>(!p.final && whole * kSegment == sequence_length(p, n) ? whole - 1 : whole);
}

// The first whole segment whose map the backward needs.
__device__ inline int first_needed(const Job& p) { return p.d_initial ? 0 : 1; }

struct Segment {
  int sequence, index, whole;  // index == whole: what is left behind the whole ones
  bool used;
};

// Of map `at`, or of piece `at`, of which every sequence has one more.
__device__ inline Segment find_segment(const Job& p, int at, bool piece) {
  int n = 0;
  if (p.cu_seqlens) {
    int high = static_cast<int>(p.sequences) - 1;  // the last sequence whose first place is <= at
    while (n < high) {
      const int middle = (n + high + 1) / 2;
      if (first_map(p, middle) + (piece ? middle : 0) <= at) {
        n = middle;
      } else {
        high = middle - 1;
      }
    }
  } else {
    n = at / (static_cast<int>(p.tokens / kSegment) + (piece ? 1 : 0));
  }
  const int index = at - static_cast<int>(first_map(p, n)) - (piece ? n : 0),
            whole = static_cast<int>(whole_segments(p, n));
  return {n, index, whole, index < whole + (piece ? 1 : 0)};
}

}  // namespace rlk::cuda::kda
