// Helpers for writing an op's schema: arguments and attributes as sentences, failures and shapes in words.
//
//   constexpr auto kArguments = arguments(read("hidden", "activations [..., K]").rank(1, 8).rows().saved(),
//                                         kShared, write("out", "logits [..., V]").rank(1, 8).rows());
//   constexpr auto kAttributes = attributes(integer("rotary_dim", "dims that turn", 0));
//   enum { kHidden = index_of(kArguments, "hidden") };
#pragma once

#include <fmt/format.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "rlk/plugin.h"
#include "rlk/tensor.hpp"

namespace rlk::registry {

inline constexpr uint32_t kFloats = RLK_F16 | RLK_BF16 | RLK_F32;
// Results may also be asked for in fp64, which only the reference serves.
inline constexpr uint32_t kResults = kFloats | RLK_F64;
inline constexpr uint32_t kIntegers = RLK_I32 | RLK_I64;

// ---- arguments ------------------------------------------------------------------------------------------

// read, write or update with a name and a doc; what is not said is as the three set it: floats of any rank,
// dense, present, with no axis of independent rows.
struct Argument : rlk_argument {
  constexpr Argument of(uint32_t set) const {
    Argument a = *this;
    a.dtypes = set;
    return a;
  }
  constexpr Argument rank(int32_t least, int32_t most) const {
    Argument a = *this;
    a.min_rank = least, a.max_rank = most;
    return a;
  }
  constexpr Argument rank(int32_t only) const { return rank(only, only); }
  // Rows are independent along this axis; without one, along all but the last.
  constexpr Argument rows(int32_t axis = -2) const {
    Argument a = *this;
    a.batch_axis = axis;
    return a;
  }
  constexpr Argument with(uint32_t more) const {
    Argument a = *this;
    a.flags |= more;
    return a;
  }
  constexpr Argument optional() const { return with(RLK_OPTIONAL); }
  constexpr Argument no_gradient() const { return with(RLK_NO_GRADIENT); }
  constexpr Argument on_host() const { return with(RLK_HOST); }
  constexpr Argument saved() const { return with(RLK_SAVED); }
  constexpr Argument strided() const { return with(RLK_STRIDED); }
};
constexpr Argument read(const char* name, const char* doc) {
  return {{name, doc, RLK_READ, kFloats, 1, RLK_MAX_RANK, -1, 0}};
}
constexpr Argument write(const char* name, const char* doc) {
  return {{name, doc, RLK_WRITE, kResults, 1, RLK_MAX_RANK, -1, 0}};
}
// A gradient so far, to which another is added in fp32.
constexpr Argument so_far(const char* name, const char* doc) {
  return read(name, doc).of(RLK_F32).optional().no_gradient();
}
constexpr Argument update(const char* name, const char* doc) {
  return {{name, doc, RLK_READWRITE, kFloats, 1, RLK_MAX_RANK, -1, 0}};
}

// ---- attributes -----------------------------------------------------------------------------------------

constexpr rlk_attribute integer(const char* name, const char* doc, int64_t preset) {
  return {name, doc, RLK_INT, preset, 0, nullptr};
}
constexpr rlk_attribute real(const char* name, const char* doc, double preset) {
  return {name, doc, RLK_FLOAT, 0, preset, nullptr};
}
constexpr rlk_attribute flag(const char* name, const char* doc, bool preset = false) {
  return {name, doc, RLK_FLAG, preset, 0, nullptr};
}
// One word of "half|adjacent"; the first, or the one named. A word that is not in the list does not compile.
consteval rlk_attribute choice(const char* name, const char* doc, const char* words,
                               std::string_view preset = {}) {
  int64_t index = 0;
  for (std::string_view rest = words; !preset.empty(); ++index) {
    const std::size_t end = rest.find('|');
    if (rest.substr(0, end) == preset) break;
    if (end == rest.npos) throw "the preset is none of the words";
    rest.remove_prefix(end + 1);
  }
  return {name, doc, RLK_CHOICE, index, 0, words};
}

// ---- tables ---------------------------------------------------------------------------------------------

// One array of entries and of arrays of them, so that ops share parts.
template <class Entry, class... Parts>
constexpr auto join(const Parts&... parts) {
  constexpr auto size = []<class P>(const P*) {
    if constexpr (requires { std::tuple_size<P>::value; })
      return std::tuple_size_v<P>;
    else
      return std::size_t{1};
  };
  std::array<Entry, (size(static_cast<const Parts*>(nullptr)) + ...)> all{};
  std::size_t at = 0;
  const auto add = [&](const auto& part) {
    if constexpr (requires { part.begin(); })
      for (const Entry& entry : part) all[at++] = entry;
    else
      all[at++] = part;
  };
  (add(parts), ...);
  return all;
}
template <class... Parts>
constexpr auto arguments(const Parts&... parts) {
  return join<rlk_argument>(parts...);
}
template <class... Parts>
constexpr auto attributes(const Parts&... parts) {
  return join<rlk_attribute>(parts...);
}

// The same arguments, kept for a backward.
template <std::size_t N>
constexpr auto saved(std::array<rlk_argument, N> table) {
  for (rlk_argument& a : table) a.flags |= RLK_SAVED;
  return table;
}

// Where an argument or attribute of that name lies in its table. A name that is not there does not compile.
consteval int index_of(const auto& table, std::string_view name) {
  for (std::size_t i = 0; i < table.size(); ++i)
    if (table[i].name == name) return static_cast<int>(i);
  throw "the table has no such name";
}

// ---- the op ---------------------------------------------------------------------------------------------

using Infer = decltype(rlk_op_schema::infer);

// extern const rlk_op_schema rope_schema = Schema("rope", "...", kRope, kAttributes, infer).gradient("rope_bwd");
// The tables must live for ever.
class Schema {
 public:
  constexpr Schema(const char* name, const char* doc, const auto& arguments, const auto& attributes,
                   Infer infer)
      : s_{.struct_size = sizeof(rlk_op_schema),
           .version = 1,
           .name = name,
           .aliases = "",
           .doc = doc,
           .arguments = arguments.data(),
           .num_arguments = static_cast<uint32_t>(arguments.size()),
           .attributes = attributes.data(),
           .num_attributes = static_cast<uint32_t>(attributes.size()),
           .backward = nullptr,
           .infer = infer,
           .may_alias = ""} {}
  constexpr Schema(const char* name, const char* doc, const auto& arguments, Infer infer)
      : Schema(name, doc, arguments, kNoAttributes, infer) {}
  constexpr Schema& aliases(const char* list) { return s_.aliases = list, *this; }
  constexpr Schema& gradient(const char* op) { return s_.backward = op, *this; }
  constexpr Schema& may_alias(const char* pairs) { return s_.may_alias = pairs, *this; }
  constexpr operator rlk_op_schema() const { return s_; }

 private:
  static constexpr std::array<rlk_attribute, 0> kNoAttributes{};
  rlk_op_schema s_;
};

// ---- infer ----------------------------------------------------------------------------------------------

template <class... T>
int32_t fail(const rlk_host* host, fmt::format_string<T...> format, T&&... values) {
  return host->fail(RLK_INVALID_ARGUMENT, fmt::format(format, std::forward<T>(values)...).c_str());
}

inline DType dtype(const DLTensor* t) { return dtype_of(t->dtype); }
inline int64_t dim(const DLTensor* t, int32_t i) { return t->shape[i < 0 ? i + t->ndim : i]; }

// The shape of t with its last dimension replaced.
inline rlk_shape with_last(const DLTensor* t, int64_t last, uint32_t dtypes, DType preferred) {
  rlk_shape s{t->ndim, dtypes, static_cast<uint32_t>(preferred), {}};
  for (int32_t i = 0; i < t->ndim; ++i) s.dim[i] = t->shape[i];
  s.dim[t->ndim - 1] = last;
  return s;
}
inline rlk_shape shape_of(std::initializer_list<int64_t> dims, uint32_t dtypes, DType preferred) {
  rlk_shape s{static_cast<int32_t>(dims.size()), dtypes, static_cast<uint32_t>(preferred), {}};
  int32_t i = 0;
  for (int64_t d : dims) s.dim[i++] = d;
  return s;
}
inline rlk_shape like(const DLTensor* t, uint32_t dtypes, DType preferred) {
  return with_last(t, t->ndim ? t->shape[t->ndim - 1] : 1, dtypes, preferred);
}

// What a gradient is added to has its shape, which is the weight's.
inline int32_t check_before(const rlk_host* host, const char* op, const char* name, const DLTensor* before,
                            const rlk_shape& shape) {
  for (int32_t i = 0; before && i < shape.ndim; ++i)
    if (dim(before, i) != shape.dim[i])
      return fail(host, "{}: {} has size {} in dimension {}, weight gives {}", op, name, dim(before, i), i,
                  shape.dim[i]);
  return RLK_OK;
}

}  // namespace rlk::registry
