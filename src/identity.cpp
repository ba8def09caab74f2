#include "src/identity.hpp"

#include <fmt/format.h>

#include <fstream>
#include <iterator>

#include "src/build_id.hpp"
#include "src/machine.hpp"
#include "src/sha256.hpp"

namespace rlk {
namespace {

std::string cpu_model() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  return "unknown processor";
}

}  // namespace

std::string library_build() {
  static const int anchor = 0;
  return fmt::format("{:016x}", build_id_of(&anchor));
}

std::string build_of(const Backend& backend) {
  if (backend.build_id) return fmt::format("{:016x}", backend.build_id);
  std::ifstream file(backend.origin, std::ios::binary);
  if (backend.origin.empty() || backend.origin.front() != '/' || !file) return {};
  return "sha256:" + sha256(std::string(std::istreambuf_iterator<char>(file), {}));
}

std::string device_text(const rlk_device& device) {
  static const std::string cpu = cpu_model();
  return device.type == kDLCPU ? cpu : device.name;
}

std::string level_text(const rlk_device& device) {
  return device.type == kDLCPU ? cpu_word(cpu_level()) : "";
}

std::string versions_text(const Backend& backend, const rlk_device& device) {
  const rlk_device_services* services = device.type == kDLCPU ? nullptr : backend.services();
  char text[512] = "";
  if (!services || !services->describe || services->describe(&device, text, sizeof text) != RLK_OK) return {};
  return text;
}

}  // namespace rlk
