#include "src/harness/problem.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "registry/reference.hpp"
#include "src/check.hpp"
#include "src/failure.hpp"
#include "src/harness/derived.hpp"
#include "src/registry.hpp"

namespace rlk::harness {

using registry::Fill;

uint64_t hash_bytes(const void* data, std::size_t size, uint64_t h) {
  const auto* p = static_cast<const unsigned char*>(data);
  for (; size >= 8; size -= 8, p += 8) {
    uint64_t word;
    std::memcpy(&word, p, 8);
    h = (h ^ word) * 1099511628211ull;
    h ^= h >> 32;
  }
  for (; size; --size, ++p) h = (h ^ *p) * 1099511628211ull;
  return h;
}

namespace {

// SplitMix64: no library behind it, so the same data everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  // Sum of twelve uniforms: libm's log and cos differ between versions, additions do not.
  double normal() {
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum;
  }

 private:
  uint64_t state_;
};

void fill(Array& a, const Fill& f, uint64_t seed) {
  Random random(seed);
  const int64_t n = a.numel(), last = a.shape.empty() ? 1 : std::max<int64_t>(1, a.shape.back());
  const auto loud = static_cast<int64_t>(random.bits() % static_cast<uint64_t>(last));
  double previous = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t column = i % last;
    double x = 0;
    switch (f.kind) {
      case Fill::normal:
        x = f.a + f.b * random.normal();
        break;
      case Fill::uniform:
        x = f.a + (f.b - f.a) * random.uniform();
        break;
      case Fill::constant:
        x = f.a;
        break;
      case Fill::heavy_tailed:
        x = f.b * random.normal() * (column == loud ? 1000 : 1);
        break;
      case Fill::linspace:
        x = f.a + (f.b - f.a) * (n > 1 ? static_cast<double>(i) / static_cast<double>(n - 1) : 0);
        break;
      case Fill::cancellation:
        x = column % 2 ? -previous + 1e-3 * random.normal() : random.normal();
        break;
      case Fill::one_hot:
        x = column == (i / last * 7 + static_cast<int64_t>(seed % 97)) % last;
        break;
      case Fill::powers_of_two: {
        const double span = f.b - f.a + 1;
        x = std::ldexp(random.bits() & 1 ? -1 : 1,
                       static_cast<int>(f.a + std::floor(span * random.uniform())));
        break;
      }
      case Fill::log_decay:
        x = -f.b * random.uniform();
        break;
      case Fill::integers:
        x = std::floor(f.a + (f.b - f.a) * random.uniform());
        break;
      case Fill::same_rows:
        if (column == 0) random = Random(seed);
        x = f.a + f.b * random.normal();
        break;
      case Fill::sorted:
        x = f.a + (f.b - f.a) * static_cast<double>(column) / static_cast<double>(last);
        break;
      case Fill::quick:
        x = f.b * (static_cast<double>(random.bits() >> 40) * 0x1p-23 - 1);
        break;
      case Fill::values:
        x = f.list.empty() ? 0 : f.list[static_cast<std::size_t>(i) % f.list.size()];
        break;
    }
    registry::store(a.dtype, a.bytes.data(), i, x);
    previous = registry::load(a.dtype, a.bytes.data(), i);
  }
}

Array make_array(const std::vector<int64_t>& shape, DType dtype) {
  Array a{shape, dtype, {}};
  a.bytes.resize(static_cast<std::size_t>(a.numel() * size_of(dtype)));
  return a;
}

bool floating(DType t) {
  return t == DType::f16 || t == DType::bf16 || t == DType::f32 || t == DType::f64 || t == DType::f8_e4m3;
}

int argument_index(const rlk_op_schema& s, std::string_view name) {
  for (uint32_t i = 0; i < s.num_arguments; ++i)
    if (name == s.arguments[i].name) return static_cast<int>(i);
  return -1;
}

Status set_attribute(Problem& p, const std::string& name,
                     const std::variant<int64_t, double, std::string>& value) {
  const rlk_op_schema& s = p.schema();
  for (uint32_t i = 0; i < s.num_attributes; ++i) {
    const rlk_attribute& a = s.attributes[i];
    if (name != a.name) continue;
    rlk_slot& slot = p.attributes[i];
    if (const auto* word = std::get_if<std::string>(&value)) {
      int64_t choice = 0;
      for (std::string_view rest = a.choices ? a.choices : "";; ++choice) {
        const auto bar = rest.find('|');
        if (rest.substr(0, bar) == *word) return slot.i = choice, Status();
        if (bar == rest.npos) break;
        rest = rest.substr(bar + 1);
      }
      return {RLK_INVALID_ARGUMENT,
              fmt::format("{}: case '{}': {} has no choice '{}'", s.name, p.name, name, *word)};
    }
    const double number = std::holds_alternative<double>(value)
                              ? std::get<double>(value)
                              : static_cast<double>(std::get<int64_t>(value));
    if (a.type == RLK_FLOAT)
      slot.f = number;
    else
      slot.i =
          std::holds_alternative<int64_t>(value) ? std::get<int64_t>(value) : static_cast<int64_t>(number);
    return {};
  }
  return {RLK_INVALID_ARGUMENT,
          fmt::format("{}: case '{}': no attribute is called '{}'", s.name, p.name, name)};
}

// The schema's batch axes with the case's changes; results follow their inputs when a case moved the axis.
void settle_batch_axes(Problem& p, const registry::Case& c) {
  const rlk_op_schema& s = p.schema();
  std::optional<int32_t> moved;
  for (uint32_t i = 0; i < s.num_arguments; ++i) p.batch_axis.push_back(s.arguments[i].batch_axis);
  for (const auto& t : c.inputs)
    if (t.batch_axis != -3) {
      const auto i = static_cast<std::size_t>(argument_index(s, t.argument));
      if (p.batch_axis[i] != -1) moved = t.batch_axis;
      p.batch_axis[i] = t.batch_axis;
    }
  if (moved)
    for (std::size_t i = 0; i < p.batch_axis.size(); ++i)
      if (s.arguments[i].role == RLK_WRITE && p.batch_axis[i] != -1) p.batch_axis[i] = *moved;
  for (const auto& [name, axis] : c.batch_axes)
    if (const int i = argument_index(s, name); i >= 0) p.batch_axis[static_cast<std::size_t>(i)] = axis;
}

}  // namespace

int64_t Array::numel() const {
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  return n;
}

DType Problem::input_dtype() const {
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i]) return inputs[i]->dtype;
    if (results[i] != DType::none) return results[i];
  }
  return DType::none;
}

int Problem::shared_with(std::size_t argument) const {
  for (const auto& [owner, other] : shared)
    if (other == argument) return static_cast<int>(owner);
  return -1;
}

std::string Problem::shape_text() const {
  std::string text;
  for (std::size_t i = 0; i < inputs.size(); ++i)
    if (inputs[i])
      text += fmt::format("{}{}={}", text.empty() ? "" : ",", schema().arguments[i].name,
                          fmt::join(inputs[i]->shape, "x"));
  return text;
}

Result<Problem> materialise(const registry::Op& op, const registry::Case& c, uint64_t seed) {
  const rlk_op_schema& s = *op.schema;
  Problem p;
  p.op = &op;
  p.name = c.name;
  p.seed = seed;
  p.reduction = c.reduction;
  p.large = c.large;
  p.most_rows = c.most_rows;
  p.brief = c.brief || c.sampled;
  p.sampled = c.sampled;
  p.ruled = c.ruled;
  p.exact = c.exact;
  p.cancels = c.cancels;
  p.inputs.resize(s.num_arguments);
  p.strides.resize(s.num_arguments);
  p.results.assign(s.num_arguments, DType::none);
  for (uint32_t i = 0; i < s.num_attributes; ++i) {
    rlk_slot slot{};
    if (s.attributes[i].type == RLK_FLOAT)
      slot.f = s.attributes[i].default_float;
    else
      slot.i = s.attributes[i].default_int;
    p.attributes.push_back(slot);
  }
  for (const auto& [name, value] : c.attributes)
    if (Status status = set_attribute(p, name, value); !status) return status;
  // A derived case has the numbers of the one that it was made from.
  const std::size_t letters = base_name(c.name).size();
  const uint64_t base = hash_bytes(c.name.data(), letters, hash_bytes(s.name, std::strlen(s.name))) ^
                        seed * 0x9e3779b97f4a7c15ull;
  for (const registry::CaseTensor& t : c.inputs) {
    const int at = argument_index(s, t.argument);
    if (at < 0 || s.arguments[at].role == RLK_WRITE)
      return Status(RLK_INVALID_ARGUMENT,
                    fmt::format("{}: case '{}': '{}' is not an input", s.name, c.name, t.argument));
    Array a = make_array(t.shape, t.dtype);
    fill(a, t.fill, hash_bytes(t.argument.data(), t.argument.size(), base));
    p.inputs[static_cast<std::size_t>(at)] = std::move(a);
    p.strides[static_cast<std::size_t>(at)] = t.strides;
    if (s.arguments[at].role == RLK_READWRITE) p.results[static_cast<std::size_t>(at)] = t.dtype;
  }
  for (const auto& [name, dtype] : c.results) {
    const int at = argument_index(s, name);
    if (at < 0 || s.arguments[at].role == RLK_READ)
      return Status(RLK_INVALID_ARGUMENT,
                    fmt::format("{}: case '{}': '{}' is not a result", s.name, c.name, name));
    p.results[static_cast<std::size_t>(at)] = dtype;
  }
  for (const auto& [owner, other] : c.shared) {
    const auto a = static_cast<std::size_t>(argument_index(s, owner)),
               b = static_cast<std::size_t>(argument_index(s, other));
    p.inputs[b] = p.inputs[a];
    p.shared.emplace_back(a, b);
  }
  settle_batch_axes(p, c);
  return p;
}

Result<std::vector<ResultShape>> result_shapes(const Problem& p) {
  const rlk_op_schema& s = p.schema();
  std::vector<Tensor> tensors(s.num_arguments);
  std::vector<rlk_slot> slots(s.num_arguments + s.num_attributes);
  for (uint32_t i = 0; i < s.num_arguments; ++i) {
    if (!p.inputs[i]) continue;
    const Array& a = *p.inputs[i];
    // infer reads shapes only, except host arguments, whose contents may decide shapes.
    tensors[i] = Tensor(const_cast<std::byte*>(a.bytes.data()), std::span(a.shape), a.dtype);
    slots[i].tensor = &tensors[i].dl();
  }
  std::copy(p.attributes.begin(), p.attributes.end(), slots.begin() + s.num_arguments);
  rlk_shape shapes[RLK_MAX_SLOTS] = {};
  if (Status status = infer_shapes(s, slots.data(), shapes); !status) return status;
  std::vector<ResultShape> out(s.num_arguments);
  for (uint32_t i = 0; i < s.num_arguments; ++i) {
    if (s.arguments[i].role == RLK_READWRITE && p.inputs[i])
      out[i] = {p.inputs[i]->shape, static_cast<uint32_t>(p.inputs[i]->dtype)};
    else if (s.arguments[i].role == RLK_WRITE)
      out[i] = {{shapes[i].dim, shapes[i].dim + shapes[i].ndim}, shapes[i].dtypes};
  }
  return out;
}

bool admitted(const Problem& p, int64_t most) {
  const auto shapes = result_shapes(p);
  if (!shapes) return false;
  const rlk_op_schema& s = p.schema();
  std::vector<Tensor> tensors(s.num_arguments);
  std::vector<rlk_slot> slots(s.num_arguments + s.num_attributes);
  for (uint32_t i = 0; i < s.num_arguments; ++i) {
    if (p.inputs[i]) {
      const Array& a = *p.inputs[i];
      tensors[i] = Tensor(const_cast<std::byte*>(a.bytes.data()), std::span(a.shape), a.dtype);
    } else if (p.results[i] != DType::none) {
      const Array result{(*shapes)[i].shape, p.results[i], {}};
      if (result.numel() > most) return false;
      tensors[i] = Tensor(nullptr, std::span(result.shape), result.dtype);
    } else {
      continue;
    }
    slots[i].tensor = &tensors[i].dl();
  }
  std::copy(p.attributes.begin(), p.attributes.end(), slots.begin() + s.num_arguments);
  DLDevice device{};
  return static_cast<bool>(check_call(s, slots.data(), CheckData::no, device));
}

Problem magnitudes(const Problem& p) {
  Problem out = p;
  for (auto& a : out.inputs)
    if (a && (a->dtype == DType::f16 || a->dtype == DType::bf16 || a->dtype == DType::f32))
      for (int64_t i = 0; i < a->numel(); ++i)
        registry::store(a->dtype, a->bytes.data(), i,
                        std::fabs(registry::load(a->dtype, a->bytes.data(), i)));
  return out;
}

std::vector<Problem> neighbours(const Problem& p) {
  constexpr uint32_t kPlaces = 4;
  std::vector<Problem> out;
  for (std::size_t argument = 0; argument < p.inputs.size(); ++argument) {
    const auto& from = p.inputs[argument];
    if (!from || p.shared_with(argument) >= 0 || !floating(from->dtype)) continue;
    for (const uint32_t way : {kPlaces, ~kPlaces + 1}) {
      Problem& q = out.emplace_back(p);
      Array& a = *q.inputs[argument];
      const auto size = static_cast<std::size_t>(size_of(a.dtype));
      Random random(p.seed + argument);  // the other way is the opposite one, element by element
      for (int64_t i = 0; i < a.numel(); ++i) {
        const double x = registry::load(a.dtype, a.bytes.data(), i);
        uint32_t bits = 0;
        std::byte* at = a.bytes.data() + static_cast<std::size_t>(i) * size;
        std::memcpy(&bits, at, size);
        bits += random.bits() & 1 ? way : ~way + 1;
        std::memcpy(at, &bits, size);
        // What is no number of some size keeps its place: 0, infinities, the ends of the range.
        const double y = registry::load(a.dtype, a.bytes.data(), i);
        if (!std::isfinite(x) || !std::isfinite(y) || std::fabs(y - x) > 0.125 * std::fabs(x))
          registry::store(a.dtype, a.bytes.data(), i, x);
      }
      for (const auto& [owner, other] : q.shared) q.inputs[other] = q.inputs[owner];
    }
  }
  return out;
}

std::optional<Problem> with_fp32_results(const Problem& p) {
  const auto shapes = result_shapes(p);
  if (!shapes) return {};
  Problem out = p;
  bool changed = false;
  for (std::size_t i = 0; i < p.results.size(); ++i)
    if ((p.results[i] == DType::bf16 || p.results[i] == DType::f16) && ((*shapes)[i].dtypes & RLK_F32) &&
        p.schema().arguments[i].role == RLK_WRITE) {
      out.results[i] = DType::f32;
      changed = true;
    }
  if (!changed) return {};
  out.name += " [fp32 results]";
  return out;
}

namespace {
std::vector<int64_t> drawn_indices(int64_t n, std::size_t wanted, uint64_t seed) {
  std::vector<int64_t> out{0, n - 1, n / 2};
  Random random(seed);
  while (n > 0 && out.size() < wanted)
    out.push_back(static_cast<int64_t>(random.bits() % static_cast<uint64_t>(n)));
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  out.erase(out.begin(), std::lower_bound(out.begin(), out.end(), 0));
  return out;
}
}  // namespace

Grid grid_of(const Problem& p, std::size_t argument, const std::vector<int64_t>& shape) {
  const int64_t width = shape.empty() ? 1 : shape.back();
  int64_t rows = 1;
  for (std::size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
  const uint64_t seed = hash_bytes(p.name.data(), p.name.size(), p.seed + argument);
  return {drawn_indices(rows, 12, seed), drawn_indices(width, 40, seed + 1)};
}

Array on_grid(const Array& a, const Grid& grid) {
  Array out{{static_cast<int64_t>(grid.rows.size()), static_cast<int64_t>(grid.columns.size())}, a.dtype, {}};
  const auto size = static_cast<std::size_t>(size_of(a.dtype));
  const int64_t width = a.shape.empty() ? 1 : a.shape.back();
  for (int64_t r : grid.rows)
    for (int64_t c : grid.columns) {
      const std::byte* from = a.bytes.data() + static_cast<std::size_t>(r * width + c) * size;
      out.bytes.insert(out.bytes.end(), from, from + size);
    }
  return out;
}

// ---- rows

RowView row_view(const std::vector<int64_t>& shape, int32_t axis) {
  RowView v{1, 1, 1};
  const auto rank = static_cast<int32_t>(shape.size());
  for (int32_t i = 0; i < rank; ++i) {
    const int64_t d = shape[static_cast<std::size_t>(i)];
    if (axis == -2)
      (i + 1 < rank ? v.rows : v.inner) *= d;
    else
      (i < axis ? v.outer : i == axis ? v.rows : v.inner) *= d;
  }
  return v;
}

std::optional<int64_t> row_count(const Problem& p) {
  std::optional<int64_t> rows;
  for (std::size_t i = 0; i < p.inputs.size(); ++i) {
    if (!p.inputs[i] || p.batch_axis[i] == -1) continue;
    const int64_t n = row_view(p.inputs[i]->shape, p.batch_axis[i]).rows;
    if (rows && *rows != n) return {};
    rows = n;
  }
  return rows;
}

const char* name_of(Filler f) {
  constexpr const char* kNames[] = {"other", "zeros", "copies", "scaled", "denormal", "inf", "nan"};
  return kNames[static_cast<int>(f)];
}

namespace {

double smallest(DType t) {
  if (t == DType::f8_e4m3) return 0x1p-9;
  return t == DType::f16 ? 0x1p-24 : t == DType::bf16 ? 0x1p-133 : t == DType::f32 ? 0x1p-149 : 0x1p-1074;
}

double filler_value(Filler f, DType t, double like, int64_t i) {
  switch (f) {
    case Filler::zeros:
      return 0;
    case Filler::scaled:
      return like * 1e4;
    case Filler::denormal:
      return smallest(t) * static_cast<double>(1 + i % 5) * (i % 2 ? -1 : 1);
    case Filler::infinity:
      return i % 3 ? -INFINITY : INFINITY;
    case Filler::nan:
      return std::nan("");
    default:
      return like * 0.5;
  }
}

// Rows gathered into an array whose batch axis has length source.size(); rank is kept.
std::optional<std::vector<int64_t>> shape_with_rows(const std::vector<int64_t>& shape, int32_t axis,
                                                    int64_t rows) {
  std::vector<int64_t> out = shape;
  if (axis >= 0) {
    out[static_cast<std::size_t>(axis)] = rows;
  } else {
    if (out.size() < 2) return rows == 1 ? std::optional(out) : std::nullopt;
    for (std::size_t i = 0; i + 2 < out.size(); ++i) out[i] = 1;
    out[out.size() - 2] = rows;
  }
  return out;
}

}  // namespace

std::optional<Problem> compose(const Problem& p, const std::vector<int64_t>& source, Filler filler) {
  const auto rows = row_count(p);
  if (!rows || *rows == 0) return {};
  Problem out = p;
  const auto n = static_cast<int64_t>(source.size());
  for (std::size_t a = 0; a < p.inputs.size(); ++a) {
    if (!p.inputs[a] || p.batch_axis[a] == -1) continue;
    const Array& from = *p.inputs[a];
    const auto shape = shape_with_rows(from.shape, p.batch_axis[a], n);
    if (!shape) return {};
    Array to = make_array(*shape, from.dtype);
    const RowView v = row_view(from.shape, p.batch_axis[a]);
    const std::size_t row_bytes = static_cast<std::size_t>(v.inner * size_of(from.dtype));
    // Most fillers are a function of the row they resemble, so each such row is made once.
    const bool varies = filler == Filler::denormal || filler == Filler::infinity;
    Array like = from;
    if (!varies && filler != Filler::copies && floating(from.dtype))
      for (int64_t i = 0; i < from.numel(); ++i)
        registry::store(
            from.dtype, like.bytes.data(), i,
            filler_value(filler, from.dtype, registry::load(from.dtype, from.bytes.data(), i), 0));
    for (int64_t o = 0; o < v.outer; ++o)
      for (int64_t i = 0; i < n; ++i) {
        const int64_t s = source[static_cast<std::size_t>(i)];
        const int64_t base = s >= 0 ? s : filler == Filler::copies ? 0 : (i * 7 + 3) % *rows;
        const bool same = s >= 0 || filler == Filler::copies || (filler == Filler::other && i % 2 == 0);
        std::byte* row = to.bytes.data() + static_cast<std::size_t>(o * n + i) * row_bytes;
        std::copy_n(
            (same ? from : like).bytes.data() + static_cast<std::size_t>(o * v.rows + base) * row_bytes,
            row_bytes, row);
        if (same || !varies || !floating(from.dtype)) continue;
        for (int64_t j = 0; j < v.inner; ++j)
          registry::store(from.dtype, row, j, filler_value(filler, from.dtype, 0, i + j));
      }
    out.inputs[a] = std::move(to);
    out.strides[a].clear();
  }
  return out;
}

Array take_rows(const Array& a, int32_t axis, const std::vector<int64_t>& rows) {
  const RowView v = row_view(a.shape, axis);
  Array out{{v.outer, static_cast<int64_t>(rows.size()), v.inner}, a.dtype, {}};
  const auto row_bytes = static_cast<std::size_t>(v.inner * size_of(a.dtype));
  out.bytes.resize(static_cast<std::size_t>(v.outer) * rows.size() * row_bytes);
  std::byte* to = out.bytes.data();
  for (int64_t o = 0; o < v.outer; ++o)
    for (int64_t r : rows) {
      std::copy_n(a.bytes.data() + static_cast<std::size_t>(o * v.rows + r) * row_bytes, row_bytes, to);
      to += row_bytes;
    }
  return out;
}

std::optional<Problem> reshaped(const Problem& p, const std::vector<int64_t>& leading) {
  if (!row_count(p)) return {};
  Problem out = p;
  const rlk_op_schema& s = p.schema();
  const auto rank = static_cast<int32_t>(leading.size()) + 1;
  for (std::size_t i = 0; i < p.batch_axis.size(); ++i) {
    const bool there = p.inputs[i] || p.results[i] != DType::none;
    if (!there || p.batch_axis[i] == -1) continue;
    if (p.batch_axis[i] != -2 || rank < s.arguments[i].min_rank || rank > s.arguments[i].max_rank) return {};
    if (!p.inputs[i]) continue;
    std::vector<int64_t> shape = leading;
    shape.push_back(p.inputs[i]->shape.back());
    out.inputs[i]->shape = std::move(shape);
    out.strides[i].clear();
  }
  return out;
}

}  // namespace rlk::harness
