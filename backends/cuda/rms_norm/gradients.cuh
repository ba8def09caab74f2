// rms_norm's gradients on Hopper, of many rows of whole packs (bf16, on 16 bytes) at one stride, without a gate or a residual: d_x,
// d_residual and the shares of d_weight in one pass, so that x and d_y come from memory once, by as many blocks as a GPU has
// room for. The arithmetic is rms32.
//
// A cluster of two blocks has the 128 rows of a share, each block half of the channels. Four warps, the members of a row, two in
// each block, make its sums, each of the packs whose bits 2 and 3 are its number, so that the sum's first three steps are a
// warp's own; then each has 32 numbers. Those go to all members through (distributed) shared memory, and the last seven steps
// are done by each of them. One block would leave SMs idle at [8192, 4096], and four wait longer for each other.
//
// Between sums a block's threads do the rest for the rows of the step before: a thread has four channels of all rows, with their
// chains in registers. So a sum's way to the other blocks and back costs no time, and a step one barrier of the block.
#pragma once

#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/cluster.cuh"
#include "simt/async.hpp"
#include "simt/rms_norm/share.hpp"

namespace rlk::cuda::rms_norm {

using namespace hopper;
using rms32::kBlock;
using rms32::Problem;
using rows::Bytes16;
using rows::kPack;

inline constexpr int kWarp = 32, kMembers = 4, kStages = 3;
inline constexpr int kRanks = 2;                 // blocks of a cluster
inline constexpr int kTeam = kMembers / kRanks;  // warps of a block that have a row
inline constexpr int kRound =
    kMembers * kWarp;  // packs of a row from one of a thread to its next: the sum's 1024 lanes

// A block of `Warps`, whose teams have `Rows` rows at a time; of a row a thread has up to `Held` packs.
template <int Warps, int Held, int Rows, int Blocks>
struct Shape {
  static constexpr int kThreads = Warps * kWarp, kHeld = Held, kRows = Rows, kBlocks = Blocks;
  static constexpr int kTeams = Warps / kTeam, kStep = kTeams * Rows, kHalf = kStep / 2;
  static constexpr int kPacks = Held * kWarp * kTeam;   // of a row, of a block
  static constexpr int kFours = 2 * kPacks / kThreads;  // of channels, of a thread's chains
  static_assert(kFours >= 1 && kBlock % kStep == 0);
};

template <class S>
struct Shared {
  Bytes16 tiles[kStages][2][S::kStep][S::kPacks];       // of x and of d_y
  float sums[S::kTeams][2][S::kRows][kMembers][kWarp];  // of members, for a team's exchanges in turn
  float2 values[kBlock];                                // of a row: 1 / rms, and the mean
  std::uint64_t barriers[S::kTeams][2];
};

// Where a block's tile has a pack, by its sixteen of the row, its warp of the team, and its place of four. A warp's lanes would
// meet in the same banks where other warps' packs lie between its own.
__device__ __forceinline__ int place_of(int sixteen, int warp, int of_four) {
  return ((sixteen * kTeam + warp) * 4 + of_four) ^ (sixteen & 1) << 2;
}
__device__ __forceinline__ Bytes16* row_of(const rows::Tensor& t, std::int64_t row) {
  return reinterpret_cast<Bytes16*>(static_cast<std::uint16_t*>(t.data) + row * t.stride[0]);
}
__device__ __forceinline__ float weight_of(const Problem& p, int channel) {
  const auto bits = static_cast<const std::uint16_t*>(p.weight)[channel];
  const float w = simt::bits_float(std::uint32_t{bits} << 16);
  return p.offset ? 1 + w : w;
}

// A share's rows, as all of its threads know them.
struct Share {
  std::int64_t number, start;
  int count;
  __device__ __forceinline__ Share(const Problem& p, std::int64_t of) : number(of), start(of * kBlock) {
    count = static_cast<int>(p.axes.rows - start < kBlock ? p.axes.rows - start : kBlock);
  }
};

// ---- sums

// A member's thread: it has the packs at `first`, `first` + kRound, .. of its team's rows.
template <class S>
struct Member {
  const Problem& p;
  const Share& share;
  Shared<S>& all;
  int lane, team, first, place, packs, turn = 0;
  bool leads;
  std::uint32_t sums[kRanks], barriers[kRanks];  // of the team in the cluster's blocks
  float weight[S::kHeld][kPack];

  __device__ __forceinline__ Member(const Problem& problem, const Share& of, Shared<S>& shared, int rank)
      : p(problem), share(of), all(shared) {
    const int warp = static_cast<int>(threadIdx.x) / kWarp, mine = warp % kTeam;
    const int member = rank * kTeam + mine;
    lane = static_cast<int>(threadIdx.x) % kWarp, team = warp / kTeam, leads = mine == 0 && lane == 0;
    first = lane / 4 * 16 + member * 4 + lane % 4, place = place_of(lane / 4, mine, lane % 4);
    packs = static_cast<int>(p.width) / kPack;
#pragma unroll
    for (int to = 0; to < kRanks; ++to) {
      sums[to] = address_at(shared_address(&all.sums[team][0][0][member][lane]), to);
      barriers[to] = address_at(shared_address(&all.barriers[team][0]), to);
    }
#pragma unroll
    for (int c = 0; c < S::kHeld; ++c)
#pragma unroll
      for (int k = 0; k < kPack; ++k)
        weight[c][k] = there(c) ? weight_of(p, (first + c * kRound) * kPack + k) : 0.0f;
  }
  __device__ __forceinline__ bool there(int c) const { return first + c * kRound < packs; }
  __device__ __forceinline__ Bytes16& tile(int stage, int tensor, int row, int c) const {
    return all.tiles[stage][tensor][team * S::kRows + row][place + c * kTeam * kWarp];
  }
  __device__ __forceinline__ int row_at(int step, int row) const {  // of the share; past its end the last one
    const int at = step * S::kStep + team * S::kRows + row;
    return at < share.count ? at : share.count - 1;
  }

  // Zeros for packs past the end of a row.
  __device__ __forceinline__ void clear() const {
    for (int c = 0; c < S::kHeld; ++c)
      for (int of = 0; of < kStages * 2 * S::kRows && !there(c); ++of)
        tile(of / (2 * S::kRows), of % 2, of / 2 % S::kRows, c) = Bytes16{};
  }
  // What a thread of a sum reads it has asked for itself.
  __device__ __forceinline__ void ask(int step, int stage) const {
#pragma unroll
    for (int row = 0; row < S::kRows; ++row) {
      const std::int64_t at = share.start + row_at(step, row);
      const Bytes16 *x = row_of(p.x, at) + first, *d_y = row_of(p.d_y, at) + first;
#pragma unroll
      for (int c = 0; c < S::kHeld; ++c)
        if (there(c)) {
          simt::send(&tile(stage, 0, row, c), x + c * kRound);
          simt::send(&tile(stage, 1, row, c), d_y + c * kRound);
        }
    }
  }
  __device__ __forceinline__ void get(int stage, int tensor, int row, int c, float (&v)[kPack]) const {
    const Bytes16 raw = tile(stage, tensor, row, c);
    rows::unpack<simt::bf16>(&raw, v);
  }

  // To all members, this warp's part of a sum of each row. An exchange uses what the one before the last did, which
  // everybody has read who has sent anything for the last one.
  __device__ __forceinline__ void tell(const float (&mine)[S::kRows]) const {
    const auto sums_of_turn = static_cast<std::uint32_t>(sizeof(all.sums[0][0]) * (turn % 2));
    const auto barrier_of_turn = static_cast<std::uint32_t>(sizeof(std::uint64_t) * (turn % 2));
    if (leads) barrier_expect(&all.barriers[team][turn % 2], sizeof(all.sums[0][0]));
#pragma unroll
    for (int to = 0; to < kRanks; ++to)
#pragma unroll
      for (int row = 0; row < S::kRows; ++row)
        store_async(sums[to] + sums_of_turn + row * static_cast<int>(sizeof(all.sums[0][0][0])),
                    barriers[to] + barrier_of_turn, mine[row]);
  }
  __device__ __forceinline__ void hear(float (&total)[S::kRows]) {
    barrier_wait(&all.barriers[team][turn % 2], turn / 2 % 2);
#pragma unroll
    for (int row = 0; row < S::kRows; ++row) {
      const auto& of = all.sums[team][turn % 2][row];
      const float sum =
          simt::add_rn(simt::add_rn(of[0][lane], of[2][lane]), simt::add_rn(of[1][lane], of[3][lane]));
      total[row] = simt::rms_norm::rest<kWarp>(sum);
    }
    ++turn;
  }

  // A sum over each row's values, to which `add` brings those of a pack.
  template <class Add>
  __device__ __forceinline__ void tell_sums(Add add) const {
    float mine[S::kRows];
#pragma unroll
    for (int row = 0; row < S::kRows; ++row) {
      float sum[kPack] = {};
#pragma unroll
      for (int c = 0; c < S::kHeld; ++c) add(row, c, sum);
      mine[row] = simt::rms_norm::halved<kWarp>(sum, lane);
    }
    tell(mine);
  }
  __device__ __forceinline__ void tell_squares(int stage) const {
    tell_sums([&](int row, int c, float(&sum)[kPack]) {
      float x[kPack];
      get(stage, 0, row, c, x);
#pragma unroll
      for (int k = 0; k < kPack; ++k) sum[k] = simt::fused(x[k], x[k], sum[k]);
    });
  }
  // Of the products of the normalised values and their gradients. A pack that is not there adds -0, which changes no sum.
  __device__ __forceinline__ void tell_products(int stage, const float (&r)[S::kRows]) const {
    tell_sums([&](int row, int c, float(&sum)[kPack]) {
      float x[kPack], d_y[kPack];
      get(stage, 0, row, c, x);
      get(stage, 1, row, c, d_y);
      const float by = there(c) ? r[row] : -0.0f;
#pragma unroll
      for (int k = 0; k < kPack; ++k) sum[k] = simt::fused(d_y[k] * weight[c][k], x[k] * by, sum[k]);
    });
  }
  // 1 / rms of the team's rows: as given, or from their squares.
  __device__ __forceinline__ void hear_squares(int step, float (&r)[S::kRows]) {
    if (!p.rstd) hear(r);
#pragma unroll
    for (int row = 0; row < S::kRows; ++row)
      r[row] = p.rstd ? all.values[row_at(step, row)].x : rms32::reciprocal(r[row], p.width, p.eps);
  }
  __device__ __forceinline__ void hear_products(int step, const float (&r)[S::kRows]) {
    float total[S::kRows];
    hear(total);
#pragma unroll
    for (int row = 0; row < S::kRows; ++row)
      if (const int at = step * S::kStep + team * S::kRows + row; leads && at < share.count) {
        if (!p.rstd) all.values[at].x = r[row];
        all.values[at].y = total[row] / static_cast<float>(p.width);
      }
  }
};

// ---- results

// A thread's chains, each four channels.
template <class S, bool Sum>
struct Results {
  const Problem& p;
  const Share& share;
  const Shared<S>& all;
  bool there[S::kFours];
  int from[S::kFours], channel[S::kFours];  // in halves of a tile's packs; of the row
  float weight[S::kFours][4], chain[S::kFours][4] = {};
  uint2 more[S::kFours][Sum ? S::kHalf : 1] = {};  // of d_sum

  __device__ __forceinline__ Results(const Problem& problem, const Share& of, const Shared<S>& shared,
                                     int rank)
      : p(problem), share(of), all(shared) {
#pragma unroll
    for (int i = 0; i < S::kFours; ++i) {
      const int four = static_cast<int>(threadIdx.x) + i * S::kThreads, pack = four / 2;
      const int sixteen = pack / (4 * kTeam), warp = pack / 4 % kTeam;
      from[i] = 2 * place_of(sixteen, warp, pack % 4) + four % 2;
      channel[i] = (sixteen * 16 + (rank * kTeam + warp) * 4 + pack % 4) * kPack + four % 2 * 4;
      there[i] = channel[i] < p.width;
#pragma unroll
      for (int k = 0; k < 4; ++k) weight[i][k] = there[i] ? weight_of(p, channel[i] + k) : 0.0f;
    }
  }
  // Four of a row of one of the tensors; those of later rows lie at its stride.
  __device__ __forceinline__ std::uint16_t* four_of(const rows::Tensor& t, int row, int i) const {
    return static_cast<std::uint16_t*>(t.data) + (share.start + row) * t.stride[0] + channel[i];
  }
  // Asks for d_sum of half a step's rows.
  __device__ __forceinline__ void ask(int first) {
    if constexpr (Sum) {
#pragma unroll
      for (int i = 0; i < S::kFours; ++i) {
        const std::uint16_t* const from_row = four_of(p.d_sum, first, i);
#pragma unroll
        for (int k = 0; k < S::kHalf; ++k)
          if (there[i] && first + k < share.count)
            more[i][k] = *reinterpret_cast<const uint2*>(from_row + k * p.d_sum.stride[0]);
      }
    }
  }
  __device__ __forceinline__ static void widen(uint2 raw, float (&v)[4]) {
    v[0] = simt::bits_float(raw.x << 16), v[1] = simt::bits_float(raw.x & 0xffff0000u);
    v[2] = simt::bits_float(raw.y << 16), v[3] = simt::bits_float(raw.y & 0xffff0000u);
  }
  // A row's part in the chains, and its results.
  __device__ __forceinline__ uint2 add_row(uint2 of_x, uint2 of_d_y, float2 values, uint2 of_d_sum, int i) {
    float x[4], d_y[4];
    widen(of_x, x);
    widen(of_d_y, d_y);
    const float r = values.x, mean = values.y;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x[j] = x[j] * r;
      chain[i][j] = simt::fused(d_y[j], x[j], chain[i][j]);
      d_y[j] = rms32::gradient(r, x[j], mean, d_y[j] * weight[i][j]);
    }
    if constexpr (Sum) {
      widen(of_d_sum, x);
#pragma unroll
      for (int j = 0; j < 4; ++j) d_y[j] = d_y[j] + x[j];
    }
    return make_uint2(rows::pair_of<simt::bf16>(d_y[0], d_y[1]), rows::pair_of<simt::bf16>(d_y[2], d_y[3]));
  }
  __device__ __forceinline__ static void put(std::uint16_t* to, uint2 four) {
    *reinterpret_cast<uint2*>(to) = four;
  }
  // The rows of half a step, of which `count` are there.
  template <bool Whole>
  __device__ __forceinline__ void add_rows(int stage, int half, int first, int count, int i) {
    const rows::Tensor& one = p.d_x ? p.d_x : p.d_residual;
    std::uint16_t* const to = four_of(one, first, i);
    uint2 made[S::kHalf];
#pragma unroll
    for (int k = 0; k < S::kHalf; ++k) {
      if (!Whole && k >= count) break;
      const int row = half * S::kHalf + k;
      made[k] = add_row(reinterpret_cast<const uint2*>(all.tiles[stage][0][row])[from[i]],
                        reinterpret_cast<const uint2*>(all.tiles[stage][1][row])[from[i]],
                        all.values[first + k], more[i][Sum ? k : 0], i);
      put(to + k * one.stride[0], made[k]);
    }
    if (!p.d_x || !p.d_residual) return;
    std::uint16_t* const also = four_of(p.d_residual, first, i);
#pragma unroll
    for (int k = 0; k < S::kHalf; ++k)
      if (Whole || k < count) put(also + k * p.d_residual.stride[0], made[k]);
  }
  __device__ __forceinline__ void add(int stage, int half, int first) {
    const int count = share.count - first;
#pragma unroll
    for (int i = 0; i < S::kFours; ++i) {
      if (!there[i]) continue;
      if (count >= S::kHalf)
        add_rows<true>(stage, half, first, S::kHalf, i);
      else
        add_rows<false>(stage, half, first, count, i);
    }
  }
  __device__ __forceinline__ void store(float* shares) const {
#pragma unroll
    for (int i = 0; i < S::kFours; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (there[i]) simt::rms_norm::leave_share(p, shares, share.number, channel[i] + j, chain[i][j]);
  }
};

// ---- a block

template <class S, bool Sum>
__device__ __forceinline__ void gradients_of(const Problem& p, Shared<S>& all, const Share& share, int rank,
                                             float* shares) {
  Member<S> member(p, share, all, rank);
  Results<S, Sum> results(p, share, all, rank);
  const int thread = static_cast<int>(threadIdx.x), steps = (share.count + S::kStep - 1) / S::kStep;
  member.clear();
  member.ask(0, 0);
  simt::end_group();
  for (int row = thread; p.rstd && row < share.count; row += S::kThreads)
    all.values[row].x = rows::load(p.rstd.type, p.rstd.row(p.axes, share.start + row), 0);
  // Sums of a step, and results of the one before.
  for (int step = 0, before = 2, now = 0, next = 1; step <= steps; ++step) {
    __syncthreads();  // values of the rows before are there, and nobody reads those before them
    if (step + 1 < steps) member.ask(step + 1, next);
    simt::end_group();
    simt::arrived_but<1>();
    const bool sums = step < steps;
    const int done = (step - 1) * S::kStep;
    float r[S::kRows];
    if (step > 0) results.ask(done);
    if (sums && !p.rstd) member.tell_squares(now);
    if (step > 0) results.add(before, 0, done), results.ask(done + S::kHalf);
    if (sums) member.hear_squares(step, r), member.tell_products(now, r);
    if (step > 0) results.add(before, 1, done + S::kHalf);
    if (sums) member.hear_products(step, r);
    before = now, now = next, next = next + 1 < kStages ? next + 1 : 0;
  }
  results.store(shares);
}

}  // namespace rlk::cuda::rms_norm
