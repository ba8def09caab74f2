// linear_logp as what it is defined by: lm_head, then logp; backward logp_bwd, then linear_bwd. The logits and their gradient
// are tensors here, of the entries that the call has.
#pragma once

#include <algorithm>
#include <vector>

#include "rlk/ops.hpp"

namespace rlk::registry {

template <class Args>
class Composed {
 public:
  // Logits and their gradient are of dtype `wide` where logits_round is fp32; `narrows`: the gradient is of hidden's dtype.
  Composed(const Args& a, DType wide, bool narrows = false) : a_(a) {
    using Round = typename Args::LogitsRound;
    const int64_t rows = a.hidden.dim(0), columns = a.weight.dim(0), vocab = a.vocab ? a.vocab : columns,
                  leaf = 16 * ((vocab + 127) / 128);
    here_ = std::min(vocab, (a.leaf_first + a.leaf_count) * leaf) - std::min(vocab, a.leaf_first * leaf);
    vocab_ = vocab;
    const DType type = a.logits_round == Round::bf16   ? DType::bf16
                       : a.logits_round == Round::fp16 ? DType::f16
                                                       : wide;
    const DType slope = narrows ? a.hidden.dtype() : type;
    memory_.resize(static_cast<std::size_t>(rows * here_ * size_of(type)));
    gradient_memory_.resize(static_cast<std::size_t>(rows * here_ * size_of(slope)));
    logits_ = Tensor(memory_.data(), {rows, here_}, type);
    gradient_ = Tensor(gradient_memory_.data(), {rows, here_}, slope);
    weight_ = first(a.weight, here_);
    if (a.bias) bias_ = first(a.bias, here_);
    if constexpr (requires { a.d_weight; }) {
      if (a.d_weight) d_weight_ = first(a.d_weight, here_);
      if (a.d_bias) d_bias_ = first(a.d_bias, here_);
      if (a.d_weight_before) weight_before_ = first(a.d_weight_before, here_);
      if (a.d_bias_before) bias_before_ = first(a.d_bias_before, here_);
    }
  }

  LmHead head() const {
    LmHead h{.hidden = a_.hidden, .weight = weight_, .out = logits_};
    if (a_.bias) h.bias = bias_;
    return h;
  }
  Logp rows() const {
    Logp p{.logits = logits_};
    share(p);
    if constexpr (requires { a_.logp; })
      p.logp = a_.logp, p.lse = a_.lse, p.entropy = a_.entropy, p.stats = a_.stats,
      p.bad_count = a_.bad_count;
    return p;
  }
  LogpBwd rows_bwd() const {
    LogpBwd p{.logits = logits_};
    share(p);
    if constexpr (requires { a_.d_logp; })
      p.stats = a_.stats, p.d_logp = a_.d_logp, p.d_entropy = a_.d_entropy;
    p.d_logits = gradient_;
    return p;
  }
  LinearBwd product_bwd() const {
    LinearBwd b{.d_y = gradient_, .x = a_.hidden, .weight = weight_, .d_x = a_.d_hidden};
    if (a_.d_weight) b.d_weight = d_weight_;
    if (a_.d_bias) b.d_bias = d_bias_;
    if (a_.d_weight_before) b.d_weight_before = weight_before_;
    if (a_.d_bias_before) b.d_bias_before = bias_before_;
    b.d_x_leaf_first = a_.leaf_first, b.d_x_leaf_count = a_.leaf_count, b.n_total = vocab_;
    return b;
  }
  int64_t here() const { return here_; }

 private:
  // The first n rows of a tensor.
  template <class View>
  static Tensor first(const View& t, int64_t n) {
    std::vector<int64_t> shape(static_cast<std::size_t>(t.rank())), strides = shape;
    for (int32_t i = 0; i < t.rank(); ++i) {
      shape[static_cast<std::size_t>(i)] = t.dim(i);
      strides[static_cast<std::size_t>(i)] = t.stride(i);
    }
    shape[0] = n;
    return Tensor(const_cast<void*>(static_cast<const void*>(t.template data<char>())), std::span(shape),
                  t.dtype(), {kDLCPU, 0}, std::span(strides));
  }

  template <class To>
  void share(To& p) const {
    p.target = a_.target, p.temperatures = a_.temperatures, p.keep = a_.keep;
    p.temperature = a_.temperature, p.softcap = a_.softcap, p.ignore_index = a_.ignore_index;
    p.logits_round = static_cast<typename To::LogitsRound>(a_.logits_round);
    p.vocab = vocab_, p.vocab_start = a_.vocab_start, p.leaf_first = a_.leaf_first,
    p.leaf_count = a_.leaf_count;
  }

  const Args& a_;
  int64_t here_, vocab_;
  std::vector<std::byte> memory_, gradient_memory_;
  Tensor logits_, gradient_, weight_, bias_;
  // Of gradients, and of what they are added to, the rows of the call's entries.
  Tensor d_weight_, d_bias_, weight_before_, bias_before_;
};

}  // namespace rlk::registry
