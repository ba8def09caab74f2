// Plain copies on an NVIDIA GPU: what memory-bound ops are measured against. (The driver's own copy is no
// yardstick: at a gigabyte it was seen at two thirds of these.)
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

// 16-byte packs, `packs` (1 or 4) to a thread.
cudaError_t copy_packs(const void* from, void* to, std::int64_t bytes, int packs, cudaStream_t stream);

// Rows of `row_bytes` whose starts are `stride` bytes apart, on both sides; a thread has 16 bytes of each of
// `rows_each` (1 or 4) rows.
cudaError_t copy_rows(const void* from, void* to, std::int64_t rows, int row_bytes, std::int64_t stride,
                      int rows_each, cudaStream_t stream);
