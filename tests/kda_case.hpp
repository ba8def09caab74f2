// A KDA call with its own memory, for the tests: built from a golden file or at random, in any dtype, run by
// any form.
#pragma once

#include <cstdint>
#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "../backends/simt/kda_problem.hpp"

namespace kda_test {

using rlk::kda::Problem;
using rlk::kda::States;
using rlk::kda::Tensor;
using rlk::kda::Type;

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

inline std::size_t bytes_of(Type type) { return type == Type::f32 ? 4 : 2; }

// Memory of one tensor in its dtype, NaN until written.
struct Buffer {
  Type type = Type::f32;
  std::vector<std::uint8_t> bytes;

  Buffer() = default;
  Buffer(Type t, std::size_t n) : type(t), bytes(n * bytes_of(t), 0xff) {}
  Buffer(Type t, const std::vector<float>& values) : Buffer(t, values.size()) {
    for (std::size_t i = 0; i < values.size(); ++i)
      rlk::kda::store(bytes.data(), type, std::int64_t(i), values[i]);
  }
  std::size_t size() const { return bytes.size() / bytes_of(type); }
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
    const Type type = in.at("q").type;
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
    out["ht"] = Buffer(Type::f32, states());
    p.out = tensor(out["o"], p.value_heads, p.v_dim);
    p.final = state(out["ht"]);
    p.initial = in.count("h0") ? state(in.at("h0")) : States{};
    if (!backward || !in.count("do")) return;
    out["dq"] = Buffer(type, n * H * K);
    out["dk"] = Buffer(type, n * H * K);
    out["dv"] = Buffer(type, n * HV * V);
    out["dg"] = Buffer(in.at("g").type, n * HV * K);
    out["dbeta"] = Buffer(in.at("beta").type, n * HV);
    out["dh0"] = Buffer(Type::f32, states());
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

  // Copies d_a_log and d_dt_bias next to the other outputs.
  void collect() {
    if (!d_a_log.empty()) out["dA_log"] = Buffer(Type::f32, d_a_log);
    if (!d_dt_bias.empty()) out["ddt_bias"] = Buffer(Type::f32, d_dt_bias);
  }
};

// The golden case as a call on `type` data; gate inputs, states and parameters stay fp32, as in the files.
inline Case from_golden(const Golden& golden, Type type = Type::f32) {
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
      c.in[key] = Buffer(data ? type : Type::f32, array.f32);
    } else if (name.starts_with("out_")) {
      c.truth[name.substr(4)] = array.f32;
    }
  }
  c.bind();
  return c;
}

}  // namespace kda_test
