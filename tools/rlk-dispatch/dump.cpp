#include "dump.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

namespace rlk::cli {
namespace {

DType dtype_named(const std::string& name) {
  constexpr std::pair<const char*, DType> kNames[] = {
      {"F32", DType::f32}, {"BF16", DType::bf16}, {"F16", DType::f16},      {"I64", DType::i64},
      {"I32", DType::i32}, {"U8", DType::u8},     {"BOOL", DType::boolean}, {"F8_E4M3", DType::f8_e4m3}};
  for (const auto& [word, type] : kNames)
    if (name == word) return type;
  return DType::none;
}

}  // namespace

Dump::Dump(const std::string& path) : path_(path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat info{};
  if (file < 0 || fstat(file, &info) != 0) throw Failure(kUsage, "cannot read " + path);
  size_ = static_cast<std::size_t>(info.st_size);
  void* map = size_ < 8 ? MAP_FAILED : mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0);
  close(file);
  if (map == MAP_FAILED) throw Failure(kUsage, path + " is not a safetensors file");
  bytes_ = static_cast<const std::uint8_t*>(map);
  std::uint64_t header = 0;
  std::memcpy(&header, bytes_, 8);
  if (header > size_ - 8) throw Failure(kUsage, path + " is not a safetensors file");
  const Json table = Json::parse(bytes_ + 8, bytes_ + 8 + header, nullptr, false);
  if (!table.is_object()) throw Failure(kUsage, path + " is not a safetensors file");
  for (const auto& [name, value] : table.items()) {
    if (name != "__metadata__") {
      add(name, value, 8 + header);
      continue;
    }
    for (const auto& [key, text] : value.items())
      if (text.is_string()) metadata_[key] = text.get<std::string>();
  }
}
Dump::~Dump() { munmap(const_cast<std::uint8_t*>(bytes_), size_); }

std::string Dump::said(const std::string& name, const std::string& otherwise) const {
  const auto at = metadata_.find(name);
  return at == metadata_.end() ? otherwise : at->second;
}
const Dump::Entry* Dump::find(const std::string& name) const {
  const auto at = entries_.find(name);
  return at == entries_.end() ? nullptr : &at->second;
}
const Dump::Entry& Dump::need(const std::string& name, std::size_t rank) const {
  const Entry* e = find(name);
  if (!e) throw Failure(kUsage, path_ + " has no tensor '" + name + "'");
  if (e->shape.size() != rank)
    throw Failure(kUsage, path_ + ": " + name + " has rank " + std::to_string(e->shape.size()) +
                              ", needed is " + std::to_string(rank));
  return *e;
}

void Dump::add(const std::string& name, const Json& value, std::uint64_t base) {
  Entry e;
  std::uint64_t from = 0, to = 0;
  try {
    e.dtype = dtype_named(value.at("dtype"));
    e.shape = value.at("shape").get<std::vector<std::int64_t>>();
    from = value.at("data_offsets").at(0);
    to = value.at("data_offsets").at(1);
  } catch (const std::exception&) {
    throw Failure(kUsage, path_ + ": its table says nothing sensible of '" + name + "'");
  }
  std::int64_t count = 1;
  bool sane = from <= to && to <= size_ - base;
  for (const std::int64_t d : e.shape) sane = sane && d >= 0 && !__builtin_mul_overflow(count, d, &count);
  if (e.dtype == DType::none || !sane ||
      static_cast<std::uint64_t>(count) != (to - from) / static_cast<std::uint64_t>(size_of(e.dtype)))
    throw Failure(kUsage, path_ + ": '" + name + "' has a dtype, shape or place that is not possible");
  e.data = bytes_ + base + from;
  e.bytes = static_cast<std::size_t>(to - from);
  entries_.emplace(name, std::move(e));
}

}  // namespace rlk::cli
