// Logits that lie in memory as a tensor core would leave them, and logp's sums of them: for tests on host fibers.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "simt/logp/fragment.hpp"
#include "simt/logp/kernels.hpp"

namespace fragments {

// Eight rows a block, a tile of each by four lanes.
constexpr int kFragmentRows = 8;
struct Fragment {
  float z[rlk::simt::logp::kFragment];
  std::int64_t row, leaf, tile, column, columns;

  Fragment(const rlk::lse128::Problem& p, std::int64_t room, int blocks, int thread)
      : row(blocks % ((p.rows + kFragmentRows - 1) / kFragmentRows) * kFragmentRows + thread / 4),
        leaf(blocks / ((p.rows + kFragmentRows - 1) / kFragmentRows) / room),
        tile(blocks / ((p.rows + kFragmentRows - 1) / kFragmentRows) % room) {
    column = p.leaf_begin(static_cast<int>(leaf)) + tile * rlk::lse128::kTile;
    columns = std::clamp<std::int64_t>(p.leaf_end(static_cast<int>(leaf)) - column, 0, rlk::lse128::kTile);
    for (int i = 0; i < rlk::simt::logp::kFragment; ++i) {
      const int c = rlk::simt::logp::fragment_column(thread % 4, i);
      const bool there = row < p.rows && c < columns;
      z[i] = there ? rlk::rows::load(p.logits.type, p.logits.row(row), column + c) : -INFINITY;
    }
  }
};
__global__ void fragment_sums(rlk::lse128::Problem p, std::int64_t room, rlk::lse128::State* tiles) {
  const Fragment f(p, room, static_cast<int>(blockIdx.x), static_cast<int>(threadIdx.x));
  const auto k = f.row < p.rows ? p.scale(f.row) : rlk::lse128::scale_of(1);
  const auto all = rlk::simt::logp::bends(p) ? rlk::simt::logp::fragment_tile<true>(f.z, k)
                                             : rlk::simt::logp::fragment_tile<false>(f.z, k);
  if (f.row < p.rows && f.columns > 0 && threadIdx.x % 4 == 0)
    tiles[(f.row * p.count + f.leaf) * room + f.tile] = all;
}
inline dim3 fragment_blocks(const rlk::lse128::Problem& p, std::int64_t room) {
  return dim3(static_cast<unsigned>((p.rows + kFragmentRows - 1) / kFragmentRows * p.count * room));
}
// The sums of all leaves of all rows.
inline void reduce(const rlk::lse128::Problem& p, rlk::lse128::State* states, hipStream_t stream) {
  const std::int64_t room = (p.leaf + rlk::lse128::kTile - 1) / rlk::lse128::kTile;
  std::vector<rlk::lse128::State> tiles(static_cast<std::size_t>(p.rows * p.count * room));
  hipLaunchKernelGGL(fragment_sums, fragment_blocks(p, room), dim3(kFragmentRows * 4), 0, stream, p, room,
                     tiles.data());
  rlk::simt::logp::launch_leaves_of_tiles(p, tiles.data(), room, states, stream);
}

}  // namespace fragments
