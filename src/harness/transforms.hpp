// Axis-A: everything that must not change the bits of a row. Each transform runs the problem another way and
// says which rows of which run are the same rows.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "rlk/harness.hpp"
#include "src/harness/execute.hpp"

namespace rlk::harness {

// One other way to compute rows: run `problem` in `manner`; its row r is row source[r] of the original (or a
// filler, when negative). Without rows (source empty) the whole results must be equal.
struct Variant {
  std::string dimension;  // "batch size", "position", ...: a line of the certificate
  std::string text;       // "m=17 row at 5": enough to run exactly this one again
  std::string name() const { return dimension + " " + text; }
  Problem problem;
  std::vector<int64_t> source;
  Manner manner;
  int32_t users = 1;                            // threads that call at once
  int32_t repeats = 1;                          // every run must agree
  Promise promise = Promise::batch_invariance;  // that it tries
  std::shared_ptr<const Problem> beside{};      // what every other one of them computes; null: the same
};

// Not of one problem but of all calls of an op, one after another.
inline constexpr const char* kAnotherOrder = "calls in another order";
// Of a case that shows it.
inline constexpr const char* kOrderOfAddition = "order of addition";

// What to do with each variant of a problem.
struct VariantVisitor {
  // Whether the variant of this name is wanted. Asked of every one, in order; only the wanted are made, which
  // costs a copy of the problem's arrays.
  std::function<bool(const std::string& name)> wants;
  std::function<bool(const Variant&)> take;  // false: no more of them
};

// Goes through the variants of a problem. `thorough` widens every list. Which there are depends on the problem
// and its seed alone, never on a clock.
void for_variants(const Problem& p, const Subject& subject, bool thorough, const VariantVisitor& visitor);

}  // namespace rlk::harness
