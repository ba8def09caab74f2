// Where a file that will run as code lies, and who could put another one there.
//
// The rule is in rlk/plugin.h: nobody may decide what a path leads to who could not replace the library
// itself. It is checked on the way: from the root, one component after the other, each opened in the folder
// that was checked before it, links followed by hand. The path that results has no links, and nobody
// untrusted can change what it names, so opening it again (as dlopen and the child process do) opens what was
// checked. Opening /proc/self/fd/N instead would need no such argument, but then the dynamic linker takes
// that for the plugin's name: $ORIGIN is /proc/self/fd, and a second plugin with the same number is taken for
// the first.
#pragma once

#include <sys/stat.h>

#include <string>

#include "rlk/status.hpp"
#include "src/fd.hpp"

namespace rlk {

struct PlacedFile {
  std::string path;  // absolute, without links and dots
  Fd file;           // open for reading
  struct stat status{};
};

// Opens a regular file after checking the way to it.
Result<PlacedFile> place_file(const std::string& path);

// Whether the path still names the file that was opened: an installation may go on meanwhile.
Status check_unchanged(const PlacedFile& placed);

// The library's own file, or the program's when it is linked in; without links, "" when it cannot be found.
const std::string& library_path();

}  // namespace rlk
