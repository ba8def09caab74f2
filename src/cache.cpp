// Calls through each thread's cache of resolved calls.
#include "src/cancel.hpp"
#include "src/check.hpp"
#include "src/gate.hpp"
#include "src/prepared.hpp"
#include "src/saved.hpp"
#include "src/thread_state.hpp"
#include "src/trace.hpp"

namespace rlk {
namespace {

// The call's description is this run's own: an implementation may call the library, and its call may take the
// cached one's place.
[[gnu::always_inline]] inline Status execute(const Prepared& p, const rlk_slot* slots,
                                             const Options& options) {
  if (!p.plain || options.workspace) [[unlikely]]
    return run_in_workspace(p, slots, options);
  rlk_call call = p.call;
  call.stream = options.stream;
  const int32_t code = p.run(slots, &call);
  if (code == RLK_OK) [[likely]]
    return {};
  return explain_failure(*p.implementation, code);
}

OpCache* cache_of(std::size_t op) noexcept {
  const ThreadState* state = ThreadState::here;
  return state && op < state->ops ? state->by_op[op].get() : nullptr;
}

// The thread's cached call for these slots under this policy; null when there is none.
Prepared* find(std::size_t op, const rlk_slot* slots, const Policy& policy, Prepared::Match& match) noexcept {
  OpCache* const cache = cache_of(op);
  if (!cache) return nullptr;
  const uint64_t epoch = Gate::now().epoch();
  for (Prepared* p = cache->entries; p != cache->entries + cache->used; ++p) {
    if (p->epoch != epoch || !(*p->policy == policy)) continue;
    match = p->match(slots);
    if (match != Prepared::Match::no) return cache->last = p;
  }
  return nullptr;
}

OpCache& cache_for(std::size_t op) {
  ThreadState& state = ThreadState::need();
  if (op >= state.ops) {
    ThreadState::ByOp more(new std::unique_ptr<OpCache>[op + 16],
                           [](std::unique_ptr<OpCache>* all) { delete[] all; });
    std::move(state.by_op.get(), state.by_op.get() + state.ops, more.get());
    state.by_op = std::move(more);
    state.ops = op + 16;
  }
  if (!state.by_op[op]) state.by_op[op] = std::make_unique<OpCache>();
  return *state.by_op[op];
}

Result<Prepared*> prepare(int32_t op, const rlk_slot* slots, const Policy& policy) {
  Result<Prepared> p = Prepared::make(op, slots, policy, nullptr);
  if (!p) return p.status();
  OpCache& cache = cache_for(static_cast<std::size_t>(op));
  cache.last = &cache.entries[cache.next];
  cache.next = (cache.next + 1) % OpCache::kEntries;
  cache.used = std::min(cache.used + 1, OpCache::kEntries);
  return &(*cache.last = *std::move(p));
}

Result<Prepared*> find_or_prepare(int32_t op, const rlk_slot* slots, const Policy& policy) {
  Prepared::Match match{};
  Prepared* p = find(static_cast<std::size_t>(op), slots, policy, match);
  if (!p) return prepare(op, slots, policy);
  if (match == Prepared::Match::other_addresses)
    if (Status s = p->check_addresses(slots); !s) return s;
  return p;
}

}  // namespace

int32_t op_index(std::string_view op) {
  const Snapshot& s = snapshot();
  const auto it = s.op_index.find(op);
  return it == s.op_index.end() ? -1 : it->second;
}

Status run_in_workspace(const Prepared& p, const rlk_slot* slots, const Options& given) {
  const NoCancel whole;  // drivers wait in ways that cancel
  const Result<Options> allocated = with_allocated(given, p.wanted_bytes, p.workspace_bytes, p.op->name);
  if (!allocated) return allocated.status();
  const Options& options = *allocated;
  if (options.workspace)
    if (Status s = p.check_workspace(slots, options); !s) return s;
  rlk_call call = p.call;
  call.stream = options.stream;
  Workspace workspace;
  if (Status s = workspace.take(call, options, p.workspace_bytes, p.op->name); !s) return s;
  const int32_t code = p.run(slots, &call);
  return code == RLK_OK ? Status() : explain_failure(*p.implementation, code);
}

Status run_under(const Policy& policy, int32_t op, const rlk_slot* slots, const Options& options) {
  if (op < 0)
    return {RLK_UNKNOWN_NAME,
            "this op is not in the library that is loaded: header and library versions differ"};
  Result<Prepared*> p = find_or_prepare(op, slots, policy);
  if (!p) return p.status();
  if (Gate::now().saved_lives()) {
    // The precision of a forward is in force at its backward, whatever thread that runs on.
    if (const Precision recorded = saved_precision(*(*p)->op, slots); recorded > policy.precision) {
      Policy raised = policy;
      raised.precision = recorded;
      p = find_or_prepare(op, slots, raised);
      if (!p) return p.status();
    }
    if (Status s = check_saved(*(*p)->op, slots, options); !s) return s;
  }
  if (Gate::now().traced()) [[unlikely]]
    return run_traced(**p, op, slots, options, [](const Prepared& q, const rlk_slot* s, const Options& o) {
      return execute(q, s, o);
    });
  return execute(**p, slots, options);
}

namespace {

// What is not the op's last call again.
[[gnu::noinline]] Status run_other(int32_t op, const rlk_slot* slots, const Options& options) {
  return run_under(Policy::of(options), op, slots, options);
}

// The op's last call, with other tensors of the same form.
[[gnu::noinline]] Status run_moved(Prepared& p, const rlk_slot* slots, const Options& options) {
  if (Status s = p.check_addresses(slots); !s) return s;
  return execute(p, slots, options);
}

}  // namespace

Status run_cached(int32_t op, const rlk_slot* slots, const Options& options) {
  OpCache* const cache = cache_of(static_cast<std::size_t>(op));  // a negative index is beyond all caches
  if (!cache) [[unlikely]]
    return run_other(op, slots, options);
  Prepared& p = *cache->last;
  if (p.epoch != Gate::now().unsaved() ||
      !(static_cast<const Demands&>(*p.policy) == Policy::demands(options))) [[unlikely]]
    return run_other(op, slots, options);
  if (p.policy->any() || Texts{options.backend, options.arithmetic, options.gradients}.any()) [[unlikely]]
    return run_other(op, slots, options);
  const Prepared::Match match = p.match(slots);
  if (match == Prepared::Match::same_addresses) [[likely]]
    return execute(p, slots, options);
  if (match == Prepared::Match::other_addresses) return run_moved(p, slots, options);
  return run_other(op, slots, options);
}

Status run_slots(std::string_view op, const rlk_slot* slots, const Options& options) {
  const Result<int32_t> index = find_op(op);
  if (!index) return index.status();
  return run_cached(*index, slots, options);
}

Result<uint64_t> workspace_slots(std::string_view op, const rlk_slot* slots, const Options& options) {
  const Result<int32_t> index = find_op(op);
  if (!index) return index.status();
  const Policy policy = Policy::of(options);
  const Resolution r = Resolver::resolve(*index, slots, policy, Ask::choice);
  if (!r) return r.status();
  const rlk_request request = policy.request(Resolver::device_of(r));
  return nothing_to_do(*r.op(), slots) ? 0 : workspace_of(*r.implementation(), slots, request);
}

}  // namespace rlk
