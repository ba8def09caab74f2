// The body of each chunk_<isa>.cpp: an Engine on packs of the given type.
#pragma once

#include "arithmetic/kda/segments.hpp"
#include "arithmetic/kda/step.hpp"
#include "native/kda/chunk.hpp"
#include "native/kda/decode.hpp"
#include "native/kda/team.hpp"

namespace rlk::native::kda {

template <class L, int Width>
constexpr Engine engine(const char* isa) {
  using Team = CpuTeam<L, Width>;
  return {isa,
          [](const Problem& p, std::int64_t task, float* scratch) {
            Team team;
            chunked::forward(team, p, task, scratch);
          },
          [](const Problem& p, std::int64_t task, float* scratch, double* partials) {
            Team team;
            chunked::backward(team, p, task, scratch, partials);
          },
          [](const Problem& p, const double* partials) {
            Team team;
            for (int hv = 0; hv < p.value_heads; ++hv) chunked::finish(team, p, hv, partials);
          },
          decode::step<Team>,
          [](const Step& p, std::int64_t task, float* scratch) {
            Team team;
            chunked::step(team, p, task, scratch);
          },
          decode::gate<Team>,
          decode::gate_backward<Team>,
          [](const Problem& p, std::int64_t task, float* scratch, float* maps) {
            Team team;
            chunked::map_segment(team, p, task, scratch, maps);
          },
          [](const Problem& p, std::int64_t task, float* scratch, float* maps) {
            Team team;
            chunked::join_segments(team, p, task, scratch, maps);
          },
          [](const Problem& p, std::int64_t task, float* scratch, const float* maps) {
            Team team;
            chunked::run_segment(team, p, task, scratch, maps);
          },
          [](const Problem& p, std::int64_t task, float* scratch, float* ends) {
            Team team;
            chunked::map_segment_back(team, p, task, scratch, ends);
          },
          [](const Problem& p, std::int64_t task, float* scratch, const float* maps, float* ends) {
            Team team;
            chunked::join_segments_back(team, p, task, scratch, maps, ends);
          },
          [](const Problem& p, std::int64_t task, float* scratch, const float* maps, const float* ends,
             double* partials) {
            Team team;
            chunked::run_segment_back(team, p, task, scratch, maps, ends, partials);
          }};
}

}  // namespace rlk::native::kda
