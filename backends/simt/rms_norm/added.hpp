// rms_norm of x + residual in rows of whole packs (bf16, on 16 bytes) of more than 128, without a gate: a pack of the sum is made once,
// as it is stored, and stays in registers until the row's reciprocal is there.
#pragma once

#include "simt/rms_norm/team.hpp"

namespace rlk::simt::rms_norm {

template <class Of>
__global__ void __launch_bounds__(kThreads, 4) added_forward(Problem p) {
  using rows::Whole;
  const Of at(p);
  const RowOf x(p.axes, p.x, at.row), residual(p.axes, p.residual, at.row), y(p.axes, p.y, at.row),
      sum(p.axes, p.sum, at.row), rstd(p.axes, p.rstd, at.row);
  rows::Raw<Whole> xs[Of::kHeld], residuals[Of::kHeld];
  const auto read = [&](int c, std::int64_t i, int n) {
    xs[c] = x.fetch<Whole>(i, n);
    residuals[c] = residual.fetch<Whole>(i, n);
  };
  float sums[Of::kSums][kPack] = {};
  at.for_packs(p.width, false, read, [&](int lane, int c, std::int64_t i, int) {
    xs[c].part[0] = added(xs[c].part[0], residuals[c].part[0]);
    if (sum && at.there) sum.put<Whole>(i, xs[c]);
    float a[kPack];
    x.unpack<Whole>(xs[c], a);
#pragma unroll
    for (int k = 0; k < kPack; ++k) sums[lane][k] = fused(a[k], a[k], sums[lane][k]);
  });
  const float r = reciprocal(at.total(sums), p.width, p.eps);
  if (!at.there) return;
  if (rstd && at.first == 0) rstd.set(0, r);
  const auto again = [&](int c, std::int64_t i, int n) {  // a row of more packs than its threads hold
    if (sum) {
      xs[c] = sum.fetch<Whole>(i, n);
      return;
    }
    read(c, i, n);
    xs[c].part[0] = added(xs[c].part[0], residuals[c].part[0]);
  };
  at.for_packs(p.width, true, again, [&](int, int c, std::int64_t i, int n) {
    float out[kPack];
    x.unpack<Whole>(xs[c], out);
    normalise<Whole>(p, i, n, r, out);
    y.set<Whole>(i, n, out);
  });
}

}  // namespace rlk::simt::rms_norm
