// lm_head_bwd on oneDNN, 16-bit operands on AMX: the forward's fixed products, with the sum over V for
// d_hidden and over M for d_weight. Arithmetic amx/k32, depth blocks of 4096 included; d_bias is fma32/kb1024
// (a chain with ones).
//
// Both operands are brought into the products' layout first: what is summed over is contiguous in neither.
//   d_hidden  512 rows at a time, one depth block after the other: d_out's rows of the block are laid out
//             densely, every worker packs a panel of the weight and adds its products to running sums
//             (fp32, 512 x K)
//   d_weight  hidden is packed once; every worker turns 128 columns of d_out into rows and multiplies them
//             with all panels
// There is no fp32 form: native has the same bits at the same rate.
#include <cstring>

#include "onednn/lm_head/finish.hpp"
#include "onednn/products.hpp"
#include "onednn/views.hpp"
#include "onednn/workers.hpp"
#include "rlk/half.hpp"
#include "rlk/ops.hpp"

namespace rlk::onednn {
namespace {

constexpr std::int64_t kRowsAtOnce = 512;
constexpr std::int64_t kDepthBlock = depth_block(Rule::k32);
constexpr std::int64_t kTallest = kHeights[0];

// The summed index, cut into blocks. A length that is no multiple of 32 counts as the next one: the products
// are the same, and a batch of any size finds them made.
struct Depth {
  Float type;
  std::int64_t length, count;  // in all; of blocks
  const Products &full, &last;

  Depth(Float t, std::int64_t n)
      : type(t),
        length(n),
        count((n + kDepthBlock - 1) / kDepthBlock),
        full(products_of(std::min(n, kDepthBlock))),
        last(products_of(steps(count - 1))) {}

  std::int64_t first(std::int64_t b) const { return b * kDepthBlock; }
  std::int64_t steps(std::int64_t b) const { return std::min(kDepthBlock, length - first(b)); }
  const Products& products(std::int64_t b) const { return b + 1 == count ? last : full; }
  std::size_t scratch_bytes() const { return std::max(full.scratch_bytes(), last.scratch_bytes()); }
  HeightSet heights() const { return full.heights & last.heights; }
  const std::string& refusal() const { return full.refusal.empty() ? last.refusal : full.refusal; }

 private:
  const Products& products_of(std::int64_t steps) const {
    const std::int64_t padded = (steps + 31) / 32 * 32;
    return Products::of(Rule::k32, type, padded, padded);
  }
};

std::int64_t panels_for(std::int64_t columns) { return (columns + kPanel - 1) / kPanel; }

// ---- d_hidden[m, k] = sum over v of d_out[m, v] * weight[v, k]

class HiddenGradient {
 public:
  explicit HiddenGradient(const LmHeadBwd& a)
      : a_(a),
        depth_(float_of(a.hidden.dtype()), a.weight.dim(0)),
        rows_(rows_of(a.d_out)),
        columns_(a.weight.dim(1)) {}

  std::size_t scratch_bytes() const { return line(depth_.full.panel_bytes()) + depth_.scratch_bytes(); }
  std::size_t shared_bytes() const { return line(source_bytes()) + line(sums_bytes()); }

  void run(const Call& call) const {
    for (std::int64_t row = 0; row < rows_; row += kRowsAtOnce)
      for (std::int64_t b = 0; b < depth_.count; ++b) {
        lay_out(call, row, b);
        multiply(call, row, b);
      }
  }

 private:
  std::int64_t rows_at(std::int64_t row) const { return std::min(kRowsAtOnce, rows_ - row); }
  std::size_t source_bytes() const {
    return static_cast<std::size_t>(Cut(rows_at(0), depth_.heights()).rows * depth_.full.padded *
                                    bytes_of(depth_.type));
  }
  std::size_t sums_bytes() const {
    return static_cast<std::size_t>(Cut(rows_at(0), depth_.heights()).rows * columns_) * sizeof(float);
  }
  std::byte* source(const Call& call) const { return shared_workspace(call); }
  float* sums(const Call& call) const {
    return reinterpret_cast<float*>(shared_workspace(call) + line(source_bytes()));
  }

  void lay_out(const Call& call, std::int64_t row, std::int64_t b) const {
    constexpr std::int64_t kLines = 8;
    const std::int64_t bytes = bytes_of(depth_.type), pitch = depth_.products(b).padded * bytes;
    const std::int64_t stride = row_stride(a_.d_out) * bytes, width = depth_.steps(b) * bytes,
                       m = rows_at(row);
    const std::byte* from = a_.d_out.data<std::byte>() + row * stride + depth_.first(b) * bytes;
    run_tasks(call, Cut(m, depth_.heights()).rows / kLines, scratch_bytes(), shared_bytes(),
              [&](std::int64_t task, std::byte*) {
                for (std::int64_t i = task * kLines; i < (task + 1) * kLines; ++i) {
                  std::byte* to = source(call) + i * pitch;
                  const std::int64_t filled = i < m ? width : 0;
                  if (filled != 0) std::memcpy(to, from + i * stride, static_cast<std::size_t>(filled));
                  std::memset(to + filled, 0, static_cast<std::size_t>(pitch - filled));
                }
              });
  }

  void multiply(const Call& call, std::int64_t row, std::int64_t b) const {
    const Products& p = depth_.products(b);
    const std::int64_t bytes = bytes_of(depth_.type), stride = a_.weight.stride(0), m = rows_at(row);
    const Cut cut(m, depth_.heights());
    // One task is a panel with all rows, which packs it once; with few panels, a panel and one height.
    const std::int64_t panels = panels_for(columns_);
    const std::int64_t split = panels < 4 * workers_for(call.threads(), 1 << 30) ? cut.count : 1;
    run_tasks(call, panels * split, scratch_bytes(), shared_bytes(), [&](std::int64_t task, std::byte* room) {
      const std::int64_t col = task / split * kPanel, count = std::min(kPanel, columns_ - col);
      const std::int64_t first = split == 1 ? 0 : task % split, last = split == 1 ? cut.count : first + 1;
      std::byte* panel = room;
      room += line(depth_.full.panel_bytes());
      p.pack_columns(a_.weight.data<std::byte>() + (depth_.first(b) * stride + col) * bytes, stride,
                     depth_.steps(b), count, panel, room);
      for (std::int64_t i = first; i < last; ++i) {
        const float* part =
            p.run(cut.height(i), source(call) + cut.row(i) * p.padded * bytes, nullptr, kPanel, panel, room);
        for (std::int64_t r = 0; r < std::min(cut.height(i), m - cut.row(i)); ++r)
          add(call, row, cut.row(i) + r, b, col, count, part + r * kPanel);
      }
    });
  }

  void add(const Call& call, std::int64_t row, std::int64_t i, std::int64_t b, std::int64_t col,
           std::int64_t count, const float* part) const {
    float* total = sums(call) + i * columns_ + col;
    for (std::int64_t j = 0; j < count; ++j) total[j] = b == 0 ? part[j] : total[j] + part[j];
    if (b + 1 < depth_.count) return;
    const DType type = a_.d_hidden.dtype();
    const std::int64_t at = (row + i) * row_stride(a_.d_hidden) + col;
    finish(total, count, nullptr, type, a_.d_hidden.data<std::byte>() + at * size_of(type));
  }

  const LmHeadBwd& a_;
  const Depth depth_;
  const std::int64_t rows_, columns_;
};

// ---- d_weight[v, k] = sum over m of d_out[m, v] * hidden[m, k]

class WeightGradient {
 public:
  explicit WeightGradient(const LmHeadBwd& a)
      : a_(a),
        depth_(float_of(a.hidden.dtype()), rows_of(a.d_out)),
        rows_(a.weight.dim(0)),
        columns_(a.weight.dim(1)) {}

  std::size_t scratch_bytes() const { return line(tile_bytes()) + line(kSums) + depth_.scratch_bytes(); }
  std::size_t shared_bytes() const {
    return static_cast<std::size_t>(depth_.count * panels_for(columns_)) * panel_bytes();
  }

  void run(const Call& call) const {
    const std::int64_t panels = panels_for(columns_), bytes = bytes_of(depth_.type);
    const std::int64_t stride = row_stride(a_.hidden);
    run_tasks(call, panels * depth_.count, scratch_bytes(), shared_bytes(),
              [&](std::int64_t task, std::byte* room) {
                const std::int64_t b = task / panels, col = task % panels * kPanel;
                depth_.products(b).pack_columns(
                    a_.hidden.data<std::byte>() + (depth_.first(b) * stride + col) * bytes, stride,
                    depth_.steps(b), std::min(kPanel, columns_ - col), panel(call, b, task % panels), room);
              });
    run_tasks(call, (rows_ + kTallest - 1) / kTallest, scratch_bytes(), shared_bytes(),
              [&](std::int64_t task, std::byte* room) { multiply(call, task * kTallest, room); });
  }

 private:
  static constexpr std::size_t kSums = sizeof(float) * static_cast<std::size_t>(kTallest * kPanel);

  std::size_t panel_bytes() const { return line(depth_.full.panel_bytes()); }
  std::size_t tile_bytes() const {
    return static_cast<std::size_t>(kTallest * depth_.full.padded * depth_.count * bytes_of(depth_.type));
  }
  std::byte* panel(const Call& call, std::int64_t b, std::int64_t index) const {
    return shared_workspace(call) +
           static_cast<std::size_t>(b * panels_for(columns_) + index) * panel_bytes();
  }

  // Columns of d_out as dense rows, one matrix per depth block; rows past the last stay zero.
  void turn(std::int64_t row, std::int64_t count, std::uint16_t* tile) const {
    constexpr std::int64_t kSquare = 32;
    std::memset(tile, 0, tile_bytes());
    const auto* from = a_.d_out.data<std::uint16_t>() + row;
    const std::int64_t stride = row_stride(a_.d_out);
    for (std::int64_t b = 0; b < depth_.count; ++b) {
      std::uint16_t* to = tile + b * kTallest * depth_.full.padded;
      const std::int64_t pitch = depth_.products(b).padded;
      for (std::int64_t m0 = 0; m0 < depth_.steps(b); m0 += kSquare)
        for (std::int64_t v0 = 0; v0 < count; v0 += kSquare)
          for (std::int64_t m = m0; m < std::min(m0 + kSquare, depth_.steps(b)); ++m)
            for (std::int64_t v = v0; v < std::min(v0 + kSquare, count); ++v)
              to[v * pitch + m] = from[(depth_.first(b) + m) * stride + v];
    }
  }

  void multiply(const Call& call, std::int64_t row, std::byte* room) const {
    const std::int64_t count = std::min(kTallest, rows_ - row);
    auto* tile = reinterpret_cast<std::uint16_t*>(room);
    room += line(tile_bytes());
    auto* total = reinterpret_cast<float*>(room);
    room += line(kSums);
    turn(row, count, tile);
    const Cut cut(count, depth_.heights());
    const DType type = a_.d_weight.dtype();
    for (std::int64_t index = 0; index < panels_for(columns_); ++index) {
      const std::int64_t col = index * kPanel, width = std::min(kPanel, columns_ - col);
      for (std::int64_t i = 0; i < cut.count; ++i) {
        const float* sums = nullptr;
        for (std::int64_t b = 0; b < depth_.count; ++b) {
          const Products& p = depth_.products(b);
          const float* part =
              p.run(cut.height(i), tile + b * kTallest * depth_.full.padded + cut.row(i) * p.padded, nullptr,
                    kPanel, panel(call, b, index), room);
          if (depth_.count == 1) {
            sums = part;
            continue;
          }
          for (std::int64_t j = 0; j < cut.height(i) * kPanel; ++j)
            total[j] = b == 0 ? part[j] : total[j] + part[j];
          sums = total;
        }
        for (std::int64_t r = 0; r < std::min(cut.height(i), count - cut.row(i)); ++r) {
          const std::int64_t at = (row + cut.row(i) + r) * a_.d_weight.stride(0) + col;
          finish(sums + r * kPanel, width, nullptr, type, a_.d_weight.data<std::byte>() + at * size_of(type));
        }
      }
    }
  }

  const LmHeadBwd& a_;
  const Depth depth_;
  const std::int64_t rows_, columns_;
};

// ---- d_bias[v] = sum over m of d_out[m, v]

void bias_gradient(const LmHeadBwd& a, const Call& call, std::size_t scratch, std::size_t shared) {
  constexpr std::int64_t kBlock = 1024;
  const std::int64_t rows = rows_of(a.d_out), columns = a.weight.dim(0), stride = row_stride(a.d_out);
  const Float type = float_of(a.d_out.dtype());
  run_tasks(call, panels_for(columns), scratch, shared, [&](std::int64_t task, std::byte*) {
    const std::int64_t col = task * kPanel, count = std::min(kPanel, columns - col);
    const auto* from = a.d_out.data<std::uint16_t>() + col;
    float total[kPanel], chain[kPanel];
    for (std::int64_t first = 0; first < rows; first += kBlock) {
      std::fill_n(chain, kPanel, 0.0f);
      for (std::int64_t m = first; m < std::min(rows, first + kBlock); ++m)
        for (std::int64_t j = 0; j < count; ++j) {
          const std::uint16_t x = from[m * stride + j];
          chain[j] += type == Float::bf16 ? bf16_to_float(x) : f16_to_float(x);
        }
      for (std::int64_t j = 0; j < count; ++j) total[j] = first == 0 ? chain[j] : total[j] + chain[j];
    }
    const DType out = a.d_bias.dtype();
    finish(total, count, nullptr, out, a.d_bias.data<std::byte>() + col * size_of(out));
  });
}

rlk_verdict supports(const LmHeadBwd& a, const rlk_request&) {
  if (a.d_out.dtype() != a.hidden.dtype())
    return refuse("AMX takes two operands of one 16-bit dtype, d_out is fp32", {},
                  "round d_out to hidden's dtype", 0);
  if (rows_of(a.d_out) == 0 || a.weight.dim(0) == 0 || a.weight.dim(1) == 0)
    return refuse("an empty product");
  if (!even_rows(a.d_out) || !even_rows(a.hidden) || (a.d_hidden && !even_rows(a.d_hidden)))
    return refuse("leading dimensions of d_out, hidden or d_hidden are not one stride apart", {},
                  "make them contiguous");
  for (const std::int64_t length : {a.weight.dim(0), rows_of(a.d_out)})
    if (const std::string& refusal = Depth(float_of(a.hidden.dtype()), length).refusal(); !refusal.empty())
      return refuse(refusal.c_str());
  return kAccept;
}

struct Room {
  std::size_t scratch = 64, shared = 0;
  explicit Room(const LmHeadBwd& a) {
    if (a.d_hidden) take(HiddenGradient(a));
    if (a.d_weight) take(WeightGradient(a));
  }
  template <class Gradient>
  void take(const Gradient& g) {
    scratch = std::max(scratch, g.scratch_bytes());
    shared = std::max(shared, g.shared_bytes());
  }
};

std::uint64_t workspace(const LmHeadBwd& a, const rlk_request& r) {
  const Room room(a);
  return workspace_for(r.threads, std::int64_t{1} << 30, room.scratch, room.shared);
}

rlk_code run(const LmHeadBwd& a, const Call& call) {
  if (a.d_hidden) HiddenGradient(a).run(call);
  if (a.d_weight) WeightGradient(a).run(call);
  if (a.d_bias) bias_gradient(a, call, 64, 0);
  return RLK_OK;
}

constexpr Facts facts(const char* id, const char* doc, std::uint32_t dtypes) {
  return {.id = id,
          .doc = doc,
          .priority = 200,
          .arithmetic = "amx/k32",
          .dtypes = dtypes,
          .traits = kPinned,
          .min_arch = RLK_CPU_AMX};
}

}  // namespace

extern const rlk_implementation lm_head_bwd_bf16;
const rlk_implementation lm_head_bwd_bf16 = implement<LmHeadBwd, run, supports, workspace>(
    facts("onednn.bf16", "oneDNN matmul on AMX, checked against its rule", RLK_BF16));
#if DNNL_VERSION_MAJOR >= 3
extern const rlk_implementation lm_head_bwd_f16;
const rlk_implementation lm_head_bwd_f16 = implement<LmHeadBwd, run, supports, workspace>(
    facts("onednn.f16", "oneDNN matmul on AMX-FP16, checked against its rule", RLK_F16));
#endif

}  // namespace rlk::onednn
