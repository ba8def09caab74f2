// The 62 golden cases of the rope family, on every engine that runs here: forward, backward and inverse
// against the float64 truth, and every wrong result (neg_*) must be rejected by the same check.
// labels: conformance fibers
// sources: rope_engines.cpp
// run: whole
#include <set>

#include "rope_support.hpp"

using namespace ropetest;
using golden::Array;
using golden::Case;

namespace {

std::string data_file(const char* name) {
  return std::string(RLK_TEST_DATA) + "/rope/" + name + ".safetensors";
}

Tensor tensor(const Array& a, DLDataType type) { return Tensor(type, a.shape).fill(a.values); }
Tensor tensor(const Array& a, Float type = Float::f32) { return tensor(a, type_of(type)); }

// The data's own 16-bit type: golden inputs are exact in bf16 or fp16. fp32 runs hold for all.
std::vector<Float> exact_types(const Array& a) {
  std::vector<Float> types{Float::f32};
  for (Float f : {Float::bf16, Float::f16}) {
    Tensor t = tensor(a, f);
    if (t.values() == a.values) types.push_back(f);
  }
  return types;
}

// One result of a case: the op's input, where it goes, and the truth.
struct Check {
  std::string in, want;
  bool backward = false;
  bool transpose = false;
};

int cases_seen = 0;
std::set<std::string> rejected;  // wrong results, by case and array

// Runs the checks of one case in every dtype that holds its inputs, then the negative controls against the
// truth they are wrong about.
void verify(const Case& c, Setting s, const std::vector<Check>& checks) {
  CAPTURE(c.name);
  ++cases_seen;
  for (Float type : exact_types(c.at(checks[0].in))) {
    for (const Check& check : checks) {
      CAPTURE(check.want);
      CAPTURE(int(type));
      const Array& want = c.at(check.want);
      Tensor x = tensor(c.at(check.in), type), out(type_of(type), x.shape);
      Setting setting = s;
      setting.attributes.backward = check.backward;
      setting.attributes.transpose = s.attributes.transpose != check.transpose;
      Tensors t = setting.tensors();
      t.x = x.dl();
      t.out = out.dl();
      const auto before = x.memory;
      CHECK(run_all(setting.attributes, t, out) == "");
      CHECK(before == x.memory);

      Geometry g;
      REQUIRE(rlk::rotary::read(setting.attributes, t, g) == "");
      const auto partner = partner_of(g.head_dim, g.rotary_dim, g.offset, g.out_adjacent);
      CHECK(outside(out, want.values, type, partner) == 0);
      for (const auto& [name, wrong] : c.arrays) {
        if (name.rfind("neg_" + check.want, 0) != 0) continue;
        CHECK(outside(out, wrong.values, type, partner) > out.size() / 20);
        rejected.insert(c.name + "." + name);
      }
    }
  }
}

const std::vector<Check> kBoth{{"x", "y"}, {"g", "dx", true}};

void with_tables(Setting& s, const Case& c) {
  s.cos = tensor(c.at("cos"));
  s.sin = tensor(c.at("sin"));
}

// cos and sin of fp32 angles, rounded once.
void with_angles(Setting& s, const Array& angles) {
  s.cos = Tensor(type_of(Float::f32), angles.shape);
  s.sin = Tensor(type_of(Float::f32), angles.shape);
  for (std::int64_t i = 0; i < angles.size(); ++i) {
    s.cos.set(i, std::cos(angles.values[std::size_t(i)]));
    s.sin.set(i, std::sin(angles.values[std::size_t(i)]));
  }
}

}  // namespace

TEST_CASE("golden: candle's rope, rope_i and rope_thd") {
  for (const auto& [name, c] : golden::read(data_file("rope_candle"))) {
    Setting s;
    s.attributes.layout =
        name.find("rope_thd") != std::string::npos ? rlk::rotary::Layout::bshd : rlk::rotary::Layout::bhsd;
    s.attributes.pairing = name.find("rope_i_") != std::string::npos ? rlk::rotary::Pairing::adjacent
                                                                     : rlk::rotary::Pairing::half;
    with_tables(s, c);
    auto checks = kBoth;
    if (c.has("inv_y")) checks.push_back({"x", "inv_y", false, true});
    verify(c, s, checks);
  }
}

TEST_CASE("golden: flash-attn's offsets and packed sequences") {
  for (const auto& [name, c] : golden::read(data_file("rope_flash"))) {
    Setting s;
    const bool packed = c.has("cu_seqlens");
    s.attributes.layout = packed ? rlk::rotary::Layout::thd : rlk::rotary::Layout::bshd;
    s.attributes.pairing =
        c.parameters["interleaved"] == 1 ? rlk::rotary::Pairing::adjacent : rlk::rotary::Pairing::half;
    s.attributes.rotary_dim = c.parameters["rotary_dim"];
    with_tables(s, c);
    s.starts = tensor(c.at("seqlen_offsets"), kInt32);
    if (packed) s.cu_seqlens = tensor(c.at("cu_seqlens"), kInt32);
    auto checks = kBoth;
    if (c.has("conj_y")) checks.push_back({"x", "conj_y", false, true});
    verify(c, s, checks);
    if (packed) {  // the same rows by explicit positions
      Setting explicit_rows;
      explicit_rows.attributes = s.attributes;
      with_tables(explicit_rows, c);
      explicit_rows.positions = tensor(c.at("pos"), kInt64);
      verify(c, explicit_rows, checks);
      --cases_seen;
    }
  }
}

TEST_CASE("golden: DeepSpeed, torchembed and Liger shapes") {
  for (const auto& [name, c] : golden::read(data_file("rope_frameworks"))) {
    Setting s;
    with_tables(s, c);
    if (name.rfind("deepspeed", 0) == 0) {
      s.attributes.layout =
          name == "deepspeed_bshd_broadcast" ? rlk::rotary::Layout::bshd : rlk::rotary::Layout::sbhd;
      s.attributes.table = rlk::rotary::TableWidth::full;
      verify(c, s, kBoth);
    } else if (name == "torchembed_bshd_adjacent") {
      s.attributes.layout = rlk::rotary::Layout::bshd;
      s.attributes.pairing = rlk::rotary::Pairing::adjacent;
      verify(c, s, kBoth);
    } else {
      s.attributes.layout = rlk::rotary::Layout::bhsd;
      verify(c, s, {{"q", "yq"}, {"k", "yk"}, {"gq", "dq", true}, {"gk", "dk", true}});
    }
  }
}

TEST_CASE("golden: Megatron-LM's MLA query") {
  for (const auto& [name, c] : golden::read(data_file("rope_megatron"))) {
    if (name == "mla_kv_split_sbhd") continue;  // rope_test.cpp
    const auto parameter = [&, &c = c](const char* key, int otherwise) {
      return c.parameters.contains(key) ? c.parameters[key].get<int>() : otherwise;
    };
    Setting s;
    const bool packed = c.has("cu_seqlens");
    s.attributes.layout = packed ? rlk::rotary::Layout::thd : rlk::rotary::Layout::sbhd;
    s.attributes.pairing = parameter("remove_interleaving", 0) != 0 ? rlk::rotary::Pairing::adjacent
                                                                    : rlk::rotary::Pairing::adjacent_to_half;
    s.attributes.second_half_last = true;
    s.attributes.rotary_dim = parameter("emb_dim", 0);
    s.attributes.rotary_offset = parameter("nope_dim", 0);
    s.attributes.transpose = parameter("inverse", 0) != 0;
    s.attributes.cp_size = parameter("cp_size", 1);
    s.attributes.cp_rank = parameter("cp_rank", 0);
    with_tables(s, c);
    if (packed) s.cu_seqlens = tensor(c.at("cu_seqlens"), kInt32);
    verify(c, s, kBoth);
  }
}

TEST_CASE("golden: M-RoPE with contiguous and interleaved sections") {
  for (const auto& [name, c] : golden::read(data_file("rope_mrope"))) {
    Setting s;
    s.attributes.layout = rlk::rotary::Layout::bshd;
    const auto section = c.parameters["mrope_section"].get<std::vector<std::int64_t>>();
    std::copy(section.begin(), section.end(), s.attributes.mrope);
    s.attributes.mrope_interleaved = name.find("interleaved") != std::string::npos;
    const Array& positions = c.at("position_ids");
    const Array& frequencies = c.at("inv_freq");
    double last = 0;
    for (double p : positions.values) last = std::max(last, p);
    Array angles{{std::int64_t(last) + 1, frequencies.size()}, {}};
    for (std::int64_t p = 0; p < angles.shape[0]; ++p) {
      for (double f : frequencies.values) angles.values.push_back(double(float(double(p) * f)));
    }
    with_angles(s, angles);
    s.positions = tensor(positions, kInt64);
    verify(c, s, kBoth);
  }
}

TEST_CASE("golden: realistic head size and far positions, fp32 and bf16 tables") {
  for (const auto& [name, c] : golden::read(data_file("rope_realistic"))) {
    Setting s;
    s.attributes.layout = rlk::rotary::Layout::thd;
    with_tables(s, c);
    verify(c, s, kBoth);
  }
}

TEST_CASE("golden: Transformer Engine's start positions and context parallelism") {
  for (const auto& [name, c] : golden::read(data_file("rope_te"))) {
    Setting s;
    const bool packed = c.has("cu_seqlens");
    s.attributes.layout = packed ? rlk::rotary::Layout::thd : rlk::rotary::Layout::sbhd;
    s.attributes.pairing =
        c.parameters["interleaved"] == 1 ? rlk::rotary::Pairing::adjacent : rlk::rotary::Pairing::half;
    s.attributes.table = rlk::rotary::TableWidth::full;
    if (c.parameters.contains("cp_size")) {
      s.attributes.cp_size = c.parameters["cp_size"];
      s.attributes.cp_rank = c.parameters["cp_rank"];
    }
    with_angles(s, c.at("freqs"));
    s.starts = tensor(c.at("start_positions"), kInt32);
    if (packed) s.cu_seqlens = tensor(c.at("cu_seqlens"), kInt32);
    verify(c, s, kBoth);
  }
}

TEST_CASE("golden: vLLM's cache, offset and head counts") {
  for (const auto& [name, c] : golden::read(data_file("rope_vllm"))) {
    Setting s;
    s.attributes.layout = rlk::rotary::Layout::thd;
    s.attributes.pairing =
        c.parameters["is_neox"] == 1 ? rlk::rotary::Pairing::half : rlk::rotary::Pairing::adjacent;
    s.attributes.rotary_offset = c.parameters["rope_dim_offset"];
    const Array& cache = c.at("cos_sin_cache");
    const std::int64_t rows = cache.shape[0], width = cache.shape[1];
    s.attributes.rotary_dim = width;
    s.cos = s.sin = Tensor(type_of(Float::f32), {rows, width / 2});
    for (std::int64_t i = 0; i < rows * width; ++i) {
      (i % width < width / 2 ? s.cos : s.sin)
          .set(i / width * (width / 2) + i % (width / 2), cache.values[std::size_t(i)]);
    }
    s.positions = tensor(c.at("positions"), kInt64);
    verify(c, s,
           {{"q", "yq"},
            {"k", "yk"},
            {"gq", "dq", true},
            {"gk", "dk", true},
            {"q", "inv_yq", false, true},
            {"k", "inv_yk", false, true}});
  }
  CHECK(cases_seen == 62 - 13 - 1);  // the 13 table cases and the key-value split have their own tests
  CHECK(rejected.size() == 18);      // every wrong result that the files hold
}
