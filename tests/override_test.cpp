// RLK_BACKEND's grammar: what it means, which rule wins, and what is said about every kind of mistake.
#include "src/override.hpp"

#include <doctest/doctest.h>

#include <string>

using namespace rlk;

namespace {

const KnownNames kNames{
    {"chunk_kda", "kda_bwd", "kda_decode", "kda_fwd", "lm_head", "rope", "rope_", "rope_bwd", "rope_i"},
    {{"chunk_kda", "kda_fwd"}, {"rope_i", "rope"}},
    {"cuda", "hip", "native", "onednn"},
    {"cuda.simt", "cuda.sm90", "native.avx512", "native.golden"}};

Override parse(std::string_view spec) { return Override::parse(spec, "RLK_BACKEND", kNames); }

std::string error_of(std::string_view spec) { return std::string(parse(spec).error().message()); }

// The rule that serves an op, as written; "" when there is none.
std::string rule_for(std::string_view spec, std::string_view op, std::string_view device = "cpu") {
  const Override parsed = parse(spec);
  REQUIRE_MESSAGE(parsed.error(), parsed.error().message());
  const OverrideRule* rule = parsed.find(op, device);
  return rule ? rule->text : "";
}

}  // namespace

TEST_CASE("an empty spec has no rules and no error") {
  for (const char* spec : {"", "  ", "\t"}) {
    CHECK(parse(spec).error());
    CHECK(parse(spec).rules().empty());
  }
}

TEST_CASE("a family is a word for all its members, and is suggested like one") {
  const KnownNames names{
      {"rope"}, {}, {"native"}, {"native.golden", "native.vector.avx2", "native.vector.scalar"}};
  const auto error = [&](std::string_view spec) {
    return std::string(Override::parse(spec, "RLK_BACKEND", names).error().message());
  };
  CHECK(error("rope=native.vector") == "");
  CHECK(error("rope=native.vector.avx2") == "");
  CHECK(error("rope=native.vectr")
            .find("unknown implementation 'native.vectr', did you mean 'native.vector'?") !=
        std::string::npos);
  CHECK(error("rope=native.vect").find("unknown implementation") != std::string::npos);
  CHECK(names_implementation("native.vector", "native.vector.avx2"));
  CHECK(names_implementation("native.vector.avx2", "native.vector.avx2"));
  CHECK_FALSE(names_implementation("native.vect", "native.vector.avx2"));
  CHECK_FALSE(names_implementation("native.vector.avx2", "native.vector"));
}

TEST_CASE("a bare chain stands for every op") {
  CHECK(rule_for("native", "rope") == "native");
  CHECK(rule_for("native", "lm_head", "cuda") == "native");
}

TEST_CASE("a chain keeps its items in order, each with its kind") {
  const Override parsed = parse("rope=cuda.sm90 : onednn:!hip: auto");
  REQUIRE(parsed.error());
  REQUIRE(parsed.rules().size() == 1);
  const auto& chain = parsed.rules()[0].chain;
  REQUIRE(chain.size() == 4);
  CHECK(chain[0].kind == ChainItem::implementation);
  CHECK(chain[0].name == "cuda.sm90");
  CHECK(chain[1].kind == ChainItem::backend);
  CHECK(chain[1].name == "onednn");
  CHECK(chain[2].kind == ChainItem::exclude);
  CHECK(chain[2].name == "hip");
  CHECK(chain[3].kind == ChainItem::automatic);
}

TEST_CASE("the most specific selector wins, whatever the textual order") {
  for (const char* spec :
       {"*=native,kda*=cuda,kda_f*=hip;kda_fwd=onednn", "kda_fwd=onednn;kda_f*=hip,kda*=cuda;*=native"}) {
    CHECK(rule_for(spec, "kda_fwd") == "kda_fwd=onednn");
    CHECK(rule_for(spec, "kda_bwd") == "kda*=cuda");
    CHECK(rule_for(spec, "rope") == "*=native");
  }
}

TEST_CASE("a device makes a selector more specific than the same without, but not than a longer name") {
  const char* spec = "rope@cuda=cuda.sm90:auto,rope=native,*@cuda=cuda";
  CHECK(rule_for(spec, "rope", "cuda") == "rope@cuda=cuda.sm90:auto");
  CHECK(rule_for(spec, "rope", "cpu") == "rope=native");
  CHECK(rule_for(spec, "lm_head", "cuda") == "*@cuda=cuda");
  CHECK(rule_for(spec, "lm_head", "cpu") == "");
}

TEST_CASE("names that end alike are told apart") {
  CHECK(rule_for("rope_=native", "rope") == "");
  CHECK(rule_for("rope_=native", "rope_") == "rope_=native");
  CHECK(rule_for("rope?=native", "rope_") == "rope?=native");
  CHECK(rule_for("rope?=native", "rope") == "");
}

TEST_CASE("an alias selects the op it stands for") {
  CHECK(rule_for("rope_i=native", "rope") == "rope_i=native");
  CHECK(error_of("rope_i=native,rope=cuda").find("the same selector twice") != std::string::npos);
}

TEST_CASE("every mistake has a column, and says what would be right") {
  struct Mistake {
    const char* spec;
    const char* message;
  };
  const Mistake mistakes[] = {
      {"lm_hed=native",
       "RLK_BACKEND, column 1: unknown op 'lm_hed', did you mean 'lm_head'?  Known ops: chunk_kda, kda_bwd, "
       "kda_decode, kda_fwd, lm_head, "
       "rope, rope_, rope_bwd, rope_i"},
      {"rope=cdua",
       "RLK_BACKEND, column 6: unknown backend 'cdua', did you mean 'cuda'?  Known backends: cuda, hip, "
       "native, onednn"},
      {"lm_head=native; rope = cuda : nativ",
       "RLK_BACKEND, column 31: unknown backend 'nativ', did you mean 'native'?  Known backends: cuda, hip, "
       "native, onednn"},
      {"rope=tensorflow",
       "RLK_BACKEND, column 6: unknown backend 'tensorflow'.  Known backends: cuda, hip, native, onednn"},
      {"rope=cuda.sm91",
       "RLK_BACKEND, column 6: unknown implementation 'cuda.sm91', did you mean 'cuda.sm90'?  Known "
       "implementations: cuda.simt, cuda.sm90"},
      {"xyz*=native",
       "RLK_BACKEND, column 1: 'xyz*' matches no op.  Known ops: kda_bwd, kda_decode, kda_fwd, lm_head, "
       "rope, rope_, rope_bwd"},
      {"rope@gpu=cuda",
       "RLK_BACKEND, column 6: unknown device 'gpu', did you mean 'cpu'?  Known devices: cpu, cuda, hip"},
      {"rope@=cuda", "RLK_BACKEND, column 6: '@' without a device; devices: cpu, cuda, hip"},
      {"=cuda", "RLK_BACKEND, column 1: '=' without an op before it; write '*=' for every op"},
      {"rope=",
       "RLK_BACKEND, column 6: a backend, an implementation or 'auto' is missing here.  Known backends: "
       "cuda, hip, native, onednn"},
      {"rope=cuda:",
       "RLK_BACKEND, column 11: a backend, an implementation or 'auto' is missing here.  Known backends: "
       "cuda, hip, native, onednn"},
      {"rope=cuda,,lm_head=cuda",
       "RLK_BACKEND, column 11: an empty rule; rules are separated by one ',' or ';'"},
      {"rope=cuda;", "RLK_BACKEND, column 11: an empty rule; rules are separated by one ',' or ';'"},
      {"rope=lm_head=cuda",
       "RLK_BACKEND, column 13: a second '=' in one rule; rules are separated by ',' or ';'"},
      {"rope=!", "RLK_BACKEND, column 6: '!' without a backend after it"},
      {"rope=!cuda.sm90",
       "RLK_BACKEND, column 7: '!' takes a backend and 'cuda.sm90' is an implementation; write '!cuda' to "
       "leave out all of it"},
      {"rope=cuda,rope=native",
       "RLK_BACKEND, column 11: the same selector twice: a second rule for 'rope'; the first is 'rope=cuda' "
       "in column 1"},
      {"native,cuda", "RLK_BACKEND, column 8: a second rule for '*'; the first is 'native' in column 1"},
      {"*=native,cuda", "RLK_BACKEND, column 10: a second rule for '*'; the first is '*=native' in column 1"},
      {"kda_f*=cuda,*_fw*=hip", ""},
      {"kda_f*=cuda,*a_fwd=hip",
       "RLK_BACKEND, column 13: '*a_fwd' and 'kda_f*' (column 1) are equally specific and both match "
       "'kda_fwd'; make one longer"},
      {"rope=cu\x1b[31mda",
       "RLK_BACKEND, column 6: unknown backend 'cu\\x1b[31mda'.  Known backends: cuda, hip, native, onednn"},
  };
  for (const Mistake& m : mistakes) CHECK(error_of(m.spec) == m.message);
}

TEST_CASE("a spec with a mistake is an error as a whole and has no rules") {
  const Override parsed = parse("lm_head=native,rope=cdua");
  CHECK(parsed.error().code() == RLK_CONFIGURATION);
  CHECK(parsed.rules().empty());
  CHECK(parsed.text() == "lm_head=native,rope=cdua");
}

TEST_CASE("4096 bytes are read and 4097 are an error") {
  std::string spec = "native";
  spec.resize(4096, ' ');
  CHECK(error_of(spec) == "");
  spec += ' ';
  CHECK(error_of(spec) == "RLK_BACKEND, column 4097: the text has 4097 bytes, at most 4096 are read");
}

TEST_CASE("an implementation of a backend that is not loaded is left to resolution") {
  CHECK(error_of("rope=hip.simt") == "");
  CHECK(error_of("rope=onednn.matmul") == "");
}

TEST_CASE("errors name where the spec came from") {
  CHECK(std::string(Override::parse("cuddda", "call argument", kNames).error().message()).substr(0, 24) ==
        "call argument, column 1:");
}

TEST_CASE("the nearest name is the one a typo away, and nothing when none is") {
  const std::vector<std::string_view> names{"rope", "rope_bwd", "lm_head", "kda_fwd"};
  CHECK(nearest_name("lm_haed", names) == "lm_head");
  CHECK(nearest_name("kda_fdw", names) == "kda_fwd");
  CHECK(nearest_name("rop", names) == "rope");
  CHECK(nearest_name("softmax", names) == "");
  CHECK(nearest_name(std::string(5000, 'x'), names) == "");
}
