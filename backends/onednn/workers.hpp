// This backend's workers: oneDNN at one thread, float mode at its default.
#pragma once

#include "onednn/products.hpp"
#include "rlk/workers.hpp"

namespace rlk::onednn {

using namespace workers;

struct Mode {
  const OneThread one;
  const DefaultFloatMode floats;
  Mode() {}
};

template <class Run>
void run_tasks(const Call& call, std::int64_t tasks, std::size_t scratch, std::size_t shared, Run run) {
  workers::run_tasks<Mode>(call, tasks, scratch, shared, run);
}

}  // namespace rlk::onednn
