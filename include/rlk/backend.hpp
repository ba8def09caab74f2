// For people who write implementations in C++: turns a typed function into the C description of plugin.h.
//
//   static rlk_code run(const LmHead& a, const Call& call) { ... return call.fail(RLK_UNSUPPORTED, "..."); }
//   extern const rlk_implementation lm_head_mine = implement<LmHead, run>({.id = "mine.fast", ...});
//
// Read arguments arrive as In, whose data() is const: a kernel that would write one does not compile.
#pragma once

#include <cstddef>
#include <exception>
#include <initializer_list>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <type_traits>

#include "rlk/float.hpp"
#include "rlk/float_guard.hpp"
#include "rlk/tensor.hpp"

namespace rlk {

// A type that the dispatcher let through as one of the three.
constexpr Float float_of(DType t) {
  return t == DType::f32 ? Float::f32 : t == DType::bf16 ? Float::bf16 : Float::f16;
}

inline constexpr rlk_verdict kAccept{RLK_OK, -1, nullptr, nullptr, {0, 0, 0, 0}};

// A refusal: a static format whose {0}..{3} stand for the operands.
constexpr rlk_verdict refuse(const char* why, std::initializer_list<int64_t> operands = {},
                             const char* nearest = nullptr, int32_t argument = -1) noexcept {
  rlk_verdict v{RLK_UNSUPPORTED, argument, why, nearest, {0, 0, 0, 0}};
  int i = 0;
  for (int64_t x : operands)
    if (i < 4) v.v[i++] = x;
  return v;
}

// What an implementation sees of one run.
class Call {
 public:
  explicit Call(const rlk_call& c) noexcept : c_(c) {}
  void* stream() const noexcept { return c_.stream; }
  std::span<std::byte> workspace() const noexcept {
    return {static_cast<std::byte*>(c_.workspace), c_.workspace_bytes};
  }
  const rlk_device& device() const noexcept { return *c_.device; }
  int32_t threads() const noexcept { return c_.threads; }
  bool needs_backward() const noexcept { return c_.needs_backward != 0; }
  rlk_code fail(rlk_code code, const std::string& text) const {
    return static_cast<rlk_code>(c_.host->fail(code, text.c_str()));
  }
  void log(int level, const std::string& text) const { c_.host->log(level, text.c_str()); }

  // Runs another implementation as a part of this one, in a part of this one's workspace.
  template <class Args>
  rlk_code run(const rlk_implementation& part, const Args& a, std::span<std::byte> workspace) const {
    rlk_call c = c_;
    c.struct_size = sizeof c;
    c.workspace = workspace.data(), c.workspace_bytes = workspace.size();
    c.needs_backward = 0;
    return static_cast<rlk_code>(part.run(reinterpret_cast<const rlk_slot*>(&a), &c));
  }

  // body(i) for i in [0, n), in any order, on any thread: results must not depend on either. body must not
  // throw.
  template <class Body>
  void parallel_for(int64_t n, Body&& body) const {
    auto thunk = [](void* context, int64_t i) { (*static_cast<std::remove_reference_t<Body>*>(context))(i); };
    c_.host->parallel_for(c_.threads, n, thunk,
                          const_cast<void*>(static_cast<const void*>(std::addressof(body))));
  }

 private:
  const rlk_call& c_;
};

// The facts of one implementation; the functions come as template arguments so that their types are checked.
struct Facts {
  const char* id;
  const char* doc;
  int32_t priority;
  const char* arithmetic;
  uint32_t dtypes;
  uint32_t traits = 0;
  int32_t device_type = kDLCPU;
  int32_t min_arch = 0, max_arch = 0;
};

// The facts that most implementations share: dtypes, and what a numerically pinned kernel promises.
inline constexpr uint32_t kFloats = RLK_F32 | RLK_BF16 | RLK_F16;
inline constexpr uint32_t kPinned = RLK_DETERMINISTIC | RLK_BATCH_INVARIANT | RLK_STRICT;

template <class Args, auto Run, auto Supports = nullptr, auto Workspace = nullptr>
constexpr rlk_implementation implement(const Facts& f) noexcept {
  static_assert(std::is_invocable_r_v<rlk_code, decltype(Run), const Args&, const Call&>,
                "run must be rlk_code(const Args&, const Call&): read arguments are In, written ones Out");
  rlk_implementation impl{};
  impl.struct_size = sizeof(rlk_implementation);
  impl.priority = f.priority;
  impl.op = Args::kName;
  impl.id = f.id;
  impl.doc = f.doc;
  impl.arithmetic = f.arithmetic;
  impl.dtypes = f.dtypes;
  impl.traits = f.traits;
  impl.device_type = f.device_type;
  impl.min_arch = f.min_arch;
  impl.max_arch = f.max_arch;
  impl.run = [](const rlk_slot* slots, const rlk_call* call) noexcept -> int32_t {
    const FloatGuard guard;  // also on GPU calls: host-side constants must not depend on the caller either
    try {
      return Run(*reinterpret_cast<const Args*>(slots), Call(*call));
    } catch (const std::bad_alloc&) {
      return call->host->fail(RLK_OUT_OF_MEMORY, "out of memory");
    } catch (const std::exception& e) {
      return call->host->fail(RLK_INTERNAL, e.what());
    } catch (...) {
      return call->host->fail(RLK_INTERNAL, "an implementation threw something that is not a std::exception");
    }
  };
  if constexpr (!std::is_null_pointer_v<decltype(Supports)>)
    impl.supports = [](const rlk_slot* slots, const rlk_request* request) noexcept -> rlk_verdict {
      return Supports(*reinterpret_cast<const Args*>(slots), *request);
    };
  if constexpr (!std::is_null_pointer_v<decltype(Workspace)>)
    impl.workspace = [](const rlk_slot* slots, const rlk_request* request) noexcept -> uint64_t {
      return Workspace(*reinterpret_cast<const Args*>(slots), *request);
    };
  return impl;
}

}  // namespace rlk
