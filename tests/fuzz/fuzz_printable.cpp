// Any bytes, shown: one line of valid UTF-8 without control characters, the same when it is shown again, and cut
// to any size without leaving the buffer or a half character.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "rlk/printable.hpp"
#include "src/text.hpp"

namespace {

void promise(bool kept) {
  if (!kept) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const std::string shown = rlk::printable(text);
  promise(rlk::is_printable(shown));
  promise(rlk::printable(shown) == shown);
  promise(shown == text || !rlk::is_printable(text));
  for (const std::string& quoted : {rlk::quoted(text), rlk::quoted_path(text)})
    promise(rlk::is_printable(quoted) && quoted.size() < 1024);
  // A buffer of its own for each size, so that the address sanitizer sees the first byte behind it.
  for (const std::size_t capacity : {std::size_t{16}, 16 + size % 61, std::size_t{1024}}) {
    std::vector<char> buffer(capacity);
    rlk::print_into(buffer.data(), capacity, text);
    const std::size_t length = strnlen(buffer.data(), capacity);
    promise(length < capacity);
    promise(rlk::is_printable({buffer.data(), length}));
    if (shown.size() < capacity) promise(shown == buffer.data());
  }
  return 0;
}
