// labels: conformance fibers
// quick: yes
// The portable GPU kernels of KDA on fibers: the bits of the native backend, at both wave sizes and in any
// thread order. Also the native forms of every instruction set, against each other.
#include <doctest/doctest.h>

#include "kda_steps.hpp"
#include "native/kda/chunk.hpp"
#include "simt/kda/kernels.hpp"

namespace {

using namespace kda_test;
using rlk::kda::Gate;
using rlk::native::Isa;
using rlk::native::widest;
namespace native = rlk::native::kda;
namespace kernels = rlk::simt::kda;

// 64-byte aligned memory full of NaN.
struct Scratch {
  std::vector<float> memory;
  explicit Scratch(std::size_t bytes) : memory(bytes / 4 + 32, NAN) {}
  void* data() {
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    return reinterpret_cast<void*>((address + 63) / 64 * 64);
  }
};

void run_engine(Case& c, const native::Engine& engine) {
  Scratch forward(native::forward_scratch_bytes(c.p)), backward(native::backward_scratch_bytes(c.p));
  std::vector<double> partials(native::partials_bytes(c.p) / sizeof(double), NAN);
  for (std::int64_t i = 0; i < native::forward_task_count(c.p); ++i) {
    engine.forward(c.p, i, static_cast<float*>(forward.data()));
  }
  for (std::int64_t i = 0; i < native::backward_task_count(c.p); ++i) {
    engine.backward(c.p, i, static_cast<float*>(backward.data()), partials.data());
  }
  engine.finish(c.p, partials.data());
  c.collect();
}

void run_fibers(Case& c) {
  Scratch forward(std::size_t(kernels::forward_bytes(c.p))),
      backward(std::size_t(kernels::backward_bytes(c.p)));
  kernels::launch_forward(c.p, forward.data(), nullptr);
  kernels::launch_backward(c.p, backward.data(), nullptr);
  c.collect();
}

bool runs_here(const native::Engine& engine) {
  for (Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512})
    if (&native::engine_for(isa) == &engine) return isa <= widest(rlk_cpu_level());
  return false;
}
const native::Engine& best_engine() { return native::engine_for(widest(rlk_cpu_level())); }

const Shape kShapes[] = {
    {.tokens = 1, .k = 16, .v = 16},
    {.batch = 2, .tokens = 70, .heads = 1, .value_heads = 2, .k = 20, .v = 17},
    {.tokens = 66, .k = 32, .v = 16, .type = Float::bf16, .masked = 0.1},
    {.tokens = 40, .k = 16, .v = 32, .gate = Gate::softplus, .norm = true, .type = Float::f16},
    {.tokens = 70,
     .k = 16,
     .v = 16,
     .gate = Gate::bounded,
     .v_first = true,
     .sigmoid = true,
     .negative = true,
     .chunk = 32},
    {.tokens = 90, .value_heads = 2, .k = 16, .v = 16, .bounds = {0, 3, 3, 72, 90}}};

void same_bits(const Case& a, const Case& b) {
  for (const auto& [name, values] : a.out) {
    CAPTURE(name);
    CHECK(b.out.at(name) == values);
  }
}

}  // namespace

TEST_CASE("kda chunked: every instruction set gives the same bits") {
  for (const Shape& shape : kShapes) {
    Case portable = random_case(shape, 31);
    run_engine(portable, native::kPortable);
    for (const native::Engine* engine : {&native::kAvx2, &native::kAvx512}) {
      if (!runs_here(*engine)) continue;
      CAPTURE(engine->isa);
      Case wide = random_case(shape, 31);
      run_engine(wide, *engine);
      same_bits(portable, wide);
    }
  }
}

TEST_CASE("kda kernels on fibers: chunked forward and backward have the bits of the native backend") {
  const rlk_fiber::Order orders[] = {rlk_fiber::Order::ascending, rlk_fiber::Order::descending,
                                     rlk_fiber::Order::shuffled};
  int turn = 0;
  for (const Shape& shape : kShapes) {
    Case native = random_case(shape, 32);
    run_engine(native, best_engine());
    for (int wave : {32, 64}) {
      CAPTURE(wave);
      rlk_fiber::wave_size = wave;
      rlk_fiber::order = orders[turn++ % 3];
      Case fibers = random_case(shape, 32);
      run_fibers(fibers);
      same_bits(native, fibers);
    }
  }
  rlk_fiber::order = rlk_fiber::Order::ascending;
}

TEST_CASE("kda kernels on fibers: outputs do not depend on later tokens, be they NaN or infinite") {
  check_later_tokens({.tokens = 70, .k = 16, .v = 16}, run_fibers);
}

TEST_CASE("kda kernels on fibers: a token from the open chunk's start has the bits of a prefill") {
  check_open_chunks({.tokens = 66, .value_heads = 2, .k = 16, .v = 16, .chunk = 32}, run_fibers);
}

TEST_CASE(
    "kda kernels on fibers: a step has the bits of a prefill, and without room for a token NaN and nothing "
    "else") {
  const RunStep step = [](const Step& p) {
    Scratch scratch(std::size_t(kernels::step_bytes(p)));
    kernels::launch_step(p, scratch.data(), nullptr);
  };
  const Run prefill = [](Case& c) {
    Scratch scratch(native::forward_scratch_bytes(c.p));
    for (std::int64_t i = 0; i < native::forward_task_count(c.p); ++i)
      best_engine().forward(c.p, i, static_cast<float*>(scratch.data()));
  };
  rlk_fiber::order = rlk_fiber::Order::shuffled;
  for (int wave : {32, 64}) {
    rlk_fiber::wave_size = wave;
    check_steps({.tokens = 64,
                 .k = 16,
                 .v = 20,
                 .gate = Gate::bounded,
                 .v_first = true,
                 .norm = true,
                 .chunk = 32,
                 .type = Float::bf16},
                false, prefill, step);
    check_steps({.batch = 2, .tokens = 66, .value_heads = 2, .k = 32, .v = 16}, true, prefill, step);
    check_tokens({.batch = 2, .tokens = 66, .value_heads = 2, .k = 32, .v = 16}, prefill, step);
    check_tokens({.tokens = 40,
                  .k = 80,
                  .v = 112,
                  .gate = Gate::bounded,
                  .norm = true,
                  .sigmoid = true,
                  .chunk = 32,
                  .type = Float::bf16},
                 prefill, step);
  }
  rlk_fiber::order = rlk_fiber::Order::ascending;

  Decoded d({.batch = 1, .tokens = 4, .k = 16, .v = 16, .chunk = 32}, 18);
  const auto before = d.state;
  d.rows[0] = 30;
  Case c = d.next({4}, {4}, false);
  d.run(c, step);
  for (float x : c.out.at("o").values()) CHECK(x != x);
  CHECK(d.state == before);
  CHECK(std::all_of(d.cache.begin(), d.cache.end(), [](float x) { return x != x; }));
}

TEST_CASE("kda kernels on fibers: a prefill cut at a chunk boundary equals one call, bit for bit") {
  check_cut_prefill({.tokens = 70, .value_heads = 2, .k = 16, .v = 16, .chunk = 32}, run_fibers);
}

TEST_CASE("kda kernels on fibers: decode has the bits of the native backend in both layouts") {
  struct Size {
    int k, v;
  };
  for (Size size : {Size{128, 128}, Size{60, 100}, Size{17, 5}, Size{256, 130}, Size{100, 256}}) {
    for (bool v_first : {false, true}) {
      CAPTURE(size.k);
      CAPTURE(v_first);
      const Shape shape{.batch = 2,
                        .tokens = 1,
                        .value_heads = 2,
                        .k = size.k,
                        .v = size.v,
                        .gate = Gate::softplus,
                        .v_first = v_first,
                        .norm = v_first,
                        .type = v_first ? Float::bf16 : Float::f32};
      Case native = random_case(shape, 33);
      for (const native::Engine* engine : {&native::kPortable, &native::kAvx2, &native::kAvx512}) {
        if (!runs_here(*engine)) continue;
        Case again = random_case(shape, 33);
        for (std::int64_t i = 0; i < 4; ++i) engine->decode(again.p, i);
        if (engine == &native::kPortable) {
          native = std::move(again);
          continue;
        }
        CHECK(again.out.at("o") == native.out.at("o"));
        CHECK(again.out.at("ht") == native.out.at("ht"));
      }
      for (int wave : {32, 64}) {
        rlk_fiber::wave_size = wave;
        rlk_fiber::order = wave == 32 ? rlk_fiber::Order::shuffled : rlk_fiber::Order::descending;
        Case fibers = random_case(shape, 33);
        kernels::launch_decode(fibers.p, nullptr);
        CHECK(fibers.out.at("o") == native.out.at("o"));
        CHECK(fibers.out.at("ht") == native.out.at("ht"));
      }
    }
  }
  rlk_fiber::order = rlk_fiber::Order::ascending;
}

TEST_CASE("kda kernels on fibers: the gate and its gradients have the bits of the native backend") {
  struct Size {
    Gate gate;
    int tokens, k;  // more channels than a block has threads, too
  };
  for (const auto [gate, tokens, k] :
       {Size{Gate::softplus, 1500, 12}, {Gate::bounded, 1500, 12}, {Gate::softplus, 40, 300}}) {
    Case c = random_case({.tokens = tokens, .value_heads = 2, .k = k, .gate = gate}, 34);
    Problem p = c.p;
    const std::size_t n = static_cast<std::size_t>(tokens) * 2 * static_cast<std::size_t>(k);
    std::vector<float> y_native(n, NAN), y_fiber(n, NAN), dx_native(n, NAN), dx_fiber(n, NAN);
    std::vector<float> parameters[2];
    p.batch = p.sequences = 1;
    const auto dense = [&](std::vector<float>& x) { return Tensor{x.data(), Float::f32, 0, 2 * k, k}; };
    const native::Engine& engine = best_engine();
    p.out = dense(y_native);
    for (std::int64_t i = 0; i < native::gate_block_count(p); ++i) engine.gate(p, i);
    p.out = dense(y_fiber);
    kernels::launch_gate(p, nullptr);
    CHECK(std::memcmp(y_native.data(), y_fiber.data(), n * 4) == 0);

    p.d_out = p.g;
    for (int which : {0, 1}) {
      parameters[which].assign(2 + 2 * static_cast<std::size_t>(k), NAN);
      p.d_a_log = parameters[which].data();
      p.d_dt_bias = parameters[which].data() + 2;
      p.d_g = dense(which ? dx_fiber : dx_native);
      if (which == 0) {
        Problem blocks = p;
        blocks.sequences = native::gate_block_count(p);
        std::vector<double> partials(native::partials_bytes(blocks) / sizeof(double), NAN);
        for (std::int64_t i = 0; i < blocks.sequences; ++i) engine.gate_backward(blocks, i, partials.data());
        engine.finish(blocks, partials.data());
      } else {
        Scratch scratch(std::size_t(kernels::gate_backward_bytes(p)));
        kernels::launch_gate_backward(p, scratch.data(), nullptr);
      }
    }
    CHECK(std::memcmp(dx_native.data(), dx_fiber.data(), n * 4) == 0);
    CHECK(std::memcmp(parameters[0].data(), parameters[1].data(), parameters[0].size() * 4) == 0);
    CHECK(parameters[0][0] == parameters[0][0]);
  }
}
