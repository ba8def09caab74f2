// Choosing the implementation of one call.
#pragma once

#include "rlk/resolve.hpp"
#include "src/registry.hpp"

namespace rlk {

// What of the options decides the choice, scopes folded in.
struct Policy {
  Precision precision;
  bool needs_backward, deterministic;
  std::string_view backend, arithmetic, gradients;
  int32_t threads;
  bool evidence = false;
  static Policy of(const Options& options) noexcept;
};

struct Resolver {
  static Resolution resolve(int32_t op, const rlk_slot* slots, const Options& options, bool check_data);
  static Resolution failed(Status status);
  static const rlk_device& device_of(const Resolution& r) { return r.device_; }
  // One line: the op, and why each candidate refused.
  static Status refusal(const Resolution& r);
  static Result<BoundOp> bind(int32_t op, const rlk_slot* slots, const Options& options);
  static Backend* backend_of(const Snapshot& s, const rlk_implementation* impl);

 private:
  struct Search;
};

// The op's index or a Status with a suggestion.
Result<int32_t> find_op(std::string_view name);

// "Nearest" texts that are completed when they are shown, from the implementation; compared by address.
inline constexpr char kNearestDevice[] = "put the tensors on its device";
inline constexpr char kNearestDtype[] = "use one of its dtypes";
inline constexpr char kNearestArithmetic[] = "require its arithmetic";

// Fills v's format: {0}..{3} by operands.
std::string verdict_text(const char* format, const int64_t* v);

}  // namespace rlk
