// kda_fwd and kda_bwd on Hopper: what the tuned kernels take, and the way from the typed arguments to them.
//
//   cuda.sm90          sm90/kda64, backward sm90/kda64/f64
//                      bf16, K = V = 64 or 128, chunks of 64, every option
//   cuda.sm90_seg4096  sm90/kda64/seg4096, backward sm90/kda64/f64/seg4096
//                      long sequences in segments, on request: for few heads
//   cuda.sm90_unfused  sm90/kda64/f64
//                      the backward with its inter-chunk gradients kept in memory between two kernels: the
//                      same bits, more traffic; shows what the fusion is worth
//
// None reads chunk_states and chunk_inverses: recomputing them costs less than reading fp32 copies. A forward
// that is asked to keep them is refused. What it can keep are its own records of every chunk, chunk_records,
// which spare the backward its preparation.
#include "cuda/kda/sm90.h"

#include <cstdint>
#include <string>

#include "arithmetic/kda/bind.hpp"
#include "cuda/device.hpp"
#include "rlk/backend.hpp"
#include "rlk/ops.hpp"

namespace rlk::cuda {
namespace {

using ::rlk::kda::Problem;
using ::rlk::kda::States;
using ::rlk::kda::Tensor;

template <class T>
kda::Strided<T> strided(const Tensor& t) {
  return {static_cast<T*>(t.data), t.batch, t.token, t.head};
}
kda::Real real(const Tensor& t) { return {t.data, t.batch, t.token, t.head, t.type == Float::bf16}; }

kda::Params params_of(const Problem& p) {
  kda::Params c;
  c.batch = p.batch, c.tokens = p.tokens, c.sequences = p.sequences;
  c.heads = p.heads, c.value_heads = p.value_heads, c.dim = p.k_dim;
  c.cu_seqlens = p.cu_seqlens;
  c.scale = static_cast<float>(p.scale), c.lower_bound = static_cast<float>(p.lower_bound);
  c.v_first = p.v_first, c.l2norm = p.l2norm, c.beta_sigmoid = p.beta_sigmoid, c.neg_eigval = p.neg_eigval;
  c.gate = p.gate;
  c.q = strided<const __nv_bfloat16>(p.q), c.k = strided<const __nv_bfloat16>(p.k);
  c.v = strided<const __nv_bfloat16>(p.v);
  c.g = real(p.g), c.beta = real(p.beta);
  c.a_log = p.a_log, c.dt_bias = p.dt_bias;
  c.initial = static_cast<const float*>(p.initial.data);
  c.out = strided<__nv_bfloat16>(p.out);
  c.final = static_cast<float*>(p.final.data);
  c.d_out = strided<const __nv_bfloat16>(p.d_out);
  c.d_final = static_cast<const float*>(p.d_final.data);
  c.d_q = strided<__nv_bfloat16>(p.d_q), c.d_k = strided<__nv_bfloat16>(p.d_k),
  c.d_v = strided<__nv_bfloat16>(p.d_v);
  c.d_g = real(p.d_g), c.d_beta = real(p.d_beta);
  c.d_initial = static_cast<float*>(p.d_initial.data);
  c.d_a_log = p.d_a_log, c.d_dt_bias = p.d_dt_bias;
  c.skip = (p.d_q ? 0 : kda::kSkipQ) | (p.d_k ? 0 : kda::kSkipK) | (p.d_v ? 0 : kda::kSkipV) |
           (p.d_g ? 0 : kda::kSkipG) | (p.d_beta ? 0 : kda::kSkipBeta);
  return c;
}

// Rows that start on 16 bytes, and 32-bit steps inside a chunk.
bool fits(const Tensor& t) {
  const std::int64_t per_line = t.type == Float::f32 ? 4 : 8;
  return !t || (reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0 && t.batch % per_line == 0 &&
                t.token % per_line == 0 && t.head % per_line == 0 && t.token >= 0 && t.token < (1 << 24));
}
bool is_16(const Tensor& t) { return !t || t.type == Float::bf16; }
bool is_real(const Tensor& t) { return !t || t.type != Float::f16; }
bool is_dense(const Problem& p, const States& s) {
  const std::int64_t size = std::int64_t{p.k_dim} * p.v_dim;
  return !s ||
         ((s.head == size || p.value_heads == 1) && (s.row == size * p.value_heads || p.sequences == 1));
}

rlk_verdict check_problem(const Problem& p) {
  if (p.k_dim != p.v_dim || (p.k_dim != 64 && p.k_dim != 128))
    return refuse("K={0}, V={1}: the tiles are cut for K = V = 64 or 128", {p.k_dim, p.v_dim},
                  "pad both with zeros to 64 or 128: same results");
  if (p.tokens == 0 || p.batch == 0 || p.sequences == 0) return refuse("no tokens", {}, "nothing to compute");
  if (p.value_heads == 0) return refuse("v has no heads", {}, "nothing to compute");
  if (p.chunk != 64) return refuse("chunk_size {0}", {p.chunk}, "chunk_size 64");
  if (!is_real(p.g) || !is_real(p.beta)) return refuse("g or beta in fp16", {}, "give them in fp32 or bf16");
  if (!is_16(p.out) || !is_16(p.d_out) || !is_16(p.d_q) || !is_16(p.d_k) || !is_16(p.d_v))
    return refuse("out, d_out, d_q, d_k and d_v are bf16 here", {}, "ask for them in bf16");
  if (!is_real(p.d_g) || !is_real(p.d_beta))
    return refuse("d_g or d_beta in fp16", {}, "ask for fp32 or bf16");
  if (!fits(p.q) || !fits(p.k) || !fits(p.v) || !fits(p.g) || !fits(p.out) || !fits(p.d_out) ||
      !fits(p.d_q) || !fits(p.d_k) || !fits(p.d_v) || !fits(p.d_g))
    return refuse("rows that do not start on 16 bytes, or tokens 2^24 elements apart", {},
                  "align every row to 16 bytes");
  if (reinterpret_cast<std::uintptr_t>(p.dt_bias) % 8 != 0)
    return refuse("dt_bias is not aligned to 8 bytes");
  if (!is_dense(p, p.initial) || !is_dense(p, p.final) || !is_dense(p, p.d_final) ||
      !is_dense(p, p.d_initial))
    return refuse("states with strides", {}, "make them dense");
  if (p.slots() * p.value_heads * 2 > INT32_MAX || p.sequences * p.value_heads * 16 > INT32_MAX)
    return refuse("{0} chunks times {1} heads are more than one grid", {p.slots(), p.value_heads});
  return kAccept;
}

enum class Form { whole, unfused, segments };

template <Form form, class Args>
rlk_verdict check_call(const Args& a) {
  if (const rlk_verdict v = ::rlk::kda::check(a, true); v.code != RLK_OK) return v;
  if (reinterpret_cast<std::uintptr_t>(a.chunk_records.template data<char>()) % 16 != 0)
    return refuse("chunk_records does not start on 16 bytes", {}, "align it to 16 bytes");
  const Problem p = ::rlk::kda::problem_of(a);
  if (const rlk_verdict v = check_problem(p); v.code != RLK_OK) return v;
  const std::int64_t pieces = p.sequences * (p.cu_seqlens ? 1 : p.tokens / 4096 + 1) + p.tokens / 4096;
  if (form == Form::segments && pieces * p.value_heads * 32 > INT32_MAX)
    return refuse("{0} segments times {1} heads are more than one grid", {pieces, p.value_heads});
  return kAccept;
}
template <Form form>
rlk_verdict supports_forward(const KdaFwd& a, const rlk_request&) {
  if (a.chunk_states || a.chunk_inverses)
    return refuse("chunk_states or chunk_inverses are asked for", {},
                  "leave them out: the backward recomputes them, or reads chunk_records");
  return check_call<form>(a);
}
template <Form form>
rlk_verdict supports_backward(const KdaBwd& a, const rlk_request&) {
  return check_call<form>(a);
}

template <Form form, class Args>
kda::Params prepared(const Args& a) {
  kda::Params c = params_of(::rlk::kda::problem_of(a));
  c.unfused = form == Form::unfused;
  c.segments = form == Form::segments;
  c.records = const_cast<char*>(a.chunk_records.template data<char>());
  return c;
}

template <Form form>
std::uint64_t workspace_forward(const KdaFwd& a, const rlk_request&) {
  return kda::forward_workspace(prepared<form>(a));
}
template <Form form>
std::uint64_t workspace_backward(const KdaBwd& a, const rlk_request&) {
  return kda::backward_workspace(prepared<form>(a));
}

// Launches on the call's device and puts the caller's back.
template <class Launch>
rlk_code on_device(const Call& call, const char* op, Launch&& launch) {
  if (reinterpret_cast<std::uintptr_t>(call.workspace().data()) % 256 != 0)
    return call.fail(RLK_UNSUPPORTED, std::string(op) + ": the workspace is not aligned to 256 bytes");
  const DeviceGuard guard(call.device().id);
  return check(call, op, launch(call.workspace().data(), stream_of(call)));
}

template <Form form>
rlk_code run_forward(const KdaFwd& a, const Call& call) {
  return on_device(call, "kda_fwd", [&](void* workspace, cudaStream_t stream) {
    return kda::forward(prepared<form>(a), workspace, stream);
  });
}
template <Form form>
rlk_code run_backward(const KdaBwd& a, const Call& call) {
  return on_device(call, "kda_bwd", [&](void* workspace, cudaStream_t stream) {
    return kda::backward(prepared<form>(a), workspace, stream);
  });
}

constexpr Facts facts(const char* id, const char* arithmetic, const char* doc, std::int32_t priority) {
  return {.id = id,
          .doc = doc,
          .priority = priority,
          .arithmetic = arithmetic,
          .dtypes = RLK_BF16,
          .traits = RLK_DETERMINISTIC | RLK_BATCH_INVARIANT | RLK_CAPTURE_SAFE | RLK_STRICT,
          .device_type = kDLCUDA,
          .min_arch = 90,
          .max_arch = 90};
}

template <Form form>
constexpr rlk_implementation forward(const Facts& f) {
  return implement<KdaFwd, run_forward<form>, supports_forward<form>, workspace_forward<form>>(f);
}
template <Form form>
constexpr rlk_implementation backward(const Facts& f) {
  return implement<KdaBwd, run_backward<form>, supports_backward<form>, workspace_backward<form>>(f);
}

}  // namespace

extern const rlk_implementation kda_fwd_sm90, kda_fwd_sm90_segments, kda_bwd_sm90, kda_bwd_sm90_unfused,
    kda_bwd_sm90_segments;
const rlk_implementation kda_fwd_sm90 = forward<Form::whole>(
    facts("cuda.sm90", "sm90/kda64",
          "Hopper: preparation per chunk, then one scan with the state in registers", 300));
const rlk_implementation kda_fwd_sm90_segments =
    forward<Form::segments>(facts("cuda.sm90_seg4096", "sm90/kda64/seg4096",
                                  "Hopper: long sequences by segments of 4096 tokens side by side", 110));
const rlk_implementation kda_bwd_sm90 = backward<Form::whole>(facts(
    "cuda.sm90", "sm90/kda64/f64", "Hopper: both scans in one grid, then one fused kernel per chunk", 300));
const rlk_implementation kda_bwd_sm90_unfused =
    backward<Form::unfused>(facts("cuda.sm90_unfused", "sm90/kda64/f64",
                                  "Hopper: as cuda.sm90, with inter-chunk gradients through memory", 290));
const rlk_implementation kda_bwd_sm90_segments = backward<Form::segments>(
    facts("cuda.sm90_seg4096", "sm90/kda64/f64/seg4096",
          "Hopper: as cuda.sm90, long sequences by segments of 4096 tokens side by side", 110));

}  // namespace rlk::cuda
