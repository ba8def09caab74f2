#include "onednn/products.hpp"

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "onednn/cpu.hpp"
#include "onednn/over_forks.hpp"
#include "onednn/turn.hpp"
#include "onednn/wide.hpp"

namespace rlk::onednn {
namespace {

using dnnl::memory;

// Never destroyed: plugins are never unloaded, and worker threads may outlive main.
const dnnl::engine& engine() {
  static const auto* e = new dnnl::engine(dnnl::engine::kind::cpu, 0);
  return *e;
}

memory::data_type data_type(Float type) {
  switch (type) {
    case Float::f32:
      return memory::data_type::f32;
    case Float::bf16:
      return memory::data_type::bf16;
    default:
      return memory::data_type::f16;
  }
}

memory::desc row_major(Float type, std::int64_t rows, std::int64_t cols) {
  return {{rows, cols}, data_type(type), memory::format_tag::ab};
}

// The matmul primitive itself, in the words of oneDNN 2 and 3. Strict math and caller's scratch are asked for
// on the primitive, where no environment variable or global default reaches.
Product make(const memory::desc& source, const memory::desc& weights, const memory::desc& result) {
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  attr.set_fpmath_mode(dnnl::fpmath_mode::strict);
#if DNNL_VERSION_MAJOR >= 3
  const dnnl::matmul::primitive_desc pd(engine(), source, weights, result, attr);
#else
  const dnnl::matmul::primitive_desc pd(dnnl::matmul::desc(source, weights, result), attr, engine());
#endif
  return {dnnl::matmul(pd), pd.src_desc(), pd.weights_desc(), pd.dst_desc(), pd.scratchpad_desc()};
}

// oneDNN takes all memory as writable; what it only reads stays unwritten.
memory view(const memory::desc& desc, const void* data) { return {desc, engine(), const_cast<void*>(data)}; }

std::size_t line(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

OneThread::OneThread() noexcept : saved_(omp_get_max_threads()) { omp_set_num_threads(1); }
OneThread::~OneThread() { omp_set_num_threads(saved_); }

namespace {

// What is tried. AMX computes whole tiles; without it low heights save work and a bit more memory traffic.
constexpr HeightSet tried(Rule rule) {
  return rule == Rule::k32 ? set_of({128, 96, 64, 32, 16, 8}) : (HeightSet{1} << kHeights.size()) - 1;
}

std::mutex& making() {
  static auto& mutex = *new std::mutex;
  held_over_forks<making>();
  return mutex;
}
// While that is held.
auto& made() {
  static auto& products =
      *new std::map<std::tuple<Rule, Float, std::int64_t, std::int64_t>, std::unique_ptr<Products>>;
  return products;
}
// When the plugin is loaded: a handler that is registered while another thread forks would miss that fork.
[[maybe_unused]] const auto& making_early = making();
[[maybe_unused]] const auto& made_early = made();

}  // namespace

const Products& Products::of(Rule rule, Float type, std::int64_t depth, std::int64_t weight_stride) {
  const std::lock_guard lock(making());
  auto& slot = made()[{rule, type, depth, weight_stride}];
  if (!slot) slot.reset(new Products(rule, type, depth, weight_stride));
  return *slot;
}

Products::Products(Rule r, Float t, std::int64_t k, std::int64_t stride)
    : rule(r), type(t), depth(k), padded(t == Float::f32 ? k : (k + 31) / 32 * 32), weight_stride(stride) {
  refusal = cpu_refusal(rule);
  if (!refusal.empty()) return;
  const OneThread one;
  const DefaultFloatMode mode;
  try {
    build();
    certify();
  } catch (const dnnl::error& e) {
    refusal = without_product(e.what());
  }
}

void Products::build() {
  // Rows that lack the padding are copied first.
  const bool as_it_lies = padded == depth;
  if (as_it_lies) rows_ = memory::desc({padded, kPanel}, data_type(type), memory::dims{1, weight_stride});
  dense_rows_ = memory::desc({padded, kPanel}, data_type(type), memory::dims{1, padded});
  dense_columns_ = row_major(type, padded, kPanel);
  const memory::desc any({padded, kPanel}, data_type(type), memory::format_tag::any);
  std::size_t scratchpad = 0;
  for (std::size_t i = 0; i < kHeights.size(); ++i) {
    if (!has(tried(rule), i)) continue;
    const memory::desc source = row_major(type, kHeights[i], padded);
    const memory::desc result = row_major(Float::f32, kHeights[i], kPanel);
    // The tallest product chooses the layout of packed panels, the others take it.
    packed_[i] = make(source, i == 0 ? any : packed_[0].weights, result);
    scratchpad = std::max(scratchpad, packed_[i].scratchpad.get_size());
    if (!as_it_lies || (i == 0 && rule == Rule::k32)) continue;
    plain_[i] = make(source, rows_, result);
    in_place_[i] = true;
    scratchpad = std::max(scratchpad, plain_[i].scratchpad.get_size());
  }
  if (as_it_lies) pack_rows_ = dnnl::reorder({engine(), rows_, engine(), packed_[0].weights});
  pack_dense_rows_ = dnnl::reorder({engine(), dense_rows_, engine(), packed_[0].weights});
  pack_dense_columns_ = dnnl::reorder({engine(), dense_columns_, engine(), packed_[0].weights});
  room_.result = 0;
  room_.panel = kResultBytes;
  room_.rows = room_.panel + line(panel_bytes());
  room_.scratchpad = room_.rows + line(static_cast<std::size_t>(kPanel * padded * bytes_of(type)));
  room_.total = room_.scratchpad + line(scratchpad);
}

void Products::pack(const void* rows, std::int64_t count, void* panel, std::byte* room) const {
  if (turned_ != 0 && count == kPanel) return turn_words(rows, turned_, panel);
  dnnl::stream stream(engine());
  if (count == kPanel && padded == depth) {
    memory from = view(rows_, rows);
    memory to = view(packed_[0].weights, panel);
    pack_rows_.execute(stream, from, to);
  } else {
    const auto bytes = static_cast<std::size_t>(depth * bytes_of(type));
    const auto pitch = static_cast<std::size_t>(padded * bytes_of(type));
    std::byte* dense = room + room_.rows;
    std::memset(dense, 0, static_cast<std::size_t>(kPanel) * pitch);
    for (std::int64_t j = 0; j < count; ++j)
      std::memcpy(dense + static_cast<std::size_t>(j) * pitch,
                  static_cast<const std::byte*>(rows) + j * weight_stride * bytes_of(type), bytes);
    memory from = view(dense_rows_, dense);
    memory to = view(packed_[0].weights, panel);
    pack_dense_rows_.execute(stream, from, to);
  }
  stream.wait();
}

// What oneDNN's AMX products take today: blocks of 64 columns, in each blocks of 32 steps, in each pairs of
// steps, in each the columns with the two steps beside each other. oneDNN's own way there is several times
// slower. Used only after it has given the same bytes.
namespace {

constexpr std::int64_t kPairColumns = 64;

RLK_WIDE void interleave(const std::uint16_t* even, const std::uint16_t* odd, std::uint32_t* to) {
  for (std::int64_t j = 0; j < kPairColumns; ++j) to[j] = even[j] | std::uint32_t{odd[j]} << 16;
}

void pack_pairs(const std::uint16_t* from, std::int64_t stride, std::int64_t steps, std::int64_t count,
                std::int64_t padded, std::uint32_t* to) {
  constexpr std::int64_t kAhead = 16;  // a line of the matrix is a page of its own: ask for it early
  const std::int64_t half = padded / 2 * kPairColumns;
  std::uint16_t filled[2][kPanel] = {};
  for (std::int64_t r = 0; r < padded; r += 2, to += kPairColumns) {
    const std::uint16_t* line[2];
    for (std::int64_t i = 0; i < 2; ++i) {
      line[i] = from + (r + i) * stride;
      if (r + i + kAhead < steps)
        for (std::int64_t j = 0; j < count; j += 32) __builtin_prefetch(line[i] + kAhead * stride + j);
      if (count == kPanel && r + i < steps) continue;
      if (r + i < steps)
        std::memcpy(filled[i], line[i], static_cast<std::size_t>(count) * sizeof(std::uint16_t));
      else
        std::memset(filled[i], 0, sizeof filled[i]);
      line[i] = filled[i];
    }
    interleave(line[0], line[1], to);
    interleave(line[0] + kPairColumns, line[1] + kPairColumns, to + half);
  }
}

}  // namespace

void Products::pack_columns(const void* lines, std::int64_t stride, std::int64_t steps, std::int64_t count,
                            void* panel, std::byte* room) const {
  if (pairs_)
    return pack_pairs(static_cast<const std::uint16_t*>(lines), stride, steps, count, padded,
                      static_cast<std::uint32_t*>(panel));
  const std::int64_t bytes = bytes_of(type);
  const auto pitch = static_cast<std::size_t>(kPanel * bytes),
             width = static_cast<std::size_t>(count * bytes);
  std::byte* dense = room + room_.rows;
  std::memset(dense, 0, static_cast<std::size_t>(padded) * pitch);
  for (std::int64_t i = 0; i < steps; ++i)
    std::memcpy(dense + static_cast<std::size_t>(i) * pitch,
                static_cast<const std::byte*>(lines) + i * stride * bytes, width);
  dnnl::stream stream(engine());
  memory from = view(dense_columns_, dense);
  memory to = view(packed_[0].weights, panel);
  pack_dense_columns_.execute(stream, from, to);
  stream.wait();
}

bool Products::takes_pairs(std::byte* room) {
  const auto elements = static_cast<std::size_t>(padded * kPanel);
  if (rule != Rule::k32 || panel_bytes() != elements * sizeof(std::uint16_t)) return false;
  std::vector<std::uint16_t> lines(elements), theirs(elements);
  std::vector<std::uint32_t> ours(elements / 2);
  for (std::size_t i = 0; i < elements; ++i) lines[i] = static_cast<std::uint16_t>(i % 65521 + 1);
  // One step and one column short, so that the filling is compared too.
  pack_columns(lines.data(), kPanel, padded - 1, kPanel - 1, theirs.data(), room);
  pack_pairs(lines.data(), kPanel, padded - 1, kPanel - 1, padded, ours.data());
  return std::memcmp(ours.data(), theirs.data(), panel_bytes()) == 0;
}

void Products::turn_words(const void* rows, std::int64_t width, void* panel) const {
  const std::int64_t each = type == Float::f32 ? 1 : 2;
  turn(static_cast<const float*>(rows), weight_stride / each, depth / each, width,
       static_cast<float*>(panel));
}

std::int64_t Products::turned_width(const std::byte* rows, const std::byte* panel) const {
  if (rule == Rule::k32 || !can_turn()) return 0;
  if (type != Float::f32 && (padded != depth || weight_stride % 2 != 0)) return 0;
  std::vector<std::byte> ours(static_cast<std::size_t>(depth * kPanel * bytes_of(type)));
  if (panel_bytes() != ours.size()) return 0;
  for (const std::int64_t width : {kPanel, kPanel / 2, kPanel / 4}) {
    turn_words(rows, width, ours.data());
    if (std::memcmp(ours.data(), panel, panel_bytes()) == 0) return width;
  }
  return 0;
}

const float* Products::run(std::int64_t height, const void* source, const void* rows, std::int64_t count,
                           const void* panel, std::byte* room, float* to) const {
  const std::size_t i = index_of(height);
  const bool plain = panel == nullptr && reads_in_place(height, count);
  if (panel == nullptr && !plain) {
    pack(rows, count, room + room_.panel, room);
    panel = room + room_.panel;
  }
  if (to == nullptr) to = reinterpret_cast<float*>(room + room_.result);
  if (one_row() && height == 1 && !plain) {
    row_times_panel(static_cast<const float*>(source), static_cast<const float*>(panel), depth, turned_, to);
    return to;
  }
  const Product& p = plain ? plain_[i] : packed_[i];
  dnnl::stream stream(engine());
  p.primitive.execute(stream, {{DNNL_ARG_SRC, view(p.source, source)},
                               {DNNL_ARG_WEIGHTS, view(p.weights, plain ? rows : panel)},
                               {DNNL_ARG_DST, view(p.result, to)},
                               {DNNL_ARG_SCRATCHPAD, view(p.scratchpad, room + room_.scratchpad)}});
  stream.wait();
  return to;
}

// Every product on the same random data, every element of each against the rule. A height that differs is not
// used; where only the product on the weight as it lies differs, that height packs first.
void Products::certify() {
  const std::int64_t bytes = bytes_of(type);
  // Where the rule says what becomes of subnormal numbers, some rows and columns have them.
  const auto is_tiny = [&](std::int64_t i) { return rule == Rule::pairs && i % 4 == 3; };
  std::vector<std::byte> source(static_cast<std::size_t>(kHeights[0] * padded * bytes));
  std::vector<std::byte> weight(static_cast<std::size_t>(((kPanel - 1) * weight_stride + depth) * bytes));
  std::vector<float> row(static_cast<std::size_t>(depth)), columns(static_cast<std::size_t>(depth * kPanel)),
      expected(static_cast<std::size_t>(kHeights[0] * kPanel));
  for (std::int64_t j = 0; j < kPanel; ++j) {
    std::byte* at = weight.data() + j * weight_stride * bytes;
    fill(type, at, depth, static_cast<std::uint32_t>(1000 + j), is_tiny(j));
    upcast(type, at, depth, row.data());
    for (std::int64_t k = 0; k < depth; ++k)
      columns[static_cast<std::size_t>(k * kPanel + j)] = row[static_cast<std::size_t>(k)];
  }
  for (std::int64_t i = 0; i < kHeights[0]; ++i) {
    std::byte* at = source.data() + i * padded * bytes;
    fill(type, at, depth, static_cast<std::uint32_t>(i), is_tiny(i));
    upcast(type, at, depth, row.data());
    rule_row(rule, row.data(), columns.data(), depth, &expected[static_cast<std::size_t>(i * kPanel)]);
  }
  std::vector<std::byte> room_bytes(room_.total + 64), panel(panel_bytes() + 64);
  std::byte* room = room_bytes.data() + (64 - reinterpret_cast<std::uintptr_t>(room_bytes.data()) % 64) % 64;
  pairs_ = takes_pairs(room);
  pack(weight.data(), kPanel, panel.data(), room);
  const std::int64_t width = turned_width(weight.data(), panel.data());
  for (std::size_t i = 0; i < kHeights.size(); ++i) {
    if (!has(tried(rule), i)) continue;
    if (reproduces(i, panel.data(), source, weight.data(), expected, room)) heights |= HeightSet{1} << i;
    in_place_[i] =
        in_place_[i] && has(heights, i) && reproduces(i, nullptr, source, weight.data(), expected, room);
  }
  turned_ = width;
  if (one_row()) heights |= set_of({1});
  // Rows one at a time would be right too, and many times slower than anybody wants. On AMX the backward
  // counts on the tallest.
  const HeightSet needed = rule == Rule::k32 ? set_of({128}) : set_of({128, 96, 64, 48, 32, 24, 16});
  if ((heights & needed) == 0) refusal = other_order(rule, depth);
}

bool Products::reproduces(std::size_t height, const std::byte* panel, std::span<const std::byte> source,
                          const std::byte* weight, std::span<const float> expected, std::byte* room) const {
  const float* sums = run(kHeights[height], source.data(), weight, kPanel, panel, room);
  return std::memcmp(sums, expected.data(),
                     static_cast<std::size_t>(kHeights[height] * kPanel) * sizeof(float)) == 0;
}

}  // namespace rlk::onednn
