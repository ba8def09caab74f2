/* What a backend exports, in plain C. The built-in native backend and every plugin describe themselves with
 * these structs; an out-of-tree plugin has the same rights as ours.
 *
 * A plugin is a shared object librlk_backend_<name>.so that exports one function:
 *
 *   const rlk_backend* rlk_backend_query(uint32_t host_abi_major, const rlk_host* host);
 *
 * Every struct starts with its size; rlk.h says how one side reads what the other side's larger or smaller
 * struct holds. Major versions must be equal. No C++ type, exception or library object crosses this boundary.
 * All strings and tables must live for ever: plugins are never unloaded.
 *
 * A description is checked when it is registered: names, ids, arithmetics, docs and versions are there and
 * are one line of valid UTF-8 without control characters; roles, types, ranks and sets are in range. What a
 * function returns is checked when it is called: a code that is no rlk_code, or a shape that no tensor has,
 * fails the call with RLK_BACKEND_ERROR, and the text names the implementation.
 *
 * Which file may be loaded: only those who could replace the library itself may change what a plugin path
 * leads to. So the file, every folder from the root down to it, and every symbolic link on the way belong to
 * root, to the user who runs the process, or to an owner of the library's own path (the file
 * librlk_registry.so and the folders above it). Others may write them in two cases only: a group that may also
 * write the library's own path, as in a site-packages that a team shares, and everybody in a sticky folder such
 * as /tmp. What lies in the folder rlk/ beside the library is as trusted as the library, and is loaded without
 * a trial in a child process.
 */
#ifndef RLK_PLUGIN_H
#define RLK_PLUGIN_H

#include "rlk/rlk.h"

#ifdef __cplusplus
extern "C" {
#endif

#define RLK_ABI_MAJOR 1u
#define RLK_ABI_MINOR 1u /* 1: rlk_host::cpu_level, and arch of the CPU */
#define RLK_MAX_RANK 8
#define RLK_MAX_SLOTS 64
#define RLK_EXPORT __attribute__((visibility("default")))

/* ---- ops ----------------------------------------------------------------------------------------------- */

/** One argument or attribute of a call. A call is an array of slots: the schema's arguments in order, then
 * its attributes in order. Read arguments must be treated as const; absent optional arguments are NULL. */
typedef union
#if defined(__GNUC__)
    __attribute__((may_alias))
#endif
    rlk_slot {
  const DLTensor* tensor;
  int64_t i; /* integers, flags (0 or 1) and choices (index into the list) */
  double f;
} rlk_slot;

typedef enum rlk_role { RLK_READ = 0, RLK_WRITE = 1, RLK_READWRITE = 2 } rlk_role;

enum { /* dtype sets */
       RLK_F16 = 1u << 0,
       RLK_BF16 = 1u << 1,
       RLK_F32 = 1u << 2,
       RLK_F64 = 1u << 3,
       RLK_I32 = 1u << 4,
       RLK_I64 = 1u << 5,
       RLK_U8 = 1u << 6,
       RLK_BOOL = 1u << 7,
       RLK_F8_E4M3 = 1u << 8, /* 8 bits without infinities: DLPack's float8_e4m3fn */
       RLK_ALL_DTYPES = (1u << 9) - 1
};

enum {                            /* argument flags */
       RLK_OPTIONAL = 1u << 0,    /* may be absent */
       RLK_NO_GRADIENT = 1u << 1, /* asking for its gradient is an error */
       RLK_HOST = 1u << 2,        /* always in CPU memory, whatever the op's device */
       RLK_SAVED = 1u << 3,       /* the op's backward reads it: a differentiable call keeps it */
       RLK_STRIDED =
           1u << 4 /* any strides with unit last stride; else rows must be dense except the first axes */
};

typedef struct rlk_argument {
  const char* name;
  const char* doc;
  int32_t role;    /* rlk_role */
  uint32_t dtypes; /* set of RLK_F16... */
  int32_t min_rank, max_rank;
  int32_t batch_axis; /* the axis along which rows are independent; -1: none, -2: all but the last */
  uint32_t flags;
} rlk_argument;

typedef enum rlk_type { RLK_INT = 0, RLK_FLOAT = 1, RLK_FLAG = 2, RLK_CHOICE = 3 } rlk_type;

typedef struct rlk_attribute {
  const char* name;
  const char* doc;
  int32_t type;         /* rlk_type */
  int64_t default_int;  /* RLK_INT, RLK_FLAG, RLK_CHOICE */
  double default_float; /* RLK_FLOAT */
  const char* choices;  /* RLK_CHOICE: "half|adjacent|adjacent_to_half" */
} rlk_attribute;

typedef struct rlk_host rlk_host;

/** What a result must look like. */
typedef struct rlk_shape {
  int32_t ndim;
  uint32_t dtypes;    /* admissible set */
  uint32_t preferred; /* the one a caller gets who asks "which dtype?" */
  int64_t dim[RLK_MAX_RANK];
} rlk_shape;

typedef struct rlk_op_schema {
  uint32_t struct_size;
  uint32_t version;
  const char* name;
  /** Comma separated, "" for none. An alias may set attributes, so that it means what its name means
   * elsewhere: "rope_i:pairing=adjacent,rope_thd:layout=bshd". The typed alias function and rlk_args_new
   * apply them. */
  const char* aliases;
  const char* doc; /* one line */
  const rlk_argument* arguments;
  uint32_t num_arguments;
  const rlk_attribute* attributes;
  uint32_t num_attributes;
  const char* backward; /* op that gives the gradients; NULL: not differentiable */
  /** Checks what the tables cannot say (shapes against each other) and fills shapes[i] for every written
   * argument i. Rank, dtype, presence, device and null data are checked before. Returns RLK_OK or
   * host->fail(...). Written slots may be NULL here: infer must not read them. The only data that infer, or
   * an implementation's supports, may read are those of RLK_HOST arguments, and these are NULL where only
   * shapes are asked about (rlk_infer, rlk_resolve_json): accept them then. */
  int32_t (*infer)(const rlk_slot* slots, rlk_shape* shapes, const rlk_host* host);
  /** In place only where declared: pairs "out=x" of arguments that may be the very same bytes; "" for none.
   */
  const char* may_alias;
} rlk_op_schema;

/* ---- implementations ------------------------------------------------------------------------------------
 */

enum {                                  /* traits */
       RLK_DETERMINISTIC = 1u << 0,     /* run to run equal bits */
       RLK_BATCH_INVARIANT = 1u << 1,   /* Axis-A holds */
       RLK_CAPTURE_SAFE = 1u << 2,      /* may run while a graph is captured */
       RLK_STRICT = 1u << 3,            /* immune to ambient switches (environment, global math modes) */
       RLK_GOLDEN = 1u << 4,            /* the golden arithmetic of its op */
       RLK_WORKSPACE_OPTIONAL = 1u << 5 /* runs with less workspace than it asks for: slower, the same bits */
};

/** Instruction sets of a CPU, each with all before it: what this process may use, the processor's own or less
 * where the variable RLK_CPU says so. Code for a level runs only where the level is at least that: by
 * min_arch of the implementation, or, inside one implementation, by arch of the request's and the call's
 * device. */
enum {
  RLK_CPU_BASELINE = 10, /* what every processor of the platform has */
  RLK_CPU_AVX2 = 20,     /* with FMA and F16C */
  RLK_CPU_AVX512 = 30,   /* F, BW, DQ, VL */
  RLK_CPU_AVX512BF16 = 35,
  RLK_CPU_AMX = 40 /* tiles and bf16, and the system's leave to use them */
};

typedef struct rlk_device {
  int32_t type; /* DLDeviceType */
  int32_t id;
  int32_t arch; /* CUDA: compute capability * 10 (90); HIP: gfx number in hex; CPU: RLK_CPU_BASELINE ...,
                   which the library fills in where a backend leaves 0 */
  char name[64];
} rlk_device;

typedef enum rlk_precision {
  RLK_PRECISION_STANDARD = 0,
  RLK_PRECISION_STRICT = 1,
  RLK_PRECISION_GOLDEN = 2
} rlk_precision;

/** What supports() and workspace() may look at beside the slots. Never contents of tensors. */
typedef struct rlk_request {
  uint32_t struct_size;
  int32_t precision; /* rlk_precision */
  rlk_device device;
  uint32_t needs_backward;
  int32_t threads;
} rlk_request;

/** Accepted (code 0), or why not: a format whose {0}..{3} stand for v[0]..v[3]. Strings are static. */
typedef struct rlk_verdict {
  int32_t code;
  int32_t argument;    /* index of the slot it is about, -1: none */
  const char* why;     /* "K={0} is not a multiple of {1}" */
  const char* nearest; /* smallest change that would be accepted: "pad K to {2}"; may be NULL */
  int64_t v[4];
} rlk_verdict;

/** Everything about one run that is not an argument of the op. */
typedef struct rlk_call {
  uint32_t struct_size;
  int32_t precision;
  const rlk_host* host;
  void* stream;
  void* workspace;
  uint64_t workspace_bytes;
  const rlk_device* device;
  int32_t threads;
  uint32_t needs_backward;
} rlk_call;

typedef struct rlk_implementation {
  uint32_t struct_size;
  int32_t priority; /* bands: 0 reference, 100 portable, 200 vendor library, 300 tuned */
  const char* op;
  const char* id; /* "<backend>.<variant>" */
  const char* doc;
  const char* arithmetic; /* one arithmetic id for all its dtypes */
  uint32_t dtypes;        /* dtypes of the op's first argument it takes */
  uint32_t traits;
  int32_t device_type;        /* DLDeviceType */
  int32_t min_arch, max_arch; /* of rlk_device::arch; 0, 0: any */
  /** Pure, fast, noexcept. NULL accepts everything that passes the tables. */
  rlk_verdict (*supports)(const rlk_slot* slots, const rlk_request* request);
  /** Bytes of workspace it needs, or makes use of where optional; NULL: none. Must not depend on addresses.
   */
  uint64_t (*workspace)(const rlk_slot* slots, const rlk_request* request);
  /** RLK_OK or host->fail(...). Never allocates device memory. */
  int32_t (*run)(const rlk_slot* slots, const rlk_call* call);
} rlk_implementation;

/* ---- the host's services and the backend's description ----------------------------------------------------
 */

struct rlk_host {
  uint32_t struct_size;
  uint32_t abi_minor;
  /** Stores the text as the calling thread's failure and returns code: `return host->fail(RLK_..., text);`
   * NULL: no reason is given. */
  int32_t (*fail)(int32_t code, const char* text);
  /** A log line; level as in rlk_log_sink. NULL logs nothing. */
  void (*log)(int32_t level, const char* text);
  /** Runs body(context, i) for i in [0, n) on up to `threads` threads (0: all); returns when all are done. */
  void (*parallel_for)(int32_t threads, int64_t n, void (*body)(void* context, int64_t i), void* context);
  /** RLK_CPU_BASELINE ...: what code may use now, for callers that have no device at hand (in query, or to
   * hold a vendor library to it). Read only if struct_size covers it. */
  int32_t (*cpu_level)(void);
};

/** Optional: lets the harness and the tools put tensors on the backend's devices, so that anybody can verify
 * and time its implementations there without linking a GPU library. Any function may be NULL; what needs it
 * is then reported as not covered. All return RLK_OK or host->fail(...), and wait for their work unless a
 * stream is given. Not for hot paths: ops never call these. */
typedef struct rlk_device_services {
  uint32_t struct_size;
  /** At least 256-byte aligned. */
  int32_t (*allocate)(const rlk_device* device, uint64_t bytes, void** out);
  int32_t (*release)(const rlk_device* device, void* data);
  /** Host memory is pageable; both return when the bytes are there. */
  int32_t (*copy_in)(const rlk_device* device, void* to_device, const void* from_host, uint64_t bytes);
  int32_t (*copy_out)(const rlk_device* device, void* to_host, const void* from_device, uint64_t bytes);
  /** Waits for one stream (NULL: the default stream). */
  int32_t (*synchronize)(const rlk_device* device, void* stream);
  int32_t (*stream_create)(const rlk_device* device, void** stream);
  int32_t (*stream_destroy)(const rlk_device* device, void* stream);
  /** Between begin and end, work given to the stream is recorded instead of run. */
  int32_t (*capture_begin)(const rlk_device* device, void* stream);
  int32_t (*capture_end)(const rlk_device* device, void* stream, void** graph);
  int32_t (*graph_launch)(const rlk_device* device, void* graph, void* stream);
  int32_t (*graph_destroy)(const rlk_device* device, void* graph);
  /** One line of versions a certificate must name: driver, runtime, vendor libraries. */
  int32_t (*describe)(const rlk_device* device, char* out, size_t size);
} rlk_device_services;

typedef struct rlk_backend {
  uint32_t struct_size;
  uint32_t abi_major, abi_minor;
  const char* name;    /* "cuda"; must match the file name */
  const char* version; /* of the backend */
  const char* doc;     /* one line: libraries and versions it uses */
  const rlk_implementation* const* implementations;
  uint32_t num_implementations;
  const rlk_op_schema* const* ops; /* ops it adds */
  uint32_t num_ops;
  /** Fills up to capacity devices it can run on and returns their number; 0 with a reason when there is none.
   */
  int32_t (*devices)(rlk_device* out, int32_t capacity, char* reason, size_t reason_size);
  /** Called once before its first run: load what is slow here, not in query. NULL: nothing to do. */
  int32_t (*activate)(const rlk_host* host);
  /** NULL: none, as for backends on the CPU. Read only if struct_size covers it. */
  const rlk_device_services* services;
} rlk_backend;

/** Registers a backend that is linked into the program instead of loaded from a file. All or nothing: a clash
 * of names is an error that names both origins, and nothing of the backend is kept. The tables must live for
 * ever. */
RLK_API rlk_code rlk_register_backend(const rlk_backend* backend, const char* origin);
/** What rlk_host::cpu_level gives, for programs that link the library. */
RLK_API int32_t rlk_cpu_level(void);
/** The size of an rlk_backend before `services` was added: the smallest that is taken. */
#define RLK_BACKEND_MIN_SIZE offsetof(rlk_backend, services)

typedef const rlk_backend* (*rlk_backend_query_fn)(uint32_t host_abi_major, const rlk_host* host);

#ifdef __cplusplus
}
#endif

#endif
