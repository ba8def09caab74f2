// The deliberate errors as a plugin: rlk-dispatch --verify --mutants FILE shows that the very program that
// wrote a certificate catches them.
#include "mutants.hpp"

extern "C" RLK_EXPORT const rlk_backend* rlk_backend_query(uint32_t host_abi_major, const rlk_host*) {
  return host_abi_major == RLK_ABI_MAJOR ? &rlk::mutants::backend : nullptr;
}
