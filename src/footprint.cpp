#include "src/footprint.hpp"

#include <initializer_list>

namespace rlk {
namespace {

int64_t element_bytes(const DLTensor& t) noexcept { return (int64_t{t.dtype.bits} * t.dtype.lanes + 7) / 8; }

}  // namespace

DLDevice normal(const DLDevice& d) noexcept {
  if (d.device_type == kDLCUDAHost || d.device_type == kDLROCMHost) return {kDLCPU, 0};
  if (d.device_type == kDLCUDAManaged) return {kDLCUDA, d.device_id};
  if (d.device_type == kDLCPU) return {kDLCPU, 0};
  return d;
}

Footprint::Footprint(const void* data, uint64_t bytes, DLDevice device) noexcept
    : low_(reinterpret_cast<uintptr_t>(data)),
      high_(low_ + bytes),
      device_(normal(device)),
      element_(static_cast<int64_t>(bytes)) {}

Footprint::Footprint(const DLTensor& t) noexcept : device_(normal(t.device)), element_(element_bytes(t)) {
  low_ = high_ = reinterpret_cast<uintptr_t>(t.data) + t.byte_offset;
  for (int32_t i = 0; i < t.ndim; ++i)
    if (t.shape[i] == 0) return;
  int64_t dense = element_;
  for (int32_t i = t.ndim; i-- > 0;) {
    const int64_t count = t.shape[i], step = t.strides ? t.strides[i] * element_ : dense;
    dense *= count;
    if (count == 1 || step == 0) continue;
    const int64_t reach = (count - 1) * step;
    if (reach < 0)
      low_ += static_cast<uintptr_t>(reach);
    else
      high_ += static_cast<uintptr_t>(reach);
    step_[rank_] = step < 0 ? -step : step;
    count_[rank_++] = count;
  }
  high_ += static_cast<uintptr_t>(element_);
}

// How much of every `period` bytes it touches: what its smaller steps reach, if its larger ones are whole
// multiples. 0: they are not.
int64_t Footprint::part_of_row(int64_t period) const noexcept {
  int64_t part = element_;
  for (int32_t i = 0; i < rank_; ++i) {
    if (step_[i] >= period) {
      if (step_[i] % period) return 0;
    } else {
      part += step_[i] * (count_[i] - 1);
    }
  }
  return part <= period ? part : 0;
}

Windows Footprint::windows(const Footprint& other) const noexcept {
  Windows found;
  for (const Footprint* f : {this, &other})
    for (int32_t i = 0; i < f->rank_; ++i) {
      const int64_t period = f->step_[i], a = part_of_row(period), b = other.part_of_row(period);
      if (a == 0 || b == 0 || a > period - b) continue;
      const Windows w{period, a, b};
      if (w.apart(low_, other.low_)) return w;
      if (found.period == 0) found = w;
    }
  return found;
}

bool Footprint::meets(const Footprint& other) const noexcept {
  if (empty() || other.empty() || !same_memory(other)) return false;
  if (low_ >= other.high_ || other.low_ >= high_) return false;
  return !windows(other).apart(low_, other.low_);
}

bool same_layout(const DLTensor& a, const DLTensor& b) noexcept {
  if (a.ndim != b.ndim || element_bytes(a) != element_bytes(b)) return false;
  int64_t dense = 1;
  for (int32_t i = a.ndim; i-- > 0;) {
    if (a.shape[i] != b.shape[i]) return false;
    if (a.shape[i] > 1 && (a.strides ? a.strides[i] : dense) != (b.strides ? b.strides[i] : dense))
      return false;
    dense *= a.shape[i];
  }
  return true;
}

}  // namespace rlk
