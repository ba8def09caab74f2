// What is known at run time: ops, backends with their states, implementations in order. Readers see immutable
// snapshots; registering publishes a new one and moves the epoch.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "rlk/plugin.h"
#include "rlk/status.hpp"
#include "src/override.hpp"

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
  const std::vector<rlk_device>& devices();
  // Empty texts for a usable one. Put into words once: candidates hold views of it.
  const Outage& outage();
  Status activate();
  // Memory and streams of its devices; null when it offers none.
  const rlk_device_services* services() const noexcept;

  // Set by whoever could not load it.
  State fixed_state = ready;
  std::string fixed_reason;

 private:
  void probe();
  std::once_flag probed_, activated_once_, outage_once_;
  Outage outage_;
  std::vector<rlk_device> devices_;
  std::string no_device_reason_;
  Status activation_;
  std::atomic<bool> active_{false};
};

struct ImplementationEntry {
  const rlk_implementation* implementation;
  Backend* backend;
};

struct OpEntry {
  const rlk_op_schema* schema;
  std::vector<ImplementationEntry> implementations;  // sorted by (priority descending, id)
};

struct Snapshot {
  std::vector<OpEntry> ops;  // positions never change: an op's index is stable for the process
  std::vector<std::shared_ptr<Backend>> backends;
  std::unordered_map<std::string_view, int32_t> op_index;  // names and aliases
  Override environment;                                    // RLK_BACKEND
  std::vector<std::string> plugin_notes;                   // files seen and passed over, with reasons
  KnownNames names() const;
};

// The current snapshot; the first call initialises the library: built-in ops and backend, environment,
// plugins.
const Snapshot& snapshot();

// Adds a backend (its ops, then its implementations) or refuses it whole, naming both origins of a clash.
Status register_backend(const rlk_backend* table, std::string origin);

// Re-reads the environment into a new snapshot.
Status reload_environment();

// Resolved calls are valid while this value stands: it moves when anything is registered or reloaded, and is
// odd while a saved range lives (a bound call must then check what it writes).
extern std::atomic<uint64_t> gate_value;
inline const std::atomic<uint64_t>& gate() { return gate_value; }
void set_saved_live(bool live);
// Something outside the registry that resolutions depend on has changed.
void move_gate();

// Services handed to implementations.
const rlk_host& host();

}  // namespace rlk
