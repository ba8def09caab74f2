#include "src/backend.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "rlk/printable.hpp"
#include "src/failure.hpp"
#include "src/host.hpp"
#include "src/log.hpp"
#include "src/machine.hpp"
#include "src/struct_size.hpp"

namespace rlk {

void Backend::probe() {
  if (probed_.done()) return;
  const HeldLog held;
  probed_.run([this] {
    if (!table) return;
    if (!table->devices) {
      devices_.push_back({kDLCPU, 0, 0, "cpu"});
      return;
    }
    rlk_device found[64] = {};
    char reason[512] = "";
    const int32_t n = std::clamp(table->devices(found, 64, reason, sizeof reason), 0, 64);
    reason[sizeof reason - 1] = '\0';
    std::vector<rlk_device> devices(found, found + n);
    for (rlk_device& d : devices) {
      d.name[sizeof d.name - 1] = '\0';
      const std::string given = d.name;
      print_into(d.name, sizeof d.name, given);
    }
    if (devices.empty()) no_device_reason_ = reason[0] ? printable(reason) : "no device";
    devices_ = std::move(devices);
  });
}

const std::vector<rlk_device>& Backend::devices() {
  probe();
  return devices_;
}

rlk_device Backend::current(const rlk_device& device) {
  rlk_device now = device;
  if (now.type == kDLCPU && now.arch == 0) now.arch = cpu_level();
  return now;
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
  return table && has_member(*table, &rlk_backend::services) ? table->services : nullptr;
}

Status Backend::activate() {
  if (activated_once_.done()) return activation_;
  const HeldLog held;
  activated_once_.run([this] {
    if (table->activate && table->activate(&host()) != RLK_OK)
      activation_ = Status(RLK_BACKEND_ERROR,
                           fmt::format("backend '{}' could not be activated: {}", name, failure_text()));
    else
      active_.store(true, std::memory_order_release);
  });
  return activation_;
}

}  // namespace rlk
