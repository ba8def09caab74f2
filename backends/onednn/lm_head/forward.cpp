#include "onednn/lm_head/forward.hpp"

#include <cstring>

#include "onednn/cpu.hpp"
#include "onednn/lm_head/finish.hpp"
#include "onednn/lm_head/packs.hpp"
#include "onednn/views.hpp"
#include "onednn/workers.hpp"
#include "rlk/half.hpp"

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

// hidden as dense rows in the workspace, one matrix per depth block, upcast where the products want it, zeros
// beside and below them. Rows that lie so already are copied too: the workspace's large pages give back more
// than the copy takes.
class Source {
 public:
  Source(const LmHead& a, const Blocks& p, const Call& call)
      : p_(p), data_(shared_workspace(call)), rows_(cut(a, p).rows) {
    const std::int64_t m = rows_of(a.hidden), stride = row_stride(a.hidden) * bytes_of(p.element);
    const auto* from = a.hidden.data<std::byte>();
    const Cut heights = cut(a, p);
    run_tasks(call, heights.count, p.scratch_bytes(), bytes(a, p), [&](std::int64_t task, std::byte*) {
      for (std::int64_t i = heights.row(task); i < heights.row(task) + heights.height(task); ++i)
        for (std::int64_t b = 0; b < p.count; ++b)
          lay_out(from + i * stride + b * p.full_depth * bytes_of(p.element), i < m ? p.block(b).depth : 0,
                  data_ + offset(b, i), pitch(b));
    });
  }
  static Cut cut(const LmHead& a, const Blocks& p) { return {rows_of(a.hidden), p.heights()}; }
  static std::size_t bytes(const LmHead& a, const Blocks& p) {
    const std::int64_t width = (p.count - 1) * p.full.padded + p.last.padded;
    return static_cast<std::size_t>(cut(a, p).rows * width * bytes_of(p.type));
  }
  const std::byte* row(std::int64_t b, std::int64_t i) const { return data_ + offset(b, i); }

 private:
  void lay_out(const std::byte* from, std::int64_t width, std::byte* to, std::int64_t pitch) const {
    const std::int64_t filled = width * bytes_of(p_.type);
    if (p_.upcasts())
      upcast(p_.element, from, width, reinterpret_cast<float*>(to));
    else if (filled != 0)
      std::memcpy(to, from, static_cast<std::size_t>(filled));
    std::memset(to + filled, 0, static_cast<std::size_t>(pitch - filled));
  }
  std::int64_t pitch(std::int64_t b) const { return p_.block(b).padded * bytes_of(p_.type); }
  std::int64_t offset(std::int64_t b, std::int64_t i) const { return b * rows_ * pitch(0) + i * pitch(b); }

  const Blocks& p_;
  std::byte* data_;
  std::int64_t rows_;
};

Blocks blocks_of(Rule rule, const LmHead& a) {
  return Blocks(rule, float_of(a.hidden.dtype()), a.weight.dim(1), a.weight.stride(0));
}

std::int64_t panels_of(const LmHead& a) { return (a.weight.dim(0) + kPanel - 1) / kPanel; }

const std::string& limited() {
  static const std::string why =
      ambient_limit() + " is set and decides how oneDNN adds: a strict call's bits may not depend on it";
  return why;
}

}  // namespace

rlk_verdict supports_forward(Rule rule, const LmHead& a, const rlk_request& request) {
  if (a.weight.dim(1) == 0) return refuse("K is 0");
  if (a.weight.dim(1) > kDeepest)
    return refuse("K is {0}, at most {1} is taken", {a.weight.dim(1), kDeepest});
  if (a.weight.dim(0) > 1 && a.weight.stride(0) < a.weight.dim(1))
    return refuse("weight has row stride {0}, less than its K={1}", {a.weight.stride(0), a.weight.dim(1)});
  if (!even_rows(a.hidden) || !even_rows(a.out))
    return refuse("leading dimensions of hidden or out are not one stride apart", {}, "make them contiguous");
  // The rule is kept under such a limit too. But a call that names none would get its bits instead of those
  // it gets without the limit.
  if (rule == Rule::kb256 && request.precision == RLK_PRECISION_STRICT && !ambient_limit().empty())
    return refuse(limited().c_str());
  const std::string& refusal = blocks_of(rule, a).refusal();
  if (refusal.empty()) return kAccept;
  return refuse(refusal.c_str(), {},
                rule == Rule::kb256 ? nullptr : "ask for onednn.kb256: arithmetic fma32/kb256");
}

std::uint64_t workspace_forward(Rule rule, const LmHead& a, const rlk_request& r) {
  const Blocks p = blocks_of(rule, a);
  return workspace_for(r.threads, std::int64_t{1} << 30, p.scratch_bytes(), Source::bytes(a, p));
}

rlk_code run_forward(Rule rule, const LmHead& a, const Call& call) {
  const std::int64_t m = rows_of(a.hidden), v = a.weight.dim(0);
  if (m == 0 || v == 0) return RLK_OK;
  const Blocks p = blocks_of(rule, a);
  const WeightKey key{a.weight.data<void>(), v, p.depth, p.weight_stride, p.element, rule};
  const auto pack = find_pack(key);
  if (pack && sample_of(key) != pack->sample)
    return call.fail(RLK_INVALID_ARGUMENT,
                     "lm_head: weight has changed since lm_head_weight kept version " +
                         std::to_string(pack->version) +
                         " of it: call lm_head_weight again, with a new version or action=drop");
  const Source source(a, p, call);
  const Cut cut = Source::cut(a, p);
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
    Panel packed;
    for (std::int64_t i = first; i < last; ++i) {
      const std::int64_t row = cut.row(i), height = cut.height(i);
      const float* sums[kPlaces];
      for (std::int64_t panel = begin; panel < end; ++panel) {
        const std::byte* rows =
            a.weight.data<std::byte>() + panel * kPanel * p.weight_stride * bytes_of(p.element);
        if (pack)
          packed = p.kept(pack->panel(panel));
        else if (packed.data == nullptr && last - first > 1)
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

}  // namespace rlk::onednn
