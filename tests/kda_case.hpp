// A KDA call with its own memory, for the tests: built from a golden file or at random, in any dtype, run by
// any form.
#pragma once

#include <cstdint>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "arithmetic/kda/problem.hpp"
#include "rlk/ops.hpp"

namespace kda_test {

using rlk::Float;
using rlk::kda::Problem;
using rlk::kda::States;
using rlk::kda::Tensor;

struct Array {
  std::vector<std::int64_t> shape;
  std::vector<float> f32;
  std::vector<std::int64_t> i64;
};

struct Golden {
  std::map<std::string, Array> arrays;
  std::map<std::string, std::string> facts;
};

inline Golden read_golden(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  const std::string bytes((std::istreambuf_iterator<char>(file)), {});
  std::uint64_t header_size = 0;
  std::memcpy(&header_size, bytes.data(), 8);
  const auto header = nlohmann::json::parse(bytes.substr(8, header_size));
  Golden golden;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      golden.facts = entry.get<std::map<std::string, std::string>>();
      continue;
    }
    Array array;
    array.shape = entry.at("shape").get<std::vector<std::int64_t>>();
    const auto from = entry.at("data_offsets")[0].get<std::size_t>(),
               to = entry.at("data_offsets")[1].get<std::size_t>();
    const char* data = bytes.data() + 8 + header_size + from;
    if (entry.at("dtype") == "I64") {
      array.i64.resize((to - from) / 8);
      std::memcpy(array.i64.data(), data, to - from);
    } else {
      array.f32.resize((to - from) / 4);
      std::memcpy(array.f32.data(), data, to - from);
    }
    golden.arrays[name] = std::move(array);
  }
  return golden;
}

// Memory of one tensor in its dtype, NaN until written.
struct Buffer {
  Float type = Float::f32;
  std::vector<std::uint8_t> bytes;

  Buffer() = default;
  Buffer(Float t, std::size_t n) : type(t), bytes(n * std::size_t(rlk::bytes_of(t)), 0xff) {}
  Buffer(Float t, const std::vector<float>& values) : Buffer(t, values.size()) {
    for (std::size_t i = 0; i < values.size(); ++i)
      rlk::kda::store(bytes.data(), type, std::int64_t(i), values[i]);
  }
  std::size_t size() const { return bytes.size() / std::size_t(rlk::bytes_of(type)); }
  float operator[](std::size_t i) const { return rlk::kda::load(bytes.data(), type, std::int64_t(i)); }
  std::vector<float> values() const {
    std::vector<float> out(size());
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = (*this)[i];
    return out;
  }
  bool operator==(const Buffer& other) const { return type == other.type && bytes == other.bytes; }
};

// RMS(x - ref) / RMS(ref); an all-zero reference asks for exact zeros.
inline double rms_ratio(const Buffer& x, const std::vector<float>& ref) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < ref.size(); ++i) {
    const double difference = double(x[i]) - ref[i];
    error += difference * difference;
    norm += double(ref[i]) * ref[i];
  }
  if (norm == 0) return error == 0 ? 0 : INFINITY;
  return error == error ? std::sqrt(error / norm) : INFINITY;
}

struct Case {
  Problem p;
  std::map<std::string, Buffer> in, out;
  std::map<std::string, std::vector<float>> truth;
  std::vector<std::int64_t> cu_seqlens;
  std::vector<float> a_log, dt_bias, d_a_log, d_dt_bias;
  std::vector<std::uint8_t> records;  // chunk_records; empty: backward recomputes

  Case() = default;
  Case(const Case&) = delete;
  Case(Case&&) = default;
  Case& operator=(Case&&) = default;

  std::size_t tokens() const { return std::size_t(p.batch * p.tokens); }
  std::size_t states() const {
    return std::size_t(p.sequences) * std::size_t(p.value_heads) * std::size_t(p.k_dim) *
           std::size_t(p.v_dim);
  }

  Tensor tensor(Buffer& b, int heads, int width) const {
    return {b.bytes.data(), b.type, p.tokens * heads * width, std::int64_t(heads) * width, width};
  }
  States state(Buffer& b) const {
    const std::int64_t matrix = std::int64_t(p.k_dim) * p.v_dim;
    return {b.bytes.data(), b.type, matrix * p.value_heads, matrix};
  }

  // Allocates outputs and points p at every buffer. Call again after a change of sizes or options.
  void bind(bool backward = true) {
    const auto H = std::size_t(p.heads), HV = std::size_t(p.value_heads), K = std::size_t(p.k_dim),
               V = std::size_t(p.v_dim), n = tokens();
    const Float type = in.at("q").type;
    p.cu_seqlens = cu_seqlens.empty() ? nullptr : cu_seqlens.data();
    p.a_log = a_log.empty() ? nullptr : a_log.data();
    p.dt_bias = dt_bias.empty() ? nullptr : dt_bias.data();
    p.q = tensor(in.at("q"), p.heads, p.k_dim);
    p.k = tensor(in.at("k"), p.heads, p.k_dim);
    p.v = tensor(in.at("v"), p.value_heads, p.v_dim);
    p.g = tensor(in.at("g"), p.value_heads, p.k_dim);
    p.beta = tensor(in.at("beta"), p.value_heads, 1);
    out.clear();
    out["o"] = Buffer(type, n * HV * V);
    out["ht"] = Buffer(Float::f32, states());
    p.out = tensor(out["o"], p.value_heads, p.v_dim);
    p.final = state(out["ht"]);
    p.initial = in.count("h0") ? state(in.at("h0")) : States{};
    if (!backward || !in.count("do")) return;
    out["dq"] = Buffer(type, n * H * K);
    out["dk"] = Buffer(type, n * H * K);
    out["dv"] = Buffer(type, n * HV * V);
    out["dg"] = Buffer(in.at("g").type, n * HV * K);
    out["dbeta"] = Buffer(in.at("beta").type, n * HV);
    out["dh0"] = Buffer(Float::f32, states());
    d_a_log.assign(a_log.size(), NAN);
    d_dt_bias.assign(dt_bias.size(), NAN);
    p.d_out = tensor(in.at("do"), p.value_heads, p.v_dim);
    p.d_final = in.count("dht") ? state(in.at("dht")) : States{};
    p.d_q = tensor(out["dq"], p.heads, p.k_dim);
    p.d_k = tensor(out["dk"], p.heads, p.k_dim);
    p.d_v = tensor(out["dv"], p.value_heads, p.v_dim);
    p.d_g = tensor(out["dg"], p.value_heads, p.k_dim);
    p.d_beta = tensor(out["dbeta"], p.value_heads, 1);
    p.d_initial = state(out["dh0"]);
    p.d_a_log = a_log.empty() ? nullptr : d_a_log.data();
    p.d_dt_bias = dt_bias.empty() ? nullptr : d_dt_bias.data();
  }

  // Memory for chunk_records, 0xff until written.
  void keep_records(std::int64_t each) {
    records.assign(std::size_t(p.slots() * p.value_heads * each), 0xff);
  }
  std::int64_t record_bytes() const { return 17408 + 384 * p.k_dim; }

  // Copies d_a_log and d_dt_bias next to the other outputs.
  void collect() {
    if (!d_a_log.empty()) out["dA_log"] = Buffer(Float::f32, d_a_log);
    if (!d_dt_bias.empty()) out["ddt_bias"] = Buffer(Float::f32, d_dt_bias);
  }
};

// The golden case as a call on `type` data; gate inputs, states and parameters stay fp32, as in the files.
inline Case from_golden(const Golden& golden, Float type = Float::f32) {
  Case c;
  const auto number = [&](const char* name) { return std::stoi(golden.facts.at(name)); };
  const auto flag = [&](const char* name) { return golden.facts.at(name) == "true"; };
  c.p.batch = number("B");
  c.p.tokens = number("T");
  c.p.sequences = number("N");
  c.p.heads = number("H");
  c.p.value_heads = number("HV");
  c.p.k_dim = number("K");
  c.p.v_dim = number("V");
  c.p.scale = std::stod(golden.facts.at("scale"));
  c.p.l2norm = flag("l2norm");
  c.p.beta_sigmoid = flag("beta_sigmoid");
  c.p.neg_eigval = flag("allow_neg_eigval");
  if (flag("gate_in_kernel")) {
    const bool bounded = golden.facts.at("lower_bound") != "null";
    c.p.gate = bounded ? rlk::kda::Gate::bounded : rlk::kda::Gate::softplus;
    if (bounded) c.p.lower_bound = std::stod(golden.facts.at("lower_bound"));
  }
  for (const auto& [name, array] : golden.arrays) {
    if (name == "in_cu_seqlens") {
      c.cu_seqlens = array.i64;
    } else if (name == "in_A_log") {
      c.a_log = array.f32;
    } else if (name == "in_dt_bias") {
      c.dt_bias = array.f32;
    } else if (name.starts_with("in_")) {
      const std::string key = name.substr(3);
      const bool data = key == "q" || key == "k" || key == "v" || key == "do";
      c.in[key] = Buffer(data ? type : Float::f32, array.f32);
    } else if (name.starts_with("out_")) {
      c.truth[name.substr(4)] = array.f32;
    }
  }
  c.bind();
  return c;
}

// What random() makes.
struct Shape {
  std::int64_t batch = 1, tokens = 65;
  int heads = 1, value_heads = 1, k = 32, v = 32;
  rlk::kda::Gate gate = rlk::kda::Gate::none;
  bool v_first = false, norm = false, sigmoid = false, negative = false;
  int chunk = 64;
  std::vector<std::int64_t> bounds{};
  Float type = Float::f32;
  float gate_scale = 0.3f;  // of given log decays
  double masked = 0;        // share of gates at -1000
  bool collinear = false;   // keys within 5% of each other, beta near 1
};

inline Case random_case(const Shape& s, std::uint32_t seed) {
  std::mt19937 bits(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform;
  Case c;
  Problem& p = c.p;
  p.batch = s.batch;
  p.tokens = s.tokens;
  p.sequences = s.bounds.empty() ? s.batch : std::int64_t(s.bounds.size()) - 1;
  p.heads = s.heads;
  p.value_heads = s.value_heads;
  p.k_dim = s.k;
  p.v_dim = s.v;
  p.chunk = s.chunk;
  p.gate = s.gate;
  p.v_first = s.v_first;
  p.l2norm = s.norm;
  p.beta_sigmoid = s.sigmoid;
  p.neg_eigval = s.negative;
  p.scale = 1 / std::sqrt(double(s.k));
  c.cu_seqlens = s.bounds;
  const auto fill = [&](std::size_t n, auto make) {
    std::vector<float> x(n);
    for (float& value : x) value = make();
    return x;
  };
  const std::size_t n = c.tokens(), H = std::size_t(s.heads), HV = std::size_t(s.value_heads),
                    K = std::size_t(s.k), V = std::size_t(s.v);
  const float unit = 1 / std::sqrt(float(s.k));
  c.in["q"] = Buffer(s.type, fill(n * H * K, [&] { return normal(bits) * unit; }));
  c.in["k"] = Buffer(s.type, fill(n * H * K, [&] {
                       return s.collinear ? unit * (1 + 0.05f * normal(bits)) : unit * normal(bits);
                     }));
  c.in["v"] = Buffer(s.type, fill(n * HV * V, [&] { return normal(bits); }));
  c.in["g"] = Buffer(Float::f32, fill(n * HV * K, [&] {
                       if (s.gate != rlk::kda::Gate::none) return normal(bits);
                       if (uniform(bits) < s.masked) return -1000.0f;
                       return -s.gate_scale * uniform(bits);
                     }));
  c.in["beta"] = Buffer(Float::f32, fill(n * HV, [&] {
                          if (s.sigmoid) return normal(bits);
                          return s.collinear ? 0.9f + 0.1f * uniform(bits) : uniform(bits);
                        }));
  c.in["h0"] = Buffer(Float::f32, fill(c.states(), [&] { return 0.5f * normal(bits); }));
  c.in["do"] = Buffer(s.type, fill(n * HV * V, [&] { return normal(bits); }));
  c.in["dht"] = Buffer(Float::f32, fill(c.states(), [&] { return 0.3f * normal(bits); }));
  if (s.gate != rlk::kda::Gate::none) {
    c.a_log = fill(HV, [&] { return uniform(bits); });
    c.dt_bias = fill(HV * K, [&] { return 0.5f * normal(bits); });
  }
  c.bind();
  return c;
}

// The case as a call of the library. `place` may move a tensor to where the call shall find it.
class Views {
 public:
  using Place = std::function<void(rlk::Tensor&)>;
  explicit Views(Case& c, Place place = {}) : c_(c), p_(c.p), place_(std::move(place)) {}

  rlk::Status forward(const rlk::Options& options) {
    rlk::KdaFwd a;
    common(a);
    a.out = view("o", c_.out.at("o"), p_.value_heads, p_.v_dim);
    a.final_state = state("ht", c_.out.at("ht"), p_.sequences);
    if (c_.out.count("chunk_states"))
      a.chunk_states = state("chunk_states", c_.out.at("chunk_states"), p_.slots());
    if (c_.out.count("chunk_inverses"))
      a.chunk_inverses = view("chunk_inverses", c_.out.at("chunk_inverses"), p_.value_heads, p_.chunk);
    if (!c_.records.empty()) a.chunk_records = records();
    return rlk::kda_fwd(a, options);
  }

  // `without`: gradients that the call leaves out, by their names in Case::out.
  rlk::Status backward(const rlk::Options& options, const std::set<std::string>& without = {}) {
    rlk::KdaBwd a;
    common(a);
    if (c_.out.count("chunk_states"))
      a.chunk_states = state("chunk_states", c_.out.at("chunk_states"), p_.slots());
    if (!c_.records.empty()) a.chunk_records = records();
    a.d_out = view("do", c_.in.at("do"), p_.value_heads, p_.v_dim);
    if (c_.in.count("dht")) a.d_final_state = state("dht", c_.in.at("dht"), p_.sequences);
    const auto wanted = [&](const char* name) { return !without.contains(name); };
    if (wanted("dq")) a.d_q = view("dq", c_.out.at("dq"), p_.heads, p_.k_dim);
    if (wanted("dk")) a.d_k = view("dk", c_.out.at("dk"), p_.heads, p_.k_dim);
    if (wanted("dv")) a.d_v = view("dv", c_.out.at("dv"), p_.value_heads, p_.v_dim);
    if (wanted("dg")) a.d_g = view("dg", c_.out.at("dg"), p_.value_heads, p_.k_dim);
    if (wanted("dbeta")) a.d_beta = view("dbeta", c_.out.at("dbeta"), p_.value_heads, 0);
    if (wanted("dh0")) a.d_initial_state = state("dh0", c_.out.at("dh0"), p_.sequences);
    if (p_.d_a_log && wanted("dA_log")) a.d_a_log = floats("dA_log", c_.d_a_log, {p_.value_heads});
    if (p_.d_dt_bias && wanted("ddt_bias"))
      a.d_dt_bias = floats("ddt_bias", c_.d_dt_bias, {p_.value_heads, p_.k_dim});
    const rlk::Status status = rlk::kda_bwd(a, options);
    c_.collect();
    return status;
  }

 private:
  template <class Args>
  void common(Args& a) {
    a.q = view("q", c_.in.at("q"), p_.heads, p_.k_dim);
    a.k = view("k", c_.in.at("k"), p_.heads, p_.k_dim);
    a.v = view("v", c_.in.at("v"), p_.value_heads, p_.v_dim);
    a.g = view("g", c_.in.at("g"), p_.value_heads, p_.k_dim);
    a.beta = view("beta", c_.in.at("beta"), p_.value_heads, 0);
    if (c_.in.count("h0")) a.initial_state = state("h0", c_.in.at("h0"), p_.sequences);
    if (!c_.a_log.empty()) a.a_log = floats("a_log", c_.a_log, {p_.value_heads});
    if (!c_.dt_bias.empty()) a.dt_bias = floats("dt_bias", c_.dt_bias, {p_.value_heads, p_.k_dim});
    if (!c_.cu_seqlens.empty())
      a.cu_seqlens =
          keep("cu_seqlens", rlk::Tensor(c_.cu_seqlens.data(), {p_.sequences + 1}, rlk::DType::i64));
    a.scale = p_.scale;
    a.state_v_first = p_.v_first;
    a.qk_l2norm = p_.l2norm;
    a.beta_sigmoid = p_.beta_sigmoid;
    a.allow_neg_eigval = p_.neg_eigval;
    a.gate = static_cast<typename Args::Gate>(p_.gate);
    a.lower_bound = p_.lower_bound;
    a.chunk_size = p_.chunk;
  }

  static rlk::DType dtype(Float type) {
    return type == Float::f32 ? rlk::DType::f32 : type == Float::bf16 ? rlk::DType::bf16 : rlk::DType::f16;
  }
  const rlk::Tensor& keep(const std::string& name, const rlk::Tensor& t) {
    rlk::Tensor& kept = kept_[name] = t;
    if (place_) place_(kept);
    return kept;
  }
  const rlk::Tensor& view(const std::string& name, Buffer& b, std::int64_t heads, std::int64_t width) {
    if (width == 0)
      return keep(name, rlk::Tensor(b.bytes.data(), {p_.batch, p_.tokens, heads}, dtype(b.type)));
    return keep(name, rlk::Tensor(b.bytes.data(), {p_.batch, p_.tokens, heads, width}, dtype(b.type)));
  }
  const rlk::Tensor& state(const std::string& name, Buffer& b, std::int64_t rows) {
    const std::int64_t first = p_.v_first ? p_.v_dim : p_.k_dim, second = p_.v_first ? p_.k_dim : p_.v_dim;
    return keep(name, rlk::Tensor(b.bytes.data(), {rows, p_.value_heads, first, second}, dtype(b.type)));
  }
  const rlk::Tensor& floats(const std::string& name, std::vector<float>& x,
                            std::initializer_list<std::int64_t> shape) {
    return keep(name, rlk::Tensor(x.data(), shape, rlk::DType::f32));
  }

  const rlk::Tensor& records() {
    const auto each = std::int64_t(c_.records.size()) / (p_.slots() * p_.value_heads);
    return keep("chunk_records",
                rlk::Tensor(c_.records.data(), {p_.slots(), p_.value_heads, each}, rlk::DType::u8));
  }

  Case& c_;
  const Problem& p_;
  Place place_;
  std::map<std::string, rlk::Tensor> kept_;
};

// Forward and backward by the named implementation.
inline rlk::Status run(Case& c, std::string_view implementation, std::int32_t threads = 0) {
  Views views(c);
  rlk::Options options;
  options.backend = implementation;
  options.threads = threads;
  if (rlk::Status status = views.forward(options); !status) return status;
  return views.backward(options);
}

}  // namespace kda_test
