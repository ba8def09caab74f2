// attention, attention_part, attention_merge and attention_bwd on any GPU by the portable kernels: the bits of the native backend, and
// of the first two an implementation for every split.
#include "arithmetic/attention/bind.hpp"
#include "simt/attention/launchers.hpp"
#include "simt/portable.hpp"

namespace rlk::simt::attention {
namespace {

using attn128::problem_of;

std::uint64_t workspace(const Attention& a, const rlk_request&) {
  return static_cast<std::uint64_t>(forward_workspace(problem_of(a)));
}

// Args is Attention or AttentionPart.
template <int S, class Args>
rlk_verdict supports(const Args& a, const rlk_request&) {
  const std::int64_t rows = a.q.dim(-1) == 0 ? 0 : a.q.numel() / a.q.dim(-1);
  if (rows > INT32_MAX) return refuse("q has {0} rows, the grid has {1}", {rows, INT32_MAX});
  if constexpr (requires { a.partials; })
    if (const std::int64_t splits = problem_of(a).splits(); splits > kMostSplits)
      return refuse("there is room for {0} splits of keys, the grid has {1}", {splits, kMostSplits});
  if (a.split == S) return kAccept;
  return refuse("split is {0}, this arithmetic has {1}", {a.split, S},
                "set split, or take another arithmetic");
}

template <int S>
rlk_code forward(const Attention& a, const Call& call) {
  if (a.split != S) return call.fail(RLK_UNSUPPORTED, "attention: split is not this implementation's");
  return finished(call, "attention",
                  run_forward(problem_of(a), call.workspace().data(), call.stream(), call.device().id));
}

// ---- in two steps

template <int S>
rlk_code part(const AttentionPart& a, const Call& call) {
  if (a.split != S) return call.fail(RLK_UNSUPPORTED, "attention_part: split is not this implementation's");
  return finished(call, "attention_part", run_part(problem_of(a), call.stream(), call.device().id));
}

rlk_verdict supports_merge(const AttentionMerge& a, const rlk_request&) {
  const std::int64_t rows = attn128::merge_of(a).rows();
  if (rows > INT32_MAX) return refuse("partials has {0} rows, the grid has {1}", {rows, INT32_MAX});
  return kAccept;
}

rlk_code merge(const AttentionMerge& a, const Call& call) {
  return finished(call, "attention_merge", run_merge(attn128::merge_of(a), call.stream(), call.device().id));
}

// ---- gradients

using attn128::backward_of;

std::uint64_t backward_bytes(const AttentionBwd& a, const rlk_request&) {
  return static_cast<std::uint64_t>(backward_workspace(backward_of(a)));
}

rlk_verdict supports_backward(const AttentionBwd& a, const rlk_request&) {
  const auto rows = [](const auto& t) { return t.numel() / t.dim(-1); };
  if (rows(a.q) > INT32_MAX) return refuse("q has {0} rows, the grid has {1}", {rows(a.q), INT32_MAX});
  if (rows(a.k) > INT32_MAX) return refuse("k has {0} rows, the grid has {1}", {rows(a.k), INT32_MAX});
  return kAccept;
}

rlk_code backward(const AttentionBwd& a, const Call& call) {
  return finished(call, "attention_bwd",
                  run_backward(backward_of(a), call.workspace().data(), call.stream(), call.device().id));
}

// ---- what there is

constexpr Facts facts(const char* id, const char* arithmetic, const char* doc) {
  return {.id = id,
          .doc = doc,
          .priority = 100,
          .arithmetic = arithmetic,
          .dtypes = RLK_F32 | RLK_BF16 | RLK_F16,
          .traits = RLK_DETERMINISTIC | RLK_BATCH_INVARIANT | RLK_CAPTURE_SAFE | RLK_STRICT,
          .device_type = kDevice};
}
template <int S>
constexpr rlk_implementation with_split(const char* id, const char* arithmetic) {
  return implement<Attention, forward<S>, supports<S, Attention>, workspace>(
      facts(id, arithmetic, "a block a query and head, and a split where queries are few"));
}
template <int S>
constexpr rlk_implementation part_with_split(const char* id, const char* arithmetic) {
  return implement<AttentionPart, part<S>, supports<S, AttentionPart>>(
      facts(id, arithmetic, "a block a query, head and split"));
}
constexpr Facts merge_facts() {
  Facts f = facts(kId, "attn128/merge", "a block a query and head");
  f.dtypes = RLK_F32;
  return f;
}

#if defined(__HIP_PLATFORM_AMD__)
#  define RLK_ID(split) "hip.simt_" split
#else
#  define RLK_ID(split) "cuda.simt_" split
#endif
constexpr rlk_implementation kImplementations[] = {
    with_split<1024>(RLK_ID("s1024"), "fma32/attn128/s1024"),
    with_split<2048>(RLK_ID("s2048"), "fma32/attn128/s2048"),
    with_split<4096>(RLK_ID("s4096"), "fma32/attn128/s4096"),
    with_split<512>(RLK_ID("s512"), "fma32/attn128/s512"),
    with_split<0>(RLK_ID("snone"), "fma32/attn128/snone"),
    part_with_split<1024>(RLK_ID("s1024"), "fma32/attn128/s1024"),
    part_with_split<2048>(RLK_ID("s2048"), "fma32/attn128/s2048"),
    part_with_split<4096>(RLK_ID("s4096"), "fma32/attn128/s4096"),
    part_with_split<512>(RLK_ID("s512"), "fma32/attn128/s512"),
    part_with_split<0>(RLK_ID("snone"), "fma32/attn128/snone"),
    implement<AttentionMerge, merge, supports_merge>(merge_facts()),
    implement<AttentionBwd, backward, supports_backward, backward_bytes>(
        facts(kId, "fma32/attn128", "a block a query and head, then a block a key and its head"))};
#undef RLK_ID

}  // namespace

constinit const std::span<const rlk_implementation> implementations = kImplementations;

}  // namespace rlk::simt::attention
