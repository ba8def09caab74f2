#include <fmt/format.h>

#include "rlk/harness.hpp"
#include "src/harness/certificate.hpp"
#include "src/sha256.hpp"
#include "src/text.hpp"

#if __has_include(<nlohmann/json.hpp>)
#  include <nlohmann/json.hpp>
#  define RLK_READS_JSON 1
#endif

namespace rlk::harness {

namespace {

// Without white space outside strings.
std::string dense(std::string_view text) {
  std::string out;
  bool inside = false, escaped = false;
  for (const char c : text) {
    if (!inside && (c == ' ' || c == '\n' || c == '\t' || c == '\r')) continue;
    out += c;
    if (c == '"' && !escaped) inside = !inside;
    escaped = inside && c == '\\' && !escaped;
  }
  return out;
}

}  // namespace

std::string certificate_digest(std::string_view text) { return "sha256:" + sha256(dense(text)); }

#ifdef RLK_READS_JSON
namespace {

using Json = nlohmann::json;

Status refuse(std::string text) { return {RLK_CONFIGURATION, std::move(text)}; }

Status check_digest(const std::string& text, const Json& all) {
  const auto at = text.rfind("\"digest\"");
  if (!all.contains("digest") || !all["digest"].is_string() || at == text.npos)
    return refuse("it has no digest");
  const std::string digest = certificate_digest(std::string_view(text).substr(0, at));
  // Nothing may stand behind it: a second "entries" there would be read in place of the first.
  if (dense(std::string_view(text).substr(at)) != fmt::format("\"digest\":\"{}\"}}", digest))
    return refuse("its contents are not what its digest says: it was changed after it was written");
  return {};
}

// What an entry's tallies come to; the text is empty when it is good.
std::string flaw_of(const Json& e) {
  const std::string who =
      fmt::format("{} {} {}", e.at("op").get<std::string>(), e.at("implementation").get<std::string>(),
                  e.at("dtype").get<std::string>());
  if (!e.at("complete").get<bool>()) return who + " was not tried whole";
  for (const Promise p : kPromises) {
    const Json& t = e.at("promises").at(name_of(p));
    if (!t.at("promised").get<bool>()) continue;
    if (t.at("failed").get<int64_t>() != 0) return fmt::format("{} broke a promise: {}", who, name_of(p));
    if (t.at("tried").get<int64_t>() <= 0)
      return fmt::format("{} promises what was not covered: {}", who, name_of(p));
  }
  return {};
}

Status check_contents(const Json& all) {
  if (all.at("entries").empty()) return refuse("it is empty: nothing was verified");
  std::string flaw;
  for (const Json& e : all.at("entries")) {
    const std::string of_entry = flaw_of(e);
    if (e.at("good").get<bool>() != of_entry.empty())
      return refuse("it contradicts itself: an entry's \"good\" is not what its promises come to");
    if (flaw.empty()) flaw = of_entry;
  }
  if (!all.at("complete").get<bool>()) return refuse("its run was cut short: it is not complete");
  if (all.at("restricted").get<bool>()) return refuse("its run was of one case or transform only");
  if (!all.at("failures").empty())
    return refuse(fmt::format("promises were broken: {}", all["failures"][0].get<std::string>()));
  if (!flaw.empty()) return refuse(flaw);
  if (!all.at("missing").empty()) return refuse(all["missing"][0].get<std::string>());
  if (!all.at("good").get<bool>())
    return refuse("it contradicts itself: nothing is wrong and \"good\" is false");
  return {};
}

}  // namespace

Status check_certificate(const std::string& text) {
  const Json all = Json::parse(text, nullptr, false);
  if (all.is_discarded()) return refuse("it is not JSON");
  if (!all.is_object() || !all.contains("schema") || !all.contains("entries"))
    return refuse("it is not a certificate");
  const Json& schema = all["schema"];
  if (!schema.is_number_integer() || schema != kCertificateSchema)
    return refuse(fmt::format("its schema is {}, this version reads {}", rlk::quoted(schema.dump()),
                              kCertificateSchema));
  if (Status s = check_digest(text, all); !s) return s;
  try {
    return check_contents(all);
  } catch (const Json::exception&) {
    return refuse("it lacks members of a certificate, or has them with another type");
  }
}
#else
Status check_certificate(const std::string&) {
  return {RLK_UNSUPPORTED, "this build was made without a JSON reader"};
}
#endif

}  // namespace rlk::harness
