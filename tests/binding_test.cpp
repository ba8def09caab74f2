// labels: unit
// links: registry
// Calls by position, as language bindings make them.
#include "rlk/binding.h"

#include <doctest/doctest.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "rlk/rlk.hpp"

namespace {

using rlk::DType;
using rlk::Tensor;

uint32_t count_of(const rlk_op_schema& s) { return s.num_arguments + s.num_attributes; }

// A call of an op by name, filled through the names in its schema.
struct Call {
  explicit Call(const char* name)
      : op(rlk_op_index(name)), schema(*rlk_op_schema_at(op)), slots(count_of(schema)) {
    REQUIRE(rlk_default_slots(name, slots.data(), count()) == RLK_OK);
  }
  uint32_t count() const { return static_cast<uint32_t>(slots.size()); }
  uint32_t at(const char* name) const {
    for (uint32_t i = 0; i < schema.num_arguments; ++i)
      if (!std::strcmp(schema.arguments[i].name, name)) return i;
    for (uint32_t i = 0; i < schema.num_attributes; ++i)
      if (!std::strcmp(schema.attributes[i].name, name)) return schema.num_arguments + i;
    FAIL(name);
    return 0;
  }
  Call& with(const char* name, const Tensor& t) { return slots[at(name)].tensor = &t.dl(), *this; }
  rlk_code run(const rlk_options* o = nullptr) const { return rlk_run_slots(op, slots.data(), count(), o); }

  int32_t op;
  const rlk_op_schema& schema;
  std::vector<rlk_slot> slots;
};

struct Product {
  float hidden[2] = {1, 2}, weight[6] = {1, 2, 3, 4, 5, 6}, out[3] = {};
  Tensor h{hidden, {1, 2}, DType::f32}, w{weight, {3, 2}, DType::f32}, y{out, {1, 3}, DType::f32};
  Call call() const { return Call("lm_head").with("hidden", h).with("weight", w).with("out", y); }
};

rlk_options defaults() {
  rlk_options o{};
  o.struct_size = sizeof o;
  return o;
}

// An op whose two implementations want workspace: one needs it, the other makes use of it.
constexpr uint64_t kBytes = 1000;
uint64_t seen_bytes = 0;
void* seen = nullptr;

int32_t look(const rlk_slot*, const rlk_call* call) {
  seen = call->workspace;
  seen_bytes = call->workspace_bytes;
  return RLK_OK;
}
void register_workspace_op() {
  static const rlk_argument arguments[] = {{"x", "", RLK_READWRITE, RLK_F32, 1, 1, -1, 0}};
  static rlk_op_schema schema{};
  schema.struct_size = sizeof schema;
  schema.version = 1;
  schema.name = "wants_workspace";
  schema.aliases = schema.may_alias = "";
  schema.doc = "looks at its workspace";
  schema.arguments = arguments;
  schema.num_arguments = 1;
  schema.infer = [](const rlk_slot* slots, rlk_shape* shapes, const rlk_host*) -> int32_t {
    shapes[0] = {1, RLK_F32, RLK_F32, {slots[0].tensor->shape[0]}};
    return RLK_OK;
  };
  static rlk_implementation needs{}, uses{};
  needs.struct_size = sizeof needs;
  needs.op = "wants_workspace";
  needs.id = "workspaces.needs";
  needs.doc = "";
  needs.arithmetic = "none";
  needs.dtypes = RLK_F32;
  needs.device_type = kDLCPU;
  needs.workspace = [](const rlk_slot*, const rlk_request*) { return kBytes; };
  needs.run = look;
  uses = needs;
  uses.id = "workspaces.uses";
  uses.traits = RLK_WORKSPACE_OPTIONAL | RLK_CAPTURE_SAFE;
  static const rlk_implementation* const implementations[] = {&needs, &uses};
  static const rlk_op_schema* const ops[] = {&schema};
  static rlk_backend backend{};
  backend.struct_size = sizeof backend;
  backend.abi_major = RLK_ABI_MAJOR;
  backend.name = "workspaces";
  backend.version = "1";
  backend.doc = "";
  backend.implementations = implementations;
  backend.num_implementations = 2;
  backend.ops = ops;
  backend.num_ops = 1;
  static const bool registered = rlk_register_backend(&backend, "binding_test") == RLK_OK;
  REQUIRE_MESSAGE(registered, std::string(rlk_last_error()));
}

// An allocator that counts.
struct Memory {
  std::unique_ptr<void, decltype(&std::free)> block{nullptr, std::free};
  uint64_t asked = 0, calls = 0;
  static void* give(void* context, uint64_t n) {
    Memory& m = *static_cast<Memory*>(context);
    ++m.calls, m.asked = n;
    m.block.reset(std::aligned_alloc(256, (n + 255) / 256 * 256));
    return m.block.get();
  }
  static void* refuse(void*, uint64_t) { return nullptr; }
};

}  // namespace

TEST_CASE("every op and alias has an index, and every index its schema") {
  for (size_t i = 0; i < rlk_op_count(); ++i) {
    const auto index = static_cast<int32_t>(i);
    const rlk_op_schema* schema = rlk_op_schema_at(index);
    REQUIRE(schema);
    CHECK(rlk_op_index(schema->name) == index);
    CHECK(std::string(rlk_op_name(i)) == schema->name);
  }
  CHECK(rlk_op_index("rope_i") == rlk_op_index("rope"));
  CHECK(rlk_op_index("lm_haed") == -1);
  CHECK(std::string(rlk_last_error()).find("did you mean 'lm_head'") != std::string::npos);
  CHECK(rlk_op_schema_at(-1) == nullptr);
  CHECK(rlk_op_schema_at(10000) == nullptr);
  CHECK(std::string(rlk_last_error()).rfind("no op has index 10000, there are ", 0) == 0);
}

TEST_CASE("a call by position gives what the call by name gives") {
  Product p;
  CHECK(p.call().run() == RLK_OK);
  CHECK(p.out[0] == 5);
  CHECK(p.out[2] == 17);
}

TEST_CASE("slots that are not the op's are refused with both numbers") {
  const Product p;
  Call call = p.call();
  CHECK(rlk_run_slots(call.op, call.slots.data(), 3, nullptr) == RLK_INVALID_ARGUMENT);
  CHECK(std::string(rlk_last_error()) == "lm_head: 3 slots are given, it has 4");
  CHECK(rlk_run_slots(-1, call.slots.data(), 4, nullptr) == RLK_UNKNOWN_NAME);
  CHECK(rlk_run_slots(call.op, nullptr, 4, nullptr) == RLK_INVALID_ARGUMENT);
  CHECK(std::string(rlk_last_error()) == "slots is null");
  CHECK(rlk_default_slots("lm_head", call.slots.data(), 5) == RLK_INVALID_ARGUMENT);
  CHECK(std::string(rlk_last_error()) == "lm_head: room for 5 slots is given, it has 4");
  rlk_shape shapes[4];
  CHECK(rlk_infer_slots(call.op, call.slots.data(), 5, shapes) == RLK_INVALID_ARGUMENT);
  CHECK(rlk_infer_slots(call.op, call.slots.data(), 4, nullptr) == RLK_INVALID_ARGUMENT);
  CHECK(rlk_resolve_slots(call.op, call.slots.data(), 4, nullptr, nullptr) == RLK_INVALID_ARGUMENT);
  CHECK(rlk_explain_slots(call.op, call.slots.data(), 2, nullptr) == nullptr);
  CHECK(rlk_resolve_slots_json(99999, call.slots.data(), 2, nullptr) == nullptr);
}

TEST_CASE("an alias brings its attributes") {
  const Call plain("rope"), adjacent("rope_i");
  CHECK(plain.slots[plain.at("pairing")].i == 0);
  CHECK(adjacent.slots[adjacent.at("pairing")].i == 1);
  CHECK(Call("rope_tables").slots[Call("rope_tables").at("base")].f == 10000);
}

TEST_CASE("infer gives every result of a call that has none yet") {
  float data[64] = {};
  const Tensor x(data, {1, 2, 3, 4}, DType::bf16), k(data, {1, 1, 3, 4}, DType::bf16),
      table(data, {3, 2}, DType::f32);
  Call call("rope");
  call.with("x", x).with("cos", table).with("sin", table).with("k", k);
  std::vector<rlk_shape> shapes(call.schema.num_arguments);
  REQUIRE_MESSAGE(rlk_infer_slots(call.op, call.slots.data(), call.count(), shapes.data()) == RLK_OK,
                  rlk_last_error());
  CHECK(shapes[call.at("x")].dtypes == 0);
  CHECK(shapes[call.at("out")].dim[1] == 2);
  CHECK(shapes[call.at("k_out")].dim[1] == 1);
  CHECK(shapes[call.at("k_out")].preferred == RLK_BF16);
  call.slots[call.at("k")].tensor = nullptr;
  REQUIRE(rlk_infer_slots(call.op, call.slots.data(), call.count(), shapes.data()) == RLK_OK);
  CHECK(shapes[call.at("k_out")].dtypes == 0);

  const Product p;
  Call product("lm_head");
  product.with("hidden", p.h).with("weight", p.w);
  rlk_shape of[4];
  REQUIRE(rlk_infer_slots(product.op, product.slots.data(), 4, of) == RLK_OK);
  CHECK(of[3].dtypes == RLK_F32);
  CHECK(of[3].ndim == 2);
  CHECK(of[3].dim[1] == 3);
}

TEST_CASE("a resolution answers without results, and as the JSON does") {
  const Product p;
  Call call("lm_head");
  call.with("hidden", p.h).with("weight", p.w);
  rlk_choice choice{};
  choice.struct_size = sizeof choice;
  REQUIRE_MESSAGE(rlk_resolve_slots(call.op, call.slots.data(), 4, nullptr, &choice) == RLK_OK,
                  rlk_last_error());
  const rlk::Resolution r = rlk::resolve(rlk::LmHead{.hidden = p.h, .weight = p.w, .out = p.y});
  CHECK(choice.id == r.id());
  CHECK(choice.arithmetic == r.arithmetic());
  CHECK(choice.fingerprint == r.fingerprint());
  CHECK(choice.traits == r.implementation()->traits);
  char* text = rlk_explain_slots(call.op, call.slots.data(), 4, nullptr);
  REQUIRE(text);
  CHECK(text == r.explain());
  rlk_free(text);
  text = rlk_resolve_slots_json(call.op, call.slots.data(), 4, nullptr);
  REQUIRE(text);
  CHECK(text == r.json());
  rlk_free(text);
  choice.struct_size = 4;
  CHECK(rlk_resolve_slots(call.op, call.slots.data(), 4, nullptr, &choice) == RLK_INVALID_ARGUMENT);
}

TEST_CASE("a call that nobody takes is explained too") {
  const Product p;
  const Call call = p.call();
  rlk_options o = defaults();
  o.arithmetic = "nobody/has";
  rlk_choice choice{};
  choice.struct_size = sizeof choice;
  CHECK(rlk_resolve_slots(call.op, call.slots.data(), 4, &o, &choice) == RLK_NO_IMPLEMENTATION);
  char* text = rlk_explain_slots(call.op, call.slots.data(), 4, &o);
  REQUIRE(text);
  CHECK(std::string(text).find("nobody/has") != std::string::npos);
  rlk_free(text);
}

TEST_CASE("workspace comes from the caller's allocator, once, and only where it is wanted") {
  register_workspace_op();
  float data[4] = {};
  const Tensor x(data, {4}, DType::f32);
  const Call call = Call("wants_workspace").with("x", x);
  for (const char* id : {"workspaces.needs", "workspaces.uses"}) {
    Memory memory;
    rlk_options o = defaults();
    o.backend = id;
    o.allocate = Memory::give;
    o.allocate_context = &memory;
    REQUIRE_MESSAGE(call.run(&o) == RLK_OK, rlk_last_error());
    CHECK(memory.calls == 1);
    CHECK(memory.asked == kBytes);
    CHECK(seen == memory.block.get());
    CHECK(seen_bytes == kBytes);
    unsigned char own[kBytes];
    o.workspace = own;
    o.workspace_bytes = sizeof own;
    REQUIRE(call.run(&o) == RLK_OK);
    CHECK(memory.calls == 1);
    CHECK(seen == own);
  }
  Memory memory;
  rlk_options o = defaults();
  o.allocate = Memory::give;
  o.allocate_context = &memory;
  Product p;
  rlk_choice choice{};
  choice.struct_size = sizeof choice;
  const Call product = p.call();
  REQUIRE(rlk_resolve_slots(product.op, product.slots.data(), 4, &o, &choice) == RLK_OK);
  REQUIRE(product.run(&o) == RLK_OK);
  CHECK(memory.calls == (choice.workspace_bytes ? 1 : 0));
  CHECK(memory.asked == choice.workspace_bytes);
  CHECK(p.out[2] == 17);
}

TEST_CASE("an allocator without memory fails the call only where workspace is needed") {
  register_workspace_op();
  float data[4] = {};
  const Tensor x(data, {4}, DType::f32);
  const Call call = Call("wants_workspace").with("x", x);
  Memory memory;
  rlk_options o = defaults();
  o.allocate = Memory::refuse;
  o.allocate_context = &memory;
  o.backend = "workspaces.needs";
  CHECK(call.run(&o) == RLK_OUT_OF_MEMORY);
  CHECK(std::string(rlk_last_error()) ==
        "wants_workspace: the caller's allocator gave none of the 1000 bytes of workspace that are needed");
  o.backend = "workspaces.uses";
  CHECK(call.run(&o) == RLK_OK);
  CHECK(seen_bytes == 0);
}

TEST_CASE("a thread that has no arena yet runs what makes use of workspace without any") {
  register_workspace_op();
  float data[4] = {};
  const Tensor x(data, {4}, DType::f32);
  const Call call = Call("wants_workspace").with("x", x);
  rlk_options o = defaults();
  o.backend = "workspaces.uses";
  rlk_code code = RLK_INTERNAL;
  std::string said;
  std::thread([&] {
    code = call.run(&o);
    said = rlk_last_error();
  }).join();
  CHECK_MESSAGE(code == RLK_OK, said);
}

TEST_CASE("a bound op asks for its workspace when it is bound") {
  register_workspace_op();
  float data[4] = {};
  const Tensor x(data, {4}, DType::f32);
  const Call call = Call("wants_workspace").with("x", x);
  Memory memory;
  rlk::Options o;
  o.backend = "workspaces.needs";
  o.allocate = Memory::give;
  o.allocate_context = &memory;
  auto bound = rlk::check(rlk::bind_slots("wants_workspace", call.slots.data(), o));
  REQUIRE(bound.run());
  REQUIRE(bound.run());
  CHECK(memory.calls == 1);
  CHECK(seen == memory.block.get());
}
