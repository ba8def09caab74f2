// The commands of rlk-dispatch, one file each. main.cpp holds the table of them.
#pragma once

#include "options.hpp"

namespace rlk::cli {

int list(const Options& options);          // list.cpp
int explain(const Options& options);       // explain.cpp
int env(const Options& options);           // env.cpp
int probe(const Options& options);         // probe.cpp
int against(const Options& options);       // against.cpp
int verify(const Options& options);        // verify.cpp
int compare(const Options& options);       // compare.cpp
int version(const Options& options);       // version.cpp
int bench(const Options& options);         // bench.cpp
int verify_model(const Options& options);  // verify_model.cpp
int trace_diff(const Options& options);    // trace_diff.cpp

// A certificate as one self-contained HTML page; report.cpp.
std::string report_page(const std::string& certificate);
// The same of a model's certificate, as rlk.verify_model writes it; model_report.cpp.
std::string model_report_page(const std::string& certificate);

}  // namespace rlk::cli
