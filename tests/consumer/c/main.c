/* rlk from plain C: a call by name, a wrong call, introspection; and with the path of the example plugin, its
 * implementation of lm_head and its own op. Exits with 0 when everything came out right. */
#include <rlk/rlk.h>
#include <stdio.h>
#include <string.h>

static int64_t hidden_shape[] = {1, 2}, weight_shape[] = {3, 2}, out_shape[] = {1, 3};
static float hidden_data[] = {1, 2}, weight_data[] = {1, 2, 3, 4, 5, 6}, out_data[3];

static DLTensor view(float* data, int64_t* shape) {
  DLTensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.device.device_type = kDLCPU;
  t.ndim = 2;
  t.dtype.code = kDLFloat;
  t.dtype.bits = 32;
  t.dtype.lanes = 1;
  t.shape = shape;
  return t;
}

static int report(const char* what, int fine) {
  printf("%-24s %s\n", what, fine ? "ok" : rlk_last_error());
  return fine ? 0 : 1;
}

static int lm_head_on(const char* backend) {
  DLTensor hidden = view(hidden_data, hidden_shape), weight = view(weight_data, weight_shape),
           out = view(out_data, out_shape);
  rlk_options options;
  rlk_args* args = rlk_args_new("lm_head");
  rlk_code code;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.backend = backend;
  memset(out_data, 0, sizeof out_data);
  rlk_args_tensor(args, "hidden", &hidden);
  rlk_args_tensor(args, "weight", &weight);
  rlk_args_tensor(args, "out", &out);
  code = rlk_run(args, &options);
  rlk_args_free(args);
  return code == RLK_OK && out_data[0] == 5 && out_data[1] == 11 && out_data[2] == 17;
}

/* The op that the plugin adds: out = factor * x. */
static int scale(const char* factor, float expected) {
  DLTensor x = view(weight_data, weight_shape);
  float result[6] = {0};
  DLTensor out = view(result, weight_shape);
  rlk_args* args = rlk_args_new("example_scale");
  rlk_code code;
  if (!args) return 0;
  rlk_args_tensor(args, "x", &x);
  rlk_args_tensor(args, "out", &out);
  rlk_args_string(args, "factor", factor);
  code = rlk_run(args, NULL);
  rlk_args_free(args);
  return code == RLK_OK && result[5] == expected;
}

int main(int argc, char** argv) {
  int failures = 0;
  char* text;
  failures += report("lm_head", lm_head_on(NULL));
  failures += report("an unknown op",
                     rlk_args_new("lm_hed") == NULL && strstr(rlk_last_error(), "did you mean 'lm_head'?"));
  text = rlk_list_json("impls");
  failures += report("a list of what there is", text && strstr(text, "\"native.golden\""));
  rlk_free(text);
  if (argc > 1) {
    failures += report("loading the plugin", rlk_load_plugin(argv[1]) == RLK_OK);
    failures += report("its lm_head", lm_head_on("example"));
    failures += report("its own op", scale("0.5", 3));
    failures += report("its refusal", !scale("0", 0) && strstr(rlk_last_error(), "factor is 0"));
  }
  return failures;
}
