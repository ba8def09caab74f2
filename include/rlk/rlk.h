/* The C face of rlk: everything a C caller or a language binding needs.
 *
 *   rlk_args* args = rlk_args_new("rope");
 *   rlk_args_tensor(args, "x", &x);  ...  rlk_args_string(args, "pairing", "half");
 *   if (rlk_run(args, NULL) != RLK_OK) fprintf(stderr, "%s\n", rlk_last_error());
 *   rlk_args_free(args);
 *
 * No function aborts, prints, or lets an exception out. A failing call returns a code and leaves one line of
 * text in rlk_last_error(), which belongs to the calling thread and lives until that thread's next failure.
 * The text is valid UTF-8 without control characters, whatever bytes a caller's words had.
 *
 * Structs that may grow start with struct_size, here and in plugin.h: whoever fills one sets it to its
 * sizeof. One rule holds for all of them. Members are only added at the end. A struct smaller than the
 * reader's is taken, and each member it lacks has the value that 0 or NULL gives it. A larger one is taken if
 * all bytes behind the members that the reader knows are 0, since it then asks for nothing the reader does
 * not know. Anything else is an error that names both sizes.
 */
#ifndef RLK_RLK_H
#define RLK_RLK_H

#include <stddef.h>
#include <stdint.h>

#include "rlk/dlpack.h"
#include "rlk/version.h"

#if defined(RLK_BUILDING_LIBRARY)
#  define RLK_API __attribute__((visibility("default")))
#else
#  define RLK_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/** What went wrong, coarse enough to act on; rlk_last_error() says it in words. */
typedef enum rlk_code {
  RLK_OK = 0,
  RLK_INVALID_ARGUMENT = 1,  /**< a tensor, attribute or option is wrong; the text names it and both values */
  RLK_UNKNOWN_NAME = 2,      /**< no such op, argument, attribute, backend or implementation */
  RLK_CONFIGURATION = 3,     /**< RLK_BACKEND or another RLK_ variable is wrong */
  RLK_NO_IMPLEMENTATION = 4, /**< every candidate refused; rlk_resolve_json() lists why */
  RLK_UNSUPPORTED = 5,       /**< an implementation refused a request at run time */
  RLK_OVERLAP = 6,           /**< a written range meets a read, written or saved range */
  RLK_PLUGIN = 7,            /**< a plugin could not be used */
  RLK_BACKEND_ERROR = 8,     /**< a driver or vendor library failed */
  RLK_OUT_OF_MEMORY = 9,
  RLK_INTERNAL = 10 /**< a broken promise inside rlk: please report it */
} rlk_code;

/** The name of a code, "RLK_OK" and so on; "unknown code" for a number that is none. */
RLK_API const char* rlk_code_name(int32_t code);

/** The calling thread's last failure, never NULL. */
RLK_API const char* rlk_last_error(void);

/** "0.1.0" of the library that is loaded, which may be newer than RLK_VERSION of the header. */
RLK_API const char* rlk_version(void);

/** Options of one call; zero-initialise, set struct_size, then what matters. NULL options mean all defaults.
 */
typedef struct rlk_options {
  uint32_t struct_size;    /**< sizeof(rlk_options) */
  uint32_t needs_backward; /**< non-zero: fail now if no implementation can give the gradient */
  void* stream;            /**< opaque stream handle of the tensors' device; NULL is its default stream */
  const char* backend;     /**< a chain in RLK_BACKEND's item grammar, e.g. "cuda:native"; NULL: not set */
  const char* arithmetic;  /**< required arithmetic id; NULL: any */
  const char* precision;   /**< "standard" (NULL), "strict" or "golden" */
  const char*
      gradients;   /**< comma-separated arguments whose gradient is wanted, checked against the schema */
  void* workspace; /**< caller's workspace; NULL: a per-thread arena (CPU ops) */
  uint64_t workspace_bytes;
  int32_t threads;        /**< CPU threads, 0: all in the affinity mask, no more than a cgroup's CPU quota */
  uint32_t deterministic; /**< non-zero: only implementations that promise run-to-run equal bits */
  uint32_t evidence;      /**< non-zero: only what a loaded certificate covers on this build and device */
  uint32_t reserved;      /**< 0 */
  /** Where workspace comes from when `workspace` is NULL: called at most once in a call, by the calling thread, and
   * not at all where none is wanted. Gives memory of the tensors' device, 256-byte aligned, that stays until the work
   * given to `stream` is done; NULL: there is none. NULL here: the arena on the CPU, an error elsewhere. */
  void* (*allocate)(void* context, uint64_t bytes);
  void* allocate_context; /**< what it is given */
} rlk_options;

/* ---- calls by name ------------------------------------------------------------------------------------ */

typedef struct rlk_args rlk_args;

/** A new argument list for an op or alias; NULL and rlk_last_error() when there is no such op. */
RLK_API rlk_args* rlk_args_new(const char* op);
RLK_API void rlk_args_free(rlk_args* args);
/** Sets a tensor argument; the DLTensor is not copied and must outlive the call. NULL clears it. */
RLK_API rlk_code rlk_args_tensor(rlk_args* args, const char* name, const DLTensor* tensor);
RLK_API rlk_code rlk_args_int(rlk_args* args, const char* name, int64_t value);
RLK_API rlk_code rlk_args_float(rlk_args* args, const char* name, double value);
/** Sets a choice attribute by its word, e.g. "pairing" to "half"; numbers and true/false are read for other
 * types. */
RLK_API rlk_code rlk_args_string(rlk_args* args, const char* name, const char* value);

/** Checks, resolves and runs. GPU ops are asynchronous on options->stream. */
RLK_API rlk_code rlk_run(const rlk_args* args, const rlk_options* options);

/** The bytes of workspace rlk_run would use for these arguments; where the implementation's workspace is
 * optional, less will do: slower, to the same bits. */
RLK_API rlk_code rlk_workspace(const rlk_args* args, const rlk_options* options, uint64_t* bytes);

/** Shape and first admissible dtype of a result, from the read arguments alone. shape holds up to 8 dims. */
RLK_API rlk_code rlk_infer(const rlk_args* args, const char* result, int32_t* ndim, int64_t* shape,
                           DLDataType* dtype);

/* ---- introspection: text is JSON, owned by the caller, freed with rlk_free ------------------------------
 */

RLK_API void rlk_free(char* text);
/** what: "ops", "impls", "backends", "plugins", "saved" (ranges that are not released), "env". NULL on
 * failure. */
RLK_API char* rlk_list_json(const char* what);
/** How these arguments would be resolved: the choice, every candidate with its verdict, the fingerprint. */
RLK_API char* rlk_resolve_json(const rlk_args* args, const rlk_options* options);

RLK_API size_t rlk_op_count(void);
RLK_API const char* rlk_op_name(size_t op);
RLK_API size_t rlk_argument_count(const char* op);
RLK_API const char* rlk_argument_name(const char* op, size_t argument);
RLK_API size_t rlk_attribute_count(const char* op);
RLK_API const char* rlk_attribute_name(const char* op, size_t attribute);

/* ---- configuration ------------------------------------------------------------------------------------- */

/** Re-reads RLK_BACKEND, RLK_PLUGIN_PATH, RLK_PLUGIN_TRUST, RLK_LOG and RLK_CPU; they are otherwise read
 * once. */
RLK_API rlk_code rlk_reload_environment(void);

/** Loads a backend plugin from a path. Its file and folder must be safe to load (see README, "Add a
 * backend"). */
RLK_API rlk_code rlk_load_plugin(const char* path);

/** Reads a certificate that `rlk-dispatch --verify --certificate FILE` wrote, for rlk_options.evidence. */
RLK_API rlk_code rlk_load_evidence(const char* path);
/** Forgets all certificates. */
RLK_API void rlk_clear_evidence(void);

/** Receives log lines; level 0 trace .. 4 error. NULL silences. Without a sink RLK_LOG decides, on stderr. */
typedef void (*rlk_log_sink)(void* context, int32_t level, const char* text);
RLK_API void rlk_set_log_sink(rlk_log_sink sink, void* context);

/* ---- scopes -------------------------------------------------------------------------------------------- */

/** Until it is left, everything the calling thread runs is at least of this precision (NULL: as before) and
 * under this override in RLK_BACKEND's grammar (NULL: none more). What rlk_save marks in it has its backward
 * at that precision too, on whatever thread. Nestable: precision is raised, never lowered. */
RLK_API rlk_code rlk_scope_enter(const char* precision, const char* backend);
/** Leaves the scope that this thread entered last. */
RLK_API rlk_code rlk_scope_leave(void);

/* ---- saved tensors ------------------------------------------------------------------------------------- */

/** Marks the bytes of a tensor as saved for a backward: until released, ops that would write them fail. 0 on
 * failure. */
RLK_API uint64_t rlk_save(const DLTensor* tensor, const char* name);
RLK_API void rlk_release(uint64_t saved);

#ifdef __cplusplus
}
#endif

#endif
