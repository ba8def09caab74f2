// sample, sample_verify and sample_part with log-probabilities by the special function units' exponential: tokens and sets by the
// portable kernels, which are asked for no sums, then logp's kernels over what is kept and over all. `Kernels` starts them:
//
//   draw(p, workspace)  sample's portable kernels of a call
//   part(p)             and of a part
//   note(p, sums)       which rows have log-probabilities, and at what temperatures
//   fold(p, states)     sums of all leaves of logp's problem
//   finish(p, sums)     results of rows
//
// Each returns null, or the runtime's words for what went wrong, after which nothing is started.
#pragma once

#include <cstddef>

#include "arithmetic/bump.hpp"
#include "arithmetic/sample/sums.hpp"

namespace rlk::cuda::sample {

using lse128::State;
using sampling::Problem;

inline bool filters(const Problem& p) { return p.top_k || p.top_p || p.min_p; }
// Whether the call has sums, and which.
struct Wanted {
  bool kept, all;
  explicit Wanted(const Problem& p) {
    const bool parts = p.partials != nullptr && p.step == sampling::Step::token;
    kept = parts || p.wants_logp(), all = parts || p.wants_raw();
    // Without filters all are kept, and at one temperature one sum is both.
    if (all && !filters(p) && (p.raw_temperature || !p.temperature)) kept = true, all = false;
  }
  bool any() const { return kept || all; }
};

// What stands in the workspace.
struct Sums {
  std::int64_t* target = nullptr;  // of rows with sums: an entry, the token where there is one; else -1
  float *temperature = nullptr, *raw_temperature = nullptr;
  State *kept = nullptr, *all = nullptr;  // without `all`, `kept` is both
  std::int32_t* keep = nullptr;           // what is kept, where the call has no such result
  std::int64_t words = 0;
  std::byte* draw = nullptr;

  Sums(const Problem& p, std::int64_t drawing, std::byte* workspace, std::uint64_t* bytes = nullptr) {
    simt::Bump<std::byte, 64> room{workspace};
    draw = room.take(drawing);
    if (const Wanted wanted(p); wanted.any()) {
      const auto of_rows = [&]<class T>(T*& to, std::int64_t each) {
        to = reinterpret_cast<T*>(room.take(p.rows * each * static_cast<std::int64_t>(sizeof(T))));
      };
      of_rows(target, 1), of_rows(temperature, 1), of_rows(raw_temperature, 1);
      if (wanted.kept) of_rows(kept, p.leaves);
      if (wanted.all) of_rows(all, p.leaves);
      words = (p.vocab + 31) / 32;
      if (wanted.kept && filters(p) && p.keep == nullptr) of_rows(keep, words);
    }
    if (bytes) *bytes = static_cast<std::uint64_t>(room.used);
  }
};
inline std::uint64_t workspace_bytes(const Problem& p, std::int64_t drawing) {
  std::uint64_t bytes = 0;
  const Sums sums(p, drawing, nullptr, &bytes);
  return bytes;
}

template <class Kernels>
const char* run(const Problem& p, const Sums& sums, const Kernels& k) {
  Problem drawn = p;
  drawn.logp = drawn.logp_raw = {}, drawn.recorded_logp = drawn.recorded_logp_raw = {};
  if (sums.keep) drawn.keep = sums.keep, drawn.keep_stride = sums.words;
  const char* error = p.partials ? k.part(drawn) : k.draw(drawn, sums.draw);
  const Wanted wanted(p);
  if (error || !wanted.any()) return error;
  error = k.note(p, sums);
  lse128::Problem rows = sampling::sums_of(p);
  rows.target = sums.target, rows.wide = true;
  if (!error && wanted.all) {
    rows.temperatures = sums.raw_temperature;
    error = k.fold(rows, sums.all);
  }
  if (!error && wanted.kept) {
    rows.temperatures = sums.temperature;
    if (filters(p)) rows.keep = reinterpret_cast<std::uint32_t*>(drawn.keep), rows.words = drawn.keep_stride;
    error = k.fold(rows, sums.kept);
  }
  return error ? error : k.finish(p, sums);
}

}  // namespace rlk::cuda::sample
