#include "src/harness/rule.hpp"

#include <algorithm>

#include "rlk/resolve.hpp"

namespace rlk::harness {
namespace {

registry::Sample elements_of(const Grid& grid, std::size_t argument, const Array& a) {
  registry::Sample out{argument, {}};
  for (int64_t r : grid.rows)
    for (int64_t c : grid.columns) out.elements.push_back(r * (a.shape.empty() ? 1 : a.shape.back()) + c);
  return out;
}

// Dense tensors over a problem's arrays and over room for its results: what a written rule reads and writes.
std::optional<Outcome> write_rule(const Problem& p, std::string_view arithmetic, bool in_fp64) {
  const rlk_op_schema& s = p.schema();
  const auto shapes = result_shapes(p);
  if (!p.op->rule || !shapes) return {};
  Outcome out;
  out.results.resize(s.num_arguments);
  std::vector<Tensor> tensors(s.num_arguments);
  std::vector<rlk_slot> slots(s.num_arguments + s.num_attributes);
  std::vector<registry::Sample> sample;
  std::vector<Grid> grids(s.num_arguments);
  for (uint32_t i = 0; i < s.num_arguments; ++i) {
    Array& result = out.results[i];
    if (p.results[i] != DType::none) {
      result = {(*shapes)[i].shape, in_fp64 ? DType::f64 : p.results[i], {}};
      result.bytes.resize(static_cast<std::size_t>(result.numel() * size_of(result.dtype)));
      if (p.inputs[i]) result.bytes = p.inputs[i]->bytes;
      tensors[i] = Tensor(result.bytes.data(), std::span(result.shape), result.dtype);
      if (p.sampled) sample.push_back(elements_of(grids[i] = grid_of(p, i, result.shape), i, result));
    } else if (p.inputs[i]) {
      const Array& a = *p.inputs[i];
      tensors[i] = Tensor(const_cast<std::byte*>(a.bytes.data()), std::span(a.shape), a.dtype);
    } else {
      continue;
    }
    slots[i].tensor = &tensors[i].dl();
  }
  std::copy(p.attributes.begin(), p.attributes.end(), slots.begin() + s.num_arguments);
  if (!p.op->rule({slots.data(), arithmetic, sample})) return {};
  for (const registry::Sample& taken : sample)
    out.results[taken.argument] = on_grid(out.results[taken.argument], grids[taken.argument]);
  return out;
}

}  // namespace

std::optional<Outcome> sampled_truth(const Problem& p) { return write_rule(p, "fma64", true); }

std::optional<Ruled> by_rule(const Problem& p, std::string_view arithmetic) {
  if (auto written = write_rule(p, arithmetic, false))
    return Ruled{"the written rule", true, std::move(*written)};
  const std::string_view op = p.schema().name;
  for (const OpEntry& entry : snapshot().ops) {
    if (op != entry.schema->name) continue;
    // The last of them is the one without vectors.
    for (auto e = entry.implementations.rbegin(); e != entry.implementations.rend(); ++e) {
      if (e->backend->name != "native" || arithmetic != e->implementation->arithmetic) continue;
      const rlk_device cpu = Backend::current(e->backend->devices().front());
      Outcome out = execute(p, {entry.schema, e->implementation, e->backend, cpu, nullptr});
      if (out.code == RLK_OK) return Ruled{e->implementation->id, false, std::move(out), e->implementation};
    }
  }
  return {};
}

}  // namespace rlk::harness
