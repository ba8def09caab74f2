// lm_head on oneDNN. Rows are cut into fixed heights, columns into panels of 128; every (height, panel)
// product is one single-threaded primitive that reproduced its rule, so the bits do not depend on M, on a
// row's place, on the threads, or on whether the weight was packed before (lm_head_weight) or is read as it
// lies.
//
//   onednn.f32    fma32/kb1024
//   onednn.bf16   amx/k32 (see rules.hpp); fp32 sums, one rounding
//   onednn.f16    amx/k32, where the library and the processor have it
//
// The fp32 results of a product pass once through the cache on their way out: rounded, bias added, rounded
// again, NaN canonical (0x7fffffff, in 16 bits 0x7fff).
#include <cstring>

#include "finish.hpp"
#include "packs.hpp"
#include "rlk/half.hpp"
#include "rlk/ops.hpp"
#include "views.hpp"
#include "workers.hpp"

namespace rlk::onednn {
namespace {

void finish_row(const LmHead& a, std::int64_t row, std::int64_t col, std::int64_t count, const float* sums) {
  float bias[kPanel];
  const DType type = a.bias ? a.bias.dtype() : DType::f32;
  if (a.bias)
    for (std::int64_t j = 0; j < count; ++j)
      bias[j] = type == DType::f32    ? a.bias.data<float>()[col + j]
                : type == DType::bf16 ? bf16_to_float(a.bias.data<std::uint16_t>()[col + j])
                                      : f16_to_float(a.bias.data<std::uint16_t>()[col + j]);
  const std::int64_t at = row * a.out.stride(-2) + col;
  finish(sums, count, a.bias ? bias : nullptr, a.out.dtype(),
         a.out.data<std::byte>() + at * size_of(a.out.dtype()));
}

// hidden as dense rows in the workspace, one matrix per depth block, zeros beside and below them. Rows that
// lie so already are copied too: the workspace's large pages give back more than the copy takes.
class Source {
 public:
  Source(const LmHead& a, const Blocks& p, const Call& call)
      : p_(p), data_(shared_workspace(call)), rows_(Cut(rows_of(a.hidden)).rows) {
    const std::int64_t m = rows_of(a.hidden), stride = row_stride(a.hidden) * bytes_of(p.type);
    const auto* from = a.hidden.data<std::byte>();
    run_tasks(call, Cut(m).count, p.scratch_bytes(), bytes(a, p), [&](std::int64_t task, std::byte*) {
      for (std::int64_t i = Cut(m).row(task); i < Cut(m).row(task) + Cut(m).height(task); ++i)
        for (std::int64_t b = 0; b < p.count; ++b) {
          std::byte* to = data_ + offset(b, i);
          const std::int64_t filled = i < m ? p.block(b).depth * bytes_of(p.type) : 0;
          if (filled != 0)
            std::memcpy(to, from + i * stride + b * p.full_depth * bytes_of(p.type),
                        static_cast<std::size_t>(filled));
          std::memset(to + filled, 0, static_cast<std::size_t>(pitch(b) - filled));
        }
    });
  }
  static std::size_t bytes(const LmHead& a, const Blocks& p) {
    const std::int64_t width = (p.count - 1) * p.full.padded + p.last.padded;
    return static_cast<std::size_t>(Cut(rows_of(a.hidden)).rows * width * bytes_of(p.type));
  }
  const std::byte* row(std::int64_t b, std::int64_t i) const { return data_ + offset(b, i); }

 private:
  std::int64_t pitch(std::int64_t b) const { return p_.block(b).padded * bytes_of(p_.type); }
  std::int64_t offset(std::int64_t b, std::int64_t i) const { return b * rows_ * pitch(0) + i * pitch(b); }

  const Blocks& p_;
  std::byte* data_;
  std::int64_t rows_;
};

Blocks blocks_of(const LmHead& a) {
  return Blocks(type_of(a.hidden.dtype()), a.weight.dim(1), a.weight.stride(0));
}

rlk_verdict supports(const LmHead& a, const rlk_request&) {
  if (a.weight.dim(1) == 0) return refuse("K is 0");
  if (a.weight.dim(0) > 1 && a.weight.stride(0) < a.weight.dim(1))
    return refuse("weight has row stride {0}, less than its K={1}", {a.weight.stride(0), a.weight.dim(1)});
  if (!even_rows(a.hidden) || !even_rows(a.out))
    return refuse("leading dimensions of hidden or out are not one stride apart", {}, "make them contiguous");
  const std::string& refusal = blocks_of(a).refusal();
  return refusal.empty() ? kAccept : refuse(refusal.c_str());
}

std::int64_t panels_of(const LmHead& a) { return (a.weight.dim(0) + kPanel - 1) / kPanel; }

std::uint64_t workspace(const LmHead& a, const rlk_request& r) {
  const Blocks p = blocks_of(a);
  return workspace_for(r.threads, std::int64_t{1} << 30, p.scratch_bytes(), Source::bytes(a, p));
}

rlk_code run(const LmHead& a, const Call& call) {
  const std::int64_t m = rows_of(a.hidden), v = a.weight.dim(0);
  if (m == 0 || v == 0) return RLK_OK;
  const Blocks p = blocks_of(a);
  const WeightKey key{a.weight.data<void>(), v, p.depth, p.weight_stride, p.type};
  const auto pack = find_pack(key);
  if (pack && sample_of(key) != pack->sample)
    return call.fail(RLK_INVALID_ARGUMENT,
                     "lm_head: weight has changed since lm_head_weight kept version " +
                         std::to_string(pack->version) +
                         " of it: call lm_head_weight again, with a new version or action=drop");
  const Source source(a, p, call);
  const Cut cut(m);
  // One task is a panel with all rows, which reads the weight once. Where those are one height it is several
  // panels, whose results leave in longer rows; with few panels, a panel and one height.
  const std::int64_t panels = panels_of(a), workers = workers_for(call.threads(), 1 << 30);
  const std::int64_t split = panels < 4 * workers ? cut.count : 1;
  const std::int64_t wide = cut.count > 1 ? 1 : std::clamp<std::int64_t>(panels / (8 * workers), 1, kPlaces);
  const std::int64_t tasks = (panels + wide - 1) / wide * split;
  run_tasks(call, tasks, p.scratch_bytes(), Source::bytes(a, p), [&](std::int64_t task, std::byte* room) {
    const std::int64_t begin = task / split * wide, end = std::min(begin + wide, panels);
    const std::int64_t first = split == 1 ? 0 : task % split, last = split == 1 ? cut.count : first + 1;
    const auto columns = [&](std::int64_t panel) { return std::min(kPanel, v - panel * kPanel); };
    const std::byte* packed = nullptr;
    for (std::int64_t i = first; i < last; ++i) {
      const std::int64_t row = cut.row(i), height = cut.height(i);
      const float* sums[kPlaces];
      for (std::int64_t panel = begin; panel < end; ++panel) {
        const std::byte* rows =
            a.weight.data<std::byte>() + panel * kPanel * p.weight_stride * bytes_of(p.type);
        if (pack)
          packed = pack->panel(panel);
        else if (packed == nullptr && last - first > 1)
          packed = p.pack_here(rows, columns(panel), room);
        sums[panel - begin] = p.run(
            height, [&](std::int64_t b) { return source.row(b, row); }, rows, columns(panel), packed, room,
            panel - begin);
      }
      for (std::int64_t r = 0; r < std::min(height, m - row); ++r)
        for (std::int64_t panel = begin; panel < end; ++panel)
          finish_row(a, row + r, panel * kPanel, columns(panel), sums[panel - begin] + r * kPanel);
    }
  });
  return RLK_OK;
}

constexpr std::uint32_t kTraits = RLK_DETERMINISTIC | RLK_BATCH_INVARIANT | RLK_STRICT;

}  // namespace

extern const rlk_implementation lm_head_f32, lm_head_bf16;
const rlk_implementation lm_head_f32 = implement<LmHead, run, supports, workspace>(
    {.id = "onednn.f32",
     .doc = "oneDNN matmul in strict fp32, checked against its rule",
     .priority = 99,  // behind native's vector forms: the same bits, and faster up to 32 rows
     .arithmetic = "fma32/kb1024",
     .dtypes = RLK_F32,
     .traits = kTraits});
const rlk_implementation lm_head_bf16 =
    implement<LmHead, run, supports, workspace>({.id = "onednn.bf16",
                                                 .doc = "oneDNN matmul on AMX, checked against its rule",
                                                 .priority = 200,
                                                 .arithmetic = "amx/k32",
                                                 .dtypes = RLK_BF16,
                                                 .traits = kTraits});
#if DNNL_VERSION_MAJOR >= 3
extern const rlk_implementation lm_head_f16;
const rlk_implementation lm_head_f16 =
    implement<LmHead, run, supports, workspace>({.id = "onednn.f16",
                                                 .doc = "oneDNN matmul on AMX-FP16, checked against its rule",
                                                 .priority = 200,
                                                 .arithmetic = "amx/k32",
                                                 .dtypes = RLK_F16,
                                                 .traits = kTraits});
#endif

}  // namespace rlk::onednn
