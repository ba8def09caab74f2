// --bench OP: times every implementation that takes the call, on the CPU, with shapes from --shape or the
// op's example. Quick figures to choose by; tools/bench measures against the machine's peaks.
#include <algorithm>
#include <chrono>
#include <cstdio>

#include "call.hpp"
#include "commands.hpp"
#include "table.hpp"

namespace rlk::cli {
namespace {

double milliseconds_of(const rlk_args* args, const rlk_options& options) {
  const auto start = std::chrono::steady_clock::now();
  check(rlk_run(args, &options));
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

struct Timing {
  double fastest = 0, median = 0;
  int64_t runs = 0;
};

// Warms up once, then runs for half a second, and at least five times unless that takes long.
Timing time(const rlk_args* args, const rlk_options& options) {
  milliseconds_of(args, options);
  std::vector<double> each;
  for (double spent = 0; spent < 500 || (each.size() < 5 && spent < 3000); spent += each.back())
    each.push_back(milliseconds_of(args, options));
  std::sort(each.begin(), each.end());
  return {each.front(), each[each.size() / 2], static_cast<int64_t>(each.size())};
}

std::string three_digits(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", x);
  return text;
}

}  // namespace

int bench(const Options& options) {
  check_configuration();
  if (device_from(options.device).device_type != kDLCPU)
    throw Failure(kUsage,
                  "--bench: runs on cpu, not on '" + options.device + "'; tools/bench has what times GPUs");
  ImaginedCall call(options);
  call.give_memory();
  rlk_options base{};
  base.struct_size = sizeof base;
  const Json resolution = parse(rlk_resolve_json(call.args(), &base));
  Json timings = Json::array();
  for (const Json& candidate : resolution["candidates"]) {
    const std::string id = candidate["id"], standing = candidate["standing"];
    if (standing != "chosen" && standing != "accepted") continue;
    if (!options.implementation.empty() && id != options.implementation) continue;
    rlk_options chosen = base;
    chosen.backend = id.c_str();
    const Timing t = time(call.args(), chosen);
    timings.push_back({{"id", id},
                       {"arithmetic", candidate["arithmetic"]},
                       {"fastest_ms", t.fastest},
                       {"median_ms", t.median},
                       {"runs", t.runs}});
  }
  if (timings.empty())
    throw Failure(kNoImplementation,
                  "--bench: no implementation takes this call; --explain " + options.op + " says why");
  if (options.json) {
    print(
        {{"schema", resolution["schema"]}, {"op", options.op}, {"call", call.text()}, {"timings", timings}});
    return kGood;
  }
  std::printf("call      %s on cpu\n", call.text().c_str());
  Table table({"implementation", "arithmetic", "fastest ms", "median ms", "runs"});
  for (const Json& t : timings)
    table.row({t["id"], t["arithmetic"], three_digits(t["fastest_ms"]), three_digits(t["median_ms"]),
               std::to_string(t["runs"].get<int64_t>())});
  table.print();
  return kGood;
}

}  // namespace rlk::cli
