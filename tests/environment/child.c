/* A program that uses rlk as any would, for a test that sets its environment: runs one op and prints what
 * came of it, then the list that its argument names. */
#include <stdio.h>

#include "rlk/rlk.h"

/* A sink may ask the library itself. */
static void count_lines(void* context, int32_t level, const char* text) {
  char* list = rlk_list_json("backends");
  (void)level, (void)text;
  *(int*)context += list != NULL;
  rlk_free(list);
}

int main(int argc, char** argv) {
  int lines = 0;
  int64_t hidden_shape[] = {1, 2}, weight_shape[] = {3, 2}, out_shape[] = {1, 3};
  float hidden_data[] = {1, 2}, weight_data[] = {1, 2, 3, 4, 5, 6}, out_data[3] = {0};
  DLTensor hidden = {hidden_data, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, hidden_shape, NULL, 0};
  DLTensor weight = {weight_data, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, weight_shape, NULL, 0};
  DLTensor out = {out_data, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, out_shape, NULL, 0};
  rlk_args* args;
  char* list;
  if (argc > 2) rlk_set_log_sink(argv[2][0] == 's' ? NULL : count_lines, &lines);
  args = rlk_args_new("lm_head");
  if (!args) return 1;
  rlk_args_tensor(args, "hidden", &hidden);
  rlk_args_tensor(args, "weight", &weight);
  rlk_args_tensor(args, "out", &out);
  if (rlk_run(args, NULL) == RLK_OK)
    printf("ran: %g %g %g\n", out_data[0], out_data[1], out_data[2]);
  else
    printf("failed: %s\n", rlk_last_error());
  rlk_args_free(args);
  list = rlk_list_json(argc > 1 ? argv[1] : "env");
  printf("%s\nlines logged: %d\n", list ? list : rlk_last_error(), lines);
  rlk_free(list);
  return 0;
}
