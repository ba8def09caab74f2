// The part of DLPack 1.x that rlk/dlpack.h, which has only what never changed, leaves out: owned tensors with a version,
// and the table of functions by which a framework hands out views of its tensors, its allocator and its stream.
#pragma once

#include <cstdint>

#include "rlk/dlpack.h"

namespace rlk::python {

struct ManagedTensor {  // DLManagedTensor, in a capsule "dltensor"
  DLTensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

struct DlpackVersion {
  uint32_t major, minor;
};

struct ManagedTensorVersioned {  // in a capsule "dltensor_versioned"
  static constexpr uint64_t kReadOnly = 1;
  DlpackVersion version;
  void* context;
  void (*deleter)(ManagedTensorVersioned*);
  uint64_t flags;
  DLTensor tensor;
};

// The type attribute __dlpack_c_exchange_api__ is a capsule "dlpack_exchange_api" of this. Functions return 0, or -1 with a
// Python exception set (allocate says it through its callback).
struct ExchangeApi {
  DlpackVersion version;
  ExchangeApi* earlier;
  int (*allocate)(DLTensor* prototype, ManagedTensorVersioned** out, void* context,
                  void (*set_error)(void* context, const char* kind, const char* message));
  int (*from_object)(void* object, ManagedTensorVersioned** out);
  int (*to_object)(ManagedTensorVersioned* tensor, void** out);
  int (*view_of_object)(void* object, DLTensor* out);  // may be null
  int (*current_stream)(DLDeviceType type, int32_t id, void** out);
};

}  // namespace rlk::python
