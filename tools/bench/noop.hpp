// Ops of 2, 4 and 12 tensors that do nothing, registered through the plugin tables like anybody's: what a
// call of them costs is what dispatch costs.
#pragma once

#include <array>
#include <cstdint>
#include <iterator>

#include "rlk/backend.hpp"
#include "rlk/resolve.hpp"

namespace rlk::bench {

template <int Tensors>
struct [[gnu::may_alias]] Noop {
  static constexpr const char* kName = Tensors == 2 ? "noop2" : Tensors == 4 ? "noop4" : "noop12";
  In in[Tensors - 1];
  Out out{};
};

template <int Tensors>
rlk_code do_nothing(const Noop<Tensors>&, const Call&) {
  return RLK_OK;
}

template <int Tensors>
constexpr auto noop_arguments() {
  constexpr const char* kNames[] = {"a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k"};
  std::array<rlk_argument, Tensors> arguments{};
  for (std::size_t i = 0; i + 1 < Tensors; ++i)
    arguments[i] = {kNames[i], "", RLK_READ, RLK_F32, 1, 4, -2, 0};
  arguments[Tensors - 1] = {"out", "", RLK_WRITE, RLK_F32, 1, 4, -2, 0};
  return arguments;
}

template <int Tensors>
struct NoopOp {
  static constexpr auto kArguments = noop_arguments<Tensors>();
  static int32_t infer(const rlk_slot* slots, rlk_shape* shapes, const rlk_host*) {
    const DLTensor& t = *slots[0].tensor;
    rlk_shape& s = shapes[Tensors - 1];
    s.ndim = t.ndim;
    s.dtypes = s.preferred = RLK_F32;
    for (int32_t i = 0; i < t.ndim; ++i) s.dim[i] = t.shape[i];
    return RLK_OK;
  }
  static constexpr rlk_op_schema kSchema = {.struct_size = sizeof(rlk_op_schema),
                                            .version = 1,
                                            .name = Noop<Tensors>::kName,
                                            .aliases = "",
                                            .doc = "does nothing",
                                            .arguments = kArguments.data(),
                                            .num_arguments = Tensors,
                                            .attributes = nullptr,
                                            .num_attributes = 0,
                                            .backward = nullptr,
                                            .infer = infer,
                                            .may_alias = ""};
  static inline const rlk_implementation kImplementation =
      implement<Noop<Tensors>, do_nothing<Tensors>>({.id = "bench.noop",
                                                     .doc = "does nothing",
                                                     .priority = 100,
                                                     .arithmetic = "none",
                                                     .dtypes = RLK_F32,
                                                     .traits = RLK_DETERMINISTIC});
};

inline int32_t cpu_device(rlk_device* out, int32_t capacity, char*, size_t) {
  if (capacity > 0) out[0] = {kDLCPU, 0, 0, "CPU"};
  return 1;
}

inline const rlk_backend& noop_backend() {
  static const rlk_implementation* const implementations[] = {
      &NoopOp<2>::kImplementation, &NoopOp<4>::kImplementation, &NoopOp<12>::kImplementation};
  static const rlk_op_schema* const ops[] = {&NoopOp<2>::kSchema, &NoopOp<4>::kSchema, &NoopOp<12>::kSchema};
  static const rlk_backend backend = {.struct_size = sizeof(rlk_backend),
                                      .abi_major = RLK_ABI_MAJOR,
                                      .abi_minor = RLK_ABI_MINOR,
                                      .name = "bench",
                                      .version = "1",
                                      .doc = "ops that do nothing",
                                      .implementations = implementations,
                                      .num_implementations = std::size(implementations),
                                      .ops = ops,
                                      .num_ops = std::size(ops),
                                      .devices = cpu_device,
                                      .activate = nullptr};
  return backend;
}

// A call with memory of its own: rank-2 tensors, the last one written.
template <int Tensors>
struct NoopCall {
  std::array<std::array<float, 32>, Tensors> memory{};
  std::array<Tensor, Tensors> tensors;
  Noop<Tensors> args{};

  NoopCall() {
    for (std::size_t i = 0; i < Tensors; ++i) tensors[i] = Tensor(memory[i].data(), {4, 8}, DType::f32);
    for (std::size_t i = 0; i + 1 < Tensors; ++i) args.in[i] = tensors[i];
    args.out = tensors[Tensors - 1];
  }
  const rlk_slot* slots() const { return reinterpret_cast<const rlk_slot*>(&args); }
  // As the generated functions of rlk/ops.hpp do it.
  Status call(const Options& options = {}) const {
    static const int32_t op = op_index(Noop<Tensors>::kName);
    return run_cached(op, slots(), options);
  }
};

}  // namespace rlk::bench
