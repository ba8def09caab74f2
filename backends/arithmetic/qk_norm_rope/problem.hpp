// qk_norm_rope in fp32 (arithmetic id rms32/rope32): the call as plain data, for native code and GPU kernels alike. The norm of a
// head is rms_norm's (arithmetic/rms_norm/norm.hpp), its turn rope's (arithmetic/rope/math.hpp), and between them the head is
// rounded to its dtype, as it is where the two are called in turn.
#pragma once

#include "arithmetic/fp8.hpp"
#include "arithmetic/rms_norm/norm.hpp"
#include "arithmetic/rope/math.hpp"

namespace rlk::rms32_rope32 {

using rows::Factors;
using rows::Type;

// The widest head, of values too.
inline constexpr int kMostDims = 256;

// Heads of tokens; strides count elements. Absent when data is null.
struct Place {
  void* data = nullptr;
  std::int64_t token = 0, head = 0;

  RLK_HD explicit operator bool() const { return data != nullptr; }
  // Of elements of so many bytes.
  RLK_HD void* row(std::int64_t size, std::int64_t t, std::int64_t h) const {
    return static_cast<char*>(data) + (t * token + h * head) * size;
  }
  RLK_HD void* row(Type type, std::int64_t t, std::int64_t h) const { return row(rows::size_of(type), t, h); }
};

// q, k or v: where its heads are read, where they go by token, and where by slot.
struct Part {
  std::int64_t heads = 0;
  Place x, y, cache;
  const void* weight = nullptr;
  Factors factors{};  // of an fp8 cache
};

struct Problem {
  std::int64_t tokens = 0;
  std::int32_t dims = 0, v_dims = 0, turned = 0;
  Type type = Type::f32, weight_type = Type::f32, table_type = Type::f32;
  float eps = 0;
  bool offset = false, early = false, adjacent = false;
  bool f8 = false;  // the caches are fp8, not `type`
  Part q, k, v;
  const void *cos = nullptr, *sin = nullptr;
  std::int64_t cos_row = 0, sin_row = 0, rows = 0;  // rows that the tables have
  rotary::Integers positions, slots;
  std::int64_t places = 0;  // slots that the caches have

  RLK_HD std::int64_t heads() const { return q.heads + k.heads + v.heads; }
  RLK_HD bool normed() const { return q.weight != nullptr; }
  RLK_HD std::int64_t position(std::int64_t token) const { return rotary::integer_at(positions, token); }
  // The place of a token in the caches; below 0: none.
  RLK_HD std::int64_t slot(std::int64_t token) const {
    if (slots.data == nullptr) return -1;
    const std::int64_t at = rotary::integer_at(slots, token);
    return at < places ? at : -1;
  }
  RLK_HD void* cached(const Part& part, std::int64_t slot, std::int64_t head) const {
    return part.cache.row(f8 ? 1 : rows::size_of(type), slot, head);
  }
  RLK_HD float weight_at(const Part& part, std::int64_t i) const {
    const float w = rows::load(weight_type, part.weight, i);
    return offset ? 1 + w : w;
  }
};

}  // namespace rlk::rms32_rope32
