#include "../backends/native/rope_run.hpp"
#include "rope_kv_kernel.hpp"
#include "rope_support.hpp"

namespace ropetest {
namespace {

void run_native(rlk::native::rope::Isa isa, const Geometry& g, bool stream) {
  auto plan = rlk::native::rope::plan(g, isa);
  plan.stream = stream && plan.stream;
  for (std::int64_t i = plan.tiles; i-- > 0;) rlk::native::rope::run_tile(g, plan, i);
}

void run_fibers(const Geometry& g, rlk_fiber::Order order) {
  rlk_fiber::order = order;
  REQUIRE(rlk::simt::rope_kernel::launch(g, nullptr) == hipSuccess);
  rlk_fiber::order = rlk_fiber::Order::ascending;
}

}  // namespace

const std::vector<Engine>& engines() {
  using rlk::native::rope::Isa;
  static const std::vector<Engine> all = [] {
    std::vector<Engine> list;
    const Isa best = rlk::native::rope::best_isa();
    list.push_back({"scalar", [](const Geometry& g) { run_native(Isa::scalar, g, true); }});
    if (best >= Isa::avx2)
      list.push_back({"avx2", [](const Geometry& g) { run_native(Isa::avx2, g, true); }});
    if (best >= Isa::avx512)
      list.push_back({"avx512", [](const Geometry& g) { run_native(Isa::avx512, g, true); }});
    list.push_back({"fibers", [](const Geometry& g) { run_fibers(g, rlk_fiber::Order::ascending); }});
    list.push_back(
        {"fibers, shuffled", [](const Geometry& g) { run_fibers(g, rlk_fiber::Order::shuffled); }});
    return list;
  }();
  return all;
}

std::string run_all(const Options& options, Tensors tensors, Tensor& out, Tensor* k_out) {
  Tensor first, k_first;
  for (const Engine& engine : engines()) {
    CAPTURE(engine.name);
    std::fill(out.memory.begin(), out.memory.end(), std::uint8_t{0xff});
    tensors.out = out.dl();
    if (k_out != nullptr) {
      std::fill(k_out->memory.begin(), k_out->memory.end(), std::uint8_t{0xff});
      tensors.k_out = k_out->dl();
    }
    Geometry g;
    const auto error = rlk::rotary::read(options, tensors, g);
    if (!error.empty()) return error;
    if (const auto rows = rlk::native::rope::check_rows(options.op, g); !rows.empty()) return rows;
    engine.run(g);
    if (&engine == &engines().front()) {
      first = out;
      if (k_out != nullptr) k_first = *k_out;
    } else {
      CHECK(same_bits(first, out));
      if (k_out != nullptr) CHECK(same_bits(k_first, *k_out));
    }
  }
  return {};
}

void check_kv(const rlk_slot* slots, bool backward, Tensor& first, Tensor& second) {
  using rlk::native::rope::Isa;
  rlk::rotary::KvGeometry g;
  REQUIRE(rlk::rotary::read_mla_kv(slots, backward, g) == "");
  const auto want_first = first.memory, want_second = second.memory;
  const auto check = [&](const auto& run) {
    std::fill(first.memory.begin(), first.memory.end(), std::uint8_t{0xff});
    std::fill(second.memory.begin(), second.memory.end(), std::uint8_t{0xff});
    run();
    CHECK(first.memory == want_first);
    CHECK(second.memory == want_second);
  };
  for (Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512}) {
    if (isa > rlk::native::rope::best_isa()) break;
    check([&] {
      const auto plan = rlk::native::rope::plan(g, isa);
      for (std::int64_t i = plan.tiles; i-- > 0;) rlk::native::rope::run_tile(g, backward, plan, i);
    });
  }
  check([&] { CHECK(rlk::simt::rope_kernel::launch_kv(g, backward, nullptr) == hipSuccess); });
}

}  // namespace ropetest
