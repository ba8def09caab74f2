// --verify OP --against FILE: were these results made by the arithmetic they claim? FILE is a safetensors dump of a call on
// another machine; the CPU's replay of the same arithmetic must give every bit of it again.
//
// Of lm_head, the default, which is too large to dump or to compute again as a whole:
//   hidden [M, K], weight [V, K], out [R, C], and optionally bias [V]
//   rows [R], columns [C]   int64; which rows of hidden and of weight `out` holds, when it is a part
//   metadata "arithmetic"   default sm90/t25k16
// Of any other op: replayed.cpp.
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <vector>

#include "commands.hpp"
#include "dump.hpp"
#include "library.hpp"
#include "replayed.hpp"
#include "rlk/rlk.hpp"

namespace rlk::cli {
namespace {

using Entry = Dump::Entry;

// The chosen rows of a matrix, dense and aligned.
struct Rows {
  std::vector<std::uint8_t> bytes;
  Tensor view;
  Rows(const Entry& e, const std::vector<std::int64_t>& index) {
    const std::int64_t width = e.shape.size() == 1 ? 1 : e.shape[1];
    const auto line = static_cast<std::size_t>(width * size_of(e.dtype));
    bytes.resize(std::max<std::size_t>(1, index.size() * line));
    for (std::size_t i = 0; i < index.size(); ++i)
      std::memcpy(&bytes[i * line], e.data + static_cast<std::size_t>(index[i]) * line, line);
    const auto n = static_cast<std::int64_t>(index.size());
    view =
        e.shape.size() == 1 ? Tensor(bytes.data(), {n}, e.dtype) : Tensor(bytes.data(), {n, width}, e.dtype);
  }
};

std::vector<std::int64_t> indices(const Dump& dump, const char* name, std::int64_t limit) {
  const Entry* e = dump.find(name);
  std::vector<std::int64_t> index(static_cast<std::size_t>(e ? dump.need(name, 1).shape[0] : limit));
  if (!e) {
    std::iota(index.begin(), index.end(), 0);
    return index;
  }
  if (e->dtype != DType::i64) throw Failure(kUsage, std::string(name) + " must be int64");
  std::memcpy(index.data(), e->data, e->bytes);
  for (const std::int64_t i : index)
    if (i < 0 || i >= limit)
      throw Failure(
          kUsage, std::string(name) + " holds " + std::to_string(i) + ", there are " + std::to_string(limit));
  return index;
}

struct Finding {
  std::int64_t outputs = 0, mismatches = 0;
  std::int64_t row = -1, column = -1;  // of the first mismatch, in the whole result
  std::uint32_t file_bits = 0, replay_bits = 0;
};

std::uint32_t bits_at(const std::uint8_t* data, DType t, std::int64_t i) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, data + i * size_of(t), t == DType::f32 ? 4 : 2);
  return bits;
}

std::string arithmetic_of(const Dump& dump) { return dump.said("arithmetic", "sm90/t25k16"); }

Finding replay(const Dump& dump, std::string& implementation) {
  const Entry &hidden = dump.need("hidden", 2), &weight = dump.need("weight", 2), &out = dump.need("out", 2);
  const auto rows = indices(dump, "rows", hidden.shape[0]),
             columns = indices(dump, "columns", weight.shape[0]);
  const auto r = static_cast<std::int64_t>(rows.size()), c = static_cast<std::int64_t>(columns.size());
  if (out.shape[0] != r || out.shape[1] != c)
    throw Failure(kUsage, "out is [" + std::to_string(out.shape[0]) + ", " + std::to_string(out.shape[1]) +
                              "], hidden and weight (or rows and columns) give [" + std::to_string(r) + ", " +
                              std::to_string(c) + "]");
  const Rows w(weight, columns);
  const Entry* bias = dump.find("bias");
  if (bias && (dump.need("bias", 1).shape[0] != weight.shape[0]))
    throw Failure(kUsage, "bias has V=" + std::to_string(bias->shape[0]) +
                              ", weight has V=" + std::to_string(weight.shape[0]));
  const Rows b(bias ? *bias : weight, bias ? columns : std::vector<std::int64_t>{});
  const std::string arithmetic = arithmetic_of(dump);
  Finding f;
  constexpr std::int64_t kRows = 64;
  for (std::int64_t first = 0; first < r; first += kRows) {
    const std::int64_t n = std::min(kRows, r - first);
    const Rows h(hidden, {rows.begin() + first, rows.begin() + first + n});
    std::vector<std::uint8_t> again(static_cast<std::size_t>(n * c * size_of(out.dtype)) + 1);
    const Tensor y(again.data(), {n, c}, out.dtype);
    LmHead args{.hidden = h.view, .weight = w.view, .out = y};
    if (bias) args.bias = b.view;
    const rlk::Options options{.backend = "native", .arithmetic = arithmetic};
    if (first == 0) implementation = resolve(args, options).id();
    if (const Status s = lm_head(args, options); !s)
      throw Failure(exit_for(s.code()), std::string(s.message()));
    for (std::int64_t i = 0; i < n * c; ++i) {
      const std::uint32_t theirs = bits_at(out.data, out.dtype, first * c + i),
                          ours = bits_at(again.data(), out.dtype, i);
      if (theirs == ours) continue;
      if (f.mismatches++ == 0)
        f.row = rows[static_cast<std::size_t>(first + i / c)],
        f.column = columns[static_cast<std::size_t>(i % c)], f.file_bits = theirs, f.replay_bits = ours;
    }
    f.outputs += n * c;
  }
  return f;
}

}  // namespace

int against(const Options& o) {
  check_configuration();
  const Dump dump(o.against);
  const std::string op = o.op.empty() || o.op == "*" ? dump.said("op", "lm_head") : o.op;
  if (op != "lm_head") return against_call(op, dump, o.json);
  const std::string arithmetic = arithmetic_of(dump);
  std::string implementation;
  const Finding f = replay(dump, implementation);
  if (f.outputs == 0) throw Failure(kUsage, o.against + " holds no outputs: there is nothing to replay");
  if (o.json) {
    Json j{{"schema", 1},
           {"op", "lm_head"},
           {"file", o.against},
           {"arithmetic", arithmetic},
           {"implementation", implementation},
           {"outputs", f.outputs},
           {"mismatches", f.mismatches}};
    if (f.mismatches)
      j["first"] = {
          {"row", f.row}, {"column", f.column}, {"file_bits", f.file_bits}, {"replay_bits", f.replay_bits}};
    print(j);
  } else if (f.mismatches == 0) {
    std::printf("lm_head  %s  %s: all %" PRId64 " outputs of %s reproduced, 0 bits differ\n",
                implementation.c_str(), arithmetic.c_str(), f.outputs, printable(o.against).c_str());
  } else {
    std::printf("lm_head  %s  %s: %" PRId64 " of %" PRId64 " outputs of %s differ; the first is row %" PRId64
                ", column %" PRId64 ": file 0x%08x, replay 0x%08x\n",
                implementation.c_str(), arithmetic.c_str(), f.mismatches, f.outputs,
                printable(o.against).c_str(), f.row, f.column, f.file_bits, f.replay_bits);
  }
  return f.mismatches == 0 ? kGood : kVerificationFailed;
}

}  // namespace rlk::cli
