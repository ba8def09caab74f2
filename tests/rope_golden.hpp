// Golden vectors: .safetensors files whose arrays are named `case.array`, with each case's parameters as JSON
// text.
#pragma once

#include <cstdint>
#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

namespace golden {

struct Array {
  std::vector<std::int64_t> shape;
  std::vector<double> values;

  std::int64_t size() const { return static_cast<std::int64_t>(values.size()); }
};

struct Case {
  std::string name;
  nlohmann::json parameters;
  std::map<std::string, Array> arrays;

  const Array& at(const std::string& array) const {
    const auto found = arrays.find(array);
    if (found == arrays.end()) throw std::runtime_error(name + " has no array " + array);
    return found->second;
  }
  bool has(const std::string& array) const { return arrays.count(array) != 0; }
};

template <class T>
std::vector<double> as_doubles(const char* bytes, std::size_t count) {
  std::vector<double> out(count);
  for (std::size_t i = 0; i < count; ++i) {
    T v;
    std::memcpy(&v, bytes + i * sizeof(T), sizeof(T));
    out[i] = static_cast<double>(v);
  }
  return out;
}

inline std::vector<double> from_bf16(const char* bytes, std::size_t count) {
  std::vector<double> out(count);
  for (std::size_t i = 0; i < count; ++i) {
    const unsigned char low = static_cast<unsigned char>(bytes[2 * i]),
                        high = static_cast<unsigned char>(bytes[2 * i + 1]);
    const std::uint32_t bits = std::uint32_t{high} << 24 | std::uint32_t{low} << 16;
    float v;
    std::memcpy(&v, &bits, sizeof v);
    out[i] = static_cast<double>(v);
  }
  return out;
}

inline std::map<std::string, Case> read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot open " + path);
  const std::string bytes((std::istreambuf_iterator<char>(file)), {});
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), 8);
  const auto header = nlohmann::json::parse(bytes.substr(8, header_bytes));
  const char* data = bytes.data() + 8 + header_bytes;

  std::map<std::string, Case> cases;
  for (const auto& [key, entry] : header.items()) {
    if (key == "__metadata__") continue;
    const auto dot = key.find('.');
    Case& c = cases[key.substr(0, dot)];
    Array& a = c.arrays[key.substr(dot + 1)];
    a.shape = entry["shape"].get<std::vector<std::int64_t>>();
    const auto begin = entry["data_offsets"][0].get<std::size_t>(),
               end = entry["data_offsets"][1].get<std::size_t>();
    const auto type = entry["dtype"].get<std::string>();
    a.values = type == "F64"    ? as_doubles<double>(data + begin, (end - begin) / 8)
               : type == "F32"  ? as_doubles<float>(data + begin, (end - begin) / 4)
               : type == "I64"  ? as_doubles<std::int64_t>(data + begin, (end - begin) / 8)
               : type == "BF16" ? from_bf16(data + begin, (end - begin) / 2)
                                : as_doubles<std::int32_t>(data + begin, (end - begin) / 4);
  }
  for (auto& [name, c] : cases) {
    c.name = name;
    if (header["__metadata__"].contains(name)) {
      c.parameters = nlohmann::json::parse(header["__metadata__"][name].get<std::string>());
    }
  }
  return cases;
}

}  // namespace golden
