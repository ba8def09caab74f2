// lm_head and its backward on CUDA: five implementations, each one way of computing the same products.
//
//   cuda.sm90      sm90/t25k16     the fastest of our kernels and cuBLASLt: same bits
//   cuda.sm90_r4   sm90/t25k16/r4  our kernels, K (V in d_hidden) in four ranges: long sums
//   cuda.cublaslt  sm90/t25k16     the library alone, where its tensor-core family serves the shape
//   cuda.fma32     fma32/kb1024    CUDA cores, any NVIDIA GPU of compute capability 8.0 and up
//   cuda.golden    fma64           FP64 tensor cores on Hopper, FP64 units elsewhere
//
// None needs workspace; three make use of one. cuda.sm90 and cuda.cublaslt, of 64 bytes: cuBLASLt's
// dynamically scheduled kernels keep a tile counter there, never partial sums (d_weight for M up to 1024
// gains up to a tenth). cuda.sm90_r4, beyond 64 rows, of room for the sums of its ranges, without which it
// takes twice as long.
//
// d_bias is the column sum of d_out in arithmetic fma32/kb1024 (a product with ones), in fma64 for the golden
// one.
#include <algorithm>

#include "cuda/device.hpp"
#include "cuda/lm_head/cublaslt.hpp"
#include "cuda/lm_head/select.hpp"
#include "cuda/lm_head/views.hpp"

namespace rlk::cuda {
namespace {

using namespace lm_head;
using Launch = cudaError_t (*)(const Gemm&, const Call&);

cudaError_t with_fma32(const Gemm& g, const Call& call) { return launch_fma32(g, stream_of(call)); }
cudaError_t with_fma64(const Gemm& g, const Call& call) {
  return launch_fma64(g, call.device().arch, stream_of(call));
}
cudaError_t with_fastest(const Gemm& g, const Call& call) {
  return launch_fastest(g, call.device().id, call.workspace().data(), call.workspace().size(),
                        stream_of(call));
}
cudaError_t with_ranges(const Gemm& g, const Call& call) {
  return launch_ranges(g, call.device().id, call.workspace().data(), call.workspace().size(),
                       stream_of(call));
}
cudaError_t with_library(const Gemm& g, const Call& call) {
  return launch_library(g, call.device().id, call.workspace().data(), call.workspace().size(),
                        stream_of(call));
}

template <Launch launch>
rlk_code run_forward(const LmHead& a, const Call& call) {
  const DeviceGuard guard(call.device().id);
  return check(call, "lm_head", launch(forward_product(a), call));
}

template <Launch launch, bool golden>
rlk_code run_backward(const LmHeadBwd& a, const Call& call) {
  const DeviceGuard guard(call.device().id);
  cudaError_t error = cudaSuccess;
  if (a.d_hidden) error = launch(d_hidden_product(a), call);
  if (error == cudaSuccess && a.d_weight) error = launch(d_weight_product(a), call);
  if (error == cudaSuccess && a.d_bias) {
    const RowsOf rows = rows_of(a.d_out);
    error = launch_column_sums(a.d_out.data<void>(), float_of(a.d_out.dtype()), rows.stride, rows.rows,
                               a.d_out.dim(-1), a.d_bias.data<void>(), float_of(a.d_bias.dtype()), golden,
                               stream_of(call));
  }
  return check(call, "lm_head_bwd", error);
}

template <class Args>
rlk_verdict supports_any(const Args& a, const rlk_request&) {
  return check_products(a);
}

rlk_verdict supports_tensor_core(const LmHead& a, const rlk_request&) { return check_products(a); }
rlk_verdict supports_tensor_core(const LmHeadBwd& a, const rlk_request&) {
  if (a.d_out.dtype() != a.hidden.dtype())
    return refuse("the tensor core takes two operands of one 16-bit dtype, d_out is fp32", {},
                  "round d_out to hidden's dtype", 0);
  return check_products(a);
}

template <class Args>
rlk_verdict supports_sm90(const Args& a, const rlk_request& request) {
  return supports_tensor_core(a, request);
}

// The library keeps to its tensor-core family when every line starts on 16 bytes; what else it would do is
// not known.
rlk_verdict check_library(const Gemm& g, const rlk_request& request) {
  if (!cublaslt().reason.empty()) return refuse(cublaslt().reason.c_str());
  if (const char* ambient = cublaslt_ambient_text();
      ambient != nullptr && request.precision != RLK_PRECISION_STANDARD)
    return refuse(ambient, {}, "unset it");
  const auto per_line = static_cast<std::int64_t>(16 / bytes_of(g.b.type));
  if (g.k == 0 || g.m == 0 || g.n == 0) return refuse("an empty product");
  if (g.a.k_contiguous && g.k % per_line != 0)
    return refuse("K={0} is not a multiple of {1}, which keeps the tensor-core family",
                  {g.k, per_line, (g.k + per_line - 1) / per_line * per_line},
                  "pad K with zeros to {2}: same bits");
  if (!aligned16(g.a) || !aligned16(g.b))
    return refuse("an input's rows do not start on 16 bytes, which keeps the tensor-core family");
  if (reinterpret_cast<std::uintptr_t>(g.c) % 16 != 0 ||
      g.ldc * static_cast<std::int64_t>(bytes_of(g.out)) % 16 != 0)
    return refuse("the output's rows do not start on 16 bytes, which keeps the tensor-core family");
  const DeviceGuard guard(request.device.id);
  return library_serves(g) ? kAccept : refuse("the library offers no algorithm of the admitted family");
}

rlk_verdict supports_library(const LmHead& a, const rlk_request& request) {
  const rlk_verdict v = check_products(a);
  return v.code != RLK_OK ? v : check_library(forward_product(a), request);
}
rlk_verdict supports_library_bwd(const LmHeadBwd& a, const rlk_request& request) {
  rlk_verdict v = supports_tensor_core(a, request);
  if (v.code == RLK_OK && a.d_hidden) v = check_library(d_hidden_product(a), request);
  if (v.code == RLK_OK && a.d_weight) v = check_library(d_weight_product(a), request);
  return v;
}

template <class Args>
std::uint64_t library_workspace(const Args&, const rlk_request&) {
  return kLibraryWorkspace;
}
std::uint64_t ranges_workspace(const LmHead& a, const rlk_request& request) {
  return ranges_workspace_on(request.device.id, forward_product(a));
}
std::uint64_t ranges_workspace_bwd(const LmHeadBwd& a, const rlk_request& request) {
  const std::uint64_t first = a.d_hidden ? ranges_workspace_on(request.device.id, d_hidden_product(a)) : 0;
  return a.d_weight ? std::max<std::uint64_t>(first, kLibraryWorkspace) : first;
}

constexpr std::uint32_t kTraits = RLK_DETERMINISTIC | RLK_BATCH_INVARIANT | RLK_CAPTURE_SAFE;

constexpr Facts hopper_facts(const char* id, const char* doc, std::int32_t priority, const char* arithmetic) {
  return {.id = id,
          .doc = doc,
          .priority = priority,
          .arithmetic = arithmetic,
          .dtypes = RLK_BF16 | RLK_F16,
          .traits = kTraits | RLK_STRICT | RLK_WORKSPACE_OPTIONAL,
          .device_type = kDLCUDA,
          .min_arch = 90,
          .max_arch = 90};
}
constexpr Facts kSm90 = hopper_facts("cuda.sm90", "the fastest of our Hopper kernels and cuBLASLt, same bits",
                                     300, "sm90/t25k16");
// Behind every other fast one: nobody gets other bits unasked.
constexpr Facts kRanged = hopper_facts(
    "cuda.sm90_r4", "our Hopper kernels, K in four ranges: few outputs, long sums", 50, "sm90/t25k16/r4");
constexpr Facts kLibrary =
    hopper_facts("cuda.cublaslt", "cuBLASLt without split-K, stream-K and GEMV kernels", 200, "sm90/t25k16");
constexpr Facts kFma32 = {.id = "cuda.fma32",
                          .doc = "ascending fp32 FMA chains on CUDA cores",
                          .priority = 100,
                          .arithmetic = "fma32/kb1024",
                          .dtypes = kFloats,
                          .traits = kTraits | RLK_STRICT,
                          .device_type = kDLCUDA,
                          .min_arch = 80};
constexpr Facts kGolden = {.id = "cuda.golden",
                           .doc = "ascending fp64 FMA chains, on FP64 tensor cores where there are any",
                           .priority = 0,
                           .arithmetic = "fma64",
                           .dtypes = kFloats,
                           .traits = kTraits | RLK_STRICT | RLK_GOLDEN,
                           .device_type = kDLCUDA,
                           .min_arch = 80};

}  // namespace

extern const rlk_implementation lm_head_sm90, lm_head_sm90_r4, lm_head_cublaslt, lm_head_fma32,
    lm_head_golden;
extern const rlk_implementation lm_head_bwd_sm90, lm_head_bwd_sm90_r4, lm_head_bwd_cublaslt,
    lm_head_bwd_fma32, lm_head_bwd_golden;

const rlk_implementation lm_head_sm90 =
    implement<LmHead, run_forward<with_fastest>, supports_sm90<LmHead>, library_workspace<LmHead>>(kSm90);
const rlk_implementation lm_head_sm90_r4 =
    implement<LmHead, run_forward<with_ranges>, supports_sm90<LmHead>, ranges_workspace>(kRanged);
const rlk_implementation lm_head_cublaslt =
    implement<LmHead, run_forward<with_library>, supports_library, library_workspace<LmHead>>(kLibrary);
const rlk_implementation lm_head_fma32 =
    implement<LmHead, run_forward<with_fma32>, supports_any<LmHead>>(kFma32);
const rlk_implementation lm_head_golden =
    implement<LmHead, run_forward<with_fma64>, supports_any<LmHead>>(kGolden);

const rlk_implementation lm_head_bwd_sm90 =
    implement<LmHeadBwd, run_backward<with_fastest, false>, supports_sm90<LmHeadBwd>,
              library_workspace<LmHeadBwd>>(kSm90);
const rlk_implementation lm_head_bwd_sm90_r4 =
    implement<LmHeadBwd, run_backward<with_ranges, false>, supports_sm90<LmHeadBwd>, ranges_workspace_bwd>(
        kRanged);
const rlk_implementation lm_head_bwd_cublaslt =
    implement<LmHeadBwd, run_backward<with_library, false>, supports_library_bwd,
              library_workspace<LmHeadBwd>>(kLibrary);
const rlk_implementation lm_head_bwd_fma32 =
    implement<LmHeadBwd, run_backward<with_fma32, false>, supports_any<LmHeadBwd>>(kFma32);
const rlk_implementation lm_head_bwd_golden =
    implement<LmHeadBwd, run_backward<with_fma64, true>, supports_any<LmHeadBwd>>(kGolden);

}  // namespace rlk::cuda
