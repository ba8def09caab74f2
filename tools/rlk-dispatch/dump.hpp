// A safetensors file with the tensors of one call, as another machine left them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "library.hpp"
#include "rlk/tensor.hpp"

namespace rlk::cli {

// The file mapped for reading, its table checked against its size.
class Dump {
 public:
  struct Entry {
    DType dtype = DType::none;
    std::vector<std::int64_t> shape;
    const std::uint8_t* data = nullptr;  // of any alignment
    std::size_t bytes = 0;
  };

  explicit Dump(const std::string& path);
  ~Dump();
  Dump(const Dump&) = delete;
  Dump& operator=(const Dump&) = delete;

  const std::string& path() const { return path_; }
  const std::map<std::string, Entry>& entries() const { return entries_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  // Of the metadata; `otherwise` where nothing is said.
  std::string said(const std::string& name, const std::string& otherwise) const;
  const Entry* find(const std::string& name) const;
  const Entry& need(const std::string& name, std::size_t rank) const;

 private:
  void add(const std::string& name, const Json& value, std::uint64_t base);
  std::string path_;
  std::size_t size_ = 0;
  const std::uint8_t* bytes_ = nullptr;
  std::map<std::string, Entry> entries_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace rlk::cli
