// The six variables, as a process sees them: what they change, what is said about wrong ones, and that they
// are ignored where they must be.
#include <sys/stat.h>

#include "child_process.hpp"

using rlk::test::Ran;
using rlk::test::run;

namespace {

Ran child(std::vector<std::string> variables, const std::string& list = "env", const std::string& sink = "") {
  std::vector<std::string> command{RLK_CHILD, list};
  if (!sink.empty()) command.push_back(sink);
  return run(command, std::move(variables));
}

class Folder {
 public:
  Folder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "rlk_env_XXXXXX").string();
    REQUIRE(mkdtemp(pattern.data()));
    path = pattern;
  }
  ~Folder() { std::filesystem::remove_all(path); }
  void take(const std::string& name) const {
    const std::string file = "/librlk_backend_" + name + ".so";
    std::filesystem::copy_file(RLK_FIXTURES + file, path + file);
    REQUIRE(chmod((path + file).c_str(), 0755) == 0);
  }
  std::string path;
};

}  // namespace

TEST_CASE("without any variable the op runs and nothing is printed on stderr") {
  const Ran r = child({});
  CHECK(r.exit == 0);
  CHECK_SAYS(r.out, "ran: 5 11 17");
  CHECK(r.err == "");
}

TEST_CASE("RLK_BACKEND that can be met is met") {
  CHECK_SAYS(child({"RLK_BACKEND=lm_head=native.golden"}).out, "ran: 5 11 17");
}

TEST_CASE("RLK_BACKEND that cannot be met is an error with the reason, never another implementation") {
  const Ran r = child({"RLK_BACKEND=lm_head=cuda", "CUDA_VISIBLE_DEVICES="});
  CHECK_SAYS(r.out,
             "failed: lm_head: no implementation takes this call under 'lm_head=cuda' (environment): ");
  CHECK_SAYS(child({"RLK_BACKEND=lm_head=cuda:native", "CUDA_VISIBLE_DEVICES="}).out, "ran: 5 11 17");
  CHECK_SAYS(child({"RLK_BACKEND=!native:!onednn"}).out,
             "failed: lm_head: no implementation takes this call under '!native:!onednn' (environment)");
}

TEST_CASE("a wrong RLK_BACKEND fails every call with column and suggestion, and the process lives") {
  const Ran r = child({"RLK_BACKEND=lm_head_bwd=native;lm_hed=native"});
  CHECK(r.exit == 0);
  CHECK_SAYS(r.out, "failed: RLK_BACKEND, column ");
  CHECK_SAYS(r.out, "unknown op 'lm_hed', did you mean 'lm_head'?\n");
  CHECK_SAYS(child({"RLK_BACKEND=" + std::string(5000, 'x')}).out,
             "failed: RLK_BACKEND, column 4097: the text has 5000 bytes");
}

TEST_CASE("RLK_PLUGIN_PATH finds plugins in absolute folders, and they run when asked for") {
  const Folder folder;
  folder.take("good");
  const Ran r = child({"RLK_PLUGIN_PATH=" + folder.path, "RLK_BACKEND=good"}, "plugins");
  CHECK_SAYS(r.out, "ran: 42 42 42");
  CHECK_SAYS(r.out, "\"path\": \"" + folder.path + "/librlk_backend_good.so\", \"state\": \"active\"");
}

TEST_CASE("of two plugins with one name the first folder's is used, and the other is said to be hidden") {
  const Folder first, second;
  first.take("good");
  second.take("good");
  const Ran r = child({"RLK_PLUGIN_PATH=" + first.path + ":" + second.path}, "plugins");
  CHECK_SAYS(r.out, "\"path\": \"" + first.path + "/librlk_backend_good.so\"");
  CHECK_SAYS(r.out, "'" + second.path + "/librlk_backend_good.so' is hidden by '" + first.path +
                        "/librlk_backend_good.so'");
}

TEST_CASE("relative and empty entries of RLK_PLUGIN_PATH are not searched, not even from inside the folder") {
  const Folder folder;
  folder.take("good");
  const Ran r = run({RLK_CHILD, "plugins"}, {"RLK_PLUGIN_PATH=.::plugins"}, folder.path);
  CHECK_SILENT(r.out, "good.so");
  CHECK_SAYS(r.err, "RLK_PLUGIN_PATH: '.' is not an absolute folder and is not searched");
  CHECK_SAYS(r.err, "RLK_PLUGIN_PATH: 'plugins' is not an absolute folder");
}

TEST_CASE("the working directory is never searched") {
  const Folder folder;
  folder.take("good");
  std::filesystem::create_directory(folder.path + "/rlk");
  std::filesystem::copy_file(folder.path + "/librlk_backend_good.so",
                             folder.path + "/rlk/librlk_backend_good.so");
  CHECK_SILENT(run({RLK_CHILD, "plugins"}, {}, folder.path).out, "good");
}

TEST_CASE("a plugin that crashes while loading costs a backend, not the process") {
  const Folder folder;
  folder.take("crash");
  folder.take("throwing");
  folder.take("good");
  const Ran r = child({"RLK_PLUGIN_PATH=" + folder.path}, "plugins");
  CHECK(r.exit == 0);
  CHECK_SAYS(r.out, "ran: 5 11 17");
  CHECK_SAYS(r.out, "\"name\": \"crash\"");
  CHECK_SAYS(r.out, "it crashed while loading in a child process");
  CHECK_SAYS(r.out, "no licence server");
  CHECK_SAYS(r.out, "librlk_backend_good.so\", \"state\": \"ready\"");
}

TEST_CASE("a backend that was refused says why to who asks for it") {
  const Folder folder;
  folder.take("old_major");
  const Ran r = child({"RLK_PLUGIN_PATH=" + folder.path, "RLK_BACKEND=old_major"});
  CHECK_SAYS(r.out, "failed: lm_head: no implementation takes this call under 'old_major' (environment): ");
  CHECK_SAYS(r.out, "backend 'old_major' is built but was refused: ");
  CHECK_SAYS(r.out, "it speaks plugin version 0.7");
}

TEST_CASE("RLK_PLUGIN_TRUST skips the child process for the folders it names, and only the child process") {
  const Folder folder;
  folder.take("exits");
  // Trusted, it is opened by the process itself, and ends it: that is what trust means.
  CHECK(child({"RLK_PLUGIN_PATH=" + folder.path, "RLK_PLUGIN_TRUST=" + folder.path}).exit == 7);
  CHECK(child({"RLK_PLUGIN_PATH=" + folder.path, "RLK_PLUGIN_TRUST=all"}).exit == 7);
  CHECK(child({"RLK_PLUGIN_PATH=" + folder.path, "RLK_PLUGIN_TRUST=/usr/lib"}).exit == 0);
  REQUIRE(chmod((folder.path + "/librlk_backend_exits.so").c_str(), 0666) == 0);
  const Ran r = child({"RLK_PLUGIN_PATH=" + folder.path, "RLK_PLUGIN_TRUST=all"}, "plugins");
  CHECK(r.exit == 0);
  CHECK_SAYS(r.out, "is writable by everyone");
}

TEST_CASE("who may write the library may write plugins; nobody else may") {
  // A site-packages that a team shares: the library's folder and all in it are writable by a group.
  const Folder folder;
  const std::string lib = folder.path + "/lib", other = folder.path + "/other";
  for (const std::string& made : {lib, lib + "/rlk", other}) REQUIRE(std::filesystem::create_directory(made));
  const std::filesystem::path library = std::filesystem::canonical(RLK_LIBRARY);
  std::filesystem::copy_file(library, lib + "/" + RLK_SONAME);
  std::filesystem::copy_file(library.parent_path() / "rlk/rlk-probe", lib + "/rlk/rlk-probe");
  const std::string good = RLK_FIXTURES "/librlk_backend_good.so",
                    lying = RLK_FIXTURES "/librlk_backend_lying.so";
  std::filesystem::copy_file(good, lib + "/rlk/librlk_backend_good.so");
  std::filesystem::copy_file(lying, other + "/librlk_backend_lying.so");
  for (const std::string& open : {lib, lib + "/rlk", lib + "/rlk/librlk_backend_good.so", other})
    REQUIRE(chmod(open.c_str(), 0775) == 0);
  const std::vector<std::string> variables{"LD_LIBRARY_PATH=" + lib, "RLK_PLUGIN_PATH=" + other};
  const Ran shared = child(variables, "plugins");
  CHECK_SAYS(shared.out, "\"folder\": \"" + lib + "/rlk\"");
  CHECK_SAYS(shared.out, "librlk_backend_good.so\", \"state\": \"ready\"");
  CHECK_SAYS(shared.out, "librlk_backend_lying.so\", \"state\": \"ready\"");
  // The same folders beside a library that only its owner may write.
  REQUIRE(chmod(lib.c_str(), 0755) == 0);
  const Ran closed = child(variables, "plugins");
  CHECK_SAYS(closed.out, "its folder '" + lib + "/rlk' is writable by its group (mode 0775): chmod go-w");
  CHECK_SAYS(closed.out, "its folder '" + other + "' is writable by its group (mode 0775): chmod go-w");
}

TEST_CASE("names of files and folders never reach a log or a list raw") {
  const Folder folder;
  const std::string odd = folder.path + "/odd\x1b]0;title\x07\nline";
  REQUIRE(std::filesystem::create_directory(odd));
  std::ofstream(odd + "/librlk_backend_\x1b[2J.so") << "x";
  std::ofstream(odd + "/librlk_backend_text.so") << "x";
  const Ran r = child({"RLK_PLUGIN_PATH=" + odd + ":re\x1blative", "RLK_\x1b[2J=1"}, "plugins");
  CHECK(r.exit == 0);
  CHECK_SAYS(r.err, "librlk_backend_\\x1b[2J.so' is not called librlk_backend_<name>.so");
  CHECK_SAYS(r.err, "odd\\x1b]0;title\\x07\\x0aline");
  for (const std::string& text : {r.out, r.err})
    for (const char c : text) CHECK((c == '\n' || (c >= 0x20 && c != 0x7f)));
}

TEST_CASE(
    "a sink may ask the library while plugins log, and a plugin that asks while it loads gets an error") {
  const Folder folder;
  folder.take("talkative");
  const std::vector<std::string> variables{"RLK_PLUGIN_PATH=" + folder.path, "RLK_PLUGIN_TRUST=all"};
  const Ran r = child(variables, "plugins", "count");
  CHECK(r.exit == 0);
  CHECK_SAYS(r.out, "librlk_backend_talkative.so\", \"state\": \"ready\"");
  // In query, and when it was asked for its devices.
  CHECK_SAYS(r.out, "lines logged: 2");
  CHECK_SAYS(child(variables, "plugins").err,
             "the library answered: a plugin called the library while the library");
}

TEST_CASE("a wrong RLK_PLUGIN_TRUST is reported and trusts nothing") {
  const Folder folder;
  folder.take("exits");
  const Ran r = child({"RLK_PLUGIN_PATH=" + folder.path, "RLK_PLUGIN_TRUST=yes"});
  CHECK(r.exit == 0);
  CHECK_SAYS(r.err, "RLK_PLUGIN_TRUST: 'yes' is neither an absolute folder nor 'all' and trusts nothing");
}

TEST_CASE("RLK_CPU holds the process to a level, and more than the processor has is no mistake") {
  const Ran capped = child({"RLK_CPU=baseline"});
  CHECK_SAYS(capped.out, "ran: 5 11 17");
  CHECK_SAYS(capped.out, "\"cpu\": \"baseline\"");
  CHECK(capped.err == "");
  const Ran forced = child({"RLK_CPU=baseline", "RLK_BACKEND=native.avx2"});
  CHECK_SAYS(forced.out, "failed: lm_head: no implementation takes this call under 'native.avx2'");
  CHECK_SAYS(forced.out, "native.avx2 refused this call: needs AVX2");
  CHECK_SAYS(child({"RLK_CPU=amx"}).out, "ran: 5 11 17");
}

TEST_CASE("a wrong RLK_CPU fails every call with a suggestion, and the process lives") {
  const Ran r = child({"RLK_CPU=avx521"});
  CHECK(r.exit == 0);
  CHECK_SAYS(r.out, "failed: RLK_CPU: unknown level 'avx521', did you mean 'avx512'?  Known levels: ");
  CHECK_SAYS(r.out, "\"error\": \"RLK_CPU: unknown level 'avx521'");
}

TEST_CASE("a variable that rlk does not know is reported with the one that was meant") {
  const Ran r = child({"RLK_BACKND=native"});
  CHECK_SAYS(r.out, "ran: 5 11 17");
  CHECK_SAYS(r.err, "unknown variable 'RLK_BACKND', did you mean 'RLK_BACKEND'?");
}

TEST_CASE("a variable of another program that begins alike is none of rlk's business") {
  const Ran r = child({"RLK_PROJECT_DIR=/somewhere", "RLK_WITH_CUDA=OFF"});
  CHECK_SAYS(r.out, "ran: 5 11 17");
  CHECK(r.err == "");
}

TEST_CASE("RLK_LOG sets what stderr shows, and a wrong level is reported") {
  CHECK(child({"RLK_LOG=error", "RLK_BACKND=x"}).err == "");
  CHECK(child({"RLK_LOG=off", "RLK_BACKND=x"}).err == "");
  CHECK_SAYS(child({"RLK_LOG=wran"}).err, "RLK_LOG: unknown level 'wran', did you mean 'warn'?");
}

TEST_CASE("a log sink gets every line and stderr none; a null sink silences") {
  const Ran counted = child({"RLK_BACKND=x"}, "env", "count");
  CHECK(counted.err == "");
  CHECK_SAYS(counted.out, "lines logged: 1");
  CHECK_SAYS(child({"RLK_PLUGIN_PATH=relative:/nowhere"}, "env", "count").out, "lines logged: 2");
  const Ran silent = child({"RLK_BACKND=x"}, "env", "silent");
  CHECK(silent.err == "");
  CHECK_SAYS(silent.out, "lines logged: 0");
}

TEST_CASE("a process with raised rights ignores all variables and says so once") {
  const Folder folder;
  const std::string program = folder.path + "/child";
  std::filesystem::copy_file(RLK_CHILD, program);
  if (geteuid() != 0 || chown(program.c_str(), 0, 65534) != 0 || chmod(program.c_str(), 02755) != 0) {
    MESSAGE("[skip] only root can make a program with raised rights");
    return;
  }
  const Ran r = run({program, "env"}, {"RLK_BACKEND=lm_hed=native", "RLK_PLUGIN_PATH=/tmp", "RLK_LOG=trace",
                                       "RLK_CPU=nonsense"});
  if (rlk::test::has(r.out, "\"ignored\": false") || r.exit != 0) {
    MESSAGE("[skip] this file system does not raise rights, or the library is not readable then: ", r.err);
    return;
  }
  CHECK_SAYS(r.out, "ran: 5 11 17");
  CHECK_SAYS(r.out, "\"value\": \"\"");
  CHECK_SILENT(r.out, "lm_hed");
  CHECK_SAYS(r.err, "this process runs with raised rights: ");
  CHECK_SAYS(r.err, "RLK_BACKEND");
  CHECK_SAYS(r.err, "RLK_CPU");
  CHECK(r.err.find("raised rights") == r.err.rfind("raised rights"));
}

TEST_CASE("RLK_TRACE records every call of the process, in a file of its own where its name has %p") {
  const Folder folder;
  const Ran r = child({"RLK_TRACE=" + folder.path + "/%p.trace"});
  CHECK_SAYS(r.out, "ran: 5 11 17");
  CHECK(r.err == "");
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path)) files.push_back(entry.path());
  REQUIRE(files.size() == 1);
  CHECK(files[0].find_first_not_of("0123456789", folder.path.size() + 1) ==
        files[0].size() - std::string(".trace").size());
  const std::string text = rlk::test::read_and_remove(files[0]);
  CHECK_SAYS(text, "{\"n\": 1, \"op\": \"lm_head\"");
  CHECK_SAYS(text, "{\"end\": 1}\n");
}

TEST_CASE("RLK_TRACE takes options behind the file, and says which word is none") {
  const Folder folder;
  const std::string file = folder.path + "/trace";
  CHECK(child({"RLK_TRACE=" + file + ";weights_once;every=16"}).err == "");
  const std::string text = rlk::test::read_and_remove(file);
  CHECK_SAYS(text, "\"every\": 16}\n{\"n\": 1, ");
  CHECK(child({"RLK_TRACE=" + file + ";tags=layer*"}).err == "");
  CHECK_SAYS(rlk::test::read_and_remove(file), "\"every\": 1}\n{\"end\": 0}\n");  // the call has no tag
  for (const char* word : {"weight_once", "every=x", "every=", "every", "tags", "every=-1"}) {
    const Ran r = child({"RLK_TRACE=" + file + ";" + word});
    CHECK_SAYS(r.out, "ran: 5 11 17");
    CHECK_SAYS(r.err,
               "RLK_TRACE: '" + std::string(word) + "' is none of: weights_once, every=NUMBER, tags=GLOBS");
    CHECK_FALSE(std::filesystem::exists(file));
  }
}

TEST_CASE("RLK_TRACE that cannot be written is reported, and calls run") {
  const Ran r = child({"RLK_TRACE=/nowhere/file"});
  CHECK_SAYS(r.out, "ran: 5 11 17");
  CHECK_SAYS(r.err, "RLK_TRACE: trace: '/nowhere/file' cannot be written: No such file or directory");
}
