// quick: yes
#include "native/rope/run.hpp"
#include "rope_support.hpp"
#include "simt/rope/kv_kernel.hpp"

namespace ropetest {
namespace {

using rlk::native::Isa;
using rlk::native::rope::Stores;

constexpr struct {
  Isa isa;
  const char* name;
} kIsas[] = {{Isa::scalar, "scalar"}, {Isa::avx2, "avx2"}, {Isa::avx512, "avx512"}};

void run_native(Isa isa, Stores stores, const Geometry& g) {
  const auto plan = rlk::native::rope::plan(g, isa, stores);
  for (std::int64_t i = plan.tiles; i-- > 0;) rlk::native::rope::run_tile(g, plan, i);
}

void run_fibers(const Geometry& g, rlk_fiber::Order order) {
  rlk_fiber::order = order;
  REQUIRE(rlk::simt::rope::launch(g, nullptr) == hipSuccess);
  rlk_fiber::order = rlk_fiber::Order::ascending;
}

}  // namespace

const std::vector<Engine>& engines() {
  static const std::vector<Engine> all = [] {
    std::vector<Engine> list;
    for (const auto& [isa, name] : kIsas) {
      if (isa > rlk::native::widest(rlk_cpu_level())) break;
      for (Stores stores : {Stores::cached, Stores::streamed}) {
        if (isa == Isa::scalar && stores == Stores::streamed) continue;
        list.push_back({std::string(name) + (stores == Stores::streamed ? ", streamed" : ""),
                        [isa, stores](const Geometry& g) { run_native(isa, stores, g); }});
      }
    }
    list.push_back({"fibers", [](const Geometry& g) { run_fibers(g, rlk_fiber::Order::ascending); }});
    list.push_back(
        {"fibers, shuffled", [](const Geometry& g) { run_fibers(g, rlk_fiber::Order::shuffled); }});
    return list;
  }();
  return all;
}

std::string run_all(const Attributes& attributes, Tensors tensors, Tensor& out, Tensor* k_out) {
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
    const auto error = rlk::rotary::read(attributes, tensors, g);
    if (!error.empty()) return error;
    if (const auto rows = rlk::native::rope::check_rows(attributes.op, g); !rows.empty()) return rows;
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
  for (const auto& [isa, name] : kIsas) {
    if (isa > rlk::native::widest(rlk_cpu_level())) break;
    CAPTURE(name);
    for (Stores stores : {Stores::cached, Stores::streamed})
      check([&] {
        const auto plan = rlk::native::rope::plan(g, isa, stores);
        for (std::int64_t i = plan.tiles; i-- > 0;) rlk::native::rope::run_tile(g, backward, plan, i);
      });
  }
  check([&] { CHECK(rlk::simt::rope::launch_kv(g, backward, nullptr) == hipSuccess); });
}

}  // namespace ropetest
