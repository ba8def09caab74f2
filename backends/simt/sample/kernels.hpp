// The portable GPU kernels of sample and sample_verify (arithmetic sample/philox-g1): the native backend's tokens on every GPU.
//
// A block has a row, 64 threads each leaf of the log-probability's sum, four lanes a tile of 128 as in logp. The row is read
// again for every pass, from cache. Filters (filters.hpp) add up integers, whose order does not matter. Few rows have a block for
// each leaf (leaves.hpp). Rows of bf16 in whole packs have kernels of their own, T = Whole: nothing is asked of a pack but its
// bits, and two blocks fit a multiprocessor.
#pragma once

#include "simt/sample/draws.hpp"
#include "simt/sample/leaves.hpp"

namespace rlk::simt::sample {

template <class T, bool Filters>
__global__ void __launch_bounds__(kThreads, kBlocks<T>) draw(Problem p) {
  Shared& s = *dynamic_shared<Shared>();
  const std::int64_t at = blockIdx.x;
  Reader<T> row{p, parameters_of(p, at), p.logits_of(at)};
  row.most = largest(row, s);
  const bool there = row.r.valid && row.most > -__builtin_inff();
  Drawn d;
  Kept kept;
  if (there) {
    if constexpr (Filters) kept = filtered(row, s, Alone{});
    draw_tiles<Filters>(row, s, kept, p.wants_logp(), p.wants_raw());
    d = drawn(row, joined_waves(s), s.kept, s.all);
  }
  if (p.keep) keep(row, at, there, kept);
  if (threadIdx.x == 0) finish(row, at, d, there, kept);
}

// ---- parts of a vocabulary

// What the filter whose cut is this leaves of this part's entries.
template <class T>
__device__ __forceinline__ void cut_at(const Reader<T>& row, Shared& s, const Edge& edge, Kept& kept) {
  if (!edge.there || (edge.take == kAllOfThem && kept.cut == edge.cut)) return;
  const float least = kept.least;
  kept.cut = edge.cut, kept.last = edge.take == 0 ? -1 : static_cast<std::int32_t>(row.p.vocab);
  if (edge.take <= 0) return;
  Kept found;
  if (cut(
          row, s,
          [&](float z, std::int64_t) {
            return Mass{z == edge.cut && (least <= 0 || weight(z, row.most, row.r.c) >= least)};
          },
          static_cast<Mass>(edge.take), found))
    kept.last = found.last;
}

template <class T>
__device__ __forceinline__ void count_digit(const Reader<T>& row, Shared& s, const std::int64_t* state,
                                            std::int64_t* out) {
  const Problem& p = row.p;
  const bool masses = p.step == Step::top_p, on = counts(p, row.r, state);
  Kept kept;
  if (p.min_p_first) kept.least = row.r.least;
  if (on && masses) cut_at(row, s, edge_of(state, top_k_slots(), p.part), kept);
  for (unsigned b = threadIdx.x; b < kBins; b += kThreads) s.bins[b] = 0;
  __syncthreads();
  if (on)
    row.for_packs([&](std::int64_t first, int n, const float(&z)[kPack]) {
#pragma unroll
      for (int k = 0; k < kPack; ++k) {
        if (k >= n || !row.has(kept, z[k], first + k) || !has_prefix(p, state, place(z[k]))) continue;
        add(s.bins[bin_of(p, place(z[k]))],
            masses ? Mass{mass_below_one(weight(z[k], row.most, row.r.c))} : Mass{1});
      }
    });
  __syncthreads();
  for (unsigned b = threadIdx.x; b < kBins; b += kThreads) out[b] = static_cast<std::int64_t>(s.bins[b]);
}

template <class T>
__device__ __forceinline__ void find(const Reader<T>& row, Shared& s, const std::int64_t* state, Kept& kept,
                                     std::int64_t* out) {
  const Problem& p = row.p;
  if (p.min_p_first) kept.least = row.r.least;
  cut_at(row, s, edge_of(state, top_k_slots(), p.part), kept);
  cut_at(row, s, edge_of(state, top_p_slots(), p.part), kept);
  kept.least = row.r.least;
  draw_tiles<true>(row, s, kept, true, true);
  if (threadIdx.x != 0) return;
  const Joined all = joined_waves(s);
  Found f;
  f.count = all.count;
  f.kept = joined(s.kept, row.r.c), f.all = joined(s.all, row.r.raw_c);
  if (all.best.id >= 0) f.score = all.best.score, f.id = p.first + all.best.id, f.z = row.z(all.best.id);
  put(out, f);
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1) part(Problem p) {
  Shared& s = *dynamic_shared<Shared>();
  const std::int64_t at = blockIdx.x;
  Reader<T> row{p, parameters_of(p, at), p.logits_of(at)};
  std::int64_t* out = p.partials + at * p.partials_stride;
  if (p.step == Step::largest) {
    const float most = largest(row, s);
    if (threadIdx.x == 0) out[0] = bits_of(simt::from_float<float>(row.r.valid ? most : __builtin_nanf("")));
    return;
  }
  const std::int64_t* state = p.state + at * p.state_stride;
  row.most = float_of(state[kStateMost]);
  const bool there = is_finite(row.most);
  if (p.step != Step::token) {
    if (there)
      count_digit(row, s, state, out);
    else
      for (unsigned b = threadIdx.x; b < kBins; b += kThreads) out[b] = 0;
    return;
  }
  Kept kept;
  if (there)
    find(row, s, state, kept, out);
  else if (threadIdx.x == 0)
    put_nothing(out);
  if (p.keep) keep(row, at, there, kept);
}

// A row of sample_merge: a block adds the bins of all parts.
__global__ void __launch_bounds__(kThreads, 1) merge(MergeProblem p) {
  Shared& s = *dynamic_shared<Shared>();
  const std::int64_t row = blockIdx.x;
  std::int64_t next[kStateWidth];
  if (p.step == Step::token) {
    if (threadIdx.x == 0) merge_token(p, row);
    return;
  }
  if (p.step == Step::largest) {
    merge_largest(p, row, next);
  } else if (begin_digit(p, row, next)) {  // the same for all threads
    const int bins = 1 << digit_bits(p.digit);
    Mass sum = 0;
    for (int b = static_cast<int>(threadIdx.x); b < kBins; b += kThreads) {
      s.bins[b] = b < bins ? p.bin(row, b) : 0;
      sum += s.bins[b];
    }
    std::uint64_t target = static_cast<std::uint64_t>(next[kStateTarget]);
    if (p.step == Step::top_k || p.digit == 0) {
      sum = wave_total(sum);
      if (lane() == 0) s.sums[wave()] = sum;
      __syncthreads();
      sum = 0;
      for (int w = 0; w < kWaves; ++w) sum += s.sums[w];
      target = first_target(p, row, sum);
      if (p.step == Step::top_p) next[kStateTarget] = static_cast<std::int64_t>(target);
    }
    __syncthreads();
    find_bin(s, static_cast<Mass>(next[p.slots().before]), target);
    end_digit(p, row, target, s.bin == kBins ? -1 : static_cast<int>(s.bin), s.before, next);
  }
  if (p.next && threadIdx.x == 0)
    for (int i = 0; i < kStateWidth; ++i) p.next[row * p.next_stride + i] = next[i];
}

// Rows without a token.
__global__ void __launch_bounds__(kThreads) count_bad(MergeProblem p) {
  std::int32_t* counts = dynamic_shared<std::int32_t>();
  std::int32_t bad = 0;
  for (std::int64_t row = threadIdx.x; row < p.rows; row += kThreads) bad += p.none(row);
  counts[threadIdx.x] = bad;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int t = 1; t < kThreads; ++t) bad += counts[t];
  *p.bad_count = bad;
}

inline void launch_count(const MergeProblem& p, hipStream_t stream) {
  hipLaunchKernelGGL(count_bad, dim3(1), dim3(kThreads), kThreads * sizeof(std::int32_t), stream, p);
}

// With a room for each row, eight blocks have it, else one.
template <class T>
void launch_rows(const Problem& p, RowRoom* rooms, hipStream_t stream) {
  const bool filters = p.top_k || p.top_p || p.min_p;
  if (rooms)
    return filters ? launch_leaves<T, true>(p, rooms, stream) : launch_leaves<T, false>(p, rooms, stream);
  hipLaunchKernelGGL((filters ? draw<T, true> : draw<T, false>), dim3(static_cast<unsigned>(p.rows)),
                     dim3(kThreads), sizeof(Shared), stream, p);
}
inline void launch(const Problem& p, RowRoom* rooms, hipStream_t stream) {
  if (p.rows > 0 && takes_whole(p))
    launch_rows<Whole>(p, rooms, stream);
  else if (p.rows > 0)
    rows::for_type(p.type == Type::bf16, [&]<class T>(T) { launch_rows<T>(p, rooms, stream); });
  if (p.bad_count) {
    MergeProblem counted;
    counted.rows = p.rows, counted.token = p.token, counted.bad_count = p.bad_count;
    launch_count(counted, stream);
  }
}

inline void launch_part(const Problem& p, hipStream_t stream) {
  if (p.rows > 0)
    rows::for_type(p.type == Type::bf16, [&]<class T>(T) {
      hipLaunchKernelGGL((part<T>), dim3(static_cast<unsigned>(p.rows)), dim3(kThreads), sizeof(Shared),
                         stream, p);
    });
}

inline void launch_merge(const MergeProblem& p, hipStream_t stream) {
  if (p.rows > 0)
    hipLaunchKernelGGL(merge, dim3(static_cast<unsigned>(p.rows)), dim3(kThreads), sizeof(Shared), stream, p);
  if (p.bad_count) launch_count(p, stream);
}

}  // namespace rlk::simt::sample
