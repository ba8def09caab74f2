// Which bytes a tensor touches, and whether two tensors share any.
#pragma once

#include <cstdint>

#include "rlk/plugin.h"

namespace rlk {

// Pinned host memory is CPU memory to us, managed memory belongs to the GPU.
DLDevice normal(const DLDevice& device) noexcept;

// Rows at equal distances, of which each tensor has only its own part: the heads of q and of k in one buffer
// of packed rows. 0: the two have no such form.
struct Windows {
  int64_t period = 0, a = 0, b = 0;  // bytes from row to row, and of each one's part of a row
  bool apart(uintptr_t a_low, uintptr_t b_low) const noexcept {
    if (period == 0) return false;
    const auto p = static_cast<uintptr_t>(period);
    const auto between =
        static_cast<int64_t>(b_low >= a_low ? (b_low - a_low) % p : (p - (a_low - b_low) % p) % p);
    return between >= a && period - between >= b;
  }
};

class Footprint {
 public:
  Footprint() = default;                                // no bytes
  explicit Footprint(const DLTensor& tensor) noexcept;  // one that check_call() accepts, with data
  Footprint(const void* data, uint64_t bytes, DLDevice device) noexcept;

  bool empty() const noexcept { return low_ == high_; }
  uintptr_t low() const noexcept { return low_; }
  uintptr_t high() const noexcept { return high_; }  // one past the last byte
  DLDevice device() const noexcept { return device_; }
  bool same_memory(const Footprint& other) const noexcept {
    return device_.device_type == other.device_.device_type && device_.device_id == other.device_.device_id;
  }
  bool meets(const Footprint& other) const noexcept;
  // The form in which the two may lie between one another, best the one that keeps them apart where they are.
  Windows windows(const Footprint& other) const noexcept;

 private:
  int64_t part_of_row(int64_t period) const noexcept;

  uintptr_t low_ = 0, high_ = 0;
  DLDevice device_{kDLCPU, 0};
  int32_t rank_ = 0;                                            // dimensions of more than one element
  int64_t element_ = 0;                                         // bytes
  int64_t step_[RLK_MAX_RANK] = {}, count_[RLK_MAX_RANK] = {};  // bytes, made positive
};

// Whether two tensors have the same elements at the same distances, so that at one address they are the very
// same.
bool same_layout(const DLTensor& a, const DLTensor& b) noexcept;

}  // namespace rlk
