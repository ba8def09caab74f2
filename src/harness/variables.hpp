// The environment variables that a plugin may ask for: every name of the usual form among the texts in its
// file. What is read need not be known beforehand.
#pragma once

#include <string>
#include <vector>

namespace rlk::harness {

// Names like MY_LIBRARY_MODE, without those that decide how programs start and where files are. Nothing when
// the file cannot be read.
std::vector<std::string> variables_in(const std::string& file);

}  // namespace rlk::harness
