// The by-name argument decoder with any names, values, tensors and options: every call returns a code,
// failures leave a text, and nothing is read where nothing is. Nothing runs, so tensors may claim any size.
#include <fuzzer/FuzzedDataProvider.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "rlk/rlk.h"

namespace {

struct Tensor {
  DLTensor dl{};
  std::vector<int64_t> shape, strides;
};

void promise(bool kept) {
  if (!kept) std::abort();
}

void promise_text(rlk_code code) {
  promise(code == RLK_OK ||
          (rlk_last_error()[0] != '\0' && std::strcmp(rlk_code_name(code), "unknown code") != 0));
  promise(code != RLK_INTERNAL);
}

// Mostly a name of the op, sometimes anything.
std::string name(FuzzedDataProvider& input, const char* op, bool argument) {
  const std::size_t n = argument ? rlk_argument_count(op) : rlk_attribute_count(op);
  const std::size_t i = input.ConsumeIntegralInRange<std::size_t>(0, n);
  if (i == n) return input.ConsumeRandomLengthString(40);
  return argument ? rlk_argument_name(op, i) : rlk_attribute_name(op, i);
}

int64_t number(FuzzedDataProvider& input) {
  constexpr int64_t kHard[] = {
      0, 1, 2, 3, 4, 8, 16, 64, 128, 1024, 4096, INT32_MAX, int64_t{1} << 40, INT64_MAX, -1, INT64_MIN};
  return input.ConsumeBool() ? input.PickValueInArray(kHard) : input.ConsumeIntegral<int64_t>();
}

void fill(FuzzedDataProvider& input, Tensor& t) {
  constexpr uint8_t kBits[] = {8, 16, 32, 64, 4, 0};
  constexpr int kDevices[] = {kDLCPU, kDLCPU, kDLCPU, kDLCUDA, kDLROCM, 99};
  t.dl.ndim = input.ConsumeIntegralInRange<int32_t>(-1, 10);
  for (int32_t i = 0; i < t.dl.ndim; ++i) {
    t.shape.push_back(number(input));
    t.strides.push_back(number(input));
  }
  t.dl.shape = input.ConsumeIntegralInRange(0, 15) ? t.shape.data() : nullptr;
  t.dl.strides = input.ConsumeBool() ? t.strides.data() : nullptr;
  t.dl.dtype = {input.ConsumeIntegralInRange<uint8_t>(0, 7), input.PickValueInArray(kBits),
                static_cast<uint16_t>(input.ConsumeIntegralInRange(0, 15) ? 1 : 2)};
  t.dl.device.device_type = static_cast<DLDeviceType>(input.PickValueInArray(kDevices));
  t.dl.device.device_id = input.ConsumeIntegralInRange(0, 2);
  t.dl.data = reinterpret_cast<void*>(input.ConsumeIntegral<uintptr_t>());
  t.dl.byte_offset = input.ConsumeIntegral<uint8_t>();
}

void resolve(FuzzedDataProvider& input, const rlk_args* args, const char* op) {
  int32_t rank = 0;
  int64_t shape[8];
  DLDataType dtype{};
  const std::string result = name(input, op, true);
  promise_text(rlk_infer(args, result.c_str(), &rank, shape, &dtype));
  promise(rank >= 0 && rank <= 8);
  const std::string backend = input.ConsumeRandomLengthString(40),
                    arithmetic = input.ConsumeRandomLengthString(10),
                    precision = input.ConsumeRandomLengthString(10),
                    gradients = input.ConsumeRandomLengthString(20);
  // The library reads as far as struct_size says, up to 4096 bytes: what a newer library's struct would hold.
  struct {
    rlk_options known;
    unsigned char newer[4096];
  } memory{};
  rlk_options& options = memory.known;
  if (input.ConsumeBool())
    memory.newer[input.ConsumeIntegralInRange(0, 4095)] = input.ConsumeIntegral<uint8_t>();
  options.struct_size = input.ConsumeIntegralInRange(0, 7) ? static_cast<uint32_t>(sizeof options)
                                                           : input.ConsumeIntegral<uint32_t>();
  if (input.ConsumeBool()) options.backend = backend.c_str();
  if (input.ConsumeBool()) options.arithmetic = arithmetic.c_str();
  if (input.ConsumeBool()) options.precision = precision.c_str();
  if (input.ConsumeBool()) options.gradients = gradients.c_str();
  options.threads = input.ConsumeIntegral<int32_t>();
  options.needs_backward = input.ConsumeBool();
  options.deterministic = input.ConsumeBool();
  char* text = rlk_resolve_json(args, input.ConsumeBool() ? &options : nullptr);
  promise(text || rlk_last_error()[0]);
  rlk_free(text);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  FuzzedDataProvider input(data, size);
  const std::size_t which = input.ConsumeIntegralInRange<std::size_t>(0, rlk_op_count());
  const std::string op = which == rlk_op_count() ? input.ConsumeRandomLengthString(40) : rlk_op_name(which);
  rlk_args* args = rlk_args_new(op.c_str());
  if (!args) {
    promise(rlk_last_error()[0] != '\0');
    return 0;
  }
  std::deque<Tensor> tensors;
  for (int steps = 0; steps < 40 && input.remaining_bytes() > 0; ++steps)
    switch (input.ConsumeIntegralInRange(0, 5)) {
      case 0:
      case 1: {
        fill(input, tensors.emplace_back());
        const std::string key = name(input, op.c_str(), true);
        promise_text(rlk_args_tensor(args, key.c_str(),
                                     input.ConsumeIntegralInRange(0, 15) ? &tensors.back().dl : nullptr));
        break;
      }
      case 2:
        promise_text(rlk_args_int(args, name(input, op.c_str(), false).c_str(), number(input)));
        break;
      case 3:
        promise_text(rlk_args_float(args, name(input, op.c_str(), false).c_str(),
                                    input.ConsumeFloatingPoint<double>()));
        break;
      case 4: {
        const std::string key = name(input, op.c_str(), false);
        promise_text(rlk_args_string(args, key.c_str(), input.ConsumeRandomLengthString(20).c_str()));
        break;
      }
      default:
        resolve(input, args, op.c_str());
    }
  resolve(input, args, op.c_str());
  rlk_args_free(args);
  return 0;
}
