// attention and attention_part choose their arithmetic by the attribute `split`: each length S of a split is an
// implementation of its own, which refuses the others. What all of these share, of either op and whoever computes.
//
//   Op: Args, workspace<By>(problem, threads) and run<By>(problem, call)
//   By: missing(), why this build cannot run it or null
#pragma once

#include <string>

#include "arithmetic/attention/bind.hpp"
#include "native/attention/check.hpp"

namespace rlk::native::attention {

// The lengths, the default first; 0 is all keys in one split.
inline constexpr std::int64_t kSplits[] = {1024, 512, 2048, 4096, 0};
constexpr int place_of(std::int64_t split) {
  int i = 0;
  while (kSplits[i] != split) ++i;
  return i;
}

template <class Op, class By, int S>
struct Split {
  using Args = typename Op::Args;
  static rlk_verdict supports(const Args& a, const rlk_request&) {
    if (const char* missing = By::missing()) return refuse(missing);
    if (a.split == S) return kAccept;
    return refuse("split is {0}, this arithmetic has {1}", {a.split, S},
                  "set split, or take another arithmetic");
  }
  static std::uint64_t workspace(const Args& a, const rlk_request& r) {
    return Op::template workspace<By>(attn128::problem_of(a), r.threads);
  }
  static rlk_code run(const Args& a, const Call& call) {
    const attn128::Problem p = attn128::problem_of(a);
    if (a.split != S)
      return call.fail(RLK_UNSUPPORTED, std::string(Args::kName) + ": split is not this implementation's");
    if (const rlk_code code = Check(Args::kName, p, call)()) return code;
    return Op::template run<By>(p, call);
  }
};

// Priorities only put the lengths in an order: a call has one.
template <class Op, class By, int S>
constexpr rlk_implementation of_split(Facts facts) {
  using Form = Split<Op, By, S>;
  facts.priority -= 3 * place_of(S);
  return implement<typename Op::Args, Form::run, Form::supports, Form::workspace>(facts);
}

}  // namespace rlk::native::attention
