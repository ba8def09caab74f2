// Dimensions of an op's calls, found by comparing its cases: what belongs together when one of them becomes larger or smaller.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "registry/op.hpp"

namespace rlk::harness {

bool integral(DType t);

// 0, then ascending: where packed sequences begin and end.
bool bounds(const registry::CaseTensor& t);

// A dimension of calls with the same arguments: axes that have one size in each of them.
struct Extent {
  struct Place {
    std::size_t tensor, axis;
  };
  std::vector<Place> places;
  bool resizable = true;
  std::vector<std::size_t> ranges{};    // tensors whose integers are below it
  bool reduces = false, alone = false;  // the case's longest sum is as long; and no other extent is

  int64_t size(const registry::Case& c) const { return c.inputs[places[0].tensor].shape[places[0].axis]; }
};

class Dimensions {
 public:
  explicit Dimensions(const std::vector<registry::Case>& cases);  // they outlive it
  // Of a case, in the order of its tensors.
  std::vector<Extent> of(const registry::Case& c) const;

 private:
  using Key =
      std::tuple<std::string, std::string, std::size_t, std::size_t>;  // arguments, argument, rank, axis
  using Sizes = std::map<const registry::Case*, int64_t>;
  static Key key(const registry::Case& c, const registry::CaseTensor& t, std::size_t axis);
  static Extent* range_of(const registry::Case& c, std::size_t tensor, std::vector<Extent>& all);
  std::map<Key, std::size_t> number_;
  std::vector<Sizes> sizes_;
  std::vector<std::size_t> first_;
};

// Gives a dimension of a case another size, and what follows from it: ids below it, lengths up to it, deviations by its root.
void resize(registry::Case& c, const Extent& e, int64_t n);

}  // namespace rlk::harness
