#include "native/kda/chunk.hpp"
#include "native/kda/engine.hpp"

namespace rlk::native::kda {

constinit const Engine kPortable = engine<simt::Float4, 4>("portable");

std::int64_t forward_task_count(const Problem& p) { return chunked::forward_tasks(p); }
std::int64_t backward_task_count(const Problem& p) { return chunked::backward_tasks(p); }
std::size_t forward_scratch_bytes(const Problem& p) {
  return std::size_t(chunked::forward_floats(p)) * sizeof(float);
}
std::size_t backward_scratch_bytes(const Problem& p) {
  return std::size_t(chunked::backward_floats(p)) * sizeof(float);
}
std::size_t step_scratch_bytes(const Step& p) { return std::size_t(chunked::step_floats(p)) * sizeof(float); }

std::int64_t gate_block_count(const Problem& p) { return rlk::kda::decode::gate_blocks(p); }

SegmentSizes segment_sizes(const Problem& p) {
  const chunked::Segments all{p};
  const auto bytes = [](std::int64_t floats) { return std::size_t(floats) * sizeof(float); };
  return {all.maps(),
          all.pieces(),
          bytes(chunked::segment_floats(p)),
          bytes(chunked::segment_back_floats(p)),
          bytes(chunked::all_map_floats(p)),
          bytes(chunked::all_end_floats(p))};
}

std::size_t partials_bytes(const Problem& p) {
  return sizeof(double) * 2 * std::size_t(p.sequences) * std::size_t(p.value_heads) * std::size_t(p.k_dim);
}

}  // namespace rlk::native::kda
