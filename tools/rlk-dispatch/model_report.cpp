// A model's certificate as one self-contained page: path x layer, where rows differ as a plot beside each path, speed, and
// every op with its arithmetic and digest.
#include <algorithm>
#include <cmath>

#include "commands.hpp"
#include "library.hpp"
#include "page.hpp"

namespace rlk::cli {
namespace {

std::string text(const Json& j, const char* member) { return escaped(j.at(member).get<std::string>()); }

// The share of rows that differ after each op, in the order of the model, on a logarithmic scale: one row in a
// million still shows.
std::string plot(const Json& ops) {
  const auto n = static_cast<double>(std::max<std::size_t>(ops.size(), 1));
  std::string out = "<svg class=mini viewBox='0 0 128 30' role=img aria-label='rows that differ, op by op'>";
  double at = 0;
  for (const Json& op : ops) {
    const double share = real(op.at("differ")) / std::max(1.0, real(op.at("rows")));
    const double height = share > 0 ? std::max(2.0, 28 * (1 + std::log10(share) / 6)) : 0;
    out += "<rect x='" + number(128 * at / n, "%.2f") + "' y='" + number(29 - height, "%.1f") + "' width='" +
           number(std::max(0.5, 110 / n), "%.2f") + "' height='" + number(height, "%.1f") +
           "' fill='var(--bad)'><title>" + text(op, "layer") + " " + text(op, "op") + ": " +
           number(real(op.at("differ")), "%.0f") + " of " + number(real(op.at("rows")), "%.0f") +
           " rows differ</title></rect>";
    ++at;
  }
  return out + "<line x1='0' x2='128' y1='29.5' y2='29.5' stroke='var(--line)'/></svg>";
}

std::string bar(double value, double most) {
  return "<svg class=mini viewBox='0 0 128 30' role=img aria-label='tokens a second'><rect x='0' y='8' "
         "height='14' "
         "width='" +
         number(most > 0 ? 128 * value / most : 0, "%.1f") + "' fill='var(--bar)'/></svg>";
}

std::string table(const Json& c, const char* title) {
  std::string out =
      std::string("<h2>") + title +
      "</h2><p class=quiet>Every path against the trainer's packed forward. Plot: the share (log) of rows "
      "that differ, op by op; an empty line is none.</p><div class=scroll><table><tr><th>path<th>rows that "
      "differ";
  const Json& paths = c.at("paths");
  if (!paths.empty())
    for (const auto& [layer, verdict] : paths[0].at("layers").items()) out += "<th>" + escaped(layer);
  out += "<th>max |d logp|<th>tokens/s<th></tr>\n";
  double most = 0;
  for (const Json& p : paths) most = std::max(most, real(p.at("tokens_per_second")));
  for (const Json& p : paths) {
    out += "<tr><td>" + text(p, "path") + "<td>" + plot(p.at("ops"));
    for (const auto& [layer, verdict] : p.at("layers").items()) {
      const auto word = verdict.get<std::string>();
      out += word == "same" ? "<td class=good>&#10003;" : "<td class=bad>" + escaped(word);
    }
    const Json& apart = p.at("d_logp");
    const double speed = real(p.at("tokens_per_second"));
    out += "<td>" + (apart.is_null() ? "-" : number(real(apart), "%.2g")) + "<td>" + number(speed, "%.0f") +
           "<td>" + bar(speed, most) + "</tr>\n";
  }
  return out + "</table></div>";
}

std::string digests(const Json& c) {
  std::string out =
      "<h2>What the reference left</h2><div "
      "class=scroll><table><tr><th>layer<th>result<th>arithmetic<th>digest</tr>\n";
  for (const Json& d : c.at("digests"))
    out += "<tr><td>" + text(d, "layer") + "<td>" + text(d, "op") + "<td>" + text(d, "arithmetic") +
           "<td><code>" + text(d, "digest") + "</code></tr>\n";
  return out + "</table></div>";
}

// Every op of a packed forward, computed again on the CPU by the same arithmetic; none where that was not tried.
std::string replayed(const Json& c) {
  const auto found = c.find("replay");
  if (found == c.end() || found->empty()) return {};
  std::string out =
      "<h2>Computed again on the CPU</h2><p class=quiet>Every call of a packed forward, by the same "
      "arithmetic.</p><div class=scroll><table><tr><th>op<th>arithmetic<th>calls<th>rows<th>rows that "
      "differ</tr>\n";
  for (const Json& op : *found) {
    const double differ = real(op.at("differ"));
    const auto refused = op.at("refused").get<std::string>();
    out += "<tr><td>" + text(op, "op") + "<td>" + text(op, "arithmetic") + "<td>" +
           number(real(op.at("calls")), "%.0f") + "<td>" + number(real(op.at("rows")), "%.0f");
    if (!refused.empty())
      out += "<td class=bad>not computed: " + escaped(refused);
    else
      out += differ > 0 ? "<td class=bad>" + number(differ, "%.0f") : "<td class=good>&#10003; none";
    out += "</tr>\n";
  }
  return out + "</table></div>";
}

}  // namespace

std::string model_report_page(const std::string& certificate) {
  const Json c = Json::parse(certificate);
  const bool good = c.at("good").get<bool>();
  std::string out = page_head("rlk model");
  out += "<h1>" + text(c, "model") + ": " +
         (good ? "<span class=good>every path has the same bits</span>"
               : "<span class=bad>paths differ</span>") +
         "</h1>";
  out += "<p>rlk " + text(c, "version") + ", " + text(c, "dtype") + " on " + text(c, "device") + ", seed " +
         number(real(c.at("seed")), "%.0f") + ", digest <code>" + text(c, "digest") + "</code>.</p>";
  out += table(c, "Paths");
  if (const Json& peer = c.at("peer"); !peer.is_null())
    out += table(peer, "The control: the same model on PyTorch's own ops");
  return out + replayed(c) + digests(c) + "</html>\n";
}

}  // namespace rlk::cli
