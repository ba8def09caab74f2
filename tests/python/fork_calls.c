// Threads of C that call rlk over and over, for test_fork.py. A thread of Python's that waits for the interpreter's lock holds none
// of the library's; these never need the interpreter, so a fork finds them anywhere.
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include "rlk/binding.h"
#include "rlk/rlk.h"

enum { kRows = 64, kWidth = 256, kVocabulary = 300 };

static float hidden[kRows * kWidth], weight[kVocabulary * kWidth];
static atomic_int stop;
static pthread_t threads[4];

static void no_sink(void* context, int32_t level, const char* text) {
  (void)context, (void)level, (void)text;
}

static int saves(void) {
  float bytes[4] = {0};
  int64_t size = 4;
  const DLTensor tensor = {bytes, {kDLCPU, 0}, 1, {kDLFloat, 32, 1}, &size, NULL, 0};
  const uint64_t ticket = rlk_save(&tensor, "kept");
  rlk_release(ticket);
  return ticket != 0;
}

static int scopes(void) {
  if (rlk_scope_enter("golden", "lm_head=native") != RLK_OK) return 0;
  return rlk_scope_leave() == RLK_OK;
}

static int reloads(void) { return rlk_reload_environment() == RLK_OK; }

static int sets_sinks(void) {
  rlk_set_log_sink(no_sink, NULL);
  return 1;
}

static int forgets_evidence(void) {
  rlk_clear_evidence();
  return 1;
}

// A file that is no plugin: what the library does before it knows that.
static int loads_plugins(void) { return rlk_load_plugin("/dev/null") != RLK_OK; }

// Enough work for several threads; the sums are exact.
static int runs_on(int32_t most_threads) {
  float out[kRows * kVocabulary];
  int64_t hidden_shape[] = {kRows, kWidth}, weight_shape[] = {kVocabulary, kWidth},
          out_shape[] = {kRows, kVocabulary};
  const DLTensor h = {hidden, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, hidden_shape, NULL, 0};
  const DLTensor w = {weight, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, weight_shape, NULL, 0};
  const DLTensor y = {out, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, out_shape, NULL, 0};
  rlk_slot slots[RLK_MAX_SLOTS];
  const int32_t op = rlk_op_index("lm_head");
  const rlk_op_schema* schema = rlk_op_schema_at(op);
  const uint32_t count = schema->num_arguments + schema->num_attributes;
  if (rlk_default_slots("lm_head", slots, count) != RLK_OK) return 0;
  for (uint32_t i = 0; i < schema->num_arguments; ++i) {
    const char* const name = schema->arguments[i].name;
    if (strcmp(name, "hidden") == 0) slots[i].tensor = &h;
    if (strcmp(name, "weight") == 0) slots[i].tensor = &w;
    if (strcmp(name, "out") == 0) slots[i].tensor = &y;
  }
  rlk_options options = {sizeof options};
  options.threads = most_threads;
  if (rlk_run_slots(op, slots, count, &options) != RLK_OK) return 0;
  return out[0] == kWidth && out[kRows * kVocabulary - 1] == kWidth;
}

static int runs(void) { return runs_on(0); }

static const struct {
  const char* name;
  int (*call)(void);
} kinds[] = {{"saves", saves},
             {"scopes", scopes},
             {"reloads", reloads},
             {"sets_sinks", sets_sinks},
             {"forgets", forgets_evidence},
             {"loads_plugins", loads_plugins},
             {"runs", runs}};

static int (*call_named(const char* name))(void) {
  for (size_t i = 0; i < sizeof kinds / sizeof *kinds; ++i)
    if (strcmp(kinds[i].name, name) == 0) return kinds[i].call;
  return NULL;
}

static void* keep_calling(void* call) {
  while (!stop) (*(int (**)(void))call)();
  return NULL;
}

void prepare(void) {
  for (int i = 0; i < kRows * kWidth; ++i) hidden[i] = 1;
  for (int i = 0; i < kVocabulary * kWidth; ++i) weight[i] = 1;
}

// One call of a kind: whether it went as it should.
int call_once(const char* name) { return call_named(name)(); }

static void run_at_fork(void) { runs(); }

// The process's first call that takes threads is made from a handler of its fork: what another thread may do while one forks, at
// the worst moment.
int first_run_at_fork(void) { return runs_on(1) && pthread_atfork(run_at_fork, NULL, NULL) == 0; }

static int (*called)(void);
void start(const char* name) {
  stop = 0;
  called = call_named(name);
  for (size_t i = 0; i < sizeof threads / sizeof *threads; ++i)
    pthread_create(&threads[i], NULL, keep_calling, &called);
}

void finish(void) {
  stop = 1;
  for (size_t i = 0; i < sizeof threads / sizeof *threads; ++i) pthread_join(threads[i], NULL);
}
