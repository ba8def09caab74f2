// The few lines of JSON writing the library needs.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>

namespace rlk {

// Length of the UTF-8 sequence that starts here, 0 when it is none: names and variables may hold any bytes.
inline std::size_t utf8_length(std::string_view text) noexcept {
  const auto first = static_cast<unsigned char>(text[0]);
  const std::size_t n = first < 0x80                    ? 1
                        : first >= 0xc2 && first < 0xe0 ? 2
                        : first >= 0xe0 && first < 0xf0 ? 3
                        : first >= 0xf0 && first < 0xf5 ? 4
                                                        : 0;
  if (n > text.size()) return 0;
  for (std::size_t i = 1; i < n; ++i)
    if ((static_cast<unsigned char>(text[i]) & 0xc0) != 0x80) return 0;
  const unsigned second = n > 2 ? static_cast<unsigned char>(text[1]) : 0x90;
  const bool wrong = (first == 0xe0 && second < 0xa0) || (first == 0xed && second >= 0xa0) ||
                     (first == 0xf0 && second < 0x90) || (first == 0xf4 && second >= 0x90);
  return wrong ? 0 : n;
}

inline std::string json_string(std::string_view text) {
  std::string out = "\"";
  for (; !text.empty(); text.remove_prefix(1)) {
    const char c = text[0];
    if (const std::size_t n = utf8_length(text); n != 1) {
      // A byte that is no text becomes the character of its number: readable, and always valid JSON.
      if (n == 0)
        out += fmt::format("\\u{:04x}", static_cast<unsigned>(static_cast<unsigned char>(c)));
      else
        out += text.substr(0, n), text.remove_prefix(n - 1);
      continue;
    }
    if (c == '"' || c == '\\')
      out += '\\', out += c;
    else if (c == '\n')
      out += "\\n";
    else if (c == '\t')
      out += "\\t";
    else if (static_cast<unsigned char>(c) < 0x20)
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    else
      out += c;
  }
  return out + '"';
}

// {"a": 1, ...} and [1, ...] built member by member.
class JsonObject {
 public:
  JsonObject& raw(std::string_view key, std::string_view value) {
    body_ += (body_.empty() ? "" : ", ") + json_string(key) + ": " + std::string(value);
    return *this;
  }
  JsonObject& text(std::string_view key, std::string_view value) { return raw(key, json_string(value)); }
  template <class T>
  JsonObject& number(std::string_view key, T value) {
    return raw(key, fmt::format("{}", value));
  }
  JsonObject& flag(std::string_view key, bool value) { return raw(key, value ? "true" : "false"); }
  std::string str() const { return "{" + body_ + "}"; }

 private:
  std::string body_;
};
class JsonArray {
 public:
  JsonArray& raw(std::string_view value) {
    body_ += (body_.empty() ? "" : ", ") + std::string(value);
    return *this;
  }
  JsonArray& text(std::string_view value) { return raw(json_string(value)); }
  std::string str() const { return "[" + body_ + "]"; }

 private:
  std::string body_;
};

}  // namespace rlk
