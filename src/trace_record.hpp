// One record of a trace: tensors with the digests of their rows, as rlk/trace.h says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "rlk/plugin.h"
#include "src/json.hpp"
#include "src/trace_file.hpp"

namespace rlk {

// Tensors of one device as the CPU can read them.
class TraceReader {
 public:
  TraceReader(const rlk_device_services* services, const rlk_device* device, void* stream) noexcept
      : services_(services), device_(device), stream_(stream) {}

  // Waits for what was given to the stream before.
  bool wait() const;
  // The address of the first element, null when the tensor cannot be read.
  const std::byte* read(const DLTensor& t);

 private:
  const rlk_device_services* services_;
  const rlk_device* device_;
  void* stream_;
  std::vector<std::byte> bytes_;
};

// Leading dimensions that are this many rows, -1: none are. Without keys the first dimension is.
int32_t leading(const DLTensor& t, std::size_t keys);

class TraceRecord {
 public:
  TraceRecord(TraceFile& file, TraceMarks& marks, TraceReader& reader)
      : file_(file), marks_(marks), reader_(reader), keys_(file.keys_of(marks)) {}

  // A tensor with its digests; lead -1: it has no rows.
  void add(const char* name, const char* role, const DLTensor& t, int32_t lead);
  // A weight, which may have been digested before.
  void add_weight(const char* name, const DLTensor& t);
  // A tensor that is not looked at.
  void mention(const char* name, const char* role, const DLTensor& t);

  void write(JsonObject head);

 private:
  std::string chosen(const std::vector<uint64_t>& all) const;

  TraceFile& file_;
  TraceMarks& marks_;
  TraceReader& reader_;
  const uint64_t keys_;
  JsonArray tensors_;
};

}  // namespace rlk
