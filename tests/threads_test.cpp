// labels: unit threads
// Many threads resolve and call while backends register, the environment is read again and ranges are saved:
// results stay right and nothing is torn. The thread sanitizer watches this one.
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cmath>
#include <deque>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "child_process.hpp"
#include "rlk/rlk.hpp"
#include "rlk/workers.hpp"

using namespace rlk;

namespace {

constexpr int kThreads = 64, kBackends = 24, kCalls = 300;

int32_t fill(const rlk_slot* slots, const rlk_call*) {
  Out out(slots[3].tensor);
  for (int64_t i = 0; i < out.numel(); ++i) out.data<float>()[i] = -1;
  return RLK_OK;
}

// A backend linked into the program, with one implementation that nobody prefers.
struct LinkedBackend {
  std::string name, id;
  rlk_implementation implementation{};
  const rlk_implementation* table[1] = {&implementation};
  rlk_backend backend{};

  explicit LinkedBackend(int number) : name(fmt::format("linked{}", number)), id(name + ".one") {
    implementation.struct_size = sizeof implementation;
    implementation.priority = -1 - number;
    implementation.op = "lm_head";
    implementation.id = id.c_str();
    implementation.doc = "";
    implementation.arithmetic = "constant";
    implementation.dtypes = RLK_F32;
    implementation.device_type = kDLCPU;
    implementation.run = fill;
    backend.struct_size = sizeof backend;
    backend.abi_major = RLK_ABI_MAJOR;
    backend.name = name.c_str();
    backend.version = "1";
    backend.doc = "";
    backend.implementations = table;
    backend.num_implementations = 1;
  }
};

// One thread's call: out = [1, 2] * [[1, 2], [3, 4], [5, 6]]^T.
struct Call {
  float hidden[2] = {1, 2}, weight[6] = {1, 2, 3, 4, 5, 6}, out[3] = {};
  Tensor h{hidden, {1, 2}, DType::f32}, w{weight, {3, 2}, DType::f32}, o{out, {1, 3}, DType::f32};
  LmHead args() {
    LmHead a{};
    a.hidden = h, a.weight = w, a.out = o;
    return a;
  }
  bool right() const { return out[0] == 5 && out[1] == 11 && out[2] == 17; }
  bool filled() const { return out[0] == -1 && out[2] == -1; }
  void clear() { out[0] = out[1] = out[2] = 0; }
};

// Failures are counted here, not asserted: doctest's macros are not for 64 threads at once.
struct Errors {
  std::atomic<int> wrong{0};
  void expect(bool fine) {
    if (!fine) wrong.fetch_add(1, std::memory_order_relaxed);
  }
};

void call_in_every_way(int thread, std::atomic<int>& registered, Errors& errors) {
  Call call;
  Options one_thread;
  one_thread.threads = 1;
  auto bound = bind(call.args(), one_thread);
  errors.expect(static_cast<bool>(bound));
  for (int i = 0; i < kCalls; ++i) {
    call.clear();
    errors.expect(static_cast<bool>(lm_head(call.args(), one_thread)) && call.right());

    call.clear();
    if (bound) errors.expect(static_cast<bool>(bound->run()) && call.right());

    // A backend that is known to be there can be asked for at once.
    if (const int known = registered.load(std::memory_order_acquire)) {
      const std::string name = fmt::format("linked{}", (thread + i) % known);
      call.clear();
      Options options = one_thread;
      options.backend = name;
      errors.expect(static_cast<bool>(lm_head(call.args(), options)) && call.filled());
      call.clear();
      const BackendScope scope("lm_head=" + name);
      errors.expect(static_cast<bool>(lm_head(call.args(), one_thread)) && call.filled());
    }

    const Resolution r = resolve(call.args(), one_thread);
    errors.expect(r && r.id().substr(0, 7) == "native." && r.fingerprint() != 0);
    if (i % 8 == 0) errors.expect(!r.explain().empty());
    if (i % 16 == thread % 16) {
      char* text = rlk_list_json("backends");
      errors.expect(text != nullptr);
      rlk_free(text);
      const Saved saved(call.h, "hidden");
      call.clear();
      errors.expect(static_cast<bool>(lm_head(call.args(), one_thread)) && call.right());
    }
  }
}

}  // namespace

TEST_CASE("64 threads resolve and call while backends register and the environment is read again") {
  static std::deque<LinkedBackend> backends;  // registered tables live for ever
  for (int i = 0; i < kBackends; ++i) backends.emplace_back(i);
  std::atomic<int> registered{0};
  Errors errors;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] { call_in_every_way(t, registered, errors); });
  std::thread registrar([&] {
    for (int i = 0; i < kBackends; ++i) {
      errors.expect(rlk_register_backend(&backends[static_cast<std::size_t>(i)].backend, "threads_test") ==
                    RLK_OK);
      registered.store(i + 1, std::memory_order_release);
      if (i % 6 == 0) errors.expect(rlk_reload_environment() == RLK_OK);
      std::this_thread::yield();
    }
  });
  registrar.join();
  for (std::thread& t : threads) t.join();
  CHECK_MESSAGE(errors.wrong == 0, errors.wrong.load());
  CHECK(registered == kBackends);
  // A clash after the storm is still an error that names both.
  CHECK(rlk_register_backend(&backends[0].backend, "threads_test again") == RLK_PLUGIN);
  CHECK_SAYS(std::string(rlk_last_error()), "is already registered by threads_test");
}

TEST_CASE("a call uses the CPUs that the process may use, not those of the machine") {
  cpu_set_t mine;
  REQUIRE(sched_getaffinity(0, sizeof mine, &mine) == 0);
  const double quota = std::ceil(rlk::cpu_quota());
  CHECK(rlk::workers::workers_for(0, 1000) == std::min({256.0, 1.0 * CPU_COUNT(&mine), quota}));
  CHECK(rlk::workers::workers_for(3, 1000) == 3);
  CHECK(rlk::workers::workers_for(0, 1) == 1);
  if (CPU_COUNT(&mine) == 1) return;
  int first = 0;
  while (!CPU_ISSET(first, &mine)) ++first;
  const auto child =
      rlk::test::run({"/usr/bin/taskset", "-c", std::to_string(first),
                      std::filesystem::read_symlink("/proc/self/exe").string(), "-tc=a call uses the CPUs*"});
  INFO(child.out);
  CHECK(child.exit == 0);
}

TEST_CASE("a CPU quota is the least of the cgroup's and those above it, in both versions of cgroups") {
  namespace fs = std::filesystem;
  const fs::path root = fs::temp_directory_path() / fmt::format("rlk_quota_{}", getpid());
  const auto write = [&](const char* path, const char* text) {
    fs::create_directories((root / path).parent_path());
    std::ofstream(root / path) << text;
  };
  const auto quota = [&] { return rlk::cpu_quota(root.string()); };
  constexpr double kNone = std::numeric_limits<double>::infinity();
  CHECK(quota() == kNone);  // no /proc at all

  write("proc/self/cgroup", "0::/slice/pod/box\n");
  CHECK(quota() == kNone);
  write("sys/fs/cgroup/slice/pod/box/cpu.max", "max 100000\n");
  CHECK(quota() == kNone);
  write("sys/fs/cgroup/slice/cpu.max", "250000 100000\n");
  CHECK(quota() == 2.5);
  write("sys/fs/cgroup/slice/pod/box/cpu.max", "400000 100000\n");
  CHECK(quota() == 2.5);
  write("sys/fs/cgroup/slice/pod/cpu.max", "100000 200000\n");
  CHECK(quota() == 0.5);

  // A container sees its own group at the top of the mount, under a path of the host's.
  write("proc/self/cgroup",
        "12:pids:/docker/a\n4:cpu,cpuacct:/docker/a\n2:cpuset:/docker/a\n1:name=systemd:/\n0::/\n");
  CHECK(quota() == kNone);
  write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  CHECK(quota() == kNone);
  write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "150000\n");
  CHECK(quota() == 1.5);

  for (const char* odd : {"", "\n", "0::", "0:", "::::\n", "1:cpu:no slash\n", "0::/../..\n"}) {
    write("proc/self/cgroup", odd);
    INFO(odd);
    CHECK(quota() == kNone);
  }
  fs::remove_all(root);
}
