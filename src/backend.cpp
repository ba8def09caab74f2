#include "src/backend.hpp"

#include <fmt/format.h>

#include "src/failure.hpp"
#include "src/host.hpp"

namespace rlk {

void Backend::probe() {
  std::call_once(probed_, [this] {
    if (!table) return;
    if (!table->devices) {
      devices_.push_back({kDLCPU, 0, 0, "cpu"});
      return;
    }
    rlk_device found[64] = {};
    char reason[512] = "";
    const int32_t n = table->devices(found, 64, reason, sizeof reason);
    reason[sizeof reason - 1] = '\0';
    for (int32_t i = 0; i < n && i < 64; ++i) devices_.push_back(found[i]);
    if (devices_.empty()) no_device_reason_ = reason[0] ? reason : "no device";
  });
}

const std::vector<rlk_device>& Backend::devices() {
  probe();
  return devices_;
}

Backend::State Backend::state() {
  if (!table) return fixed_state;
  probe();
  if (devices_.empty()) return no_device;
  return active_.load(std::memory_order_acquire) ? active : ready;
}

std::string Backend::reason() {
  if (!table) return fixed_reason;
  probe();
  return no_device_reason_;
}

const rlk_device_services* Backend::services() const noexcept {
  return table && table->struct_size >= sizeof(rlk_backend) ? table->services : nullptr;
}

Status Backend::activate() {
  std::call_once(activated_once_, [this] {
    if (table->activate && table->activate(&host()) != RLK_OK)
      activation_ = Status(RLK_BACKEND_ERROR,
                           fmt::format("backend '{}' could not be activated: {}", name, failure_text()));
    else
      active_.store(true, std::memory_order_release);
  });
  return activation_;
}

}  // namespace rlk
