/* Recording what every call read, computed by, and left, so that two programs can be held against each other:
 * `rlk-dispatch trace-diff A B` finds the first call at which they part, and why.
 *
 *   rlk_trace_begin("sampler.trace", NULL);
 *   rlk_trace_rows(sequences, positions, rows);    // whose rows the next calls of this thread compute
 *   rlk_trace_tag("layer 3 qkv");                  // and what they are for
 *   rlk_run(...);
 *   rlk_trace_end();
 *
 * or, for a whole program, RLK_TRACE=FILE in its environment, with options as 'FILE;weights_once;every=16;tags=layer 1 *'.
 *
 * A trace is text, one JSON object a line. A call's line has the op, the tag, the implementation with its version, the
 * arithmetic id, the attributes, and of every tensor the shape and 64-bit digests: one of the whole, and where it has
 * rows one of each. Rows are the leading dimensions that together have as many entries as rlk_trace_rows gave keys; without
 * keys, the first dimension. Caches (a tensor of several sequences that is not laid out by these rows) are not
 * digested: what they hold was written by calls that are in the trace. What an implementation calls is part of its call.
 *
 * Tracing waits for a GPU before and after every call and copies what it digests to the host. So a call must not be
 * traced while a graph is captured; end the trace first. A trace never fails a call: what goes wrong with it is
 * returned by rlk_trace_end. A forked child does not write on its parent's trace. */
#ifndef RLK_TRACE_H
#define RLK_TRACE_H

#include "rlk/rlk.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Zero-initialise, set struct_size, then what matters. */
typedef struct rlk_trace_options {
  uint32_t struct_size; /**< sizeof(rlk_trace_options) */
  uint32_t
      weights_once; /**< non-zero: what has no rows and is not written is digested when its address is met first,
                              and again after rlk_trace_weights_changed; zero: at every call */
  const char* tags; /**< globs, comma separated: only calls with such a tag; NULL: all */
  int64_t every;    /**< only rows at positions that are a multiple; 0: all */
} rlk_trace_options;

/** Begins a trace of all threads of this process; the file is written anew, unless another process writes it now. "%p"
 * in its name becomes the process id, which programs that start others with the same RLK_TRACE need. One trace at a
 * time. */
RLK_API rlk_code rlk_trace_begin(const char* file, const rlk_trace_options* options);
/** Ends it: the file is whole. Returns what went wrong since the beginning. Without a trace: an error. */
RLK_API rlk_code rlk_trace_end(void);
/** 1 while calls are recorded. */
RLK_API int32_t rlk_tracing(void);

/** What the next calls of this thread are for: a layer and a role. NULL: nothing is said. The text is copied. */
RLK_API rlk_code rlk_trace_tag(const char* tag);
/** Whose rows the next calls of this thread compute: the sequence and the absolute position of each. 0 rows: nothing is
 * said. Copied. */
RLK_API rlk_code rlk_trace_rows(const int64_t* sequences, const int64_t* positions, uint64_t rows);
/** With weights_once: weights have been written, at the same addresses. */
RLK_API rlk_code rlk_trace_weights_changed(void);

/** Records a tensor that some other program computed, under a tag of its own (NULL: that of the thread) and the thread's
 * rows: a framework's own kernels take their place in the trace. Without a trace it does nothing. */
RLK_API rlk_code rlk_trace_tensor(const char* tag, const char* name, const DLTensor* tensor, void* stream);

#ifdef __cplusplus
}
#endif

#endif
