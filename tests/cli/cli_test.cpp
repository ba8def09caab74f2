// rlk-dispatch as its users see it: what it prints where, its exit codes, and that --json carries what the
// text does.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "child_process.hpp"

using Json = nlohmann::json;
using rlk::test::Ran;

namespace {

Ran dispatch(std::vector<std::string> words, std::vector<std::string> variables = {}) {
  words.insert(words.begin(), RLK_DISPATCH);
  return rlk::test::run(words, std::move(variables));
}

Json json(std::vector<std::string> words, std::vector<std::string> variables = {}) {
  words.emplace_back("--json");
  const Ran r = dispatch(words, std::move(variables));
  INFO(r.err);
  const Json parsed = Json::parse(r.out, nullptr, false);
  REQUIRE_FALSE(parsed.is_discarded());
  CHECK(parsed.at("schema") == 1);
  return parsed;
}

const std::vector<std::string> kFixtures{"RLK_PLUGIN_PATH=" RLK_FIXTURES, "RLK_LOG=off"};

std::vector<std::string> lines(const std::string& text) {
  std::vector<std::string> all;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) all.push_back(line);
  return all;
}

}  // namespace

TEST_CASE("--list shows every implementation in aligned columns") {
  const Ran r = dispatch({"--list"});
  CHECK(r.exit == 0);
  CHECK(r.err == "");
  const auto rows = lines(r.out);
  REQUIRE(rows.size() > 2);
  CHECK(rows[0].find("implementation") == 0);
  for (const char* head : {"built", "loaded", "usable", "dtypes", "arithmetic", "priority"})
    CHECK_SAYS(rows[0], head);
  const auto arithmetic = rows[0].find("arithmetic");
  auto row = rows.begin() + 1;
  std::string op;
  const Json impls = json({"--list"})["impls"];
  for (const Json& i : impls) {
    if (i["op"] != op) {
      op = i["op"];
      CHECK(*row++ == op);
    }
    const std::string id = i["id"], rule = i["arithmetic"];
    CHECK_MESSAGE(row->compare(0, id.size() + 2, " " + id + " ") == 0, *row);
    CHECK_MESSAGE(row->compare(arithmetic, rule.size() + 1, rule + " ") == 0, *row);
    ++row;
  }
}

TEST_CASE("implementations are listed in the order they are tried: priority, then name") {
  const Json impls = json({"--list", "impls"})["impls"];
  for (std::size_t i = 1; i < impls.size(); ++i) {
    if (impls[i]["op"] != impls[i - 1]["op"]) continue;
    const int before = impls[i - 1]["priority"], now = impls[i]["priority"];
    CHECK((before > now || (before == now && impls[i - 1]["id"] < impls[i]["id"])));
  }
}

TEST_CASE("every kind of list has text and JSON") {
  for (const char* what : {"ops", "impls", "backends", "plugins", "env"}) {
    const Ran r = dispatch({"--list", what});
    CHECK(r.exit == 0);
    CHECK(lines(r.out).size() >= 2);
    CHECK(json({"--list", what}).contains(what));
  }
  const Json ops = json({"--list", "ops"})["ops"];
  CHECK(std::any_of(ops.begin(), ops.end(), [](const Json& op) {
    return op["name"] == "lm_head" && op["backward"] == "lm_head_bwd";
  }));
}

TEST_CASE("--list fits a screen: a reason that many rows share stands once, below the table") {
  const Ran r = dispatch({"--list"}, kFixtures);
  const auto rows = lines(r.out);
  const auto end = std::find(rows.begin(), rows.end(), "");
  bool numbered = false;
  for (auto row = rows.begin(); row != end; ++row) {
    CHECK_MESSAGE(row->size() <= 120, *row);
    CHECK_SILENT(*row, "no: ");
    numbered |= row->find(" (1)") != std::string::npos;
  }
  CHECK(numbered == (r.out.find("\n(1) ") != std::string::npos));
}

TEST_CASE("--dtype takes the names of frameworks and refuses what no input can be") {
  const std::vector<std::string> shapes{"--explain", "lm_head", "--shape", "hidden=2x8,weight=4x8",
                                        "--dtype"};
  const auto explained = [&](const char* dtype) {
    auto words = shapes;
    words.emplace_back(dtype);
    return json(words)["call"];
  };
  CHECK(explained("bfloat16") == explained("bf16"));
  CHECK(explained("float32") == explained("fp32"));
  CHECK(explained("half") == explained("fp16"));
  auto words = shapes;
  words.emplace_back("float64");
  const Ran r = dispatch(words);
  CHECK(r.exit == 2);
  CHECK_SAYS(r.err, "--dtype: no input of lm_head can be fp64; they take fp16, bf16, fp32");
}

TEST_CASE("no terminal, no colour") {
  CHECK_SILENT(dispatch({"--list"}).out, "\x1b");
  CHECK_SILENT(dispatch({"--explain", "lm_head"}).out, "\x1b");
}

TEST_CASE("--explain needs no shapes, and then says which example it took") {
  const Ran r = dispatch({"--explain", "lm_head"});
  CHECK(r.exit == 0);
  CHECK_SAYS(r.out, "shapes of the example");
  CHECK_SAYS(r.out, "decided by: default order");
  CHECK_SAYS(r.out, "fingerprint ");
}

TEST_CASE("--explain takes the example of every op, in every dtype that one has, and of an alias") {
  std::set<std::string> ops;
  const Json listed = json({"--list", "impls"});
  for (const Json& i : listed["impls"])
    if (i["backend"] == "native") ops.insert(i["op"]);
  std::set<std::string> taken;  // "op dtype"
  const Json schemas = json({"--list", "ops"});
  for (const Json& op : schemas["ops"]) {
    // "rope_i:pairing=adjacent,rope_thd:layout=bshd"
    std::istringstream aliases(op["aliases"].get<std::string>());
    for (std::string alias; std::getline(aliases, alias, ',');) ops.insert(alias.substr(0, alias.find(':')));
    for (const Json& a : op["arguments"])
      for (const Json& dtype : a["dtypes"])
        if (a["role"] != "write")
          taken.insert(op["name"].get<std::string>() + " " + dtype.get<std::string>());
  }
  CHECK(ops.count("apply_rotary_pos_emb") == 1);
  for (const std::string& op : ops) {
    CAPTURE(op);
    CHECK_SAYS(dispatch({"--explain", op}).out, "chosen");
    const bool alias = taken.count(op + " fp32") == 0;
    for (const std::string dtype : {"fp32", "bf16", "fp16"}) {
      CAPTURE(dtype);
      const Ran r = dispatch({"--explain", op, "--dtype", dtype});
      if (alias || taken.count(op + " " + dtype)) {
        CHECK_SAYS(r.out, "chosen");
        CHECK_SAYS(r.out, ":" + dtype);
      } else {
        CHECK_SAYS(r.err, "no input of " + op + " can be " + dtype);
      }
    }
  }
}

TEST_CASE("--verify knows aliases and suggests what a mistyped op may have been") {
  const Ran alias = dispatch({"--verify", "rope_i", "--impl", "nobody"});
  CHECK_SAYS(alias.out, "nothing matches op 'rope'");
  const Ran near = dispatch({"--verify", "rope_i", "--impl", "nativ"});
  CHECK(near.exit == 3);
  CHECK_SAYS(near.err, "no implementation 'nativ', did you mean 'native'?");
  const Ran wrong = dispatch({"--verify", "ropee"});
  CHECK(wrong.exit == 2);
  CHECK_SAYS(wrong.err, "unknown op 'ropee', did you mean 'rope'?");
}

TEST_CASE("--bench times the examples of ops with optional results") {
  for (const char* op : {"rope", "rope_i", "rope_bwd", "kda_bwd"}) {
    CAPTURE(op);
    const std::string first = json({"--explain", op})["chosen"];
    const Ran r = dispatch({"--bench", op, "--impl", first});
    CHECK(r.exit == 0);
    CHECK_SAYS(r.out, first);
  }
}

TEST_CASE("--explain shows every candidate of a call with shapes and what would select the others") {
  const Json r =
      json({"--explain", "lm_head", "--dtype", "bf16", "--shape", "hidden=7x64,weight=32x64,out=:fp32"});
  CHECK(r["error"] == "");
  CHECK(r["call"] == "hidden=7x64:bf16, weight=32x64:bf16, out=7x32:fp32");
  int chosen = 0;
  for (const Json& c : r["candidates"]) {
    if (c["chosen"]) {
      ++chosen;
      CHECK(c["id"] == r["chosen"]);
      continue;
    }
    CHECK_MESSAGE(c["reason"] != "", c.dump());
    CHECK_MESSAGE(c["nearest"] != "", c.dump());
  }
  CHECK(chosen == 1);
}

TEST_CASE("--explain follows the change it proposes: the proposed override selects the candidate") {
  const Json r = json({"--explain", "lm_head", "--shape", "hidden=7x64,weight=32x64"});
  for (const Json& c : r["candidates"]) {
    const std::string nearest = c["nearest"];
    if (c["standing"] != "accepted") continue;
    REQUIRE(nearest.substr(0, 13) == "RLK_BACKEND='");
    const std::string value = nearest.substr(13, nearest.size() - 14);
    CHECK(json({"--explain", "lm_head", "--shape", "hidden=7x64,weight=32x64"},
               {"RLK_BACKEND=" + value})["chosen"] == c["id"]);
  }
}

TEST_CASE("--explain on a device that is not there exits with 3 and says so per candidate") {
  const Ran r = dispatch({"--explain", "lm_head", "--device", "hip:7", "--dtype", "bf16", "--shape",
                          "hidden=512x4100,weight=151936x4100"});
  CHECK(r.exit == 3);
  CHECK_SAYS(r.out, "runs on cpu, the tensors are elsewhere");
  CHECK_SAYS(r.out, "nearest: put the tensors on cpu");
  CHECK_SAYS(r.err, "error: lm_head: no implementation takes this call");
}

TEST_CASE("--policy narrows the candidates") {
  CHECK(json({"--explain", "lm_head", "--policy", "golden"})["arithmetic"] == "fma64");
  CHECK(json({"--explain", "lm_head", "--policy", "arithmetic=fma64,deterministic"})["arithmetic"] ==
        "fma64");
  const Ran unknown = dispatch({"--explain", "lm_head", "--policy", "arithmetic=fma23/kb1024"});
  CHECK(unknown.exit == 3);
  CHECK_SAYS(unknown.err,
             "lm_head: no implementation here promises arithmetic 'fma23/kb1024', did you mean "
             "'fma32/kb1024'?  Known here: ");
  const Ran r = dispatch({"--explain", "lm_head", "--policy", "quick"});
  CHECK(r.exit == 2);
  CHECK_SAYS(r.err, "unknown policy 'quick'");
}

TEST_CASE("an override shows who decided and what it left out") {
  const Json r = json({"--explain", "lm_head"}, {"RLK_BACKEND=lm_head=native.golden"});
  CHECK_SAYS(r["chosen"].get<std::string>(), "native.golden.");
  CHECK(r["decided_by"] == "environment 'lm_head=native.golden'");
  for (const Json& c : r["candidates"])
    if (c["standing"] == "left out") CHECK(c["reason"] == "left out by environment 'lm_head=native.golden'");
}

TEST_CASE("the five reasons a named backend does not serve have five messages") {
  const auto explain = [](const std::string& spec, std::vector<std::string> words = {}) {
    words.insert(words.begin(), {"--explain", "lm_head"});
    return dispatch(words, {"RLK_BACKEND=" + spec, kFixtures[0], kFixtures[1]});
  };
  const Ran unknown = explain("tensorflow");
  CHECK(unknown.exit == 2);
  CHECK_SAYS(unknown.err, "RLK_BACKEND, column 1: unknown backend 'tensorflow'.  Known backends: ");
  const Ran not_loaded = explain("old_major");
  CHECK(not_loaded.exit == 3);
  CHECK_SAYS(not_loaded.err, "backend 'old_major' is built but was refused: ");
  CHECK_SAYS(explain("crash").err, "backend 'crash' is built but could not be loaded: ");
  const Ran no_device = explain("no_device");
  CHECK(no_device.exit == 3);
  CHECK_SAYS(no_device.err, "backend 'no_device' is loaded but has no device: the dongle is not plugged in");
  const Ran refused = explain("good", {"--dtype", "bf16"});
  CHECK(refused.exit == 3);
  CHECK_SAYS(refused.err, "good.one refused this call: does not take this dtype");
  const Json plugins = json({"--list", "backends"})["backends"];
  for (const Json& b : plugins)
    if (b["state"] == "absent") {
      const std::string name = b["name"];
      const Ran not_built = explain(name);
      CHECK(not_built.exit == 3);
      CHECK_SAYS(not_built.err, "backend '" + name + "' is known but not built into this installation");
    }
}

TEST_CASE("a wrong RLK_BACKEND exits with 2, prints column and suggestion on stderr and nothing on stdout") {
  for (const char* command : {"--list", "--explain"}) {
    std::vector<std::string> words{command};
    if (words[0] == "--explain") words.emplace_back("lm_head");
    const Ran r = dispatch(words, {"RLK_BACKEND=lm_hed=native"});
    CHECK(r.exit == 2);
    CHECK(r.out == "");
    CHECK_SAYS(r.err, "error: RLK_BACKEND, column 1: unknown op 'lm_hed', did you mean 'lm_head'?\n");
  }
}

TEST_CASE("--env shows the variables also when one is wrong, and exits with 2 then") {
  const Ran r = dispatch({"--env"}, {"RLK_BACKEND=lm_hed=native"});
  CHECK(r.exit == 2);
  CHECK_SAYS(r.out, "lm_hed=native");
  CHECK_SAYS(r.err, "did you mean 'lm_head'");
  CHECK(dispatch({"--env"}).exit == 0);
  CHECK(json({"--env"})["env"]["variables"].size() == 6);
}

TEST_CASE("bytes that are no text come out as valid JSON") {
  CHECK(json({"--list", "env"},
             {"RLK_PLUGIN_TRUST=/tmp/\xff\xfe\x01 \xc3\xa4"})["env"]["variables"][2]["value"] ==
        "/tmp/\u00ff\u00fe\\x01 \u00e4");
}

TEST_CASE("--probe tells what each check said, without loading anything") {
  const Ran good = dispatch({"--probe", RLK_FIXTURES "/librlk_backend_good.so"});
  CHECK(good.exit == 0);
  const Ran crash = dispatch({"--probe", RLK_FIXTURES "/librlk_backend_crash.so"});
  CHECK(crash.exit == 4);
  CHECK_SAYS(crash.out, "it crashed while loading in a child process");
  const Json r = json({"--probe", RLK_FIXTURES "/librlk_backend_missing_symbol.so"});
  CHECK(r["ok"] == false);
  CHECK(r["checks"].back()["check"] == "elf");
  CHECK(dispatch({"--probe", "/nowhere/librlk_backend_x.so"}).exit == 4);
  const Json misnamed = json({"--probe", "/nowhere"});
  CHECK(misnamed["ok"] == false);
  CHECK(misnamed["checks"][0]["check"] == "name");
  CHECK(dispatch({"--probe", "/nowhere", "--json"}).exit == 4);
}

TEST_CASE("--strict turns a plugin that failed into exit code 4") {
  CHECK(dispatch({"--list"}, kFixtures).exit == 0);
  const Ran r = dispatch({"--list", "--strict"}, kFixtures);
  CHECK(r.exit == 4);
  CHECK_SAYS(r.err, "error: plugin load_failed: ");
  CHECK(dispatch({"--explain", "lm_head", "--strict", "--device", "hip:7"}, kFixtures).exit == 3);
}

TEST_CASE("usage mistakes exit with 2 and name the word") {
  struct Mistake {
    std::vector<std::string> words;
    const char* says;
  };
  const Mistake mistakes[] = {
      {{}, "Usage"},
      {{"--lst"}, "'--lst' is not expected here, did you mean '--list'?"},
      {{"--explan", "lm_head"}, "'--explan' is not expected here, did you mean '--explain'?"},
      {{"--version", "now"}, "'now' is not expected here; --help shows what is"},
      {{"--list", "kernels"}, "unknown list 'kernels'.  Known: ops, impls, "},
      {{"--list", "implz"}, "unknown list 'implz', did you mean 'impls'?"},
      {{"--list", "--env"}, "two commands"},
      {{"--explain", "lm_hed"}, "unknown op 'lm_hed', did you mean 'lm_head'?"},
      {{"--explain", "lm_head", "--dtype", "fp31"}, "unknown dtype 'fp31', did you mean 'fp32'?"},
      {{"--explain", "lm_head", "--dtype", "flaot16"}, "unknown dtype 'flaot16', did you mean 'float16'?"},
      {{"--explain", "lm_head", "--device", "cdua:1"}, "unknown device 'cdua', did you mean 'cuda'?"},
      {{"--explain", "lm_head", "--policy", "strct"}, "unknown policy 'strct', did you mean 'strict'?"},
      {{"--verify", "logp", "--budget", "shrot"}, "not 'shrot', did you mean 'short'?"},
      {{"--verify", "logp", "--seed", "-1"}, "--seed: it is -1, it must be 0 or more"},
      {{"--verify", "logp", "--case", "no such case"}, "logp has no case 'no such case'"},
      {{"--verify", "logp", "--transform", "nosuch"}, "logp has no transform 'nosuch'"},
      {{"--verify", "logp", "--transform", "batch size m=18"},
       "logp has no transform 'batch size m=18', did you mean 'batch size m="},
      {{"--explain", "lm_head", "--device", "gpu"}, "unknown device 'gpu': say cuda or hip"},
      {{"--explain", "lm_head", "--shape", "hidden=4x5"}, "weight is missing"},
      {{"--explain", "lm_head", "--shape", "hidden=4x5,weight=7x6"}, "hidden has K=5, weight has K=6"},
      {{"--explain", "lm_head", "--shape", "hidden"}, "is not like name=value"},
      {{"--explain", "lm_head", "--shape", "hidden=ax5,weight=7x5"}, "is not like hidden=512x4096"},
      {{"--explain", "lm_head", "--shape", "hiden=4x5,weight=7x5"},
       "no argument is called 'hiden', did you mean 'hidden'?"},
      {{"--explain", "lm_head", "--attr", "scale=2"}, "no attribute is called 'scale'"},
  };
  for (const Mistake& m : mistakes) {
    const Ran r = dispatch(m.words);
    CHECK(r.exit == 2);
    CHECK_SAYS(r.err, m.says);
  }
}

TEST_CASE("--version names the program and the library") {
  CHECK_SAYS(dispatch({"--version"}).out, "rlk-dispatch ");
  CHECK(json({"--version"}).contains("librlk_registry"));
  CHECK(dispatch({"--help"}).exit == 0);
}
