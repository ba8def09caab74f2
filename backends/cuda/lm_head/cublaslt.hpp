// lm_head products through cuBLASLt, held to arithmetic sm90/t25k16.
//
// The library is opened at run time (it is half a gigabyte, and may be absent); only its types come from the
// header. Of the algorithms it offers, those are admitted whose bits are known on Hopper: the tensor-core
// family (id 66), no split of k, no reduction scheme, no workspace. Within that set every algorithm gives the
// same bits, so a choice by speed is free.
#pragma once

#include <cublasLt.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/lm_head/gemm.h"

namespace rlk::cuda::lm_head {

struct CublasLt {
  decltype(&::cublasLtGetVersion) get_version = nullptr;
  decltype(&::cublasLtCreate) create = nullptr;
  decltype(&::cublasLtMatmul) matmul = nullptr;
  decltype(&::cublasLtMatmulDescCreate) desc_create = nullptr;
  decltype(&::cublasLtMatmulDescDestroy) desc_destroy = nullptr;
  decltype(&::cublasLtMatmulDescSetAttribute) desc_set = nullptr;
  decltype(&::cublasLtMatrixLayoutCreate) layout_create = nullptr;
  decltype(&::cublasLtMatrixLayoutDestroy) layout_destroy = nullptr;
  decltype(&::cublasLtMatmulPreferenceCreate) preference_create = nullptr;
  decltype(&::cublasLtMatmulPreferenceDestroy) preference_destroy = nullptr;
  decltype(&::cublasLtMatmulPreferenceSetAttribute) preference_set = nullptr;
  decltype(&::cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;
  decltype(&::cublasLtMatmulAlgoConfigGetAttribute) algo_get = nullptr;
  decltype(&::cublasLtMatmulAlgoCheck) algo_check = nullptr;

  std::string name;    // file that was opened
  std::string reason;  // why it cannot be used; empty when it can
};

// Opens the library on the first call; later calls return the same answer.
const CublasLt& cublaslt();

// Names of environment variables that are set and could change what the library computes or which kernels it
// picks.
std::vector<std::string> cublaslt_ambient();
// The same as a sentence that lives for ever, or null when there are none. Read once.
const char* cublaslt_ambient_text();

// The workspace an admitted algorithm may ask for: the dynamically scheduled kernels keep a tile counter
// there. Partial sums would need megabytes.
inline constexpr std::size_t kLibraryWorkspace = 64;

struct LtCandidate {
  cublasLtMatmulAlgo_t algo;
  int id, tile, stages, split_k, reduction, swizzle, cluster, inner, custom;
  std::size_t workspace;
  bool admitted() const {
    return id == 66 && split_k <= 1 && reduction == 0 && workspace <= kLibraryWorkspace;
  }
};

// The descriptors of one product, alive as long as the object.
class LtProduct {
 public:
  explicit LtProduct(const Gemm&);
  ~LtProduct();
  LtProduct(const LtProduct&) = delete;
  LtProduct& operator=(const LtProduct&) = delete;

  explicit operator bool() const { return ok_; }
  // Up to `count` algorithms in the library's order. `strict` asks, by preference, for those without a
  // reduction scheme.
  std::vector<LtCandidate> candidates(bool strict, std::size_t workspace, int count) const;
  // Whether an algorithm found for another size serves this one.
  bool fits(const LtCandidate&) const;
  cublasStatus_t run(const Gemm&, const LtCandidate&, void* workspace, cudaStream_t) const;

 private:
  cublasLtMatmulDesc_t desc_ = nullptr;
  cublasLtMatrixLayout_t a_ = nullptr, b_ = nullptr, c_ = nullptr;
  bool ok_ = false;
};

}  // namespace rlk::cuda::lm_head
