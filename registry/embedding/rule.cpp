// What the arithmetic ids of embedding and its gradient mean, one result at a time: embed32 in fp32, fma64 in fp64.
#include "registry/rule.hpp"

#include <cstring>

#include "rlk/float_guard.hpp"
#include "rlk/ops.hpp"

namespace rlk::registry {
namespace {

int64_t id_of(const In& ids, int64_t token) {
  return ids.dtype() == DType::i32 ? ids.data<int32_t>()[token] : ids.data<int64_t>()[token];
}

bool has_rule(const RuleQuery& q) { return q.arithmetic == "embed32" || q.arithmetic == "fma64"; }

}  // namespace

bool embedding_rule(const RuleQuery& q) {
  const FloatGuard guard;
  if (!has_rule(q)) return false;
  const auto& a = *reinterpret_cast<const Embedding*>(q.slots);
  const DType type = a.weight.dtype();
  const int64_t width = a.weight.dim(1);
  const bool copies = a.scale == 1 && a.out.dtype() == type;
  for_elements(q, 2, [&](const DLTensor& out, int64_t i) {
    const int64_t id = id_of(a.ids, i / width), row = id - a.vocab_start;
    if (id < a.vocab_start || row >= a.weight.dim(0)) return finish(out, i, 0);
    const int64_t from = row * width + i % width, size = size_of(type);
    const char* weight = a.weight.data<char>();
    if (copies) {
      std::memcpy(a.out.data<char>() + i * size, weight + from * size, static_cast<std::size_t>(size));
    } else if (q.arithmetic == "fma64") {
      finish(out, i, load(type, weight, from) * double{static_cast<float>(a.scale)});
    } else {
      finish(out, i, double{static_cast<float>(load(type, weight, from)) * static_cast<float>(a.scale)});
    }
  });
  int64_t bad = 0;
  for (int64_t t = 0; t < a.ids.numel(); ++t) {
    const int64_t id = id_of(a.ids, t);
    bad += id < 0 || (a.vocab ? id >= a.vocab : id - a.vocab_start >= a.weight.dim(0));
  }
  if (a.bad_count) *a.bad_count.data<int32_t>() = static_cast<int32_t>(bad);
  return true;
}

bool embedding_bwd_rule(const RuleQuery& q) {
  const FloatGuard guard;
  if (!has_rule(q)) return false;
  const auto& a = *reinterpret_cast<const EmbeddingBwd*>(q.slots);
  const int64_t width = a.weight.dim(1), tokens = a.ids.numel();
  for_elements(q, 3, [&](const DLTensor& out, int64_t i) {
    const int64_t id = a.vocab_start + i / width;
    float sum32 = 0;
    double sum64 = 0;
    bool has_tokens = false;
    for (int64_t t = 0; t < tokens; ++t) {
      if (id_of(a.ids, t) != id || id == a.padding_idx) continue;
      const double d = load(a.d_out.dtype(), a.d_out.data<char>(), t * width + i % width);
      sum32 += static_cast<float>(d);
      sum64 += d;
      has_tokens = true;
    }
    const auto* before = a.d_weight_before ? a.d_weight_before.data<float>() : nullptr;
    if (!has_tokens) {
      if (before && out.dtype.bits == 32) {
        std::memcpy(a.d_weight.data<char>() + i * 4, before + i, 4);  // as it lies
        return;
      }
      return finish(out, i, before ? before[i] : 0);  // not -0, whatever the scale
    }
    const auto scale = static_cast<float>(a.scale);
    const double so_far = before ? before[i] : 0.0;
    if (q.arithmetic == "fma64") return finish(out, i, sum64 * double{scale} + so_far);
    finish(out, i, double{before ? sum32 * scale + before[i] : sum32 * scale});
  });
  return true;
}

}  // namespace rlk::registry
