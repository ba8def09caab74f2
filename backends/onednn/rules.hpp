// The arithmetic this backend promises, as plain code, and data to hold primitives against it. oneDNN does
// not promise any order of additions; a primitive is used only after it has reproduced the rule bit for bit.
//
//   fma32/kb1024   Operands are upcast exactly. Ascending fp32 FMA chain inside each block of 1024 along K;
//                  the first block's sum is the total, later sums are added to it in order.
//   fma32/kb256    The same with blocks of 256.
//   amx/k32        K is filled with zeros to a multiple of 32. In each block of 32, ascending: one fp32 FMA
//                  chain over the even positions and one over the odd ones, both from +0; then
//                  sum = sum + (even + odd). Subnormal inputs and results count as zero (of their sign).
//                  A K above 4096 is cut into blocks of 4096, whose sums are added in order in plain fp32.
//   avx512bf16/kb1024  K is filled with zeros to a multiple of 32. In blocks of 1024, where K is at most 1024 of 512: one chain
//                  over pairs of positions, of each the odd one first, subnormal inputs and results zero (of
//                  their sign). The first block's sum is the total, later sums are added to it in plain fp32.
#pragma once

#include <cstddef>
#include <cstdint>

#include "rlk/float.hpp"

namespace rlk::onednn {

enum class Rule : std::uint8_t { kb1024, kb256, k32, pairs };
constexpr const char* name_of(Rule rule) {
  return rule == Rule::kb1024  ? "fma32/kb1024"
         : rule == Rule::kb256 ? "fma32/kb256"
         : rule == Rule::k32   ? "amx/k32"
                               : "avx512bf16/kb1024";
}

inline constexpr std::int64_t kPanel = 128;  // columns of every product
// The largest K: a product that is not cut is tried on a panel of so many rows before it serves.
inline constexpr std::int64_t kDeepest = std::int64_t{1} << 22;

// The products' own operands: what the rule upcasts is upcast before a product sees it.
constexpr bool upcasts(Rule rule) { return rule == Rule::kb1024 || rule == Rule::kb256; }
constexpr Float operand_of(Rule rule, Float element) { return upcasts(rule) ? Float::f32 : element; }

// Into how long blocks K is cut before it comes to a product; 0: not at all, the product keeps the rule's own
// blocks. Beyond 4096 oneDNN's 16-bit products cut K their own way.
constexpr std::int64_t depth_block(Rule rule) {
  return rule == Rule::kb256 ? 256 : rule == Rule::k32 ? 4096 : 0;
}

// One row against kPanel columns by the rule, inside one depth block: row[depth], columns[depth][kPanel]. No
// mode need be set by the caller.
void rule_row(Rule rule, const float* row, const float* columns, std::int64_t depth, float* sums);

// count numbers to fp32, exactly.
void upcast(Float type, const void* from, std::int64_t count, float* to);

// Numbers of either sign, a few binades wide, the same for the same seed; `tiny` ones have products that fp32 can hardly
// hold.
void fill(Float type, void* data, std::int64_t count, std::uint32_t seed, bool tiny = false);

// MXCSR at its default for a scope: some of oneDNN's code obeys it.
class DefaultFloatMode {
 public:
  DefaultFloatMode() noexcept;
  ~DefaultFloatMode();
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
  unsigned saved_;
};

}  // namespace rlk::onednn
