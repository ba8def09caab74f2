// A process beside this one, and the lines it writes. What is tested there may end it in any way.
#pragma once

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

namespace rlk::harness {

using Variables = std::vector<std::pair<std::string, std::string>>;

class Child {
 public:
  // The lines come through this descriptor: what is tested may print as it likes.
  static constexpr int kLines = 3;

  Child(const std::vector<std::string>& command, const std::vector<std::string>& arguments,
        const Variables& environment);
  ~Child();
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  bool started() const { return pid_ > 0; }
  enum class Read { line, nothing, end };
  // The next line; nothing: none came within the seconds.
  Read read(std::string& line, double seconds);
  void kill();
  // Waits for its end and puts it into words: "died by SIGSEGV", "ended with exit code 3".
  std::string ending();

 private:
  bool gone();
  pid_t pid_ = 0;
  int lines_ = -1, status_ = 0;
  bool waited_ = false;
  std::string text_;
};

}  // namespace rlk::harness
