// lm_head on Intel's matrix unit, bf16, arithmetic amx/k32.
//
// Rows of the weight are the first operand and are read as they lie. hidden is small and is packed once per
// call, 16 rows a group. So the tile of results lies transposed and is turned on its way out. Rejected:
// oneDNN's way round, which packs the weight.
//
// A task is a panel of the weight, which stays in the second-level cache while every group of rows passes
// over it. Rows of either operand never meet, so neither the panels nor the threads can move a bit.
#include "native/lm_head/amx.hpp"
#include "native/lm_head/run.hpp"

namespace rlk::native {
namespace {

#if RLK_HAS_AMX

constexpr std::int64_t kUnit = 4 * kSide;  // rows of the weight are taken in these
constexpr std::int64_t kGroups = kWidth / kSide;

struct Blocking {
  std::int64_t rows, cols, depth;
  std::int64_t padded, groups, panel, panels, ranges;
  bool copies;  // the weight is copied panel by panel, for the zeros beside or below it

  Blocking(const LmHead& a, std::int32_t threads)
      : rows(RowSet(a.hidden).rows),
        cols(a.weight.dim(0)),
        depth(a.weight.dim(1)),
        padded(std::max(kStep, up(depth, kStep))),  // no depth at all is a step of zeros
        groups(up(rows, kSide) / kSide),
        panel(padded > kDepthBlock ? kUnit : 2 * kUnit),
        panels(up(cols, panel) / panel),
        copies(padded != depth || cols % kUnit != 0) {
    // With few panels the groups are cut into ranges as well.
    const std::int64_t tasks = 4 * workers_for(threads, std::int64_t{1} << 30);
    const std::int64_t wanted = (tasks + panels - 1) / std::max<std::int64_t>(panels, 1);
    ranges = std::clamp<std::int64_t>(wanted, 1, std::max<std::int64_t>(1, up(groups, kGroups) / kGroups));
  }
  std::int64_t group_bytes() const { return kSide * padded * 2; }
  std::uint64_t shared(const LmHead& a) const {
    return line(RowSet(a.hidden).copy_bytes()) + static_cast<std::uint64_t>(groups * group_bytes());
  }
  static constexpr std::uint64_t kSums = sizeof(float) * kWidth * 2 * kUnit, kTiles = 4 * kTile;
  std::uint64_t scratch() const {
    return kSums + kTiles + static_cast<std::uint64_t>(copies ? panel * padded * 2 : 0);
  }
};

// 16 rows of hidden from `first` on as second operands, one tile per step.
RLK_ISA void pack_group(const ReadRows& hidden, std::int64_t first, std::int64_t padded, std::byte* to) {
  const auto* from = static_cast<const std::uint16_t*>(hidden.data) + first * hidden.stride;
  for (std::int64_t k = 0; k < padded; k += kStep, to += kTile) {
    __m512 tile[kSide];
    load_rows(tile, from + k, hidden.stride, hidden.rows - first, hidden.width - k);
    transpose_16x16(tile);
    store_tile(tile, to);
  }
}

// [64 rows of the weight][16 rows of hidden]: four tiles by one, for a group that has no neighbour.
RLK_AMX void multiply_alone(const std::byte* weight, std::int64_t stride, const std::byte* group,
                            std::int64_t steps, float* sums) {
  operands_written();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const std::int64_t down = kSide * stride;
  for (std::int64_t s = 0; s < steps; ++s) {
    const std::byte* from = weight + 64 * s;
    _tile_loadd(4, group + kTile * s, 64);
    _tile_loadd(5, from, stride);
    _tile_dpbf16ps(0, 5, 4);
    _tile_loadd(6, from + down, stride);
    _tile_dpbf16ps(1, 6, 4);
    _tile_loadd(7, from + 2 * down, stride);
    _tile_dpbf16ps(2, 7, 4);
    _tile_loadd(5, from + 3 * down, stride);
    _tile_dpbf16ps(3, 5, 4);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + kSide * kSide, 64);
  _tile_stored(2, sums + 2 * kSide * kSide, 64);
  _tile_stored(3, sums + 3 * kSide * kSide, 64);
}

// A tile of results turned into rows of sums; blocks of depth after the first are added.
RLK_ISA void turn(const float* from, std::int64_t stride, float* to, std::int64_t to_stride, bool first) {
  __m512 tile[kSide];
  for (std::int64_t i = 0; i < kSide; ++i) tile[i] = _mm512_loadu_ps(from + i * stride);
  transpose_16x16(tile);
  for (std::int64_t i = 0; i < kSide; ++i) {
    float* row = to + i * to_stride;
    _mm512_storeu_ps(row, first ? tile[i] : _mm512_add_ps(_mm512_loadu_ps(row), tile[i]));
  }
}

struct Weight {
  const std::byte* data;
  std::int64_t stride;  // in bytes
};

// sums[32][panel]: `count` rows of the weight with one group of hidden or two.
void multiply_panel(const Blocking& p, const Weight& w, std::int64_t count, const std::byte* group,
                    bool alone, float* tiles, float* sums) {
  for (std::int64_t k = 0; k < p.padded; k += kDepthBlock) {
    const std::int64_t steps = std::min(kDepthBlock, p.padded - k) / kStep;
    const std::byte* from = group + k / kStep * kTile;
    for (std::int64_t j = 0; j < count; j += alone ? kUnit : kWidth) {
      const std::byte* rows = w.data + j * w.stride + 2 * k;
      if (alone) {
        multiply_alone(rows, w.stride, from, steps, tiles);
        for (std::int64_t i = 0; i < kUnit; i += kSide)
          turn(tiles + i * kSide, kSide, sums + j + i, p.panel, k == 0);
      } else {
        multiply(rows_as_they_lie(rows, w.stride), from, p.group_bytes(), steps, tiles, kWidth);
        for (std::int64_t i = 0; i < kWidth; i += kSide)
          for (std::int64_t n = 0; n < kWidth; n += kSide)
            turn(tiles + i * kWidth + n, kWidth, sums + n * p.panel + j + i, p.panel, k == 0);
      }
    }
  }
}

// Rows of the weight with zeros beside and below.
Weight copy_panel(const Blocking& p, const Weight& w, std::int64_t count, std::byte* to) {
  const std::int64_t stride = 2 * p.padded;
  std::memset(to, 0, static_cast<std::size_t>(up(count, kUnit) * stride));
  for (std::int64_t j = 0; j < count; ++j)
    std::memcpy(to + j * stride, w.data + j * w.stride, static_cast<std::size_t>(2 * p.depth));
  return {to, stride};
}

rlk_code run(const LmHead& a, const Call& call) {
  const Blocking p(a, call.threads());
  if (p.rows == 0 || p.cols == 0) return RLK_OK;
  std::byte* room = shared_workspace(call);
  const ReadRows hidden(a.hidden, room);
  std::byte* packed = shared_workspace(call) + line(RowSet(a.hidden).copy_bytes());
  const std::uint64_t shared = p.shared(a);
  run_tasks(call, p.groups, p.scratch(), shared, [&](std::int64_t group, std::byte*) {
    pack_group(hidden, group * kSide, p.padded, packed + group * p.group_bytes());
  });

  ChainProduct finish;
  finish.out_type = float_of(a.out.dtype());
  if (a.bias)
    finish.bias = a.bias.data<void>(), finish.bias_type = float_of(a.bias.dtype()),
    finish.bias_stride = a.bias.stride(0);
  const std::int64_t out_bytes = bytes_of(finish.out_type);
  const std::int64_t each = up((p.groups + p.ranges - 1) / p.ranges, kGroups);
  run_tasks<Tiles>(
      call, p.panels * p.ranges, p.scratch(), shared, [&](std::int64_t task, std::byte* scratch) {
        auto* sums = reinterpret_cast<float*>(scratch);
        auto* tiles = reinterpret_cast<float*>(scratch + Blocking::kSums);
        const std::int64_t col = task / p.ranges * p.panel, count = std::min(p.panel, p.cols - col);
        const std::int64_t begin = task % p.ranges * each, end = std::min(p.groups, begin + each);
        Weight w{a.weight.data<std::byte>() + 2 * col * a.weight.stride(0), 2 * a.weight.stride(0)};
        if (p.padded != p.depth || count % kUnit != 0)
          w = copy_panel(p, w, count, scratch + Blocking::kSums + Blocking::kTiles);
        for (std::int64_t group = begin; group < end; group += kGroups) {
          multiply_panel(p, w, count, packed + group * p.group_bytes(), group + 1 == end, tiles, sums);
          const std::int64_t row = group * kSide,
                             rows = std::min(kWidth, std::min(end * kSide, p.rows) - row);
          for (std::int64_t n = 0; n < rows; ++n)
            store_sums(finish, a.out.data<std::byte>() + (row_offset(a.out, row + n) + col) * out_bytes, col,
                       count, sums + n * p.panel);
        }
      });
  return RLK_OK;
}

std::uint64_t workspace(const LmHead& a, const rlk_request& r) {
  const Blocking p(a, r.threads);
  return workspace_for(r.threads, std::int64_t{1} << 30, p.scratch(), p.shared(a));
}
rlk_verdict supports(const LmHead&, const rlk_request&) { return kAccept; }

#else

rlk_code run(const LmHead&, const Call&) { return RLK_UNSUPPORTED; }
std::uint64_t workspace(const LmHead&, const rlk_request&) { return 0; }
rlk_verdict supports(const LmHead&, const rlk_request&) { return refuse(kNoAmx); }

#endif

}  // namespace

extern const rlk_implementation lm_head_amx;
const rlk_implementation lm_head_amx =
    implement<LmHead, run, supports, workspace>({.id = "native.amx",
                                                 .doc = "Intel's matrix unit, the weight read as it lies",
                                                 .priority = 210,
                                                 .arithmetic = "amx/k32",
                                                 .dtypes = RLK_BF16,
                                                 .traits = kPinned,
                                                 .min_arch = RLK_CPU_AMX});

}  // namespace rlk::native
