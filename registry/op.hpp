// What an op is, beside its schema: a reference that says what is right, cases that are worth trying, and how
// far a result may be from right. The harness, the tests and the command line use nothing else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "rlk/tensor.hpp"

namespace rlk::registry {

// How a case's tensor is filled. Values are quantised to the tensor's dtype; the seed is the case's.
struct Fill {
  enum Kind {
    normal,         // mean 0, deviation `b` (default 1)
    uniform,        // [a, b)
    constant,       // a
    heavy_tailed,   // normal, one channel (last axis) times 1000
    linspace,       // a..b over the whole tensor
    cancellation,   // neighbours along the last axis cancel to rounding level
    one_hot,        // one 1 per row
    powers_of_two,  // random signs and exponents in [a, b]
    log_decay,      // -b * u, u uniform: gates
    integers,       // uniform integers in [a, b)
    same_rows,      // normal, and every row (last axis) the same
    sorted,         // ascending along the last axis, a..b
    quick,          // in [-b, b), one draw an element: for arrays of production size
    values          // exactly `list`, row-major, from its start again where it ends
  } kind = normal;
  double a = 0, b = 1;
  std::vector<double> list{};
};

struct CaseTensor {
  std::string argument;
  std::vector<int64_t> shape;
  DType dtype = DType::f32;
  Fill fill{};
  std::vector<int64_t> strides{};  // empty: dense
  int32_t batch_axis = -3;         // -3: the schema's
};

// One call worth trying. Read arguments with shapes and fills; results by name with the dtype wanted (their
// shapes come from infer); attributes by name. The name says everything needed to find the case again.
struct Case {
  std::string name;
  std::vector<CaseTensor> inputs;
  std::vector<std::pair<std::string, DType>> results;
  std::vector<std::pair<std::string, std::variant<int64_t, double, std::string>>> attributes{};
  bool large = false;    // left out of short budgets
  bool brief = false;    // its size or its values are what it is for: varied in few ways
  bool sampled = false;  // brief, and judged at some hundred elements of each result
  // Sums may overflow on the way, or all there is may vanish, which is the arithmetic's own affair: judged by the
  // written rule of the id alone.
  bool ruled = false;
  int64_t most_rows = 4096;  // how far a batch of such rows is grown: fewer where a row is a whole sequence
  // Batch axes of arguments or results that differ from the schema's in this case: a layout attribute moved
  // the axis, or rows depend on each other (-1).
  std::vector<std::pair<std::string, int32_t>> batch_axes{};
  int64_t reduction = 0;  // length of the longest reduction, for bounds that grow with it and for plots
  bool exact = false;  // every implementation must give the very bits of the reference in the results' dtypes
  bool cancels =
      false;  // sums nearly cancel: errors are measured against the sum of magnitudes, not against the sum
  // {left, right, result}: result[m, n] sums left[m, k] * right[n, k]. The case then exists to recover the
  // order of that sum from outputs alone; the harness chooses the values.
  std::vector<std::string> order_probe{};
  std::vector<std::pair<std::string, std::string>>
      shared{};  // read arguments: the second is the first's memory
};

// Where cases go; also where the sizes of drawn ones come from.
class CaseSink {
 public:
  template <class Emit>
  CaseSink(Emit emit, uint64_t seed = 1) : emit_(std::move(emit)), state_(seed) {}
  void operator()(Case c) const { emit_(std::move(c)); }
  // In [from, to], the same on every machine.
  int64_t draw(int64_t from, int64_t to) const {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return from + static_cast<int64_t>((z ^ (z >> 31)) % static_cast<uint64_t>(to - from + 1));
  }

 private:
  std::function<void(Case)> emit_;
  mutable uint64_t state_;
};

// How far one result may be from the reference.
struct Bound {
  enum Metric {
    peak,  // max |err| / peak of the row
    elementwise,  // every element within `ulps` of the result dtype plus `value` times the row's peak plus `absolute`
    rms,          // RMS(err) / RMS(truth)
    bits,  // equal to the reference rounded once
    none   // not judged by distance
  } metric = peak;
  double value = 0;
  double ulps = 0;
  bool flushes = false;  // the arithmetic counts subnormal inputs and results as zero
  double absolute = 0;   // of logarithms, which may be as close to zero as they like
  // peak, of 16 bits: what a sum may be off, by the row's peak, before it is rounded, which adds half an ulp at most.
  double unrounded = 0;
};
struct BoundQuery {
  std::string_view result;      // argument name
  DType input, output;          // dtype of the op's first argument and of this result
  std::string_view arithmetic;  // of the implementation
  int64_t reduction = 0;        // length of the longest reduction, when the op has one
};

// Elements of one result, row-major, ascending.
struct Sample {
  std::size_t argument;
  std::vector<int64_t> elements;
};
// A call whose results an arithmetic id prescribes: dense tensors on the CPU, results included.
struct RuleQuery {
  const rlk_slot* slots;
  std::string_view arithmetic;
  std::span<const Sample> sample;  // what to compute; empty: everything
};

struct Op {
  const rlk_op_schema* schema;
  // Computes the call on the CPU, one thread, as plainly as possible. Results may also be fp64: the truth.
  int32_t (*reference)(const rlk_slot* slots, const rlk_host* host);
  void (*cases)(const CaseSink& sink);
  Bound (*bound)(const BoundQuery& query);
  // Writes the bits that an arithmetic id means, from its written rule and from no kernel. False: the id has
  // no rule here, or not for these results. Null: no id has.
  bool (*rule)(const RuleQuery& query);
};

// All ops of the table, in its order.
std::span<const Op> ops();
const Op* find(std::string_view name);

}  // namespace rlk::registry
