// The few lines of JSON writing the library needs.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>

#include "rlk/printable.hpp"

namespace rlk {

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
    else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f)
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
    if (!body_.empty()) body_ += ", ";
    body_.append(json_string(key)).append(": ").append(value);
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
    if (!body_.empty()) body_ += ", ";
    body_.append(value);
    return *this;
  }
  JsonArray& text(std::string_view value) { return raw(json_string(value)); }
  std::string str() const { return "[" + body_ + "]"; }

 private:
  std::string body_;
};

}  // namespace rlk
