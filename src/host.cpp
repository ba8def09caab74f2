#include "src/host.hpp"

#include "src/failure.hpp"
#include "src/log.hpp"
#include "src/machine.hpp"
#include "src/threads.hpp"

namespace rlk {

const rlk_host& host() {
  static const rlk_host services = {
      sizeof(rlk_host),
      RLK_ABI_MINOR,
      [](int32_t code, const char* text) noexcept { return set_failure(code, text); },
      [](int32_t level, const char* text) noexcept {
        if (text) log(static_cast<LogLevel>(level), text);
      },
      [](int32_t threads, int64_t n, void (*body)(void*, int64_t), void* context) {
        parallel_for(threads, n, body, context);
      },
      []() noexcept { return cpu_level(); }};
  return services;
}

}  // namespace rlk
