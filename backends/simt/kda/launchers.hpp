// The seam between a GPU backend's host code and its device code, which different compilers build: sizes of
// workspaces, and launches on a stream of a device. A launch returns the error's text, or null.
#pragma once

#include "arithmetic/kda/problem.hpp"

namespace rlk::kda {

struct Launchers {
  std::int64_t (*forward_bytes)(const Problem& p);
  std::int64_t (*backward_bytes)(const Problem& p);
  std::int64_t (*gate_backward_bytes)(const Problem& p);
  const char* (*forward)(const Problem& p, void* workspace, void* stream, int device);
  const char* (*backward)(const Problem& p, void* workspace, void* stream, int device);
  const char* (*decode)(const Problem& p, void* workspace, void* stream, int device);
  const char* (*gate)(const Problem& p, void* workspace, void* stream, int device);
  const char* (*gate_backward)(const Problem& p, void* workspace, void* stream, int device);
};

}  // namespace rlk::kda
