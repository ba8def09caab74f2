// A sum over ranks through memory that all of them write: plain data, as Python hands it over (rlk/parallel/peers.py) and as
// kernels get it by value. The sum is tp_sum's: the top of linear's tree in fp32, one rounding, then bias and residual.
//
// A rank never reads another's memory, it writes there and reads its own. Each rank has rings of slots for each block of the grid
// and each rank that writes; a block and the blocks of that number on other ranks work alone, chunk by chunk:
//
//   words   every rank sends its whole part, each four bytes beside a number that says whose turn they are: nothing waits but for
//           the bytes themselves
//   shared  every rank adds its share: parts go to who adds them, results come back, a flag behind each chunk of either
//   landed  the same of parts that are there already: kernels before this one on every rank's stream, the products, wrote them to
//           who adds them
//
// No slot is written before it was read, with no more flags than these. `words`: a thread sends chunk c when it has read chunk c - 2
// of everyone; they had then read c - 4. `shared`: a block sends chunk c when it has taken the results of c - 2 kLag - 1, so
// everyone had read the parts of that; the same goes for results. Who has all results of a call may write the parts of the
// next where those of this one landed. Numbers of chunks go on from call to call in the rank's own memory, so a captured graph may be
// replayed; at the end of a call a rank has read all that it was sent, and the others are at most one step of `words` behind.
#pragma once

#include <cstdint>

#include "arithmetic/rows.hpp"
#include "arithmetic/tp_sum/sum.hpp"

namespace rlk::peers {

inline constexpr int kMost = tree8::kMost;  // ranks
inline constexpr int kWordRing = 4;
inline constexpr int kLag = 1, kRing = 4;                       // of `shared`
static_assert(kRing > 2 * kLag && (kRing & (kRing - 1)) == 0);  // numbers go on past 2^32
inline constexpr int kThreads = 512;
inline constexpr int kChunk = 16 * kThreads;     // elements of a slot: two packs for each thread
inline constexpr int kWordChunk = 2 * kThreads;  // of `words`: two for each thread

enum class Way : std::int32_t { words, shared, landed };

struct Sum {
  std::int64_t count = 0;  // elements, a multiple of 8
  std::int64_t each = 0;   // unless `words`: those that each rank adds, a multiple of 8; the last have fewer
  std::int64_t width = 0;  // of a row, a multiple of 8
  const float* part = nullptr;
  void* y = nullptr;  // with `spread`, the rank's share alone, as residual then is
  const void *bias = nullptr, *residual = nullptr;
  void* memory[kMost] = {};  // of each rank, as this one reaches it
  std::int64_t landing = 0;  // of `landed`: the byte of it where parts lie, `each` elements of every rank
  std::uint32_t* late = nullptr;  // where the host reads which rank did not come: 1 + its number
  std::uint64_t nanoseconds = 0;  // how long one waits for it
  std::int32_t ranks = 1, rank = 0, type = 0, spread = 0, way = 0;
  std::int32_t chunk = kChunk;        // elements of a step of a block, a multiple of 8, at most a slot's
  std::int32_t blocks = 1, room = 1;  // of this call; those that the memory is laid out for
};

// Where things lie in a rank's memory, in bytes.
struct Layout {
  std::int64_t room, ranks;
  static constexpr std::int64_t kCounters = 2, kFlags = 2;

  RLK_HD std::int64_t counter(int which, std::int64_t block) const { return 4 * (which * room + block); }
  // which = 0: parts, 1: results; from rank `from`
  RLK_HD std::int64_t flag(int which, std::int64_t block, int from) const {
    return 4 * (kCounters * room + (which * room + block) * kMost + from);
  }
  RLK_HD std::int64_t slots() const { return (4 * room * (kCounters + kFlags * kMost) + 255) / 256 * 256; }
  RLK_HD std::int64_t slot(int ring, std::int64_t block, std::uint32_t chunk, int from) const {
    return (block * ring + chunk % static_cast<std::uint32_t>(ring)) * ranks + from;
  }
  static constexpr std::int64_t kWordBytes = 8 * kWordChunk, kPartBytes = 4 * kChunk;
  RLK_HD std::int64_t words(std::int64_t slot) const { return slots() + slot * kWordBytes; }
  RLK_HD std::int64_t parts(std::int64_t slot) const {
    return words(room * kWordRing * ranks) + slot * kPartBytes;
  }
  RLK_HD std::int64_t results(std::int64_t slot) const {
    return parts(room * kRing * ranks) + slot * kPartBytes;
  }
  RLK_HD std::int64_t bytes() const { return results(room * kRing * ranks); }
};

}  // namespace rlk::peers
