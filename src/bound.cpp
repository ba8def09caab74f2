// Bound ops: resolved once, run many times.
#include <fmt/format.h>

#include "src/check.hpp"
#include "src/gate.hpp"
#include "src/prepared.hpp"
#include "src/saved.hpp"

namespace rlk {

struct BoundOp::State {
  int32_t op = -1;
  Prepared prepared;
  Resolution resolution;
  Options options;  // of bind; its texts are prepared.policy's
  std::vector<rlk_slot> slots;
  rlk_call call{};
  Arena arena;

  Status prepare(const rlk_slot* given, const Policy& policy) {
    Result<Prepared> fresh = Prepared::make(op, given, policy, &resolution);
    if (!fresh) return fresh.status();
    prepared = *std::move(fresh);
    options.backend = prepared.policy->backend;
    options.arithmetic = prepared.policy->arithmetic;
    options.gradients = prepared.policy->gradients;
    Status settled = settle(given);
    if (!settled) prepared.epoch = 0;  // the next run begins anew
    return settled;
  }

  // Where it computes: workspace and stream are the same in every run.
  Status settle(const rlk_slot* given) {
    const uint64_t bytes = prepared.workspace_bytes;
    const Result<Options> allocated =
        with_allocated(options, prepared.wanted_bytes, bytes, prepared.op->name);
    if (!allocated) return allocated.status();
    return settle(given, *allocated, bytes);
  }
  Status settle(const rlk_slot* given, const Options& with, uint64_t bytes) {
    call = prepared.call;
    call.stream = with.stream;
    if (Status s = check_workspace_size(with, bytes, *call.device, prepared.op->name); !s) return s;
    call.workspace = with.workspace;
    call.workspace_bytes = with.workspace_bytes;
    if (with.workspace) return prepared.check_workspace(given, with);
    if (!bytes) return {};
    call.workspace = arena.take(bytes);
    call.workspace_bytes = bytes;
    if (call.workspace) return {};
    return {RLK_OUT_OF_MEMORY,
            fmt::format("{}: no memory for {} bytes of workspace", prepared.op->name, bytes)};
  }

  // The policy of a run: what was bound, and what the thread's scopes demand now.
  Policy policy_now() const noexcept {
    const Policy& bound = *prepared.policy;
    Policy now = bound;
    now.precision = std::max(bound.precision, scope_state.precision);
    if (scope_state.backends) now.scope = scope_state.backends;
    return now;
  }
};

BoundOp::BoundOp(std::unique_ptr<State> state) noexcept
    : epoch_now_(&Gate::word),
      epoch_(state->prepared.epoch),
      run_(state->prepared.run),
      slots_(state->slots.data()),
      call_(&state->call),
      state_(std::move(state)) {}
BoundOp::BoundOp(BoundOp&&) noexcept = default;
BoundOp& BoundOp::operator=(BoundOp&&) noexcept = default;
BoundOp::~BoundOp() = default;

const Resolution& BoundOp::resolution() const noexcept { return state_->resolution; }
Status BoundOp::last_failure(int32_t code) { return failure(code); }

// The gate moved, a saved range lives or some thread is inside a scope: look again, then run.
Status BoundOp::run_slowly(const rlk_slot* slots) {
  State& s = *state_;
  if (Gate::now().epoch() != s.prepared.epoch) {
    const KeptPolicy bound(*s.prepared.policy);  // whose texts it replaces
    if (Status status = s.prepare(slots, *bound); !status) return status;
    epoch_ = s.prepared.epoch;
    run_ = s.prepared.run;
  }
  Policy policy = s.policy_now();
  if (Gate::now().saved_lives()) {
    policy.precision = std::max(policy.precision, saved_precision(*s.prepared.op, slots));
    if (Status status = check_saved(*s.prepared.op, slots, s.options); !status) return status;
  }
  if (Gate::now().traced() || !(policy == *s.prepared.policy))
    return run_under(policy, s.op, slots, s.options);
  const int32_t code = run_(slots, call_);
  return code == RLK_OK ? Status() : explain_failure(*s.prepared.implementation, code);
}

Status BoundOp::run_slots(const rlk_slot* slots, const char* op) {
  State& s = *state_;
  Prepared& p = s.prepared;
  if (std::strcmp(op, p.op->name) != 0)
    return {RLK_INVALID_ARGUMENT, fmt::format("a bound {} was given the arguments of {}", p.op->name, op)};
  const Prepared::Match match = p.match(slots);
  if (match == Prepared::Match::no) return run_under(s.policy_now(), s.op, slots, s.options);
  if (match == Prepared::Match::other_addresses) {
    if (Status status = p.check_addresses(slots); !status) return status;
    if (s.options.workspace)
      if (Status status = p.check_workspace(slots, s.options); !status) return status;
  }
  if (epoch_now_->load(std::memory_order_acquire) != epoch_) return run_slowly(slots);
  const int32_t code = run_(slots, call_);
  return code == RLK_OK ? Status() : explain_failure(*p.implementation, code);
}

Result<BoundOp> Resolver::bind(int32_t op, const rlk_slot* slots, const Options& options) {
  auto state = std::make_unique<BoundOp::State>();
  state->op = op;
  state->options = options;
  if (Status s = state->prepare(slots, Policy::of(options)); !s) return s;
  const rlk_op_schema& schema = *state->prepared.op;
  state->slots.assign(slots, slots + schema.num_arguments + schema.num_attributes);
  return BoundOp(std::move(state));
}

Result<BoundOp> bind_slots(std::string_view op, const rlk_slot* slots, const Options& options) {
  const Result<int32_t> index = find_op(op);
  if (!index) return index.status();
  return Resolver::bind(*index, slots, options);
}

}  // namespace rlk
