#include "onednn/lm_head/kept_weight.hpp"

#include <iterator>

#include "onednn/lm_head/packs.hpp"
#include "onednn/views.hpp"
#include "onednn/workers.hpp"

namespace rlk::onednn {
namespace {

enum { kKeep, kDrop };

constexpr rlk_argument kArguments[] = {
    {"weight", "[V, K] as lm_head takes it", RLK_READ, kFloats, 2, 2, -1, RLK_STRIDED}};
constexpr rlk_attribute kAttributes[] = {
    {"action", "keep it packed while it stays as it is, or drop what is kept", RLK_CHOICE, kKeep, 0,
     "keep|drop"},
    {"version", "counted by the owner: a new one says that the bytes have changed", RLK_INT, 0, 0, nullptr}};

int32_t infer(const rlk_slot*, rlk_shape*, const rlk_host*) { return RLK_OK; }

// Packed for the products that take such a weight here: the first of the implementations that may.
Blocks blocks_of(const LmHeadWeight& a) {
  const Float type = float_of(a.weight.dtype());
  const auto by = [&](Rule rule) { return Blocks(rule, type, a.weight.dim(1), a.weight.stride(0)); };
  const Blocks first = by(type == Float::f32 ? Rule::kb1024 : Rule::k32);
  if (first.refusal().empty() || type == Float::f16) return first;
  if (type == Float::bf16)
    if (const Blocks pairs = by(Rule::pairs); pairs.refusal().empty()) return pairs;
  return Blocks(Rule::kb256, type, a.weight.dim(1), a.weight.stride(0));
}

WeightKey key_of(const LmHeadWeight& a, Rule rule) {
  return {a.weight.data<void>(),
          a.weight.dim(0),
          a.weight.dim(1),
          a.weight.stride(0),
          float_of(a.weight.dtype()),
          rule};
}

rlk_verdict supports(const LmHeadWeight& a, const rlk_request&) {
  if (a.action == kDrop) return kAccept;
  if (a.weight.dim(1) == 0) return refuse("K is 0");
  if (a.weight.dim(1) > kDeepest)
    return refuse("K is {0}, at most {1} is taken", {a.weight.dim(1), kDeepest});
  if (a.weight.dim(0) > 1 && a.weight.stride(0) < a.weight.dim(1))
    return refuse("weight has row stride {0}, less than its K={1}", {a.weight.stride(0), a.weight.dim(1)});
  const std::string& refusal = blocks_of(a).refusal();
  return refusal.empty() ? kAccept : refuse(refusal.c_str());
}

std::uint64_t workspace(const LmHeadWeight& a, const rlk_request& r) {
  return a.action == kDrop ? 0
                           : workspace_for(r.threads, std::int64_t{1} << 30, blocks_of(a).scratch_bytes());
}

rlk_code run(const LmHeadWeight& a, const Call& call) {
  if (a.action == kDrop) {
    drop_pack(key_of(a, Rule::kb1024));
    return RLK_OK;
  }
  const Blocks p = blocks_of(a);
  const WeightKey key = key_of(a, p.rule);
  const auto kept = find_pack(key);
  if (kept && kept->version == a.version && kept->sample == sample_of(key)) return RLK_OK;
  const auto pack = new_pack(key, a.version, p);
  const std::int64_t panels = (key.rows + kPanel - 1) / kPanel;
  run_tasks(call, panels, p.scratch_bytes(), 0, [&](std::int64_t panel, std::byte* room) {
    const auto* rows =
        static_cast<const std::byte*>(key.data) + panel * kPanel * key.stride * bytes_of(key.type);
    p.keep(rows, std::min(kPanel, key.rows - panel * kPanel),
           pack->panels.get() + static_cast<std::size_t>(panel) * pack->panel_bytes, room);
  });
  keep_pack(pack);
  return RLK_OK;
}

}  // namespace

const rlk_op_schema lm_head_weight_schema = {.struct_size = sizeof(rlk_op_schema),
                                             .version = 1,
                                             .name = LmHeadWeight::kName,
                                             .aliases = "",
                                             .doc = "keeps an lm_head weight packed for oneDNN",
                                             .arguments = kArguments,
                                             .num_arguments = std::size(kArguments),
                                             .attributes = kAttributes,
                                             .num_attributes = std::size(kAttributes),
                                             .backward = nullptr,
                                             .infer = infer,
                                             .may_alias = ""};

const rlk_implementation lm_head_weight_pack = implement<LmHeadWeight, run, supports, workspace>(
    {.id = "onednn.pack",
     .doc = "oneDNN's own layout, for every height of its products",
     .priority = 200,
     .arithmetic = "exact",
     .dtypes = kFloats,
     .traits = kPinned,
     .min_arch = RLK_CPU_AVX2});

}  // namespace rlk::onednn
