// labels: conformance
// Every op runs out of memory, at every allocation of a call: its example by name, by slots and bound, cold and remembered,
// on each implementation that takes it, and what is asked about it. The call says RLK_OUT_OF_MEMORY, and the next one is right.
#include <doctest/doctest.h>

#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "failing_memory.hpp"
#include "rlk/binding.h"
#include "rlk/resolve.hpp"
#include "src/harness/problem.hpp"

#if !defined(RLK_OWN_MALLOC)
TEST_CASE("every op runs out of memory") { MESSAGE("[skip] the sanitizer has its own malloc"); }
#else

namespace {

using rlk::harness::Problem;
using rlk::registry::Case;
using rlk::registry::Op;

// The first case of an op that its schema takes and an implementation serves, in memory of its own.
class Example {
 public:
  explicit Example(const Op& op) : index_(rlk_op_index(op.schema->name)) {
    options.struct_size = sizeof options;
    options.threads = 1;
    op.cases({[&](const Case& c) {
                if (problem_.op || c.large || !c.order_probe.empty() || has_nothing(c)) return;
                auto p = rlk::harness::materialise(op, c, 1);
                if (p && fill(std::move(*p))) given_ = c;
              },
              1});
    REQUIRE_MESSAGE(problem_.op, op.schema->name, ": no case of it runs");
    expected_ = results_;
  }
  ~Example() { rlk_args_free(args_); }
  Example(const Example&) = delete;
  Example& operator=(const Example&) = delete;

  rlk_options options{};

  const rlk_slot* slots() const { return slots_.data(); }
  auto count() const { return static_cast<uint32_t>(slots_.size()); }
  int32_t index() const { return index_; }
  const rlk_args* args() const { return args_; }
  const rlk_op_schema& schema() const { return problem_.schema(); }

  rlk_code build() {
    rlk_args_free(std::exchange(args_, nullptr));
    args_ = rlk_args_new(schema().name);
    if (!args_) return code_of(nullptr);
    for (uint32_t i = 0; i < schema().num_arguments; ++i)
      if (const DLTensor* t = slots_[i].tensor)
        if (const rlk_code code = rlk_args_tensor(args_, schema().arguments[i].name, t)) return code;
    for (const auto& [name, value] : given_.attributes)
      if (const rlk_code code = set(name.c_str(), value)) return code;
    return RLK_OK;
  }
  // As before any call.
  void put() {
    for (uint32_t i = 0; i < schema().num_arguments; ++i) {
      std::vector<std::byte>& memory = results_[i];
      if (schema().arguments[i].role == RLK_WRITE)
        std::fill(memory.begin(), memory.end(), std::byte{0xee});
      else if (problem_.inputs[i])
        std::memcpy(memory.data(), problem_.inputs[i]->bytes.data(), memory.size());
    }
  }
  // Whether the default implementation still gives what it gave.
  bool right() {
    rlk_options plain{};
    plain.struct_size = sizeof plain, plain.threads = 1;
    put();
    return rlk_run_slots(index_, slots(), count(), &plain) == RLK_OK && results_ == expected_;
  }

 private:
  static bool has_nothing(const Case& c) {
    for (const auto& t : c.inputs)
      for (const int64_t n : t.shape)
        if (n == 0) return true;
    return false;
  }
  rlk_code set(const char* name, const std::variant<int64_t, double, std::string>& value) {
    if (const auto* n = std::get_if<int64_t>(&value)) return rlk_args_int(args_, name, *n);
    if (const auto* x = std::get_if<double>(&value)) return rlk_args_float(args_, name, *x);
    return rlk_args_string(args_, name, std::get<std::string>(value).c_str());
  }
  void add(uint32_t i, const std::vector<int64_t>& shape, rlk::DType dtype) {
    int64_t n = 1;
    for (const int64_t size : shape) n *= size;
    shapes_[i] = shape;
    results_[i].resize(static_cast<std::size_t>(n) * static_cast<std::size_t>(rlk::size_of(dtype)));
    tensors_[i] = {results_[i].data(),
                   {kDLCPU, 0},
                   static_cast<int32_t>(shape.size()),
                   rlk::dl_type(dtype),
                   shapes_[i].data(),
                   nullptr,
                   0};
    slots_[i].tensor = &tensors_[i];
  }
  bool fill(Problem p) {
    const auto shapes = rlk::harness::result_shapes(p);
    if (!shapes) return false;
    problem_ = std::move(p);
    const uint32_t n = schema().num_arguments;
    shapes_.assign(n, {}), tensors_.assign(n, {}), results_.assign(n, {});
    slots_.assign(n, {});
    for (uint32_t i = 0; i < n; ++i)
      if (problem_.inputs[i])
        add(i, problem_.inputs[i]->shape, problem_.inputs[i]->dtype);
      else if (problem_.results[i] != rlk::DType::none)
        add(i, (*shapes)[i].shape, problem_.results[i]);
    slots_.insert(slots_.end(), problem_.attributes.begin(), problem_.attributes.end());
    put();
    if (rlk_run_slots(index_, slots(), count(), &options) == RLK_OK) return true;
    problem_ = {};
    return false;
  }

  int32_t index_;
  Case given_;
  Problem problem_;
  std::vector<std::vector<int64_t> > shapes_;                // by argument, like the next two
  std::vector<std::vector<std::byte> > results_, expected_;  // of every tensor, read ones too
  std::vector<DLTensor> tensors_;
  std::vector<rlk_slot> slots_;
  rlk_args* args_ = nullptr;
};

void forget() { REQUIRE(rlk_reload_environment() == RLK_OK); }

rlk_code said(const rlk::Status& s) { return s.code(); }

void calls(Example& e, const std::string& op) {
  const auto right = [&] { return e.right(); };
  const auto cold = [&] { forget(), e.put(); };
  const auto warm = [&] { e.put(); };
  const auto built = [&] { return e.build() == RLK_OK && e.right(); };
  survive(op + ", a list of arguments", RLK_OK, [&] { return e.build(); }, built);
  const auto by_name = [&] { return rlk_run(e.args(), &e.options); };
  survive(op + " by name, cold", RLK_OK, by_name, right, cold);
  survive(op + " by name, remembered", RLK_OK, by_name, right, warm);
  const auto by_slots = [&] { return rlk_run_slots(e.index(), e.slots(), e.count(), &e.options); };
  survive(op + " by slots, cold", RLK_OK, by_slots, right, cold);
  survive(op + " by slots, remembered", RLK_OK, by_slots, right, warm);
  const auto bound = [&]() -> rlk_code {
    auto call = rlk::bind_slots(op, e.slots(), {.threads = 1});
    return said(call ? call->run() : call.status());
  };
  survive(op + " bound", RLK_OK, bound, right, warm);
  auto kept = rlk::bind_slots(op, e.slots(), {.threads = 1});
  REQUIRE(kept);
  survive(op + " bound before, after a reload", RLK_OK, [&] { return said(kept->run()); }, right, cold);
  survive(op + " bound before", RLK_OK, [&] { return said(kept->run()); }, right, warm);
}

void questions(Example& e, const std::string& op) {
  const auto right = [&] { return e.right(); };
  uint64_t bytes = 0;
  survive(op + ", workspace", RLK_OK, [&] { return rlk_workspace(e.args(), &e.options, &bytes); }, right);
  survive(
      op + ", workspace, cold", RLK_OK, [&] { return rlk_workspace(e.args(), &e.options, &bytes); }, right,
      forget);
  std::vector<rlk_shape> shapes(e.schema().num_arguments);
  survive(
      op + ", infer", RLK_OK, [&] { return rlk_infer_slots(e.index(), e.slots(), e.count(), shapes.data()); },
      right);
  rlk_choice choice{};
  choice.struct_size = sizeof choice;
  survive(
      op + ", resolve", RLK_OK,
      [&] { return rlk_resolve_slots(e.index(), e.slots(), e.count(), &e.options, &choice); }, right);
  const auto text = [](char* made) {
    const rlk_code code = code_of(made);
    rlk_free(made);
    return code;
  };
  survive(
      op + ", resolved as JSON", RLK_OK,
      [&] { return text(rlk_resolve_slots_json(e.index(), e.slots(), e.count(), &e.options)); }, right, [] {},
      Failing::fewer);
  survive(
      op + ", explained", RLK_OK,
      [&] { return text(rlk_explain_slots(e.index(), e.slots(), e.count(), &e.options)); }, right, [] {},
      Failing::fewer);
  survive(
      op + ", resolved by name", RLK_OK, [&] { return text(rlk_resolve_json(e.args(), &e.options)); }, right,
      [] {}, Failing::fewer);
}

// Each implementation that takes the call; its results are its own affair.
void implementations(Example& e, const std::string& op) {
  const auto right = [&] { return e.right(); };
  const rlk::Resolution all = rlk::resolve_slots(op, e.slots(), {.threads = 1});
  std::vector<std::string> ids;
  for (const rlk::Candidate& c : all.candidates())
    if (c.implementation && c.verdict.code == RLK_OK) ids.emplace_back(c.id);
  REQUIRE(!ids.empty());
  for (const std::string& id : ids) {
    e.options.backend = id.c_str();
    const auto run = [&] { return rlk_run_slots(e.index(), e.slots(), e.count(), &e.options); };
    survive(op + " on " + id + ", cold", RLK_OK, run, right, [&] { forget(), e.put(); }, Failing::fewer);
    survive(op + " on " + id, RLK_OK, run, right, [&] { e.put(); }, Failing::fewer);
    for (const int32_t threads : {2, 3}) {
      e.options.threads = threads;
      survive(op + " on " + id + ", threads", RLK_OK, run, right, [&] { e.put(); }, Failing::fewer);
    }
    e.options.threads = 1;
  }
  e.options.backend = nullptr;
}

}  // namespace

TEST_CASE("every op runs out of memory, and says so") {
  for (const Op& op : rlk::registry::ops()) {
    Example e(op);
    const std::string name = op.schema->name;
    INFO(name);
    CHECK(e.right());
    calls(e, name);
    questions(e, name);
    implementations(e, name);
  }
}

#endif
