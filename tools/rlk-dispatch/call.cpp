#include "call.hpp"

#include <algorithm>
#include <charconv>

#include "rlk/introspect.h"
#include "rlk/tensor.hpp"
#include "words.hpp"

namespace rlk::cli {
namespace {

constexpr DType kDTypes[] = {DType::f16, DType::bf16, DType::f32,     DType::f64,    DType::i32,
                             DType::i64, DType::u8,   DType::boolean, DType::f8_e4m3};

// Names that frameworks give dtypes.
constexpr std::pair<const char*, DType> kOtherNames[] = {
    {"float16", DType::f16},   {"half", DType::f16},        {"f16", DType::f16},
    {"bfloat16", DType::bf16}, {"float32", DType::f32},     {"float", DType::f32},
    {"f32", DType::f32},       {"float64", DType::f64},     {"double", DType::f64},
    {"f64", DType::f64},       {"int", DType::i32},         {"i32", DType::i32},
    {"long", DType::i64},      {"i64", DType::i64},         {"u8", DType::u8},
    {"byte", DType::u8},       {"boolean", DType::boolean}, {"float8_e4m3fn", DType::f8_e4m3}};

DType dtype_from(const std::string& name) {
  std::vector<std::string> known;
  for (const DType t : kDTypes) {
    if (name_of(t) == name) return t;
    known.emplace_back(name_of(t));
  }
  for (const auto& [other, t] : kOtherNames) {
    if (name == other) return t;
    known.emplace_back(other);
  }
  throw Failure(kUsage, unknown_word("dtype", name, known));
}

template <class T>
bool read_number(std::string_view text, T& out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  return error == std::errc() && end == text.data() + text.size();
}

// "512x4100"
std::vector<int64_t> shape_from(const std::string& text, const std::string& whole) {
  std::vector<int64_t> shape;
  for (std::size_t begin = 0;;) {
    const std::size_t end = std::min(text.find('x', begin), text.size());
    int64_t n = 0;
    if (!read_number(std::string_view(text).substr(begin, end - begin), n) || n < 0)
      throw Failure(kUsage, "--shape: '" + whole + "' is not like hidden=512x4096 or positions=16:int64");
    shape.push_back(n);
    if (end == text.size()) return shape;
    begin = end + 1;
  }
}

std::pair<std::string, std::string> split(const std::string& text, const char* option) {
  const auto equals = text.find('=');
  if (equals == std::string::npos || equals == 0)
    throw Failure(kUsage, std::string(option) + ": '" + text + "' is not like name=value");
  return {text.substr(0, equals), text.substr(equals + 1)};
}

}  // namespace

DLDevice device_from(const std::string& text) {
  const auto colon = text.find(':');
  const std::string type = text.substr(0, colon);
  DLDevice device{kDLCPU, 0};
  if (type == "cuda")
    device.device_type = kDLCUDA;
  else if (type == "hip")
    device.device_type = kDLROCM;
  else if (type != "cpu")
    throw Failure(kUsage, type == "gpu"  // a letter from cpu, and not meant
                              ? "unknown device 'gpu': say cuda or hip"
                              : unknown_word("device", type, {"cpu", "cuda", "hip"}));
  if (colon != std::string::npos &&
      (!read_number(std::string_view(text).substr(colon + 1), device.device_id) || device.device_id < 0))
    throw Failure(kUsage, "--device: '" + text + "' is not like cuda:1");
  return device;
}

ImaginedCall::ImaginedCall(const Options& options) : args_(rlk_args_new(options.op.c_str()), &rlk_args_free) {
  if (!args_) throw Failure(kUsage, rlk_last_error());
  device_ = device_from(options.device);
  if (!options.dtype.empty()) dtype_ = name_of(dtype_from(options.dtype));
  const Json example = parse(rlk_examples_json(options.op.c_str()));
  const std::string name = example["op"];  // of the op where the user wrote an alias
  const Json ops = listed("ops")["ops"];
  const Json& op = *std::find_if(ops.begin(), ops.end(), [&](const Json& o) { return o["name"] == name; });
  if (!dtype_.empty()) require_dtype(op);
  read_shapes(options);
  if (wanted_.empty()) take_example(options);
  for (const std::string& attribute : options.attributes) {
    const auto [key, value] = split(attribute, "--attr");
    check(rlk_args_string(args_.get(), key.c_str(), value.c_str()));
  }
  add_arguments(op);
  add_results(op);
}

// A dtype that no input can have would change nothing, and the answer would be about another call.
void ImaginedCall::require_dtype(const Json& op) const {
  std::string known;
  for (const Json& a : op["arguments"]) {
    if (a["role"] == "write") continue;
    for (const Json& possible : a["dtypes"]) {
      const std::string name = possible;
      if (name == dtype_) return;
      if (known.find(name) == known.npos) known += (known.empty() ? "" : ", ") + name;
    }
  }
  throw Failure(kUsage, "--dtype: no input of " + op["name"].get<std::string>() + " can be " + dtype_ +
                            "; they take " + known);
}

void ImaginedCall::read_shapes(const Options& options) {
  for (const std::string& word : options.shapes) {
    auto [name, value] = split(word, "--shape");
    Wanted wanted{name, "", {}, false};
    if (const auto colon = value.find(':'); colon != std::string::npos) {
      wanted.dtype = name_of(dtype_from(value.substr(colon + 1)));
      value.resize(colon);
    }
    if (!value.empty()) wanted.shape = shape_from(value, word), wanted.has_shape = true;
    wanted_.push_back(std::move(wanted));
  }
}

void ImaginedCall::take_example(const Options& options) {
  const Json all = parse(rlk_examples_json(options.op.c_str()));
  const Json& examples = all["examples"];
  if (examples.empty()) return;
  const auto is = [&](const Json& tensor) { return tensor["dtype"] == dtype_; };
  auto same =
      std::find_if(examples.begin(), examples.end(), [&](const Json& e) { return is(e["tensors"][0]); });
  if (same == examples.end())
    same = std::find_if(examples.begin(), examples.end(), [&](const Json& e) {
      return std::any_of(e["tensors"].begin(), e["tensors"].end(), is);
    });
  const Json& example = same != examples.end() ? *same : examples[0];
  example_ = example["name"];
  for (const Json& t : example["tensors"]) {
    const bool first = &t == &example["tensors"][0];
    const bool asked = first && !dtype_.empty() && same == examples.end();
    wanted_.push_back({t["name"], asked ? "" : t["dtype"].get<std::string>(),
                       t["shape"].get<std::vector<int64_t>>(), true});
  }
  const bool as_it_is = options.dtype.empty() || same != examples.end();
  for (const Json& r : example["results"])
    wanted_.push_back({r["name"], as_it_is ? r["dtype"].get<std::string>() : "", {}, false});
  for (const auto& [key, value] : example["attributes"].items())
    check(rlk_args_string(args_.get(), key.c_str(),
                          value.is_string() ? value.get<std::string>().c_str() : value.dump().c_str()));
}

const ImaginedCall::Wanted* ImaginedCall::find(const std::string& name) const {
  for (const Wanted& w : wanted_)
    if (w.name == name) return &w;
  return nullptr;
}

// The dtype said for the argument, else the one said for all where it fits, else fp32, else the first
// possible.
std::string ImaginedCall::dtype_for(const Json& argument, const Wanted* wanted) const {
  if (wanted && !wanted->dtype.empty()) return wanted->dtype;
  const Json& possible = argument["dtypes"];
  for (const std::string& choice : {dtype_, std::string("fp32"), std::string("int64")})
    if (std::find(possible.begin(), possible.end(), choice) != possible.end()) return choice;
  return possible[0];
}

void ImaginedCall::add_tensor(const std::string& name, std::vector<int64_t> shape, const std::string& dtype) {
  Tensor& t = tensors_.emplace_back();
  t.shape = std::move(shape);
  // Addresses far apart and aligned; nothing is ever there.
  t.dl.data = reinterpret_cast<void*>(next_address_);
  next_address_ += uintptr_t{1} << 40;
  t.dl.device = device_;
  t.dl.ndim = static_cast<int32_t>(t.shape.size());
  t.dl.dtype = dl_type(dtype_from(dtype));
  t.dl.shape = t.shape.data();
  check(rlk_args_tensor(args_.get(), name.c_str(), &t.dl));
  std::string sizes;
  for (const int64_t n : t.shape) sizes += (sizes.empty() ? "" : "x") + std::to_string(n);
  text_ += (text_.empty() ? "" : ", ") + name + "=" + sizes + ":" + dtype;
}

void ImaginedCall::give_memory() {
  for (Tensor& t : tensors_) {
    std::size_t elements = 1;
    for (const int64_t n : t.shape) elements *= static_cast<std::size_t>(n);
    const std::size_t size = t.dl.dtype.bits / 8u;
    // 64 bytes more, to start at a cache line.
    t.memory.assign(elements * size + 64, 0);
    char* start = t.memory.data() + (64 - reinterpret_cast<uintptr_t>(t.memory.data()) % 64) % 64;
    t.dl.data = start;
    if (t.dl.dtype.code == kDLInt || t.dl.dtype.code == kDLUInt || size < 2) continue;
    // The top two bytes decide: 0x3e.. is about 0.1 in fp32 and bf16, 1.6 in fp16.
    for (std::size_t i = 0; i < elements; ++i) {
      start[i * size + size - 1] = 0x3e;
      start[i * size + size - 2] = static_cast<char>(i * 37 % 128);
    }
  }
}

void ImaginedCall::add_arguments(const Json& op) {
  const Json& arguments = op["arguments"];
  for (const Wanted& w : wanted_)
    if (std::none_of(arguments.begin(), arguments.end(), [&](const Json& a) { return a["name"] == w.name; }))
      check(rlk_args_tensor(args_.get(), w.name.c_str(),
                            nullptr));  // the library's message, with its suggestion
  for (const Json& a : arguments) {
    if (a["role"] == "write") continue;
    const std::string name = a["name"];
    const Wanted* wanted = find(name);
    if (!wanted || !wanted->has_shape) {
      if (a["optional"]) continue;
      throw Failure(kUsage, "--shape: " + name + " is missing (" + a["doc"].get<std::string>() + ")" +
                                (wanted_.empty() ? "; this op comes without an example" : ""));
    }
    const DLDevice device = device_;
    if (a["host"]) device_ = {kDLCPU, 0};
    add_tensor(name, wanted->shape, dtype_for(a, wanted));
    device_ = device;
  }
}

// Results have the shape that follows from the arguments; a word may only change their dtype. All are asked for
// before the first is given: with one of two results there, a call without the other would be refused.
void ImaginedCall::add_results(const Json& op) {
  struct Result {
    std::string name, dtype;
    std::vector<int64_t> shape;
  };
  std::vector<Result> results;
  for (const Json& a : op["arguments"]) {
    if (a["role"] != "write") continue;
    const std::string name = a["name"];
    const Wanted* wanted = find(name);
    if (a["optional"] && !wanted) continue;
    int32_t rank = 0;
    int64_t shape[RLK_MAX_RANK];
    DLDataType dtype{};
    check(rlk_infer(args_.get(), name.c_str(), &rank, shape, &dtype));
    results.push_back(
        {name, wanted && !wanted->dtype.empty() ? wanted->dtype : std::string(name_of(dtype_of(dtype))),
         wanted && wanted->has_shape ? wanted->shape : std::vector<int64_t>(shape, shape + rank)});
  }
  for (Result& r : results) add_tensor(r.name, std::move(r.shape), r.dtype);
}

}  // namespace rlk::cli
