#include "src/prepared.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <span>

#include "src/cancel.hpp"
#include "src/check.hpp"
#include "src/fork_mutex.hpp"
#include "src/host.hpp"
#include "src/messages.hpp"

namespace rlk {
namespace {

struct Devices {
  ForkMutex mutex;
  std::deque<rlk_device> all;
};
Devices& known_devices() {
  static auto& known = *new Devices;
  return known;
}
// What a thread makes for the first time while another one forks is never made in the child, which waits for it.
[[maybe_unused]] const auto& made_early = known_devices();

// Devices are few and live for ever: a run may still look at its device when the cached call that it came
// from has made room for another.
const rlk_device* lasting(const rlk_device& device) {
  auto& [mutex, devices] = known_devices();
  const std::lock_guard lock(mutex);
  for (const rlk_device& d : devices)
    if (d.type == device.type && d.id == device.id && d.arch == device.arch &&
        std::strncmp(d.name, device.name, sizeof d.name) == 0)
      return &d;
  return &devices.emplace_back(device);
}

template <class T>
uint64_t word_at(const T& from) noexcept {
  uint64_t word;
  std::memcpy(&word, &from, sizeof word);
  return word;
}

int32_t run_nothing(const rlk_slot*, const rlk_call*) { return RLK_OK; }

// Data that the key does not cover: null data of tensors that have elements.
Status check_null(const rlk_op_schema& op, const rlk_slot* slots) {
  for (uint32_t i = 0; i < op.num_arguments; ++i)
    if (slots[i].tensor && !slots[i].tensor->data) {
      DLDevice device;
      return check_call(op, slots, CheckData::yes, device);
    }
  return {};
}

}  // namespace

bool nothing_to_do(const rlk_op_schema& op, const rlk_slot* slots) noexcept {
  constexpr int64_t kCounted = INT32_MAX;  // implementations may loop over so many rows without elements
  bool results = false, uncounted = false;
  for (uint32_t i = 0; i < op.num_arguments; ++i) {
    const DLTensor* t = slots[i].tensor;
    if (!t) continue;
    const std::span<const int64_t> shape(t->shape, static_cast<std::size_t>(t->ndim));
    uncounted |= std::any_of(shape.begin(), shape.end(), [](int64_t n) { return n > kCounted; });
    if (op.arguments[i].role == RLK_READ) continue;
    results = true;
    if (std::find(shape.begin(), shape.end(), 0) == shape.end()) return false;
  }
  return results && uncounted;
}

uint64_t workspace_of(const rlk_implementation& i, const rlk_slot* slots, const rlk_request& request) {
  return i.workspace ? i.workspace(slots, &request) : 0;
}

void Prepared::remember(const rlk_slot* slots) {
  std::vector<Footprint> footprints(op->num_arguments);
  extents.assign(op->num_arguments, {});
  for (uint32_t i = 0; i < op->num_arguments; ++i) {
    const DLTensor* t = slots[i].tensor;
    if (!t) {
      key.push_back(kAbsent);
      continue;
    }
    key.insert(key.end(),
               {form_of(t->ndim, t->strides), word_at(t->device), word_at(t->ndim), address_of(*t)});
    for (int32_t d = 0; d < t->ndim; ++d) key.push_back(static_cast<uint64_t>(t->shape[d]));
    for (int32_t d = 0; t->strides && d < t->ndim; ++d) key.push_back(static_cast<uint64_t>(t->strides[d]));
    const Footprint f = footprints[i] = Footprint(*t);
    const uintptr_t base = address_of(*t);
    extents[i] = {static_cast<int64_t>(f.low() - base), static_cast<int64_t>(f.high() - base),
                  f.device().device_type == static_cast<DLDeviceType>(call.device->type)};
  }
  for (uint32_t i = 0; i < op->num_attributes; ++i)
    key.push_back(static_cast<uint64_t>(slots[op->num_arguments + i].i));
  for (uint32_t w = 0; w < op->num_arguments; ++w)
    for (uint32_t o = 0; o < op->num_arguments; ++o) {
      if (o == w || op->arguments[w].role == RLK_READ) continue;
      if (op->arguments[o].role != RLK_READ && o < w) continue;  // a pair once
      if (footprints[w].empty() || footprints[o].empty() || !footprints[w].same_memory(footprints[o]))
        continue;
      const bool alias = may_alias(*op, w, o) && same_layout(*slots[w].tensor, *slots[o].tensor);
      pairs.push_back({w, o, alias, footprints[w].windows(footprints[o])});
    }
}

// New addresses that passed the address checks: the next call with them skips those.
void Prepared::remember_addresses(const rlk_slot* slots) noexcept {
  uint64_t* k = key.data();
  for (uint32_t i = 0; i < op->num_arguments; ++i) {
    const DLTensor* t = slots[i].tensor;
    if (t) k[3] = address_of(*t);
    k += t ? kHead + t->ndim + (t->strides ? t->ndim : 0) : 1;
  }
}

bool Prepared::overlaps(const rlk_slot* slots) const noexcept {
  for (const Pair& p : pairs) {
    const uintptr_t a = address_of(*slots[p.a].tensor), b = address_of(*slots[p.b].tensor);
    const uintptr_t a_low = a + static_cast<uintptr_t>(extents[p.a].low),
                    b_low = b + static_cast<uintptr_t>(extents[p.b].low);
    if (a_low >= b + static_cast<uintptr_t>(extents[p.b].high) ||
        b_low >= a + static_cast<uintptr_t>(extents[p.a].high))
      continue;
    if (!(p.alias && a == b) && !p.windows.apart(a_low, b_low)) return true;
  }
  return false;
}

Status Prepared::check_addresses(const rlk_slot* slots) {
  if (Status s = check_null(*op, slots); !s) return s;
  if (overlaps(slots))
    if (Status s = check_overlap(*op, slots); !s) return s;
  remember_addresses(slots);
  return {};
}

Status Prepared::check_workspace(const rlk_slot* slots, const Options& options) const {
  const auto low = reinterpret_cast<uintptr_t>(options.workspace);
  for (uint32_t i = 0; i < op->num_arguments; ++i) {
    if (!extents[i].on_device) continue;
    const uintptr_t at = address_of(*slots[i].tensor);
    if (low >= at + static_cast<uintptr_t>(extents[i].high) ||
        at + static_cast<uintptr_t>(extents[i].low) >= low + options.workspace_bytes)
      continue;
    const DLDevice device{static_cast<DLDeviceType>(call.device->type), call.device->id};
    if (Footprint(options.workspace, options.workspace_bytes, device).meets(Footprint(*slots[i].tensor)))
      return {RLK_OVERLAP, fmt::format("{}: workspace overlaps {}", op->name, op->arguments[i].name)};
  }
  return {};
}

Result<Prepared> Prepared::make(int32_t index, const rlk_slot* slots, const Policy& policy, Resolution* out) {
  const NoCancel whole;
  Resolution r = Resolver::resolve(index, slots, policy, Ask::call);
  if (!r) return r.status();
  if (Status s = Resolver::entry_of(r).backend->activate(); !s) return s;
  Prepared p;
  p.op = r.op();
  p.implementation = r.implementation();
  p.epoch = r.epoch();
  p.policy = KeptPolicy(policy);
  const rlk_request request = policy.request(Resolver::device_of(r));
  const bool idle = nothing_to_do(*p.op, slots);
  p.run = idle ? &run_nothing : p.implementation->run;
  p.wanted_bytes = idle ? 0 : workspace_of(*p.implementation, slots, request);
  if (!(p.implementation->traits & RLK_WORKSPACE_OPTIONAL)) p.workspace_bytes = p.wanted_bytes;
  p.call = {.struct_size = sizeof(rlk_call),
            .precision = request.precision,
            .host = &host(),
            .stream = nullptr,
            .workspace = nullptr,
            .workspace_bytes = 0,
            .device = lasting(request.device),
            .threads = request.threads,
            .needs_backward = request.needs_backward};
  p.plain = p.wanted_bytes == 0 && request.device.type == kDLCPU;
  p.remember(slots);
  if (Status s = check_overlap(*p.op, slots); !s) return s;
  if (out) *out = std::move(r);
  return p;
}

Status explain_failure(const rlk_implementation& i, int32_t code) {
  if (code == RLK_UNSUPPORTED)
    return {RLK_INTERNAL,
            fmt::format("{}: {} accepted this call, then refused to run it: {}", i.op, i.id, failure_text())};
  if (!is_code(code))
    return {RLK_BACKEND_ERROR,
            fmt::format("{}: {} returned {} from its run, which is no rlk_code", i.op, i.id, code)};
  return failure(code);
}

}  // namespace rlk
