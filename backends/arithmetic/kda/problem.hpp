// One KDA call as plain data: pointers, strides, sizes, options. What kernels and host code of every executor
// take, passed to GPU kernels by value. Knows nothing of the registry.
#pragma once

#include <cstdint>

#include "arithmetic/half.hpp"
#include "registry/kda/geometry.hpp"
#include "rlk/float.hpp"

namespace rlk::kda {

using simt::bf16;
using simt::fp16;

enum class Gate : std::int32_t { none, softplus, bounded };

// A tensor [batch, token, head, channel]: the last dimension is contiguous, strides count elements. `beta`
// has no channel. Absent when data is null.
struct Tensor {
  void* data = nullptr;
  Float type = Float::f32;
  std::int64_t batch = 0, token = 0, head = 0;

  RLK_HD explicit operator bool() const { return data != nullptr; }
};

// States [row, head, K, V], or [row, head, V, K] when v_first; each K x V matrix is dense, `row` and `head`
// count elements. fp32, or bf16/fp16 for saved chunk states. Absent when data is null.
struct States {
  void* data = nullptr;
  Float type = Float::f32;
  std::int64_t row = 0, head = 0;

  RLK_HD explicit operator bool() const { return data != nullptr; }
};

struct Problem {
  std::int64_t batch = 0, tokens = 0, sequences = 0;  // sequences == batch unless packed
  int heads = 0, value_heads = 0, k_dim = 0, v_dim = 0, chunk = 64;
  const std::int64_t* cu_seqlens = nullptr;
  double scale = 0;
  bool v_first = false, l2norm = false, beta_sigmoid = false, neg_eigval = false;
  Gate gate = Gate::none;
  double lower_bound = -5;

  Tensor q, k, v, g, beta, out;
  States initial, final, chunk_states;
  Tensor chunk_inverses;  // [B,T,HV,C]
  const float* a_log = nullptr;
  const float* dt_bias = nullptr;  // [HV,K], dense

  Tensor d_out, d_q, d_k, d_v, d_g, d_beta;
  States d_final, d_initial;
  float* d_a_log = nullptr;
  float* d_dt_bias = nullptr;

  RLK_HD int group() const { return value_heads / heads; }
  // Where sequence n lies: its batch row, first token and length.
  RLK_HD std::int64_t row(std::int64_t n) const { return cu_seqlens ? 0 : n; }
  RLK_HD std::int64_t start(std::int64_t n) const { return cu_seqlens ? bound(n) : 0; }
  RLK_HD std::int64_t length(std::int64_t n) const {
    if (!cu_seqlens) return tokens;
    const std::int64_t from = bound(n), to = bound(n + 1);
    return to > from ? to - from : 0;
  }
  // Bounds may live on a device, where nobody checks them before a launch: whatever they hold, no access
  // leaves the tensors.
  RLK_HD std::int64_t bound(std::int64_t n) const {
    const std::int64_t b = cu_seqlens[n];
    return b < 0 ? 0 : b > tokens ? tokens : b;
  }
  // The first chunk slot of sequence n: slots of different sequences never meet, and no prefix sum is needed.
  RLK_HD std::int64_t slot(std::int64_t n) const {
    return cu_seqlens ? bound(n) / chunk + n : n * ((tokens + chunk - 1) / chunk);
  }
  RLK_HD std::int64_t slots() const {
    return cu_seqlens ? tokens / chunk + sequences : sequences * ((tokens + chunk - 1) / chunk);
  }
};

// A call of kda_step: the tokens that follow the rows of every sequence's open chunk. `initial` and `final` are one state.
struct Step : Problem {
  CacheLayout layout;
  States cache;                // [sequence, value head, floats]; absent: nothing is kept
  const void* rows = nullptr;  // [sequences], int64 or int32
  bool wide_rows = true;

  RLK_HD std::int64_t cached(std::int64_t n) const {
    return wide_rows ? static_cast<const std::int64_t*>(rows)[n] : static_cast<const std::int32_t*>(rows)[n];
  }

  // Whether the tokens of sequence n have room: without it nothing but NaN in `out` is written.
  RLK_HD bool fits(std::int64_t n) const {
    const std::int64_t r = cached(n);
    return r >= 0 && r <= (cache ? chunk : 0) && r % chunk + length(n) <= chunk;
  }
  // The most tokens that a sequence of this call brings.
  RLK_HD int most() const { return int(tokens < chunk ? tokens : chunk); }
};

RLK_HD float load(const void* p, Float type, std::int64_t i) {
  if (type == Float::f32) return static_cast<const float*>(p)[i];
  if (type == Float::bf16) return simt::to_float(static_cast<const bf16*>(p)[i]);
  return simt::to_float(static_cast<const fp16*>(p)[i]);
}

// load() in two halves: the memory access, and what the bits mean. A GPU thread that needs several values
// starts all accesses before it waits for the first.
RLK_HD std::uint32_t load_bits(const void* p, Float type, std::int64_t i) {
  return type == Float::f32 ? static_cast<const std::uint32_t*>(p)[i]
                            : static_cast<const std::uint16_t*>(p)[i];
}
RLK_HD float from_bits(Float type, std::uint32_t bits) {
  if (type == Float::f32) return simt::bits_float(bits);
  if (type == Float::bf16) return simt::to_float(bf16{static_cast<std::uint16_t>(bits)});
  return simt::to_float(fp16{static_cast<std::uint16_t>(bits)});
}

RLK_HD void store(void* p, Float type, std::int64_t i, float x) {
  if (type == Float::f32) {
    static_cast<float*>(p)[i] = simt::from_float<float>(x);
  } else if (type == Float::bf16) {
    static_cast<bf16*>(p)[i] = simt::from_float<bf16>(x);
  } else {
    static_cast<fp16*>(p)[i] = simt::from_float<fp16>(x);
  }
}

// x as a tensor of this type would hold it.
RLK_HD float round_to(Float type, float x) {
  if (type == Float::bf16) return simt::to_float(simt::from_float<bf16>(x));
  if (type == Float::f16) return simt::to_float(simt::from_float<fp16>(x));
  return x;
}

RLK_HD std::int64_t at(const Tensor& t, std::int64_t row, std::int64_t token, std::int64_t head) {
  return row * t.batch + token * t.token + head * t.head;
}

}  // namespace rlk::kda
