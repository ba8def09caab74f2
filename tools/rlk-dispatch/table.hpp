// Aligned columns on stdout; colour only on a terminal, and never with NO_COLOR.
#pragma once

#include <string>
#include <vector>

namespace rlk::cli {

enum class Paint { plain, head, good, bad, quiet };

// The text, wrapped in the terminal's codes where colour is wanted.
std::string painted(const std::string& text, Paint paint);

class Table {
 public:
  explicit Table(std::vector<std::string> heads) { rows_.push_back(std::move(heads)); }
  void row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  // Columns whose cells are numbers align right. Cells that start with "no" are painted as bad news.
  void print() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace rlk::cli
