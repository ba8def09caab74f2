// The reader of traces on any bytes: it ends with a trace that keeps its own promises, or with a failure that names a
// line and may be printed.
#include <cstdint>
#include <cstdlib>

#include "library.hpp"
#include "rlk/printable.hpp"
#include "trace_file.hpp"

namespace {

void promise(bool kept) {
  if (!kept) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  // Most inputs would fail at the first line; every second one is read behind a good one.
  std::string text;
  if (size && data[0] % 2)
    text = R"({"rlk_trace": 1, "version": "0", "build": "b", "cpu": "c", "every": 2})"
           "\n";
  if (size) text.append(reinterpret_cast<const char*>(data) + 1, size - 1);
  try {
    const rlk::cli::Trace trace = rlk::cli::parse_trace(text, "file");
    for (const rlk::cli::TraceRecord& record : trace.records) {
      promise(record.keys <= trace.keys.size());
      for (const rlk::cli::TraceTensor& tensor : record.tensors) {
        promise(tensor.shape.size() <= 8);
        promise(tensor.by_rows || tensor.rows.empty());
        if (record.keys && tensor.by_rows) promise(tensor.rows.size() == trace.keys_of(record).size());
      }
    }
  } catch (const rlk::cli::Failure& failure) {
    promise(rlk::is_printable(failure.what()));
    promise(failure.exit() == rlk::cli::kUsage);
  }
  return 0;
}
