#include "src/harness/execute.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "rlk/resolve.hpp"
#include "src/failure.hpp"
#include "src/host.hpp"
#include "src/machine.hpp"
#include "src/resolve.hpp"

namespace rlk::harness {
namespace {

constexpr std::size_t kGuard = 256;
constexpr std::byte kGuardByte{0xa5}, kNan{0xff};

// One array of a run: host memory with guards, a device copy where there is a device, and the tensor over it.
class Slab {
 public:
  Slab(const Subject& subject, const Manner& manner, const std::vector<int64_t>& shape, DType dtype,
       std::vector<int64_t> strides, bool host)
      : subject_(subject), device_(!host && subject.services), size_(size_of(dtype)) {
    offset_ = static_cast<std::size_t>((manner.offset + size_ - 1) / size_ * size_);
    int64_t elements = 1, reach = 1;
    for (int64_t d : shape) elements *= d;
    if (strides.empty()) {
      reach = elements;
    } else {
      for (std::size_t i = 0; i < shape.size(); ++i) reach += (shape[i] - 1) * strides[i];
      if (elements == 0) reach = 0;
    }
    bytes_ = static_cast<std::size_t>(std::max<int64_t>(reach, 0) * size_);
    host_.assign(bytes_ + 2 * kGuard + offset_ + 256, kGuardByte);
    // 256-byte aligned body, then the offset: alignments are what the manner says, not luck.
    lead_ = kGuard + (256 - (reinterpret_cast<uintptr_t>(host_.data()) + kGuard) % 256) % 256 + offset_;
    char* data = reinterpret_cast<char*>(host_.data() + lead_);
    DLDevice where{kDLCPU, 0};
    if (device_) {
      where = {static_cast<DLDeviceType>(subject.device.type), subject.device.id};
      void* memory = nullptr;
      if (subject.services->allocate(&subject.device, host_.size() + 512, &memory) != RLK_OK) {
        failed_ = true;
        return;
      }
      memory_ = memory;
      device_base_ = static_cast<char*>(memory) + (256 - reinterpret_cast<uintptr_t>(memory) % 256) % 256;
      data = device_base_ + kGuard + offset_;
    }
    tensor = Tensor(data, std::span(shape), dtype, where, std::span(strides));
  }
  Slab(const Slab&) = delete;
  ~Slab() {
    if (memory_) subject_.services->release(&subject_.device, memory_);
  }

  bool failed() const { return failed_; }
  std::byte* body() { return host_.data() + lead_; }
  std::size_t body_bytes() const { return bytes_; }
  void fill(std::byte value) { std::fill_n(body(), bytes_, value); }
  // Everything from guard to guard travels, so that a write outside is seen.
  bool to_device() {
    return !device_ || subject_.services->copy_in(&subject_.device, device_base_, body() - kGuard - offset_,
                                                  travel()) == RLK_OK;
  }
  bool to_host() {
    return !device_ || subject_.services->copy_out(&subject_.device, body() - kGuard - offset_, device_base_,
                                                   travel()) == RLK_OK;
  }
  bool guards_hold() const {
    const std::byte* low = host_.data() + lead_ - kGuard - offset_;
    const auto intact = [](std::byte b) { return b == kGuardByte; };
    return std::all_of(low, low + kGuard + offset_, intact) &&
           std::all_of(host_.data() + lead_ + bytes_, host_.data() + lead_ + bytes_ + kGuard, intact);
  }
  uint64_t hash() { return hash_bytes(body(), bytes_); }

  Tensor tensor;

 private:
  std::size_t travel() const { return kGuard + offset_ + bytes_ + kGuard; }
  const Subject& subject_;
  bool device_, failed_ = false;
  int64_t size_;
  std::size_t offset_ = 0, bytes_ = 0, lead_ = 0;
  std::vector<std::byte> host_;
  void* memory_ = nullptr;
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

// Calls body(offset in elements) for each element in row-major order.
template <class Body>
void walk(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides, Body body) {
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  for (int64_t i = 0; i < n; ++i) {
    int64_t rest = i, at = 0;
    for (std::size_t d = shape.size(); d-- > 0;) {
      at += rest % shape[d] * strides[d];
      rest /= shape[d];
    }
    body(i, at);
  }
}

void scatter(const Array& a, const std::vector<int64_t>& strides, std::byte* to) {
  const auto size = static_cast<std::size_t>(size_of(a.dtype));
  if (strides.empty()) {
    if (!a.bytes.empty()) std::memcpy(to, a.bytes.data(), a.bytes.size());
    return;
  }
  walk(a.shape, strides, [&](int64_t i, int64_t at) {
    std::memcpy(to + static_cast<std::size_t>(at) * size, a.bytes.data() + static_cast<std::size_t>(i) * size,
                size);
  });
}

void gather(Array& a, const std::vector<int64_t>& strides, const std::byte* from) {
  const auto size = static_cast<std::size_t>(size_of(a.dtype));
  a.bytes.resize(static_cast<std::size_t>(a.numel()) * size);
  if (strides.empty()) {
    if (!a.bytes.empty()) std::memcpy(a.bytes.data(), from, a.bytes.size());
    return;
  }
  walk(a.shape, strides, [&](int64_t i, int64_t at) {
    std::memcpy(a.bytes.data() + static_cast<std::size_t>(i) * size,
                from + static_cast<std::size_t>(at) * size, size);
  });
}

// All arrays of a run.
struct Stage {
  std::vector<std::unique_ptr<Slab>> slabs;
  std::vector<std::vector<int64_t>> strides;
  std::vector<rlk_slot> slots;
  std::vector<uint64_t> hashes;
  Status status;

  Stage(const Problem& p, const Subject& subject, const Manner& manner, bool in_fp64) {
    const rlk_op_schema& s = p.schema();
    slabs.resize(s.num_arguments);
    strides.resize(s.num_arguments);
    slots.resize(s.num_arguments + s.num_attributes);
    hashes.resize(s.num_arguments);
    const auto shapes = result_shapes(p);
    if (!shapes) {
      status = shapes.status();
      return;
    }
    for (uint32_t i = 0; i < s.num_arguments; ++i) {
      const rlk_argument& a = s.arguments[i];
      const bool input = p.inputs[i].has_value();
      if (!input && p.results[i] == DType::none) continue;
      const std::vector<int64_t>& shape = input ? p.inputs[i]->shape : (*shapes)[i].shape;
      DType dtype = input ? p.inputs[i]->dtype : p.results[i];
      if (!input && in_fp64 && (a.dtypes & RLK_F64)) dtype = DType::f64;
      strides[i] =
          input && !p.strides[i].empty() ? p.strides[i] : padded_strides(a, shape, manner.row_padding);
      slabs[i] = std::make_unique<Slab>(subject, manner, shape, dtype, strides[i], a.flags & RLK_HOST);
      if (slabs[i]->failed()) {
        status = failure(RLK_OUT_OF_MEMORY);
        return;
      }
      slabs[i]->fill(kNan);
      if (input) scatter(*p.inputs[i], strides[i], slabs[i]->body());
      hashes[i] = slabs[i]->hash();
      slabs[i]->to_device();
      slots[i].tensor = &slabs[i]->tensor.dl();
    }
    std::copy(p.attributes.begin(), p.attributes.end(), slots.begin() + s.num_arguments);
  }

  void collect(const Problem& p, Outcome& out) {
    const rlk_op_schema& s = p.schema();
    out.results.resize(s.num_arguments);
    for (uint32_t i = 0; i < s.num_arguments; ++i) {
      if (!slabs[i]) continue;
      slabs[i]->to_host();
      const char* name = s.arguments[i].name;
      if (!slabs[i]->guards_hold() && out.broken.empty())
        out.broken = fmt::format("bytes beside {} were written", name);
      if (s.arguments[i].role == RLK_READ) {
        if (slabs[i]->hash() != hashes[i] && out.broken.empty())
          out.broken = fmt::format("{} is a read argument and was changed", name);
        continue;
      }
      const DLTensor& t = slabs[i]->tensor.dl();
      Array& a = out.results[i];
      a.shape.assign(t.shape, t.shape + t.ndim);
      a.dtype = dtype_of(t.dtype);
      gather(a, strides[i], slabs[i]->body());
      if (!strides[i].empty() && s.arguments[i].role == RLK_WRITE && out.broken.empty()) {
        // What is left of the NaN filling once the elements are put back over it must be all of it.
        std::vector<std::byte> untouched(slabs[i]->body_bytes(), kNan);
        scatter(a, strides[i], untouched.data());
        if (std::memcmp(untouched.data(), slabs[i]->body(), untouched.size()) != 0)
          out.broken = fmt::format("bytes between the rows of {} were written", name);
      }
    }
  }
};

Outcome failed(const Status& s) {
  Outcome out;
  out.code = s.code();
  out.text = s.message();
  return out;
}

}  // namespace

Outcome execute(const Problem& p, const Subject& subject, const Manner& manner) {
  Stage stage(p, subject, manner, false);
  if (!stage.status) return failed(stage.status);
  Options options;
  options.backend = subject.implementation->id;
  options.threads = manner.threads;
  options.stream = manner.stream;
  // The workspace is ours, so that it can be filled with NaN and watched like any other array.
  const Result<uint64_t> asked = workspace_slots(subject.op->name, stage.slots.data(), options);
  if (!asked) return failed(asked.status());
  const auto bytes = static_cast<int64_t>(*asked) * manner.workspace_percent / 100;
  std::unique_ptr<Slab> workspace;
  if (bytes > 0) {
    Manner plain;
    workspace = std::make_unique<Slab>(subject, plain, std::vector<int64_t>{bytes}, DType::u8,
                                       std::vector<int64_t>{}, false);
    if (workspace->failed()) return failed(failure(RLK_OUT_OF_MEMORY));
    workspace->fill(kNan);
    workspace->to_device();
    options.workspace = workspace->tensor.dl().data;
    options.workspace_bytes = static_cast<uint64_t>(bytes);
  }
  Status status;
  if (manner.graph) {
    void* graph = nullptr;
    const rlk_device_services& d = *subject.services;
    if (d.capture_begin(&subject.device, manner.stream) != RLK_OK) return failed(failure(RLK_BACKEND_ERROR));
    status = run_slots(subject.op->name, stage.slots.data(), options);
    const bool captured = d.capture_end(&subject.device, manner.stream, &graph) == RLK_OK;
    if (status && !captured) status = failure(RLK_BACKEND_ERROR);
    if (status && d.graph_launch(&subject.device, graph, manner.stream) != RLK_OK)
      status = failure(RLK_BACKEND_ERROR);
    if (subject.services->synchronize(&subject.device, manner.stream) != RLK_OK && status)
      status = failure(RLK_BACKEND_ERROR);
    if (graph) d.graph_destroy(&subject.device, graph);
  } else {
    status = run_slots(subject.op->name, stage.slots.data(), options);
    if (subject.services && subject.services->synchronize(&subject.device, manner.stream) != RLK_OK && status)
      status = failure(RLK_BACKEND_ERROR);
  }
  if (!status) return failed(status);
  Outcome out;
  stage.collect(p, out);
  if (workspace) {
    workspace->to_host();
    if (!workspace->guards_hold() && out.broken.empty())
      out.broken = "bytes beside the workspace were written";
  }
  return out;
}

Outcome execute_reference(const Problem& p, bool in_fp64) {
  Subject cpu;
  Stage stage(p, cpu, {}, in_fp64);
  if (!stage.status) return failed(stage.status);
  if (const int32_t code = p.op->reference(stage.slots.data(), &host()))
    return failed(failure(static_cast<rlk_code>(code)));
  Outcome out;
  stage.collect(p, out);
  return out;
}

Outcome execute_forced(const Problem& p, const Subject& subject) {
  if (const rlk_verdict v = machine_verdict(*subject.implementation, subject.device); v.code != RLK_OK)
    return failed(Status(RLK_UNSUPPORTED, verdict_text(v.why, v.v)));
  Stage stage(p, subject, {}, false);
  if (!stage.status) return failed(stage.status);
  const rlk_request request{sizeof(rlk_request), 0, subject.device, 0, 1};
  const rlk_implementation& i = *subject.implementation;
  std::vector<std::byte> workspace((i.workspace ? i.workspace(stage.slots.data(), &request) : 0) + 64, kNan);
  const rlk_call call{sizeof(rlk_call), 0, &host(), nullptr, workspace.data(), workspace.size(),
                      &subject.device,  1, 0};
  if (const int32_t code = i.run(stage.slots.data(), &call))
    return failed(failure(static_cast<rlk_code>(code)));
  Outcome out;
  stage.collect(p, out);
  return out;
}

}  // namespace rlk::harness
