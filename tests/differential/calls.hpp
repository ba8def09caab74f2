// Random calls: what a call is made of, valid ones of every op, and what breaks them.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "random.hpp"
#include "registry/op.hpp"

namespace differential {

using rlk::DType;
using Shape = std::vector<int64_t>;

// How a tensor's elements are drawn.
struct Values {
  enum Kind { normal, uniform, integers, list, any_bits } kind = normal;
  double a = 0, b = 1;  // deviation b; or [a, b)
  std::vector<int64_t> numbers{};
};

struct Argument {
  bool present = false;
  Shape shape;  // of a result: empty until inferred
  DType dtype = DType::f32;
  Values values{};
};

// By position in the schema.
struct Call {
  const rlk::registry::Op* op = nullptr;
  std::vector<Argument> arguments;
  std::vector<rlk_slot> attributes;
  int64_t reduction = 0;
  std::string broken;  // what was done to it, in words; empty: it is valid

  explicit Call(const rlk::registry::Op& op);
  const rlk_op_schema& schema() const { return *op->schema; }
  Argument& argument(std::string_view name);
  const Argument& argument(std::string_view name) const;
  void read(std::string_view name, Shape shape, DType dtype, Values values = {});
  void write(std::string_view name, DType dtype);
  void set(std::string_view attribute, int64_t value);
  void set_real(std::string_view attribute, double value);
  int64_t attribute(std::string_view name) const;
  std::string text() const;
};

// A valid call of the op; nothing for ops that no generator knows.
Call valid_call(const rlk::registry::Op& op, Random& random);
bool known(const rlk::registry::Op& op);

// Valid calls that every run tries.
std::vector<Call> hard_calls();

// One thing about the call changed so that it is probably wrong. Memory stays small enough to be given.
void corrupt(Call& call, Random& random);

// Numbers at which arithmetic ends.
int64_t extreme(Random& random);

}  // namespace differential
