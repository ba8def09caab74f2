// Keys and values of an fp8 cache as q's dtype has them. Included by the one file per instruction set that is compiled with
// its flags.
#pragma once

#include <utility>

#include "native/attention/engine.hpp"
#include "native/rows.hpp"

namespace rlk::native::attention {

// Asks for row j of keys and of values, which will be read: rows of a head lie too far apart for the processor to see them coming.
template <class Key>
void ask_for(const Problem& p, Key key, std::int64_t j) {
  for (const attn128::Tensor* t : {&p.k, &p.v}) {
    const auto* const row = static_cast<const char*>(key(*t, j));
    const std::int64_t bytes = (t == &p.k ? p.width : p.value_width) * t->element_size();
    for (std::int64_t at = 0; row != nullptr && at < bytes; at += 64) __builtin_prefetch(row + at);
  }
}

template <class L, int W>
class WidenedTile {
  using Row = native::Row<L, W>;
  static constexpr std::int64_t kMostWidth = 576, kAhead = 8;  // rows

 public:
  // Of a head of k and v. Takes what it needs from scratch, which moves on.
  WidenedTile(const Problem& p, std::int64_t head, float*& scratch)
      : p_(p), k_factor_(p.k_scale.of(head)), v_factor_(p.v_scale.of(head)) {
    if (!p.k.f8) return;
    const auto take = [&scratch](std::int64_t floats) {
      return reinterpret_cast<std::byte*>(std::exchange(scratch, scratch + floats));
    };
    k_ = take(kTile * p.width), v_ = take(kTile * p.value_width);
  }

  // key(t, j), where key j of the tile lies in k or v or null, of a tile that is widened here and now.
  template <class Key>
  auto load(Key key) const {
    for (std::int64_t j = 0; j < kTile; ++j)
      if (const void* k = key(p_.k, j); k != nullptr) {
        ask_for(p_, key, j + kAhead);
        widen(k, k_factor_, row(k_, p_.width, j), p_.width);
        widen(key(p_.v, j), v_factor_, row(v_, p_.value_width, j), p_.value_width);
      }
    return [this, key](const attn128::Tensor& t, std::int64_t j) -> const void* {
      if (key(t, j) == nullptr) return nullptr;
      return &t == &p_.k ? row(k_, p_.width, j) : row(v_, p_.value_width, j);
    };
  }

 private:
  std::byte* row(std::byte* rows, std::int64_t width, std::int64_t j) const {
    return rows + j * width * rows::size_of(p_.q.type);
  }
  void widen(const void* from, float factor, std::byte* to, std::int64_t width) const {
    alignas(64) float exact[kMostWidth];
    const auto* const bytes = static_cast<const std::uint8_t*>(from);
    for (std::int64_t i = 0; i < width; i += W) Row::store(exact + i, numbers(bytes + i) * factor);
    Row::narrow(p_.q.type, exact, to, width);
  }
  // W of them, as simt::to_float has one; widths are multiples of 16.
  static L numbers(const std::uint8_t* from) {
    if constexpr (W == 1) {
      return simt::to_float(simt::fp8{*from});
    } else {
      using Words = typename Integers<W>::Words;
      const Words b = words(from), magnitude = b & 0x7f;
      const L small = __builtin_convertvector(magnitude, L) * 0x1p-9f;
      Words u = magnitude < 8 ? (Words)small : (magnitude << 20) + (120u << 23);
      u = magnitude == 0x7f ? Words{} + 0x7fffffffu : u;
      return (L)(u | (b & 0x80) << 24);
    }
  }
  // A byte each. Of vectors of bytes the compiler takes one after another.
  static typename Integers<W>::Words words(const std::uint8_t* from) {
    using Words = typename Integers<W>::Words;
#if defined(__AVX512F__)
    if constexpr (W == 16)
      return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#endif
#if defined(__AVX2__)
    if constexpr (W == 8)
      return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#endif
    Words to;
    for (int i = 0; i < W; ++i) to[i] = from[i];
    return to;
  }

  const Problem& p_;
  const float k_factor_, v_factor_;
  std::byte *k_ = nullptr, *v_ = nullptr;
};

}  // namespace rlk::native::attention
