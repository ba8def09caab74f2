// KDA backward, everything that is local to a chunk, in one kernel: a block per (chunk, value head, 64
// channels of K), two blocks on an SM, so that one loads while the other multiplies.
//
// With S the state before the chunk, dS the gradient of the state after it, D = A^T dvnew (from the reverse
// scan):
//   dP_ij = scale do_i . v_new_j  (i >= j)         dM_ij = -D_i . v_new_j  (i > j)
//   Q_i = scale e^{G_i} (S do_i) + sum_j dP_ij E_ij k_j
//   W_i = -e^{G_i} (S D_i) + sum_j dM_ij E_ij k_j
//   U_j = e^{G_L - G_j} (dS v_new_j) + sum_i E_ij (dP_ij q_i + dM_ij beta_i k_i)
//   dq = Q     dk = U + beta W     dbeta = D . v_new / beta     dG = q Q + beta k W - k U,
//   and on the last row also e^{G_L} rowsum(S dS) + sum_j e^{G_L - G_j} k_j (dS v_new_j)
// A beta too small to divide by has dbeta = D . v + W . k, which is the same but for rounding, and for that
// cancels where keys are nearly parallel.
// The gradient of the inverse needs no 64^3 products: x = (I + M) v_new is a linear solve, so dM = -stril(D
// v_new^T). The code holds -dM and -W and multiplies -beta k: no sign is ever changed.
//
// Everything lies as wgmma leaves it, channels down and tokens across: a warp owns 16 channels of 32 tokens,
// a lane the channels g, g + 8 (g = lane / 4) of the tokens 2t, 2t + 1 (t = lane % 4) of each group of 8.
// What was accumulated is the next operand, so no sum moves between lanes.
//
// Decays: pairs of tokens meet by halving. Blocks of 16 tokens are taken one after the other; inside a block
// the upper 8 tokens meet the lower 8, then 4 meet 4, 2 meet 2, by tensor cores, and neighbours in fp32. Each
// factor runs from a token to the bound between the two sides, so none exceeds 1: the upper side has p_i, the
// product of e^{g} from the bound to i, the lower side s_j, the product behind j up to the bound. Sums
// already taken are carried from bound to bound by the product of the group crossed (Horner).
//
// All products of this kind run in tf32. dP and dM are rounded to it once and serve both tokens of a pair, so
// their rounding cancels in dG as the pair does. Where the gate is computed here d_a_log, a sum over all
// tokens of what is left, needs more: inside a block, where gates leave most of the weight, k s, q p and k p
// are in two terms and their rounding nearly cancels too. In one term d_a_log was up to 7 times further off;
// no other gradient was, so log decays that come from outside make do with one. For the same sum v_new and dS
// come in two terms of bf16 there, the second where q, k and g are loaded as soon as it is multiplied.
//
// With an l2norm the blocks of a chunk's slices are a cluster: they tell each other q . dq and k . dk over
// their channels, so that dq and dk reach memory once, rounded.
//
// Where sequences are rows of a batch TMA brings every tile and takes dq, dk and dg away: it knows where a
// tensor ends, and computes the addresses that were a seventh of the instructions.
//
// The phases are in gradients/: block.cuh (shared memory and a thread's place), load.cuh, products.cuh
// (over V, wgmma), pairs.cuh and inside.cuh (of tokens, tf32), store.cuh.
//
// Per token and head, K = V = 128: reads 8K (states) + 10K (v_new, D, do, q, k: 2K each) + 4K
// (g), writes 4K + 4K: 3.8 kB; dP, dM and fp32 dq, dk never reach memory. With Params::unfused they do: the
// same code in two kernels, 2 x 12K + 2 x 512 bytes more per token, kept to show what the fusion is worth.
#include <algorithm>

#include "cuda/kda/gradients/inside.cuh"
#include "cuda/kda/gradients/products.cuh"
#include "cuda/kda/gradients/store.cuh"

namespace rlk::cuda::kda {
namespace {

using namespace gradients;

// What the pairs of tokens add to Q, W and U; d_gate is dG without the pairs of a token with itself, which
// cancel.
template <class V>
__device__ inline void add_pairs(const Block<V>& b, Sums& x, const Gates& gates, bool by_sums,
                                 float (&d_gate)[16]) {
  Pairs<V> pairs(b, x);
  pairs.publish(gates.e);
  pairs.write_operands(gates.e);
  __syncthreads();  // cells, operands and products are written
  pairs.sum_keys();
  pairs.between_blocks();
  if constexpr (V::Norm) __syncthreads();  // dq and dk wait where operands were
  Inside<V>(pairs, by_sums).run(d_gate);
}

template <class V>
__device__ inline void store(const Block<V>& b, const Gates& gates, float (&d_gate)[16]) {
  float raw[16];
  if constexpr (V::Gated) load_raw(b, raw);
  sum_later_tokens(b, d_gate);
  if constexpr (V::Norm) through_norm(b);
  if constexpr (V::Mapped) fence_async_proxy();
  __syncthreads();  // the sums, dq and dk are written
  if constexpr (V::Mapped) {
    if (b.tid == 0) order_d_q_and_d_k(b);
  }
  ParameterSums sums;
  add_after(b, d_gate);
  if constexpr (V::Gated) through_gate(b, gates, raw, d_gate, sums);
  store_d_g(b, d_gate);
  if constexpr (!V::Parts && !V::Mapped) store_d_q_and_d_k(b);
  if (b.tid < b.c.length) store_d_beta(b);
  if (b.p.bias_part) store_parameters(b, sums);
  // Shared memory stays until TMA has read it.
  if (V::Mapped && b.tid == 0) tma_store_wait_read();
}

template <class V>
__global__ void __launch_bounds__(kThreads, 2)
    gradients_kernel(const Job p, const __grid_constant__ typename V::TensorMaps maps) {
  extern __shared__ __align__(1024) char smem[];
  Block<V> b(p, maps, smem);
  if (!b.find()) return;

  if (b.tid == 0) begin_barriers(b);
  if constexpr (V::part != Part::intra) {
    if (b.tid == 0) order_operands(b);
    if constexpr (!V::Mapped) load_d_out(b);
  }
  if constexpr (V::part != Part::inter && !V::Later && !V::Mapped) load_inputs(b);
  if constexpr (!V::Mapped) copy_commit();
  const bool faint = load_beta(b);
  if constexpr (!V::Mapped) {
    copy_wait<0>();
    fence_async_proxy();
  }
  // What threads copied is there, the barriers are initialised.
  const bool by_sums = __syncthreads_or(faint);

  Sums x;
  if constexpr (V::part != Part::intra) {
    barrier_wait(&b.s.operands_arrived, 0);
    multiply(b, x);
    if (by_sums) {
      std::uint32_t v[8];
      load_v(b, v);  // rare, so not before it is needed
      sum_strengths(b, v);
    }
    sum_states(b);
    if constexpr (V::Later) {
      wgmma_wait<1>();
      __syncthreads();  // the second terms' place is free
      if constexpr (!V::Mapped) {
        load_inputs(b);
        copy_commit();
      } else if (b.tid == 0) {
        order_inputs(b);
      }
    }
    if constexpr (V::part == Part::inter) {
      x.wait();
      return store_inter(b, x, by_sums);
    }
  } else {
    load_inter(b, x, by_sums);
  }
  if constexpr (V::Later && !V::Mapped) {
    copy_wait<0>();
    __syncthreads();
  }
  Gates gates;
  load_gates(b, gates);
  if constexpr (V::part == Part::all) x.wait();
  __syncthreads();  // the operands' place is free
  if constexpr (V::Cluster > 1) cluster_arrive_relaxed();
  float d_gate[16];
  add_pairs(b, x, gates, by_sums, d_gate);
  store(b, gates, d_gate);
}

bool map_tensors(Maps& maps, const Job& job) {
  if (job.gate == Gate::none && (job.g.bf16 || job.d_g.bf16)) return false;  // see Block::half
  const auto as_read = [&](const Strided<const bf16>& x, const bf16* normalised) {
    const std::int64_t row = std::int64_t{job.heads} * job.dim;
    return normalised ? Strided<const bf16>{normalised, job.tokens * row, row, job.dim} : x;
  };
  return map_tensor(maps.d_out, job, job.d_out, job.value_heads) &&
         map_tensor(maps.q, job, as_read(job.q, job.q_norm), job.heads) &&
         map_tensor(maps.k, job, as_read(job.k, job.k_norm), job.heads) &&
         map_tensor(maps.g, job, job.g, job.value_heads, !job.g.bf16) &&
         map_tensor(maps.d_q, job, job.d_q, job.heads) && map_tensor(maps.d_k, job, job.d_k, job.heads) &&
         map_tensor(maps.d_g, job, job.d_g, job.value_heads, !job.d_g.bf16);
}

template <int K, Part part, bool Gated, After after>
void launch(const Job& job, cudaStream_t stream) {
  const auto slots = static_cast<unsigned>(job.slots());
  dim3 blocks(static_cast<unsigned>(job.value_heads) * (K / kSlice), std::min(slots, kGridRows),
              (slots + kGridRows - 1) / kGridRows);
  if (by_sequence(job)) {
    blocks.y = static_cast<unsigned>(job.slots_each), blocks.z = static_cast<unsigned>(job.sequences);
  }
  constexpr int kBytes = sizeof(Shared<K>);
  const auto run = [&]<class M>(const M& maps) {
    using V = Variant<K, part, Gated, after, M>;
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension, cluster.val.clusterDim = {V::Cluster, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = blocks, config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = kBytes, config.stream = stream;
    config.attrs = &cluster, config.numAttrs = V::Cluster > 1 ? 1 : 0;
    cudaFuncSetAttribute(gradients_kernel<V>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    cudaLaunchKernelEx(&config, gradients_kernel<V>, job, maps);
  };
  if constexpr (part == Part::all && after != After::sum) {
    if (Maps maps; map_tensors(maps, job)) return run(maps);
  }
  run(NoMaps{});
}

template <int K, Part part, bool Gated>
void launch(const Job& job, cudaStream_t stream) {
  if constexpr (part == Part::inter) {
    launch<K, part, Gated, After::nothing>(job, stream);
  } else if (job.q_part) {
    launch<K, part, Gated, After::sum>(job, stream);
  } else {
    job.l2norm ? launch<K, part, Gated, After::l2norm>(job, stream)
               : launch<K, part, Gated, After::nothing>(job, stream);
  }
}

template <int K, bool Gated>
void launch_parts(const Job& job, cudaStream_t stream) {
  if (K > kSlice) {
    cudaMemsetAsync(job.beta_half, 0xff, sizeof(unsigned) * 64 * job.slots() * job.value_heads, stream);
  }
  if (job.unfused) {
    launch<K, Part::inter, Gated>(job, stream);
    launch<K, Part::intra, Gated>(job, stream);
  } else {
    launch<K, Part::all, Gated>(job, stream);
  }
}

}  // namespace

void launch_gradients(const Job& job, cudaStream_t stream) {
  if (job.slots() == 0) return;
  const bool gated = job.gate != Gate::none;
  if (job.dim == 128) {
    gated ? launch_parts<128, true>(job, stream) : launch_parts<128, false>(job, stream);
  } else {
    gated ? launch_parts<64, true>(job, stream) : launch_parts<64, false>(job, stream);
  }
}

}  // namespace rlk::cuda::kda
