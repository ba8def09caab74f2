// Saved ranges: a tensor a backward will read must not be overwritten before.
#pragma once

#include <string_view>
#include <utility>

#include "rlk/tensor.hpp"

namespace rlk {

// While one lives, any op that would write into the tensor's bytes fails with both names, and a backward that
// reads them runs at least at the precision that was in force where this was made, on whatever thread.
class RLK_API Saved {
 public:
  Saved() = default;
  Saved(In tensor, std::string_view name);
  Saved(Saved&& other) noexcept : id_(other.id_) { other.id_ = 0; }
  Saved& operator=(Saved&& other) noexcept {
    std::swap(id_, other.id_);
    return *this;
  }
  ~Saved();

 private:
  uint64_t id_ = 0;
};

}  // namespace rlk
