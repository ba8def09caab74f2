/* Looking into rlk beyond rlk.h's lists: what rlk-dispatch needs and a library user rarely does. All text is
 * JSON, owned by the caller and freed with rlk_free. NULL on failure, with rlk_last_error(). */
#ifndef RLK_INTROSPECT_H
#define RLK_INTROSPECT_H

#include "rlk/rlk.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Checks a plugin file as loading it would, always with the child process, without loading it here. Members:
 * path, name, trusted, ok, and checks: a list of {check, ok, reason} that ends with the first one that
 * failed. */
RLK_API char* rlk_probe_json(const char* path);

/** Small calls of an op that are known to be right, one for each dtype of its first argument: a list of
 * {name, tensors: [{name, shape, dtype}], results: [{name, dtype}], attributes: {name: value}}. Integers say which
 * ones are right: `values`, repeated to the tensor's end, or `range`, from the first to below the second. Empty for
 * ops that a plugin added. */
RLK_API char* rlk_examples_json(const char* op);

#ifdef __cplusplus
}
#endif

#endif
