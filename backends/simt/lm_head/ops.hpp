// The lm_head implementations of a GPU backend on a launcher. A backend's file includes this, compiled by the
// host compiler, and names its facts:
//
//   struct Portable {
//     static constexpr std::int32_t kDevice = kDLROCM;
//     static lm_head::Launcher launcher() { return lm_head_portable(); }
//   };
//   const rlk_implementation lm_head_golden = lm_head::golden<Portable, LmHead>("hip.golden");
//
// No workspace and no copies: the kernels walk any strides that the op allows. d_bias is a product with ones,
// by the same chain as everything else.
#pragma once

#include <string>
#include <type_traits>

#include "rlk/backend.hpp"
#include "rlk/ops.hpp"
#include "simt/lm_head/product.hpp"

namespace rlk::simt::lm_head {

template <bool Writable>
std::int64_t rows_of(const View<Writable>& t) {
  std::int64_t rows = 1;
  for (std::int32_t i = 0; i + 1 < t.rank(); ++i) rows *= t.dim(i);
  return rows;
}

// All dimensions but the last as one index.
template <bool Writable>
Axis lines_of(const View<Writable>& t) {
  Axis axis;
  for (std::int32_t i = t.rank() - 2; i >= 0; --i) {
    const std::int64_t size = t.dim(i), stride = t.stride(i);
    if (size == 1) continue;
    const int last = axis.levels - 1;
    if (last >= 0 && stride == axis.stride[last] * axis.size[last]) {
      axis.size[last] *= size;
      continue;
    }
    axis.size[axis.levels] = size;
    axis.stride[axis.levels++] = stride;
  }
  return axis;
}

template <bool Writable>
Operand operand(const View<Writable>& t, const Axis& line, const Axis& depth) {
  return {t.template data<void>(), float_of(t.dtype()), line, depth};
}

inline void write_to(Product& p, const Out& out) {
  p.out = out.data<void>();
  p.out_type = float_of(out.dtype());
  p.out_row = lines_of(out);
}

inline Product forward_product(const LmHead& a) {
  Product p;
  p.rows = rows_of(a.hidden), p.cols = a.weight.dim(0), p.depth = a.weight.dim(1);
  p.a = operand(a.hidden, lines_of(a.hidden), every(1));
  p.b = operand(a.weight, lines_of(a.weight), every(1));
  write_to(p, a.out);
  if (a.bias) p.bias = a.bias.data<void>(), p.bias_type = float_of(a.bias.dtype());
  return p;
}

inline Product d_hidden_product(const LmHeadBwd& a) {
  Product p;
  p.rows = rows_of(a.d_out), p.cols = a.weight.dim(1), p.depth = a.weight.dim(0);
  p.a = operand(a.d_out, lines_of(a.d_out), every(1));
  p.b = operand(a.weight, every(1), lines_of(a.weight));
  write_to(p, a.d_hidden);
  return p;
}

inline Product d_weight_product(const LmHeadBwd& a) {
  Product p;
  p.rows = a.weight.dim(0), p.cols = a.weight.dim(1), p.depth = rows_of(a.d_out);
  p.a = operand(a.d_out, every(1), lines_of(a.d_out));
  p.b = operand(a.hidden, every(1), lines_of(a.hidden));
  write_to(p, a.d_weight);
  return p;
}

inline Product d_bias_product(const LmHeadBwd& a) {
  Product p;
  p.rows = 1, p.cols = a.weight.dim(0), p.depth = rows_of(a.d_out);
  p.b = operand(a.d_out, every(1), lines_of(a.d_out));
  write_to(p, a.d_bias);
  return p;
}

template <class Backend, Sum sum>
rlk_code start(const Product& p, const char* op, const Call& call) {
  const char* error = Backend::launcher()(p, sum, call.stream(), call.device().id);
  return error == nullptr ? RLK_OK : call.fail(RLK_BACKEND_ERROR, std::string(op) + ": " + error);
}

template <class Backend, class Args, Sum sum>
rlk_code run(const Args& a, const Call& call) {
  if constexpr (std::is_same_v<Args, LmHead>) {
    return start<Backend, sum>(forward_product(a), Args::kName, call);
  } else {
    // The column sums have no second operand for a matrix core: their chain is the one of fma32.
    constexpr Sum kColumns = sum == Sum::mfma ? Sum::fma32 : sum;
    rlk_code code = RLK_OK;
    if (a.d_hidden) code = start<Backend, sum>(d_hidden_product(a), Args::kName, call);
    if (code == RLK_OK && a.d_weight) code = start<Backend, sum>(d_weight_product(a), Args::kName, call);
    if (code == RLK_OK && a.d_bias) code = start<Backend, kColumns>(d_bias_product(a), Args::kName, call);
    return code;
  }
}

inline constexpr std::uint32_t kTraits = kPinned | RLK_CAPTURE_SAFE;

template <class Backend, class Args>
constexpr rlk_implementation fma32(const char* id) {
  return implement<Args, run<Backend, Args, Sum::fma32>>({.id = id,
                                                          .doc = "ascending fp32 FMA chains",
                                                          .priority = 100,
                                                          .arithmetic = "fma32/kb1024",
                                                          .dtypes = kFloats,
                                                          .traits = kTraits,
                                                          .device_type = Backend::kDevice});
}

template <class Backend, class Args>
constexpr rlk_implementation golden(const char* id) {
  return implement<Args, run<Backend, Args, Sum::fma64>>({.id = id,
                                                          .doc = "ascending fp64 FMA chains, one rounding",
                                                          .priority = 0,
                                                          .arithmetic = "fma64",
                                                          .dtypes = kFloats,
                                                          .traits = kTraits | RLK_GOLDEN,
                                                          .device_type = Backend::kDevice});
}

}  // namespace rlk::simt::lm_head
