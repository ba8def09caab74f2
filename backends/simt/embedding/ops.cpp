// embedding on any GPU by the portable kernels: the bits of the native backend.
#include "arithmetic/embedding/bind.hpp"
#include "simt/embedding/launchers.hpp"
#include "simt/portable.hpp"

namespace rlk::simt::embedding {
namespace {

using embed32::problem_of;

rlk_verdict supports(const EmbeddingBwd& a, const rlk_request&) {
  if (a.ids.numel() >= INT32_MAX)
    return refuse("ids has {0} tokens, a sort has less than {1}", {a.ids.numel(), INT32_MAX});
  if (a.weight.dim(0) >= INT32_MAX)
    return refuse("weight has {0} rows, a sort has less than {1}", {a.weight.dim(0), INT32_MAX});
  return kAccept;
}

std::uint64_t workspace(const EmbeddingBwd& a, const rlk_request&) {
  return static_cast<std::uint64_t>(backward_workspace(a.ids.numel(), a.weight.dim(0)));
}

rlk_code forward(const Embedding& a, const Call& call) {
  return finished(call, "embedding", run_forward(problem_of(a), call.stream(), call.device().id));
}
rlk_code backward(const EmbeddingBwd& a, const Call& call) {
  return finished(call, "embedding_bwd",
                  run_backward(problem_of(a), call.workspace().data(), call.stream(), call.device().id));
}

constexpr Facts kFacts =
    portable_facts("rows by token, gradients by row in the order of tokens", "embed32", RLK_I32 | RLK_I64);

constexpr rlk_implementation kImplementations[] = {
    implement<Embedding, forward>(kFacts), implement<EmbeddingBwd, backward, supports, workspace>(kFacts)};

}  // namespace

constinit const std::span<const rlk_implementation> implementations = kImplementations;

}  // namespace rlk::simt::embedding
