// Memory that shows every stray access: it ends (or begins) at an unmapped page, and can be made read-only.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>

namespace differential {

class Guarded {
 public:
  Guarded() = default;
  // at_end: the byte behind the last one is unmapped, otherwise the one before the first. Filled with 0xff,
  // which is a NaN in every floating type.
  Guarded(std::size_t bytes, bool at_end) : pages_((bytes + kPage - 1) / kPage * kPage) {
    void* whole = mmap(nullptr, pages_ + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (whole == MAP_FAILED) throw std::bad_alloc();
    whole_ = static_cast<std::byte*>(whole);
    writable();
    fill();
    data_ = whole_ + kPage + (at_end ? pages_ - bytes : 0);
  }
  Guarded(Guarded&& other) noexcept { *this = std::move(other); }
  Guarded& operator=(Guarded&& other) noexcept {
    std::swap(whole_, other.whole_);
    std::swap(pages_, other.pages_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~Guarded() {
    if (whole_) munmap(whole_, pages_ + 2 * kPage);
  }

  std::byte* data() const { return data_; }
  void fill() const {
    if (pages_) std::memset(whole_ + kPage, 0xff, pages_);
  }
  void writable() const { protect(PROT_READ | PROT_WRITE); }
  void read_only() const { protect(PROT_READ); }
  // The mapped bytes: those of the tensor and those between them and the pages' bounds.
  const std::byte* begin() const { return whole_ + kPage; }
  std::size_t size() const { return pages_; }

 private:
  static constexpr std::size_t kPage = 4096;
  void protect(int how) const {
    if (pages_ && mprotect(whole_ + kPage, pages_, how) != 0) throw std::bad_alloc();
  }
  std::byte* whole_ = nullptr;
  std::size_t pages_ = 0;
  std::byte* data_ = nullptr;
};

}  // namespace differential
