// A backend as it stands in this process: its tables, its devices, and what became of it.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "rlk/plugin.h"
#include "rlk/status.hpp"
#include "src/once.hpp"

namespace rlk {

// Why a backend cannot run anything, and the smallest change that would mend it.
struct Outage {
  std::string problem, remedy;
};

// A backend in one of the states `--list` shows.
struct Backend {
  enum State { absent, refused, load_failed, no_device, ready, active };

  std::string name;
  std::string origin;  // "built in" or the plugin's path
  const rlk_backend* table = nullptr;
  uint64_t build_id = 0;
  bool built = true;  // false: a known backend this build left out

  // Asks for devices once, activates once; both answer from then on.
  State state();
  std::string reason();
  // As the backend listed them; current() adds what RLK_CPU lets a CPU be now.
  const std::vector<rlk_device>& devices();
  static rlk_device current(const rlk_device& device);
  Status activate();
  // Memory and streams of its devices; null when it offers none.
  const rlk_device_services* services() const noexcept;

  // Set by whoever could not load it.
  State fixed_state = ready;
  std::string fixed_reason;

 private:
  friend const Outage& outage_of(Backend& backend);
  void probe();
  Once probed_, activated_once_, outage_once_;
  Outage outage_;
  std::vector<rlk_device> devices_;
  std::string no_device_reason_;
  Status activation_;
  std::atomic<bool> active_{false};
};

}  // namespace rlk
