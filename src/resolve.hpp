// Choosing the implementation of one call.
#pragma once

#include "rlk/resolve.hpp"
#include "src/check.hpp"
#include "src/policy.hpp"
#include "src/registry.hpp"

namespace rlk {

// What for. Whoever asks instead of calling needs shapes only, and results may be absent.
enum class Ask {
  call,      // who runs this call: nobody behind it is asked
  choice,    // the same without a call
  everyone,  // without a call, what became of every implementation: asking some of them takes a while
};

struct Resolver {
  static Resolution resolve(int32_t op, const rlk_slot* slots, const Policy& policy, Ask ask);
  static Resolution failed(Status status);
  static const rlk_device& device_of(const Resolution& r) { return r.device_; }
  // Of the choice.
  static const ImplementationEntry& entry_of(const Resolution& r) { return *r.entry_; }
  static Result<BoundOp> bind(int32_t op, const rlk_slot* slots, const Options& options);

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
