#include "page.hpp"

#include <cstdio>
#include <cstdlib>

namespace rlk::cli {

const char* const kStyle = R"(<style>
:root{color-scheme:light dark;--line:#8884;--good:#1a7f37;--bad:#c62828;--quiet:#888;--bar:#3b82c4}
body{font:16px/1.45 system-ui,sans-serif;margin:0 auto;max-width:70rem;padding:1rem}
h1{font-size:1.4rem}h2{font-size:1.15rem;margin-top:2rem}h3{font-size:1rem;margin:.2rem 0}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem}td,th{padding:.3rem .6rem;border-bottom:1px solid var(--line);text-align:left;white-space:nowrap}
.good{color:var(--good)}.bad{color:var(--bad);font-weight:600}.quiet{color:var(--quiet)}
th:first-child,td:first-child{position:sticky;left:0;background:Canvas;white-space:normal;min-width:9rem}small{color:var(--quiet);white-space:nowrap}tr.op td{font-weight:600;padding-top:1rem}
svg.mini{width:8rem;height:1.9rem}
code,pre{font-size:.85rem;white-space:pre-wrap;overflow-wrap:anywhere}
</style>)";

std::string page_head(const std::string& title) {
  return "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport "
         "content='width=device-width,initial-scale=1'><title>" +
         escaped(title) + "</title>" + kStyle;
}

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

std::string number(double x, const char* format) {
  char text[40];
  std::snprintf(text, sizeof text, format, x);
  return text;
}

double real(const Json& j) {
  return j.is_string() ? std::strtod(j.get<std::string>().c_str(), nullptr) : j.get<double>();
}

}  // namespace rlk::cli
