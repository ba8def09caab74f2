// A row of sample on the CPU (arithmetic sample/philox-g1), compiled once per instruction set; the choice changes no bit.
#pragma once

#include <optional>

#include "arithmetic/sample/sample.hpp"
#include "native/levels.hpp"

namespace rlk::native::sample {

using sampling::Drawn;
using sampling::Kept;
using sampling::Problem;

inline constexpr int kBins = 1 << 11;

// Room for a row, in a worker's scratch.
struct Room {
  std::uint64_t* bins;    // kBins
  float* z;               // entries as they are ordered
  float* weight;          // exp2 of their distance to the largest
  std::int32_t* entries;  // a list of some of them
};
inline std::uint64_t room_bytes(const Problem& p) {
  return kBins * sizeof(std::uint64_t) + 3 * static_cast<std::uint64_t>(p.vocab) * sizeof(float);
}
inline Room room_in(std::byte* scratch, const Problem& p) {
  auto* bins = reinterpret_cast<std::uint64_t*>(scratch);
  auto* z = reinterpret_cast<float*>(bins + kBins);
  return {bins, z, z + p.vocab, reinterpret_cast<std::int32_t*>(z + 2 * p.vocab)};
}

// What was drawn, and what golden needs to say it in fp64: the kept set over room.z.
struct RowResult {
  Drawn drawn;
  Kept kept;
  float most = 0;
};

struct Engine {
  RowResult (*draw)(const Problem& p, std::int64_t row, const Room& room);
  // What sample_part says of a row; of its last step what is kept, unless the row has no token.
  std::optional<Kept> (*part)(const Problem& p, std::int64_t row, const Room& room);
};
extern const Engine kScalar, kAvx2, kAvx512;

constexpr const Engine& engine_for(Isa isa) {
  return isa == Isa::avx512 ? kAvx512 : isa == Isa::avx2 ? kAvx2 : kScalar;
}

}  // namespace rlk::native::sample
