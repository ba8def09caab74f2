#include "src/arena.hpp"

#include <algorithm>
#include <cstdlib>

#include "rlk/machine.hpp"

namespace rlk {
namespace {

constexpr int32_t kPatience = 64;                    // small calls in a row after which the arena shrinks
constexpr uint64_t kSmallArena = uint64_t{1} << 20;  // never worth it

}  // namespace

Arena::~Arena() { std::free(data_); }

void Arena::resize(uint64_t bytes) noexcept {
  std::free(data_);
  data_ = allocate(bytes);
  size_ = data_ ? bytes : 0;
  small_ = 0;
  largest_ = 0;
}

void* Arena::take(uint64_t bytes) noexcept {
  if (bytes > size_) {
    resize(bytes);
  } else if (size_ > kSmallArena && bytes < size_ / 4) {
    largest_ = std::max(largest_, bytes);
    if (++small_ >= kPatience) resize(largest_);
  } else {
    small_ = 0;
    largest_ = 0;
  }
  taken_ = data_ != nullptr;
  return data_;
}

}  // namespace rlk
