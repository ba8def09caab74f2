// What a block of 128 rows adds to d_weight of rms_norm: one fp32 chain a channel.
#pragma once

#include "simt/rms_norm/team.hpp"

namespace rlk::simt::rms_norm {

// What a block of rows adds to d_weight: among the shares, or as the sum where no other block has rows. A sum begins with +0.
__device__ __forceinline__ void leave_share(const Problem& p, float* shares, std::int64_t block,
                                            std::int64_t i, float share) {
  if (p.axes.rows <= kBlock)
    rows::store(p.d_weight_type, p.d_weight, i, 0.0 + static_cast<double>(share));
  else
    shares[block * p.width + i] = share;
}

// A block's rows of so many packs of bf16 in shared memory, and their reciprocals.
template <int Packs>
struct ShareRows {
  static constexpr int kPairs = Packs * kPack / 2, kAhead = 16;
  rows::Bytes16 x[kBlock][Packs], d_y[kBlock][Packs];
  float r[kBlock];

  // What the first `count` rows add to two channels.
  __device__ __forceinline__ void chain(int pair, int count, float& low, float& high) const {
    const auto* xs = reinterpret_cast<const std::uint32_t*>(x) + pair;
    const auto* ds = reinterpret_cast<const std::uint32_t*>(d_y) + pair;
    const auto go_on = [&](int row) {
      const std::uint32_t x2 = xs[row * kPairs], d2 = ds[row * kPairs];
      low = fused(bits_float(d2 << 16), bits_float(x2 << 16) * r[row], low);
      high = fused(bits_float(d2 & 0xffff0000u), bits_float(x2 & 0xffff0000u) * r[row], high);
    };
    int row = 0;
    for (; row + kAhead <= count; row += kAhead)
#pragma unroll
      for (int k = 0; k < kAhead; ++k) go_on(row + k);
    for (; row < count; ++row) go_on(row);
  }
};

}  // namespace rlk::simt::rms_norm
