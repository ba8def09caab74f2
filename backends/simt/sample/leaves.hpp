// sample of few rows: a block for each of the eight leaves of a row, so that one row has eight multiprocessors. What a search or a
// draw finds in the whole row is joined between kernels; it is the same whoever looks, so the tokens and bits are those of one
// block.
//
// look      the largest entry, and for top_k the k-th largest of its threads' maxima
// narrow    top_k: lists the entries that may be the last one; else top_p: a histogram of masses
// list_bin  top_p: lists the entries of the bin where its mass is reached
// draw_leaf the filters' ends, by each block alone, and the best of the leaf's entries; the row's last block has the result
#pragma once

#include "simt/join.hpp"
#include "simt/sample/draws.hpp"

namespace rlk::simt::sample {

// What a row's blocks leave each other.
struct RowRoom {
  Mass bins[kBins], sum;  // of masses, and of all of them
  std::uint64_t listed[kCompared];
  std::int32_t list;  // how many were to be listed
  unsigned arrived;   // blocks that have drawn
  float most[kLeaves], peak[kLeaves];
  Best best[kLeaves];
  std::int32_t count[kLeaves];
  Part kept[kLeaves], all[kLeaves];

  // Of the row, as `largest` has it.
  __device__ __forceinline__ float largest_entry() const {
    float x = most[0];
    for (int i = 1; i < kLeaves; ++i) x = x != x || most[i] <= x ? x : most[i];
    return x;
  }
  // At least k entries are not below it.
  __device__ __forceinline__ float least_peak() const {
    float x = peak[0];
    for (int i = 1; i < kLeaves; ++i) x = peak[i] > x ? peak[i] : x;
    return x;
  }
};

// A row as one of its blocks has it: entries of its leaf.
template <class T>
__device__ __forceinline__ Reader<T> leaf_of(const Problem& p) {
  Reader<T> row{p, parameters_of(p, blockIdx.x), p.logits_of(blockIdx.x)};
  const auto leaf = static_cast<std::int64_t>(blockIdx.y);
  row.begin = leaf * p.leaf() < p.vocab ? leaf * p.leaf() : p.vocab;
  row.end = (leaf + 1) * p.leaf() < p.vocab ? (leaf + 1) * p.leaf() : p.vocab;
  return row;
}
// Its largest entry is known; whether it has a token.
template <class T>
__device__ __forceinline__ bool has_token(Reader<T>& row, const RowRoom& room) {
  row.most = room.largest_entry();
  return row.r.valid && row.most > -__builtin_inff();
}
// top_k by a list.
__device__ __forceinline__ bool lists_top_k(const Parameters& r) {
  return r.top_k > 0 && r.top_k <= kThreads;
}

template <class T, bool Filters>
__global__ void __launch_bounds__(kThreads, 2) look(Problem p, RowRoom* rooms) {
  Shared& s = *dynamic_shared<Shared>();
  RowRoom& room = rooms[blockIdx.x];
  Reader<T> row = leaf_of<T>(p);
  const float most = largest(row, s);
  const float peak = Filters && lists_top_k(row.r) ? kth_peak(s, row.peak, row.r.top_k) : 0;
  if (threadIdx.x == 0) room.most[blockIdx.y] = most, room.peak[blockIdx.y] = peak;
  if (blockIdx.y != 0) return;
  if (threadIdx.x == 0) room.list = 0, room.arrived = 0, room.sum = 0;
  for (unsigned b = threadIdx.x; Filters && b < kBins; b += kThreads) room.bins[b] = 0;
}

// Adds a block's list to the row's.
__device__ __forceinline__ void put_list(Shared& s, RowRoom& room) {
  std::int32_t& place = s.count[0];
  if (threadIdx.x == 0) place = s.list > 0 ? atomicAdd(&room.list, s.list) : 0;
  __syncthreads();
  const std::int32_t n = s.list < kListed ? s.list : kListed;
  for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < n && place + i < kCompared; i += kThreads)
    room.listed[place + i] = s.listed[i];
}
// Whether it is complete and now in `s`.
__device__ __forceinline__ bool take_list(Shared& s, const RowRoom& room) {
  const bool few = room.list <= kCompared;
  if (threadIdx.x == 0) s.list = few ? room.list : 0;
  for (int i = static_cast<int>(threadIdx.x); few && i < room.list; i += kThreads)
    s.listed[i] = room.listed[i];
  __syncthreads();
  return few;
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2) narrow(Problem p, RowRoom* rooms) {
  Shared& s = *dynamic_shared<Shared>();
  RowRoom& room = rooms[blockIdx.x];
  Reader<T> row = leaf_of<T>(p);
  if (!has_token(row, room)) return;
  const Kept before = unfiltered(row);
  if (lists_top_k(row.r)) {
    const float least = room.least_peak();
    list(row, s, There<T>{row, before}, [&](float z) { return z >= least; });
    put_list(s, room);
  } else if (row.r.top_k == 0 && row.r.top_p < 1) {
    const Mass sum = count_masses(row, s, Masses<T>{row, before});
    if (threadIdx.x == 0) atomicAdd(&room.sum, sum);
    for (unsigned b = threadIdx.x; b < kBins; b += kThreads)
      if (s.bins[b] != 0) atomicAdd(&room.bins[b], s.bins[b]);
  }
}

// The bin where top_p's mass is reached, and what lies before it; kBins: none.
struct Bin {
  unsigned bin;
  Mass before, target;
};
template <class T>
__device__ __forceinline__ Bin bin_of_row(const Reader<T>& row, Shared& s, const RowRoom& room) {
  for (unsigned b = threadIdx.x; b < kBins; b += kThreads) s.bins[b] = room.bins[b];
  __syncthreads();
  const Mass target = wanted(row.r.top_p, room.sum);
  find_bin(s, 0, target);
  const Bin found{s.bin, s.before, target};
  __syncthreads();
  return found;
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2) list_bin(Problem p, RowRoom* rooms) {
  Shared& s = *dynamic_shared<Shared>();
  RowRoom& room = rooms[blockIdx.x];
  Reader<T> row = leaf_of<T>(p);
  if (!has_token(row, room) || row.r.top_k > 0 || !(row.r.top_p < 1)) return;
  const Bin found = bin_of_row(row, s, room);
  if (found.bin == kBins) return;
  list(row, s, Masses<T>{row, unfiltered(row)}, [&](float z) { return half_bin(row, z) == found.bin; });
  put_list(s, room);
}

// The searches of a block whose row was looked through before.
struct Listed {
  const RowRoom& room;
  template <class T, class There>
  __device__ __forceinline__ bool first_entries(const Reader<T>& row, Shared& s, There there,
                                                Kept& kept) const {
    const bool few = lists_top_k(row.r) && take_list(s, room);
    return end_of_list(row, s, few, room.least_peak(), there, kept);
  }
  template <class T, class Value>
  __device__ __forceinline__ void first_masses(const Reader<T>& row, Shared& s, Value value,
                                               Kept& kept) const {
    if (row.r.top_k > 0) return Alone{}.first_masses(row, s, value, kept);
    const Bin found = bin_of_row(row, s, room);
    if (found.bin < kBins && take_list(s, room))
      reach(s, value, found.before, found.target, kept);
    else
      cut(row, s, value, found.target, kept);
  }
};

// Of a row whose leaves all are in its room.
template <class T>
__device__ __forceinline__ Drawn drawn_of_leaves(const Reader<T>& row, const RowRoom& room) {
  Joined found;
  for (int i = 0; i < kLeaves; ++i)
    found.best.take(room.best[i].score, room.best[i].id), found.count += room.count[i];
  return drawn(row, found, room.kept, room.all);
}

template <class T, bool Filters>
__global__ void __launch_bounds__(kThreads, kBlocks<T>) draw_leaf(Problem p, RowRoom* rooms) {
  Shared& s = *dynamic_shared<Shared>();
  RowRoom& room = rooms[blockIdx.x];
  Reader<T> row{p, parameters_of(p, blockIdx.x), p.logits_of(blockIdx.x)};
  const bool there = has_token(row, room);
  Kept kept;
  if (there) {
    if constexpr (Filters) kept = filtered(row, s, Listed{room});
    draw_tiles<Filters, true>(row, s, kept, p.wants_logp(), p.wants_raw());
  }
  if (p.keep) keep(row, blockIdx.x, there, kept);
  if (there && threadIdx.x == 0) {
    const Joined found = joined_waves(s);
    room.best[blockIdx.y] = found.best, room.count[blockIdx.y] = found.count;
    room.kept[blockIdx.y] = s.kept[0], room.all[blockIdx.y] = s.all[0];
  }
  if (last_of(kLeaves, &room.arrived) && threadIdx.x == 0)
    finish(row, blockIdx.x, there ? drawn_of_leaves(row, room) : Drawn{}, there, kept);
}

// As many rows as leave multiprocessors idle where each has one block, of so many entries that it is worth the launches.
inline bool takes_leaves(const Problem& p) { return p.rows <= 48 && p.vocab >= 1 << 14; }

template <class T, bool Filters>
void launch_leaves(const Problem& p, RowRoom* rooms, hipStream_t stream) {
  const dim3 grid(static_cast<unsigned>(p.rows), kLeaves), block(kThreads);
  const auto start = [&](auto kernel) {
    hipLaunchKernelGGL(kernel, grid, block, sizeof(Shared), stream, p, rooms);
  };
  start(look<T, Filters>);
  if (Filters && (p.top_k || p.top_p)) start(narrow<T>);
  if (Filters && p.top_p) start(list_bin<T>);
  start(draw_leaf<T, Filters>);
}

}  // namespace rlk::simt::sample
