// embedding as plainly as it can be said, in fp64, one rounding of every result.
#include "registry/reference.hpp"

#include "rlk/ops.hpp"

namespace rlk::registry {
namespace {

// Ids in row-major order, whatever the strides.
int64_t id_of(const In& ids, int64_t token) {
  int64_t at = 0;
  for (int32_t i = ids.rank() - 1; i >= 0; --i) {
    at += token % ids.dim(i) * ids.stride(i);
    token /= ids.dim(i);
  }
  return ids.dtype() == DType::i32 ? ids.data<int32_t>()[at] : ids.data<int64_t>()[at];
}

}  // namespace

int32_t embedding_reference(const rlk_slot* slots, const rlk_host*) {
  const auto& a = *reinterpret_cast<const Embedding*>(slots);
  const Rows weight(a.weight), out(a.out);
  const double scale = static_cast<float>(a.scale);
  for (int64_t t = 0; t < out.count(); ++t) {
    const int64_t id = id_of(a.ids, t), row = id - a.vocab_start;
    const bool here = id >= a.vocab_start && row < weight.count();
    for (int64_t i = 0; i < out.width(); ++i) out.set(t, i, here ? weight.get(row, i) * scale : 0);
  }
  const int64_t end = a.vocab ? a.vocab : a.vocab_start + weight.count();
  int64_t bad = 0;
  for (int64_t t = 0; t < out.count(); ++t) bad += id_of(a.ids, t) < 0 || id_of(a.ids, t) >= end;
  if (a.bad_count) Rows(a.bad_count).set(0, 0, static_cast<double>(bad));
  return RLK_OK;
}

int32_t embedding_bwd_reference(const rlk_slot* slots, const rlk_host*) {
  const auto& a = *reinterpret_cast<const EmbeddingBwd*>(slots);
  const Rows d_out(a.d_out), d_weight(a.d_weight);
  const double scale = static_cast<float>(a.scale);
  const int64_t rows = d_weight.count(), width = d_weight.width();
  std::vector<double> sums(static_cast<std::size_t>(rows * width));
  for (int64_t t = 0; t < d_out.count(); ++t) {
    const int64_t id = id_of(a.ids, t), row = id - a.vocab_start;
    if (id < a.vocab_start || row >= rows || id == a.padding_idx) continue;
    for (int64_t i = 0; i < width; ++i) sums[static_cast<std::size_t>(row * width + i)] += d_out.get(t, i);
  }
  for (int64_t v = 0; v < rows; ++v)
    for (int64_t i = 0; i < width; ++i)
      d_weight.set(v, i,
                   sums[static_cast<std::size_t>(v * width + i)] * scale +
                       (a.d_weight_before ? Rows(a.d_weight_before).get(v, i) : 0));
  return RLK_OK;
}

}  // namespace rlk::registry
