// A backend whose implementations do not come back: one way each, in the call whose batch has 7 rows. Everything
// else of theirs is right. One more refuses strict calls under a variable that it cannot undo.
#include <signal.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <stdexcept>

#include "rlk/backend.hpp"
#include "rlk/ops.hpp"

namespace {

using rlk::LmHead;

enum class Way { honest, crash, hang, exit, throws };

template <Way way>
int32_t run(const rlk_slot* slots, const rlk_call*) {
  const auto& a = *reinterpret_cast<const LmHead*>(slots);
  const int64_t m = a.hidden.dim(0), k = a.hidden.dim(1), v = a.weight.dim(0);
  if (m == 7 && way == Way::crash) raise(SIGSEGV);
  if (m == 7 && way == Way::exit) std::exit(0);
  if (m == 7 && way == Way::throws) throw std::runtime_error("through a C boundary");
  while (m == 7 && way == Way::hang) usleep(100000);  // NOLINT(bugprone-infinite-loop): what is tested
  for (int64_t r = 0; r < m; ++r)
    for (int64_t c = 0; c < v; ++c) {
      float sum = 0;
      for (int64_t i = 0; i < k; ++i)
        sum = std::fma(a.hidden.data<float>()[r * a.hidden.stride(0) + i],
                       a.weight.data<float>()[c * a.weight.stride(0) + i], sum);
      a.out.data<float>()[r * a.out.stride(0) + c] = sum;
    }
  return RLK_OK;
}

rlk_verdict plain(const rlk_slot* slots, const rlk_request*) {
  const auto& a = *reinterpret_cast<const LmHead*>(slots);
  return a.hidden.rank() == 2 && !a.bias ? rlk::kAccept : rlk::refuse("only rank 2, no bias");
}

rlk_verdict wary_of_tf32(const rlk_slot* slots, const rlk_request* request) {
  if (std::getenv("NVIDIA_TF32_OVERRIDE")) return rlk::refuse("NVIDIA_TF32_OVERRIDE is set");
  return plain(slots, request);
}

constexpr rlk_implementation strict(rlk_implementation i) {
  i.traits |= RLK_STRICT;
  i.supports = wary_of_tf32;
  return i;
}

template <Way way>
constexpr rlk_implementation with(const char* id) {
  return {sizeof(rlk_implementation),
          -1000,
          "lm_head",
          id,
          "ends its process",
          "unruly/chain",
          RLK_F32,
          RLK_DETERMINISTIC | RLK_BATCH_INVARIANT,
          kDLCPU,
          0,
          0,
          plain,
          nullptr,
          run<way>};
}
const rlk_implementation kHonest = with<Way::honest>("unruly.honest"),
                         kCrash = with<Way::crash>("unruly.crash"), kHang = with<Way::hang>("unruly.hang"),
                         kExit = with<Way::exit>("unruly.exit"), kThrows = with<Way::throws>("unruly.throws"),
                         kWary = strict(with<Way::honest>("unruly.wary"));
const rlk_implementation* const kAll[] = {&kHonest, &kCrash, &kHang, &kExit, &kThrows, &kWary};

const rlk_backend kBackend = {.struct_size = sizeof(rlk_backend),
                              .abi_major = RLK_ABI_MAJOR,
                              .abi_minor = 0,
                              .name = "unruly",
                              .version = "1",
                              .doc = "calls that do not come back",
                              .implementations = kAll,
                              .num_implementations = 6,
                              .ops = nullptr,
                              .num_ops = 0,
                              .devices = nullptr,
                              .activate = nullptr,
                              .services = nullptr};

}  // namespace

extern "C" RLK_EXPORT const rlk_backend* rlk_backend_query(uint32_t host_abi_major, const rlk_host*) {
  return host_abi_major == RLK_ABI_MAJOR ? &kBackend : nullptr;
}
