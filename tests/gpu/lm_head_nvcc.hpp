// One product of host memory on a GPU: what the test, compiled by the host compiler, asks of nvcc's side.
#pragma once

#include <cstddef>

#include "simt/lm_head/product.hpp"

struct Bytes {
  std::size_t a, b, out, bias;
};

// Copies in, runs, copies out; null, or what went wrong.
const char* run_on_gpu(rlk::simt::lm_head::Product p, const Bytes& bytes, rlk::simt::lm_head::Sum sum);
bool gpu_is_here();
