// SHA-256, for digests that sha256sum gives too.
#pragma once

#include <string>
#include <string_view>

namespace rlk {

// 64 lower-case hexadecimal digits.
std::string sha256(std::string_view bytes);

}  // namespace rlk
