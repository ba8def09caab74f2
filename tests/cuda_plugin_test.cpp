// labels: plugins
// links: registry
// The CUDA plugin wherever it is built or RLK_PLUGIN_PATH leads to it, with or without a GPU.
#include <doctest/doctest.h>

#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "rlk/rlk.hpp"

namespace {

nlohmann::json list(const char* what) {
  char* text = rlk_list_json(what);
  REQUIRE(text != nullptr);
  nlohmann::json parsed = nlohmann::json::parse(text);
  rlk_free(text);
  return parsed;
}

bool built() {
  if (std::filesystem::exists(std::string(RLK_TEST_BUILD) + "/lib/rlk/librlk_backend_cuda.so")) return true;
  // Carried to another machine: whatever the library finds there by itself.
  if (list("backends").dump().find("\"cuda\"") != std::string::npos) return true;
  std::puts("[skip] the CUDA backend is not part of this build");
  return false;
}

}  // namespace

TEST_CASE("the CUDA plugin loads without a driver and says why it cannot run") {
  if (!built()) return;
  const std::string all = list("backends").dump();
  REQUIRE_MESSAGE(all.find("\"cuda\"") != std::string::npos, all);
  CHECK_MESSAGE(all.find("load_failed") == std::string::npos, all);
  CHECK_MESSAGE(all.find("refused") == std::string::npos, all);
  // CUDA's own sentence for a missing driver speaks of an insufficient version.
  CHECK_MESSAGE(all.find("insufficient") == std::string::npos, all);
}

TEST_CASE(
    "asking for CUDA where no tensor is on a GPU is refused with a reason, not served by another backend") {
  if (!built()) return;
  float hidden[2 * 8] = {}, weight[4 * 8] = {}, out[2 * 4] = {};
  const rlk::Tensor h(hidden, {2, 8}, rlk::DType::f32), w(weight, {4, 8}, rlk::DType::f32),
      y(out, {2, 4}, rlk::DType::f32);
  const rlk::Status status = rlk::lm_head({.hidden = h, .weight = w, .out = y}, {.backend = "cuda"});
  CHECK_FALSE(status);
  CHECK(status.message().find("cuda") != std::string::npos);
}
