// The library's JSON, and its failures as an exception that carries the exit code.
#pragma once

#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

#include "options.hpp"
#include "rlk/printable.hpp"
#include "rlk/rlk.h"

namespace rlk::cli {

using Json = nlohmann::ordered_json;

// A command cannot go on: the text for the user, in one printable line, and the exit code.
class Failure : public std::runtime_error {
 public:
  Failure(Exit exit, const std::string& text) : std::runtime_error(printable(text)), exit_(exit) {}
  Exit exit() const noexcept { return exit_; }

 private:
  Exit exit_;
};

// The exit code for a status of the library.
Exit exit_for(int code) noexcept;

// Throws the calling thread's last failure unless the code is RLK_OK.
void check(rlk_code code);

// Every string as it may be printed: names and paths in a document may hold any bytes.
Json printable_strings(Json json);

// Takes over the text (and frees it); null is the library's failure, thrown with the given exit code. Its strings
// are printable.
Json parse(char* text, Exit otherwise = kUsage);

// rlk_list_json(what), whole: with schema and version.
Json listed(const char* what);

// Throws when RLK_BACKEND is wrong: no command that resolves may then pretend to work.
void check_configuration();

// Prints with two spaces of indentation, for people and programs alike.
void print(const Json& json);

// All or nothing: into a file beside it, which then takes its place. A full disk leaves what was there.
void write_file(const std::string& path, const std::string& text);

// The exit code of a command once all it printed has left; what could not be printed is an error.
int finish(int exit);

}  // namespace rlk::cli
