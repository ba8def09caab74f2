// lm_head and its backward on AMD GPUs:
//
//   hip.fma32        fma32/kb1024   any GPU
//   hip.golden       fma64          any GPU
//   hip.mfma_gfx90a  cdna2/k4       bf16 on matrix cores; see simt/lm_head/mfma.hpp
//   hip.mfma_gfx942  cdna3/k8       likewise
//
// The last two were compiled, disassembled and played on host fibers, but never run on a GPU. So they stand
// behind hip.fma32 and serve only on request.
#include "simt/lm_head/ops.hpp"

namespace rlk::hip {

simt::lm_head::Launcher lm_head_portable();

namespace {

using namespace simt::lm_head;

struct Portable {
  static constexpr std::int32_t kDevice = kDLROCM;
  static Launcher launcher() { return lm_head_portable(); }
};

rlk_verdict takes(const LmHead&, const rlk_request&) { return kAccept; }
rlk_verdict takes(const LmHeadBwd& a, const rlk_request&) {
  if (a.d_out.dtype() != a.hidden.dtype())
    return refuse("matrix cores take two operands of one 16-bit dtype, d_out is fp32", {},
                  "round d_out to hidden's dtype", 0);
  return kAccept;
}

// The numbers that the runtime's names spell: gfx90a, gfx942.
struct Generation {
  std::int32_t gfx;
  const char *id, *arithmetic;
};
constexpr Generation kCdna2 = {0x90a, "hip.mfma_gfx90a", "cdna2/k4"};
constexpr Generation kCdna3 = {0x942, "hip.mfma_gfx942", "cdna3/k8"};

template <class Args>
constexpr rlk_implementation mfma(const Generation& g) {
  constexpr rlk_verdict (*supports)(const Args&, const rlk_request&) = takes;
  return implement<Args, run<Portable, Args, Sum::mfma>, supports>(
      {.id = g.id,
       .doc = "bf16 on matrix cores, never run yet",
       .priority = 50,
       .arithmetic = g.arithmetic,
       .dtypes = RLK_BF16,
       .traits = kTraits,
       .device_type = Portable::kDevice,
       .min_arch = g.gfx,
       .max_arch = g.gfx});
}

}  // namespace

extern const rlk_implementation lm_head_fma32, lm_head_golden, lm_head_mfma_gfx90a, lm_head_mfma_gfx942;
extern const rlk_implementation lm_head_bwd_fma32, lm_head_bwd_golden, lm_head_bwd_mfma_gfx90a,
    lm_head_bwd_mfma_gfx942;

const rlk_implementation lm_head_fma32 = fma32<Portable, LmHead>("hip.fma32");
const rlk_implementation lm_head_golden = golden<Portable, LmHead>("hip.golden");
const rlk_implementation lm_head_mfma_gfx90a = mfma<LmHead>(kCdna2);
const rlk_implementation lm_head_mfma_gfx942 = mfma<LmHead>(kCdna3);

const rlk_implementation lm_head_bwd_fma32 = fma32<Portable, LmHeadBwd>("hip.fma32");
const rlk_implementation lm_head_bwd_golden = golden<Portable, LmHeadBwd>("hip.golden");
const rlk_implementation lm_head_bwd_mfma_gfx90a = mfma<LmHeadBwd>(kCdna2);
const rlk_implementation lm_head_bwd_mfma_gfx942 = mfma<LmHeadBwd>(kCdna3);

}  // namespace rlk::hip
