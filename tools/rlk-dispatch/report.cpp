// A certificate as one self-contained page: the matrix of promises, ULP histograms and error over the length
// of the sum as inline SVG. No script, no font, no request: it opens from a mail on a phone.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <set>

#include "commands.hpp"
#include "library.hpp"

namespace rlk::cli {
namespace {

constexpr const char* kStyle = R"(<style>
:root{color-scheme:light dark;--line:#8884;--good:#1a7f37;--bad:#c62828;--quiet:#888;--bar:#3b82c4}
body{font:16px/1.45 system-ui,sans-serif;margin:0 auto;max-width:70rem;padding:1rem}
h1{font-size:1.4rem}h2{font-size:1.15rem;margin-top:2rem}h3{font-size:1rem;margin:.2rem 0}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem}td,th{padding:.3rem .6rem;border-bottom:1px solid var(--line);text-align:left;white-space:nowrap}
.good{color:var(--good)}.bad{color:var(--bad);font-weight:600}.quiet{color:var(--quiet)}
th:first-child,td:first-child{position:sticky;left:0;background:Canvas;white-space:normal;min-width:9rem}small{color:var(--quiet);white-space:nowrap}tr.op td{font-weight:600;padding-top:1rem}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(17rem,1fr));gap:1rem}.card{border:1px solid var(--line);border-radius:.5rem;padding:.7rem}
svg{width:100%;height:auto}svg text{font:10px system-ui,sans-serif;fill:currentColor}code,pre{font-size:.85rem;white-space:pre-wrap;overflow-wrap:anywhere}
</style>)";

std::string escaped(const std::string& text) {
  std::string out;
  for (char c : text) switch (c) {
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '&':
        out += "&amp;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  return out;
}

std::string number(double x, const char* format = "%.3g") {
  char text[40];
  std::snprintf(text, sizeof text, format, x);
  return text;
}

std::string cell(const Json& entry, const std::string& promise) {
  if (!entry["promises"].contains(promise)) return "<td class=quiet>-</td>";
  const Json& t = entry["promises"][promise];
  const auto tried = t["tried"].get<long>(), failed = t["failed"].get<long>();
  if (!tried) return "<td class=quiet title='not tried'>-</td>";
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
// ones.
std::string histogram(const Json& a) {
  constexpr const char* kLabels[] = {"0",   "1",   "2",   "4",  "8",  "16", "32", "64",
                                     "128", "256", "512", "1k", "2k", "4k", "8k", "more"};
  const double total = std::max(1.0, a["elements"].get<double>());
  std::string out =
      "<svg viewBox='0 0 340 126' role=img aria-label='ULP histogram'><text x='80' y='10'>share "
      "(log) of elements by ulps from the truth</text>";
  for (std::size_t i = 0; i < 16; ++i) {
    const double share = a["ulp_histogram"][i].get<double>() / total;
    const double height = share > 0 ? std::max(1.0, 82 * (1 + std::log10(share) / 7)) : 0;
    const std::string x = number(10 + 20.0 * static_cast<double>(i), "%.0f");
    out += "<rect x='" + x + "' y='" + number(100 - height, "%.1f") + "' width='16' height='" +
           number(height, "%.1f") + "' fill='var(--bar)'><title>" + number(100 * share, "%.4g") + "% up to " +
           kLabels[i] + " ulp</title></rect>";
    out += "<text x='" + x + "' y='114'>" + kLabels[i] + "</text>";
  }
  return out + "</svg>";
}

// Worst error against the length of the sum, both logarithmic, with the bound as a line.
std::string error_plot(const Json& a) {
  const Json& points = a["error_over_length"];
  if (points.size() < 2) return "";
  double x0 = 1e300, x1 = 0, y0 = 1e300, y1 = a["bound"].get<double>();
  for (const Json& p : points) {
    const double x = p[0].get<double>(), y = p[1].get<double>();
    x0 = std::min(x0, x), x1 = std::max(x1, x);
    if (y > 0) y0 = std::min(y0, y), y1 = std::max(y1, y);
  }
  if (y0 > y1 || x0 <= 0) return "";
  if (y0 == y1) y0 = y1 / 10;
  const auto place_x = [&](double x) {
    return x1 > x0 ? 40 + 290 * std::log(x / x0) / std::log(x1 / x0) : 185;
  };
  const auto place_y = [&](double y) {
    return 100 - 80 * std::log(std::max(y, y0) / y0) / std::log(y1 / y0);
  };
  std::string out =
      "<svg viewBox='0 0 340 126' role=img aria-label='error over length'><text x='40' y='10'>worst "
      "error over length of the sum (log; dashed: bound)</text>";
  if (const double bound = a["bound"].get<double>(); bound > 0) {
    const std::string y = number(place_y(bound), "%.1f");
    out +=
        "<line x1='40' x2='330' y1='" + y + "' y2='" + y + "' stroke='var(--bad)' stroke-dasharray='4 3'/>";
  }
  for (const Json& p : points)
    out += "<circle r='3' fill='var(--bar)' cx='" + number(place_x(p[0].get<double>()), "%.1f") + "' cy='" +
           number(place_y(p[1].get<double>()), "%.1f") + "'><title>length " +
           number(p[0].get<double>(), "%.0f") + ": " + number(p[1].get<double>()) + "</title></circle>";
  out += "<text x='0' y='24'>" + number(y1, "%.1g") + "</text><text x='0' y='100'>" + number(y0, "%.1g") +
         "</text><text x='40' y='116'>" + number(x0, "%.0f") + "</text><text x='300' y='116'>" +
         number(x1, "%.0f") + "</text>";
  return out + "</svg>";
}

std::string accuracy_cards(const Json& certificate) {
  std::string out = "<h2>Distance from the reference</h2><div class=cards>\n";
  for (const Json& e : certificate["entries"])
    for (const Json& a : e["accuracy"]) {
      if (a["elements"].get<double>() == 0) continue;
      out += "<div class=card><h3>" + escaped(e["op"].get<std::string>()) + " " +
             escaped(e["implementation"].get<std::string>()) + "</h3><div class=quiet>" +
             escaped(e["dtype"].get<std::string>()) + " in, " + escaped(a["result"].get<std::string>()) +
             " in " + escaped(a["dtype"].get<std::string>()) +
             (a["metric"] == "bits" ? ", data that sums exactly" : "") + "</div><div>worst " +
             number(a["worst"].get<double>()) + ", bound " + number(a["bound"].get<double>()) +
             ", 99.9% within " + number(a["p99_9"].get<double>()) + ", exact " +
             number(100 * a["share_at_0_ulp"].get<double>(), "%.3g") + "%</div>" + histogram(a) +
             error_plot(a) + "</div>\n";
    }
  return out + "</div>";
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

}  // namespace

std::string report_page(const std::string& certificate_text) {
  const Json c = Json::parse(certificate_text);
  std::string out =
      "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport "
      "content='width=device-width,initial-scale=1'>"
      "<title>rlk verification</title>";
  out += kStyle;
  out += "<h1>rlk verification: " +
         std::string(c["good"].get<bool>() ? "<span class=good>all promises kept</span>"
                                           : "<span class=bad>promises broken</span>") +
         (c["complete"].get<bool>() ? "" : " <span class=quiet>(partial)</span>") + "</h1>";
  const Json& h = c["host"];
  out += "<p>rlk " + escaped(c["rlk"].get<std::string>()) + ", build " +
         escaped(c["build"].get<std::string>()) + ", seed " + std::to_string(c["seed"].get<unsigned long>()) +
         ", " + number(c["seconds"].get<double>(), "%.1f") + " s. " + escaped(h["cpu"].get<std::string>()) +
         ", " + escaped(h["isa"].get<std::string>()) + ", " + escaped(h["system"].get<std::string>()) + ", " +
         std::to_string(h["threads"].get<long>()) + " threads.</p>";
  if (const std::size_t caught = c["mutants_caught"].size())
    out += "<p>This program also caught " + std::to_string(caught) + " deliberate errors.</p>";
  out += list(c["failures"], "Broken promises") + matrix(c) + accuracy_cards(c) + coverage(c) +
         list(c["not_covered"], "Not covered");
  return out + "</html>\n";
}

}  // namespace rlk::cli
