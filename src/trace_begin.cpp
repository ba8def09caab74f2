#include "src/trace_begin.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

#include "src/environment.hpp"
#include "src/log.hpp"
#include "src/struct_size.hpp"
#include "src/text.hpp"
#include "src/trace_file.hpp"

namespace rlk {

Status begin_trace(const char* name, const rlk_trace_options* given) {
  if (!name || !*name) return {RLK_INVALID_ARGUMENT, "trace: the file's name is empty"};
  rlk_trace_options o{};
  if (given)
    if (Status s = read_struct("trace options", *given, offsetof(rlk_trace_options, tags), o); !s) return s;
  if (o.every < 0)
    return {RLK_INVALID_ARGUMENT, fmt::format("trace: every is {}, it must be 0 or more", o.every)};
  TraceFile::Choice choice{{}, std::max<int64_t>(o.every, 1), o.weights_once != 0};
  for (const std::string_view glob : split(o.tags ? o.tags : "", ','))
    choice.tags.emplace_back(trimmed(glob));
  return TraceFile::begin(name, std::move(choice));
}

namespace {

// "FILE;weights_once;every=16;tags=layer 1 *"
Status begin_from_words(std::string_view spec) {
  rlk_trace_options o{.struct_size = sizeof o, .weights_once = 0, .tags = nullptr, .every = 0};
  std::string file, tags;
  for (const std::string_view word : split(spec, ';')) {
    const std::string_view name = word.substr(0, word.find('='));
    const std::string value(name.size() < word.size() ? word.substr(name.size() + 1) : "");
    if (word.data() == spec.data())
      file = word;
    else if (word == "weights_once")
      o.weights_once = 1;
    else if (name == "tags" && name != word)
      tags = value, o.tags = tags.c_str();
    else if (name == "every" && !value.empty() && value.size() < 10 &&
             value.find_first_not_of("0123456789") == value.npos)
      o.every = std::stoll(value);
    else
      return {RLK_CONFIGURATION,
              fmt::format("{} is none of: weights_once, every=NUMBER, tags=GLOBS", quoted(word))};
  }
  return begin_trace(file.c_str(), &o);
}

}  // namespace

void trace_environment() {
  const Status s = begin_from_words(environment().trace);
  if (!s) log(LogLevel::error, fmt::format("RLK_TRACE: {}", s.message()));
}

}  // namespace rlk
