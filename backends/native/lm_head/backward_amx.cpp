// lm_head_bwd on Intel's matrix unit, bf16, arithmetic amx/k32; d_bias is fma32/kb1024 (a chain with ones).
//
//   d_hidden  a task is 256 columns and up to 512 rows: 1024 lines of the weight at a time are packed as the
//             second operand, d_out's rows are the first as they lie, sums wait in fp32
//   d_weight  hidden is packed once as the second operand; a task turns 256 columns of d_out into rows
#include "native/lm_head/amx.hpp"
#include "native/lm_head/run.hpp"

namespace rlk::native {
namespace {

#if RLK_HAS_AMX

constexpr std::int64_t kPanel = 256;       // columns of a result that a task takes at a time
constexpr std::int64_t kRowsAtOnce = 512;  // of d_hidden
constexpr std::int64_t kChunk = 1024;      // lines of the weight that are packed at a time

std::int64_t panels_for(std::int64_t columns) { return up(columns, kPanel) / kPanel; }

// `steps` lines of up to 256 columns as tiles [16 groups of columns][steps]; `turned`: first operands, else
// second ones.
RLK_ISA void pack_lines(const std::uint16_t* from, std::int64_t stride, std::int64_t steps,
                        std::int64_t columns, bool turned, std::byte* to) {
  const std::int64_t group_bytes = up(steps, kStep) / kStep * kTile;
  for (std::int64_t s = 0; s < steps; s += kStep) {
    // A line is a page of its own: ask for the next ones early.
    for (std::int64_t i = s + kStep; i < std::min(s + 2 * kStep, steps); ++i)
      for (std::int64_t j = 0; j < columns; j += 32) _mm_prefetch(from + i * stride + j, _MM_HINT_T0);
    for (std::int64_t j = 0; j < kPanel; j += kSide) {
      __m512 tile[kSide];
      load_lines(tile, from + s * stride + (j < columns ? j : 0), stride, steps - s, columns - j);
      if (turned) transpose_16x16(tile);
      store_tile(tile, to + j / kSide * group_bytes + s / kStep * kTile);
    }
  }
}

RLK_ISA void add(const float* from, float* to, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += 16)
    _mm512_storeu_ps(to + i, _mm512_add_ps(_mm512_loadu_ps(to + i), _mm512_loadu_ps(from + i)));
}

// ---- d_hidden[m, k] = sum over v of d_out[m, v] * weight[v, k]

struct HiddenGradient {
  const LmHeadBwd& a;
  const std::int64_t rows = RowSet(a.d_out).rows, cols = a.weight.dim(1), depth = a.weight.dim(0);

  static constexpr std::uint64_t kPacked = kPanel * kChunk * 2, kCopy = kWidth * kChunk * 2;
  std::int64_t rows_at_once() const { return std::min(kRowsAtOnce, up(rows, kWidth)); }
  std::uint64_t sums_bytes() const {
    return sizeof(float) * static_cast<std::uint64_t>(rows_at_once() * kPanel);
  }
  std::uint64_t scratch() const { return kPacked + kCopy + 2 * sums_bytes(); }

  void run(const Call& call, const ReadRows& d_out, std::uint64_t shared, std::uint64_t scratch_bytes) const {
    const std::int64_t parts = up(rows, kRowsAtOnce) / kRowsAtOnce;
    run_tasks<Tiles>(call, panels_for(cols) * parts, scratch_bytes, shared,
                     [&](std::int64_t task, std::byte* scratch) {
                       panel(d_out, task / parts * kPanel, task % parts * kRowsAtOnce, scratch);
                     });
  }

 private:
  // What a task holds: lines of the weight packed, 32 rows of d_out with zeros, a block's sums, the sums.
  struct Held {
    std::byte *packed, *copy;
    float *part, *total;
  };

  void panel(const ReadRows& d_out, std::int64_t col, std::int64_t row, std::byte* scratch) const {
    const std::int64_t count = std::min(kRowsAtOnce, rows - row), width = std::min(kPanel, cols - col);
    auto* sums = reinterpret_cast<float*>(scratch + kPacked + kCopy);
    const Held held{scratch, scratch + kPacked, sums, sums + rows_at_once() * kPanel};
    for (std::int64_t first = 0; first < depth; first += kDepthBlock) {
      float* to = first == 0 ? held.total : held.part;
      const std::int64_t end = std::min(depth, first + kDepthBlock);
      for (std::int64_t v = first; v < end; v += kChunk)
        chunk(d_out, row, count, col, width, v, std::min(kChunk, end - v), held, to, v != first);
      if (first != 0) add(held.part, held.total, up(count, kWidth) * kPanel);
    }
    ChainProduct finish;
    finish.out_type = float_of(a.d_hidden.dtype());
    for (std::int64_t i = 0; i < count; ++i)
      store_sums(
          finish,
          a.d_hidden.data<std::byte>() + (row_offset(a.d_hidden, row + i) + col) * bytes_of(finish.out_type),
          0, width, held.total + i * kPanel);
  }

  void chunk(const ReadRows& d_out, std::int64_t row, std::int64_t count, std::int64_t col,
             std::int64_t width, std::int64_t v, std::int64_t lines, const Held& held, float* sums,
             bool more) const {
    const std::int64_t steps = up(lines, kStep) / kStep, group_bytes = steps * kTile;
    pack_lines(a.weight.data<std::uint16_t>() + v * a.weight.stride(0) + col, a.weight.stride(0), lines,
               width, false, held.packed);
    for (std::int64_t i = 0; i < count; i += kWidth) {
      const auto* from = static_cast<const std::byte*>(d_out.data) + 2 * ((row + i) * d_out.stride + v);
      First first = rows_as_they_lie(from, 2 * d_out.stride);
      if (count - i < kWidth || lines % kStep != 0) {
        const std::int64_t pitch = 2 * steps * kStep;
        std::memset(held.copy, 0, static_cast<std::size_t>(kWidth * pitch));
        for (std::int64_t r = 0; r < std::min(kWidth, count - i); ++r)
          std::memcpy(held.copy + r * pitch, from + 2 * r * d_out.stride,
                      static_cast<std::size_t>(2 * lines));
        first = rows_as_they_lie(held.copy, pitch);
      }
      for (std::int64_t j = 0; j < width; j += kWidth)
        multiply(first, held.packed + j / kSide * group_bytes, group_bytes, steps, sums + i * kPanel + j,
                 kPanel, more);
    }
  }
};

// ---- d_weight[v, k] = sum over m of d_out[m, v] * hidden[m, k]

struct WeightGradient {
  const LmHeadBwd& a;
  const std::int64_t rows = a.weight.dim(0), cols = a.weight.dim(1), depth = RowSet(a.d_out).rows;
  const std::int64_t steps = up(depth, kStep) / kStep, group_bytes = steps * kTile;

  static constexpr std::int64_t kGroups = kPanel / kSide;
  static constexpr std::uint64_t kSums = sizeof(float) * kPanel * kPanel, kTiles = 4 * kTile;
  std::uint64_t scratch() const { return kSums + kTiles + static_cast<std::uint64_t>(kGroups * group_bytes); }
  std::uint64_t packed_bytes() const {
    return static_cast<std::uint64_t>(panels_for(cols) * kGroups * group_bytes);
  }

  void run(const Call& call, const ReadRows& d_out, const ReadRows& hidden, std::byte* packed,
           std::uint64_t shared, std::uint64_t scratch_bytes) const {
    run_tasks(call, panels_for(cols), scratch_bytes, shared, [&](std::int64_t task, std::byte*) {
      pack_lines(static_cast<const std::uint16_t*>(hidden.data) + task * kPanel, hidden.stride, depth,
                 std::min(kPanel, cols - task * kPanel), false, packed + task * kGroups * group_bytes);
    });
    run_tasks<Tiles>(call, panels_for(rows), scratch_bytes, shared,
                     [&](std::int64_t task, std::byte* scratch) {
                       const std::int64_t row = task * kPanel, count = std::min(kPanel, rows - row);
                       std::byte* turned = scratch + kSums + kTiles;
                       pack_lines(static_cast<const std::uint16_t*>(d_out.data) + row, d_out.stride, depth,
                                  count, true, turned);
                       auto* sums = reinterpret_cast<float*>(scratch);
                       auto* tiles = reinterpret_cast<float*>(scratch + kSums);
                       for (std::int64_t col = 0; col < cols; col += kPanel) {
                         const std::int64_t width = std::min(kPanel, cols - col);
                         for (std::int64_t j = 0; j < width; j += kWidth)
                           for (std::int64_t i = 0; i < count; i += kWidth)
                             block(turned + i / kSide * group_bytes, packed + (col + j) / kSide * group_bytes,
                                   sums + i * kPanel + j, tiles);
                         store(row, count, col, width, sums);
                       }
                     });
  }

 private:
  void block(const std::byte* first, const std::byte* second, float* sums, float* tiles) const {
    constexpr std::int64_t kSteps = kDepthBlock / kStep;
    multiply(packed_rows(first, group_bytes), second, group_bytes, std::min(kSteps, steps), sums, kPanel);
    for (std::int64_t s = kSteps; s < steps; s += kSteps) {
      multiply(packed_rows(first + s * kTile, group_bytes), second + s * kTile, group_bytes,
               std::min(kSteps, steps - s), tiles, kWidth);
      for (std::int64_t i = 0; i < kWidth; ++i) add(tiles + i * kWidth, sums + i * kPanel, kWidth);
    }
  }

  void store(std::int64_t row, std::int64_t count, std::int64_t col, std::int64_t width,
             const float* sums) const {
    ChainProduct finish;
    finish.out_type = float_of(a.d_weight.dtype());
    std::byte* to = a.d_weight.data<std::byte>();
    for (std::int64_t i = 0; i < count; ++i)
      store_sums(finish, to + ((row + i) * a.d_weight.stride(0) + col) * bytes_of(finish.out_type), 0, width,
                 sums + i * kPanel);
  }
};

// ---- all three

struct Room {
  std::uint64_t copies, shared, scratch;
  explicit Room(const LmHeadBwd& a)
      : copies(line(backward_copies(a))), shared(copies), scratch(chain_kernels_avx512()->scratch_bytes) {
    if (a.d_hidden) scratch = std::max(scratch, HiddenGradient{a}.scratch());
    if (!a.d_weight) return;
    shared += WeightGradient{a}.packed_bytes();
    scratch = std::max(scratch, WeightGradient{a}.scratch());
  }
};

rlk_code run(const LmHeadBwd& a, const Call& call) {
  const Room r(a);
  std::byte* room = shared_workspace(call);
  const ReadRows d_out(a.d_out, room), hidden(a.hidden, room);
  if (a.d_hidden) HiddenGradient{a}.run(call, d_out, r.shared, r.scratch);
  if (a.d_weight)
    WeightGradient{a}.run(call, d_out, hidden, shared_workspace(call) + r.copies, r.shared, r.scratch);
  if (a.d_bias) bias_gradient(a, call, d_out, *chain_kernels_avx512(), Chain::fma32, r.shared);
  return RLK_OK;
}

std::uint64_t workspace(const LmHeadBwd& a, const rlk_request& r) {
  const Room room(a);
  return workspace_for(r.threads, std::int64_t{1} << 30, room.scratch, room.shared);
}
rlk_verdict supports(const LmHeadBwd& a, const rlk_request&) {
  if (a.d_out.dtype() != a.hidden.dtype())
    return refuse("the matrix unit takes two operands of one 16-bit dtype, d_out is fp32", {},
                  "round d_out to hidden's dtype", 0);
  if (RowSet(a.d_out).rows == 0 || a.weight.dim(0) == 0 || a.weight.dim(1) == 0)
    return refuse("an empty product");
  return kAccept;
}

#else

rlk_code run(const LmHeadBwd&, const Call&) { return RLK_UNSUPPORTED; }
std::uint64_t workspace(const LmHeadBwd&, const rlk_request&) { return 0; }
rlk_verdict supports(const LmHeadBwd&, const rlk_request&) { return refuse(kNoAmx); }

#endif

}  // namespace

extern const rlk_implementation lm_head_bwd_amx;
const rlk_implementation lm_head_bwd_amx =
    implement<LmHeadBwd, run, supports, workspace>({.id = "native.amx",
                                                    .doc = "Intel's matrix unit",
                                                    .priority = 210,
                                                    .arithmetic = "amx/k32",
                                                    .dtypes = RLK_BF16,
                                                    .traits = kPinned,
                                                    .min_arch = RLK_CPU_AMX});

}  // namespace rlk::native
