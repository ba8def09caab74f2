#include "src/machine.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <iterator>

#include "src/environment.hpp"
#include "src/text.hpp"

#if defined(__x86_64__) && defined(__linux__)
#  include <sys/syscall.h>
#  include <unistd.h>
#endif

namespace rlk {
namespace {

struct Level {
  int32_t level;
  const char* word;
  const char *lacked, *where_to_run;  // the processor has less
  const char *withheld, *how_to_get;  // RLK_CPU allows less
};
constexpr Level kLevels[] = {
    {RLK_CPU_BASELINE, "baseline", "", "", "", ""},
    {RLK_CPU_AVX2, "avx2", "needs AVX2 with FMA and F16C", "run on a processor with AVX2",
     "needs AVX2, which RLK_CPU withholds", "set RLK_CPU=avx2, or unset it"},
    {RLK_CPU_AVX512, "avx512", "needs AVX-512 (F, BW, DQ, VL)", "run on a processor with AVX-512",
     "needs AVX-512, which RLK_CPU withholds", "set RLK_CPU=avx512, or unset it"},
    {RLK_CPU_AVX512BF16, "avx512bf16", "needs AVX512-BF16", "run on a processor with AVX512-BF16",
     "needs AVX512-BF16, which RLK_CPU withholds", "set RLK_CPU=avx512bf16, or unset it"},
    {RLK_CPU_AMX, "amx", "needs AMX with bf16", "run on a processor and a system with AMX",
     "needs AMX, which RLK_CPU withholds", "set RLK_CPU=amx, or unset it"}};

// Whether the processor has what a level adds to the one before it: the features that the project compiles
// that level's files with, and that the system keeps their registers.
bool processor_has([[maybe_unused]] int32_t level) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  switch (level) {
    case RLK_CPU_AVX2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("f16c");
    case RLK_CPU_AVX512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    case RLK_CPU_AVX512BF16:
      return __builtin_cpu_supports("avx512bf16");
    case RLK_CPU_AMX:
      return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16");
    default:
      return false;
  }
#else
  return false;
#endif
}

int32_t processor_level() {
  static const int32_t level = [] {
    int32_t highest = RLK_CPU_BASELINE;
    for (const Level& l : kLevels)  // levels have no gaps
      if (l.level > RLK_CPU_BASELINE && processor_has(l.level))
        highest = l.level;
      else if (l.level > RLK_CPU_BASELINE)
        break;
    return highest;
  }();
  return level;
}

// Linux hands the tiles' registers to processes that ask for them. It is asked only where they may be used:
// with them a signal's frame grows by 8 KiB.
bool tiles_granted() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static std::atomic<bool> granted{false};
  if (!granted && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0) granted = true;
  return granted;
#else
  return false;
#endif
}

const Level* known(std::string_view word) {
  const Level* at =
      std::find_if(std::begin(kLevels), std::end(kLevels), [&](const Level& l) { return word == l.word; });
  return at == std::end(kLevels) ? nullptr : at;
}

// Whether it is RLK_CPU that keeps code of a level from running.
bool withheld(int32_t level) {
  const Level* cap = known(environment().cpu);
  return cap && cap->level < level && processor_level() >= level;
}

}  // namespace

int32_t cpu_level() {
  // A word that is none caps nothing: it is an error, under which nothing is resolved.
  const Level* cap = known(environment().cpu);
  const int32_t level = std::min(cap ? cap->level : int32_t{RLK_CPU_AMX}, processor_level());
  return level == RLK_CPU_AMX && !tiles_granted() ? int32_t{RLK_CPU_AVX512BF16} : level;
}

const char* cpu_word(int32_t level) {
  const char* word = kLevels[0].word;
  for (const Level& l : kLevels)
    if (level >= l.level) word = l.word;
  return word;
}

Status check_cpu_cap(std::string_view word) {
  if (word.empty() || known(word)) return {};
  std::vector<std::string_view> words;
  for (const Level& l : kLevels) words.emplace_back(l.word);
  return {RLK_CONFIGURATION, fmt::format("RLK_CPU: {}", unknown_name("level", word, words))};
}

rlk_verdict machine_verdict(const rlk_implementation& i, const rlk_device& device) {
  const auto refuse = [&](const char* why, const char* nearest, int32_t wanted) {
    return rlk_verdict{RLK_UNSUPPORTED, -1, why, nearest, {wanted, device.arch, 0, 0}};
  };
  if (i.min_arch && device.arch < i.min_arch) {
    if (device.type == kDLCPU)
      for (const Level& l : kLevels)
        if (l.level == i.min_arch)
          return withheld(l.level) ? refuse(l.withheld, l.how_to_get, l.level)
                                   : refuse(l.lacked, l.where_to_run, l.level);
    return refuse("needs architecture {0}, this device has {1}",
                  "run on a device of architecture {0} or later", i.min_arch);
  }
  if (i.max_arch && device.arch > i.max_arch)
    return refuse("is built for architectures up to {0}, this device has {1}",
                  "run on a device of architecture {0} or earlier", i.max_arch);
  return {RLK_OK, -1, nullptr, nullptr, {}};
}

}  // namespace rlk

int32_t rlk_cpu_level(void) { return rlk::cpu_level(); }
