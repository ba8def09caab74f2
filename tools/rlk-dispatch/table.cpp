#include "table.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace rlk::cli {
namespace {

bool colour() {
  static const bool wanted = [] {
    const char* no = std::getenv("NO_COLOR");
    return isatty(STDOUT_FILENO) && !(no && *no);
  }();
  return wanted;
}

bool is_number(const std::string& cell) {
  return !cell.empty() && cell.find_first_not_of("0123456789") == std::string::npos;
}

// Characters, not bytes: continuation bytes of UTF-8 take no room.
std::size_t width_of(const std::string& cell) {
  return static_cast<std::size_t>(std::count_if(
      cell.begin(), cell.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

}  // namespace

std::string painted(const std::string& text, Paint paint) {
  constexpr const char* kCodes[] = {"", "\x1b[1m", "\x1b[32m", "\x1b[31m", "\x1b[2m"};
  return colour() && paint != Paint::plain ? kCodes[static_cast<int>(paint)] + text + "\x1b[0m" : text;
}

void Table::print() const {
  std::vector<std::size_t> widths(rows_[0].size());
  std::vector<bool> numeric(widths.size(), rows_.size() > 1);
  for (const auto& row : rows_)
    for (std::size_t i = 0; i < row.size(); ++i) {
      widths[i] = std::max(widths[i], width_of(row[i]));
      if (&row != &rows_[0] && !is_number(row[i])) numeric[i] = false;
    }
  for (const auto& row : rows_) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      const std::string gap(widths[i] - width_of(row[i]), ' ');
      const Paint paint = &row == &rows_[0]             ? Paint::head
                          : row[i].substr(0, 2) == "no" ? Paint::bad
                                                        : Paint::plain;
      const bool last = i + 1 == row.size();
      line += (i ? "  " : "") + (numeric[i] ? gap : "") + painted(row[i], paint) +
              (numeric[i] || last ? "" : gap);
    }
    while (!line.empty() && line.back() == ' ') line.pop_back();
    std::puts(line.c_str());
  }
}

}  // namespace rlk::cli
