#include "src/harness/execute.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <numeric>

#include "rlk/resolve.hpp"
#include "src/check.hpp"
#include "src/failure.hpp"
#include "src/harness/rule.hpp"
#include "src/host.hpp"
#include "src/machine.hpp"
#include "src/resolve.hpp"

#if defined(__x86_64__)
#  include <xmmintrin.h>
#endif

namespace rlk::harness {
namespace {

// SplitMix64: what a drawn manner is made of.
struct Draw {
  uint64_t state;
  int64_t below(int64_t n) {
    uint64_t z = (state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return static_cast<int64_t>((z ^ (z >> 31)) % static_cast<uint64_t>(n));
  }
};
Draw draw_for(const Manner& m, std::size_t argument) {
  return {hash_bytes(&argument, sizeof argument, m.draw)};
}

int64_t reach_of(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides) {
  int64_t elements = 1, reach = 1;
  for (int64_t d : shape) elements *= d;
  if (strides.empty() || elements == 0) return elements;
  for (std::size_t i = 0; i < shape.size(); ++i) reach += (shape[i] - 1) * std::abs(strides[i]);
  return reach;
}
// Elements before the first one: those that negative strides lead back to.
int64_t origin_of(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides) {
  int64_t origin = 0;
  for (std::size_t i = 0; i < strides.size(); ++i)
    if (strides[i] < 0 && shape[i] > 1) origin -= (shape[i] - 1) * strides[i];
  return origin;
}

// One array of a run: watched host memory, a device copy where there is a device, and the tensor over it.
class Slab {
 public:
  Slab(const Subject& subject, const Manner& manner, std::size_t argument, const std::vector<int64_t>& shape,
       DType dtype, std::vector<int64_t> strides, bool host)
      : subject_(subject),
        device_(!host && subject.services),
        offset_(offset_of(manner, argument, size_of(dtype))),
        memory_(static_cast<std::size_t>(reach_of(shape, strides) * size_of(dtype)), offset_,
                static_cast<std::size_t>(size_of(dtype)),
                device_ ? WatchedMemory::apart : edge_of(manner, argument)) {
    if (memory_.failed()) return;
    char* data = reinterpret_cast<char*>(memory_.body());
    DLDevice where{kDLCPU, 0};
    if (device_) {
      where = {static_cast<DLDeviceType>(subject.device.type), subject.device.id};
      void* memory = nullptr;
      if (subject.services->allocate(&subject.device, travel() + 512, &memory) != RLK_OK) return;
      device_memory_ = memory;
      device_base_ = static_cast<char*>(memory) + (256 - reinterpret_cast<uintptr_t>(memory) % 256) % 256;
      data = device_base_ + kGuard + offset_;
    }
    data += origin_of(shape, strides) * size_of(dtype);
    tensor = Tensor(data, std::span(shape), dtype, where, std::span(strides));
    if (manner.draw) {
      Draw draw = draw_for(manner, argument + 100);
      const auto bytes = static_cast<uint64_t>(draw.below(9) * 16 * size_of(dtype));
      tensor.dl().data = data - bytes;
      tensor.dl().byte_offset = bytes;
    }
    failed_ = false;
  }
  Slab(const Slab&) = delete;
  ~Slab() {
    if (device_memory_) subject_.services->release(&subject_.device, device_memory_);
  }

  bool failed() const { return failed_; }
  std::byte* body() { return memory_.body(); }
  std::size_t body_bytes() const { return memory_.bytes(); }
  void fill(std::byte value) { std::fill_n(body(), body_bytes(), value); }
  // Everything from guard to guard travels, so that a write outside is seen. On the CPU it is watched from
  // here to to_host.
  void to_device(bool read_only) {
    if (device_)
      subject_.services->copy_in(&subject_.device, device_base_, body() - kGuard - offset_, travel());
    else
      memory_.watch(read_only);
  }
  void to_host() {
    if (device_)
      subject_.services->copy_out(&subject_.device, body() - kGuard - offset_, device_base_, travel());
    else
      memory_.rest();
  }
  // What happened beside it, in words that follow its name.
  std::string disturbance() {
    if (std::string touched = memory_.touched(); !touched.empty()) return touched;
    const auto intact = [](std::byte b) { return b == WatchedMemory::kFill; };
    const bool hold =
        std::all_of(std::max(memory_.low(), body() - kGuard - offset_), body(), intact) &&
        std::all_of(body() + body_bytes(), std::min(memory_.high(), body() + body_bytes() + kGuard), intact);
    return hold ? "" : ": bytes beside it were written";
  }
  // Of its bytes: four chains, since one would wait for each product.
  uint64_t hash() {
    constexpr std::size_t kLanes = 4;
    uint64_t lanes[kLanes] = {1, 2, 3, 4}, words[kLanes];
    std::size_t at = 0;
    for (; at + sizeof words <= body_bytes(); at += sizeof words) {
      std::memcpy(words, body() + at, sizeof words);
      for (std::size_t l = 0; l < kLanes; ++l) {
        lanes[l] = (lanes[l] ^ words[l]) * 1099511628211ull;
        lanes[l] ^= lanes[l] >> 32;
      }
    }
    return hash_bytes(body() + at, body_bytes() - at, hash_bytes(lanes, sizeof lanes));
  }

  Tensor tensor;

 private:
  static constexpr std::size_t kGuard = WatchedMemory::kGuard;
  static std::size_t offset_of(const Manner& m, std::size_t argument, int64_t size) {
    int64_t bytes = m.offset;
    if (m.draw) {
      // Half of the draws are what vector code asks about: 16, 32, 48 past a line.
      Draw draw = draw_for(m, argument);
      bytes = draw.below(2) ? draw.below(16) * 16 : draw.below(256);
    }
    return static_cast<std::size_t>((bytes + size - 1) / size * size);
  }
  static WatchedMemory::Edge edge_of(const Manner& m, std::size_t argument) {
    if (!m.draw) return m.edge;
    Draw draw = draw_for(m, argument + 200);
    return static_cast<WatchedMemory::Edge>(draw.below(3));
  }
  std::size_t travel() const { return kGuard + offset_ + body_bytes() + kGuard; }
  const Subject& subject_;
  bool device_, failed_ = true;
  std::size_t offset_;
  WatchedMemory memory_;
  void* device_memory_ = nullptr;
  char* device_base_ = nullptr;
};

// Strides that put padding between rows; empty: dense.
std::vector<int64_t> padded_strides(const rlk_argument& a, const std::vector<int64_t>& shape,
                                    int64_t padding) {
  if (!padding || !(a.flags & RLK_STRIDED) || shape.size() < 2) return {};
  std::vector<int64_t> strides(shape.size());
  int64_t step = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    strides[i] = step;
    step = step * shape[i] + (i + 1 == shape.size() ? padding : 0);
  }
  return strides;
}

// Of an axis of one element the stride says nothing; any other may as well be walked from its end.
void turn_some(std::vector<int64_t>& strides, const std::vector<int64_t>& shape, Draw& draw) {
  constexpr int64_t kAny[] = {0, 1, -1, int64_t{1} << 33};
  for (std::size_t i = 0; i + 1 < shape.size(); ++i)
    if (shape[i] == 1 && draw.below(2))
      strides[i] = kAny[draw.below(4)];
    else if (shape[i] > 1 && draw.below(8) == 0)
      strides[i] = -strides[i];
}

// Strides of axes in a drawn order with drawn gaps: seldom one that a single step could walk.
std::vector<int64_t> drawn_strides(const rlk_argument& a, const std::vector<int64_t>& shape, Draw draw) {
  std::vector<int64_t> strides(shape.size());
  if (shape.empty()) return {};
  const bool gaps = a.flags & RLK_STRIDED;
  std::vector<std::size_t> order(shape.size() - 1);  // of the leading axes, innermost first
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = order.size() - 1 - i;
  for (std::size_t i = order.size(); gaps && i > 1; --i)
    std::swap(order[i - 1], order[static_cast<std::size_t>(draw.below(static_cast<int64_t>(i)))]);
  // Wide gaps are for arrays that they do not make many times as large.
  constexpr int64_t kGaps[] = {0, 1, 3, 8, 16, 61};
  int64_t elements = 1;
  for (int64_t d : shape) elements *= d;
  const int64_t choices = elements > (1 << 18) && shape.back() < 64 ? 5 : 6;
  // Nor for those whose pages would take longer to clear than the call that uses them.
  constexpr int64_t kReach = 1 << 20;
  const auto gap = [&] {
    const int64_t drawn = gaps ? kGaps[draw.below(choices)] : 0;
    return drawn <= 1 || shape.back() <= 0 || elements / shape.back() * (shape.back() + drawn) <= kReach
               ? drawn
               : 1;
  };
  strides.back() = 1;
  int64_t step = std::max<int64_t>(1, shape.back()) + gap();
  for (std::size_t i : order) {
    strides[i] = step;
    step = step * std::max<int64_t>(1, shape[i]) + gap();
  }
  if (gaps && elements > 0) turn_some(strides, shape, draw);
  return strides;
}

// The same slices along the first axis, so that stride 0 there reads the same.
bool repeats(const rlk_argument& a, const Array& x) {
  if (!(a.flags & RLK_STRIDED) || a.role != RLK_READ || x.shape.size() < 2 || x.shape[0] < 2) return false;
  const std::size_t slice = x.bytes.size() / static_cast<std::size_t>(x.shape[0]);
  for (std::size_t i = slice; i < x.bytes.size(); i += slice)
    if (std::memcmp(x.bytes.data(), x.bytes.data() + i, slice) != 0) return false;
  return true;
}

std::vector<int64_t> strides_for(const Problem& p, const rlk_argument& a, std::size_t i,
                                 const std::vector<int64_t>& shape, const Manner& m) {
  if (p.inputs[i] && !p.strides[i].empty()) return p.strides[i];
  if (m.broadcast && p.inputs[i] && repeats(a, *p.inputs[i])) {
    std::vector<int64_t> strides = drawn_strides(a, shape, draw_for(m, i));
    strides[0] = 0;
    return strides;
  }
  if (m.draw) return drawn_strides(a, shape, draw_for(m, i + 300));
  return padded_strides(a, shape, m.row_padding);
}

// Calls body(first element, its offset in elements, how many lie beside each other) for all elements, in
// row-major order.
template <class Body>
void walk(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides, Body body) {
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  const int64_t run = !shape.empty() && strides.back() == 1 ? shape.back() : 1;
  const int64_t origin = origin_of(shape, strides);
  for (int64_t i = 0; i < n; i += run) {
    int64_t rest = i, at = origin;
    for (std::size_t d = shape.size(); d-- > 0;) {
      at += rest % shape[d] * strides[d];
      rest /= shape[d];
    }
    body(static_cast<std::size_t>(i), static_cast<std::size_t>(at), static_cast<std::size_t>(run));
  }
}

void scatter(const Array& a, const std::vector<int64_t>& strides, std::byte* to) {
  const auto size = static_cast<std::size_t>(size_of(a.dtype));
  if (strides.empty()) {
    if (!a.bytes.empty()) std::memcpy(to, a.bytes.data(), a.bytes.size());
    return;
  }
  walk(a.shape, strides, [&](std::size_t i, std::size_t at, std::size_t run) {
    std::memcpy(to + at * size, a.bytes.data() + i * size, run * size);
  });
}

void gather(Array& a, const std::vector<int64_t>& strides, const std::byte* from) {
  const auto size = static_cast<std::size_t>(size_of(a.dtype));
  a.bytes.resize(static_cast<std::size_t>(a.numel()) * size);
  if (strides.empty()) {
    if (!a.bytes.empty()) std::memcpy(a.bytes.data(), from, a.bytes.size());
    return;
  }
  walk(a.shape, strides, [&](std::size_t i, std::size_t at, std::size_t run) {
    std::memcpy(a.bytes.data() + i * size, from + at * size, run * size);
  });
}

const std::vector<int64_t>& shape_of(const Problem& p, const std::vector<ResultShape>& shapes,
                                     std::size_t argument) {
  return p.inputs[argument] ? p.inputs[argument]->shape : shapes[argument].shape;
}

// All arrays of a run.
struct Stage {
  std::vector<std::unique_ptr<Slab>> slabs;
  std::vector<std::vector<int64_t>> strides;
  std::vector<rlk_slot> slots;
  std::vector<uint64_t> hashes;
  std::vector<std::size_t> place;  // of each argument: whose memory it has, mostly its own
  std::vector<Part> part;          // of each argument: whose array it is a part of, mostly its own
  std::vector<int64_t> first;      // element of that array
  std::vector<Tensor> views;
  Status status;

  Stage(const Problem& p, const Subject& subject, const Manner& manner, bool in_fp64) {
    const rlk_op_schema& s = p.schema();
    slabs.resize(s.num_arguments);
    strides.resize(s.num_arguments);
    slots.resize(s.num_arguments + s.num_attributes);
    hashes.resize(s.num_arguments);
    place.resize(s.num_arguments);
    std::iota(place.begin(), place.end(), std::size_t{0});
    if (manner.packing != Packing::none) part = arrays_shared(p);
    for (std::size_t i = part.size(); i < s.num_arguments; ++i) part.push_back({i, 0});
    first.resize(s.num_arguments);
    views.resize(s.num_arguments);
    const auto shapes = result_shapes(p);
    if (!shapes) {
      status = shapes.status();
      return;
    }
    for (uint32_t i = 0; i < s.num_arguments; ++i) {
      const rlk_argument& a = s.arguments[i];
      const bool input = p.inputs[i].has_value();
      if (!input && p.results[i] == DType::none) continue;
      if (const int other = p.shared_with(i); other >= 0) {
        slots[i].tensor = slots[static_cast<std::size_t>(other)].tensor;
        continue;
      }
      if (part[i].owner != i) continue;  // placed with its array
      std::vector<int64_t> shape = input ? p.inputs[i]->shape : (*shapes)[i].shape;
      DType dtype = input ? p.inputs[i]->dtype : p.results[i];
      if (!input && in_fp64 && (a.dtypes & RLK_F64)) dtype = DType::f64;
      const std::vector<std::size_t> parts = parts_of(i, manner.packing);
      if (parts.size() > 1)
        shape = array_of(p, *shapes, parts);
      else
        strides[i] = strides_for(p, a, i, shape, manner);
      slabs[i] = std::make_unique<Slab>(subject, manner, i, shape, dtype, strides[i], a.flags & RLK_HOST);
      if (slabs[i]->failed()) {
        status = failure(RLK_OUT_OF_MEMORY);
        return;
      }
      slots[i].tensor = &slabs[i]->tensor.dl();
      if (parts.size() > 1) place_parts(p, *shapes, parts, shape);
    }
    if (manner.in_place) put_in_place(p, manner.in_place);
    load(p);
  }
  void put_in_place(const Problem& p, uint32_t which) {
    for (const auto& [result, argument] : places_shared(p)) {
      if (which & 1) {
        slabs[result].reset();
        slots[result].tensor = slots[argument].tensor;
        place[result] = argument;
      }
      which >>= 1;
    }
  }
  bool taken(std::size_t argument) const { return std::count(place.begin(), place.end(), argument) > 1; }

  // Of the array of this argument: whose elements lie in it, in the order of their places.
  std::vector<std::size_t> parts_of(std::size_t owner, Packing packing) const {
    std::vector<std::size_t> parts;
    for (std::size_t i = owner; i < part.size(); ++i)
      if (part[i].owner == owner) parts.push_back(i);
    if (packing == Packing::last_first) std::reverse(parts.begin(), parts.end());
    return parts;
  }
  // The shape of an array of several parts; and where each of them begins.
  std::vector<int64_t> array_of(const Problem& p, const std::vector<ResultShape>& shapes,
                                const std::vector<std::size_t>& parts) {
    std::vector<int64_t> shape = shape_of(p, shapes, parts[0]);
    const std::size_t axis = part[parts[0]].axis;
    int64_t inner = 1;
    for (std::size_t a = axis + 1; a < shape.size(); ++a) inner *= shape[a];
    shape[axis] = 0;
    for (const std::size_t i : parts) {
      first[i] = shape[axis] * inner;
      shape[axis] += shape_of(p, shapes, i)[axis];
    }
    return shape;
  }
  void place_parts(const Problem& p, const std::vector<ResultShape>& shapes,
                   const std::vector<std::size_t>& parts, const std::vector<int64_t>& shape) {
    std::vector<int64_t> step(shape.size(), 1);
    for (std::size_t a = shape.size() - 1; a-- > 0;) step[a] = step[a + 1] * shape[a + 1];
    const DLTensor& whole = slabs[part[parts[0]].owner]->tensor.dl();
    const DType dtype = dtype_of(whole.dtype);
    for (const std::size_t i : parts) {
      const std::vector<int64_t> own = shape_of(p, shapes, i);
      strides[i] = step;
      views[i] = Tensor(static_cast<char*>(whole.data) + first[i] * size_of(dtype), std::span(own), dtype,
                        whole.device, std::span(strides[i]));
      slots[i].tensor = &views[i].dl();
    }
  }

  // Inputs, and NaN where results will be.
  void load(const Problem& p) {
    const rlk_op_schema& s = p.schema();
    for (uint32_t i = 0; i < s.num_arguments; ++i) {
      if (!slabs[i]) continue;
      if (!p.inputs[i] || !strides[i].empty()) slabs[i]->fill(WatchedMemory::kFill);
      for (std::size_t j = i; j < part.size(); ++j)
        if (part[j].owner == i && p.inputs[j])
          scatter(*p.inputs[j], strides[j], slabs[i]->body() + first[j] * size_of(p.inputs[j]->dtype));
      const bool read_only = s.arguments[i].role == RLK_READ && !taken(i);
      if (read_only) hashes[i] = slabs[i]->hash();
      slabs[i]->to_device(read_only);
    }
    std::copy(p.attributes.begin(), p.attributes.end(), slots.begin() + s.num_arguments);
  }
  void unload() {
    for (auto& slab : slabs)
      if (slab) slab->to_host();
  }

  void collect(const Problem& p, Outcome& out) {
    const rlk_op_schema& s = p.schema();
    out.results.resize(s.num_arguments);
    for (uint32_t i = 0; i < s.num_arguments; ++i) {
      Slab* slab = slabs[place[part[i].owner]].get();
      if (!slab || !slots[i].tensor) continue;
      slab->to_host();
      const char* name = s.arguments[i].name;
      if (const std::string what = slab->disturbance(); !what.empty() && out.broken.empty())
        out.broken = name + what;
      if (s.arguments[i].role == RLK_READ) {
        if (!taken(i) && slab->hash() != hashes[part[i].owner] && out.broken.empty())
          out.broken = fmt::format("{} is a read argument and was changed", name);
        continue;
      }
      const DLTensor& t = *slots[i].tensor;
      Array& a = out.results[i];
      a.shape.assign(t.shape, t.shape + t.ndim);
      a.dtype = dtype_of(t.dtype);
      gather(a, strides[place[i]], slab->body() + first[i] * size_of(a.dtype));
    }
    for (uint32_t i = 0; i < s.num_arguments; ++i)
      if (slabs[i] && place[i] == i && !strides[i].empty() && s.arguments[i].role == RLK_WRITE &&
          out.broken.empty() && !gaps_hold(i, out))
        out.broken = fmt::format("bytes between the rows of {} were written", s.arguments[i].name);
  }
  // What is left of the NaN filling once the elements are put back over it must be all of it.
  bool gaps_hold(std::size_t i, const Outcome& out) {
    std::vector<std::byte> untouched(slabs[i]->body_bytes(), WatchedMemory::kFill);
    for (std::size_t j = i; j < part.size(); ++j)
      if (part[j].owner == i)
        scatter(out.results[j], strides[j], untouched.data() + first[j] * size_of(out.results[j].dtype));
    return std::equal(untouched.begin(), untouched.end(), slabs[i]->body());
  }
};

Outcome failed(const Status& s) {
  Outcome out;
  out.code = s.code();
  out.text = s.message();
  return out;
}

void take_sample(const Problem& p, Outcome& out) {
  if (!p.sampled) return;
  for (std::size_t i = 0; i < out.results.size(); ++i)
    if (Array& a = out.results[i]; a.dtype != DType::none) a = on_grid(a, grid_of(p, i, a.shape));
}

// The workspace is ours, so that it can be filled with NaN and watched like any other array.
std::unique_ptr<Slab> workspace_for(const Subject& subject, const Manner& manner, int64_t bytes, Options& o) {
  if (manner.draw) bytes += draw_for(manner, 400).below(5) * 160;
  if (bytes <= 0) return nullptr;
  Manner place;
  place.edge = manner.edge;
  place.offset = manner.draw ? draw_for(manner, 401).below(16) * 16 : 0;
  auto slab = std::make_unique<Slab>(subject, place, 0, std::vector<int64_t>{bytes}, DType::u8,
                                     std::vector<int64_t>{}, false);
  if (slab->failed()) return slab;
  o.workspace = slab->tensor.dl().data;
  o.workspace_bytes = static_cast<uint64_t>(bytes);
  return slab;
}

// The control registers of the calling thread while a call runs: of vectors, and of long double, whose rounding is set with
// the other's as fesetround does. What they are afterwards is the callee's doing.
class CallerMode {
 public:
#if defined(__x86_64__)
  CallerMode(uint32_t bits, uint32_t traps)
      : before_(_mm_getcsr()), during_(((before_ & ~kFlags) | bits) & ~traps), x87_before_(x87()) {
    x87_during_ = static_cast<uint16_t>((x87_before_ & ~0xc00u) | (bits >> 3 & 0xc00u));
    set_x87(x87_during_);
    _mm_setcsr(during_);
  }
  ~CallerMode() {
    _mm_setcsr(before_);
    set_x87(x87_before_);
  }
  bool kept() const { return ((_mm_getcsr() ^ during_) & ~kFlags) == 0 && x87() == x87_during_; }

 private:
  static uint16_t x87() {
    uint16_t word;
    __asm__ volatile("fnstcw %0" : "=m"(word));
    return word;
  }
  static void set_x87(uint16_t word) { __asm__ volatile("fldcw %0" : : "m"(word)); }
  static constexpr uint32_t kFlags = 0x3f;  // exceptions seen: every sum sets some
  uint32_t before_, during_;
  uint16_t x87_before_, x87_during_ = 0;
#else
  CallerMode(uint32_t, uint32_t) {}
  bool kept() const { return true; }
#endif
};

// False: a thread of the library's pool computes in another mode than it should.
bool workers_in_order([[maybe_unused]] int32_t threads) {
#if defined(__x86_64__)
  std::atomic<bool> good{true};
  const auto look = [](void* context, int64_t) {
    if ((_mm_getcsr() & ~0x3fu) != 0x1f80u) *static_cast<std::atomic<bool>*>(context) = false;
  };
  const CallerMode plain(0, 0);
  host().parallel_for(threads, 4 * std::max(threads, 2), look, &good);
  return good;
#else
  return true;
#endif
}

Status run_captured(const Subject& subject, const Stage& stage, const Options& options) {
  void* graph = nullptr;
  const rlk_device_services& d = *subject.services;
  if (d.capture_begin(&subject.device, options.stream) != RLK_OK) return failure(RLK_BACKEND_ERROR);
  Status status = run_slots(subject.op->name, stage.slots.data(), options);
  const bool captured = d.capture_end(&subject.device, options.stream, &graph) == RLK_OK;
  if (status && !captured) status = failure(RLK_BACKEND_ERROR);
  if (status && d.graph_launch(&subject.device, graph, options.stream) != RLK_OK)
    status = failure(RLK_BACKEND_ERROR);
  if (d.synchronize(&subject.device, options.stream) != RLK_OK && status) status = failure(RLK_BACKEND_ERROR);
  if (graph) d.graph_destroy(&subject.device, graph);
  return status;
}

// A caller among several that begin their calls together; one that cannot begin holds nobody up.
class Caller {
 public:
  explicit Caller(std::barrier<>* together) : together_(together) {}
  Caller(const Caller&) = delete;
  ~Caller() {
    if (together_) together_->arrive_and_drop();
  }
  void meet() {
    if (together_) together_->arrive_and_wait();
  }

 private:
  std::barrier<>* together_;
};

// One call; `broken` says what it left behind.
Status run_once(const Subject& subject, const Stage& stage, const Options& options, const Manner& manner,
                std::string& broken) {
  if (manner.graph) return run_captured(subject, stage, options);
  Status status;
  {
    const CallerMode mode(manner.float_mode, manner.traps);
    status = run_slots(subject.op->name, stage.slots.data(), options);
    if (!mode.kept() && broken.empty()) broken = "the caller's floating-point mode was changed";
  }
  if (subject.services) {
    if (subject.services->synchronize(&subject.device, manner.stream) != RLK_OK && status)
      return failure(RLK_BACKEND_ERROR);
  } else if ((manner.draw || manner.float_mode) && !workers_in_order(manner.threads) && broken.empty()) {
    broken = "a worker thread was left in another floating-point mode";
  }
  return status;
}

}  // namespace

std::vector<Part> arrays_shared(const Problem& p) {
  const rlk_op_schema& s = p.schema();
  std::vector<Part> out;
  std::vector<bool> settled(
      s.num_arguments);  // along which axis, by owner: two parts of one shape do not say
  const auto shapes = result_shapes(p);
  out.reserve(s.num_arguments);
  for (std::size_t i = 0; i < s.num_arguments; ++i) out.push_back({i, 0});
  if (!shapes || !p.shared.empty()) return out;
  const auto dtype = [&](std::size_t i) { return p.inputs[i] ? p.inputs[i]->dtype : p.results[i]; };
  const auto may = [&](std::size_t i) {
    const rlk_argument& a = s.arguments[i];
    const auto& shape = shape_of(p, *shapes, i);
    return dtype(i) != DType::none && (a.flags & RLK_STRIDED) && !(a.flags & RLK_HOST) && shape.size() >= 2 &&
           p.strides[i].empty() && std::find(shape.begin(), shape.end(), 0) == shape.end();
  };
  // The axis in which two differ, the last if in none; nothing where they are no neighbours.
  const auto between = [&](std::size_t i, std::size_t j) -> std::optional<std::size_t> {
    const auto &x = shape_of(p, *shapes, i), &y = shape_of(p, *shapes, j);
    if (s.arguments[i].role != s.arguments[j].role || dtype(i) != dtype(j) || x.size() != y.size()) return {};
    std::size_t axis = x.size() - 1, differ = 0;
    for (std::size_t a = 0; a < x.size(); ++a)
      if (x[a] != y[a]) axis = a, ++differ;
    if (differ > 1 || axis == 0) return {};
    return axis;
  };
  for (std::size_t i = 0; i < out.size(); ++i)
    for (std::size_t j = 0; j < i && out[i].owner == i && may(i); ++j) {
      if (out[j].owner != j || !may(j)) continue;
      const auto axis = between(i, j);
      const bool differs = axis && shape_of(p, *shapes, i) != shape_of(p, *shapes, j);
      if (!axis || (differs && settled[j] && out[j].axis != *axis)) continue;
      if (differs || !settled[j]) out[j].axis = *axis;
      settled[j] = settled[j] || differs;
      out[i] = {j, out[j].axis};
    }
  for (Part& x : out) x.axis = out[x.owner].axis;
  return out;
}

std::vector<std::pair<std::size_t, std::size_t>> places_shared(const Problem& p) {
  std::vector<std::pair<std::size_t, std::size_t>> out;
  const auto shapes = result_shapes(p);
  for (uint32_t i = 0; shapes && i < p.schema().num_arguments; ++i)
    for (uint32_t j = 0; j < p.schema().num_arguments; ++j)
      if (p.schema().arguments[i].role == RLK_WRITE && p.inputs[j] && p.results[i] == p.inputs[j]->dtype &&
          (*shapes)[i].shape == p.inputs[j]->shape && p.strides[j].empty() && may_alias(p.schema(), i, j))
        out.emplace_back(i, j);
  return out;
}

Outcome execute(const Problem& p, const Subject& subject, const Manner& manner) {
  Caller caller(manner.together);
  Stage stage(manner.before ? *manner.before : p, subject, manner, false);
  if (!stage.status) return failed(stage.status);
  Options options;
  options.backend = subject.implementation->id;
  options.threads = manner.threads;
  options.stream = manner.stream;
  options.precision = manner.precision;
  options.needs_backward = manner.needs_backward;
  options.deterministic = manner.deterministic;
  const Result<uint64_t> asked = workspace_slots(subject.op->name, stage.slots.data(), options);
  if (!asked) return failed(asked.status());
  const auto bytes = static_cast<int64_t>(*asked) * manner.workspace_percent / 100;
  const std::unique_ptr<Slab> workspace = workspace_for(subject, manner, bytes, options);
  if (workspace && workspace->failed()) return failed(failure(RLK_OUT_OF_MEMORY));
  Outcome out;
  for (const Problem* now : {manner.before.get(), &p}) {
    if (!now) continue;
    if (now == &p && manner.before) stage.unload(), stage.load(p);
    if (workspace) workspace->fill(WatchedMemory::kFill), workspace->to_device(false);
    if (now == &p) caller.meet();
    const Status status = run_once(subject, stage, options, manner, out.broken);
    if (workspace) workspace->to_host();
    if (!status) return failed(status);
  }
  stage.collect(p, out);
  take_sample(p, out);
  if (workspace && out.broken.empty())
    if (const std::string what = workspace->disturbance(); !what.empty()) out.broken = "the workspace" + what;
  return out;
}

Outcome execute_reference(const Problem& p, bool in_fp64) {
  if (p.sampled)
    if (auto truth = sampled_truth(p)) return std::move(*truth);
  Subject cpu;
  Stage stage(p, cpu, {}, in_fp64);
  if (!stage.status) return failed(stage.status);
  if (const int32_t code = p.op->reference(stage.slots.data(), &host()))
    return failed(failure(static_cast<rlk_code>(code)));
  Outcome out;
  stage.collect(p, out);
  take_sample(p, out);
  return out;
}

Outcome execute_forced(const Problem& p, const Subject& subject) {
  if (const rlk_verdict v = machine_verdict(*subject.implementation, subject.device); v.code != RLK_OK)
    return failed(Status(RLK_UNSUPPORTED, verdict_text(v.why, v.v)));
  Stage stage(p, subject, {}, false);
  if (!stage.status) return failed(stage.status);
  const rlk_request request{sizeof(rlk_request), 0, subject.device, 0, 1};
  const rlk_implementation& i = *subject.implementation;
  std::vector<std::byte> workspace((i.workspace ? i.workspace(stage.slots.data(), &request) : 0) + 64,
                                   WatchedMemory::kFill);
  const rlk_call call{sizeof(rlk_call), 0, &host(), nullptr, workspace.data(), workspace.size(),
                      &subject.device,  1, 0};
  if (const int32_t code = i.run(stage.slots.data(), &call))
    return failed(failure(static_cast<rlk_code>(code)));
  Outcome out;
  stage.collect(p, out);
  return out;
}

}  // namespace rlk::harness
