// One op from end to end: what a first program with rlk looks like. It also serves as the C++ consumer of the
// tests.
#include <cstdio>
#include <rlk/rlk.hpp>

int main() {
  // Tensors are views of anybody's memory; rlk owns none.
  float hidden[2 * 4] = {1, 2, 3, 4, 5, 6, 7, 8};
  float weight[3 * 4] = {1, 0, 0, 0, 0, 1, 0, 0, 1, 1, 1, 1};
  float logits[2 * 3] = {};
  const rlk::Tensor h(hidden, {2, 4}, rlk::DType::f32), w(weight, {3, 4}, rlk::DType::f32),
      y(logits, {2, 3}, rlk::DType::f32);

  // One call. The registry picks the implementation.
  const rlk::Status status = rlk::lm_head({.hidden = h, .weight = w, .out = y});
  if (!status) return std::fprintf(stderr, "%s\n", status.message().data()), 1;
  std::printf("logits  %g %g %g\n        %g %g %g\n", logits[0], logits[1], logits[2], logits[3], logits[4],
              logits[5]);

  // Which implementation ran and why. Two machines whose arithmetic ids are equal promise the same bits. The
  // fingerprint is stricter: it is equal only for the same op, implementation, build and policy.
  const rlk::Resolution r = rlk::resolve(rlk::LmHead{.hidden = h, .weight = w, .out = y});
  std::printf("%.*s  arithmetic %.*s  decided by %s  fingerprint %016llx\n", static_cast<int>(r.id().size()),
              r.id().data(), static_cast<int>(r.arithmetic().size()), r.arithmetic().data(),
              r.decided_by().c_str(), static_cast<unsigned long long>(r.fingerprint()));

  // A wrong call is a status that names the argument and both values.
  const rlk::Tensor narrow(weight, {4, 3}, rlk::DType::f32);
  const rlk::Status wrong = rlk::lm_head({.hidden = h, .weight = narrow, .out = y});
  std::printf("wrong   %.*s\n", static_cast<int>(wrong.message().size()), wrong.message().data());
  return logits[2] == 10 && logits[5] == 26 && wrong.code() == RLK_INVALID_ARGUMENT ? 0 : 1;
}
