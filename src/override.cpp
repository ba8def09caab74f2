#include "src/override.hpp"
namespace rlk {
Override Override::parse(std::string_view spec, std::string_view, const KnownNames&) {
  Override o;
  o.text_ = spec;
  return o;
}
const OverrideRule* Override::find(std::string_view, std::string_view) const noexcept { return nullptr; }
std::string_view nearest_name(std::string_view, const std::vector<std::string_view>&) { return {}; }
}  // namespace rlk
