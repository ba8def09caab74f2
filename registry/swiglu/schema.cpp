// swiglu: out = act(gate) * up, and its gradients.
#include "registry/schema.hpp"

namespace rlk::registry {
namespace {

constexpr auto kAttributes =
    attributes(choice("act", "what the gate goes through", "silu|gelu_tanh|silu_clamped"),
               choice("roundings", "once: the product; twice: act(gate) in gate's dtype, then the product",
                      "once|twice"),
               real("limit", "silu_clamped: gate at most this, up between minus this and this", 7),
               real("alpha", "silu_clamped: factor on the gate inside the sigmoid", 1.702),
               real("up_offset", "silu_clamped: added to up", 1));
enum {
  kLimit = index_of(kAttributes, "limit"),
  kAlpha = index_of(kAttributes, "alpha"),
  kOffset = index_of(kAttributes, "up_offset")
};

constexpr Argument row(Argument a) { return a.rows().strided(); }
constexpr auto kForward =
    arguments(row(read("gate", "[..., I]; without up [..., 2 I]: gate, then up")).saved(),
              row(read("up", "[..., I]; absent: in gate")).optional().saved(), row(write("out", "[..., I]")));
enum { kGate = index_of(kForward, "gate"), kUp = index_of(kForward, "up"), kOut = index_of(kForward, "out") };

constexpr auto kBackward = arguments(
    row(read("d_out", "gradient of out [..., I]")), row(read("gate", "as in the forward")),
    row(read("up", "as in the forward")).optional(), row(write("d_gate", "the shape of gate")).optional(),
    row(write("d_up", "of up, where it is given")).optional());
enum {
  kDOut = index_of(kBackward, "d_out"),
  kGateB = index_of(kBackward, "gate"),
  kUpB = index_of(kBackward, "up"),
  kDGate = index_of(kBackward, "d_gate"),
  kDUp = index_of(kBackward, "d_up")
};

int32_t same_rows(const rlk_host* host, const char* op, const char* name, const DLTensor* t, int64_t width,
                  const DLTensor* gate) {
  if (dtype(t) != dtype(gate))
    return fail(host, "{}: {} is {}, gate is {}", op, name, name_of(dtype(t)), name_of(dtype(gate)));
  if (t->ndim != gate->ndim)
    return fail(host, "{}: {} has rank {}, gate has rank {}", op, name, t->ndim, gate->ndim);
  for (int32_t i = 0; i + 1 < gate->ndim; ++i)
    if (dim(t, i) != dim(gate, i))
      return fail(host, "{}: {} has size {} in dimension {}, gate has {}", op, name, dim(t, i), i,
                  dim(gate, i));
  if (dim(t, -1) != width)
    return fail(host, "{}: {} has I={}, gate [..., {}] means I={}", op, name, dim(t, -1), dim(gate, -1),
                width);
  return RLK_OK;
}

// Finds I.
int32_t check_inputs(const rlk_host* host, const char* op, const DLTensor* gate, const DLTensor* up,
                     const rlk_slot* attributes, int64_t& width) {
  width = up ? dim(gate, -1) : dim(gate, -1) / 2;
  if (!up && dim(gate, -1) % 2)
    return fail(host, "{}: up is absent, so gate holds [gate, up], but its last size {} is odd", op,
                dim(gate, -1));
  if (up)
    if (int32_t code = same_rows(host, op, "up", up, width, gate)) return code;
  const double limit = attributes[kLimit].f, alpha = attributes[kAlpha].f, offset = attributes[kOffset].f;
  if (!(limit > 0 && limit <= 1e30))
    return fail(host, "{}: limit is {}, it must be above 0, at most 1e30", op, limit);
  if (!(alpha >= 1e-6 && alpha <= 1e6))
    return fail(host, "{}: alpha is {}, it must be from 1e-6 to 1e6", op, alpha);
  if (!(offset >= -1e30 && offset <= 1e30))
    return fail(host, "{}: up_offset is {}, it must be from -1e30 to 1e30", op, offset);
  return RLK_OK;
}

int32_t infer(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  const DLTensor* gate = s[kGate].tensor;
  int64_t width = 0;
  if (int32_t code = check_inputs(host, "swiglu", gate, s[kUp].tensor, s + kForward.size(), width))
    return code;
  shapes[kOut] = with_last(gate, width, static_cast<uint32_t>(dtype(gate)), dtype(gate));
  return RLK_OK;
}

int32_t infer_bwd(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  static constexpr const char* op = "swiglu_bwd";
  const DLTensor *gate = s[kGateB].tensor, *up = s[kUpB].tensor;
  int64_t width = 0;
  if (int32_t code = check_inputs(host, op, gate, up, s + kBackward.size(), width)) return code;
  if (int32_t code = same_rows(host, op, "d_out", s[kDOut].tensor, width, gate)) return code;
  if (s[kDUp].tensor && !up)
    return fail(host, "{}: d_up is asked for, but up is absent: its gradient is the second half of d_gate",
                op);
  shapes[kDGate] = like(gate, static_cast<uint32_t>(dtype(gate)), dtype(gate));
  shapes[kDUp] = with_last(gate, width, static_cast<uint32_t>(dtype(gate)), dtype(gate));
  return RLK_OK;
}

}  // namespace

extern const rlk_op_schema swiglu_schema =
    Schema("swiglu", "gated activation: act(gate) * up", kForward, kAttributes, infer).gradient("swiglu_bwd");
extern const rlk_op_schema swiglu_bwd_schema =
    Schema("swiglu_bwd", "gradients of swiglu", kBackward, kAttributes, infer_bwd);

}  // namespace rlk::registry
