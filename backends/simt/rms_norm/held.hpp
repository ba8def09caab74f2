// rms_norm of rows of whole packs (bf16, on 16 bytes) of more than 128 that lie at one stride and that their threads hold, without
// a gate: of x, or of x + residual, whose pack is made once, as it is stored.
//
// All that a thread reads of its row is asked for before any of it is used; the weights are on their way while the row's sum is
// made. A multiprocessor has eight blocks where the registers allow it: the 1000 rows of a small step are under way at once.
#pragma once

#include "simt/rms_norm/team.hpp"

namespace rlk::simt::rms_norm {

// A thread with four packs has 32 of the sum's lanes in registers.
template <class Of, bool Residual>
inline constexpr int kHeldBlocks = Of::kSums <= 2 ? 8
                                   : Residual     ? 4
                                                  : 6;

template <class Of, bool Residual>
__global__ void __launch_bounds__(kThreads, (kHeldBlocks<Of, Residual>)) held_forward(Problem p) {
  using rows::Whole;
  const Of at(p);
  const auto row = [&](const rows::Tensor& t) { return rows::row_of<rows::Walk::line>(p.axes, t, at.row); };
  const auto for_held = [&](auto body) {  // body(number, first element)
#pragma unroll
    for (int c = 0; c < Of::kHeld; ++c)
      if (const int i = at.first + c * Of::kStride; i < p.width) body(c, i);
  };
  rows::Raw<Whole> xs[Of::kHeld], others[Of::kHeld];  // the others: of residual, then of the weights
  for_held([&](int c, int i) { xs[c] = row(p.x).template fetch<Whole>(i, kPack); });
  if constexpr (Residual)
    for_held([&](int c, int i) { others[c] = row(p.residual).template fetch<Whole>(i, kPack); });
  float sums[Of::kSums][kPack] = {};
  for_held([&](int c, int i) {
    if constexpr (Residual) {
      xs[c].part[0] = added(xs[c].part[0], others[c].part[0]);
      if (p.sum && at.there) row(p.sum).template put<Whole>(i, xs[c]);
    }
    float a[kPack];
    rows::unpack<bf16>(xs[c].part, a);
#pragma unroll
    for (int k = 0; k < kPack; ++k) sums[c % Of::kSums][k] = fused(a[k], a[k], sums[c % Of::kSums][k]);
  });
  if (p.weight)
    for_held([&](int c, int i) { others[c] = rows::fetch_pack<Whole>(p.weight_type, p.weight, i, kPack); });
  const float r = reciprocal(at.total(sums), p.width, p.eps);
  if (!at.there) return;
  if (p.rstd && at.first == 0) row(p.rstd).set(0, r);
  for_held([&](int c, int i) {
    float out[kPack];
    rows::unpack<bf16>(xs[c].part, out);
    normalise_by<Whole>(p, r, out, [&](float(&w)[kPack]) { rows::unpack<bf16>(others[c].part, w); });
    row(p.y).template set<Whole>(i, kPack, out);
  });
}

}  // namespace rlk::simt::rms_norm
