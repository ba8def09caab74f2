// What results are judged by: the truth, the size of its terms, and what an arithmetic id prescribes. Each is computed once
// for all implementations that a process judges.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
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
  // Those, where the written rule of their arithmetic gives the same bits; else null.
  const Outcome* proved_of(const Problem& p);
  const std::optional<Ruled>& rule_of(const Problem& p, std::string_view arithmetic);
  // What this implementation of the library's own gave when it was called for one of the above; null where it was not.
  const Outcome* call_of(const Problem& p, const rlk_implementation& by) const;
  // The op's derived cases, as derived_cases() gives them.
  const std::vector<Derived>& derived_of(const registry::Op& op, DType dtype, uint64_t seed,
                                         const std::string& only);
  // The problem of a case; its data stay for the next one who asks while there is room.
  Result<std::shared_ptr<const Problem>> problem_of(const registry::Op& op, const registry::Case& c,
                                                    uint64_t seed);
  // Seconds that the truth took; 0 where nobody has asked for it.
  double seconds_of(const Problem& p) const;

  // This problem is not needed again by whoever asks now. While there is room its references stay for the next one.
  void leave(const Problem& p);

 private:
  struct Known {
    std::optional<Outcome> truth, scale;
    std::vector<Outcome> neighbours;
    std::optional<std::optional<Outcome>> own;
    const rlk_implementation* own_by = nullptr;
    std::map<std::string, std::optional<Ruled>, std::less<>> rules;  // by arithmetic
    double seconds = 0;
    std::size_t bytes = 0;
  };
  using Key = std::tuple<std::string, std::string, DType>;  // name, shapes
  static Key key_of(const Problem& p);
  Known& known(const Problem& p);
  void count(Known& k, const Outcome& out);

  using Made = std::tuple<std::string, DType, uint64_t>;  // name, seed
  void only(const registry::Op& op);
  // One op's are kept at a time, and of derived cases one list.
  std::map<Key, Known> known_;
  const registry::Op* op_ = nullptr;
  std::size_t bytes_ = 0, made_bytes_ = 0;
  std::map<Made, std::shared_ptr<const Problem>> made_;
  std::vector<Derived> derived_;
  std::tuple<const registry::Op*, DType, uint64_t, std::string> derived_from_{};
};

}  // namespace rlk::harness
