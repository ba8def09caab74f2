// labels: unit
// links: registry
// Calls under unusual conditions: packed buffers, workspaces, calls inside calls, scopes, many saved ranges, after
// main, and several copies of the library in one process.
#include <dlfcn.h>
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "child_process.hpp"
#include "rlk/backend.hpp"
#include "rlk/rlk.hpp"
#include "rlk/saved.hpp"

using rlk::DType;
using rlk::Tensor;

namespace {

struct Product {
  std::vector<float> memory = std::vector<float>(64, 1.f);
  Tensor h{memory.data(), {2, 4}, DType::f32}, w{memory.data() + 16, {3, 4}, DType::f32},
      y{memory.data() + 32, {2, 3}, DType::f32};
  rlk::LmHead args() const { return {.hidden = h, .weight = w, .out = y}; }
};

// A rude implementation of an op of our own, in plain C: it calls the library inside its run.
struct Nest {
  rlk::In x;
  rlk::Out out;
};
int nest_failures = 0;

rlk_code nest_call(int64_t rows, float* memory, void* stream) {
  const Tensor x(memory, {rows}, DType::f32), out(memory + 64, {rows}, DType::f32);
  const Nest args{x, out};
  return rlk::run_slots("nest", reinterpret_cast<const rlk_slot*>(&args), {.stream = stream}).code();
}

int32_t nest_run(const rlk_slot* slots, const rlk_call* call) {
  const int64_t rows = slots[0].tensor->shape[0];
  auto* const mine = static_cast<unsigned char*>(call->workspace);
  void* const stream = call->stream;
  std::memset(mine, static_cast<int>(rows), call->workspace_bytes);
  if (rows == 1) {
    std::vector<float> memory(128);
    for (int64_t n = 2; n < 14; ++n) {
      void* const other = reinterpret_cast<void*>(static_cast<uintptr_t>(0x1000 + n));
      if (nest_call(n, memory.data(), other) != RLK_OK) ++nest_failures;
    }
  }
  if (call->stream != stream || call->device->type != kDLCPU) ++nest_failures;
  for (uint64_t i = 0; i < call->workspace_bytes; ++i)
    if (mine[i] != static_cast<unsigned char>(rows)) {
      ++nest_failures;
      break;
    }
  return RLK_OK;
}

rlk_code register_nest() {
  static const rlk_argument arguments[] = {{"x", "", RLK_READ, RLK_F32, 1, 1, -1, 0},
                                           {"out", "", RLK_WRITE, RLK_F32, 1, 1, -1, 0}};
  static rlk_op_schema schema{};
  schema.struct_size = sizeof schema;
  schema.version = 1;
  schema.name = "nest";
  schema.aliases = "";
  schema.doc = "calls itself";
  schema.arguments = arguments;
  schema.num_arguments = 2;
  schema.infer = [](const rlk_slot* slots, rlk_shape* shapes, const rlk_host*) -> int32_t {
    shapes[1] = {1, RLK_F32, RLK_F32, {slots[0].tensor->shape[0]}};
    return RLK_OK;
  };
  schema.may_alias = "";
  static rlk_implementation implementation{};
  implementation.struct_size = sizeof implementation;
  implementation.op = "nest";
  implementation.id = "nester.c";
  implementation.doc = "";
  implementation.arithmetic = "none";
  implementation.dtypes = RLK_F32;
  implementation.device_type = kDLCPU;
  // Inner calls ask for more, which would move one block that all shared.
  implementation.workspace = [](const rlk_slot* slots, const rlk_request*) -> uint64_t {
    return 4096 * static_cast<uint64_t>(slots[0].tensor->shape[0]);
  };
  implementation.run = nest_run;
  static const rlk_implementation* const implementations[] = {&implementation};
  static const rlk_op_schema* const ops[] = {&schema};
  static rlk_backend backend{};
  backend.struct_size = sizeof backend;
  backend.abi_major = RLK_ABI_MAJOR;
  backend.name = "nester";
  backend.version = "1";
  backend.doc = "";
  backend.implementations = implementations;
  backend.num_implementations = 1;
  backend.ops = ops;
  backend.num_ops = 1;
  return rlk_register_backend(&backend, "machinery_test");
}

// Calls the library when it is destroyed: on the first thread after main.
struct Late {
  bool armed = false;
  uint64_t saved = 0;
  ~Late() {
    if (!armed) return;
    Product p;
    const bool good = rlk::lm_head(p.args()) && p.memory[32] == 4;
    rlk_release(saved);
    if (!good) _exit(3);
    std::puts("late call was right");
  }
};
Late late;

struct LateThread {
  bool armed = false;
  bool* right = nullptr;
  ~LateThread() {
    if (!armed) return;
    Product p;
    *right = rlk::lm_head(p.args()) && p.memory[32] == 4;
  }
};
thread_local LateThread late_thread;

// Opens copies of the library, each its own.
std::vector<void*> open_copies(int count) {
  namespace fs = std::filesystem;
  const fs::path folder = fs::temp_directory_path() / fmt::format("rlk_copies_{}", getpid());
  fs::create_directories(folder);
  std::vector<void*> opened;
  for (int i = 0; i < count; ++i) {
    const fs::path copy = folder / fmt::format("librlk_copy{}.so", i);
    fs::copy_file(fs::path(RLK_TEST_BUILD) / "lib/librlk_registry.so", copy);
    opened.push_back(dlopen(copy.c_str(), RTLD_NOW | RTLD_LOCAL));
    const char* const why = opened.back() ? "" : dlerror();
    CHECK_MESSAGE(opened.back() != nullptr, why);
  }
  fs::remove_all(folder);
  return opened;
}

// Of a copy that is opened after the exit handler was registered: its statics are gone when the handler runs.
struct LateCopy {
  decltype(&rlk_save) save = nullptr;
  decltype(&rlk_release) release = nullptr;
  uint64_t saved = 0;
};
LateCopy late_copy;

}  // namespace

TEST_CASE("views of one packed buffer are not overlaps, and shared bytes still are") {
  constexpr int64_t T = 4, D = 8, H = 3, row = (H + 2) * D;
  std::vector<float> qkv(T * row + 8, 1.f), table(T * D, 0.5f);
  const Tensor cos(table.data(), {T, D / 2}, DType::f32), sin(table.data(), {T, D / 2}, DType::f32);
  const auto part = [&](int64_t first, int64_t heads) {
    return Tensor(qkv.data() + first, {1, T, heads, D}, DType::f32, {kDLCPU, 0}, {T * row, row, D, 1});
  };
  const auto rotate = [&](const Tensor& q, const Tensor& k) {
    rlk_args* args = rlk_args_new("rope_");
    rlk_args_string(args, "layout", "bshd");
    rlk_args_tensor(args, "x", &q.dl());
    rlk_args_tensor(args, "k", &k.dl());
    rlk_args_tensor(args, "cos", &cos.dl());
    rlk_args_tensor(args, "sin", &sin.dl());
    const rlk_code code = rlk_run(args, nullptr);
    rlk_args_free(args);
    return code;
  };
  const Tensor q = part(0, H), k = part(H * D, 1), v = part(H * D + D, 1);
  for (int i = 0; i < 2; ++i) {  // cold and cached
    INFO(rlk_last_error());
    CHECK(rotate(q, k) == RLK_OK);
  }
  {
    const rlk::Saved saved(v, "v");
    CHECK(rotate(q, k) == RLK_OK);
    CHECK(rotate(q, v) == RLK_OVERLAP);
  }
  CHECK(rotate(q, part((H - 1) * D, 1)) == RLK_OVERLAP);  // the last head of q
  CHECK(rotate(q, part(H * D - 1, 1)) == RLK_OVERLAP);    // one element of it
}

TEST_CASE("the caller's workspace must not lie over the arguments") {
  REQUIRE(register_nest() == RLK_OK);
  std::vector<float> memory(4096);
  const Tensor x(memory.data(), {2}, DType::f32), out(memory.data() + 2048, {2}, DType::f32);
  const Nest args{x, out};
  const auto run = [&](float* workspace) {
    return rlk::run_slots("nest", reinterpret_cast<const rlk_slot*>(&args),
                          {.workspace = workspace, .workspace_bytes = 8192});
  };
  for (int i = 0; i < 2; ++i) {
    CHECK(run(memory.data() + 2).code() == RLK_OVERLAP);
    CHECK(run(memory.data() + 1000).message() == "nest: workspace overlaps out");
    CHECK(run(memory.data()).message() == "nest: workspace overlaps x");
  }
  std::vector<float> apart(2048);
  CHECK(rlk::run_slots("nest", reinterpret_cast<const rlk_slot*>(&args),
                       {.workspace = apart.data(), .workspace_bytes = 8192}));
}

TEST_CASE("an implementation that calls the library keeps its workspace and its call") {
  register_nest();
  std::vector<float> memory(128);
  for (int i = 0; i < 3; ++i) CHECK(nest_call(1, memory.data(), reinterpret_cast<void*>(0x5)) == RLK_OK);
  CHECK(nest_failures == 0);
}

TEST_CASE(
    "a call and a question for workspace ask nobody behind the one that serves; an explanation asks all") {
  static int asked = 0;
  static rlk_implementation last{};
  last.struct_size = sizeof last;
  last.op = "lm_head";
  last.id = "behind.all";
  last.doc = "";
  last.arithmetic = "none";
  last.priority = -1000;
  last.dtypes = RLK_F32;
  last.device_type = kDLCPU;
  last.supports = [](const rlk_slot*, const rlk_request*) { return ++asked, rlk_verdict{}; };
  last.run = [](const rlk_slot*, const rlk_call*) -> int32_t { return RLK_INTERNAL; };
  static const rlk_implementation* const implementations[] = {&last};
  static rlk_backend backend{};
  backend.struct_size = sizeof backend;
  backend.abi_major = RLK_ABI_MAJOR;
  backend.name = "behind";
  backend.version = "1";
  backend.doc = "";
  backend.implementations = implementations;
  backend.num_implementations = 1;
  REQUIRE(rlk_register_backend(&backend, "machinery_test") == RLK_OK);
  Product p;
  CHECK(rlk::lm_head(p.args()));
  CHECK(rlk::bind(p.args()));
  CHECK(rlk::workspace(p.args()));
  CHECK(asked == 0);
  CHECK(rlk::resolve(p.args()));
  CHECK(asked == 1);
}

TEST_CASE("a cached call is held to what a first call is held to") {
  Product p;
  REQUIRE(rlk::lm_head(p.args()));
  DLTensor broken = p.w.dl();
  broken.shape = nullptr;
  CHECK(rlk::lm_head({.hidden = p.h, .weight = broken, .out = p.y}).code() == RLK_INVALID_ARGUMENT);
  CHECK(rlk::lm_head(p.args(), {.threads = -1}).message() == "options: threads is -1, it must be 0 or more");
  CHECK(rlk::bind(p.args(), {.threads = -2}).status().message() ==
        "options: threads is -2, it must be 0 or more");
}

TEST_CASE("a tensor view with too many dimensions or too few strides is refused, not built") {
  Product p;
  const std::vector<int64_t> deep(24, 1);
  const Tensor t(p.memory.data(), deep, DType::f32);
  CHECK(std::string(rlk::lm_head({.hidden = p.h, .weight = t, .out = p.y}).message()).find("has rank 24") !=
        std::string::npos);
  CHECK_THROWS_WITH(Tensor(p.memory.data(), {2, 3, 4}, DType::f32, {kDLCPU, 0}, {4, 1}),
                    "rlk::Tensor has 2 strides for 3 dimensions");
}

TEST_CASE("only tensors can be saved") {
  Product p;
  DLTensor t = p.w.dl();
  t.shape = nullptr;
  CHECK(rlk_save(&t, "x") == 0);
  CHECK(std::string(rlk_last_error()) == "save: tensor has rank 2 and no shape");
  t = p.w.dl();
  t.ndim = 100000000;
  CHECK(rlk_save(&t, "x") == 0);
  int64_t huge[] = {int64_t{1} << 40, int64_t{1} << 40};
  t = p.w.dl();
  t.shape = huge;
  CHECK(rlk_save(&t, nullptr) == 0);
  CHECK(rlk_save(nullptr, "x") == 0);
  const rlk::Saved nothing(rlk::In(), "an absent argument");
  CHECK(rlk::lm_head(p.args()));
}

TEST_CASE("a hundred thousand saved ranges make no call slow, and can be listed") {
  Product p;
  std::vector<char> memory(400000);
  std::vector<uint64_t> tickets;
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < 100000; ++i) {
    const Tensor t(memory.data() + 4 * i, {1}, DType::f32);
    tickets.push_back(rlk_save(&t.dl(), "one of many"));
  }
  for (int i = 0; i < 2000; ++i) REQUIRE(rlk::lm_head(p.args()));
  char* text = rlk_list_json("saved");
  REQUIRE(text != nullptr);
  CHECK_SAYS(std::string(text).substr(0, 2000), "\"name\": \"one of many\", \"device\": \"cpu:0\"");
  rlk_free(text);
  const Tensor last(memory.data() + 4 * 99999, {1}, DType::f32), one(p.memory.data(), {1, 1}, DType::f32);
  const Tensor out(memory.data() + 4 * 99999, {1, 1}, DType::f32);
  CHECK(rlk::lm_head({.hidden = one, .weight = one, .out = out}).code() == RLK_OVERLAP);
  for (const uint64_t t : tickets) rlk_release(t);
  CHECK(rlk::lm_head({.hidden = one, .weight = one, .out = out}));
  // With a list it took minutes.
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(20));
}

TEST_CASE("a range on a GPU does not protect the same number in CPU memory") {
  Product p;
  DLTensor gpu = p.y.dl();
  gpu.device = {kDLCUDA, 0};
  const uint64_t ticket = rlk_save(&gpu, "on the GPU");
  CHECK(ticket != 0);
  CHECK(rlk::lm_head(p.args()));
  rlk_release(ticket);
}

TEST_CASE("a bound call honours the scope that it is run in") {
  Product p;
  auto op = rlk::bind(p.args());
  REQUIRE(op);
  REQUIRE(op->resolution().id() != "native.golden");
  // 2^24 + 1 - 2^24 in fp32 and in fp64.
  const float big = 16777216.f;
  for (int i = 0; i < 8; ++i)
    p.memory[static_cast<std::size_t>(i)] = i % 4 == 0 ? big : i % 4 == 2 ? -big : 1.f;
  REQUIRE(op->run());
  const float standard = p.memory[32];
  {
    const rlk::PrecisionScope golden(rlk::Precision::golden);
    REQUIRE(op->run());
    CHECK(p.memory[32] == 2.f);
    REQUIRE(op->run(p.args()));
    CHECK(p.memory[32] == 2.f);
  }
  REQUIRE(op->run());
  CHECK(p.memory[32] == standard);
  CHECK(standard != 2.f);
  const rlk::BackendScope nobody("lm_head=cuda");
  CHECK(op->run().code() == RLK_NO_IMPLEMENTATION);
}

TEST_CASE("the C face has scopes, which nest") {
  CHECK(rlk_scope_leave() == RLK_INVALID_ARGUMENT);
  REQUIRE(rlk_scope_enter("golden", nullptr) == RLK_OK);
  REQUIRE(rlk_scope_enter("strict", "lm_head=native") == RLK_OK);
  CHECK(rlk::PrecisionScope::current() == rlk::Precision::golden);
  Product p;
  CHECK(rlk::resolve(p.args()).decided_by() == "scope 'lm_head=native'");
  CHECK(rlk_scope_leave() == RLK_OK);
  CHECK(rlk::resolve(p.args()).decided_by() == "default order");
  CHECK(rlk::resolve(p.args()).arithmetic() == "fma64");
  CHECK(rlk_scope_leave() == RLK_OK);
  CHECK(rlk::PrecisionScope::current() == rlk::Precision::standard);
  CHECK(rlk_scope_enter("sloppy", nullptr) == RLK_INVALID_ARGUMENT);
  CHECK(rlk_scope_leave() == RLK_INVALID_ARGUMENT);
}

TEST_CASE("arm a late call" * doctest::skip()) {
  Product p;
  late.armed = true;
  late.saved = rlk_save(&p.h.dl(), "never released before");
  REQUIRE(rlk::lm_head(p.args()));
}

TEST_CASE("calls from static destructors and from a thread's last destructors are right") {
  const auto child = rlk::test::run(
      {std::filesystem::read_symlink("/proc/self/exe").string(), "--no-skip", "-tc=arm a late call"});
  INFO(child.err);
  CHECK(child.exit == 0);
  CHECK_SAYS(child.out, "late call was right");
  bool right = false;
  std::thread([&] {
    late_thread.armed = true;  // made before the library's own state, so destroyed after it
    late_thread.right = &right;
    Product p;
    (void)rlk::lm_head(p.args());
  }).join();
  CHECK(right);
}

TEST_CASE("arm an exit handler" * doctest::skip()) {
  REQUIRE(std::atexit([] {
            late_copy.release(late_copy.saved);
            Product p;
            const uint64_t again = late_copy.save(&p.h.dl(), "saved after the end");
            late_copy.release(again);
            if (again != 0) std::puts("late release was right");
          }) == 0);
  void* const copy = open_copies(1)[0];
  REQUIRE(copy);
  late_copy.save = reinterpret_cast<decltype(&rlk_save)>(dlsym(copy, "rlk_save"));
  late_copy.release = reinterpret_cast<decltype(&rlk_release)>(dlsym(copy, "rlk_release"));
  const bool found = late_copy.save && late_copy.release;
  REQUIRE(found);
  Product p;
  late_copy.saved = late_copy.save(&p.h.dl(), "released at exit");
  CHECK(late_copy.saved != 0);
}

TEST_CASE("a range is released by an exit handler that was registered before the library was opened") {
  const auto child = rlk::test::run(
      {std::filesystem::read_symlink("/proc/self/exe").string(), "--no-skip", "-tc=arm an exit handler"});
  INFO(child.err);
  CHECK(child.exit == 0);
  CHECK_SAYS(child.out, "late release was right");
}

TEST_CASE("many copies of the library can be opened in one process") { open_copies(8); }
