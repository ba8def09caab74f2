// attention as plainly as it can be said: the maximum, the weights, their sum, the weighted values; all ascending in fp64.
#include "registry/attention/reference.hpp"

#include <cmath>

namespace rlk::registry {
namespace attention {
namespace {

RLK_FUSED double dot(const std::vector<double>& x, const std::vector<double>& y) {
  double sum = 0;
  for (std::size_t d = 0; d < x.size(); ++d) sum = std::fma(x[d], y[d], sum);
  return sum;
}
RLK_FUSED void accumulate(double p, const std::vector<double>& v, std::vector<double>& out) {
  for (std::size_t d = 0; d < v.size(); ++d) out[d] = std::fma(p, v[d], out[d]);
}

}  // namespace

TrueRow true_row(const Attention& a, const Sequences<Attention>& all, const Sequence& s, int64_t i,
                 int64_t head) {
  const int64_t kv_head = head / (a.q.dim(-2) / a.k.dim(-2));
  const double scale = scale_of(a.scale, a.q.dim(-1));
  const Visible seen = all.visible(s, i);
  std::vector<double> q, key, scores;
  all.query(a.q, s, i, head, q);
  double most = -INFINITY;
  for (int64_t j = seen.first; j < seen.last; ++j) {
    all.key(s, j, kv_head, key);
    double x = dot(q, key) * scale;
    if (a.softcap != 0) x = a.softcap * std::tanh(x / a.softcap);
    scores.push_back(x);
    if (x > most) most = x;
  }
  TrueRow row{std::vector<double>(static_cast<std::size_t>(a.v.dim(-1))), -INFINITY};
  const double sink = a.sinks ? load(DType::f32, a.sinks.data<char>(), head * a.sinks.stride(0)) : -INFINITY;
  // Scores of -inf are as good as no key.
  bool any = false;
  for (double x : scores) any = any || x != -INFINITY;
  if (!any) {
    row.lse = sink;
    return row;
  }
  if (!(most > sink)) most = sink;
  if (most == -INFINITY) most = 0;  // only where a score is NaN
  double sum = 0;
  for (double& x : scores) {
    x = std::exp(x - most);
    sum += x;
  }
  if (a.sinks) sum += std::exp(sink - most);
  for (int64_t j = seen.first; j < seen.last; ++j) {
    all.value(s, j, kv_head, key);
    accumulate(scores[static_cast<std::size_t>(j - seen.first)], key, row.out);
  }
  for (double& x : row.out) x /= sum;
  row.lse = most + std::log(sum);
  return row;
}

// The sums of the keys [keys.first, keys.last): the maximum in units of ln 2, the weights' sum, the weighted values.
template <class Sequences>
std::vector<double> true_part(const AttentionPart& a, const Sequences& all, const Sequence& s, int64_t i,
                              int64_t head, const Visible& keys) {
  const int64_t kv_head = head / (a.q.dim(-2) / a.k.dim(-2));
  const double scale = scale_of(a.scale, a.q.dim(-1));
  std::vector<double> q, key, scores, o(static_cast<std::size_t>(a.v.dim(-1)));
  all.query(a.q, s, i, head, q);
  double most = -INFINITY, sum = keys.first < keys.last ? 0 : -1;
  for (int64_t j = keys.first; j < keys.last; ++j) {
    all.key(s, j, kv_head, key);
    double x = dot(q, key) * scale;
    if (a.softcap != 0) x = a.softcap * std::tanh(x / a.softcap);
    scores.push_back(x);
    if (x > most) most = x;
  }
  const double base = most == -INFINITY ? 0 : most;
  for (int64_t j = keys.first; j < keys.last; ++j) {
    const double p = std::exp(scores[static_cast<std::size_t>(j - keys.first)] - base);
    sum += p;
    all.value(s, j, kv_head, key);
    accumulate(p, key, o);
  }
  o.insert(o.begin(), {most / std::log(2.0), sum});
  return o;
}

}  // namespace attention

int32_t attention_reference(const rlk_slot* slots, const rlk_host* host) {
  const auto& a = *reinterpret_cast<const Attention*>(slots);
  const attention::Sequences all(a);
  if (!all.valid())
    return host->fail(RLK_INVALID_ARGUMENT,
                      "attention: cu_q, cu_k, kv_len, block_table or prefix_of point outside the tensors");
  const Rows out(a.out);
  const int64_t heads = a.q.dim(-2);
  for (const attention::Sequence& s : all.all())
    for (int64_t i = 0; i < s.q_len; ++i)
      for (int64_t head = 0; head < heads; ++head) {
        const attention::TrueRow row = attention::true_row(a, all, s, i, head);
        for (std::size_t d = 0; d < row.out.size(); ++d)
          out.set(all.row(s, i) * heads + head, static_cast<int64_t>(d), row.out[d]);
        if (a.lse) Rows(a.lse).set(all.row(s, i), head, row.lse);
      }
  return RLK_OK;
}

int32_t attention_part_reference(const rlk_slot* slots, const rlk_host* host) {
  const auto& a = *reinterpret_cast<const AttentionPart*>(slots);
  const attention::Sequences all(a);
  if (!all.valid())
    return host->fail(RLK_INVALID_ARGUMENT,
                      "attention_part: cu_q, cu_k, kv_len, k_first or block_table point outside the tensors");
  const Rows partials(a.partials);
  const int64_t heads = a.q.dim(-2), count = a.partials.dim(-2);
  for (const attention::Sequence& s : all.all())
    for (int64_t i = 0; i < s.q_len; ++i)
      for (int64_t head = 0; head < heads; ++head)
        for (int64_t split = 0; split < count; ++split) {
          attention::Visible keys = all.visible(s, i);
          if (a.split != 0) {
            keys.first = std::max(keys.first, s.first + split * a.split);
            keys.last = std::min(keys.last, s.first + (split + 1) * a.split);
          }
          const std::vector<double> sums = attention::true_part(a, all, s, i, head, keys);
          const int64_t row = (all.row(s, i) * heads + head) * count + split;
          for (std::size_t d = 0; d < sums.size(); ++d) partials.set(row, static_cast<int64_t>(d), sums[d]);
        }
  return RLK_OK;
}

int32_t attention_merge_reference(const rlk_slot* slots, const rlk_host*) {
  const auto& a = *reinterpret_cast<const AttentionMerge*>(slots);
  const Rows partials(a.partials), out(a.out);
  const int64_t ranks = a.partials.dim(0), heads = a.partials.dim(-3), count = a.partials.dim(-2);
  const int64_t width = a.partials.dim(-1) - 2, rows = out.count();
  for (int64_t r = 0; r < rows; ++r) {
    const double sink =
        a.sinks ? load(DType::f32, a.sinks.data<char>(), r % heads * a.sinks.stride(0)) : -INFINITY;
    double most = sink / std::log(2.0), sum = 0;
    std::vector<int64_t> splits;
    for (int64_t rank = 0; rank < ranks; ++rank)
      for (int64_t split = 0; split < count; ++split)
        if (const int64_t at = (rank * rows + r) * count + split; partials.get(at, 1) != -1) {
          splits.push_back(at);
          if (!(partials.get(at, 0) <= most)) most = partials.get(at, 0);
        }
    if (most == -INFINITY) most = 0;
    std::vector<double> o(static_cast<std::size_t>(width));
    for (int64_t at : splits) {
      const double scale = std::exp2(partials.get(at, 0) - most);
      sum += partials.get(at, 1) * scale;
      for (int64_t d = 0; d < width; ++d) o[static_cast<std::size_t>(d)] += partials.get(at, 2 + d) * scale;
    }
    const bool none = sum == 0;
    if (a.sinks) sum += std::exp2(sink / std::log(2.0) - most);
    for (int64_t d = 0; d < width; ++d) out.set(r, d, none ? 0 : o[static_cast<std::size_t>(d)] / sum);
    if (a.lse) Rows(a.lse).set(r / heads, r % heads, none ? sink : (most + std::log2(sum)) * std::log(2.0));
  }
  return RLK_OK;
}

}  // namespace rlk::registry
