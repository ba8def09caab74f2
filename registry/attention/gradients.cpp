// attention_bwd as plainly as it can be said: P and dS of every pair from the forward's lse and out, and sums of them; all
// ascending in fp64.
#include "registry/attention/gradients.hpp"

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

double dot_magnitudes(const std::vector<double>& x, const std::vector<double>& y) {
  double sum = 0;
  for (std::size_t d = 0; d < x.size(); ++d) sum += std::fabs(x[d] * y[d]);
  return sum;
}
void accumulate_magnitudes(double p, const std::vector<double>& v, std::vector<double>& out) {
  for (std::size_t d = 0; d < v.size(); ++d) out[d] += std::fabs(p * v[d]);
}

void times(std::vector<double>& x, double scale) {
  for (double& v : x) v *= scale;
}

}  // namespace

TrueGradients::TrueGradients(const AttentionBwd& a, bool magnitudes)
    : a_(a),
      all_(a),
      group_(a.q.dim(-2) / a.k.dim(-2)),
      scale_(scale_of(a.scale, a.q.dim(-1))),
      magnitudes_(magnitudes),
      queries_(a.q.numel() / a.q.dim(-1)),
      keys_(a.k.numel() / a.k.dim(-1)) {}

const TrueGradients::Query& TrueGradients::query(const Sequence& s, int64_t i, int64_t head) {
  return queries_.get(all_.row(s, i) * a_.q.dim(-2) + head, [&] {
    Query x;
    std::vector<double> out;
    all_.query(a_.q, s, i, head, x.q);
    all_.query(a_.d_out, s, i, head, x.d_out);
    all_.query(a_.out, s, i, head, out);
    x.lse = scalar(a_.lse, s, i, head);
    x.delta = dot(x.d_out, out);
    if (a_.d_lse) x.delta -= scalar(a_.d_lse, s, i, head);
    x.terms = dot_magnitudes(x.d_out, out) + (a_.d_lse ? std::fabs(scalar(a_.d_lse, s, i, head)) : 0);
    return x;
  });
}
const TrueGradients::Key& TrueGradients::key(const Sequence& s, int64_t j, int64_t kv_head) {
  return keys_.get(key_row(a_, all_, s, j) * a_.k.dim(-2) + kv_head, [&] {
    Key x;
    all_.key(s, j, kv_head, x.k);
    all_.value(s, j, kv_head, x.v);
    return x;
  });
}

TrueGradients::Pair TrueGradients::pair(const Query& x, const Key& y) const {
  double s = dot(x.q, y.k) * scale_, slope = 1;
  if (a_.softcap != 0) {
    const double t = std::tanh(s / a_.softcap);
    s = a_.softcap * t, slope = 1 - t * t;
  }
  const double p = std::exp(s - (x.lse == -INFINITY ? 0 : x.lse));
  const double ds = p * (dot(x.d_out, y.v) - x.delta) * slope;
  if (!magnitudes_) return {p, ds};
  const double finer = a_.v.dtype() == DType::bf16 ? 0x1p-10 : a_.v.dtype() == DType::f16 ? 0x1p-7 : 1;
  return {p, std::fabs(ds) + finer * p * (dot_magnitudes(x.d_out, y.v) + x.terms)};
}

void TrueGradients::add(double p, const std::vector<double>& v, std::vector<double>& sum) const {
  magnitudes_ ? accumulate_magnitudes(p, v, sum) : accumulate(p, v, sum);
}

std::vector<double> TrueGradients::d_q(const Sequence& s, int64_t i, int64_t head) {
  const Query& x = query(s, i, head);
  const Visible seen = all_.visible(s, i);
  std::vector<double> sum(x.q.size());
  for (int64_t j = seen.first; j < seen.last; ++j) {
    const Key& y = key(s, j, head / group_);
    add(pair(x, y).ds, y.k, sum);
  }
  times(sum, scale_);
  return sum;
}

TrueGradients::OfKey TrueGradients::d_kv(const Sequence& s, int64_t j, int64_t kv_head) {
  const Key& y = key(s, j, kv_head);
  OfKey sum{std::vector<double>(y.k.size()), std::vector<double>(y.v.size())};
  for (int64_t head = kv_head * group_; head < (kv_head + 1) * group_; ++head)
    for (const Sequence& reader : all_.readers(s)) {
      const Visible rows = seen_by(a_, reader, j);
      for (int64_t i = rows.first; i < rows.last; ++i) {
        const Query& x = query(reader, i, head);
        const Pair of = pair(x, y);
        add(of.ds, x.q, sum.d_k);
        add(of.p, x.d_out, sum.d_v);
      }
    }
  times(sum.d_k, scale_);
  return sum;
}

double TrueGradients::d_sink(int64_t head) {
  const double sink = load(a_.sinks.dtype(), a_.sinks.data<char>(), head * a_.sinks.stride(0));
  double sum = 0;
  for (const Sequence& s : all_.all())
    for (int64_t i = 0; i < s.q_len; ++i) {
      const Query& x = query(s, i, head);
      if (x.lse != -INFINITY) sum = std::fma(std::exp(sink - x.lse), x.delta, sum);
    }
  return 0 - sum;
}

}  // namespace attention

namespace {

void clear(const Out& t) {
  const Rows rows(t);
  for (int64_t r = 0; r < rows.count(); ++r)
    for (int64_t d = 0; d < rows.width(); ++d) rows.set(r, d, 0);
}
void put(const Out& t, int64_t row, const std::vector<double>& x) {
  const Rows rows(t);
  for (std::size_t d = 0; d < x.size(); ++d) rows.set(row, static_cast<int64_t>(d), x[d]);
}

int32_t write(const rlk_slot* slots, const rlk_host* host, bool magnitudes) {
  using namespace attention;
  const auto& a = *reinterpret_cast<const AttentionBwd*>(slots);
  TrueGradients truth(a, magnitudes);
  const Sequences<AttentionBwd>& all = truth.sequences();
  if (!all.valid())
    return host->fail(RLK_INVALID_ARGUMENT,
                      "attention_bwd: cu_q, cu_k, kv_len or prefix_of point outside the tensors");
  const int64_t heads = a.q.dim(-2), kv_heads = a.k.dim(-2);
  for (const Out* t : {&a.d_q, &a.d_k, &a.d_v})
    if (*t) clear(*t);
  for (const Sequence& s : all.all()) {
    for (int64_t i = 0; a.d_q && i < s.q_len; ++i)
      for (int64_t h = 0; h < heads; ++h) put(a.d_q, all.row(s, i) * heads + h, truth.d_q(s, i, h));
    for (int64_t j = s.shared; (a.d_k || a.d_v) && j < s.kv_len; ++j)
      for (int64_t h = 0; h < kv_heads; ++h) {
        const TrueGradients::OfKey sum = truth.d_kv(s, j, h);
        const int64_t row = key_row(a, all, s, j) * kv_heads + h;
        if (a.d_k) put(a.d_k, row, sum.d_k);
        if (a.d_v) put(a.d_v, row, sum.d_v);
      }
  }
  for (int64_t h = 0; a.d_sinks && h < heads; ++h) Rows(a.d_sinks).set(0, h, truth.d_sink(h));
  return RLK_OK;
}

}  // namespace

int32_t attention_bwd_reference(const rlk_slot* slots, const rlk_host* host) {
  return write(slots, host, false);
}
int32_t attention::attention_bwd_magnitudes(const rlk_slot* slots, const rlk_host* host) {
  return write(slots, host, true);
}

}  // namespace rlk::registry
