#include "matmul.hpp"

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

namespace rlk::onednn {
namespace {

using dnnl::memory;

// Never destroyed: plugins are never unloaded, and worker threads may outlive main.
const dnnl::engine& engine() {
  static const auto* e = new dnnl::engine(dnnl::engine::kind::cpu, 0);
  return *e;
}

memory::data_type data_type(Type type) {
  switch (type) {
    case Type::f32:
      return memory::data_type::f32;
    case Type::bf16:
      return memory::data_type::bf16;
    default:
      return memory::data_type::f16;
  }
}

memory::desc row_major(Type type, std::int64_t rows, std::int64_t cols) {
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

const Products& Products::of(Type type, std::int64_t depth, std::int64_t weight_stride) {
  static std::mutex mutex;
  static auto* made = new std::map<std::tuple<Type, std::int64_t, std::int64_t>, std::unique_ptr<Products>>;
  const std::lock_guard lock(mutex);
  auto& slot = (*made)[{type, depth, weight_stride}];
  if (!slot) slot.reset(new Products(type, depth, weight_stride));
  return *slot;
}

Products::Products(Type t, std::int64_t k, std::int64_t stride)
    : type(t), depth(k), padded(t == Type::f32 ? k : (k + 31) / 32 * 32), weight_stride(stride) {
  const OneThread one;
  const DefaultFloatMode mode;
  try {
    build();
    refusal = certify();
  } catch (const dnnl::error& e) {
    refusal = e.what();
  }
}

void Products::build() {
  // Rows that lack the padding are copied first.
  const bool as_it_lies = padded == depth;
  if (as_it_lies) rows_ = memory::desc({padded, kPanel}, data_type(type), memory::dims{1, weight_stride});
  dense_rows_ = memory::desc({padded, kPanel}, data_type(type), memory::dims{1, padded});
  const memory::desc any({padded, kPanel}, data_type(type), memory::format_tag::any);
  std::size_t scratchpad = 0;
  for (std::size_t i = 0; i < kHeights.size(); ++i) {
    const memory::desc source = row_major(type, kHeights[i], padded);
    const memory::desc result = row_major(Type::f32, kHeights[i], kPanel);
    // The tallest product chooses the layout of packed panels, the others take it.
    packed_[i] = make(source, i == 0 ? any : packed_[0].weights, result);
    scratchpad = std::max(scratchpad, packed_[i].scratchpad.get_size());
    if (i == 0 || !as_it_lies) continue;
    plain_[i] = make(source, rows_, result);
    in_place_[i] = true;
    scratchpad = std::max(scratchpad, plain_[i].scratchpad.get_size());
  }
  if (as_it_lies) pack_rows_ = dnnl::reorder({engine(), rows_, engine(), packed_[0].weights});
  pack_dense_rows_ = dnnl::reorder({engine(), dense_rows_, engine(), packed_[0].weights});
  room_.result = 0;
  room_.panel = line(sizeof(float) * static_cast<std::size_t>(kHeights[0] * kPanel));
  room_.rows = room_.panel + line(panel_bytes());
  room_.scratchpad = room_.rows + line(static_cast<std::size_t>(kPanel * padded * bytes_of(type)));
  room_.total = room_.scratchpad + line(scratchpad);
}

void Products::pack(const void* rows, std::int64_t count, void* panel, std::byte* room) const {
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

const float* Products::run(std::int64_t height, const void* source, const void* rows, std::int64_t count,
                           const void* panel, std::byte* room) const {
  const std::size_t i = index_of(height);
  const bool plain = panel == nullptr && reads_in_place(height, count);
  if (panel == nullptr && !plain) {
    pack(rows, count, room + room_.panel, room);
    panel = room + room_.panel;
  }
  const Product& p = plain ? plain_[i] : packed_[i];
  dnnl::stream stream(engine());
  p.primitive.execute(stream, {{DNNL_ARG_SRC, view(p.source, source)},
                               {DNNL_ARG_WEIGHTS, view(p.weights, plain ? rows : panel)},
                               {DNNL_ARG_DST, view(p.result, room + room_.result)},
                               {DNNL_ARG_SCRATCHPAD, view(p.scratchpad, room + room_.scratchpad)}});
  stream.wait();
  return reinterpret_cast<const float*>(room + room_.result);
}

// Every product on the same random data, a few outputs of each against the rule: corners and a diagonal.
// Where one on the weight as it lies differs, that height packs first; where a packed one does, nothing can
// be promised.
std::string Products::certify() {
  const auto bytes = bytes_of(type);
  std::vector<std::byte> source(static_cast<std::size_t>(kHeights[0] * padded * bytes) + 64);
  std::vector<std::byte> weight(static_cast<std::size_t>(((kPanel - 1) * weight_stride + depth) * bytes) +
                                64);
  std::vector<std::byte> room_bytes(room_.total + 64);
  std::byte* room = room_bytes.data() + (64 - reinterpret_cast<std::uintptr_t>(room_bytes.data()) % 64) % 64;
  for (std::int64_t i = 0; i < kHeights[0]; ++i)
    fill(type, source.data() + i * padded * bytes, depth, static_cast<std::uint32_t>(i));
  for (std::int64_t j = 0; j < kPanel; ++j)
    fill(type, weight.data() + j * weight_stride * bytes, depth, static_cast<std::uint32_t>(1000 + j));

  constexpr std::int64_t kRows[] = {0, 5, 7, 15, 16, 31};  // ascending
  constexpr std::int64_t kCols[] = {0, 15, 77, 127};
  float expected[std::size(kRows)][std::size(kCols)];
  for (std::size_t i = 0; i < std::size(kRows); ++i)
    for (std::size_t j = 0; j < std::size(kCols); ++j)
      expected[i][j] = rule(type, source.data() + kRows[i] * padded * bytes,
                            weight.data() + kCols[j] * weight_stride * bytes, depth);

  std::vector<std::byte> panel(panel_bytes() + 64);
  pack(weight.data(), kPanel, panel.data(), room);
  // The same rows everywhere: at the top, and at the end of taller products.
  const auto reproduced = [&](std::int64_t height, bool packed) {
    const std::int64_t rows = std::min<std::int64_t>(height, 32);
    for (const std::int64_t first : {std::int64_t{0}, height - rows}) {
      const std::byte* from = source.data();
      std::vector<std::byte> shifted;
      if (first != 0) {
        shifted.assign(static_cast<std::size_t>(height * padded * bytes), std::byte{0});
        std::memcpy(shifted.data() + first * padded * bytes, source.data(),
                    static_cast<std::size_t>(rows * padded * bytes));
        from = shifted.data();
      }
      const float* result = run(height, from, weight.data(), kPanel, packed ? panel.data() : nullptr, room);
      for (std::size_t i = 0; i < std::size(kRows) && kRows[i] < rows; ++i)
        for (std::size_t j = 0; j < std::size(kCols); ++j)
          if (std::memcmp(&result[(first + kRows[i]) * kPanel + kCols[j]], &expected[i][j], sizeof(float)) !=
              0)
            return false;
    }
    return true;
  };
  for (const std::int64_t height : kHeights) {
    if (!reproduced(height, true))
      return "this oneDNN on this processor adds a sum of this length in another order than the promised one";
    if (reads_in_place(height, kPanel)) in_place_[index_of(height)] = reproduced(height, false);
  }
  return {};
}

Blocks::Blocks(Type t, std::int64_t k, std::int64_t stride)
    : type(t),
      depth(k),
      weight_stride(stride),
      count(t == Type::f32 ? 1 : (k + kDepthBlock - 1) / kDepthBlock),
      full_depth(count == 1 ? k : kDepthBlock),
      full(Products::of(t, full_depth, stride)),
      last(Products::of(t, k - (count - 1) * full_depth, stride)) {}

std::size_t Blocks::panel_bytes() const {
  return static_cast<std::size_t>(count - 1) * full.panel_bytes() + last.panel_bytes();
}

// A worker's room: the total of several blocks, a panel packed on the spot, the products' own.
std::size_t Blocks::products_room() const {
  return sizeof(float) * static_cast<std::size_t>(kHeights[0] * kPanel) + line(panel_bytes());
}
std::size_t Blocks::scratch_bytes() const {
  return products_room() + std::max(full.scratch_bytes(), last.scratch_bytes());
}

void Blocks::pack(const void* rows, std::int64_t columns, std::byte* panel, std::byte* room) const {
  for (std::int64_t b = 0; b < count; ++b)
    block(b).pack(static_cast<const std::byte*>(rows) + b * full_depth * bytes_of(type), columns,
                  panel + static_cast<std::size_t>(b) * full.panel_bytes(), room + products_room());
}

const std::byte* Blocks::pack_here(const void* rows, std::int64_t columns, std::byte* room) const {
  std::byte* panel = room + sizeof(float) * static_cast<std::size_t>(kHeights[0] * kPanel);
  pack(rows, columns, panel, room);
  return panel;
}

void Blocks::add(float* total, const float* part, std::int64_t height, bool first) {
  for (std::int64_t i = 0; i < height * kPanel; ++i) total[i] = first ? part[i] : total[i] + part[i];
}

}  // namespace rlk::onednn
