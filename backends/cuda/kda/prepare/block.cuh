// What the phases of the preparation share: shared memory, a thread's place, and the strip of tokens it
// holds.
#pragma once

#include "cuda/kda/device.cuh"

namespace rlk::cuda::kda::prepare {

constexpr int kPitch = 68;             // of the fp32 64 x 64 matrices
constexpr int kWidePitch = 36;         // of an fp64 32 x 32 matrix
constexpr int kThreads = 256;          // a warp per strip
constexpr int kExponent = 23;          // the biased fp16 exponent of a scaled row's maximum
constexpr unsigned kGridRows = 32768;  // chunk slots along the grid's second dimension

template <int K>
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
  union {
    Tiles tiles;
    float a[64 * kPitch];  // A, once the tiles are done
  };
  float m[64 * kPitch];
  union {
    Scores scores;
    double wide[32 * kWidePitch];  // a product on the way to A, once P is stored
  };
  char between[28][4][kLane];  // [pair of strips][lane % 4]: channel pairs' decay between the strips
  float beta[64];
  float unscale[2][64];  // [q, k]: what the fp16 rows were divided by
  uint2 shift[64];       // [q, k] of a row: what to add to the bits of its elements
  int first[4];          // [half]: the first broken row
  float factors[64][2];  // [row][k, q]: of the l2norm
};

__device__ inline int pair_index(int upper, int lower) { return upper * (upper - 1) / 2 + lower; }

// A block's chunk and value head, and a thread's place: a warp has a strip of 8 tokens, a lane kChannels
// neighbouring channels of all 8, in kWords words of two.
template <int K_, bool Gated_>
struct Block {
  static constexpr int K = K_, kWords = K / 64, kChannels = 2 * kWords;
  static constexpr bool Gated = Gated_;
  using R = Record<K>;
  const Job& p;
  Shared<K>& s;
  int hv = blockIdx.x, slot = blockIdx.y + blockIdx.z * kGridRows;
  Chunk c;
  int tid, lane, strip;
  // A row of a tile is K / 64 times 128 bytes; in row r, this lane's lie at `swizzled` ^ (r % 8 << 4) of one.
  int half, swizzled;
  char* record;

  __device__ Block(const Job& job, char* smem) : p(job), s(*reinterpret_cast<Shared<K>*>(smem)) {}
  // False for a slot that no chunk uses.
  __device__ bool find() {
    if (slot >= static_cast<int>(p.slots()) || !find_chunk(p, slot, c)) return false;
    tid = threadIdx.x, lane = tid % 32, strip = tid / 32;
    record = p.records + (static_cast<std::int64_t>(slot) * p.value_heads + hv) * R::kSize;
    return true;
  }
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
