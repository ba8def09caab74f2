// A certificate as one self-contained page: the matrix of promises, ULP histograms and error over the length
// of the sum as inline SVG. No script, no font, no request: it opens from a mail on a phone.
#include <algorithm>
#include <cmath>
#include <set>

#include "commands.hpp"
#include "library.hpp"
#include "page.hpp"

namespace rlk::cli {
namespace {

std::string cell(const Json& entry, const std::string& promise) {
  if (!entry["promises"].contains(promise)) return "<td class=quiet>-</td>";
  const Json& t = entry["promises"][promise];
  const auto tried = t["tried"].get<long>(), failed = t["failed"].get<long>();
  if (!tried && t["promised"].get<bool>())
    return "<td class=bad title='" + escaped(t["why"].get<std::string>()) + "'>not covered</td>";
  if (!tried) return "<td class=quiet title='" + escaped(t["why"].get<std::string>()) + "'>-</td>";
  if (!failed) return "<td class=good>&#10003; " + std::to_string(tried) + "</td>";
  if (!t["promised"].get<bool>()) return "<td class=quiet>" + std::to_string(failed) + " (not promised)</td>";
  return "<td class=bad>&#10007; " + std::to_string(failed) + " of " + std::to_string(tried) + "</td>";
}

std::string matrix(const Json& certificate) {
  std::set<std::string> promises;
  for (const Json& e : certificate["entries"])
    for (const auto& [name, tally] : e["promises"].items()) promises.insert(name);
  std::string out = "<h2>Promises</h2><div class=scroll><table><tr><th>";
  for (const std::string& p : promises) out += "<th>" + escaped(p);
  out += "</tr>\n";
  std::string op;
  for (const Json& e : certificate["entries"]) {
    const auto text = [&](const char* member) { return escaped(e[member].get<std::string>()); };
    if (op != text("op"))
      out += "<tr class=op><td>" + (op = text("op")) + "<td colspan=" + std::to_string(promises.size()) +
             "></tr>\n";
    out += "<tr><td>" + text("implementation") + " " + text("dtype") + " <small>" + text("arithmetic") +
           "</small></td>";
    for (const std::string& p : promises) out += cell(e, p);
    out += "</tr>\n";
  }
  return out + "</table></div>";
}

// Share of the elements at 0, 1, 2, 3-4, 5-8, ... ulp, on a logarithmic scale: rare ones are the interesting
// ones. Small, for a cell of a table: the numbers are in the titles.
std::string histogram(const Json& a) {
  constexpr const char* kLabels[] = {"0",   "1",   "2",   "4",  "8",  "16", "32", "64",
                                     "128", "256", "512", "1k", "2k", "4k", "8k", "more"};
  const double total = std::max(1.0, real(a["elements"]));
  std::string out = "<svg class=mini viewBox='0 0 112 30' role=img aria-label='ULP histogram'>";
  for (std::size_t i = 0; i < 16; ++i) {
    const double share = real(a["ulp_histogram"][i]) / total;
    const double height = share > 0 ? std::max(1.0, 28 * (1 + std::log10(share) / 7)) : 0;
    out += "<rect x='" + std::to_string(7 * i) + "' y='" + number(29 - height, "%.1f") +
           "' width='6' height='" + number(height, "%.1f") + "' fill='var(--bar)'><title>" +
           number(100 * share, "%.4g") + "% up to " + kLabels[i] + " ulp</title></rect>";
  }
  return out + "<line x1='0' x2='112' y1='29.5' y2='29.5' stroke='var(--line)'/></svg>";
}

// Worst error against the length of the sum, both logarithmic, with the bound as a dashed line.
std::string error_plot(const Json& a) {
  const Json& points = a["error_over_length"];
  const double bound = real(a["bound"]);
  double x0 = 1e300, x1 = 0, y0 = 1e300, y1 = bound;
  for (const Json& p : points) {
    const double x = real(p[0]), y = real(p[1]);
    x0 = std::min(x0, x), x1 = std::max(x1, x);
    if (y > 0 && std::isfinite(y)) y0 = std::min(y0, y), y1 = std::max(y1, y);
  }
  if (points.size() < 2 || y0 >= y1 || x0 <= 0 || x0 >= x1) return "";
  const auto place_x = [&](double x) { return 4 + 124 * std::log(x / x0) / std::log(x1 / x0); };
  const auto place_y = [&](double y) {
    return 27 - 24 * std::log(std::clamp(y, y0, y1) / y0) / std::log(y1 / y0);
  };
  std::string out = "<svg class=mini viewBox='0 0 132 30' role=img aria-label='error over length'>";
  if (bound > 0) {
    const std::string y = number(place_y(bound), "%.1f");
    out += "<line x1='0' x2='132' y1='" + y + "' y2='" + y + "' stroke='var(--bad)' stroke-dasharray='4 3'/>";
  }
  for (const Json& p : points)
    out += "<circle r='2' fill='var(--bar)' cx='" + number(place_x(real(p[0])), "%.1f") + "' cy='" +
           number(place_y(real(p[1])), "%.1f") + "'><title>length " + number(real(p[0]), "%.0f") + ": " +
           number(real(p[1])) + ", bound " + number(bound) + "</title></circle>";
  return out + "</svg>";
}

// Why a worst error may stand above its bound.
std::string reason(const Json& entry, const Json& a) {
  const Json& t = entry["promises"]["accuracy"];
  if (a["metric"] == "elementwise" || a["metric"] == "bits" || real(a["worst"]) <= real(a["bound"]))
    return "";
  if (t["failed"].get<long>()) return "<span class=bad>above its bound</span>";
  return "above the bound by the rounding of the result to " + escaped(a["dtype"].get<std::string>()) +
         ", which is allowed";
}

// Beside the ulps: why an element near zero may be many of them off.
std::string allowance(const Json& a) {
  std::string out = "ulp";
  if (const double peak = real(a["bound"]); peak > 0) out += " + " + number(peak) + " of the peak";
  if (const double absolute = real(a["bound_absolute"]); absolute > 0) out += " + " + number(absolute);
  return out;
}

std::string accuracy_table(const Json& certificate) {
  std::string out =
      "<h2>Distance from the reference</h2><p class=quiet>Bars: share (log) of the elements at 0, 1, 2, 4, "
      "... "
      "ulp from the truth. Points: worst error over the length of the sum (both log; dashed: the bound). "
      "Numbers on touch.</p><div "
      "class=scroll><table><tr><th>implementation<th>result<th>worst<th>bound<th>unit"
      "<th>99.9% within<th>exact<th>ulps<th>over length<th></tr>\n";
  std::string op;
  for (const Json& e : certificate["entries"])
    for (const Json& a : e["accuracy"]) {
      if (real(a["elements"]) == 0) continue;
      const auto text = [](const Json& j, const char* member) {
        return escaped(j[member].get<std::string>());
      };
      const bool allowed = a["metric"] == "elementwise";
      if (op != text(e, "op")) out += "<tr class=op><td>" + (op = text(e, "op")) + "<td colspan=9></tr>\n";
      out += "<tr><td>" + text(e, "implementation") + " " + text(e, "dtype") + " <small>" + text(e, "level") +
             "</small><td>" + text(a, "result") + " " + text(a, "dtype") + "<td>" + number(real(a["worst"])) +
             "<td>" + (allowed ? number(real(a["bound_ulps"])) : number(real(a["bound"]))) + "<td>" +
             (allowed ? allowance(a) : text(a, "metric")) + "<td>" + number(real(a["p99_9"])) + "<td>" +
             number(100 * real(a["share_at_0_ulp"])) + "%<td>" + histogram(a) + "<td>" + error_plot(a) +
             "<td>" + reason(e, a) + "</tr>\n";
    }
  return out + "</table></div>";
}

std::string list(const Json& lines, const char* title) {
  if (lines.empty()) return "";
  std::string out = std::string("<h2>") + title + "</h2><ul>";
  for (const Json& line : lines) out += "<li><code>" + escaped(line.get<std::string>()) + "</code>";
  return out + "</ul>";
}

std::string coverage(const Json& certificate) {
  std::string out =
      "<h2>Covered</h2><div class=scroll><table><tr><th>op<th>implementation<th>dtype<th>variants by "
      "dimension<th>order of addition</tr>";
  for (const Json& e : certificate["entries"]) {
    std::string dimensions, order;
    for (const auto& [name, n] : e["covered"].items())
      dimensions += (dimensions.empty() ? "" : ", ") + name + " " + std::to_string(n.get<long>());
    for (const Json& o : e["order"])
      if (!o["by_rows"].empty())
        order += o["by_rows"][0]["tree"].get<std::string>() +
                 (o["equal_for_all_rows"].get<bool>() ? " for every M " : " CHANGES with M ");
    out += "<tr><td>" + escaped(e["op"].get<std::string>()) + "<td>" +
           escaped(e["implementation"].get<std::string>()) + "<td>" + escaped(e["dtype"].get<std::string>()) +
           "<td>" + escaped(dimensions) + "<td>" + escaped(order) + "</tr>\n";
  }
  return out + "</table></div>";
}

std::string verdict(const Json& c) {
  if (c["good"].get<bool>()) return "<span class=good>all promises kept</span>";
  std::string out = c["failures"].empty() ? "not good" : "promises broken";
  if (!c["complete"].get<bool>()) out += ", partial";
  if (c["restricted"].get<bool>()) out += ", one case or transform only";
  return "<span class=bad>" + out + "</span>";
}

}  // namespace

std::string report_page(const std::string& certificate_text) {
  const Json c = Json::parse(certificate_text);
  std::string out = page_head("rlk verification");
  out += "<h1>rlk verification: " + verdict(c) + "</h1>";
  const Json& h = c["host"];
  out += "<p>rlk " + escaped(c["rlk"].get<std::string>()) + ", build " +
         escaped(c["build"].get<std::string>()) + ", seed " + std::to_string(c["seed"].get<unsigned long>()) +
         ", " + number(real(c["seconds"]), "%.1f") + " s. " + escaped(h["cpu"].get<std::string>()) + ", " +
         escaped(h["level"].get<std::string>()) + ", " + escaped(h["system"].get<std::string>()) + ", " +
         std::to_string(h["threads"].get<long>()) + " threads.</p>";
  if (const std::size_t caught = c["mutants_caught"].size())
    out += "<p>This program also caught " + std::to_string(caught) + " deliberate errors.</p>";
  out += list(c["failures"], "Broken promises") + matrix(c) + accuracy_table(c) + coverage(c) +
         list(c["not_covered"], "Not covered") + list(c["missing"], "Missing") +
         list(c["cannot_run"], "Cannot run here");
  return out + "</html>\n";
}

}  // namespace rlk::cli
