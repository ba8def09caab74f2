// What the phases of the preparation share: shared memory, a thread's place, and the strip of tokens it
// holds.
#pragma once

#include "cuda/kda/maps.cuh"

namespace rlk::cuda::kda::prepare {

constexpr int kPitch = 68;             // of the fp32 64 x 64 matrices
constexpr int kWidePitch = 36;         // of an fp64 32 x 32 matrix
constexpr int kThreads = 256;          // a warp per strip
constexpr int kExponent = 23;          // the biased fp16 exponent of a scaled row's maximum
constexpr unsigned kGridRows = 32768;  // chunk slots along the grid's second dimension

struct Maps {
  CUtensorMap q, k, g;
};

// What TMA brings of a chunk: rows of 64 tokens one behind the other, g in either type.
template <int K>
struct Landing {
  char q[128 * K], k[128 * K], g[256 * K];
};

// Mapped: the next chunk arrives while A of this one is made, where tiles and decays between strips were, and
// behind these.
template <int K, bool Mapped>
struct Shared {
  static constexpr int kLane = K / 2 + (K == 128 ? 16 : 0);  // bytes; padded against bank conflicts
  struct Tiles {                                             // fp16, swizzled rows of 128 bytes
    char upper[8][32 * K];                                   // [strip][K / 64][8 rows of q, 8 of k][64]
    char lower[8][16 * K];                                   // [strip][K / 64][8 rows of k][64]
  };
  struct Scores {
    char p[8192];        // P, bf16, as in the record
    float totals[8][K];  // decay of a strip
  };
  static constexpr int kMatrix = 256 * kPitch;
  static constexpr int kMore = Mapped ? kMatrix + sizeof(Landing<K>) - sizeof(Tiles) - 28 * 4 * kLane : 16;
  union {
    Tiles tiles;
    float a[64 * kPitch];  // A, once the tiles are done
  };
  char between[28][4][kLane];  // [pair of strips][lane % 4]: channel pairs' decay between the strips
  char more[kMore];
  float m[64 * kPitch];
  union {
    Scores scores;
    double wide[32 * kWidePitch];  // a product on the way to A, once P is stored
  };
  float beta[64];
  float unscale[2][64];   // [q, k]: what the fp16 rows were divided by
  uint2 shift[64];        // [q, k] of a row: what to add to the bits of its elements
  int first[4];           // [half]: the first broken row
  float factors[64][2];   // [row][k, q]: of the l2norm
  std::uint64_t arrived;  // mbarrier of the landing

  __device__ Landing<K>& landing() {
    return *reinterpret_cast<Landing<K>*>(reinterpret_cast<char*>(this) + kMatrix);
  }
};
static_assert(sizeof(Shared<128, true>) <= 113 * 1024, "two blocks share an SM");

__device__ inline int pair_index(int upper, int lower) { return upper * (upper - 1) / 2 + lower; }

// How far a block goes from chunk to chunk: value heads are next to each other.
struct Step {
  int hv, slot;
};

// A block's chunk and value head, and a thread's place: a warp has a strip of 8 tokens, a lane kChannels
// neighbouring channels of all 8, in kWords words of two.
template <int K_, bool Gated_, class M>
struct Block {
  static constexpr int K = K_, kWords = K / 64, kChannels = 2 * kWords;
  static constexpr bool Gated = Gated_, Mapped = std::is_same_v<M, Maps>;
  using R = Record<K>;
  const Job& p;
  const M& maps;
  Shared<K, Mapped>& s;
  int hv, slot;
  Chunk c;
  int tid, lane, strip;
  // A row of a tile is K / 64 times 128 bytes; in row r, this lane's lie at `swizzled` ^ (r % 8 << 4) of one.
  int half, swizzled;
  char* record;

  __device__ Block(const Job& job, const M& tensors, char* smem)
      : p(job), maps(tensors), s(*reinterpret_cast<Shared<K, Mapped>*>(smem)) {
    if constexpr (Mapped) {
      hv = static_cast<int>(blockIdx.x) % p.value_heads, slot = static_cast<int>(blockIdx.x) / p.value_heads;
    } else {
      hv = blockIdx.x, slot = blockIdx.y + blockIdx.z * kGridRows;
    }
  }
  // False for a slot that no chunk uses.
  __device__ bool find() {
    if (slot >= static_cast<int>(p.slots()) || !find_chunk(p, slot, c)) return false;
    tid = static_cast<int>(threadIdx.x);
    // What follows from it is found again for every chunk, not kept in registers through the others.
    if constexpr (Mapped) asm volatile("" : "+r"(tid));
    lane = tid % 32, strip = tid / 32;
    record = p.records + (static_cast<std::int64_t>(slot) * p.value_heads + hv) * R::kSize;
    return true;
  }
  __device__ void advance(const Step& step) {
    hv += step.hv, slot += step.slot;
    if (hv >= p.value_heads) hv -= p.value_heads, ++slot;
  }
  // Of q and k.
  __device__ int head() const { return p.heads == p.value_heads ? hv : hv / (p.value_heads / p.heads); }
  // Only once the loads are under way: before them the compiler would keep both in registers through them.
  __device__ void find_columns() { half = lane * kWords / 32, swizzled = lane * kWords % 32 * 4; }
  __device__ float* totals(int strip) const { return s.scores.totals[strip] + kChannels * lane; }
  __device__ char* p_at(int i, int j) const { return s.scores.p + row_tile(64, i, j / 8) + j % 8 * 2; }
};

// e^{g}, q and k of a lane's channels.
template <int K>
struct Strip {
  float e[8][K / 32];
  std::uint32_t q[8][K / 64], k[8][K / 64];
};

}  // namespace rlk::cuda::kda::prepare
