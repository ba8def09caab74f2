// qk_norm_rope in fp64: ascending sums, a head rounded where a tensor lies between its norm and its turn.
#include <cmath>

#include "registry/qk_norm_rope/plain.hpp"

namespace rlk::registry {
namespace {

struct Exact {
  using Number = double;
  static double reciprocal(const std::vector<double>& x, double eps) {
    double squares = 0;
    for (double v : x) squares = std::fma(v, v, squares);
    return 1 /
           std::sqrt(squares / static_cast<double>(x.size()) + static_cast<double>(static_cast<float>(eps)));
  }
};

}  // namespace

int32_t qk_norm_rope_reference(const rlk_slot* slots, const rlk_host* host) {
  const auto& a = *reinterpret_cast<const QkNormRope*>(slots);
  for (int64_t t = 0; t < a.q.dim(0); ++t)
    if (const auto at = load(a.positions.dtype(), a.positions.data<char>(), t);
        !(at >= 0 && at < static_cast<double>(a.cos.dim(0))))
      return host ? host->fail(RLK_INVALID_ARGUMENT, "a position is not in the tables")
                  : RLK_INVALID_ARGUMENT;
  qk_norm_rope::PlainHeads<Exact>(a).run();
  return RLK_OK;
}

}  // namespace rlk::registry
