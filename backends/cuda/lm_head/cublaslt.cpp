#include "cuda/lm_head/cublaslt.hpp"

#include <dlfcn.h>

#include <cstring>
#include <map>
#include <mutex>

extern char** environ;

namespace rlk::cuda::lm_head {
namespace {

cudaDataType type_of(Float t) {
  return t == Float::f32 ? CUDA_R_32F : t == Float::bf16 ? CUDA_R_16BF : CUDA_R_16F;
}

CublasLt open_library() {
  CublasLt lt;
  void* library = nullptr;
  // The version that matches the header first; 12 keeps the same interface for everything used here.
  for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
    if ((library = dlopen(name, RTLD_NOW | RTLD_LOCAL)) != nullptr) {
      lt.name = name;
      break;
    }
  }
  if (library == nullptr) {
    lt.reason = "libcublasLt.so.13 and libcublasLt.so.12 cannot be opened";
    return lt;
  }
  auto find = [&](auto& function, const char* symbol) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, symbol));
    if (function == nullptr && lt.reason.empty()) lt.reason = lt.name + " has no " + symbol;
  };
  find(lt.get_version, "cublasLtGetVersion");
  find(lt.create, "cublasLtCreate");
  find(lt.matmul, "cublasLtMatmul");
  find(lt.desc_create, "cublasLtMatmulDescCreate");
  find(lt.desc_destroy, "cublasLtMatmulDescDestroy");
  find(lt.desc_set, "cublasLtMatmulDescSetAttribute");
  find(lt.layout_create, "cublasLtMatrixLayoutCreate");
  find(lt.layout_destroy, "cublasLtMatrixLayoutDestroy");
  find(lt.preference_create, "cublasLtMatmulPreferenceCreate");
  find(lt.preference_destroy, "cublasLtMatmulPreferenceDestroy");
  find(lt.preference_set, "cublasLtMatmulPreferenceSetAttribute");
  find(lt.heuristic, "cublasLtMatmulAlgoGetHeuristic");
  find(lt.algo_get, "cublasLtMatmulAlgoConfigGetAttribute");
  find(lt.algo_check, "cublasLtMatmulAlgoCheck");
  return lt;
}

// One handle per device, made on first use and kept: the library binds a handle to the device current at its
// creation.
cublasLtHandle_t handle_of_current_device() {
  static std::mutex mutex;
  static std::map<int, cublasLtHandle_t> handles;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return nullptr;
  std::scoped_lock lock(mutex);
  auto [at, fresh] = handles.try_emplace(device, nullptr);
  if (fresh && cublaslt().create(&at->second) != CUBLAS_STATUS_SUCCESS) at->second = nullptr;
  return at->second;
}

}  // namespace

const CublasLt& cublaslt() {
  static const CublasLt lt = open_library();
  return lt;
}

std::vector<std::string> cublaslt_ambient() {
  std::vector<std::string> names;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const char* end = std::strchr(*entry, '=');
    if (end == nullptr) continue;
    std::string name(static_cast<const char*>(*entry), end);
    // Logging changes nothing; everything else of the library's own is taken to matter.
    const bool logs = name.find("_LOG") != std::string::npos;
    if (name == "NVIDIA_TF32_OVERRIDE" || (name.rfind("CUBLAS", 0) == 0 && !logs))
      names.push_back(std::move(name));
  }
  return names;
}

const char* cublaslt_ambient_text() {
  static const std::string text = [] {
    std::string names;
    for (const std::string& name : cublaslt_ambient()) names += (names.empty() ? "" : ", ") + name;
    return names.empty() ? names : names + " is set, which may change what cuBLASLt computes";
  }();
  return text.empty() ? nullptr : text.c_str();
}

// The library is column-major: it sees C^T[n x m] = B^T-ish * A, so our B is its A.
LtProduct::LtProduct(const Gemm& g) {
  const CublasLt& lt = cublaslt();
  if (!lt.reason.empty()) return;
  if (lt.desc_create(&desc_, CUBLAS_COMPUTE_32F, CUDA_R_32F) != CUBLAS_STATUS_SUCCESS) return;
  const cublasOperation_t first = g.b.k_contiguous ? CUBLAS_OP_T : CUBLAS_OP_N,
                          second = g.a.k_contiguous ? CUBLAS_OP_N : CUBLAS_OP_T;
  auto layout = [&](cublasLtMatrixLayout_t* to, Float t, std::int64_t rows, std::int64_t columns,
                    std::int64_t ld) {
    return lt.layout_create(to, type_of(t), static_cast<std::uint64_t>(rows),
                            static_cast<std::uint64_t>(columns), ld) == CUBLAS_STATUS_SUCCESS;
  };
  // A single column may come with any stride; the library wants one that covers it.
  auto covering = [](std::int64_t ld, std::int64_t rows) { return ld < rows ? rows : ld; };
  ok_ = lt.desc_set(desc_, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first) == CUBLAS_STATUS_SUCCESS &&
        lt.desc_set(desc_, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second) == CUBLAS_STATUS_SUCCESS &&
        (g.b.k_contiguous ? layout(&a_, g.b.type, g.k, g.n, covering(g.b.ld, g.k))
                          : layout(&a_, g.b.type, g.n, g.k, covering(g.b.ld, g.n))) &&
        (g.a.k_contiguous ? layout(&b_, g.b.type, g.k, g.m, covering(g.a.ld, g.k))
                          : layout(&b_, g.b.type, g.m, g.k, covering(g.a.ld, g.m))) &&
        layout(&c_, g.out, g.n, g.m, covering(g.ldc, g.n));
}

LtProduct::~LtProduct() {
  const CublasLt& lt = cublaslt();
  for (cublasLtMatrixLayout_t layout : {a_, b_, c_})
    if (layout != nullptr) lt.layout_destroy(layout);
  if (desc_ != nullptr) lt.desc_destroy(desc_);
}

std::vector<LtCandidate> LtProduct::candidates(bool strict, std::size_t workspace, int count) const {
  const CublasLt& lt = cublaslt();
  cublasLtMatmulPreference_t preference = nullptr;
  if (lt.preference_create(&preference) != CUBLAS_STATUS_SUCCESS) return {};
  lt.preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace);
  if (strict) {
    const std::uint32_t none = CUBLASLT_REDUCTION_SCHEME_NONE;
    lt.preference_set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &none, sizeof none);
  }
  std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<std::size_t>(count));
  int found = 0;
  cublasLtHandle_t handle = handle_of_current_device();
  if (handle == nullptr || lt.heuristic(handle, desc_, a_, b_, c_, c_, preference, count, results.data(),
                                        &found) != CUBLAS_STATUS_SUCCESS)
    found = 0;
  lt.preference_destroy(preference);

  std::vector<LtCandidate> out;
  for (int i = 0; i < found; ++i) {
    LtCandidate c{};
    c.algo = results[static_cast<std::size_t>(i)].algo;
    c.workspace = results[static_cast<std::size_t>(i)].workspaceSize;
    auto get = [&](cublasLtMatmulAlgoConfigAttributes_t what, int& to) {
      std::uint32_t value = 0;
      std::size_t written = 0;
      // Inner and cluster shapes are 16-bit attributes.
      const bool small =
          what == CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID || what == CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID;
      to = lt.algo_get(&c.algo, what, &value, small ? 2 : 4, &written) == CUBLAS_STATUS_SUCCESS
               ? static_cast<int>(value)
               : -1;
    };
    get(CUBLASLT_ALGO_CONFIG_ID, c.id);
    get(CUBLASLT_ALGO_CONFIG_TILE_ID, c.tile);
    get(CUBLASLT_ALGO_CONFIG_STAGES_ID, c.stages);
    get(CUBLASLT_ALGO_CONFIG_SPLITK_NUM, c.split_k);
    get(CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, c.reduction);
    get(CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, c.swizzle);
    get(CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, c.custom);
    get(CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID, c.inner);
    get(CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, c.cluster);
    out.push_back(c);
  }
  return out;
}

cublasStatus_t LtProduct::run(const Gemm& g, const LtCandidate& candidate, void* workspace,
                              cudaStream_t stream) const {
  const float one = 1.0f, zero = 0.0f;
  return cublaslt().matmul(handle_of_current_device(), desc_, &one, g.b.data, a_, g.a.data, b_, &zero, g.c,
                           c_, g.c, c_, &candidate.algo, workspace, candidate.workspace, stream);
}

bool LtProduct::fits(const LtCandidate& candidate) const {
  cublasLtMatmulHeuristicResult_t result{};
  return cublaslt().algo_check(handle_of_current_device(), desc_, a_, b_, c_, c_, &candidate.algo, &result) ==
             CUBLAS_STATUS_SUCCESS &&
         result.state == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= candidate.workspace;
}

}  // namespace rlk::cuda::lm_head
