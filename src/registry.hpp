// What is known at run time: ops, backends, implementations in order. Readers see immutable snapshots;
// registering publishes a new one and moves the gate.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "src/backend.hpp"
#include "src/override.hpp"

namespace rlk {

struct ImplementationEntry {
  const rlk_implementation* implementation;
  Backend* backend;
  uint64_t identity;  // of op, id and build: where a resolution's fingerprint starts
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
  Status cpu;                                              // of RLK_CPU
  std::vector<std::string> plugin_notes;                   // files seen and passed over, with reasons
  // None is ever freed: readers hold plain pointers, and those that differ are few. From the last that was built a
  // leak checker sees them all.
  const Snapshot* before = nullptr;
  KnownNames names() const;
  // A variable that makes no sense: every resolution returns it.
  const Status& misconfigured() const { return cpu ? environment.error() : cpu; }
};

// The current snapshot; the first call initialises the library: built-in ops and backend, environment,
// plugins.
const Snapshot& snapshot();

// Adds a backend (its ops, then its implementations) or refuses it whole, naming both origins of a clash.
Status register_backend(const rlk_backend* table, std::string origin);

// Re-reads the environment into a new snapshot.
Status reload_environment();

}  // namespace rlk
