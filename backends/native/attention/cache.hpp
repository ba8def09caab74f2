// Keys and values of an fp8 cache as q's dtype has them. A byte has 256 values, so those of a head are a table.
#pragma once

#include <cstring>
#include <utility>

#include "native/attention/engine.hpp"

namespace rlk::native::attention {

class WidenedTile {
  static constexpr std::int64_t kValues = 256;

 public:
  static std::int64_t floats(const Problem& p) {
    return p.k.f8 ? kTile * (p.width + p.value_width) + 2 * kValues : 0;
  }

  // Of a head of k and v. Takes what it needs from scratch, which moves on.
  WidenedTile(const Problem& p, std::int64_t head, float*& scratch) : p_(p) {
    if (!p.k.f8) return;
    k_ = side(p.k_scale.of(head), p.width, scratch), v_ = side(p.v_scale.of(head), p.value_width, scratch);
  }

  // key(t, j), where key j of the tile lies in k or v or null, of a tile that is widened here and now.
  template <class Key>
  auto load(Key key) const {
    for (std::int64_t j = 0; j < kTile; ++j)
      if (const void* k = key(p_.k, j); k != nullptr)
        widen(k_, k, p_.width, j), widen(v_, key(p_.v, j), p_.value_width, j);
    return [this, key](const attn128::Tensor& t, std::int64_t j) -> const void* {
      if (key(t, j) == nullptr) return nullptr;
      return &t == &p_.k ? row(k_, p_.width, j) : row(v_, p_.value_width, j);
    };
  }

 private:
  // Numbers of q's dtype.
  struct Side {
    std::byte *table = nullptr, *rows = nullptr;
  };

  Side side(float factor, std::int64_t width, float*& scratch) const {
    const auto take = [&scratch](std::int64_t floats) {
      return reinterpret_cast<std::byte*>(std::exchange(scratch, scratch + floats));
    };
    Side out{take(kValues), take(kTile * width)};
    for (std::int64_t byte = 0; byte < kValues; ++byte)
      rows::store(p_.q.type, out.table, byte,
                  attn128::widened(p_.q.type, static_cast<std::uint8_t>(byte), factor));
    return out;
  }
  std::byte* row(const Side& side, std::int64_t width, std::int64_t j) const {
    return side.rows + j * width * rows::size_of(p_.q.type);
  }
  void widen(const Side& side, const void* from, std::int64_t width, std::int64_t j) const {
    if (p_.q.type == rows::Type::f32)
      look_up<float>(side.table, from, row(side, width, j), width);
    else
      look_up<std::uint16_t>(side.table, from, row(side, width, j), width);
  }
  template <class T>
  static void look_up(const std::byte* table, const void* from, std::byte* to, std::int64_t width) {
    const auto* const bytes = static_cast<const std::uint8_t*>(from);
    for (std::int64_t i = 0; i < width; ++i)
      std::memcpy(to + i * std::int64_t{sizeof(T)}, table + bytes[i] * sizeof(T), sizeof(T));
  }

  const Problem& p_;
  Side k_, v_;
};

}  // namespace rlk::native::attention
