// Reading certificates back, for who relies on them.
#pragma once

#include <string>
#include <string_view>

#include "rlk/status.hpp"

namespace rlk::harness {

constexpr int kCertificateSchema = 2;  // moves when a member changes its meaning or goes away

// "sha256:" and the SHA-256 of the text up to its member "digest", without white space outside strings.
std::string certificate_digest(std::string_view text);

}  // namespace rlk::harness
