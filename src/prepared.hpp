// A resolved call with the key that it is good for.
//
// It is valid for the same dtypes, shapes, strides, alignment, attributes and policy while the gate stands.
// Everything a choice may depend on is in that key; addresses are not, so what only addresses decide
// (overlaps) is compared whenever they change.
#pragma once

#include <cstring>
#include <vector>

#include "src/failure.hpp"
#include "src/footprint.hpp"
#include "src/policy.hpp"
#include "src/resolve.hpp"
#include "src/workspace.hpp"

namespace rlk {

// Two words at once: comparing is what a cached call does most, and vectors halve it on every machine.
using Two = uint64_t __attribute__((vector_size(16)));
inline Two two_at(const void* p) noexcept {
  Two v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// The part of a DLTensor after its data pointer: device, then rank and dtype, compared as two words.
static_assert(sizeof(DLDevice) == 8 && offsetof(DLTensor, ndim) == offsetof(DLTensor, device) + 8 &&
              offsetof(DLTensor, dtype) == offsetof(DLTensor, ndim) + 4);

// How many sizes of a tensor follow in a key: its rank, and whether strides come too. No form is kAbsent.
inline uint64_t form_of(int32_t rank, const int64_t* strides) noexcept {
  return static_cast<uint32_t>(rank) | uint64_t{strides != nullptr} << 32;
}

inline uintptr_t address_of(const DLTensor& t) noexcept {
  return reinterpret_cast<uintptr_t>(t.data) + t.byte_offset;
}

// Adds to `pairs` and `single` where n sizes differ from the key. Ranks 1 to 4 by straight code: a loop's
// bookkeeping would cost more than its work.
[[gnu::always_inline]] inline void add_differences(Two& pairs, uint64_t& single, const uint64_t* key,
                                                   const int64_t* sizes, int32_t n) noexcept {
  const auto two = [&](int32_t i) { pairs |= two_at(key + i) ^ two_at(sizes + i); };
  const auto one = [&](int32_t i) { single |= key[i] ^ static_cast<uint64_t>(sizes[i]); };
  if (n == 2) [[likely]]
    return two(0);
  if (n == 1) return one(0);
  if (n == 3) return two(0), one(2);
  int32_t i = 0;
  for (; i + 2 <= n; i += 2) two(i);
  if (i < n) one(i);
}

struct Prepared {
  const rlk_op_schema* op = nullptr;
  const rlk_implementation* implementation = nullptr;
  decltype(rlk_implementation::run) run =
      nullptr;  // the implementation's, or nothing where there is nothing to do
  uint64_t epoch = 0;
  KeptPolicy policy;
  rlk_call call{};  // all but stream and workspace; points to nothing that belongs to this Prepared
  uint64_t workspace_bytes = 0;  // needed
  uint64_t wanted_bytes = 0;     // made use of: more than needed where workspace is optional
  bool plain = false;            // needs no workspace, on the CPU

  // Per argument: kAbsent, or its form, device, rank and dtype, address, shape, strides; then the attributes'
  // words.
  static constexpr uint64_t kAbsent = ~uint64_t{0};
  static constexpr int32_t kHead = 4;
  std::vector<uint64_t> key;

  // Arguments of which one is written and which must not meet, and where each one's bytes lie from its
  // address.
  struct Pair {
    uint32_t a, b;
    bool alias;  // the very same elements are fine
    Windows windows;
  };
  struct Extent {
    int64_t low = 0, high = 0;
    bool on_device = false;  // where the workspace is too
  };
  std::vector<Pair> pairs;
  std::vector<Extent> extents;

  enum class Match { no, same_addresses, other_addresses };
  [[gnu::always_inline]] Match match(const rlk_slot* slots) const noexcept;

  // Resolves, activates, measures the workspace; addresses are checked too. The resolution goes to `out`
  // where that is not null.
  static Result<Prepared> make(int32_t op, const rlk_slot* slots, const Policy& policy, Resolution* out);

  // What only addresses decide, where they are not those that were checked last.
  Status check_addresses(const rlk_slot* slots);
  // The caller's workspace against the arguments.
  Status check_workspace(const rlk_slot* slots, const Options& options) const;

 private:
  void remember(const rlk_slot* slots);
  void remember_addresses(const rlk_slot* slots) noexcept;
  bool overlaps(const rlk_slot* slots) const noexcept;
};

// Whether no result has elements although some dimension is larger than implementations can count to: [2^62, 0]. Such a call
// is accepted and left alone.
bool nothing_to_do(const rlk_op_schema& op, const rlk_slot* slots) noexcept;

uint64_t workspace_of(const rlk_implementation& i, const rlk_slot* slots, const rlk_request& request);

// A failed run in words.
[[gnu::cold]] Status explain_failure(const rlk_implementation& implementation, int32_t code);

inline Prepared::Match Prepared::match(const rlk_slot* slots) const noexcept {
  constexpr uintptr_t kAlignment = 127;  // an address matters up to here
  const uint64_t* k = key.data();
  const uint32_t arguments = op->num_arguments, attributes = op->num_attributes;
  Two differs{};
  uint64_t single = 0, moved = 0;
  for (uint32_t i = 0; i < arguments; ++i) {
    const DLTensor* t = slots[i].tensor;
    if (!t) {
      if (*k++ != kAbsent) [[unlikely]]
        return Match::no;
      continue;
    }
    // The form says how much follows, so it is compared before what follows is read.
    const int32_t n = t->ndim;
    const int64_t *const shape = t->shape, *const strides = t->strides;
    if (k[0] != form_of(n, strides)) [[unlikely]]
      return Match::no;
    if (!shape && n) [[unlikely]]
      return Match::no;  // the checks say what is wrong
    differs |= two_at(k + 1) ^ two_at(&t->device);
    moved |= k[3] ^ address_of(*t);
    k += kHead;
    add_differences(differs, single, k, shape, n);
    k += n;
    if (strides) {
      add_differences(differs, single, k, strides, n);
      k += n;
    }
  }
  for (uint32_t i = 0; i < attributes; ++i) single |= k[i] ^ static_cast<uint64_t>(slots[arguments + i].i);
  if (single | differs[0] | differs[1]) [[unlikely]]
    return Match::no;
  if (!moved) return Match::same_addresses;
  // Addresses differ: fine as long as their alignment does not.
  return moved & kAlignment ? Match::no : Match::other_addresses;
}

// One op's last resolved calls on one thread. An entry that is not used yet has an epoch that never was.
struct OpCache {
  static constexpr std::size_t kEntries = 8;
  Prepared entries[kEntries];
  Prepared* last = entries;  // used last
  std::size_t used = 0, next = 0;
};

// Runs under a policy that need not be the thread's own.
Status run_under(const Policy& policy, int32_t op, const rlk_slot* slots, const Options& options);

// Runs a prepared call that has a workspace or is not on the CPU.
Status run_in_workspace(const Prepared& p, const rlk_slot* slots, const Options& options);

}  // namespace rlk
