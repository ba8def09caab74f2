// What the arguments of the rope ops mean, worked out once: tensors of any layout become strides by batch,
// token and head, tables become a base and a row stride, and every disagreement becomes one line of text that
// names both sides.
//
// The schema's check and every backend read arguments through this header, so no two of them can disagree on
// which axis is the sequence. A Geometry is plain data without host pointers of its own: a GPU kernel takes it
// by value.
#pragma once

#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

#include "rlk/float.hpp"
#include "rlk/plugin.h"

namespace rlk::rotary {

enum class Layout : std::uint8_t { bhsd, bshd, sbhd, thd };
enum class Pairing : std::uint8_t { half, adjacent, adjacent_to_half };
enum class TableWidth : std::uint8_t { any, half, full };
enum class Negative : std::uint8_t { refuse, unrotated };

// Those of `rope` and of its relatives, in host form.
struct Attributes {
  const char* op = "rope";
  Layout layout = Layout::bhsd;
  Pairing pairing = Pairing::half;
  TableWidth table = TableWidth::any;
  std::int64_t rotary_dim = 0;  // 0: from the table's width
  std::int64_t rotary_offset = 0;
  bool transpose = false;
  std::int64_t cp_rank = 0, cp_size = 1;
  std::int64_t mrope[3] = {0, 0, 0};  // pairs that follow each axis of the positions; all 0: one axis
  bool mrope_interleaved = false;
  Negative negative = Negative::refuse;
  bool trailing = false;    // the rotary dims are the last ones, whatever rotary_offset says
  std::int64_t k_dim = -1;  // of the key-value split

  bool backward = false;  // x and k are gradients of the results, out and k_out gradients of the inputs
  bool in_place = false;  // out is x: only the rotary dims are touched
  bool second_half_last = false;  // a full table is [first | second] even for adjacent output (Megatron-LM)
};

struct Tensors {
  const DLTensor* x = nullptr;
  const DLTensor* k = nullptr;
  const DLTensor* cos = nullptr;
  const DLTensor* sin = nullptr;
  const DLTensor* positions = nullptr;
  const DLTensor* starts = nullptr;
  const DLTensor* cu_seqlens = nullptr;
  const DLTensor* axis_map = nullptr;  // in CPU memory
  const DLTensor* out = nullptr;       // results may be absent: then nothing about them is checked
  const DLTensor* k_out = nullptr;
};

// Integers of either width.
struct Integers {
  const void* data = nullptr;
  bool wide = false;
};

// From a token to its table row.
struct Rows {
  Integers positions, starts, cu_seqlens;
  std::int64_t position_axis = 0, position_batch = 0, position_token = 0;  // strides
  std::int64_t start_stride = 0, cu_stride = 0;
  std::int64_t sequences = 0;
  std::int64_t cp_rank = 0, cp_size = 1;
  std::int64_t count = 0;            // rows the table has
  std::uint32_t axis_bits[16] = {};  // two bits per pair: which axis of the positions it follows
  std::int32_t axes = 1;
  bool negative_stay = false;  // a token at a negative position turns by no angle, instead of being an error
};

struct Table {
  const void *cos = nullptr, *sin = nullptr;
  std::int64_t cos_row = 0, cos_batch = 0, sin_row = 0, sin_batch = 0;
  Float type = Float::f32;
  bool full = false;
  std::int32_t step = 1;    // from pair p's entry to pair p+1's
  std::int32_t second = 0;  // from a pair's first entry to its second; 0 with a half-width table
};

// One rotated tensor: q, or k.
struct Part {
  const void* x = nullptr;
  void* y = nullptr;
  std::int64_t heads = 0;
  std::int64_t x_batch = 0, x_token = 0, x_head = 0;
  std::int64_t y_batch = 0, y_token = 0, y_head = 0;
};

struct Geometry {
  std::int64_t batch = 0, tokens = 0;
  Part part[2];
  std::int32_t parts = 0;
  Table table;
  Rows rows;
  std::int32_t head_dim = 0, rotary_dim = 0, offset = 0;
  Float type = Float::f32;
  bool in_adjacent = false, out_adjacent = false;
  bool transpose = false;
  bool in_place = false;

  std::int64_t bytes_per_element() const { return bytes_of(type); }
  // No element at all: the other sizes may then be as large as 64 bits hold, and must not be counted through.
  bool empty() const { return batch == 0 || tokens == 0 || (part[0].heads == 0 && part[1].heads == 0); }
};

namespace detail {

[[gnu::format(printf, 1, 2)]] inline std::string say(const char* format, ...) {
  char text[400];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof text, format, args);
  va_end(args);
  return text;
}

inline std::string shape_text(const DLTensor& t) {
  std::string s = "[";
  for (int i = 0; i < t.ndim; ++i) s += (i == 0 ? "" : ",") + std::to_string(t.shape[i]);
  return s + "]";
}

inline const void* data_of(const DLTensor& t) { return static_cast<const char*>(t.data) + t.byte_offset; }

// Unsigned, for a tensor without elements may have sizes whose product is beyond 64 bits; nothing is read by
// such a stride.
inline std::int64_t stride_of(const DLTensor& t, int axis) {
  if (t.strides != nullptr) return t.strides[axis];
  std::uint64_t s = 1;
  for (int i = t.ndim - 1; i > axis; --i) s *= static_cast<std::uint64_t>(t.shape[i]);
  return static_cast<std::int64_t>(s);
}

// The most columns of a head, and the most ranks of a context-parallel group: kernels count columns in 32
// bits, and no sum of a few of these leaves them.
inline constexpr std::int64_t kMostColumns = std::int64_t{1} << 28, kMostRanks = std::int64_t{1} << 28;

inline bool float_type(const DLTensor& t, Float& type) {
  if (t.dtype.lanes != 1) return false;
  if (t.dtype.code == kDLFloat && t.dtype.bits == 32) return type = Float::f32, true;
  if (t.dtype.code == kDLFloat && t.dtype.bits == 16) return type = Float::f16, true;
  if (t.dtype.code == kDLBfloat && t.dtype.bits == 16) return type = Float::bf16, true;
  return false;
}

inline const char* name_of(Layout layout) {
  constexpr const char* names[] = {"bhsd", "bshd", "sbhd", "thd"};
  return names[static_cast<int>(layout)];
}

// A tensor seen by meaning instead of by position.
struct View {
  std::int64_t batch = 1, tokens = 1, heads = 1, dim = 0;
  std::int64_t by_batch = 0, by_token = 0, by_head = 0;
};

// Axes by meaning for a tensor of 2 to 4 axes, -1 where the layout has none.
struct Axes {
  int batch = -1, token = -1, head = -1;
};

inline bool axes_of(Layout layout, int rank, Axes& axes) {
  const bool token_first = layout != Layout::bhsd;
  switch (rank) {
    case 2:
      axes = {-1, 0, -1};
      return true;
    case 3:
      axes = token_first ? Axes{-1, 0, 1} : Axes{-1, 1, 0};
      return true;
    case 4:
      if (layout == Layout::thd) return false;
      axes = layout == Layout::bhsd ? Axes{0, 2, 1} : layout == Layout::bshd ? Axes{0, 1, 2} : Axes{1, 0, 2};
      return true;
    default:
      return false;
  }
}

inline std::string see(const Attributes& o, const char* name, const DLTensor& t, View& view) {
  Axes axes;
  if (!axes_of(o.layout, t.ndim, axes)) {
    return say("%s: %s has rank %d, layout %s takes %s", o.op, name, t.ndim, name_of(o.layout),
               o.layout == Layout::thd ? "[T,H,D] or [T,D]" : "rank 2, 3 or 4");
  }
  const int last = t.ndim - 1;
  view.dim = t.shape[last];
  if (view.dim > kMostColumns) {
    return say("%s: %s has %lld columns, at most %lld are served", o.op, name,
               static_cast<long long>(view.dim), static_cast<long long>(kMostColumns));
  }
  if (view.dim > 1 && stride_of(t, last) != 1) {
    return say("%s: the last dimension of %s has stride %lld, it must be 1", o.op, name,
               static_cast<long long>(stride_of(t, last)));
  }
  if (axes.batch >= 0) view.batch = t.shape[axes.batch], view.by_batch = stride_of(t, axes.batch);
  if (axes.token >= 0) view.tokens = t.shape[axes.token], view.by_token = stride_of(t, axes.token);
  if (axes.head >= 0) view.heads = t.shape[axes.head], view.by_head = stride_of(t, axes.head);
  return {};
}

inline std::string integers(const Attributes& o, const char* name, const DLTensor& t, Integers& out) {
  if (t.dtype.code != kDLInt || t.dtype.lanes != 1 || (t.dtype.bits != 32 && t.dtype.bits != 64)) {
    return say("%s: %s must be int32 or int64", o.op, name);
  }
  out = {data_of(t), t.dtype.bits == 64};
  return {};
}

// Reads a table's shape against the layout of x. Size-1 axes broadcast; an axis of heads must have size 1, so
// a table can never be applied along the wrong axis.
inline std::string table_rows(const Attributes& o, const char* name, const DLTensor& t, int x_rank,
                              std::int64_t batch, std::int64_t tokens, bool counted, std::int64_t& rows,
                              std::int64_t& by_row, std::int64_t& by_batch) {
  const auto refuse = [&] {
    return say(
        "%s: %s has shape %s, which does not fit x of rank %d in layout %s; use [rows,width], "
        "[batch,rows,width], or x's own layout with one head",
        o.op, name, shape_text(t).c_str(), x_rank, name_of(o.layout));
  };
  if (t.ndim >= 2 && t.shape[t.ndim - 1] > 1 && stride_of(t, t.ndim - 1) != 1) {
    return say("%s: the last dimension of %s has stride %lld, it must be 1", o.op, name,
               static_cast<long long>(stride_of(t, t.ndim - 1)));
  }
  Axes axes;
  if (t.ndim == 2) {
    axes = {-1, 0, -1};
  } else if (t.ndim == 3 && x_rank == 4) {
    axes = {0, 1, -1};
  } else if (t.ndim == 3) {
    const bool leading_rows = o.layout != Layout::bhsd && t.shape[0] != 1;
    axes = leading_rows ? Axes{-1, 0, 1} : Axes{0, 1, -1};
  } else if (t.ndim == 4 && x_rank == 4) {
    axes_of(o.layout, 4, axes);
  } else if (t.ndim == 4 && x_rank == 3 && t.shape[1] == 1) {
    axes = {1, 0, 2};
  } else {
    return refuse();
  }
  if (axes.head >= 0 && t.shape[axes.head] != 1) return refuse();
  if (axes.batch >= 0 && t.shape[axes.batch] != 1 && t.shape[axes.batch] != batch) {
    return say("%s: %s has batch %lld, x has batch %lld", o.op, name,
               static_cast<long long>(t.shape[axes.batch]), static_cast<long long>(batch));
  }
  rows = t.shape[axes.token];
  by_row = stride_of(t, axes.token);
  by_batch = axes.batch >= 0 && t.shape[axes.batch] > 1 ? stride_of(t, axes.batch) : 0;
  // [1,S,1,R] against [B,S,H,D] read as sbhd: the rows lie along what the layout calls the batch, and
  // broadcast.
  if (t.ndim == 4 && rows == 1 && by_batch != 0 && counted) rows = tokens, by_row = 0;
  return {};
}

inline std::string read_table(const Attributes& o, const Tensors& in, int x_rank, Geometry& g) {
  const DLTensor &c = *in.cos, &s = *in.sin;
  Float sin_type{};
  // fp32 holds every entry of a narrower table; of two 16-bit types neither holds the other's.
  if (!float_type(c, g.table.type) ||
      (g.type != Float::f32 && g.table.type != Float::f32 && g.table.type != g.type)) {
    return g.type == Float::f32
               ? say("%s: cos must be fp32, bf16 or fp16", o.op)
               : say("%s: cos must be fp32 or have the dtype of x, which is %s", o.op, name_of(g.type));
  }
  if (!float_type(s, sin_type) || sin_type != g.table.type)
    return say("%s: cos and sin differ in dtype", o.op);
  bool same = c.ndim == s.ndim;
  for (int i = 0; same && i < c.ndim; ++i) same = c.shape[i] == s.shape[i];
  if (!same) {
    return say("%s: cos has shape %s, sin has shape %s", o.op, shape_text(c).c_str(), shape_text(s).c_str());
  }
  std::int64_t sin_rows = 0;
  const bool counted =
      in.positions == nullptr && in.starts == nullptr && in.cu_seqlens == nullptr && o.cp_size == 1;
  auto error = table_rows(o, "cos", c, x_rank, g.batch, g.tokens, counted, g.rows.count, g.table.cos_row,
                          g.table.cos_batch);
  if (error.empty()) {
    error = table_rows(o, "sin", s, x_rank, g.batch, g.tokens, counted, sin_rows, g.table.sin_row,
                       g.table.sin_batch);
  }
  if (!error.empty()) return error;

  g.table.cos = data_of(c);
  g.table.sin = data_of(s);
  if (!o.trailing && (o.rotary_offset < 0 || o.rotary_offset > g.head_dim)) {
    return say("%s: rotary_offset is %lld, the head dimension is %d", o.op,
               static_cast<long long>(o.rotary_offset), g.head_dim);
  }
  const std::int64_t width = c.shape[c.ndim - 1], room = g.head_dim - o.rotary_offset;
  if (width > kMostColumns) {
    return say("%s: cos has %lld columns, the head dimension is %d", o.op, static_cast<long long>(width),
               g.head_dim);
  }
  std::int64_t rotary = o.rotary_dim, offset = o.rotary_offset;
  if (rotary == 0 && o.trailing) rotary = width;
  if (rotary == 0) {
    rotary = o.table == TableWidth::full   ? width
             : o.table == TableWidth::half ? 2 * width
             : width == room               ? width
             : 2 * width == room           ? room
                                           : 0;
    if (rotary == 0) {
      return say(
          "%s: cos has %lld columns, which is neither %lld (full width) nor half of it; set rotary_dim", o.op,
          static_cast<long long>(width), static_cast<long long>(room));
    }
  }
  if (rotary < 2 || rotary % 2 != 0) {
    return say("%s: rotary_dim is %lld, it must be even and positive", o.op, static_cast<long long>(rotary));
  }
  if (o.trailing) offset = g.head_dim - rotary;
  if (offset < 0 || rotary > g.head_dim - offset) {
    return o.trailing ? say("%s: rotary_dim %lld exceeds the head dimension %d", o.op,
                            static_cast<long long>(rotary), g.head_dim)
                      : say("%s: rotary_offset %lld + rotary_dim %lld exceeds the head dimension %d", o.op,
                            static_cast<long long>(offset), static_cast<long long>(rotary), g.head_dim);
  }
  g.table.full = width == rotary && o.table != TableWidth::half;
  if (!g.table.full && (2 * width != rotary || o.table == TableWidth::full)) {
    return say("%s: cos has %lld columns, rotary_dim %lld needs %lld%s", o.op, static_cast<long long>(width),
               static_cast<long long>(rotary),
               static_cast<long long>(o.table == TableWidth::full ? rotary : rotary / 2),
               o.table == TableWidth::any ? " (or all of it, full width)" : "");
  }
  const bool interleaved = o.pairing == Pairing::adjacent && !o.second_half_last;
  g.rotary_dim = static_cast<std::int32_t>(rotary);
  g.offset = static_cast<std::int32_t>(offset);
  g.table.step = g.table.full && interleaved ? 2 : 1;
  g.table.second = !g.table.full ? 0 : interleaved ? 1 : g.rotary_dim / 2;
  return {};
}

inline std::string read_axes(const Attributes& o, const Tensors& in, Geometry& g) {
  const int pairs = g.rotary_dim / 2;
  if (pairs > 256)
    return say("%s: positions of several axes serve at most 256 pairs, there are %d", o.op, pairs);
  g.rows.axes = 3;
  const auto set = [&](int pair, unsigned axis) { g.rows.axis_bits[pair / 16] |= axis << (pair % 16 * 2); };
  if (in.axis_map != nullptr) {
    const DLTensor& t = *in.axis_map;
    if (t.dtype.code != kDLInt || t.dtype.bits != 32 || t.ndim != 1 || t.shape[0] != pairs) {
      return say("%s: axis_map has shape %s, it must be int32 with one axis number for each of the %d pairs",
                 o.op, shape_text(t).c_str(), pairs);
    }
    if (t.data == nullptr) return {};  // a question about shapes
    const auto* axes = static_cast<const std::int32_t*>(data_of(t));
    for (int p = 0; p < pairs; ++p) {
      const std::int32_t axis = axes[p * stride_of(t, 0)];
      if (axis < 0 || axis > 2) return say("%s: axis_map[%d] is %d, axes are 0 to 2", o.op, p, axis);
      set(p, static_cast<unsigned>(axis));
    }
    return {};
  }
  const auto section = [&](int i) { return o.mrope[i] >= 0 && o.mrope[i] <= pairs; };
  if (!section(0) || !section(1) || !section(2) || o.mrope[0] + o.mrope[1] + o.mrope[2] != pairs) {
    return say(
        "%s: mrope_t, mrope_h, mrope_w are %lld, %lld, %lld, their sum must be the %d pairs of rotary_dim %d",
        o.op, static_cast<long long>(o.mrope[0]), static_cast<long long>(o.mrope[1]),
        static_cast<long long>(o.mrope[2]), pairs, g.rotary_dim);
  }
  for (int p = 0; p < pairs; ++p) {
    if (o.mrope_interleaved) {  // pairs take turns while their axis has pairs left, axis 0 takes the rest
      if (p / 3 < o.mrope[p % 3]) set(p, static_cast<unsigned>(p % 3));
    } else {
      set(p, p < o.mrope[0] ? 0u : p < o.mrope[0] + o.mrope[1] ? 1u : 2u);
    }
  }
  return {};
}

inline std::string read_positions(const Attributes& o, const DLTensor& t, Geometry& g) {
  auto error = integers(o, "positions", t, g.rows.positions);
  if (!error.empty()) return error;
  int first = 0;
  if (g.rows.axes > 1) {
    if (t.ndim < 2 || t.shape[0] != g.rows.axes) {
      return say("%s: positions have shape %s, mrope_section names %d axes", o.op, shape_text(t).c_str(),
                 g.rows.axes);
    }
    g.rows.position_axis = stride_of(t, 0);
    first = 1;
  }
  const int rank = t.ndim - first;
  if (rank == 1 && t.shape[first] == g.tokens) {
    g.rows.position_token = stride_of(t, first);
    return {};
  }
  std::int64_t all = 0;
  if (rank == 1 && !__builtin_mul_overflow(g.batch, g.tokens, &all) && t.shape[first] == all) {
    g.rows.position_token = stride_of(t, first);
    g.rows.position_batch = all == 0 ? 0 : g.tokens * g.rows.position_token;
    return {};
  }
  if (rank == 2 && t.shape[first + 1] == g.tokens && (t.shape[first] == g.batch || t.shape[first] == 1)) {
    g.rows.position_token = stride_of(t, first + 1);
    g.rows.position_batch = t.shape[first] == 1 ? 0 : stride_of(t, first);
    return {};
  }
  return say("%s: positions have shape %s, x has batch %lld and %lld tokens%s", o.op, shape_text(t).c_str(),
             static_cast<long long>(g.batch), static_cast<long long>(g.tokens),
             rank > 1 && g.rows.axes == 1 && t.shape[0] == 3
                 ? "; positions of three axes need mrope_t, mrope_h and mrope_w, or axis_map"
                 : "");
}

inline std::string read_rows(const Attributes& o, const Tensors& in, Geometry& g) {
  if (in.axis_map != nullptr || o.mrope[0] != 0 || o.mrope[1] != 0 || o.mrope[2] != 0) {
    if (in.positions == nullptr) return say("%s: M-RoPE needs positions [3,T] or [3,B,T]", o.op);
    auto error = read_axes(o, in, g);
    if (!error.empty()) return error;
  }
  if (o.cp_size < 1 || o.cp_rank < 0 || o.cp_rank >= o.cp_size) {
    return say("%s: cp_rank %lld is outside cp_size %lld", o.op, static_cast<long long>(o.cp_rank),
               static_cast<long long>(o.cp_size));
  }
  if (o.cp_size > kMostRanks) {
    return say("%s: cp_size is %lld, at most %lld ranks are served", o.op, static_cast<long long>(o.cp_size),
               static_cast<long long>(kMostRanks));
  }
  g.rows.cp_rank = o.cp_rank;
  g.rows.cp_size = o.cp_size;
  g.rows.negative_stay = o.negative == Negative::unrotated;
  if (in.cu_seqlens != nullptr) {
    const DLTensor& t = *in.cu_seqlens;
    auto error = integers(o, "cu_seqlens", t, g.rows.cu_seqlens);
    if (!error.empty()) return error;
    if (t.ndim != 1 || t.shape[0] < 1) return say("%s: cu_seqlens must be [sequences + 1]", o.op);
    if (g.batch != 1) {
      return say("%s: cu_seqlens packs sequences into one batch, x has batch %lld", o.op,
                 static_cast<long long>(g.batch));
    }
    g.rows.sequences = t.shape[0] - 1;
    g.rows.cu_stride = stride_of(t, 0);
  }
  if (in.starts != nullptr) {
    const DLTensor& t = *in.starts;
    auto error = integers(o, "starts", t, g.rows.starts);
    if (!error.empty()) return error;
    const std::int64_t expect = in.cu_seqlens != nullptr ? g.rows.sequences : g.batch;
    if (t.ndim != 1 || t.shape[0] != expect) {
      return say("%s: starts have shape %s, there are %lld sequences", o.op, shape_text(t).c_str(),
                 static_cast<long long>(expect));
    }
    g.rows.start_stride = stride_of(t, 0);
  }
  const bool named = in.positions != nullptr || in.starts != nullptr || in.cu_seqlens != nullptr;
  if (named && g.rows.count == 0 && g.batch > 0 && g.tokens > 0) {  // a GPU reads a row and then asks which
    return say("%s: cos has 0 rows, %lld tokens need one at least", o.op, static_cast<long long>(g.tokens));
  }
  if (in.positions != nullptr) {
    if (in.starts != nullptr)
      return say("%s: positions name every row already, starts cannot be given too", o.op);
    if (o.cp_size != 1) {
      return say("%s: positions name every row already, cp_size %lld cannot be given too", o.op,
                 static_cast<long long>(o.cp_size));
    }
    return read_positions(o, *in.positions, g);
  }
  if (in.cu_seqlens == nullptr) {
    if (o.cp_size > 1 && g.tokens % 2 != 0) {
      return say("%s: cp_size %lld needs an even number of local tokens, x has %lld", o.op,
                 static_cast<long long>(o.cp_size), static_cast<long long>(g.tokens));
    }
    std::int64_t need = 0;
    if (__builtin_mul_overflow(g.tokens, o.cp_size, &need)) need = INT64_MAX;
    const bool may_be_fewer = in.starts != nullptr && g.rows.negative_stay;
    if (g.batch > 0 && need > g.rows.count && !may_be_fewer) {
      return say("%s: cos has %lld rows, %lld tokens need %lld", o.op, static_cast<long long>(g.rows.count),
                 static_cast<long long>(g.tokens), static_cast<long long>(need));
    }
  }
  return {};
}

inline std::string read_part(const Attributes& o, const char* x_name, const DLTensor* x, const char* y_name,
                             const DLTensor* y, Geometry& g) {
  View from, to;
  auto error = see(o, x_name, *x, from);
  if (!error.empty()) return error;
  Float type{};
  if (!float_type(*x, type)) return say("%s: %s must be fp32, bf16 or fp16", o.op, x_name);
  if (g.parts == 0) {
    g.batch = from.batch, g.tokens = from.tokens, g.type = type;
    g.head_dim = static_cast<std::int32_t>(from.dim);
  } else if (from.batch != g.batch || from.tokens != g.tokens || from.dim != g.head_dim || type != g.type) {
    return say("%s: %s has shape %s, x has batch %lld, %lld tokens, head dimension %d and dtype %s", o.op,
               x_name, shape_text(*x).c_str(), static_cast<long long>(g.batch),
               static_cast<long long>(g.tokens), g.head_dim, name_of(g.type));
  }
  Part& part = g.part[g.parts++];
  part.x = data_of(*x);
  part.heads = from.heads;
  part.x_batch = from.by_batch, part.x_token = from.by_token, part.x_head = from.by_head;
  if (y == nullptr) return {};
  bool same = y->ndim == x->ndim && y->dtype.code == x->dtype.code && y->dtype.bits == x->dtype.bits;
  for (int i = 0; same && i < x->ndim; ++i) same = x->shape[i] == y->shape[i];
  if (!same) {
    return say("%s: %s has shape %s, %s has shape %s; shape and dtype must agree", o.op, x_name,
               shape_text(*x).c_str(), y_name, shape_text(*y).c_str());
  }
  error = see(o, y_name, *y, to);
  part.y = const_cast<void*>(data_of(*y));
  part.y_batch = to.by_batch, part.y_token = to.by_token, part.y_head = to.by_head;
  return error;
}

}  // namespace detail

// Fills `g`, or says what is wrong. Of the tensors' data it reads axis_map's alone, which is in CPU memory.
inline std::string read(const Attributes& o, const Tensors& in, Geometry& g) {
  using namespace detail;
  g = Geometry{};
  if (in.x == nullptr || in.cos == nullptr || in.sin == nullptr) {
    return say("%s: %s is missing", o.op,
               in.x == nullptr     ? (o.backward ? "d_out" : "x")
               : in.cos == nullptr ? "cos"
                                   : "sin");
  }
  auto error = read_part(o, o.backward ? "d_out" : "x", in.x, o.backward ? "d_x" : "out", in.out, g);
  if (!error.empty()) return error;
  if (in.k != nullptr) {
    error = read_part(o, o.backward ? "d_k_out" : "k", in.k, o.backward ? "d_k" : "k_out", in.k_out, g);
    if (!error.empty()) return error;
  } else if (in.k_out != nullptr) {
    return say("%s: %s is given, %s is missing", o.op, o.backward ? "d_k" : "k_out",
               o.backward ? "d_k_out" : "k");
  }
  if (in.k != nullptr && in.out != nullptr && in.k_out == nullptr) {
    return say("%s: %s is given, %s is missing", o.op, o.backward ? "d_k_out" : "k",
               o.backward ? "d_k" : "k_out");
  }
  error = read_table(o, in, in.x->ndim, g);
  if (error.empty()) error = read_rows(o, in, g);
  if (!error.empty()) return error;
  if (o.in_place && o.pairing == Pairing::adjacent_to_half) {
    return say("%s: adjacent_to_half moves elements, so it cannot work in place; use rope", o.op);
  }
  const bool in_adjacent = o.pairing != Pairing::half, out_adjacent = o.pairing == Pairing::adjacent;
  g.in_adjacent = o.backward ? out_adjacent : in_adjacent;
  g.out_adjacent = o.backward ? in_adjacent : out_adjacent;
  g.transpose = o.transpose != o.backward;
  g.in_place = o.in_place;
  return {};
}

// The key-value split of multi-head latent attention. Forward reads kv [..,H,k+v] and emb [..,1,R], which all
// heads share, and writes key [..,H,k+R] and value [..,H,v]; backward reads the gradients of key and value
// and writes those of kv and emb.
struct Strided {
  void* data = nullptr;
  std::int64_t by_batch = 0, by_token = 0, by_head = 0;
};

struct KvGeometry {
  Geometry turn;  // batch, tokens, table, rows and rotation; its parts are unused
  std::int64_t heads = 0;
  std::int32_t k_dim = 0, v_dim = 0;
  Strided kv, emb, key, value;

  bool empty() const { return turn.batch == 0 || turn.tokens == 0; }  // there is always a head
};

struct KvTensors {
  const DLTensor *kv = nullptr, *emb = nullptr, *key = nullptr, *value = nullptr;
  const DLTensor *cos = nullptr, *sin = nullptr, *positions = nullptr, *starts = nullptr,
                 *cu_seqlens = nullptr;
};

inline std::string read(const Attributes& o, const KvTensors& in, KvGeometry& out) {
  using namespace detail;
  out = KvGeometry{};
  Geometry& g = out.turn;
  // The two tensors that are read decide; results may be absent.
  const char* forward_names[] = {"kv", "k_pos_emb", "key", "value"};
  const char* backward_names[] = {"d_kv", "d_k_pos_emb", "d_key", "d_value"};
  const auto* names = o.backward ? backward_names : forward_names;
  const DLTensor* tensors[] = {in.kv, in.emb, in.key, in.value};
  Strided* places[] = {&out.kv, &out.emb, &out.key, &out.value};
  const int first = o.backward ? 2 : 0;
  View views[4];
  for (int step = 0; step < 4; ++step) {
    const int i = (first + step) % 4;
    if (tensors[i] == nullptr) {
      if (step >= 2) continue;
      return say("%s: %s is missing", o.op, names[i]);
    }
    auto error = see(o, names[i], *tensors[i], views[i]);
    if (!error.empty()) return error;
    Float type{};
    if (!float_type(*tensors[i], type)) return say("%s: %s must be fp32, bf16 or fp16", o.op, names[i]);
    if (step == 0) g.type = type;
    if (type != g.type) {
      return say("%s: %s is %s, %s is %s", o.op, names[i], name_of(type), names[first], name_of(g.type));
    }
    if (views[i].batch != views[first].batch || views[i].tokens != views[first].tokens ||
        views[i].heads != (i == 1 ? 1 : views[first].heads)) {
      return say(
          "%s: %s has shape %s, %s has shape %s; batch and tokens must agree, heads too (k_pos_emb has one)",
          o.op, names[i], shape_text(*tensors[i]).c_str(), names[first], shape_text(*tensors[first]).c_str());
    }
    *places[i] = {const_cast<void*>(data_of(*tensors[i])), views[i].by_batch, views[i].by_token,
                  views[i].by_head};
  }
  if (in.cos == nullptr || in.sin == nullptr) {
    return say("%s: %s is missing", o.op, in.cos == nullptr ? "cos" : "sin");
  }
  if (o.k_dim < 0) {
    return say("%s: k_dim is %lld, it says how many columns of kv belong to the key", o.op,
               static_cast<long long>(o.k_dim));
  }
  if (o.k_dim > views[first].dim) {
    return say("%s: %s has %lld columns, k_dim is %lld", o.op, names[first],
               static_cast<long long>(views[first].dim), static_cast<long long>(o.k_dim));
  }
  const std::int64_t emb = o.backward ? views[2].dim - o.k_dim : views[1].dim;
  const std::int64_t v_dim = o.backward ? views[3].dim : views[0].dim - o.k_dim;
  const std::int64_t expect[] = {o.k_dim + v_dim, emb, o.k_dim + emb, v_dim};
  for (int i = 0; i < 4; ++i) {
    if (tensors[i] != nullptr && views[i].dim != expect[i]) {
      return say("%s: %s has %lld columns, k_dim %lld and the other tensors need %lld", o.op, names[i],
                 static_cast<long long>(views[i].dim), static_cast<long long>(o.k_dim),
                 static_cast<long long>(expect[i]));
    }
  }
  out.heads = views[first].heads;
  if (out.heads < 1) return say("%s: %s has no heads", o.op, names[first]);
  out.k_dim = static_cast<std::int32_t>(o.k_dim);
  out.v_dim = static_cast<std::int32_t>(v_dim);
  g.batch = views[first].batch, g.tokens = views[first].tokens;
  g.head_dim = static_cast<std::int32_t>(emb);
  Tensors tables;
  tables.cos = in.cos, tables.sin = in.sin, tables.positions = in.positions, tables.starts = in.starts;
  tables.cu_seqlens = in.cu_seqlens;
  auto error = read_table(o, tables, tensors[first]->ndim, g);
  if (error.empty()) error = read_rows(o, tables, g);
  if (!error.empty()) return error;
  if (g.rotary_dim != g.head_dim) {
    return say("%s: cos turns %d columns, %s has %d", o.op, g.rotary_dim, names[1], g.head_dim);
  }
  const bool in_adjacent = o.pairing != Pairing::half, out_adjacent = o.pairing == Pairing::adjacent;
  g.in_adjacent = o.backward ? out_adjacent : in_adjacent;
  g.out_adjacent = o.backward ? in_adjacent : out_adjacent;
  g.transpose = o.transpose != o.backward;
  return {};
}

// ---- from the slots of a call

// The order of arguments and attributes in the schemas of registry/rope/schema.cpp.

// rope and rope_bwd; rope_ has the same without kOut and kKOut.
enum RopeSlot { kX, kCos, kSin, kK, kPositions, kStarts, kCuSeqlens, kAxisMap, kOut, kKOut, kRopeArguments };
enum RopeAttribute {
  kLayout,
  kPairing,
  kTable,
  kRotaryDim,
  kRotaryOffset,
  kTranspose,
  kCpRank,
  kCpSize,
  kMropeT,
  kMropeH,
  kMropeW,
  kMropeInterleaved,
  kNegative,
  kRopeAttributes
};
// rope_mla_q and rope_mla_q_bwd.
enum MlaQSlot { kMlaX, kMlaCos, kMlaSin, kMlaPositions, kMlaStarts, kMlaCuSeqlens, kMlaOut, kMlaQArguments };
enum MlaQAttribute {
  kMlaLayout,
  kMlaRotaryDim,
  kMlaRemoveInterleaving,
  kMlaInverse,
  kMlaCpRank,
  kMlaCpSize,
  kMlaQAttributes
};
// rope_mla_kv (kv, k_pos_emb -> key, value) and rope_mla_kv_bwd (d_key, d_value -> d_kv, d_k_pos_emb).
enum MlaKvSlot {
  kKvIn0,
  kKvIn1,
  kKvCos,
  kKvSin,
  kKvPositions,
  kKvStarts,
  kKvCuSeqlens,
  kKvOut0,
  kKvOut1,
  kMlaKvArguments
};
enum MlaKvAttribute { kKvLayout, kKvKDim, kKvRemoveInterleaving, kKvCpRank, kKvCpSize, kMlaKvAttributes };

enum class Form { out_of_place, backward, in_place };

inline std::string read_rope(const rlk_slot* s, Form form, Geometry& g) {
  const bool in_place = form == Form::in_place;
  const rlk_slot* a = s + (in_place ? kOut : kRopeArguments);
  Attributes o;
  o.op = in_place ? "rope_" : form == Form::backward ? "rope_bwd" : "rope";
  o.layout = static_cast<Layout>(a[kLayout].i);
  o.pairing = static_cast<Pairing>(a[kPairing].i);
  o.table = static_cast<TableWidth>(a[kTable].i);
  o.rotary_dim = a[kRotaryDim].i, o.rotary_offset = a[kRotaryOffset].i;
  o.transpose = a[kTranspose].i != 0;
  o.cp_rank = a[kCpRank].i, o.cp_size = a[kCpSize].i;
  o.mrope[0] = a[kMropeT].i, o.mrope[1] = a[kMropeH].i, o.mrope[2] = a[kMropeW].i;
  o.mrope_interleaved = a[kMropeInterleaved].i != 0;
  o.negative = static_cast<Negative>(a[kNegative].i);
  o.backward = form == Form::backward, o.in_place = in_place;
  Tensors t;
  t.x = s[kX].tensor, t.k = s[kK].tensor, t.cos = s[kCos].tensor, t.sin = s[kSin].tensor;
  t.positions = s[kPositions].tensor, t.starts = s[kStarts].tensor;
  t.cu_seqlens = s[kCuSeqlens].tensor, t.axis_map = s[kAxisMap].tensor;
  t.out = in_place ? t.x : s[kOut].tensor;
  t.k_out = in_place ? t.k : s[kKOut].tensor;
  return read(o, t, g);
}

inline std::string read_mla_q(const rlk_slot* s, bool backward, Geometry& g) {
  const rlk_slot* a = s + kMlaQArguments;
  Attributes o;
  o.op = backward ? "rope_mla_q_bwd" : "rope_mla_q";
  o.layout = static_cast<Layout>(a[kMlaLayout].i);
  o.rotary_dim = a[kMlaRotaryDim].i;
  o.pairing = a[kMlaRemoveInterleaving].i != 0 ? Pairing::adjacent : Pairing::adjacent_to_half;
  o.transpose = a[kMlaInverse].i != 0;
  o.cp_rank = a[kMlaCpRank].i, o.cp_size = a[kMlaCpSize].i;
  o.trailing = o.second_half_last = true;
  o.backward = backward;
  Tensors t;
  t.x = s[kMlaX].tensor, t.cos = s[kMlaCos].tensor, t.sin = s[kMlaSin].tensor;
  t.positions = s[kMlaPositions].tensor, t.starts = s[kMlaStarts].tensor,
  t.cu_seqlens = s[kMlaCuSeqlens].tensor;
  t.out = s[kMlaOut].tensor;
  return read(o, t, g);
}

inline std::string read_mla_kv(const rlk_slot* s, bool backward, KvGeometry& g) {
  const rlk_slot* a = s + kMlaKvArguments;
  Attributes o;
  o.op = backward ? "rope_mla_kv_bwd" : "rope_mla_kv";
  o.layout = static_cast<Layout>(a[kKvLayout].i);
  o.k_dim = a[kKvKDim].i;
  o.pairing = a[kKvRemoveInterleaving].i != 0 ? Pairing::adjacent : Pairing::adjacent_to_half;
  o.cp_rank = a[kKvCpRank].i, o.cp_size = a[kKvCpSize].i;
  o.trailing = o.second_half_last = true;
  o.backward = backward;
  const DLTensor *in0 = s[kKvIn0].tensor, *in1 = s[kKvIn1].tensor, *out0 = s[kKvOut0].tensor,
                 *out1 = s[kKvOut1].tensor;
  KvTensors t;
  t.kv = backward ? out0 : in0, t.emb = backward ? out1 : in1;
  t.key = backward ? in0 : out0, t.value = backward ? in1 : out1;
  t.cos = s[kKvCos].tensor, t.sin = s[kKvSin].tensor, t.positions = s[kKvPositions].tensor;
  t.starts = s[kKvStarts].tensor, t.cu_seqlens = s[kKvCuSeqlens].tensor;
  return read(o, t, g);
}

// ---- tables

enum class Scaling { none, linear, ntk, dynamic, yarn, llama3, longrope };

struct TableRule {
  Scaling scaling = Scaling::none;
  std::int64_t rotary_dim = 0;
  double base = 10000, factor = 1;
  std::int64_t original_max = 0, seq_len = 0;
  double beta_fast = 32, beta_slow = 1, mscale = 0, mscale_all_dim = 0;
  bool truncate = true;
  double low_freq_factor = 1, high_freq_factor = 4;
  double attention_factor = 0;  // 0: what the rule gives
  const DLTensor* factors = nullptr;
};

// rope_tables, from the slots of a call.
enum TableSlot { kTableCos, kTableSin, kTablePositions, kTableFactors, kTableArguments };
enum TableAttribute {
  kTableRotaryDim,
  kTableRows,
  kTableStart,
  kTableWidth,
  kTableBase,
  kTableScaling,
  kTableFactor,
  kTableOriginalMax,
  kTableSeqLen,
  kTableBetaFast,
  kTableBetaSlow,
  kTableMscale,
  kTableMscaleAllDim,
  kTableTruncate,
  kTableLowFreqFactor,
  kTableHighFreqFactor,
  kTableAttentionFactor,
  kTableAttributes
};

// Sines and cosines are exact to an ulp for angles below 2^31, and a frequency is at most 1 in every rule
// whose factors do not speed it up.
inline constexpr std::int64_t kMostPosition = (std::int64_t{1} << 31) - 1;
constexpr bool served_position(std::int64_t p) { return p >= -kMostPosition && p <= kMostPosition; }
inline constexpr std::int64_t kMostTableDims = 512;

namespace detail {

// Between these no formula of a rule leaves the numbers, and no frequency exceeds 2^19.
inline constexpr double kLeastFactor = 0x1p-19, kMostFactor = 1e30;

// What makes the formulas of the rule divide by zero, or leave the numbers.
inline std::string check_scaling(const TableRule& r) {
  using S = Scaling;
  const auto within = [](const char* name, double x, double least) {
    return x >= least && x <= kMostFactor
               ? std::string()
               : say("rope_tables: %s is %g, it must be from %g to %g", name, x, least, kMostFactor);
  };
  if (!(r.base > 1 && r.base <= kMostFactor))
    return say("rope_tables: base is %g, it must be greater than 1 and at most %g", r.base, kMostFactor);
  std::string error = within("attention_factor", r.attention_factor, -kMostFactor);
  const auto check = [&](S scaling, const char* name, double x, double least) {
    if (error.empty() && r.scaling == scaling) error = within(name, x, least);
  };
  if (error.empty() && r.scaling != S::none) error = within("factor", r.factor, kLeastFactor);
  check(S::yarn, "beta_fast", r.beta_fast, kLeastFactor);
  check(S::yarn, "beta_slow", r.beta_slow, kLeastFactor);
  check(S::yarn, "mscale", r.mscale, -kMostFactor);
  check(S::yarn, "mscale_all_dim", r.mscale_all_dim, -kMostFactor);
  check(S::llama3, "low_freq_factor", r.low_freq_factor, kLeastFactor);
  check(S::llama3, "high_freq_factor", r.high_freq_factor, kLeastFactor);
  if (!error.empty()) return error;
  if ((r.scaling == S::ntk || r.scaling == S::dynamic) && r.rotary_dim < 4)
    return say("rope_tables: rotary_dim is %lld, this scaling needs at least 4",
               static_cast<long long>(r.rotary_dim));
  if (r.scaling == S::llama3 && r.low_freq_factor == r.high_freq_factor)
    return say("rope_tables: low_freq_factor and high_freq_factor are both %g, they must differ",
               r.low_freq_factor);
  if (r.scaling == S::longrope && r.factor > 1 && r.original_max == 1)
    return say("rope_tables: original_max is 1, longrope with factor %g needs at least 2", r.factor);
  return {};
}

}  // namespace detail

// The rule, the number of rows and the width of a call of rope_tables.
inline std::string read_table_rule(const rlk_slot* s, TableRule& r, std::int64_t& rows, bool& full) {
  using detail::say;
  const rlk_slot* a = s + kTableArguments;
  r.rotary_dim = a[kTableRotaryDim].i;
  r.scaling = static_cast<Scaling>(a[kTableScaling].i);
  r.base = a[kTableBase].f, r.factor = a[kTableFactor].f;
  r.original_max = a[kTableOriginalMax].i, r.seq_len = a[kTableSeqLen].i;
  r.beta_fast = a[kTableBetaFast].f, r.beta_slow = a[kTableBetaSlow].f;
  r.mscale = a[kTableMscale].f, r.mscale_all_dim = a[kTableMscaleAllDim].f;
  r.truncate = a[kTableTruncate].i != 0;
  r.low_freq_factor = a[kTableLowFreqFactor].f, r.high_freq_factor = a[kTableHighFreqFactor].f;
  r.attention_factor = a[kTableAttentionFactor].f;
  r.factors = s[kTableFactors].tensor;
  full = a[kTableWidth].i != 0;
  const bool needs_original = r.scaling == Scaling::dynamic || r.scaling == Scaling::yarn ||
                              r.scaling == Scaling::llama3 || r.scaling == Scaling::longrope;
  if (r.rotary_dim < 2 || r.rotary_dim % 2 != 0) {
    return say("rope_tables: rotary_dim is %lld, it must be even and positive",
               static_cast<long long>(r.rotary_dim));
  }
  if (r.rotary_dim > kMostTableDims) {
    return say("rope_tables: rotary_dim is %lld, at most %lld are served",
               static_cast<long long>(r.rotary_dim), static_cast<long long>(kMostTableDims));
  }
  if (auto error = detail::check_scaling(r); !error.empty()) return error;
  if (needs_original && r.original_max < 1) {
    return say("rope_tables: original_max is %lld, this scaling needs the length the model was trained for",
               static_cast<long long>(r.original_max));
  }
  if (r.scaling == Scaling::longrope && (r.factors == nullptr || r.factors->shape[0] != r.rotary_dim / 2)) {
    return say("rope_tables: longrope needs %lld factors, there are %lld",
               static_cast<long long>(r.rotary_dim / 2),
               r.factors == nullptr ? 0LL : static_cast<long long>(r.factors->shape[0]));
  }
  rows = a[kTableRows].i;
  if (const DLTensor* p = s[kTablePositions].tensor) {
    if (rows != 0 && rows != p->shape[0]) {
      return say("rope_tables: rows is %lld, there are %lld positions", static_cast<long long>(rows),
                 static_cast<long long>(p->shape[0]));
    }
    rows = p->shape[0];
    return {};
  }
  if (rows < 1)
    return say("rope_tables: rows is %lld and there are no positions", static_cast<long long>(rows));
  const std::int64_t start = a[kTableStart].i;
  if (!served_position(start) || rows > kMostPosition - start + 1) {
    return say("rope_tables: start is %lld and rows is %lld, positions are served from %lld to %lld",
               static_cast<long long>(start), static_cast<long long>(rows),
               static_cast<long long>(-kMostPosition), static_cast<long long>(kMostPosition));
  }
  return {};
}

}  // namespace rlk::rotary
