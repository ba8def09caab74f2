// One call: Python's arguments as slots, and what is done with them.
#pragma once

#include <string>
#include <vector>

#include "src/python/support.hpp"
#include "src/python/tensor.hpp"

namespace rlk::python {

// An op or alias with its names interned. Lives for ever, like the function made of it.
struct Op {
  Op(const char* name, int32_t index);
  uint32_t slots() const noexcept { return schema->num_arguments + schema->num_attributes; }
  const rlk_argument& argument(uint32_t i) const noexcept { return schema->arguments[i]; }
  // The slot of a keyword, -1: none.
  int32_t find(PyObject* keyword) const;
  PyObject* describe() const;

  std::string name, doc;
  int32_t index;
  const rlk_op_schema* schema;
  std::vector<PyObject*> names;                 // of all slots
  std::vector<std::vector<PyObject*>> choices;  // of each attribute
  std::vector<uint32_t> positional;             // arguments that are read, in order
  std::vector<uint32_t> saved;                  // what the backward wants of the forward
  std::vector<uint32_t> kept;                   // optional results that a recorded call has for its backward
  uint32_t results = 0;                         // that are not given, but made
  // Of each argument: the argument whose presence asks for this optional result ("k" of "k_out"); -1: none.
  std::vector<int32_t> follows;
  rlk_slot defaults[RLK_MAX_SLOTS];
  PyMethodDef definition{};
};

// Ranges that are saved for a backward, for as long as this lives.
class Tickets {
 public:
  Tickets() = default;
  Tickets(const Tickets&) = delete;
  Tickets& operator=(const Tickets&) = delete;
  ~Tickets() {
    for (const uint64_t ticket : all_) rlk_release(ticket);
  }
  void add(const DLTensor& tensor, const char* name) { all_.push_back(rlk_save(&tensor, name)); }

 private:
  std::vector<uint64_t> all_;
};

class Call {
 public:
  enum class Face { plain, torch, recorded, question };
  explicit Call(const Op& op, Face face = Face::plain);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // False with an exception. `names` are those of the last arguments.
  bool read(PyObject* const* args, Py_ssize_t nargs, PyObject* names);
  // The same of a tuple and a dict, which must outlive the call.
  bool read(PyObject* args, PyObject* keywords);
  bool needs_dispatcher() const noexcept { return needs_dispatcher_; }
  // Whether autograd must record the call (the torch face alone looks), and whether it can: tensors of torch that are read,
  // results that are torch's to make.
  bool needs_gradient() const noexcept { return needs_gradient_; }
  bool can_be_recorded() const noexcept;
  // All of a call but its tensors.
  struct Kind {
    std::vector<int64_t> words;
    std::vector<std::string> texts;
    friend bool operator==(const Kind&, const Kind&) = default;
  };
  bool is(const Kind& kind) const noexcept;
  Kind kind() const;
  // A tuple of `first` and what was given for every argument that is no result, None where nothing was.
  PyObject* inputs(PyObject* first) const;
  // Before run(): results for the backward alone are made too. They do not come back.
  void keep() noexcept;
  // After run(): a tuple of what the schema saves for the backward, None where there is nothing; and the saved ranges.
  PyObject* kept() const;
  void guard_kept(Tickets& tickets) const;

  PyObject* run();
  PyObject* infer();
  PyObject* resolve();
  PyObject* explain();

 private:
  struct Part;
  // What a Kind holds, written out; their number.
  std::size_t words(int64_t* out) const noexcept;
  static constexpr std::size_t kOptionWords = 4, kTexts = 4;
  const char* text(std::size_t i) const noexcept;
  // What was given for an argument, or made for a result; null: neither.
  PyObject* object(uint32_t i) const noexcept;
  bool read_keyword(PyObject* keyword, PyObject* value);
  bool read_argument(uint32_t i, PyObject* value);
  bool read_attribute(uint32_t i, PyObject* value);
  bool read_choice(uint32_t i, PyObject* value);
  // Where Python could not convert what was given: false with an exception that names it and what it takes.
  bool refuse(const char* name, PyObject* value, const char* takes);
  bool read_option(PyObject* keyword, PyObject* value);
  bool read_tensor(uint32_t i, PyObject* value);
  bool want_results();
  bool allocate(uint32_t i);
  bool allocate_by_framework(Part& part, const DLTensor& like);
  bool use_device(bool small);
  static constexpr int64_t kSmall = 2048;
  bool is_small() const noexcept;
  bool give_shapes();
  PyObject* fail_to_allocate(uint32_t i);
  PyObject* results();
  PyObject* fail(rlk_code code);
  static void* give_workspace(void* context, uint64_t bytes);
  static void* give_bytes(void* context, uint64_t bytes);

  // One argument. Constructed only for as many as the op has: a call of three tensors should not pay for 64.
  struct Part {
    PyObject* object = nullptr;  // that was given, borrowed
    uint32_t dtype = 0;          // that a result is asked for in; 0: the preferred one
    bool wanted = false;         // a result to allocate
    bool hidden = false;         // that does not come back
    DLTensor allocated;
    Owned made, finish;  // a result that was allocated, and what makes the caller's type of it
    TensorView view;
  };
  Part* parts() noexcept { return reinterpret_cast<Part*>(storage_); }
  const Part* parts() const noexcept { return reinterpret_cast<const Part*>(storage_); }

  const Op& op_;
  const Face face_;
  const TensorView* first_ = nullptr;
  PyObject* like_ = nullptr;  // the first tensor
  Asked asked_;
  bool needs_dispatcher_ = false, needs_gradient_ = false, inferred_ = false;
  rlk_options options_{};
  Owned workspace_;
  rlk_slot slots_[RLK_MAX_SLOTS];
  rlk_shape shapes_[RLK_MAX_SLOTS];
  alignas(Part) unsigned char storage_[RLK_MAX_SLOTS * sizeof(Part)];
};

}  // namespace rlk::python
