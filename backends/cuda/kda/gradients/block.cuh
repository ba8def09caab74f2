// What the phases of the gradients kernel share: how the kernel is cut, what lies in shared memory and when,
// and a thread's place.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/hopper/cluster.cuh"
#include "cuda/hopper/wgmma.cuh"
#include "cuda/kda/maps.cuh"

namespace rlk::cuda::kda::gradients {

constexpr int kThreads = 256;          // two warpgroups of four warps
constexpr int kSlice = 64;             // channels of K per block
constexpr float kFaint = 0x1p-64f;     // a beta below this is not divided by
constexpr unsigned kNoHalf = ~0u;      // a NaN that no sum gives
constexpr unsigned kGridRows = 32768;  // chunk slots along the grid's second dimension

// Unfused, one kernel does what is between chunks and another what is inside.
enum class Part { all, inter, intra };

struct Maps {
  CUtensorMap d_out, q, k, g, d_q, d_k, d_g;
};

// What becomes of dq and dk: they are results, or go through the l2norm first, for which the slices of K are
// a cluster, or are fp32 parts of a sum over heads.
enum class After { nothing, l2norm, sum };

// Gated: the gate is computed here. M: Maps, or NoMaps where threads copy instead of TMA.
template <int Channels, Part kPart, bool kGated, After kAfter, class M>
struct Variant {
  static constexpr int K = Channels;
  static constexpr Part part = kPart;
  static constexpr bool Gated = kGated, Mapped = std::is_same_v<M, Maps>;
  static constexpr bool Norm = kAfter == After::l2norm, Parts = kAfter == After::sum;
  static constexpr int Cluster = Norm ? K / kSlice : 1;
  // q, k and g are loaded when second terms, which are in their places until then, are multiplied.
  static constexpr bool Later = Gated && part == Part::all;
  // What goes into one tf32 term is rounded, or cut by the tensor cores and made larger beforehand by what
  // cutting takes from it on the average.
  static constexpr float kCut = Gated ? 1.f : 1.f + 0.361f / 1024;
  using TensorMaps = M;
};

// Tiles of 16-bit numbers, as device.cuh says: `blocks` are [V / 8][8] blocks of 8 x 8.
template <int V>
struct Shared {
  struct Operands {                // of the products, until they are done
    char state[2 * V * kSlice];    // S        blocks, this slice of K
    char d_state[2 * V * kSlice];  // dS       blocks
    char v_new[128 * V];           //          blocks
    char d_x[128 * V];             // D        blocks
    char d_out[128 * V];           // do       rows
  };
  struct Pairs {                       // of tokens, in the operands' place
    char cells[64][512];               // [i / 8][j / 8][P, M][8][8] fp32, see cell_row
    char lower[6][2048];               // k s of 8-groups 0-5: [strip][lane] fragments
    char upper[6][2048];               // q p of 8-groups 2-7
    char write[6][2048];               // -beta k p of 8-groups 2-7
    float pass[4][kSlice];             // [16-block][channel]: product of its e^{g}
    float key[2][kSlice];              // [warpgroup][channel]
    float gates[kSlice];               // sum of dG over the later half
    float beta_k[4][64];               // [strip][token]
    float bias[2][2][kSlice];          // [warpgroup][d_dt_bias, d_a_log][channel]
    float dots[V / kSlice][4][2][64];  // [slice][strip][q, k][token]: x . dx of the l2norm
    float2 norms[2][64];               // [q, k][token]: their sum, and the reciprocal norm
  };
  struct Inputs {
    char q[8192], k[8192];  // later dq and dk   rows
    // bf16 rows, or fp32: two slices of 32 channels as rows, see Maps, or whole rows with pieces permuted.
    // Then a lane's pairs of e^{g}; at the end dG.
    char g[16384];
  };
  struct Rests {  // what rounding left, where the gate is computed here, until the inputs are loaded
    char d_state[16384];
    char v_new[16384];
  };
  static constexpr std::size_t kPhases = std::max(sizeof(Operands), sizeof(Pairs));
  union {
    Operands operands;
    Pairs pairs;
    char whole_lines[(kPhases + 1023) / 1024 * 1024];  // swizzled tiles start on 1024 bytes
  };
  union {
    Inputs inputs;
    Rests rests;
  };
  float beta[64];
  float beta_v[64];                                              // D . v
  float last[kSlice];                                            // rowsum(S dS)
  std::uint64_t operands_arrived, inputs_arrived, dots_arrived;  // mbarriers
  static_assert(128 * V <= sizeof(Rests::v_new) && 2 * V * kSlice <= sizeof(Rests::d_state));
};
static_assert(sizeof(Shared<128>) <= 113 * 1024, "two blocks share an SM");

// Rows of an 8 x 8 fp32 cell are permuted so that lanes which read (g, 2t), (g, 2t + 1) and lanes which read
// (2t, g) or (2t + 1, g) all meet 32 banks.
__device__ inline int cell_row(int i) { return (i >> 2) * 32 + ((i >> 1 & 1) + 2 * ((i ^ i >> 2) & 1)) * 8; }

template <bool BySequence>
__device__ inline bool chunk_of_block(const Job& p, Chunk& c) {
  if (!BySequence && !by_sequence(p)) {
    const std::int64_t slot = blockIdx.y + static_cast<std::int64_t>(blockIdx.z) * kGridRows;
    return slot < p.slots() && find_chunk(p, static_cast<int>(slot), c);
  }
  c.sequence = blockIdx.z, c.index = blockIdx.y, c.slot = c.sequence * p.slots_each + c.index;
  c.row = c.sequence, c.token = c.index * kChunk;
  c.length = static_cast<int>(min(p.tokens - c.token, std::int64_t{kChunk}));
  return true;
}

// A block's chunk, head and slice of K, and a thread's place in it: channels lane / 4 and that + 8 of a strip
// of 16, tokens 2 (lane % 4) and the next of each group of 8 in the warpgroup's half of the chunk. A lane's
// 16 values are indexed [4 n + 2 r + x]: token 8 n + 2 (lane % 4) + x of the half, channel lane / 4 + 8 r of
// the strip.
template <class V>
struct Block {
  static constexpr int K = V::K, kSlices = K / kSlice;
  const Job& p;
  const typename V::TensorMaps& maps;
  char* smem;
  Shared<K>& s;
  unsigned thread = threadIdx.x;  // unsigned: division by powers of two is a shift
  int tid = thread, lane = thread % 32, warp = __shfl_sync(~0u, thread / 32, 0);
  int strip = warp & 3, warpgroup = warp >> 2;
  int group = thread % 32 / 4, member = thread % 4, channel = 16 * strip + group;
  int slice = blockIdx.x % kSlices, hv = blockIdx.x / kSlices;
  Chunk c;
  int item, h;
  std::int64_t gate_row;  // where g begins

  __device__ Block(const Job& job, const typename V::TensorMaps& tensors, char* memory)
      : p(job), maps(tensors), smem(memory), s(*reinterpret_cast<Shared<K>*>(memory)) {}
  // False for a slot that no chunk uses.
  __device__ bool find() {
    if (!chunk_of_block<V::Mapped>(p, c)) return false;
    item = c.slot * p.value_heads + hv;
    h = p.heads == p.value_heads ? hv : hv / (p.value_heads / p.heads);
    gate_row = index_of(p.g, c.row, c.token, hv) + slice * kSlice;
    return true;
  }
  // Log decays that are given come as fp32 where TMA brings them: known here, that saves 4% of the time.
  __device__ bool half(const Real& t) const { return (V::Gated || !V::Mapped) && t.bf16; }
  // The token of entry i of a lane's 16.
  __device__ int token(int i) const { return 32 * warpgroup + i / 4 * 8 + 2 * member + i % 2; }
  // Unfused: what one kernel leaves to the next, by thread; [80] registers, then D . v and rowsum(S dS).
  __device__ float* inter() const {
    return p.inter + (static_cast<std::int64_t>(item) * kSlices + slice) * kInter;
  }
  // dq and dk of channel r of two tokens, in fp32, [2 n + r], before the l2norm: where operands were.
  __device__ float4* waiting(int i) const {
    static_assert(8 * kThreads * sizeof(float4) <= 3 * sizeof(s.pairs.lower));
    return reinterpret_cast<float4*>(s.pairs.lower) + i * kThreads + tid;
  }
  // Of a tile of rows: 8-groups n, n + 1 and channels r = 0, 1 as pairs of tokens, [2 n + r]; ldmatrix and
  // stmatrix.
  __device__ int pieces() const {
    return row_tile(64, 32 * warpgroup + lane / 16 * 8 + lane % 8, 2 * strip + lane / 8 % 2);
  }
  // Of the slices of fp32 rows: this lane's place in row 2 (lane % 4) of its half, and entry i from there.
  __device__ char* gate_place() const {
    return s.inputs.g + strip / 2 * 8192 + (32 * warpgroup + 2 * member) * 128 + group % 4 * 4;
  }
  __device__ int gate_piece(int i) const {
    return i / 4 * 1024 + i % 2 * 128 +
           ((4 * (strip % 2) + 2 * (i / 2 % 2) + group / 4 ^ 2 * member ^ i % 2) << 4);
  }
};

// A lane's sums: the entries (dP in the first warpgroup, -dM in the second), row 16 strip + lane / 4 + 8 r,
// column 8 n + 2 (lane % 4) + x; and Q, -W, U.
struct Sums {
  float entries[32], q[16], w[16], u[16];

  __device__ void wait() {
    wgmma_wait<0>();
    wgmma_fence_operand(entries), wgmma_fence_operand(q), wgmma_fence_operand(w), wgmma_fence_operand(u);
  }
};

}  // namespace rlk::cuda::kda::gradients
