// Every way a plugin file can be wrong is survived, with words of its own.
#include <doctest/doctest.h>
#include <elf.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "rlk/rlk.hpp"

namespace fs = std::filesystem;

namespace {

std::string fixture(const std::string& name) { return RLK_FIXTURES "/librlk_backend_" + name + ".so"; }

// A folder of its own for files that a test makes; gone with the test.
class Folder {
 public:
  Folder() {
    std::string pattern = (fs::temp_directory_path() / "rlk_plugins_XXXXXX").string();
    REQUIRE(mkdtemp(pattern.data()));
    path_ = pattern;
  }
  ~Folder() {
    chmod(path_.c_str(), 0700);
    fs::remove_all(path_);
  }
  std::string file(const std::string& name) const { return path_ + "/librlk_backend_" + name + ".so"; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::vector<char> bytes_of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
void write(const std::string& path, const std::vector<char>& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  REQUIRE(chmod(path.c_str(), 0755) == 0);
}

// What loading says; "" when it worked.
std::string load(const std::string& path) {
  const rlk_code code = rlk_load_plugin(path.c_str());
  if (code == RLK_OK) return "";
  CHECK(code == RLK_PLUGIN);
  return rlk_last_error();
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

#define CHECK_SAYS(text, part) CHECK_MESSAGE(has(text, part), text)

// lm_head of [1, 2] by [3, 2] on the named backend.
rlk::Status run_on(const char* backend, float (&out)[3]) {
  float hidden[2] = {1, 2}, weight[6] = {1, 2, 3, 4, 5, 6};
  rlk::LmHead args{};
  const rlk::Tensor h(hidden, {1, 2}, rlk::DType::f32), w(weight, {3, 2}, rlk::DType::f32),
      o(out, {1, 3}, rlk::DType::f32);
  args.hidden = h, args.weight = w, args.out = o;
  return rlk::lm_head(args, {.backend = backend});
}

}  // namespace

TEST_CASE("a good plugin loads once, runs when asked for, and a second load names the first") {
  CHECK(load(fixture("good")) == "");
  float out[3] = {};
  CHECK(run_on("good", out));
  CHECK(out[0] == 42);
  CHECK(out[2] == 42);
  const std::string again = load(fixture("good"));
  CHECK_SAYS(again,
             "backend 'good' from " + fixture("good") + " is already registered by " + fixture("good"));
}

TEST_CASE("a file that is not ELF is refused before anything opens it") {
  const Folder folder;
  write(folder.file("text"), {'h', 'e', 'l', 'l', 'o'});
  CHECK_SAYS(load(folder.file("text")), "it is not an ELF file");
}

TEST_CASE("a shared object of another machine is refused by its header") {
  const Folder folder;
  std::vector<char> bytes = bytes_of(fixture("good"));
  auto* header = reinterpret_cast<Elf64_Ehdr*>(bytes.data());
  header->e_machine = header->e_machine == EM_S390 ? EM_PPC64 : EM_S390;
  write(folder.file("foreign"), bytes);
  CHECK_SAYS(load(folder.file("foreign")), "it is built for s390, this machine is ");
}

TEST_CASE("a 32-bit object and a program are refused as what they are") {
  const Folder folder;
  std::vector<char> bytes = bytes_of(fixture("good"));
  bytes[EI_CLASS] = ELFCLASS32;
  write(folder.file("small"), bytes);
  CHECK_SAYS(load(folder.file("small")), "it is a 32-bit object");
  bytes[EI_CLASS] = ELFCLASS64;
  reinterpret_cast<Elf64_Ehdr*>(bytes.data())->e_type = ET_REL;
  write(folder.file("object"), bytes);
  CHECK_SAYS(load(folder.file("object")), "it is not a shared object");
}

TEST_CASE("a file that was cut off is refused") {
  const Folder folder;
  std::vector<char> bytes = bytes_of(fixture("good"));
  bytes.resize(bytes.size() / 2);
  write(folder.file("half"), bytes);
  CHECK_SAYS(load(folder.file("half")), "is it cut off?");
}

TEST_CASE("a plugin that lacks or hides its query function is refused with the remedy") {
  CHECK_SAYS(load(fixture("missing_symbol")), "it does not export rlk_backend_query (declare it RLK_EXPORT");
  CHECK_SAYS(load(fixture("hidden_symbol")), "rlk_backend_query");
}

TEST_CASE("another major version is refused before the rest of the description is read") {
  CHECK_SAYS(load(fixture("old_major")), "it speaks plugin version 0.7, this library speaks 1.");
  CHECK_SAYS(load(fixture("no_description")), "it gave no description to a host of plugin version 1");
}

TEST_CASE("a description that is too short is refused with both sizes") {
  CHECK_SAYS(load(fixture("short_struct")), "its description: struct_size is 24, this library's struct has ");
}

TEST_CASE("a static initialiser that throws takes down only the child process") {
  const std::string text = load(fixture("throwing"));
  CHECK_SAYS(text, "while loading");
  CHECK_SAYS(text, "no licence server");
}

TEST_CASE("a crash while loading takes down only the child process") {
  CHECK_SAYS(load(fixture("crash")), "it crashed while loading in a child process: signal ");
}

TEST_CASE("a plugin that ends the process ends only the child, and its last words are told") {
  CHECK_SAYS(load(fixture("exits")),
             "it ended the child process while loading, with exit code 7; it printed: unsupported kernel "
             "please upgrade");
}

TEST_CASE("a plugin that hangs while loading is given up after the time limit") {
  CHECK_SAYS(load(RLK_FIXTURES "/slow/librlk_backend_slow.so"),
             "it did not finish loading within 5000 ms in a child process");
}

TEST_CASE("an implementation id that is there twice refuses the whole plugin and names both origins") {
  const std::string path = fixture("duplicate_id"), text = load(path);
  CHECK_SAYS(text, "implementation 'duplicate_id.one' of lm_head from " + path +
                       " is already registered by " + path);
  float out[3] = {};
  CHECK_FALSE(run_on("duplicate_id", out));
}

TEST_CASE("a plugin whose file and description disagree about its name is refused") {
  CHECK_SAYS(load(fixture("misnamed")), "it calls itself 'good', its file name says 'misnamed'");
}

TEST_CASE("a predicate that accepts and a run that refuses is an error that names the liar") {
  CHECK(load(fixture("lying")) == "");
  float out[3] = {};
  const rlk::Status status = run_on("lying", out);
  CHECK(status.code() == RLK_INTERNAL);
  const std::string text(status.message());
  CHECK_SAYS(text, "lying.one accepted this call, then refused to run it");
  CHECK_SAYS(text, "only on Tuesdays");
  CHECK(out[0] == 0);
}

TEST_CASE("a file or folder that others may write is refused with the command that mends it") {
  const Folder folder;
  write(folder.file("good"), bytes_of(fixture("good")));
  REQUIRE(chmod(folder.file("good").c_str(), 0666) == 0);
  CHECK_SAYS(load(folder.file("good")), "the file is writable by everyone (mode 0666): chmod go-w");
  REQUIRE(chmod(folder.file("good").c_str(), 0664) == 0);
  CHECK_SAYS(load(folder.file("good")), "the file is writable by its group (mode 0664): chmod go-w");
  REQUIRE(chmod(folder.file("good").c_str(), 0644) == 0);
  REQUIRE(chmod(folder.path().c_str(), 0777) == 0);
  CHECK_SAYS(load(folder.file("good")),
             "its folder '" + folder.path() + "' is writable by everyone (mode 0777)");
}

TEST_CASE("a link is judged by where it lies and by where it leads") {
  const Folder safe, open;
  write(open.file("good"), bytes_of(fixture("good")));
  REQUIRE(chmod(open.path().c_str(), 0777) == 0);
  fs::create_symlink(open.file("good"), safe.file("good"));
  CHECK_SAYS(load(safe.file("good")), "its folder '" + open.path() + "' is writable by everyone");
}

TEST_CASE("a file of another user is refused") {
  if (geteuid() != 0) {
    MESSAGE("[skip] only root can give a file away");
    return;
  }
  const Folder folder;
  write(folder.file("good"), bytes_of(fixture("good")));
  REQUIRE(chown(folder.file("good").c_str(), 1234, 0) == 0);
  CHECK_SAYS(load(folder.file("good")), "the file belongs to user 1234, neither to root nor to user 0");
}

TEST_CASE("a path through a folder of another user is refused, wherever it leads") {
  if (geteuid() != 0) {
    MESSAGE("[skip] only root can give a folder away");
    return;
  }
  // The owner of a folder on the way can point it elsewhere between any two looks at it.
  const Folder outer;
  const std::string theirs = outer.path() + "/theirs", safe = outer.path() + "/safe",
                    file = "/librlk_backend_good.so";
  for (const std::string& folder : {theirs, safe}) REQUIRE(fs::create_directory(folder));
  write(safe + file, bytes_of(fixture("good")));
  fs::create_directory_symlink(safe, theirs + "/plugins");
  REQUIRE(chown(theirs.c_str(), 1234, 0) == 0);
  CHECK_SAYS(load(theirs + "/plugins" + file), "its folder '" + theirs + "' belongs to user 1234");
  CHECK_SAYS(load(theirs + "/../safe" + file), "its folder '" + theirs + "' belongs to user 1234");
  // A link of theirs in a sticky folder, which only they may replace, and a folder of ours below one of
  // theirs.
  const std::string open = outer.path() + "/open";
  REQUIRE(fs::create_directory(open));
  REQUIRE(chmod(open.c_str(), 01777) == 0);
  fs::create_directory_symlink(safe, open + "/link");
  REQUIRE(lchown((open + "/link").c_str(), 1234, 0) == 0);
  CHECK_SAYS(load(open + "/link" + file), "the link '" + open + "/link' belongs to user 1234");
  REQUIRE(fs::create_directory(theirs + "/ours"));
  write(theirs + "/ours" + file, bytes_of(fixture("good")));
  CHECK_SAYS(load(theirs + "/ours" + file), "its folder '" + theirs + "' belongs to user 1234");
}

TEST_CASE("a folder further up that others may write is refused, a sticky one is not") {
  const Folder outer;
  const std::string inner = outer.path() + "/inner", path = inner + "/librlk_backend_old_major.so";
  REQUIRE(fs::create_directory(inner));
  REQUIRE(chmod(inner.c_str(), 0755) == 0);
  write(path, bytes_of(fixture("old_major")));
  REQUIRE(chmod(outer.path().c_str(), 0777) == 0);
  CHECK_SAYS(load(path), "its folder '" + outer.path() + "' is writable by everyone (mode 0777): chmod go-w");
  REQUIRE(chmod(outer.path().c_str(), 0775) == 0);
  if (geteuid() == 0) {
    REQUIRE(chown(outer.path().c_str(), 0, 4321) == 0);
    CHECK_SAYS(load(path),
               "its folder '" + outer.path() + "' is writable by its group (mode 0775): chmod go-w");
  }
  // Refused for what it says about itself: the place was fine.
  REQUIRE(chmod(outer.path().c_str(), 01777) == 0);
  CHECK_SAYS(load(path), "it speaks plugin version 0.7");
}

TEST_CASE("links that lead in a circle, and what is no file, are errors") {
  const Folder folder;
  fs::create_symlink(folder.file("round"), folder.file("round"));
  CHECK_SAYS(load(folder.file("round")), "it cannot be opened: Too many levels of symbolic links");
  REQUIRE(fs::create_directory(folder.file("folder")));
  CHECK_SAYS(load(folder.file("folder")), "it is not a regular file");
  REQUIRE(mkfifo(folder.file("pipe").c_str(), 0700) == 0);
  CHECK_SAYS(load(folder.file("pipe")), "it is not a regular file");
  write(folder.file("text"), {'x'});
  CHECK_SAYS(load(folder.file("text") + "/librlk_backend_x.so"), "it cannot be opened: Not a directory");
}

TEST_CASE("plugins are never looked up by a bare or relative name") {
  CHECK_SAYS(load("librlk_backend_good.so"), "is not an absolute path");
  CHECK_SAYS(load("./librlk_backend_good.so"), "is not an absolute path");
  CHECK_SAYS(load("/usr/lib/libm.so.6"), "is not called librlk_backend_<name>.so");
  CHECK_SAYS(load("/nowhere/librlk_backend_good.so"), "it cannot be opened: No such file or directory");
}

TEST_CASE("after all of this the library still lists and runs native") {
  float out[3] = {};
  CHECK(run_on("native", out));
  CHECK(out[0] == 5);
  CHECK(out[2] == 17);
}
