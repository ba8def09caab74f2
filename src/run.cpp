// Running calls: bound ops, and each thread's cache of resolved calls.
//
// A cached or bound call is valid for the same dtypes, shapes, strides, alignment, attributes and policy
// while the gate stands. Everything a choice may depend on is in that key; addresses are not, so what only
// addresses decide (overlaps) is compared on every call.
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "rlk/machine.hpp"
#include "src/check.hpp"
#include "src/failure.hpp"
#include "src/gate.hpp"
#include "src/host.hpp"
#include "src/resolve.hpp"
#include "src/saved.hpp"
#include "src/scope.hpp"

namespace rlk {
namespace {

constexpr uint64_t kAbsent = ~uint64_t{0};
constexpr uintptr_t kAlignment = 127;  // an address matters up to here
constexpr int32_t kHead = 4;           // words of a tensor's key before its sizes

// The part of a DLTensor after its data pointer: device, then rank and dtype.
struct Head {
  uint64_t device, type;
};
inline Head head_of(const DLTensor& t) noexcept {
  Head h;
  std::memcpy(&h.device, &t.device, sizeof h.device);
  std::memcpy(&h.type, &t.ndim, sizeof h.type);
  return h;
}
static_assert(offsetof(DLTensor, dtype) == offsetof(DLTensor, ndim) + 4 && sizeof(DLDevice) == 8);

static_assert(offsetof(DLTensor, ndim) == offsetof(DLTensor, device) + 8);

// How many sizes a tensor's key has: its rank, and whether strides come too.
inline uint64_t form_of(const DLTensor& t) noexcept {
  uint64_t form = static_cast<uint32_t>(t.ndim);
  if (t.strides) form |= uint64_t{1} << 32;
  return form;
}

inline uintptr_t address_of(const DLTensor& t) noexcept {
  return reinterpret_cast<uintptr_t>(t.data) + t.byte_offset;
}

// Two ranges that must not meet, as arguments and byte extents around their addresses.
struct Pair {
  uint32_t a, b;
  bool alias;  // the very same bytes are fine
};
struct Extent {
  int64_t low, high;
};

// Two words at once: comparing is what a cached call does most, and vectors halve it on every machine.
using Two = uint64_t __attribute__((vector_size(16)));
inline Two two_at(const void* p) noexcept {
  Two v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// Adds to `pairs` and `single` where n sizes differ from the key. Ranks 1 to 4 by straight code: a loop's
// bookkeeping would cost more than its work.
[[gnu::always_inline]] inline void add_differences(Two& pairs, uint64_t& single, const uint64_t* key,
                                                   const int64_t* sizes, int32_t n) noexcept {
  const auto two = [&](int32_t i) { pairs |= two_at(key + i) ^ two_at(sizes + i); };
  const auto one = [&](int32_t i) { single |= key[i] ^ static_cast<uint64_t>(sizes[i]); };
  if (n == 2) return two(0);
  if (n == 1) return one(0);
  if (n == 3) return two(0), one(2);
  int32_t i = 0;
  for (; i + 2 <= n; i += 2) two(i);
  if (i < n) one(i);
}

// The part of the policy that fits a word; the rest are strings and scopes, nearly always empty.
uint64_t policy_word(const Options& o) noexcept {
  return static_cast<uint64_t>(o.precision) | uint64_t{o.needs_backward} << 8 |
         uint64_t{o.deterministic} << 9 | uint64_t{o.evidence} << 10 |
         static_cast<uint64_t>(scope_state.precision) << 16 |
         static_cast<uint64_t>(static_cast<uint32_t>(o.threads)) << 32;
}

// A resolved call with the key it is good for. Owned by one thread.
struct Prepared {
  const rlk_op_schema* op = nullptr;
  const rlk_implementation* implementation = nullptr;
  uint64_t gate = 0;
  uint64_t policy = 0;
  const ScopeNode* scope = nullptr;
  bool plain = true;  // no strings in the policy
  // Per argument: kAbsent, or device, type, form, address, shape, strides; then the attributes' words, then
  // as many more as a head has, so that a tensor where the key has none may be compared before it is told
  // apart.
  std::vector<uint64_t> key;
  std::vector<Pair> pairs;
  std::vector<Extent> extents;
  rlk_device device{};
  rlk_call call{};  // its device is set when the call is run: a Prepared moves
  uint64_t workspace_bytes = 0;
  std::string backend, arithmetic, gradients;

  enum class Match { no, same_addresses, other_addresses };
  Match match(const rlk_slot* slots) const noexcept {
    const uint64_t* k = key.data();
    const uint32_t arguments = op->num_arguments, attributes = op->num_attributes;
    Two differs{};
    uint64_t single = 0, moved = 0;
    for (uint32_t i = 0; i < arguments; ++i) {
      const DLTensor* t = slots[i].tensor;
      if (!t) {
        if (*k++ != kAbsent) return Match::no;
        continue;
      }
      // The form says how much follows, so it is compared before what follows is read.
      if (k[2] != form_of(*t)) return Match::no;
      differs |= two_at(k) ^ two_at(&t->device);
      moved |= k[3] ^ address_of(*t);
      k += kHead;
      add_differences(differs, single, k, t->shape, t->ndim);
      k += t->ndim;
      if (t->strides) {
        add_differences(differs, single, k, t->strides, t->ndim);
        k += t->ndim;
      }
    }
    for (uint32_t i = 0; i < attributes; ++i) single |= k[i] ^ static_cast<uint64_t>(slots[arguments + i].i);
    if (single | differs[0] | differs[1]) return Match::no;
    if (!moved) return Match::same_addresses;
    // Addresses differ: fine as long as their alignment does not.
    return moved & kAlignment ? Match::no : Match::other_addresses;
  }

  bool same_policy(const Options& o, uint64_t word) const noexcept {
    if (policy != word || scope != scope_state.backends) return false;
    const bool empty = (o.backend.size() | o.arithmetic.size() | o.gradients.size()) == 0;
    return plain ? empty : o.backend == backend && o.arithmetic == arithmetic && o.gradients == gradients;
  }

  bool overlaps(const rlk_slot* slots) const noexcept {
    for (const Pair& p : pairs) {
      const auto a = static_cast<int64_t>(address_of(*slots[p.a].tensor)),
                 b = static_cast<int64_t>(address_of(*slots[p.b].tensor));
      if (a + extents[p.a].low < b + extents[p.b].high && b + extents[p.b].low < a + extents[p.a].high)
        if (!p.alias || a != b || extents[p.a].low != extents[p.b].low ||
            extents[p.a].high != extents[p.b].high)
          return true;
    }
    return false;
  }
};

void remember(Prepared& p, const rlk_slot* slots) {
  const rlk_op_schema& op = *p.op;
  p.extents.assign(op.num_arguments, {0, 0});
  for (uint32_t i = 0; i < op.num_arguments; ++i) {
    const DLTensor* t = slots[i].tensor;
    if (!t) {
      p.key.push_back(kAbsent);
      continue;
    }
    const Head h = head_of(*t);
    p.key.insert(p.key.end(), {h.device, h.type, form_of(*t), address_of(*t)});
    for (int32_t d = 0; d < t->ndim; ++d) p.key.push_back(static_cast<uint64_t>(t->shape[d]));
    for (int32_t d = 0; t->strides && d < t->ndim; ++d) p.key.push_back(static_cast<uint64_t>(t->strides[d]));
    const ByteRange range = range_of(*t);
    if (!range.low) continue;
    const auto base = static_cast<int64_t>(address_of(*t));
    p.extents[i] = {reinterpret_cast<int64_t>(range.low) - base,
                    reinterpret_cast<int64_t>(range.high) - base};
  }
  for (uint32_t i = 0; i < op.num_attributes; ++i)
    p.key.push_back(static_cast<uint64_t>(slots[op.num_arguments + i].i));
  p.key.insert(p.key.end(), kHead, 0);
  for (uint32_t w = 0; w < op.num_arguments; ++w)
    for (uint32_t o = 0; o < op.num_arguments; ++o) {
      if (o == w || op.arguments[w].role == RLK_READ || (op.arguments[o].role != RLK_READ && o < w)) continue;
      if (slots[w].tensor && slots[o].tensor && p.extents[w].high > p.extents[w].low &&
          p.extents[o].high > p.extents[o].low)
        p.pairs.push_back({w, o, may_alias(op, w, o)});
    }
}

// New addresses that passed the address checks: the next call with them skips those.
void remember_addresses(Prepared& p, const rlk_slot* slots) noexcept {
  uint64_t* k = p.key.data();
  for (uint32_t i = 0; i < p.op->num_arguments; ++i) {
    const DLTensor* t = slots[i].tensor;
    if (t) k[3] = address_of(*t);
    k += t ? kHead + t->ndim + (t->strides ? t->ndim : 0) : 1;
  }
}

// Per-thread CPU workspace, grown to the largest call so far and aligned to a cache line.
void* arena(uint64_t bytes) {
  struct Arena {
    void* data = nullptr;
    uint64_t size = 0;
    ~Arena() { std::free(data); }
  };
  thread_local Arena a;
  if (a.size < bytes) {
    std::free(a.data);
    a.data = allocate(bytes);
    a.size = a.data ? bytes : 0;
  }
  return a.data;
}

[[gnu::cold, gnu::noinline]] Status set_workspace(rlk_call& call, const Options& o, uint64_t bytes,
                                                  const rlk_op_schema& op) {
  if (o.workspace) {
    if (o.workspace_bytes < bytes)
      return {RLK_INVALID_ARGUMENT,
              fmt::format("{}: workspace has {} bytes, {} are needed", op.name, o.workspace_bytes, bytes)};
    call.workspace = o.workspace;
    call.workspace_bytes = o.workspace_bytes;
    return {};
  }
  if (!bytes) return {};
  if (call.device->type != kDLCPU)
    return {RLK_INVALID_ARGUMENT,
            fmt::format("{}: workspace has 0 bytes, {} are needed: pass device memory in Options::workspace",
                        op.name, bytes)};
  call.workspace = arena(bytes);
  call.workspace_bytes = bytes;
  if (!call.workspace)
    return {RLK_OUT_OF_MEMORY, fmt::format("{}: no memory for {} bytes of workspace", op.name, bytes)};
  return {};
}

// Resolves, activates, measures the workspace.
[[gnu::cold, gnu::noinline]] Status prepare(int32_t index, const rlk_slot* slots, const Options& options,
                                            Prepared& p, Resolution* resolution) {
  Resolution r = Resolver::resolve(index, slots, options, true);
  if (!r) return r.status();
  const Snapshot& s = snapshot();
  const auto& list = s.ops[static_cast<std::size_t>(index)].implementations;
  for (const ImplementationEntry& e : list)
    if (e.implementation == r.implementation())
      if (Status status = e.backend->activate(); !status) return status;
  p.op = r.op();
  p.implementation = r.implementation();
  p.gate = r.epoch();
  const Policy policy = Policy::of(options);
  const rlk_device device = Resolver::device_of(r);
  const rlk_request request{sizeof(rlk_request), static_cast<int32_t>(policy.precision), device,
                            policy.needs_backward, policy.threads};
  if (p.implementation->workspace && !(p.implementation->traits & RLK_WORKSPACE_OPTIONAL))
    p.workspace_bytes = p.implementation->workspace(slots, &request);
  p.device = device;
  p.call = {sizeof(rlk_call),
            static_cast<int32_t>(policy.precision),
            &host(),
            nullptr,
            nullptr,
            0,
            nullptr,
            policy.threads,
            policy.needs_backward};
  p.policy = policy_word(options);
  p.scope = scope_state.backends;
  p.backend = options.backend;
  p.arithmetic = options.arithmetic;
  p.gradients = options.gradients;
  p.plain = p.backend.empty() && p.arithmetic.empty() && p.gradients.empty();
  remember(p, slots);
  if (resolution) *resolution = std::move(r);
  return {};
}

// Data that the key does not cover: null data of tensors that have elements.
[[gnu::cold, gnu::noinline]] Status check_null(const rlk_op_schema& op, const rlk_slot* slots) {
  for (uint32_t i = 0; i < op.num_arguments; ++i)
    if (slots[i].tensor && !slots[i].tensor->data) {
      DLDevice device;
      return check_call(op, slots, CheckData::yes, device);
    }
  return {};
}

// What only addresses decide.
[[gnu::noinline]] Status check_addresses(Prepared& p, const rlk_slot* slots) {
  if (Status s = check_null(*p.op, slots); !s) return s;
  if (p.overlaps(slots))
    if (Status s = check_overlap(*p.op, slots); !s) return s;
  remember_addresses(p, slots);
  return {};
}

[[gnu::cold, gnu::noinline]] Status explain_failure(const Prepared& p, int32_t code) {
  if (code == RLK_UNSUPPORTED)
    return {RLK_INTERNAL, fmt::format("{}: {} accepted this call, then refused to run it: {}", p.op->name,
                                      p.implementation->id, failure_text())};
  if (!is_code(code))
    return {RLK_BACKEND_ERROR, fmt::format("{}: {} returned {} from its run, which is no rlk_code",
                                           p.op->name, p.implementation->id, code)};
  return failure(code);
}

// The call's description is the cache entry's own: only what differs from call to call is written.
[[gnu::always_inline]] inline Status execute(Prepared& p, const rlk_slot* slots, const Options& options,
                                             uint64_t now) {
  if (Gate{now}.saved_lives()) [[unlikely]]
    if (Status s = check_overlap(*p.op, slots); !s) return s;
  rlk_call& call = p.call;
  call.device = &p.device;
  call.stream = options.stream;
  call.workspace = options.workspace;
  call.workspace_bytes = options.workspace_bytes;
  if (p.workspace_bytes)
    if (Status s = set_workspace(call, options, p.workspace_bytes, *p.op); !s) return s;
  const int32_t code = p.implementation->run(slots, &call);
  if (code == RLK_OK) [[likely]]
    return {};
  return explain_failure(p, code);
}

constexpr std::size_t kEntries = 8;
struct OpCache {
  Prepared entries[kEntries];
  std::size_t used = 0, last = 0, next = 0;
};

// This thread's caches by op index. The pointer that every call reads is static TLS; the owner that frees it
// at thread exit is touched only when it grows.
struct Caches {
  std::vector<std::unique_ptr<OpCache>> by_op;
  ~Caches();
};
struct CacheView {
  std::unique_ptr<OpCache>* by_op = nullptr;
  std::size_t size = 0;
};
constinit thread_local CacheView view [[gnu::tls_model("initial-exec")]];
thread_local Caches owner;
Caches::~Caches() { view = {}; }

OpCache& cache_for(std::size_t op) {
  if (op >= owner.by_op.size()) owner.by_op.resize(op + 16);
  view = {owner.by_op.data(), owner.by_op.size()};
  if (!owner.by_op[op]) owner.by_op[op] = std::make_unique<OpCache>();
  return *owner.by_op[op];
}

[[gnu::cold, gnu::noinline]] Status run_and_cache(int32_t op, const rlk_slot* slots, const Options& options) {
  Prepared p;
  if (Status s = prepare(op, slots, options, p, nullptr); !s) return s;
  if (Status s = check_overlap(*p.op, slots); !s) return s;
  OpCache& cache = cache_for(static_cast<std::size_t>(op));
  cache.last = cache.next;
  cache.next = (cache.next + 1) % kEntries;
  cache.used = std::max(cache.used, cache.last + 1);
  Prepared& kept = cache.entries[cache.last];
  kept = std::move(p);
  return execute(kept, slots, options, Gate::now().value);
}

}  // namespace

int32_t op_index(std::string_view op) {
  const Snapshot& s = snapshot();
  const auto it = s.op_index.find(op);
  return it == s.op_index.end() ? -1 : it->second;
}

Status run_cached(int32_t op, const rlk_slot* slots, const Options& options) {
  if (op < 0)
    return {RLK_UNKNOWN_NAME,
            "this op is not in the library that is loaded: header and library versions differ"};
  const uint64_t now = Gate::now().value;
  if (Gate{now}.saved_lives())
      [[unlikely]] {  // the scope of a forward is enforced at its backward, whatever thread that runs on
    const Precision recorded = saved_precision(*snapshot().ops[static_cast<std::size_t>(op)].schema, slots);
    if (recorded > std::max(options.precision, scope_state.precision)) {
      Options raised = options;
      raised.precision = recorded;
      return run_cached(op, slots, raised);
    }
  }
  const auto index = static_cast<std::size_t>(op);
  if (index < view.size && view.by_op[index]) [[likely]] {
    OpCache& cache = *view.by_op[index];
    const uint64_t word = policy_word(options);
    for (std::size_t tried = 0, i = cache.last; tried < cache.used;
         ++tried, i = i + 1 < cache.used ? i + 1 : 0) {
      Prepared& p = cache.entries[i];
      if (p.gate != (Gate{now}.epoch()) || !p.same_policy(options, word)) continue;
      const Prepared::Match match = p.match(slots);
      if (match == Prepared::Match::no) continue;
      cache.last = i;
      if (match == Prepared::Match::other_addresses)
        if (Status s = check_addresses(p, slots); !s) return s;
      return execute(p, slots, options, now);
    }
  }
  return run_and_cache(op, slots, options);
}

Status run_slots(std::string_view op, const rlk_slot* slots, const Options& options) {
  const Result<int32_t> index = find_op(op);
  if (!index) return index.status();
  return run_cached(*index, slots, options);
}

// ---- BoundOp
// -----------------------------------------------------------------------------------------------------

struct BoundOp::State {
  int32_t op = -1;
  Prepared prepared;
  Resolution resolution;
  Options options;  // its views point into prepared
  std::vector<rlk_slot> slots;
  rlk_call call{};
  std::vector<char> workspace;

  void adopt(Prepared p, const Options& o) {
    prepared = std::move(p);
    options = o;
    options.backend = prepared.backend;
    options.arithmetic = prepared.arithmetic;
    options.gradients = prepared.gradients;
  }
  Status refresh(const rlk_slot* s) {
    Prepared fresh;
    const Options o = options;
    if (Status status = prepare(op, s, o, fresh, &resolution); !status) return status;
    adopt(std::move(fresh), o);
    return settle();
  }
  Status settle() {
    call = prepared.call;
    call.device = &prepared.device;
    call.stream = options.stream;
    const uint64_t bytes = prepared.workspace_bytes;
    if (!options.workspace && bytes && prepared.device.type == kDLCPU) {
      workspace.resize(bytes + 64);
      call.workspace = workspace.data() + (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64) % 64;
      call.workspace_bytes = bytes;
      return {};
    }
    return set_workspace(call, options, bytes, *prepared.op);
  }
};

BoundOp::BoundOp(std::unique_ptr<State> state) noexcept
    : epoch_now_(&Gate::word),
      epoch_(state->prepared.gate),
      run_(state->prepared.implementation->run),
      slots_(state->slots.data()),
      call_(&state->call),
      state_(std::move(state)) {}
BoundOp::BoundOp(BoundOp&&) noexcept = default;
BoundOp& BoundOp::operator=(BoundOp&&) noexcept = default;
BoundOp::~BoundOp() = default;

const Resolution& BoundOp::resolution() const noexcept { return state_->resolution; }
Status BoundOp::last_failure(int32_t code) { return failure(code); }

// The gate moved, or a saved range lives: check again, then run.
Status BoundOp::run_slowly(const rlk_slot* slots) {
  if ((Gate::now().epoch()) != state_->prepared.gate) {
    if (Status s = state_->refresh(slots); !s) return s;
    epoch_ = state_->prepared.gate;
    run_ = state_->prepared.implementation->run;
  }
  const Options& o = state_->options;
  if ((Gate::now().saved_lives()) &&
      saved_precision(*state_->prepared.op, slots) > std::max(o.precision, scope_state.precision))
    return run_cached(state_->op, slots, o);
  if (Status s = check_overlap(*state_->prepared.op, slots); !s) return s;
  const int32_t code = run_(slots, call_);
  return code == RLK_OK ? Status() : explain_failure(state_->prepared, code);
}

Status BoundOp::run_slots(const rlk_slot* slots, const char* op) {
  Prepared& p = state_->prepared;
  if (std::strcmp(op, p.op->name) != 0)
    return {RLK_INVALID_ARGUMENT, fmt::format("a bound {} was given the arguments of {}", p.op->name, op)};
  const Prepared::Match match = p.match(slots);
  if (match == Prepared::Match::no) return run_cached(state_->op, slots, state_->options);
  if (match == Prepared::Match::other_addresses)
    if (Status s = check_addresses(p, slots); !s) return s;
  if (epoch_now_->load(std::memory_order_acquire) != epoch_) return run_slowly(slots);
  const int32_t code = run_(slots, call_);
  return code == RLK_OK ? Status() : explain_failure(state_->prepared, code);
}

Result<BoundOp> Resolver::bind(int32_t op, const rlk_slot* slots, const Options& options) {
  auto state = std::make_unique<BoundOp::State>();
  state->op = op;
  Prepared p;
  if (Status s = prepare(op, slots, options, p, &state->resolution); !s) return s;
  if (Status s = check_overlap(*p.op, slots); !s) return s;
  state->adopt(std::move(p), options);
  state->slots.assign(slots, slots + state->prepared.op->num_arguments + state->prepared.op->num_attributes);
  if (Status s = state->settle(); !s) return s;
  return BoundOp(std::move(state));
}

Result<BoundOp> bind_slots(std::string_view op, const rlk_slot* slots, const Options& options) {
  const Result<int32_t> index = find_op(op);
  if (!index) return index.status();
  return Resolver::bind(*index, slots, options);
}

Result<uint64_t> workspace_slots(std::string_view op, const rlk_slot* slots, const Options& options) {
  const Result<int32_t> index = find_op(op);
  if (!index) return index.status();
  const Resolution r = Resolver::resolve(*index, slots, options, false);
  if (!r) return r.status();
  const Policy policy = Policy::of(options);
  const rlk_request request{sizeof(rlk_request), static_cast<int32_t>(policy.precision),
                            Resolver::device_of(r), policy.needs_backward, policy.threads};
  return r.implementation()->workspace ? r.implementation()->workspace(slots, &request) : uint64_t{0};
}

}  // namespace rlk
