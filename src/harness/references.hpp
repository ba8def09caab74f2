// What results are judged by: the truth, the size of its terms, and what an arithmetic id prescribes. Each is computed once
// for all implementations that a process judges.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "src/harness/derived.hpp"
#include "src/harness/rule.hpp"

namespace rlk::harness {

class References {
 public:
  // The op's reference, in fp64 where it can be.
  const Outcome& truth_of(const Problem& p);
  const Outcome& scale_of(const Problem& p);
  // The truths of neighbours(p): how far they lie from the problem's own says how much of a result its inputs' last places
  // decide.
  const std::vector<Outcome>& neighbours_of(const Problem& p);
  // The library's own results, by an implementation that is not golden where there is one; nothing where all refuse.
  const std::optional<Outcome>& own_of(const Problem& p);
  const std::optional<Ruled>& rule_of(const Problem& p, std::string_view arithmetic);
  // The op's derived cases, as derived_cases() gives them.
  const std::vector<Derived>& derived_of(const registry::Op& op, DType dtype, uint64_t seed,
                                         const std::string& only);
  // Seconds that the truth took; 0 where nobody has asked for it.
  double seconds_of(const Problem& p) const;

  // This problem is not needed again by whoever asks now. While there is room its references stay for the next one.
  void leave(const Problem& p);

 private:
  struct Known {
    std::optional<Outcome> truth, scale;
    std::vector<Outcome> neighbours;
    std::optional<std::optional<Outcome>> own;
    std::map<std::string, std::optional<Ruled>, std::less<>> rules;  // by arithmetic
    double seconds = 0;
    std::size_t bytes = 0;
  };
  using Key = std::tuple<std::string, std::string, DType>;  // name, shapes
  static Key key_of(const Problem& p);
  Known& known(const Problem& p);
  void count(Known& k, const Outcome& out);

  // One op's are kept at a time, and of derived cases one list.
  std::map<Key, Known> known_;
  const registry::Op* op_ = nullptr;
  std::size_t bytes_ = 0;
  std::vector<Derived> derived_;
  std::tuple<const registry::Op*, DType, uint64_t, std::string> derived_from_{};
};

}  // namespace rlk::harness
