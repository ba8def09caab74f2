#include "onednn/lm_head/finish.hpp"

#include "onednn/wide.hpp"
#include "rlk/half.hpp"

namespace rlk::onednn {
namespace {

RLK_WIDE void finish_f32(const float* sums, std::int64_t count, float* out) {
  for (std::int64_t j = 0; j < count; ++j) out[j] = canonical(sums[j]);
}
RLK_WIDE void finish_f32_bias(const float* sums, std::int64_t count, const float* bias, float* out) {
  for (std::int64_t j = 0; j < count; ++j) out[j] = canonical(sums[j] + bias[j]);
}
RLK_WIDE void finish_bf16(const float* sums, std::int64_t count, std::uint16_t* out) {
  for (std::int64_t j = 0; j < count; ++j) out[j] = float_to_bf16(sums[j]);
}
RLK_WIDE void finish_bf16_bias(const float* sums, std::int64_t count, const float* bias, std::uint16_t* out) {
  for (std::int64_t j = 0; j < count; ++j)
    out[j] = float_to_bf16(bf16_to_float(float_to_bf16(sums[j])) + bias[j]);
}
void finish_f16(const float* sums, std::int64_t count, const float* bias, std::uint16_t* out) {
  for (std::int64_t j = 0; j < count; ++j) {
    out[j] = float_to_f16(sums[j]);
    if (bias != nullptr) out[j] = float_to_f16(f16_to_float(out[j]) + bias[j]);
  }
}

}  // namespace

void finish(const float* sums, std::int64_t count, const float* bias, DType type, void* out) {
  if (type == DType::f32) {
    auto* to = static_cast<float*>(out);
    return bias != nullptr ? finish_f32_bias(sums, count, bias, to) : finish_f32(sums, count, to);
  }
  auto* to = static_cast<std::uint16_t*>(out);
  if (type == DType::f16) return finish_f16(sums, count, bias, to);
  return bias != nullptr ? finish_bf16_bias(sums, count, bias, to) : finish_bf16(sums, count, to);
}

}  // namespace rlk::onednn
