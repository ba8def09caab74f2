// Which cut of linear's tree kernel a product takes.
#include <algorithm>
#include <map>
#include <mutex>

#include "cuda/linear/tree.h"

namespace rlk::cuda::linear {
namespace {

// Fitted to 1500 times that an H200 took: the share of memory's rate that all SMs reach together; per microsecond, bytes of the
// weight by one, of both operands from L2 by all and by one.
constexpr double kShareOfMemory = 1.0, kWeightOfOne = 77e3, kL2 = 12e6, kL2OfOne = 88e3;
// Microseconds of 64 columns of a tile beside its products, and where its sums meet: once, in clusters of eight, and for
// every four columns of a thread.
constexpr double kTile = 0.87, kMeet = 0.55, kMeetOfEight = 1.54, kMeetFour = 0.2;
// Multiply-adds of one SM per microsecond.
double multiply_adds(const Cut& cut) {
  if (cut.rows == 64) return cut.columns == 64 ? 1.1e6 : cut.columns == 96 ? 1.45e6 : 1.9e6;
  return 3.3e6;
}

// Clusters that run at once: one stays inside a group of SMs, and not all groups are whole.
std::int64_t together(const Cut& cut, int multiprocessors) {
  const int lost = cut.split == 8 ? 2 : cut.split == 4 ? 4 : 0;
  return std::max(1, multiprocessors / (cut.split * (cut.pair ? 2 : 1)) - lost);
}

// What a copy of 64 of k reads for each row over what it brings: five sectors of 32 bytes for four, where rows along k do not
// start on lines.
double reads_of(const Operand& x) {
  const bool whole =
      (reinterpret_cast<std::uintptr_t>(x.data) | static_cast<std::uintptr_t>(2 * x.ld)) % 128 == 0;
  return x.k_contiguous && !whole ? 1.25 : 1;
}

double time_of(const Product& g, const Cut& cut, const Card& card) {
  const std::int64_t pair = cut.pair ? 2 : 1, rows = cut.rows * pair, n = g.up > 0 ? 2 * g.n : g.n,
                     tiles = (g.m + rows - 1) / rows * ((n + cut.columns - 1) / cut.columns);
  const std::int64_t at_once = std::min(tiles, together(cut, card.multiprocessors)),
                     blocks = at_once * cut.split * pair,
                     whole = cut.split > 1 ? tiles / blocks : 0,  // rounds of tiles that are not shared
      rounds = (tiles - whole * blocks + at_once - 1) / at_once;
  const auto real_rows = static_cast<double>(std::min<std::int64_t>(cut.rows, g.m));
  const auto products = [&](double depth) {
    const double weight = 2 * depth * cut.columns * reads_of(g.b),
                 operands = 2 * depth * real_rows * reads_of(g.a) + weight / static_cast<double>(pair);
    return std::max({weight / kWeightOfOne, operands / kL2OfOne, static_cast<double>(blocks) * operands / kL2,
                     depth * cut.columns * cut.rows / multiply_adds(cut)});
  };
  const std::int64_t stages = (g.width + 63) / 64;
  const auto depth = static_cast<double>(g.leaves * stages * 64);
  const double all = 2 * static_cast<double>(n) * static_cast<double>(g.k) / (kShareOfMemory * card.memory),
               busy = static_cast<double>(whole) * products(depth) +
                      static_cast<double>(rounds) * products(depth / cut.split),
               fours = real_rows * cut.columns / (32.0 * cut.split * cut.rows),
               meet = cut.split == 1 ? 0 : (cut.split == 8 ? kMeetOfEight : kMeet) + kMeetFour * fours;
  return std::max(all, busy) + static_cast<double>(whole + rounds) * kTile * cut.columns / 64 +
         static_cast<double>(rounds) * meet;
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
    if (g.up > 0 && cut.columns < 128) continue;
    if (cut.columns == 96 && !(g.a.k_contiguous && g.b.k_contiguous)) continue;
    const double time = time_of(g, cut, card);
    if (best == nullptr || time < least) best = &cut, least = time;
  }
  return *best;
}

}  // namespace rlk::cuda::linear
