/* DLTensor and friends: the system's DLPack header where there is one, else the same layout spelled here.
 * rlk uses only the types that have not changed since DLPack 0.6. */
#ifndef RLK_DLPACK_H
#define RLK_DLPACK_H

#if defined(__has_include)
#  if __has_include(<dlpack/dlpack.h>)
#    define RLK_SYSTEM_DLPACK 1
#  endif
#endif

#ifdef RLK_SYSTEM_DLPACK
#  include <dlpack/dlpack.h>
#elif !defined(DLPACK_DLPACK_H_)
#  define DLPACK_DLPACK_H_
#  include <stdint.h>
typedef enum {
  kDLCPU = 1,
  kDLCUDA = 2,
  kDLCUDAHost = 3,
  kDLROCM = 10,
  kDLROCMHost = 11,
  kDLCUDAManaged = 13
} DLDeviceType;
typedef struct {
  DLDeviceType device_type;
  int32_t device_id;
} DLDevice;
typedef enum {
  kDLInt = 0U,
  kDLUInt = 1U,
  kDLFloat = 2U,
  kDLOpaqueHandle = 3U,
  kDLBfloat = 4U,
  kDLComplex = 5U
} DLDataTypeCode;
typedef struct {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
} DLDataType;
typedef struct {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
} DLTensor;
#endif

#endif
