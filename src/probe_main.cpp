// rlk-probe PLUGIN NAME: opens a plugin the way the library would and writes what happened to file 3: one
// letter (l loaded, r refused, f failed) and the reason. It lives so that a plugin that throws, crashes,
// exits or hangs while it is opened takes down this process and not the one that wanted it.
#include <dlfcn.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include "src/plugin_table.hpp"

namespace {

[[noreturn]] void report(char letter, const std::string& reason) {
  const std::string line = letter + reason;
  const ssize_t written = write(3, line.data(), line.size());
  // No destructors: what the plugin registered for the end of the process is none of our business.
  _exit(written == static_cast<ssize_t>(line.size()) ? 0 : 1);
}

const rlk_host kHost = {sizeof(rlk_host),
                        RLK_ABI_MINOR,
                        [](int32_t code, const char*) { return code; },
                        [](int32_t, const char*) {},
                        [](int32_t, int64_t n, void (*body)(void*, int64_t), void* context) {
                          for (int64_t i = 0; i < n; ++i) body(context, i);
                        },
                        [] { return int32_t{RLK_CPU_BASELINE}; }};

// A static initialiser's exception ends this process in any case; here it says what it was, which not every
// C++ runtime does. dlopen is declared to throw nothing, so the call goes through a pointer that may.
void* open_or_die(const char* path) {
  void* (*volatile open)(const char*, int) = dlopen;
  try {
    return open(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "a static initialiser threw: %s\n", e.what());
  } catch (...) {
    std::fprintf(stderr, "a static initialiser threw something that is no std::exception\n");
  }
  std::abort();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const rlimit no_core{0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  void* handle = open_or_die(argv[1]);
  if (!handle) {
    const char* why = dlerror();
    report('f', why ? why : "the dynamic linker gave no reason");
  }
  const auto query = reinterpret_cast<rlk_backend_query_fn>(dlsym(handle, "rlk_backend_query"));
  if (!query) report('f', "it does not export rlk_backend_query");
  const rlk::Status status = rlk::check_backend_table(query(RLK_ABI_MAJOR, &kHost), argv[2]);
  report(status ? 'l' : status.code() == RLK_UNSUPPORTED ? 'r' : 'f', std::string(status.message()));
}
