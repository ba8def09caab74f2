/* A backend of your own, in plain C: an implementation of lm_head, which rlk knows, and an op that it does
 * not.
 *
 * Build it with target_link_libraries(my_plugin rlk::plugin), call the file librlk_backend_<name>.so, and put
 * its folder into RLK_PLUGIN_PATH or load it with rlk_load_plugin(). It links nothing of rlk: what it needs,
 * the host hands it. `rlk-dispatch --probe FILE` says what is wrong with a plugin that does not load.
 */
#include <rlk/plugin.h>
#include <stddef.h>

static float* floats(const DLTensor* t) { return (float*)((char*)t->data + t->byte_offset); }

static int64_t elements(const DLTensor* t, int32_t axes) {
  int64_t n = 1;
  for (int32_t i = 0; i < axes; ++i) n *= t->shape[i];
  return n;
}

/* ---- an implementation of lm_head -----------------------------------------------------------------------
 */

/* Slots come in the schema's order: `rlk-dispatch --list ops` shows it. */
enum { kHidden, kWeight, kBias, kOut };

/* Says which requests it takes. Pure and quick; the sentence is for the user, the numbers fill its braces. */
static rlk_verdict lm_head_supports(const rlk_slot* slots, const rlk_request* request) {
  rlk_verdict verdict = {RLK_OK, -1, NULL, NULL, {0, 0, 0, 0}};
  (void)request;
  if (slots[kBias].tensor) {
    verdict.code = RLK_UNSUPPORTED;
    verdict.argument = kBias;
    verdict.why = "takes no bias";
    verdict.nearest = "leave the bias out and add it afterwards";
  } else if (slots[kHidden].tensor->strides || slots[kWeight].tensor->strides ||
             (slots[kOut].tensor && slots[kOut].tensor->strides)) {
    verdict.code = RLK_UNSUPPORTED;
    verdict.why = "takes dense tensors only";
    verdict.nearest = "pass tensors without strides";
  } else if (slots[kOut].tensor && slots[kOut].tensor->dtype.bits != 32) {
    verdict.code = RLK_UNSUPPORTED;
    verdict.argument = kOut;
    verdict.why = "writes 32-bit logits only, out has {0} bits";
    verdict.nearest = "ask for fp32 logits";
    verdict.v[0] = slots[kOut].tensor->dtype.bits;
  }
  return verdict;
}

typedef struct {
  const float *hidden, *weight;
  float* out;
  int64_t width, columns;
} lm_head_job;

/* One row of logits. Rows may run in any order on any thread, so none depends on another. */
static void lm_head_row(void* context, int64_t row) {
  const lm_head_job* job = context;
  for (int64_t v = 0; v < job->columns; ++v) {
    float sum = 0;
    for (int64_t k = 0; k < job->width; ++k)
      sum += job->hidden[row * job->width + k] * job->weight[v * job->width + k];
    job->out[row * job->columns + v] = sum;
  }
}

static int32_t lm_head_run(const rlk_slot* slots, const rlk_call* call) {
  const DLTensor *hidden = slots[kHidden].tensor, *weight = slots[kWeight].tensor;
  lm_head_job job = {floats(hidden), floats(weight), floats(slots[kOut].tensor), weight->shape[1],
                     weight->shape[0]};
  call->host->parallel_for(call->threads, elements(hidden, hidden->ndim - 1), lm_head_row, &job);
  return RLK_OK;
}

static const rlk_implementation lm_head_rows = {
    .struct_size = sizeof(rlk_implementation),
    .priority = -10, /* below everything: it runs only when asked for */
    .op = "lm_head",
    .id = "example.rows",
    .doc = "plain loops, one thread per row",
    .arithmetic = "fp32-ascending", /* ids promise bits: use an existing one only if yours are the same */
    .dtypes = RLK_F32,
    .traits = RLK_DETERMINISTIC | RLK_BATCH_INVARIANT,
    .device_type = kDLCPU,
    .supports = lm_head_supports,
    .run = lm_head_run};

/* ---- an op of its own: out = factor * x -------------------------------------------------------------------
 */

static const rlk_argument scale_arguments[] = {
    {"x", "any shape", RLK_READ, RLK_F32, 0, RLK_MAX_RANK, 0, 0},
    {"out", "factor * x", RLK_WRITE, RLK_F32, 0, RLK_MAX_RANK, 0, 0},
};
static const rlk_attribute scale_attributes[] = {
    {"factor", "what x is multiplied with, not 0", RLK_FLOAT, 0, 2.0, NULL}};

/* Checks what the tables cannot say, and gives the shapes of the results. */
static int32_t scale_infer(const rlk_slot* slots, rlk_shape* shapes, const rlk_host* host) {
  const DLTensor* x = slots[0].tensor;
  if (slots[2].f == 0)
    return host->fail(RLK_INVALID_ARGUMENT, "example_scale: factor is 0, which would lose x");
  shapes[1].ndim = x->ndim;
  shapes[1].dtypes = shapes[1].preferred = RLK_F32;
  for (int32_t i = 0; i < x->ndim; ++i) shapes[1].dim[i] = x->shape[i];
  return RLK_OK;
}

static const rlk_op_schema scale = {.struct_size = sizeof(rlk_op_schema),
                                    .version = 1,
                                    .name = "example_scale",
                                    .aliases = "",
                                    .doc = "out = factor * x",
                                    .arguments = scale_arguments,
                                    .num_arguments = 2,
                                    .attributes = scale_attributes,
                                    .num_attributes = 1,
                                    .infer = scale_infer,
                                    .may_alias = "out=x"};

static int32_t scale_run(const rlk_slot* slots, const rlk_call* call) {
  const float* x = floats(slots[0].tensor);
  float* out = floats(slots[1].tensor);
  const int64_t n = elements(slots[0].tensor, slots[0].tensor->ndim);
  (void)call;
  for (int64_t i = 0; i < n; ++i) out[i] = (float)slots[2].f * x[i];
  return RLK_OK;
}

static const rlk_implementation scale_loop = {.struct_size = sizeof(rlk_implementation),
                                              .priority = 0,
                                              .op = "example_scale",
                                              .id = "example.loop",
                                              .doc = "one loop",
                                              .arithmetic = "fp32-product",
                                              .dtypes = RLK_F32,
                                              .traits = RLK_DETERMINISTIC | RLK_BATCH_INVARIANT,
                                              .device_type = kDLCPU,
                                              .run = scale_run};

/* ---- the backend ------------------------------------------------------------------------------------------
 */

static const rlk_implementation* const implementations[] = {&lm_head_rows, &scale_loop};
static const rlk_op_schema* const ops[] = {&scale};
static const rlk_backend backend = {.struct_size = sizeof(rlk_backend),
                                    .abi_major = RLK_ABI_MAJOR,
                                    .abi_minor = RLK_ABI_MINOR,
                                    .name = "example",
                                    .version = "1.0",
                                    .doc = "the example of an out-of-tree plugin",
                                    .implementations = implementations,
                                    .num_implementations = 2,
                                    .ops = ops,
                                    .num_ops = 1};

/* The one exported function. A host of another major version must not see the description at all. */
RLK_EXPORT const rlk_backend* rlk_backend_query(uint32_t host_abi_major, const rlk_host* host) {
  (void)host;
  return host_abi_major == RLK_ABI_MAJOR ? &backend : NULL;
}
