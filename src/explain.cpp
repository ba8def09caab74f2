// A resolution in words: as text for people, as JSON for programs.
#include <fmt/format.h>

#include <algorithm>

#include "rlk/printable.hpp"
#include "src/check.hpp"
#include "src/introspect.hpp"
#include "src/json.hpp"
#include "src/messages.hpp"
#include "src/resolve.hpp"

namespace rlk {
namespace {

// Makes the smallest change concrete where the verdict's fixed text cannot.
std::string smallest_change(const Candidate& c) {
  if (!c.implementation) return verdict_text(c.verdict.nearest, c.verdict.v);
  const rlk_implementation& i = *c.implementation;
  if (c.verdict.nearest == kNearestDevice)
    return fmt::format("put the tensors on {}", device_name(i.device_type));
  if (c.verdict.nearest == kNearestDtype) return fmt::format("use {}", dtype_set_text(i.dtypes));
  if (c.verdict.nearest == kNearestArithmetic) return fmt::format("require arithmetic '{}'", i.arithmetic);
  if (c.verdict.code != RLK_OK && !c.verdict.nearest)
    return "change what the reason names; no nearer value is known";
  return verdict_text(c.verdict.nearest, c.verdict.v);
}

// What is true of one candidate. left_out: a rule kept it from being asked; later: it would serve, others
// come first.
enum class Standing { chosen, later, left_out, refused, unusable };
constexpr const char* kStandings[] = {"chosen", "accepted", "left out", "refused", "unusable"};

struct Description {
  Standing standing;
  std::string reason, nearest;
};

Description describe(const Resolution& r, const Candidate& c) {
  if (!c.implementation || c.verdict.code == RLK_PLUGIN) return {Standing::unusable, c.reason(), c.nearest()};
  if (c.implementation == r.implementation()) return {Standing::chosen, "", ""};
  const std::string named = fmt::format("RLK_BACKEND='{}={}'", r.op()->name, c.id);
  if (c.verdict.code == RLK_OK) return {Standing::later, "would serve this call, others come first", named};
  if (c.verdict.code == RLK_CONFIGURATION)
    return {Standing::left_out, fmt::format("left out by {}", r.decided_by()), named};
  return {Standing::refused, c.reason(), c.nearest()};
}

}  // namespace

std::string verdict_text(const char* format, const int64_t* v) {
  std::string text;
  for (const char* p = format ? format : ""; *p; ++p) {
    if (p[0] == '{' && p[1] >= '0' && p[1] <= '3' && p[2] == '}') {
      text += std::to_string(v[p[1] - '0']);
      p += 2;
    } else {
      text += *p;
    }
  }
  return printable(text);
}

std::string Candidate::reason() const {
  if (!implementation) return std::string(state);
  if (verdict.code == RLK_OK) return "accepted";
  return verdict.why ? verdict_text(verdict.why, verdict.v) : "it gives no reason";
}
std::string Candidate::nearest() const { return smallest_change(*this); }

std::string Resolution::explain() const {
  if (candidates_.empty()) return fmt::format("error     {}\n", status_.message());
  std::size_t width = 0;
  for (const Candidate& c : candidates_) width = std::max(width, c.id.size());
  std::string text;
  if (chosen_)
    text += fmt::format("{:<9} {:<{}}  arithmetic {}   decided by: {}\n", "chosen", chosen_->id, width,
                        chosen_->arithmetic, decided_by());
  else
    text += fmt::format("{:<9} nothing: {}\n", "chosen", status_.message());
  for (const Candidate& c : candidates_) {
    const Description d = describe(*this, c);
    if (d.standing != Standing::chosen)
      text += fmt::format("{:<9} {:<{}}  {}{}{}\n", kStandings[static_cast<int>(d.standing)], c.id, width,
                          d.reason, d.nearest.empty() ? "" : "   nearest: ", d.nearest);
  }
  return text;
}

std::string Resolution::json() const {
  JsonArray candidates;
  for (const Candidate& c : candidates_) {
    const Description d = describe(*this, c);
    const rlk_implementation* i = c.implementation;
    candidates.raw(JsonObject()
                       .text("id", c.id)
                       .text("standing", kStandings[static_cast<int>(d.standing)])
                       .flag("accepted", i && c.verdict.code == RLK_OK)
                       .flag("chosen", i && i == chosen_)
                       .text("arithmetic", i ? i->arithmetic : "")
                       .text("reason", d.reason)
                       .text("nearest", d.nearest)
                       .str());
  }
  return JsonObject()
      .number("schema", kJsonSchema)
      .text("op", op_ ? op_->name : "")
      .text("chosen", id())
      .text("arithmetic", arithmetic())
      .text("decided_by", decided_by())
      .text("error", status_.message())
      .number("code", static_cast<int>(status_.code()))
      .text("fingerprint", fmt::format("{:016x}", fingerprint_))
      .flag("capture_safe", chosen_ && chosen_->traits & RLK_CAPTURE_SAFE)
      .raw("candidates", candidates.str())
      .str();
}

}  // namespace rlk
