// Ask before, ask after, resolve once and run many times.
//
//   rlk::Resolution r = rlk::resolve("kda_bwd", args);      // every candidate, why not, what would change it
//   auto op = rlk::bind(rlk::Rope{...});  op->run(args);      // hot loop
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "rlk/options.hpp"
#include "rlk/status.hpp"
#include "rlk/tensor.hpp"

namespace rlk {

struct ImplementationEntry;

// One implementation's answer to a request.
struct Candidate {
  const rlk_implementation* implementation = nullptr;  // null: a backend that could not be used
  std::string_view id;
  rlk_verdict verdict{};        // code RLK_OK: accepted
  std::string_view state{};     // for a null implementation: why the backend is out
  std::string reason() const;   // the verdict in words
  std::string nearest() const;  // the smallest change that would select it
};

// The choice with its reasons. Text is made only when asked for.
class RLK_API Resolution {
 public:
  const Status& status() const noexcept { return status_; }
  explicit operator bool() const noexcept { return static_cast<bool>(status_); }
  const rlk_op_schema* op() const noexcept { return op_; }
  const rlk_implementation* implementation() const noexcept { return chosen_; }
  std::string_view id() const noexcept { return chosen_ ? chosen_->id : ""; }
  std::string_view arithmetic() const noexcept { return chosen_ ? chosen_->arithmetic : ""; }
  // Those that were asked: by resolve() all, by bind() as far as the choice.
  std::span<const Candidate> candidates() const noexcept { return candidates_; }
  // "call argument", "scope", "environment" or "default order", with the rule.
  std::string decided_by() const;
  // Of the op, the implementation and its build, and the policy where it may change bits (precision, required
  // arithmetic, determinism, gradients, evidence). Equal ones: the same code was chosen under the same
  // demands. Unequal ones do not mean other bits: a rebuild and another implementation of the same arithmetic
  // differ here too. Which bits are promised is what arithmetic() says.
  uint64_t fingerprint() const noexcept { return fingerprint_; }
  uint64_t epoch() const noexcept { return epoch_; }
  std::string explain() const;
  std::string json() const;

 private:
  friend struct Resolver;
  Status status_;
  const rlk_op_schema* op_ = nullptr;
  const rlk_implementation* chosen_ = nullptr;
  const ImplementationEntry* entry_ = nullptr;  // the choice with its backend
  std::vector<Candidate> candidates_;
  std::string rule_;
  int level_ = 3;
  uint64_t fingerprint_ = 0, epoch_ = 0;
  rlk_device device_{};
};

// What a result must look like.
struct Inferred {
  std::vector<int64_t> shape;
  DType dtype = DType::none;  // the preferred one
  uint32_t dtypes = 0;        // all admissible ones
};

// A resolved call. Not for two threads at once: it owns one workspace.
class RLK_API BoundOp {
 public:
  BoundOp(BoundOp&&) noexcept;
  BoundOp& operator=(BoundOp&&) noexcept;
  ~BoundOp();

  // Runs the bound arguments again: the DLTensors given to bind must still live, their data may have changed
  // but not their addresses. One compare, then the implementation; while a scope lives, the bound policy is
  // raised to what the scopes of this thread demand.
  Status run() {
    if (epoch_now_->load(std::memory_order_acquire) != epoch_) [[unlikely]]
      return run_slowly(slots_);
    const int32_t code = run_(slots_, call_);
    return code == RLK_OK ? Status() : last_failure(code);
  }
  // Runs other arguments of the same shapes, dtypes and device; anything else is resolved again.
  template <class Args>
  Status run(const Args& args) {
    return run_slots(reinterpret_cast<const rlk_slot*>(&args), Args::kName);
  }
  const Resolution& resolution() const noexcept;

 private:
  friend struct Resolver;
  struct State;
  explicit BoundOp(std::unique_ptr<State> state) noexcept;
  Status run_slots(const rlk_slot* slots, const char* op);
  Status run_slowly(const rlk_slot* slots);
  static Status last_failure(int32_t code);

  const std::atomic<uint64_t>* epoch_now_ = nullptr;
  uint64_t epoch_ = 0;
  int32_t (*run_)(const rlk_slot*, const rlk_call*) = nullptr;
  const rlk_slot* slots_ = nullptr;
  const rlk_call* call_ = nullptr;
  std::unique_ptr<State> state_;
};

// The untyped entry points; the typed ones below and in ops.hpp forward here.
RLK_API Resolution resolve_slots(std::string_view op, const rlk_slot* slots, const Options& options);
RLK_API Status run_slots(std::string_view op, const rlk_slot* slots, const Options& options);
RLK_API Result<BoundOp> bind_slots(std::string_view op, const rlk_slot* slots, const Options& options);
// Bytes of workspace the chosen implementation asks for. One whose workspace is optional runs with less, or
// none: slower, to the same bits.
RLK_API Result<uint64_t> workspace_slots(std::string_view op, const rlk_slot* slots, const Options& options);
RLK_API Result<Inferred> infer_slots(std::string_view op, const rlk_slot* slots, std::string_view result);
// A dense handle for an op name, stable for the process: what generated calls cache. -1 when unknown.
RLK_API int32_t op_index(std::string_view op);
// Like run_slots with this thread's cache of resolved calls in front.
RLK_API Status run_cached(int32_t op, const rlk_slot* slots, const Options& options);

template <class Args>
Resolution resolve(const Args& args, const Options& options = {}) {
  return resolve_slots(Args::kName, reinterpret_cast<const rlk_slot*>(&args), options);
}
template <class Args>
Result<BoundOp> bind(const Args& args, const Options& options = {}) {
  return bind_slots(Args::kName, reinterpret_cast<const rlk_slot*>(&args), options);
}
template <class Args>
Result<uint64_t> workspace(const Args& args, const Options& options = {}) {
  return workspace_slots(Args::kName, reinterpret_cast<const rlk_slot*>(&args), options);
}
// Shape and dtype of a result from the read arguments: rlk::infer(rlk::LmHead{.hidden = h, .weight = w},
// "out").
template <class Args>
Result<Inferred> infer(const Args& args, std::string_view result) {
  return infer_slots(Args::kName, reinterpret_cast<const rlk_slot*>(&args), result);
}

}  // namespace rlk
