// labels: unit
// What callers, plugins and files say is shown as one line of valid UTF-8 that no terminal obeys.
#include "rlk/printable.hpp"

#include <doctest/doctest.h>

#include <cstring>
#include <string>
#include <vector>

#include "rlk/rlk.h"
#include "src/failure.hpp"
#include "src/log.hpp"
#include "src/text.hpp"

using namespace rlk;

namespace {

std::string into(std::size_t capacity, const std::string& text) {
  std::vector<char> buffer(capacity + 1, '#');
  print_into(buffer.data(), capacity, text);
  CHECK(buffer[capacity] == '#');
  return buffer.data();
}

struct Lines {
  std::vector<std::string> all;
  Lines() {
    rlk_set_log_sink([](void* to, int32_t, const char* t) { static_cast<Lines*>(to)->all.emplace_back(t); },
                     this);
  }
  ~Lines() { rlk_set_log_sink(nullptr, nullptr); }
};

}  // namespace

TEST_CASE("control characters, broken UTF-8 and what turns the direction of writing become numbers") {
  CHECK(printable("a\nb\x1b[2J\x7f") == "a\\x0ab\\x1b[2J\\x7f");
  CHECK(printable(std::string_view("a\0b", 3)) == "a\\x00b");
  CHECK(printable("\xc2\x9b") == "\\xc2\\x9b");           // CSI of the second set
  CHECK(printable("\xe2\x80\xae") == "\\xe2\\x80\\xae");  // right-to-left override
  CHECK(printable("\xe2\x80\xa8") == "\\xe2\\x80\\xa8");  // line separator
  CHECK(printable("\xff\xc3(") == "\\xff\\xc3(");
  CHECK(printable("\xed\xa0\x80") == "\\xed\\xa0\\x80");  // half of a surrogate pair
}

TEST_CASE("text stays as it is, and what was shown once is shown the same again") {
  const std::string text = "Größe 日本語 😀 'x' \\ end";
  CHECK(printable(text) == text);
  CHECK(is_printable(text));
  const std::string odd = "\x01\xfe tail";
  CHECK_FALSE(is_printable(odd));
  CHECK(printable(printable(odd)) == printable(odd));
}

TEST_CASE("a text that does not fit keeps its beginning and its end, in whole characters") {
  CHECK(into(8, "1234567") == "1234567");
  CHECK(into(16, "abcdefghijklmnopqrstuvwxyz") == "abcde ... vwxyz");
  const std::string reason = ": No such file or directory";
  std::string path = "cannot read /";
  while (path.size() < 5000) path += "größe/";
  const std::string shown = into(1024, path + reason);
  CHECK(shown.size() <= 1023);
  CHECK(shown.size() > 1000);
  CHECK(shown.substr(0, 13) == "cannot read /");
  CHECK(shown.substr(shown.size() - reason.size()) == reason);
  CHECK(is_printable(shown));
  for (std::size_t capacity = 16; capacity < 90; ++capacity) {
    const std::string cut = into(capacity, "日本語日本語日本語日本語\x1b日本語\n日本語日本語日本語日本語");
    CHECK(is_printable(cut));
    CHECK(cut.size() < capacity);
  }
}

TEST_CASE("a quoted word and a quoted path are cut in whole characters, a path in its middle") {
  CHECK(quoted("lm_hed") == "'lm_hed'");
  CHECK(quoted("größe\t") == "'größe\\x09'");
  std::string word(63, 'x');
  CHECK(quoted(word + "ößö") == "'" + word + "...'");
  std::string path = "/begin/";
  while (path.size() < 4000) path += "größe/";
  const std::string shown = quoted_path(path + "librlk_backend_x.so");
  CHECK(shown.size() < 260);
  CHECK(shown.substr(0, 8) == "'/begin/");
  CHECK(shown.substr(shown.size() - 20) == "librlk_backend_x.so'");
  CHECK(is_printable(shown));
}

TEST_CASE("a list is split at its separators") {
  const auto words = [](std::string_view list) {
    std::string all;
    for (const std::string_view word : split(list, ',')) all += "[" + std::string(word) + "]";
    return all;
  };
  CHECK(words("") == "");
  CHECK(words("a") == "[a]");
  CHECK(words("a,bc") == "[a][bc]");
  CHECK(words("a,,b") == "[a][][b]");
  CHECK(words(",a,") == "[][a]");
}

TEST_CASE("a thread's last failure is shown so, and NULL is no reason") {
  CHECK(set_failure(RLK_INTERNAL, "line\nrlk: another\x1b]0;title\x07") == RLK_INTERNAL);
  CHECK(std::string(failure_text()) == "line\\x0arlk: another\\x1b]0;title\\x07");
  set_failure(RLK_INTERNAL, failure_text());  // its own text
  CHECK(std::string(failure_text()) == "line\\x0arlk: another\\x1b]0;title\\x07");
  set_failure(RLK_BACKEND_ERROR, nullptr);
  CHECK(failure(RLK_BACKEND_ERROR).message() == "the implementation gave no reason");
}

TEST_CASE("log lines are shown so too, and wait while they are held") {
  Lines lines;
  log(LogLevel::warn, "one\r\nline");
  CHECK(lines.all == std::vector<std::string>{"one\\x0d\\x0aline"});
  {
    const HeldLog held;
    log(LogLevel::warn, "second");
    {
      const HeldLog inner;
      log(LogLevel::warn, "third");
    }
    CHECK(lines.all.size() == 1);
  }
  REQUIRE(lines.all.size() == 3);
  CHECK(lines.all[1] == "second");
  CHECK(lines.all[2] == "third");
}
