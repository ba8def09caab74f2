#include "cuda/lm_head/select.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "cuda/lm_head/cublaslt.hpp"
#include "cuda/lm_head/wgmma.h"

namespace rlk::cuda::lm_head {
namespace {

// One way of computing the product.
struct Way {
  enum class Kind : std::uint8_t { mma, sm90, library } kind = Kind::mma;
  Sm90Tile tile = Sm90Tile::wide;
  LtCandidate algorithm{};
};

// A size with its way, and the library's descriptors when the way needs them.
struct Contender {
  Way way;
  std::shared_ptr<const LtProduct> product;
};

struct Place {
  int device = 0;
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;
  cudaStream_t stream = nullptr;
};

using Key = std::array<std::int64_t, 9>;

std::int64_t traits_of(const Gemm& g, const Place& place, bool library_only) {
  const bool c_aligned = (reinterpret_cast<std::uintptr_t>(g.c) |
                          static_cast<std::uintptr_t>(g.ldc * static_cast<std::int64_t>(bytes_of(g.out)))) %
                             16 ==
                         0;
  return place.device | std::int64_t{g.a.k_contiguous} << 32 | std::int64_t{g.b.k_contiguous} << 33 |
         std::int64_t{aligned16(g.a)} << 34 | std::int64_t{aligned16(g.b)} << 35 |
         std::int64_t{c_aligned} << 36 | std::int64_t{library_only} << 37 |
         std::int64_t{place.workspace_bytes >= kLibraryWorkspace} << 38 |
         static_cast<std::int64_t>(g.b.type) << 40 | static_cast<std::int64_t>(g.out) << 44;
}
Key size_key(const Gemm& g, const Place& place, bool library_only) {
  return {traits_of(g, place, library_only), g.m, g.n, g.k, g.a.ld, g.b.ld, g.ldc, g.bias != nullptr, 0};
}
// Near sizes share a winner: up to 64 those up to the same power of two, which stream the weight alike;
// beyond, those up to the same eighth between two powers. (Whole powers there gave 128 rows what had won at
// 72, at half the speed.)
Key class_key(const Gemm& g, const Place& place, bool library_only) {
  const auto up = [](std::int64_t x) {
    std::int64_t p = 1;
    while (p < x) p *= 2;
    return p;
  };
  const auto eighths = [&](std::int64_t x) {
    const std::int64_t step = x <= 64 ? up(x) : up(x) / 16;
    return (x + step - 1) / step * step;
  };
  return {traits_of(g, place, library_only), eighths(g.m), eighths(g.n), up(g.k), -1, -1, -1, 0, 0};
}

struct Tables {
  std::shared_mutex mutex;
  std::map<Key, Contender> contenders;
  std::map<Key, Way> winners;
};
Tables& tables() {
  static Tables t;
  return t;
}

cudaError_t run(const Gemm& g, const Contender& contender, const Place& place) {
  switch (contender.way.kind) {
    case Way::Kind::sm90:
      return launch_sm90(g, contender.way.tile, multiprocessors(place.device), place.stream);
    case Way::Kind::mma:
      return launch_mma(g, place.stream);
    case Way::Kind::library:
      break;
  }
  if (contender.product->run(g, contender.way.algorithm, place.workspace, place.stream) !=
      CUBLAS_STATUS_SUCCESS)
    return launch_mma(g, place.stream);
  return g.bias ? launch_bias_add(g.c, g.ldc, g.out, g.bias, g.b.type, g.m, g.n, place.stream) : cudaSuccess;
}

bool aligned_output(const Gemm& g) {
  return reinterpret_cast<std::uintptr_t>(g.c) % 16 == 0 &&
         g.ldc * static_cast<std::int64_t>(bytes_of(g.out)) % 16 == 0;
}

// The library may be asked: it is there, nothing ambient bends it, and every line starts on 16 bytes.
bool library_may(const Gemm& g) {
  return cublaslt().reason.empty() && cublaslt_ambient_text() == nullptr && aligned16(g.a) &&
         aligned16(g.b) && aligned_output(g) && g.k > 0;
}

std::vector<LtCandidate> admitted(const LtProduct& product, std::size_t workspace_bytes) {
  constexpr int kAsk = 8;
  if (!product) return {};
  std::vector<LtCandidate> found =
      product.candidates(true, std::min(workspace_bytes, kLibraryWorkspace), kAsk);
  std::erase_if(found, [](const LtCandidate& c) { return !c.admitted(); });
  return found;
}

// Our wgmma kernels may be asked.
bool copy_engine_may(const Gemm& g) {
  constexpr std::int64_t kTensorMapLimit = std::numeric_limits<std::int32_t>::max();
  return aligned16(g.a) && aligned16(g.b) && g.k > 0 && std::max({g.m, g.n, g.k}) < kTensorMapLimit &&
         sm90_available();
}

// Every way that can serve the product, the best guess first.
std::vector<Contender> ways(const Gemm& g, const Place& place, bool library_only) {
  std::vector<Contender> all;
  auto own = [&](Sm90Tile tile) { all.push_back({{Way::Kind::sm90, tile, {}}, nullptr}); };
  const bool copy_engine = copy_engine_may(g);
  const bool few_rows = g.m <= 64 && g.a.k_contiguous;
  // Streaming a large weight past a few rows is where our narrow tile is within a percent of the best there
  // is.
  const bool narrow_first = few_rows && g.b.k_contiguous && g.n >= 128 * multiprocessors(place.device);
  if (!library_only && copy_engine && narrow_first) own(Sm90Tile::narrow128);
  if (library_may(g)) {
    auto product = std::make_shared<const LtProduct>(g);
    for (const LtCandidate& c : admitted(*product, place.workspace_bytes))
      all.push_back({{Way::Kind::library, Sm90Tile::wide, c}, product});
  }
  if (!library_only && copy_engine && !narrow_first) {
    own(few_rows ? Sm90Tile::narrow32 : Sm90Tile::wide);
    // A chain is a wait for one product after the other: where all tiles run at once, narrow ones wait least.
    const auto at_once = [&](std::int64_t rows, std::int64_t columns) {
      return (g.m + rows - 1) / rows * ((g.n + columns - 1) / columns) <= multiprocessors(place.device);
    };
    if (few_rows && !g.b.k_contiguous) own(Sm90Tile::narrow64), own(Sm90Tile::side32);
    if (!few_rows && g.a.k_contiguous) {
      own(Sm90Tile::square);
      if (at_once(128, 32)) own(Sm90Tile::tall32);
      if (at_once(64, 32)) own(Sm90Tile::narrow32);
      if (!g.b.k_contiguous && at_once(64, 64)) own(Sm90Tile::stacked64);
      if (!g.b.k_contiguous && at_once(64, 128)) own(Sm90Tile::stacked128);
    }
  }
  if (all.empty()) all.push_back({});
  return all;
}

bool capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) == cudaSuccess) return status != cudaStreamCaptureStatusNone;
  cudaGetLastError();  // the default stream while another one captures: nothing may be timed either
  return true;
}

// Stacked pairs read the least from L2. Products that live on L2 leave the GPU its clock; behind something
// hungrier it is down by a quarter, and L2 with it: on an H200 d_hidden of 256 rows went from 0.50 to 0.61 ms
// with the library's favourite, from 0.51 to 0.56 with such pairs. They win what is nearly even. (Side pairs,
// for fewer rows, do not gain by it: 0.30 ms against 0.28 at four.)
bool spares_l2(const Way& way) {
  const bool stacked = way.tile == Sm90Tile::stacked64 || way.tile == Sm90Tile::stacked128;
  return way.kind == Way::Kind::sm90 && stacked;
}

// Runs every contender on the call's own operands and returns the fastest. Rounds are interleaved, so that a clock
// that moves moves for all, and medians count; within a round the GPU never rests, as it will not in use:
// what is fastest after a pause need not be so at the clock that full load leaves. Those far behind leave
// after their first runs.
std::size_t fastest(const Gemm& g, const std::vector<Contender>& contenders, const Place& place) {
  constexpr float kLong = 4;  // ms; the longer a run, the less its time scatters
  constexpr float kNearlyEven = 0.96f;
  constexpr float kFarBehind = 1.3f, kFailed = std::numeric_limits<float>::max();
  struct Events {
    cudaEvent_t begin = nullptr, end = nullptr;
    Events() { cudaEventCreate(&begin), cudaEventCreate(&end); }
    ~Events() { cudaEventDestroy(begin), cudaEventDestroy(end); }
    Events(const Events&) = delete;
    Events& operator=(const Events&) = delete;
  };
  std::vector<Events> events(contenders.size());
  std::vector<float> estimates(contenders.size(), 1.0f);
  // One run's time of every contender, in ms, behind another one of the same contender: without that the time of the
  // library's launch counted too, 20 us of 300, and so did what the contender before had left behind.
  const auto round = [&] {
    std::vector<int> repeats(contenders.size(), 0);
    for (std::size_t i = 0; i < contenders.size(); ++i) {
      if (estimates[i] == kFailed) continue;
      const int wanted = std::clamp(static_cast<int>(0.3f / estimates[i]), 1, 20);
      cudaError_t error = run(g, contenders[i], place);
      cudaEventRecord(events[i].begin, place.stream);
      for (int r = 0; r < wanted && error == cudaSuccess; ++r) error = run(g, contenders[i], place);
      cudaEventRecord(events[i].end, place.stream);
      if (error == cudaSuccess) repeats[i] = wanted;
    }
    std::vector<float> times(contenders.size(), kFailed);
    for (std::size_t i = 0; i < contenders.size(); ++i) {
      float ms = 0;
      if (repeats[i] > 0 && cudaEventSynchronize(events[i].end) == cudaSuccess &&
          cudaEventElapsedTime(&ms, events[i].begin, events[i].end) == cudaSuccess)
        times[i] = std::max(ms, 1e-4f) / static_cast<float>(repeats[i]);
    }
    cudaGetLastError();
    return times;
  };
  for (int look = 0; look < 2; ++look) estimates = round();  // the first loads the kernels
  const float best = *std::min_element(estimates.begin(), estimates.end());
  for (float& e : estimates)
    if (e > kFarBehind * best) e = kFailed;
  std::vector<std::vector<float>> times(contenders.size());
  const int rounds = best < kLong ? 7 : 3;
  for (int r = 0; r < rounds; ++r) {
    const std::vector<float> of_round = round();
    for (std::size_t i = 0; i < contenders.size(); ++i) times[i].push_back(of_round[i]);
  }
  std::size_t winner = 0;
  float least = kFailed;
  for (std::size_t i = 0; i < contenders.size(); ++i) {
    const auto median = times[i].begin() + rounds / 2;
    std::nth_element(times[i].begin(), median, times[i].end());
    if (const float ms = *median * (spares_l2(contenders[i].way) ? kNearlyEven : 1); ms < least)
      winner = i, least = ms;
  }
  return winner;
}

bool same_way(const Way& a, const Way& b) {
  if (a.kind != b.kind) return false;
  if (a.kind == Way::Kind::sm90) return a.tile == b.tile;
  const LtCandidate &x = a.algorithm, &y = b.algorithm;
  return a.kind == Way::Kind::mma ||
         (x.tile == y.tile && x.stages == y.stages && x.swizzle == y.swizzle && x.cluster == y.cluster &&
          x.inner == y.inner && x.custom == y.custom && x.workspace == y.workspace);
}

Contender contender_for(const Gemm& g, const Place& place, bool library_only) {
  Tables& t = tables();
  const Key key = size_key(g, place, library_only);
  {
    std::shared_lock lock(t.mutex);
    if (auto at = t.contenders.find(key); at != t.contenders.end()) return at->second;
  }
  const std::vector<Contender> contenders = ways(g, place, library_only);
  const Key shared_by = class_key(g, place, library_only);
  const Contender* chosen = nullptr;
  Contender adapted;
  {
    std::shared_lock lock(t.mutex);
    if (auto at = t.winners.find(shared_by); at != t.winners.end()) {
      for (const Contender& p : contenders)
        if (same_way(p.way, at->second)) chosen = &p;
      if (chosen == nullptr && at->second.kind == Way::Kind::library &&
          contenders.front().way.kind == Way::Kind::library &&
          contenders.front().product->fits(at->second.algorithm)) {
        adapted = {at->second, contenders.front().product};
        chosen = &adapted;
      }
      if (chosen == nullptr) chosen = &contenders.front();
    }
  }
  if (chosen == nullptr && contenders.size() > 1 && capturing(place.stream)) return contenders.front();
  const Contender contender =
      chosen != nullptr ? *chosen : contenders[contenders.size() > 1 ? fastest(g, contenders, place) : 0];
  constexpr std::size_t kManySizes = 4096;
  std::unique_lock lock(t.mutex);
  if (t.contenders.size() >= kManySizes) t.contenders.clear();
  t.winners.try_emplace(shared_by, contender.way);
  return t.contenders.try_emplace(key, contender).first->second;
}

cudaError_t launch(const Gemm& g, const Place& place, bool library_only) {
  if (g.m == 0 || g.n == 0) return cudaSuccess;
  return run(g, contender_for(g, place, library_only), place);
}

}  // namespace

int multiprocessors(int device) {
  static std::array<std::atomic<int>, 64> counts{};
  std::atomic<int>& count = counts[static_cast<std::size_t>(device) % counts.size()];
  if (count == 0) {
    int n = 0;
    cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device);
    count = n;
  }
  return count;
}

cudaError_t launch_fastest(const Gemm& g, int device, void* workspace, std::size_t workspace_bytes,
                           cudaStream_t stream) {
  return launch(g, {device, workspace, workspace_bytes, stream}, false);
}
cudaError_t launch_library(const Gemm& g, int device, void* workspace, std::size_t workspace_bytes,
                           cudaStream_t stream) {
  return launch(g, {device, workspace, workspace_bytes, stream}, true);
}

cudaError_t launch_ranges(const Gemm& g, int device, void* workspace, std::size_t workspace_bytes,
                          cudaStream_t stream) {
  if (!g.a.k_contiguous) return launch_fastest(g, device, workspace, workspace_bytes, stream);
  return copy_engine_may(g)
             ? launch_sm90_ranges(g, multiprocessors(device), workspace, workspace_bytes, stream)
             : launch_mma_ranges(g, stream);
}

std::size_t ranges_workspace_on(int device, const Gemm& g) {
  return g.a.k_contiguous ? ranges_workspace(g, multiprocessors(device)) : kLibraryWorkspace;
}

bool library_serves(const Gemm& g) { return library_may(g) && !admitted(LtProduct(g), 0).empty(); }

}  // namespace rlk::cuda::lm_head
