// Which cut of linear's tree kernel a product takes.
#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>

#include "cuda/linear/tree.h"

namespace rlk::cuda::linear {
namespace {

// What was measured on an H100 and an H200: the share of memory's rate that all SMs reach together; per microsecond, bytes
// from memory by one, from L2 by all and by one, and multiply-adds of one.
constexpr double kShareOfMemory = 0.78, kMemoryOfOne = 38e3, kL2 = 9.5e6, kL2OfOne = 68e3,
                 kMultiplyAdds = 2.4e6;
// Microseconds of 64 columns of a tile beside its products, and where its sums meet: once, in clusters of eight, and for
// every four columns of a thread.
constexpr double kTile = 0.7, kMeet = 0.5, kMeetOfEight = 2.5, kMeetFour = 0.65;

// Clusters that run at once: one stays inside a group of SMs, and not all groups are whole.
std::int64_t together(const Cut& cut, int multiprocessors) {
  const int lost = cut.split == 8 ? 2 : cut.split == 4 ? 4 : 0;
  return std::max(1, multiprocessors / (cut.split * (cut.pair ? 2 : 1)) - lost);
}

double time_of(const Product& g, const Cut& cut, const Card& card) {
  const std::int64_t pair = cut.pair ? 2 : 1, rows = cut.rows * pair;
  const std::int64_t tiles_m = (g.m + rows - 1) / rows, n = g.up > 0 ? 2 * g.n : g.n,
                     tiles = tiles_m * ((n + cut.columns - 1) / cut.columns);
  const std::int64_t at_once = std::min(tiles, together(cut, card.multiprocessors));
  const auto rounds = static_cast<double>((tiles + at_once - 1) / at_once);
  const auto blocks = static_cast<double>(at_once * cut.split * pair);
  const double depth = static_cast<double>(g.k) / cut.split, weight = 2 * depth * cut.columns;
  const auto real_rows = static_cast<double>(std::min<std::int64_t>(cut.rows, g.m));
  const double operands = 2 * depth * real_rows + weight / static_cast<double>(pair);
  const double unit = std::max({weight / kMemoryOfOne, operands / kL2OfOne, blocks * operands / kL2,
                                depth * cut.columns * cut.rows / kMultiplyAdds});
  const double all = 2 * static_cast<double>(n) * static_cast<double>(g.k) / (kShareOfMemory * card.memory);
  const double fours = std::ceil(real_rows * cut.columns / (4.0 * cut.split * cut.rows * 2));
  return std::max(all, rounds * unit) +
         rounds * (kTile * cut.columns / 64 +
                   (cut.split > 1 ? (cut.split == 8 ? kMeetOfEight : kMeet) + kMeetFour * fours : 0));
}

// The kernel for few rows of y. Rows of weight that a warp takes at a time: as many as leave no SM without.
Cut few_cut(const Product& g, std::int64_t weights, int multiprocessors) {
  if (g.m > 16) return {32, 16, 1};
  if (weights <= 12 * std::int64_t{multiprocessors}) return {16, 8, 1};
  return weights >= 64 * std::int64_t{multiprocessors} ? Cut{16, 32, 1} : Cut{16, 16, 1};
}
// Where it is the faster one: up to 16 rows always, up to 32 where its tiles fill two rounds of SMs or less, and those well.
bool is_few(const Product& g, std::int64_t weights, int multiprocessors) {
  if (!g.a.k_contiguous || !g.b.k_contiguous || g.m > kFewRows) return false;
  const std::int64_t tiles = (weights + 15) / 16, rounds = (tiles + multiprocessors - 1) / multiprocessors;
  return g.m <= 16 || (rounds <= 2 && 10 * tiles >= 7 * rounds * multiprocessors);
}

}  // namespace

// Asking a driver for a clock takes microseconds, so it is asked once for each device.
cudaError_t read_card(Card* card, int device) {
  static std::mutex mutex;
  static std::map<int, Card> known;
  const std::lock_guard lock(mutex);
  Card& found = known[device];
  int width = 0, kilohertz = 0;
  if (found.memory == 0) {
    cudaError_t e = cudaDeviceGetAttribute(&found.multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&width, cudaDevAttrGlobalMemoryBusWidth, device);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&kilohertz, cudaDevAttrMemoryClockRate, device);
    if (e != cudaSuccess) return e;
    const double rate = width / 8.0 * 2 * kilohertz * 1e-3;
    found.memory = rate > 0 ? rate : 3.35e6;
  }
  *card = found;
  return cudaSuccess;
}

Cut cut_for(const Product& g, const Card& card) {
  const std::int64_t weights = (g.up > 0 ? 2 * g.n : g.n) * g.leaves / 8;
  if (is_few(g, weights, card.multiprocessors)) return few_cut(g, weights, card.multiprocessors);
  const Cut* best = nullptr;
  double least = 0;
  for (const Cut& cut : kCuts) {
    if ((cut.rows == 64 ? g.m > 128 : g.m <= 64) || cut.split > g.leaves) continue;
    if (g.up > 0 && cut.columns == 64) continue;
    const double time = time_of(g, cut, card);
    if (best == nullptr || time < least) best = &cut, least = time;
  }
  return *best;
}

}  // namespace rlk::cuda::linear
