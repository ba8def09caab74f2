// The part of XLA's foreign function interface (jaxlib's xla/ffi/api/c_api.h, major version 0) that a handler of calls
// needs, so that building takes no jaxlib. Every struct says its size first, and grows only behind what is here.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rlk::python::xla {

struct Extension {
  std::size_t struct_size;
  int type;
  Extension* next;
};
inline constexpr int kMetadataExtension = 1;

struct Head {
  std::size_t struct_size;
  Extension* extension;
};

struct Version {
  Head head;
  int major, minor;
};

// What a handler is asked for once, when it is registered.
struct Metadata {
  std::size_t struct_size;
  Version version;
  uint32_t traits;
  int64_t state_type;
};
struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

enum DataType { pred = 1, s32 = 4, s64 = 5, u8 = 6, f16 = 10, f32 = 11, f64 = 12, bf16 = 16 };

struct Buffer {  // dense, the last axis runs fastest
  Head head;
  int dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
};
struct Bytes {
  const char* data;
  std::size_t size;
};
struct Array {
  int dtype;
  std::size_t size;
  void* data;
};

struct Buffers {
  Head head;
  int64_t size;
  int* types;
  Buffer** buffers;
};
struct Attributes {  // in the order of their names
  Head head;
  int64_t size;
  int* types;
  Bytes** names;
  void** values;
};
enum AttributeType { array = 1, string = 4 };

struct Error;
enum ErrorCode { invalid_argument = 3, resource_exhausted = 8, unimplemented = 12, internal = 13 };
struct ErrorArguments {
  Head head;
  const char* message;
  int code;
};

struct Api {
  Head head;
  Version version;
  const void* internal;
  Error* (*make_error)(ErrorArguments*);
};

inline constexpr int kExecute = 3;

struct Frame {
  Head head;
  const Api* api;
  void* context;
  int stage;
  Buffers inputs, results;
  Attributes attributes;
};

}  // namespace rlk::python::xla
