// Memory that tells: pages before and behind an array that nobody may touch, and read arguments in pages that
// nobody may write. A touch is recorded, the page is opened and the access goes on, so that what is tested
// lives and the failure can say which argument it was.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace rlk::harness {

class WatchedMemory {
 public:
  // Where the body lies: away from both ends, or flush with the page that must not be touched.
  enum Edge : uint8_t { apart, end, start };

  // `offset`: bytes from a 256-byte boundary (apart). `alignment`: of the body's first byte, where an edge
  // decides.
  WatchedMemory(std::size_t bytes, std::size_t offset, std::size_t alignment, Edge edge);
  WatchedMemory(const WatchedMemory&) = delete;
  WatchedMemory& operator=(const WatchedMemory&) = delete;
  ~WatchedMemory();

  bool failed() const { return base_ == nullptr; }
  std::byte* body() const { return body_; }
  std::size_t bytes() const { return bytes_; }
  // Bytes around the body that can be read and written, on both sides at least kGuard where it lies apart.
  std::byte* low() const { return low_; }
  std::byte* high() const { return high_; }

  // From here on touches are watched; `read_only`: so are writes of the body.
  void watch(bool read_only);
  // Everything is open again.
  void rest();
  // What was touched since watch, in words that follow the argument's name; empty: nothing.
  std::string touched() const;

  static constexpr std::size_t kGuard = 256;
  static constexpr std::byte kFill{
      0xff};  // of everything around: a NaN in every floating type, -1 in the others

 private:
  std::byte *base_ = nullptr, *low_ = nullptr, *high_ = nullptr, *body_ = nullptr;
  std::size_t mapped_ = 0, bytes_ = 0;
  int slot_ = -1;
  bool read_only_ = false;
};

}  // namespace rlk::harness
