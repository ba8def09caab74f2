#include "src/policy.hpp"

#include "src/fnv.hpp"
#include "src/threads.hpp"

namespace rlk {

bool Texts::same_texts(const Texts& o) const noexcept {
  return backend == o.backend && arithmetic == o.arithmetic && gradients == o.gradients;
}

uint64_t fingerprint(const Policy& policy, uint64_t seed) noexcept {
  const auto& [precision, threads, needs_backward, deterministic, evidence, scope] =
      static_cast<const Demands&>(policy);
  const auto& [backend, arithmetic, gradients] = static_cast<const Texts&>(policy);
  const uint64_t flags = static_cast<uint64_t>(precision) | uint64_t{deterministic} << 8 |
                         uint64_t{needs_backward} << 9 | uint64_t{evidence} << 10;
  return hashed(hashed(seed, flags), arithmetic);
}

rlk_request Policy::request(const rlk_device& device) const noexcept {
  return {sizeof(rlk_request), static_cast<int32_t>(precision), device, needs_backward,
          std::min(threads, most_threads())};
}

KeptPolicy::KeptPolicy(const Policy& policy) : policy_(policy) {
  std::string_view* const texts[] = {&policy_.backend, &policy_.arithmetic, &policy_.gradients};
  std::size_t size = 0;
  for (const std::string_view* text : texts) size += text->size();
  if (size == 0) return;
  texts_ = std::make_unique<char[]>(size);
  char* to = texts_.get();
  for (std::string_view* text : texts) {
    char* const end = std::copy(text->begin(), text->end(), to);
    *text = {to, text->size()};
    to = end;
  }
}

}  // namespace rlk
