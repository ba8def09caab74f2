// attention_bwd on Hopper: what the op layer and the kernels of bwd_*sm90.cu share. Knows nothing of the registry.
#pragma once

#include "arithmetic/attention/backward.hpp"
#include "cuda/attention/sm90.h"

namespace rlk::cuda::attention {

using attn128::Backward;
using attn128::Stat;

inline constexpr int kMostBackwardWidth = 256;
inline bool is_wide(const Backward& g) { return std::max(g.p.width, g.p.value_width) > kNarrow; }
inline constexpr int kMostGroup =
    64;  // heads that a thread joins in registers, where they are a power of two

// What kernels leave for others in the workspace.
struct Gathered {
  Stat* stats = nullptr;  // [query heads][rows of q]
  int together = 1;       // query heads whose d_k and d_v one block adds up
  // [rows of k][query heads / together][D + Dv]: their sums, if there are others that share keys.
  float* parts = nullptr;
  float* waiting = nullptr;   // sums of a block's heads that wait for the next ones'
  unsigned* taken = nullptr;  // items that blocks have taken behind each one's first
};

// Sums that wait for those of a block's next heads: of pairs, of pairs of them, and so on; or of all so far.
__host__ __device__ constexpr int waiting_levels(int together) {
  if ((together & (together - 1)) != 0) return 1;
  int levels = 0;
  for (; 1 << levels < together; ++levels) {
  }
  return levels;
}

std::int64_t backward_workspace_bytes(const Backward& g);
// Unit: P by the special function units' ex2 in place of the library's own exp2, which is another arithmetic.
template <bool Unit>
cudaError_t launch_backward(const Backward& g, void* workspace, cudaStream_t stream);

// A file for each element type and exponential, so that they compile side by side: d_q, and each query head's d_k and d_v.
template <class T, bool Unit>
cudaError_t start_backward(const Backward& g, const Gathered& gathered, cudaStream_t stream);
// Of heads above 128 channels.
template <class T, bool Unit>
cudaError_t start_wide_backward(const Backward& g, const Gathered& gathered, cudaStream_t stream);

}  // namespace rlk::cuda::attention
