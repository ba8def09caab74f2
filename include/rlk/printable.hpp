// Text that may go to a terminal, a log or a page: one line, valid UTF-8, nothing that a terminal obeys.
//
// What callers, plugins and file names say is shown through here: a byte that must not be printed becomes
// \xNN. Everything else stays as it is, so that doing it twice changes nothing.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace rlk {

// Length of the UTF-8 sequence that starts here, 0 when it is none.
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

// The character a text starts with: how many bytes it has, and whether they may be printed.
struct Character {
  std::size_t bytes;
  bool plain;
  std::size_t shown() const noexcept { return plain ? bytes : 4 * bytes; }
};
inline Character first_character(std::string_view text) noexcept {
  const std::size_t n = utf8_length(text);
  if (n == 0) return {1, false};
  const auto byte = [&](std::size_t i) { return static_cast<unsigned>(static_cast<unsigned char>(text[i])); };
  if (n == 1) return {1, byte(0) >= 0x20 && byte(0) != 0x7f};
  // The second set of control characters, and what breaks a line or turns the direction of writing.
  if (n == 2) return {2, !(byte(0) == 0xc2 && byte(1) < 0xa0) && !(byte(0) == 0xd8 && byte(1) == 0x9c)};
  if (n == 3 && byte(0) == 0xe2) {
    const bool breaks = byte(1) == 0x80 && byte(2) >= 0xa8 && byte(2) <= 0xae;
    const bool turns = (byte(1) == 0x80 && (byte(2) == 0x8e || byte(2) == 0x8f)) ||
                       (byte(1) == 0x81 && byte(2) >= 0xa6 && byte(2) <= 0xa9);
    return {3, !breaks && !turns};
  }
  return {n, true};
}

// Writes the character as it may be shown: shown() bytes.
inline void show_character(std::string_view text, Character c, char* out) noexcept {
  constexpr char kDigits[] = "0123456789abcdef";
  for (std::size_t i = 0; i < c.bytes; ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (c.plain) {
      *out++ = text[i];
      continue;
    }
    *out++ = '\\', *out++ = 'x', *out++ = kDigits[byte >> 4], *out++ = kDigits[byte & 15];
  }
}

// Into a buffer, with a terminating zero; needs no memory. A text that does not fit loses its middle: it
// begins with what it is about and ends with the reason. `text` may be what the buffer holds.
inline void print_into(char* out, std::size_t capacity, std::string_view text) noexcept {
  constexpr std::string_view kGap = " ... ";
  std::size_t whole = 0;
  for (std::string_view rest = text; !rest.empty();) {
    const Character c = first_character(rest);
    whole += c.shown();
    rest.remove_prefix(c.bytes);
  }
  const bool fits = whole < capacity;
  const std::size_t room = capacity - 1, head = fits ? room : room / 3;
  std::size_t at = 0;
  bool cut = false;
  for (std::string_view rest = text; !rest.empty();) {
    const Character c = first_character(rest);
    if (!fits && !cut && at + c.shown() > head) {
      cut = true;
      // What follows is as much as there is room for, and whole characters.
      std::size_t left = whole - at;
      while (left > room - at - kGap.size()) {
        const Character skipped = first_character(rest);
        left -= skipped.shown();
        rest.remove_prefix(skipped.bytes);
      }
      for (const char g : kGap) out[at++] = g;
      continue;
    }
    show_character(rest, c, out + at);
    at += c.shown();
    rest.remove_prefix(c.bytes);
  }
  out[at] = '\0';
}

inline std::string printable(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const Character c = first_character(text);
    out.resize(out.size() + c.shown());
    show_character(text, c, out.data() + out.size() - c.shown());
    text.remove_prefix(c.bytes);
  }
  return out;
}

inline bool is_printable(std::string_view text) noexcept {
  while (!text.empty()) {
    const Character c = first_character(text);
    if (!c.plain) return false;
    text.remove_prefix(c.bytes);
  }
  return true;
}

}  // namespace rlk
