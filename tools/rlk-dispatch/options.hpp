// Everything the command line can say, and the exit codes that answer it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace rlk::cli {

enum Exit : int {
  kGood = 0,
  kVerificationFailed = 1,
  kUsage = 2,  // usage or configuration
  kNoImplementation = 3,
  kPluginFailed = 4,  // under --strict, and for --probe
  // Of trace-diff; a broken promise is kVerificationFailed.
  kDifferentArithmetic = 10,
  kDifferentSemantics = 11,
  kDifferentWeights = 12,
  kUpstreamDiffers = 13,
  kNothingInCommon = 14
};

struct Options {
  std::string what;                // --list: ops, impls, backends, plugins or env
  std::string op;                  // --explain, --verify, --bench: an op, or "*"
  std::string plugin;              // --probe
  std::string model;               // --verify-model: a name, a folder, or a certificate
  std::vector<std::string> files;  // --compare: two certificates; trace-diff: two traces

  std::string device = "cpu";           // "cuda" or "cuda:1"
  std::string dtype;                    // of every argument that can have it
  std::vector<std::string> shapes;      // "hidden=512x4100", "positions=16:int64"
  std::vector<std::string> attributes;  // "pairing=half"
  std::vector<std::string> policy;      // "golden", "deterministic", "backward", "arithmetic=fma64"

  std::string implementation;  // --verify, --bench: only this one
  std::string case_name;       // --verify: only this case
  std::string transform;       // --verify: only this transform
  uint64_t seed = 1;
  std::string budget = "normal";
  std::string certificate;  // --verify: where to write what was proved; trace-diff: what was found
  std::string mutants;      // --verify: a plugin of deliberate errors that must be caught
  std::string report;       // --verify, --bench: where to write an HTML page

  std::string peer;                // --verify-model: torch
  std::vector<std::string> ranks;  // --verify-model: degrees to try too
  bool replay = false;             // --verify-model: every call again on the CPU

  std::string against;  // --verify OP: a dump of another machine's call to replay

  bool json = false;
  bool strict = false;
};

}  // namespace rlk::cli
