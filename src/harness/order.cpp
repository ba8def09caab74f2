#include "src/harness/order.hpp"

#include <fmt/format.h>

#include <cmath>

#include "registry/reference.hpp"

namespace rlk::harness {
namespace {

// Pairs close together, across every power of two, and across the whole length.
std::vector<std::pair<int64_t, int64_t>> pairs(int64_t length) {
  std::vector<std::pair<int64_t, int64_t>> out;
  for (int64_t i = 0; i + 1 < std::min<int64_t>(length, 40); ++i) out.emplace_back(i, i + 1);
  for (int64_t step = 2; step < length; step *= 2)
    for (int64_t i : {int64_t{0}, int64_t{1}, step - 1, length - 1 - step})
      if (i >= 0 && i + step < length) out.emplace_back(i, i + step);
  for (int64_t cut = 16; cut < length; cut *= 2) out.emplace_back(cut - 1, cut);
  out.emplace_back(0, length - 1);
  return out;
}

int find(const rlk_op_schema& s, const std::string& name) {
  for (uint32_t i = 0; i < s.num_arguments; ++i)
    if (name == s.arguments[i].name) return static_cast<int>(i);
  return -1;
}

}  // namespace

std::optional<Order> probe_order(const Problem& p, const std::vector<std::string>& arguments,
                                 const Subject& subject) {
  if (arguments.size() != 3) return {};
  const int left = find(p.schema(), arguments[0]), right = find(p.schema(), arguments[1]),
            result = find(p.schema(), arguments[2]);
  if (left < 0 || right < 0 || result < 0) return {};
  const auto l = static_cast<std::size_t>(left), r = static_cast<std::size_t>(right);
  const DType type = p.inputs[l]->dtype;
  const int64_t length = p.inputs[l]->shape.back();
  // Squares of 2^15 exist in fp16 too: 2^30 swallows ones in fp32 and in a tensor core. fp64 needs more.
  const bool wide = std::string_view(subject.implementation->arithmetic) == "fma64";
  if (wide && type == DType::f16) return {};
  const double huge = std::ldexp(1, wide ? 30 : 15);
  const auto list = pairs(length);
  Order order;
  order.argument = arguments[0];
  order.result = arguments[2];
  order.shape = fmt::format("K={}, {} pairs", length, list.size());
  for (int64_t rows : {1, 2, 3, 7, 8, 16, 17, 33, 64, 128}) {
    uint64_t tree = 14695981039346656037ull;
    for (std::size_t at = 0; at < list.size(); at += static_cast<std::size_t>(rows)) {
      Problem q = p;
      const auto used = static_cast<std::size_t>(rows);
      Array a{{rows, length}, type, {}};
      a.bytes.resize(used * static_cast<std::size_t>(length * size_of(type)));
      for (std::size_t m = 0; m < used; ++m) {
        const auto [i, j] = list[(at + m) % list.size()];
        // The weight's side is huge at every place, so only the left side says where: ones are huge *
        // (1/huge).
        for (int64_t k = 0; k < length; ++k)
          registry::store(type, a.bytes.data(), static_cast<int64_t>(m) * length + k,
                          k == i   ? huge
                          : k == j ? -huge
                                   : 1 / huge);
      }
      q.inputs[l] = std::move(a);
      Array& w = *q.inputs[r];
      for (int64_t i = 0; i < w.numel(); ++i) registry::store(w.dtype, w.bytes.data(), i, huge);
      const Outcome out = execute(q, subject);
      if (out.code != RLK_OK) return {};
      const Array& y = out.results[static_cast<std::size_t>(result)];
      const int64_t width = y.shape.back();
      for (std::size_t m = 0; m < used && at + m < list.size(); ++m) {
        const double count = registry::load(y.dtype, y.bytes.data(), static_cast<int64_t>(m) * width);
        tree = hash_bytes(&count, sizeof count, tree);
      }
    }
    if (!order.by_rows.empty() && order.by_rows.front().second != tree) order.equal = false;
    order.by_rows.emplace_back(rows, tree);
  }
  return order;
}

}  // namespace rlk::harness
