// Few rows: what producer and consumers of the kernel that decodes share, and the producer; and the steps of the rule
// (sm90/t25k16/ex2/h8/attn128/s<S>) that the kernel of clusters has as well.
#pragma once

#include "cuda/attention/block.cuh"
#include "cuda/hopper/tma_once.cuh"

namespace rlk::cuda::attention {

// m is held: it moves where a score is far above it. While all of a row's scores are -inf or NaN the rule has it move too, from
// -inf to -inf, which changes nothing.
__device__ __forceinline__ bool is_above(float top, float c, float m) {
  return __fmaf_rn(top, c, -m) > attn128::kHeld;
}
// m after a tile whose greatest score is `top`, NaN left out.
__device__ __forceinline__ float after_tile(float m, float top, float c) {
  const float scaled = __fmul_rn(top, c);
  return is_above(top, c, m) && scaled > m ? scaled : m;
}
// What the sums so far are multiplied by.
__device__ __forceinline__ float shrink(float before, float after) {
  return before == after ? 1.0f : simt::exp2(__fadd_rn(before, -attn128::base_of(after)));
}

// Sums of weights are kept by bits 1 and 2 of the key's index, which are bits 3 and 4 of the lane that has its scores; bit 2
// has bit 0. Of lanes that differ by it, one takes the first of the two rows that both have scores of, the other the second.
inline constexpr int kClasses = 4;
__device__ __forceinline__ int own_class(int lane) { return lane / 8; }
__device__ __forceinline__ int own_row(int lane) { return lane / 4 % 2; }
// Both rows' sums of all keys, from those of the lanes' own classes and rows.
template <int N>
__device__ __forceinline__ void join_classes(int lane, const float (&own)[N], float (&l)[N][2]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    float x = own[n];
#pragma unroll
    for (int step = 8; step < 32; step *= 2) x = __fadd_rn(x, __shfl_xor_sync(~0u, x, step));
    const float other = __shfl_xor_sync(~0u, x, 4);
    l[n][0] = own_row(lane) == 0 ? x : other, l[n][1] = own_row(lane) == 0 ? other : x;
  }
}

// Waits for other threads of the same role: whether any of them has x.
__device__ __forceinline__ bool role_any(int id, int threads, bool x) {
  int any;
  asm volatile(
      "{.reg .pred own, any;\n"
      "setp.ne.s32 own, %3, 0;\n"
      "bar.red.or.pred any, %1, %2, own;\n"
      "selp.s32 %0, 1, 0, any;}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<int>(x))
      : "memory");
  return any != 0;
}

// Blocks of eight rows; tiles of keys or of values that wait in shared memory; blocks that an SM has. Beside: a row's lines of
// 128 bytes lie side by side there, else those of all rows. F8: tiles are fp8, and consumers widen what they take.
template <class T, int Width, int Eights, int Stages, int Residents, bool Beside, bool F8 = false>
struct FewShape {
  using Element = T;
  static constexpr bool kBeside = Beside, kF8 = F8;
  static constexpr int kSize = F8 ? 1 : 2,
                       kLineChannels = 128 / kSize;  // of an element; of a line of 128 bytes
  static constexpr int kWidth = Width, kEights = Eights, kRows = 8 * Eights, kStages = Stages;
  static constexpr int kResidents = Residents, kWarps = 4, kConsumers = 32 * kWarps,
                       kThreads = kConsumers + 32;
  static constexpr int kStageBytes = kTile * Width * kSize;
  static constexpr int kLine = 2 * kTile + 16;  // of a row's weights: eight lines meet all banks
  static constexpr int kBytes =
      kStages * kStageBytes + kRows * kLine + (1 + kClasses) * kWarps * kRows * 4 + 2 * kStages * 8;
  static_assert(kResidents * (kBytes + 1024) <= 228 * 1024, "of an SM");

  // Where 16 bytes of a tile's row lie.
  __device__ __forceinline__ static int place(int row, int piece) {
    const int line = Beside ? row * (Width / kLineChannels) + piece / 8 : piece / 8 * kTile + row;
    return line * 128 + ((piece % 8) ^ (line % 8)) * 16;
  }
};

// It starts on 1024 bytes, as tiles have to.
template <class S>
struct FewShared {
  unsigned char *tiles, *weights;
  float *tops, *sums;  // [warp][row], [warp][eight rows][lane]
  std::uint64_t *full, *empty;

  __device__ explicit FewShared(unsigned char* raw) {
    tiles = raw;
    weights = tiles + S::kStages * S::kStageBytes;
    tops = reinterpret_cast<float*>(weights + S::kRows * S::kLine);
    sums = tops + S::kWarps * S::kRows;
    full = reinterpret_cast<std::uint64_t*>(sums + kClasses * S::kWarps * S::kRows);
    empty = full + S::kStages;
  }
  __device__ void init() const {
    for (int i = 0; i < S::kStages; ++i) barrier_init(full + i, 1), barrier_init(empty + i, S::kWarps);
    fence_barrier_init();
  }
};

// A number of Integers as it lies in memory: what is read after it need not wait for it.
struct Unread {
  int low = 0, high = 0;

  __device__ __forceinline__ Unread() {}
  __device__ __forceinline__ Unread(const attn128::Integers& x, std::int64_t i, std::int64_t j = 0) {
    const int* const at =
        static_cast<const int*>(x.data) + (i * x.stride[0] + j * x.stride[1]) * (x.wide ? 2 : 1);
    low = at[0];
    if (x.wide) high = at[1];
  }
  __device__ __forceinline__ std::int64_t of(const attn128::Integers& x) const {
    return x.wide ? std::int64_t{high} << 32 | static_cast<std::uint32_t>(low) : low;
  }
};

// Of sequence n, as Problem has them, but read at once.
struct Bounds {
  std::int64_t q_begin, q_len, k_begin, keys;

  __device__ __forceinline__ Bounds(const Problem& p, std::int64_t n) {
    Unread q[2], k[2], len;
    if (p.cu_q) q[0] = {p.cu_q, n}, q[1] = {p.cu_q, n + 1};
    if (p.cu_k) k[0] = {p.cu_k, n}, k[1] = {p.cu_k, n + 1};
    if (p.kv_len) len = {p.kv_len, n};
    q_begin = p.cu_q ? Problem::held(q[0].of(p.cu_q), p.queries) : 0;
    q_len =
        p.cu_q ? Problem::held(Problem::held(q[1].of(p.cu_q), p.queries) - q_begin, p.queries) : p.queries;
    k_begin = p.cu_k ? Problem::held(k[0].of(p.cu_k), p.room) : 0;
    keys = p.cu_k ? Problem::held(Problem::held(k[1].of(p.cu_k), p.room) - k_begin, p.room) : p.room;
    if (p.kv_len) keys = Problem::held(len.of(p.kv_len), keys);
  }
};

// Rows of sequence n and key head h from `first` on, and the tiles of keys that this block brings to them; false: there are
// no such rows. A block is one of gridDim.y that share a sequence's splits evenly; without keys none is left for it.
template <class S>
__device__ inline bool find_few(const Problem& p, int first, Work& w) {
  w.h = static_cast<int>(blockIdx.x) % p.heads, w.n = blockIdx.x / p.heads;
  const Bounds bounds(p, w.n);
  const std::int64_t queries = bounds.q_len, rows = queries * p.group, keys = bounds.keys;
  if (first >= rows) return false;
  w.q_begin = bounds.q_begin, w.k_begin = bounds.k_begin, w.first = first;
  w.count = static_cast<int>(rows - first < S::kRows ? rows - first : S::kRows);
  w.keys = static_cast<int>(keys), w.offset = static_cast<int>(keys - queries);
  const attn128::Visible top = p.visible(w.offset + first / p.group, keys),
                         last = p.visible(w.offset + (first + w.count - 1) / p.group, keys);
  w.begin = static_cast<int>(top.first / kTile), w.end = static_cast<int>((last.last + kTile - 1) / kTile);
  if (gridDim.y == 1) return true;
  const int tiles = static_cast<int>(p.split / kTile), begin = w.begin / tiles,
            count = (w.end + tiles - 1) / tiles - begin, blocks = static_cast<int>(gridDim.y),
            each = (count + blocks - 1) / blocks, from = begin + static_cast<int>(blockIdx.y) * each;
  w.begin = max(w.begin, from * tiles), w.end = min(w.end, (from + each) * tiles);
  return true;
}

// Tiles by TMA, a lane a box. Boxes without a key are not ordered; rows behind the sequence's end that one brings along are
// nobody's or another's, and the consumers take no notice of them.
template <class S>
__device__ inline void produce_few(const Job& job, const Work& w, const FewShared<S>& s,
                                   Turn<S::kStages>& turn) {
  const Problem& p = job.p;
  const int lane = static_cast<int>(threadIdx.x) % 32, box = job.maps.box;
  const int size = p.block_table ? static_cast<int>(p.page_size) : 1;
  const auto page = [&](int tile) {
    const int j = tile * kTile + lane * box;
    if (!p.block_table) return p.cu_k ? 0 : static_cast<int>(w.n);
    if (tile >= w.end || lane * box >= kTile || j >= w.keys) return 0;
    return static_cast<int>(Problem::held(p.block_table.get(w.n, j / size), p.pages - 1));
  };
  const std::uint64_t once = read_once();
  int next = page(w.begin);
  for (int tile = w.begin; tile < w.end; ++tile) {
    const int j = tile * kTile + lane * box, outer = next;
    const int token = p.block_table ? j % size : static_cast<int>(w.k_begin) + j;
    const int boxes = min(kTile / box, (w.keys - tile * kTile + box - 1) / box);
    next = page(tile + 1);  // nobody waits for it
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      std::uint64_t* const full = s.full + turn.stage;
      unsigned char* const to = s.tiles + turn.stage * S::kStageBytes;
      barrier_wait(s.empty + turn.stage, turn.phase ^ 1);
      if (lane == 0) barrier_expect(full, boxes * box * S::kWidth * S::kSize);
      __syncwarp();
      if (lane < boxes) {
        const CUtensorMap* const map = part == 0 ? &job.maps.k : &job.maps.v;
        if constexpr (S::kBeside) {
          tma_load_once(to + lane * box * S::kWidth * 2, map, full, once, 0, 0, w.h, token, outer);
        } else {
#pragma unroll
          for (int x = 0; x < S::kWidth; x += S::kLineChannels)
            tma_load_once(to + (x / S::kLineChannels * kTile + lane * box) * 128, map, full, once, x, w.h,
                          token, outer);
        }
      }
      turn.next();
    }
  }
}

}  // namespace rlk::cuda::attention
