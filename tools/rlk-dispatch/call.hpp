// A call made from words of the command line: tensors with shapes and dtypes and no memory behind them.
// Nothing can run it, it exists to be resolved, unless it is given memory.
#pragma once

#include <list>
#include <memory>
#include <string>
#include <vector>

#include "library.hpp"

namespace rlk::cli {

class ImaginedCall {
 public:
  explicit ImaginedCall(const Options& options);

  // Real memory on the CPU, every number in it small and positive, every integer 0.
  void give_memory();

  const rlk_args* args() const { return args_.get(); }
  // "hidden fp32 [512, 4100], ...": what the words came to.
  std::string text() const { return text_; }
  // The example the shapes are from; empty when the user gave them.
  const std::string& example() const { return example_; }

 private:
  struct Tensor {
    DLTensor dl{};
    std::vector<int64_t> shape;
    std::vector<char> memory;
  };
  struct Wanted {
    std::string name, dtype;
    std::vector<int64_t> shape;
    bool has_shape = false;
  };

  void read_shapes(const Options& options);
  void take_example(const Options& options);
  void add_tensor(const std::string& name, std::vector<int64_t> shape, const std::string& dtype);
  void add_arguments(const Json& op);
  void add_results(const Json& op);
  void require_dtype(const Json& op) const;
  std::string dtype_for(const Json& argument, const Wanted* wanted) const;
  const Wanted* find(const std::string& name) const;

  std::unique_ptr<rlk_args, void (*)(rlk_args*)> args_;
  std::vector<Wanted> wanted_;
  std::list<Tensor> tensors_;  // addresses stay
  DLDevice device_{};
  std::string dtype_;  // --dtype by the library's own name; empty: none was given
  uintptr_t next_address_ = uintptr_t{1} << 32;
  std::string text_, example_;
};

// "cuda:1" as DLPack says it.
DLDevice device_from(const std::string& text);

}  // namespace rlk::cli
