// The commands of rlk-dispatch, one file each. main.cpp holds the table of them.
#pragma once

#include "options.hpp"

namespace rlk::cli {

int list(const Options& options);     // list.cpp
int explain(const Options& options);  // explain.cpp
int env(const Options& options);      // env.cpp
int probe(const Options& options);    // probe.cpp
int against(const Options& options);  // against.cpp
int version(const Options& options);  // version.cpp
int bench(const Options& options);    // bench.cpp

}  // namespace rlk::cli
