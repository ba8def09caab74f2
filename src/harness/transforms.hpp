// Axis-A: everything that must not change the bits of a row. Each transform runs the problem another way and
// says which rows of which run are the same rows.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "src/harness/execute.hpp"

namespace rlk::harness {

// One other way to compute rows: run `problem` in `manner`; its row r is row source[r] of the original (or a
// filler, when negative). Without rows (source empty) the whole results must be equal.
struct Variant {
  std::string dimension;  // "batch size", "position", ...: a line of the certificate
  std::string text;       // "m=17 row at 5": enough to run exactly this one again
  Problem problem;
  std::vector<int64_t> source;
  Manner manner;
  int32_t users = 1;     // threads that call at once
  int32_t repeats = 1;   // every run must agree
  bool hostile = false;  // the caller's floating-point environment is another: only strict ones promise it
};

// Makes the variants of a problem, one after the other, until take returns false. `thorough` widens every
// list. How many come depends on the problem and its seed alone, never on a clock.
void for_variants(const Problem& p, const Subject& subject, bool thorough,
                  const std::function<bool(const Variant&)>& take);

}  // namespace rlk::harness
