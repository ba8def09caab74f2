/* What a language binding needs beside rlk.h: schemas as structs, and calls by position, which cost what a typed
 * C++ call costs.
 *
 *   int32_t op = rlk_op_index("lm_head");
 *   const rlk_op_schema* schema = rlk_op_schema_at(op);   // names, roles, dtypes, defaults, backward
 *   rlk_slot slots[RLK_MAX_SLOTS];
 *   uint32_t count = schema->num_arguments + schema->num_attributes;
 *   rlk_default_slots("lm_head", slots, count);           // no tensors, attributes as the name means them
 *   slots[0].tensor = &hidden;  ...
 *   rlk_run_slots(op, slots, count, NULL);
 *
 * A call is one array: the schema's arguments in its order, then its attributes. `count` is its length and must be
 * the schema's, so that a caller built against another version of an op is told instead of misread. Attributes are
 * slots like all others: they are part of the call, and comparing them is one word each.
 */
#ifndef RLK_BINDING_H
#define RLK_BINDING_H

#include "rlk/plugin.h"

#ifdef __cplusplus
extern "C" {
#endif

/** The index of an op or alias, stable for the process; -1 and rlk_last_error() when there is none. Indices run
 * from 0 to rlk_op_count() - 1. */
RLK_API int32_t rlk_op_index(const char* op);

/** The schema of an op, which lives for ever; NULL for an index that is none. */
RLK_API const rlk_op_schema* rlk_op_schema_at(int32_t op);

/** Fills the slots of an op or alias: no tensors, attributes at their defaults or as the alias sets them. */
RLK_API rlk_code rlk_default_slots(const char* op, rlk_slot* slots, uint32_t count);

/** Checks, resolves and runs, as rlk_run does. */
RLK_API rlk_code rlk_run_slots(int32_t op, const rlk_slot* slots, uint32_t count, const rlk_options* options);

/** What every result must look like, from the read arguments and attributes alone: shapes[i] of argument i, of
 * which there are schema->num_arguments. `dtypes` is 0 for read arguments and for results that this call cannot
 * have. */
RLK_API rlk_code rlk_infer_slots(int32_t op, const rlk_slot* slots, uint32_t count, rlk_shape* shapes);

/** What would run, in numbers. A binding that allocates by itself asks once per shape; one that calls once sets
 * rlk_options.allocate instead. */
typedef struct rlk_choice {
  uint32_t struct_size;   /**< sizeof(rlk_choice) */
  uint32_t traits;        /**< of the implementation; RLK_CAPTURE_SAFE: the call may be captured in a graph */
  const char* id;         /**< of the implementation, lives for ever */
  const char* arithmetic; /**< its arithmetic id, likewise */
  uint64_t fingerprint;   /**< as in rlk_resolve_json */
  uint64_t workspace_bytes; /**< as rlk_workspace gives */
} rlk_choice;

/** Resolves without running. Results may be missing: then they are taken as rlk_infer_slots gives them. Data
 * pointers are not looked at. */
RLK_API rlk_code rlk_resolve_slots(int32_t op, const rlk_slot* slots, uint32_t count,
                                   const rlk_options* options, rlk_choice* out);

/** The same with every candidate and its reason: JSON, or text for people (what rlk-dispatch --explain prints). Owned
 * by the caller, freed with rlk_free. A call that cannot be resolved is described too; NULL only when nothing could
 * be said, with rlk_last_error(). */
RLK_API char* rlk_resolve_slots_json(int32_t op, const rlk_slot* slots, uint32_t count,
                                     const rlk_options* options);
RLK_API char* rlk_explain_slots(int32_t op, const rlk_slot* slots, uint32_t count,
                                const rlk_options* options);

#ifdef __cplusplus
}
#endif

#endif
