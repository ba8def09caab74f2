#include "operand.hpp"

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "registry/reference.hpp"

namespace differential {

Array::Array(Shape s, DType t) : shape(std::move(s)), dtype(t) {
  bytes.resize(static_cast<std::size_t>(count() * rlk::size_of(dtype)));
}
int64_t Array::count() const {
  int64_t n = 1;
  for (const int64_t d : shape)
    if (d == 0) return 0;
  for (const int64_t d : shape) n *= d;
  return n;
}
double Array::operator[](int64_t i) const { return rlk::registry::load(dtype, bytes.data(), i); }

Operand::Operand(const rlk_argument& argument, const Shape& shape, DType dtype, Random& random)
    : shape_(shape), dtype_(dtype), written_(argument.role != RLK_READ) {
  lay_out(argument, random);
  int64_t low = 0, high = 0;
  const bool empty = std::find(shape_.begin(), shape_.end(), 0) != shape_.end();
  for (std::size_t i = 0; i < shape_.size() && !empty; ++i) {
    const int64_t reach = shape_[i] == 1 ? 0 : (shape_[i] - 1) * strides_[i];
    (reach < 0 ? low : high) += reach;
  }
  first_ = -low;
  const int64_t elements = empty ? 0 : high - low + 1;
  memory_ = Guarded(static_cast<std::size_t>(elements * rlk::size_of(dtype)), random.chance(70));
  dl_.device = {kDLCPU, 0};
  dl_.dtype = rlk::dl_type(dtype);
}

// Rows with room between them, outer axes in any order; what is only read may also repeat or run backwards.
void Operand::lay_out(const rlk_argument& argument, Random& random) {
  const std::size_t rank = shape_.size();
  strides_.assign(rank, 1);
  std::vector<std::size_t> order(rank);
  std::iota(order.begin(), order.end(), std::size_t{0});
  const bool strided = (argument.flags & RLK_STRIDED) && rank > 1 && random.chance(60);
  dense_ = !strided && random.chance(70);
  if (strided && random.chance(40))
    for (std::size_t i = rank - 1; i > 1; --i)
      std::swap(order[i - 1], order[static_cast<std::size_t>(random.below(static_cast<int64_t>(i)))]);
  // A state's matrices must be dense.
  const std::size_t inner = std::strstr(argument.name, "state") && random.chance(90) ? 2 : 1;
  if (inner == 2 && rank == 4)
    order = order[0] == 1 ? decltype(order){1, 0, 2, 3} : decltype(order){0, 1, 2, 3};
  uint64_t step = 1;
  for (std::size_t i = rank; i-- > 0;) {
    const std::size_t axis = order[i];
    strides_[axis] = static_cast<int64_t>(step);
    step *= static_cast<uint64_t>(shape_[axis]);
    if (strided && i > 0 && rank - i >= inner && random.chance(40))
      step += static_cast<uint64_t>(random.pick<int64_t>({1, 3, 8, 16}));
  }
  for (std::size_t i = 0; i + inner < rank && !dense_; ++i) {
    if (shape_[i] == 1 && random.chance(50)) strides_[i] = random.pick<int64_t>({0, 1, -3, int64_t{1} << 40});
    if (!strided || shape_[i] < 2) continue;
    if (random.chance(8)) strides_[i] = -strides_[i];
    if (!written_ && random.chance(8)) strides_[i] = 0;
  }
}

int64_t Operand::offset(int64_t flat) const {
  int64_t at = first_;
  for (std::size_t i = shape_.size(); i-- > 0;) {
    if (shape_[i] > 1) at += flat % shape_[i] * strides_[i];
    flat /= shape_[i];
  }
  return at;
}

const DLTensor* Operand::view() {
  dl_.data = memory_.data();
  dl_.byte_offset = static_cast<uint64_t>(first_ * rlk::size_of(dtype_));
  dl_.ndim = static_cast<int32_t>(shape_.size());
  dl_.shape = shape_.data();
  dl_.strides = dense_ ? nullptr : strides_.data();
  return &dl_;
}

void Operand::put(const Array& values) {
  memory_.writable();
  memory_.fill();
  const auto size = static_cast<std::size_t>(rlk::size_of(dtype_));
  for (int64_t i = 0, n = values.count(); i < n; ++i)
    std::memcpy(memory_.data() + static_cast<std::size_t>(offset(i)) * size,
                values.bytes.data() + static_cast<std::size_t>(i) * size, size);
  if (!written_) memory_.read_only();
}

Array Operand::get() const {
  Array out(shape_, dtype_);
  const auto size = static_cast<std::size_t>(rlk::size_of(dtype_));
  for (int64_t i = 0, n = out.count(); i < n; ++i)
    std::memcpy(out.bytes.data() + static_cast<std::size_t>(i) * size,
                memory_.data() + static_cast<std::size_t>(offset(i)) * size, size);
  return out;
}

bool Operand::strayed() const {
  std::vector<std::byte> bytes(memory_.begin(), memory_.begin() + memory_.size());
  const auto size = static_cast<std::size_t>(rlk::size_of(dtype_));
  const std::size_t start = static_cast<std::size_t>(memory_.data() - memory_.begin());
  for (int64_t i = 0, n = Array(shape_, dtype_).count(); i < n; ++i)
    std::fill_n(
        bytes.begin() + static_cast<std::ptrdiff_t>(start + static_cast<std::size_t>(offset(i)) * size), size,
        std::byte{0xff});
  return std::any_of(bytes.begin(), bytes.end(), [](std::byte b) { return b != std::byte{0xff}; });
}

}  // namespace differential
