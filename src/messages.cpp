#include "src/messages.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "src/text.hpp"

namespace rlk {

std::string not_built(std::string_view backend) {
  return fmt::format("backend '{}' is known but not built into this installation", backend);
}

std::string not_loaded(std::string_view backend, bool refused, std::string_view why) {
  return fmt::format("backend '{}' is built but {}: {}", backend,
                     refused ? "was refused" : "could not be loaded", why);
}

std::string no_device(std::string_view backend, std::string_view why) {
  return fmt::format("backend '{}' is loaded but has no device: {}", backend, why);
}

std::string refused_request(std::string_view implementation, std::string_view why) {
  return fmt::format("{} refused this call: {}", implementation, why);
}

namespace {

std::string problem_of(Backend& backend) {
  switch (backend.state()) {
    case Backend::absent:
      return not_built(backend.name);
    case Backend::refused:
      return not_loaded(backend.name, true, backend.reason());
    case Backend::load_failed:
      return not_loaded(backend.name, false, backend.reason());
    case Backend::no_device:
      return no_device(backend.name, backend.reason());
    default:
      return {};
  }
}

std::string remedy_of(Backend& backend) {
  switch (backend.state()) {
    case Backend::absent: {
      std::string upper = backend.name;
      std::transform(upper.begin(), upper.end(), upper.begin(),
                     [](char c) { return c >= 'a' && c <= 'z' ? c - 32 : c; });
      return fmt::format("configure with -DRLK_WITH_{}=ON (./tools/install {} adds what that needs)", upper,
                         backend.name);
    }
    case Backend::refused:
    case Backend::load_failed:
      return fmt::format("rlk-dispatch --probe {} says more", quoted_path(backend.origin));
    case Backend::no_device:
      return "run on a machine with such a device and its driver";
    default:
      return {};
  }
}

}  // namespace

const Outage& outage_of(Backend& backend) {
  backend.outage_once_.run([&] { backend.outage_ = {problem_of(backend), remedy_of(backend)}; });
  return backend.outage_;
}

}  // namespace rlk
