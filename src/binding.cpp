// Calls by position: what a language binding uses instead of names.
#include "rlk/binding.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "src/c_api.hpp"
#include "src/check.hpp"
#include "src/failure.hpp"
#include "src/prepared.hpp"
#include "src/resolve.hpp"
#include "src/struct_size.hpp"

using namespace rlk;

namespace {

constexpr uint32_t kSmallestChoice = offsetof(rlk_choice, id);

Result<const rlk_op_schema*> schema_at(int32_t op) {
  const auto& ops = snapshot().ops;
  if (op >= 0 && static_cast<std::size_t>(op) < ops.size()) return ops[static_cast<std::size_t>(op)].schema;
  return Status(RLK_UNKNOWN_NAME, fmt::format("no op has index {}, there are {}", op, ops.size()));
}

// The schema that the slots fit.
Result<const rlk_op_schema*> schema_of(int32_t op, const rlk_slot* slots, uint32_t count) {
  Result<const rlk_op_schema*> schema = schema_at(op);
  if (!schema) return schema;
  const uint32_t want = (*schema)->num_arguments + (*schema)->num_attributes;
  if (count != want)
    return Status(RLK_INVALID_ARGUMENT,
                  fmt::format("{}: {} slots are given, it has {}", (*schema)->name, count, want));
  if (!slots) return Status(RLK_INVALID_ARGUMENT, "slots is null");
  return schema;
}

// Slots whose missing results that must be there are as infer gives them: shapes without data.
class Complete {
 public:
  Complete(const rlk_op_schema& op, const rlk_slot* given) {
    std::copy(given, given + op.num_arguments + op.num_attributes, slots_);
    const auto missing = [&](uint32_t i) {
      return op.arguments[i].role == RLK_WRITE && !(op.arguments[i].flags & RLK_OPTIONAL) && !given[i].tensor;
    };
    uint32_t first = 0;
    while (first < op.num_arguments && !missing(first)) ++first;
    if (first == op.num_arguments) return;
    const ShapesOnly only(op, given);
    DLDevice device;
    if (!check_call(op, only.slots(), CheckData::no, device)) return;  // who resolves says what is wrong
    if (!infer_shapes(op, only.slots(), shapes_)) return;
    for (uint32_t i = first; i < op.num_arguments; ++i) {
      if (!missing(i) || !shapes_[i].dtypes) continue;
      tensors_[i] = {
          nullptr, device, shapes_[i].ndim, dl_type(static_cast<DType>(shapes_[i].preferred)), shapes_[i].dim,
          nullptr, 0};
      slots_[i].tensor = &tensors_[i];
    }
  }
  const rlk_slot* slots() const { return slots_; }

 private:
  rlk_slot slots_[RLK_MAX_SLOTS];
  rlk_shape shapes_[RLK_MAX_SLOTS] = {};
  DLTensor tensors_[RLK_MAX_SLOTS];
};

struct Answer {
  Resolution resolution;
  uint64_t workspace_bytes = 0;
};

Result<Answer> resolved(int32_t op, const rlk_slot* slots, uint32_t count, const rlk_options* options,
                        Ask ask) {
  const Result<const rlk_op_schema*> schema = schema_of(op, slots, count);
  if (!schema) return schema.status();
  const Result<Options> o = read_options(options);
  if (!o) return o.status();
  const Policy policy = Policy::of(*o);
  const Complete complete(**schema, slots);
  Answer answer{Resolver::resolve(op, complete.slots(), policy, ask)};
  if (const rlk_implementation* chosen = answer.resolution.implementation();
      chosen && !nothing_to_do(**schema, complete.slots()))
    answer.workspace_bytes =
        workspace_of(*chosen, complete.slots(), policy.request(Resolver::device_of(answer.resolution)));
  return answer;
}

}  // namespace

extern "C" {

int32_t rlk_op_index(const char* op) {
  return guarded_or<int32_t>(-1, [&]() -> int32_t {
    const Result<int32_t> index = find_op(op ? op : "");
    if (!index) return set_failure(index.status()), -1;
    return *index;
  });
}

const rlk_op_schema* rlk_op_schema_at(int32_t op) {
  return guarded_or<const rlk_op_schema*>(nullptr, [&]() -> const rlk_op_schema* {
    const Result<const rlk_op_schema*> schema = schema_at(op);
    if (!schema) return set_failure(schema.status()), nullptr;
    return *schema;
  });
}

rlk_code rlk_run_slots(int32_t op, const rlk_slot* slots, uint32_t count, const rlk_options* options) {
  return guarded([&]() -> rlk_code {
    if (const auto schema = schema_of(op, slots, count); !schema) return set_failure(schema.status());
    const Result<Options> o = read_options(options);
    if (!o) return set_failure(o.status());
    return set_failure(run_cached(op, slots, *o));
  });
}

rlk_code rlk_infer_slots(int32_t op, const rlk_slot* slots, uint32_t count, rlk_shape* shapes) {
  return guarded([&]() -> rlk_code {
    const Result<const rlk_op_schema*> found = schema_of(op, slots, count);
    if (!found) return set_failure(found.status());
    if (!shapes) return null_argument("shapes");
    const rlk_op_schema& schema = **found;
    ShapesOnly only(schema, slots);
    only.without_results(schema);
    DLDevice device;
    if (Status s = check_call(schema, only.slots(), CheckData::no, device); !s) return set_failure(s);
    std::fill_n(shapes, schema.num_arguments, rlk_shape{});
    return set_failure(infer_shapes(schema, only.slots(), shapes));
  });
}

rlk_code rlk_resolve_slots(int32_t op, const rlk_slot* slots, uint32_t count, const rlk_options* options,
                           rlk_choice* out) {
  if (!out) return null_argument("out");
  return guarded([&]() -> rlk_code {
    if (Status s = check_struct("choice", *out, kSmallestChoice); !s) return set_failure(s);
    const Result<Answer> answer = resolved(op, slots, count, options, Ask::choice);
    if (!answer) return set_failure(answer.status());
    const Resolution& r = answer->resolution;
    if (!r) return set_failure(r.status());
    const rlk_implementation& i = *r.implementation();
    const rlk_choice choice{out->struct_size, i.traits,        i.id,
                            i.arithmetic,     r.fingerprint(), answer->workspace_bytes};
    std::memcpy(out, &choice, std::min<std::size_t>(out->struct_size, sizeof choice));
    return RLK_OK;
  });
}

char* rlk_resolve_slots_json(int32_t op, const rlk_slot* slots, uint32_t count, const rlk_options* options) {
  return guarded_or<char*>(nullptr, [&]() -> char* {
    const Result<Answer> answer = resolved(op, slots, count, options, Ask::everyone);
    if (!answer) return set_failure(answer.status()), nullptr;
    return copy_text(answer->resolution.json());
  });
}

char* rlk_explain_slots(int32_t op, const rlk_slot* slots, uint32_t count, const rlk_options* options) {
  return guarded_or<char*>(nullptr, [&]() -> char* {
    const Result<Answer> answer = resolved(op, slots, count, options, Ask::everyone);
    if (!answer) return set_failure(answer.status()), nullptr;
    return copy_text(answer->resolution.explain());
  });
}

}  // extern "C"
