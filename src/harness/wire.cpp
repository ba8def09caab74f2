#include "src/harness/wire.hpp"

#include <fmt/format.h>

#include <charconv>
#include <cstdlib>

namespace rlk::harness {

void LineWriter::word(std::string_view raw) {
  if (!text_.empty()) text_ += '\t';
  for (const char c : raw) {
    if (c == '\t')
      text_ += "\\t";
    else if (c == '\n')
      text_ += "\\n";
    else if (c == '\\')
      text_ += "\\\\";
    else
      text_ += c;
  }
}

// Hexadecimal: every value survives, infinities and NaN too.
void LineWriter::put(double value) { word(fmt::format("{:a}", value)); }

std::string LineReader::word() {
  if (ended_) {
    good_ = false;
    return {};
  }
  const auto tab = rest_.find('\t');
  const std::string_view raw = rest_.substr(0, tab);
  ended_ = tab == rest_.npos;
  if (!ended_) rest_.remove_prefix(tab + 1);
  std::string out;
  for (std::size_t i = 0; i < raw.size(); ++i) {
    if (raw[i] != '\\' || i + 1 == raw.size()) {
      out += raw[i];
      continue;
    }
    const char c = raw[++i];
    out += c == 't' ? '\t' : c == 'n' ? '\n' : c;
  }
  return out;
}

int64_t LineReader::integer() {
  const std::string text = word();
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) good_ = false;
  return value;
}

void LineReader::get(double& value) {
  const std::string text = word();
  char* end = nullptr;
  value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end) good_ = false;
}

}  // namespace rlk::harness
