// What attention and attention_part share on the CPU: who computes a block of rows, which blocks there are, and an
// implementation for every length of a split.
#pragma once

#include <algorithm>
#include <vector>

#include "arithmetic/attention/bind.hpp"
#include "native/attention/engine.hpp"
#include "native/attention/splits.hpp"
#include "native/attention/unit.hpp"
#include "rlk/workers.hpp"

namespace rlk::native::attention {

// Who computes a block, and with how much scratch.
template <Isa I>
struct Vectors {
  static const char* missing() { return nullptr; }
  static const Engine& engine() { return engine_for(I); }
  static std::int64_t scratch_floats(const Problem& p) {
    return attention::scratch_floats(p) + widened_floats(p);
  }
};
template <const Engine* (*Get)()>
struct OnUnit {
  static const char* missing() { return Get() == nullptr ? kNoUnit : nullptr; }
  static const Engine& engine() { return *Get(); }
  static std::int64_t scratch_floats(const Problem& p) { return unit_scratch_floats(p) + widened_floats(p); }
};

template <class By>
std::uint64_t scratch_bytes(const Problem& p) {
  return static_cast<std::uint64_t>(By::scratch_floats(p)) * sizeof(float);
}

inline std::int64_t blocks_of(const Problem& p, std::int64_t queries) {
  return (queries * p.group + kRows - 1) / kRows;
}
// Packed sequences may each leave a block that is not full.
inline std::int64_t most_blocks(const Problem& p) {
  return (p.cu_q ? blocks_of(p, p.queries) + p.sequences : blocks_of(p, p.queries) * p.sequences) * p.heads;
}
// The last queries of a causal sequence see the most keys: they go first.
inline std::vector<Block> blocks_in(const Problem& p) {
  std::vector<Block> blocks;
  for (std::int64_t n = 0; n < p.sequences; ++n)
    for (std::int64_t rows = p.q_len(n) * p.group, b = blocks_of(p, p.q_len(n)) - 1; b >= 0; --b)
      for (std::int64_t h = 0; h < p.heads; ++h)
        blocks.push_back(
            {n, h, b * kRows, static_cast<int>(std::min<std::int64_t>(kRows, rows - b * kRows))});
  return blocks;
}

// one(task, scratch) for all tasks, `shared` bytes of workspace beside their scratch.
template <class By, class One>
void run_all(const Call& call, const Problem& p, std::int64_t tasks, std::uint64_t shared, One one) {
  workers::run_tasks(call, tasks, scratch_bytes<By>(p), shared, [&](std::int64_t task, std::byte* scratch) {
    one(task, reinterpret_cast<float*>(scratch));
  });
}

template <class Op, Family F, int S>
constexpr Levels tiles(const char* arithmetic) {
  return by_level([arithmetic]<Isa I>() {
    return of_split<Op, Vectors<I>, S>(facts_at<F, I>({.id = "",
                                                       .doc = "96 rows share a tile of 128 keys",
                                                       .priority = 112,
                                                       .arithmetic = arithmetic,
                                                       .dtypes = kFloats,
                                                       .traits = kPinned}));
  });
}
template <class Op, int S>
constexpr rlk_implementation amx(const char* id, const char* arithmetic) {
  Facts facts = amx_facts("96 rows share a tile of 128 keys on Intel's matrix unit", arithmetic);
  facts.id = id;
  return of_split<Op, OnUnit<amx_engine>, S>(facts);
}

template <class Op, Family F, int S>
constexpr Levels replay_amx(const char* arithmetic) {
  Facts facts = amx_replay_facts(arithmetic);
  facts.priority = 60;  // the lengths take 3 each
  return by_level([facts]<Isa I>() { return of_split<Op, OnUnit<replay_amx<I>>, S>(facts_at<F, I>(facts)); });
}

}  // namespace rlk::native::attention
