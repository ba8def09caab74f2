// What the HTML pages are made of.
#pragma once

#include <string>

#include "library.hpp"

namespace rlk::cli {

// The pages' style element.
extern const char* const kStyle;

// The beginning of a page, up to its first heading.
std::string page_head(const std::string& title);

// Text as HTML shows it.
std::string escaped(const std::string& text);

std::string number(double x, const char* format = "%.3g");

// Infinities and NaN are words in a certificate.
double real(const Json& j);

}  // namespace rlk::cli
