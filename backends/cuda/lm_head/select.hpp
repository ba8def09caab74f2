// Which kernel serves a product in arithmetic sm90/t25k16: our wgmma tiles, our mma.sync kernel, or an
// admitted algorithm of cuBLASLt. All give the same bits, so the choice is by speed alone: the first call of
// a size class times the candidates on its own operands (each run writes the same result) and remembers the
// winner; under stream capture, where nothing can be timed, a fixed rule decides and nothing is remembered.
#pragma once

#include "cuda/lm_head/gemm.h"

namespace rlk::cuda::lm_head {

// `workspace` may be smaller than kLibraryWorkspace: algorithms that need one are then left out.
cudaError_t launch_fastest(const Gemm&, int device, void* workspace, std::size_t workspace_bytes,
                           cudaStream_t);
// The same among cuBLASLt's algorithms only; a size the library does not serve goes to the mma.sync kernel.
cudaError_t launch_library(const Gemm&, int device, void* workspace, std::size_t workspace_bytes,
                           cudaStream_t);

// Arithmetic sm90/t25k16/r4. A product whose a is row-contiguous, d_weight, has its sum over rows of the
// batch in one range: it goes to launch_fastest.
cudaError_t launch_ranges(const Gemm&, int device, void* workspace, std::size_t workspace_bytes,
                          cudaStream_t);

// The bytes of workspace that launch_ranges makes use of.
std::size_t ranges_workspace_on(int device, const Gemm&);

int multiprocessors(int device);

// Whether the library offers an admitted algorithm.
bool library_serves(const Gemm&);

}  // namespace rlk::cuda::lm_head
