// One call made concrete: arrays with seeded, quantised values, and the row operations Axis-A needs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "registry/op.hpp"
#include "rlk/status.hpp"

namespace rlk::harness {

// A dense array on the host.
struct Array {
  std::vector<int64_t> shape;
  DType dtype = DType::none;
  std::vector<std::byte> bytes;
  int64_t numel() const;
};

struct Problem {
  const registry::Op* op = nullptr;
  std::string name;
  uint64_t seed = 0;
  int64_t reduction = 0;
  bool large = false, exact = false, cancels = false;  // as in registry::Case
  int64_t most_rows = 4096;                            // likewise
  // By argument of the schema.
  std::vector<std::optional<Array>> inputs;
  std::vector<std::vector<int64_t>> strides;  // of inputs; empty: dense
  std::vector<DType> results;                 // wanted dtype of each result; none: absent
  std::vector<int32_t> batch_axis;            // as in rlk_argument, overrides applied
  std::vector<rlk_slot> attributes;
  std::vector<std::pair<std::size_t, std::size_t>>
      shared;                                          // read arguments: the second is the first's memory
  bool brief = false, sampled = false, ruled = false;  // likewise; a sample is what grid_of says

  const rlk_op_schema& schema() const { return *op->schema; }
  bool written(std::size_t argument) const { return schema().arguments[argument].role != RLK_READ; }
  DType input_dtype() const;  // of the first argument that is there, as dispatch sees it
  std::string shape_text() const;
  int shared_with(std::size_t argument) const;  // an earlier argument whose memory this one is; -1: none
};

// Values are a pure function of (op, case, argument, seed), the same on every machine.
Result<Problem> materialise(const registry::Op& op, const registry::Case& c, uint64_t seed);

// The same problem on the magnitudes of its floating inputs: how large the terms of its sums are.
Problem magnitudes(const Problem& p);

// The same problem with the numbers of one floating input a few last places off, up or down as drawn, and the other way:
// for each such input.
std::vector<Problem> neighbours(const Problem& p);

// Shapes of the results by argument, from the schema's infer.
struct ResultShape {
  std::vector<int64_t> shape;
  uint32_t dtypes = 0;
};
Result<std::vector<ResultShape>> result_shapes(const Problem& p);

// Whether the schema takes the problem, with results of at most so many elements. Of floating inputs the shapes are looked at.
bool admitted(const Problem& p, int64_t most);

// Rows and columns of a result of this shape that a sampled problem looks at: both ends and drawn ones.
// Ascending, and the same for every run of the problem.
struct Grid {
  std::vector<int64_t> rows, columns;  // columns: of the last axis
};
Grid grid_of(const Problem& p, std::size_t argument, const std::vector<int64_t>& shape);
Array on_grid(const Array& a, const Grid& grid);

// The same problem with every floating result in fp32; nothing when that is the same or not admissible.
std::optional<Problem> with_fp32_results(const Problem& p);

// ---- rows: the batch axis, or all axes but the last flattened

// (outer, rows, inner) of an array along a batch axis.
struct RowView {
  int64_t outer, rows, inner;
};
RowView row_view(const std::vector<int64_t>& shape, int32_t batch_axis);

// Rows of the batched inputs; nothing when there are none or they disagree.
std::optional<int64_t> row_count(const Problem& p);

// What stands in the rows that are not under test.
enum class Filler { other, zeros, copies, scaled, denormal, infinity, nan };
const char* name_of(Filler f);

// A problem of source.size() rows: row i is row source[i] of p, or a filler where source[i] < 0.
std::optional<Problem> compose(const Problem& p, const std::vector<int64_t>& source, Filler filler);

// Rows of an array, in the given order.
Array take_rows(const Array& a, int32_t batch_axis, const std::vector<int64_t>& rows);

// The same rows with `leading` axes in their place; nothing when the schema's ranks do not allow it.
std::optional<Problem> reshaped(const Problem& p, const std::vector<int64_t>& leading);

uint64_t hash_bytes(const void* data, std::size_t size, uint64_t h = 14695981039346656037ull);

}  // namespace rlk::harness
