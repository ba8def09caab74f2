// The rope family: rotary position embedding out of place, in place, backward, for latent attention, and its
// tables. What the arguments mean is worked out in rlk/rope_geometry.hpp, which every backend shares.
#include "registry/schema.hpp"

#include <atomic>
#include <span>

#include "rlk/rope_geometry.hpp"

namespace rlk::registry {
namespace {

using namespace rotary;

constexpr uint32_t kIntegers = RLK_I32 | RLK_I64;
constexpr uint32_t kResult = kFloats | RLK_F64;
constexpr uint32_t kTableFlags = RLK_NO_GRADIENT | RLK_SAVED | RLK_STRIDED;
constexpr uint32_t kIndexFlags = RLK_OPTIONAL | RLK_NO_GRADIENT | RLK_SAVED | RLK_STRIDED;

#define RLK_ROPE_TABLES                                                                                \
  {"cos",    "[rows, width], [batch, rows, width] or x's own layout with one head; fp32 or x's dtype", \
   RLK_READ, kFloats,                                                                                  \
   2,        4,                                                                                        \
   -1,       kTableFlags},                                                                             \
  {                                                                                                    \
    "sin", "as cos", RLK_READ, kFloats, 2, 4, -1, kTableFlags                                          \
  }
#define RLK_ROPE_ROWS                                                                             \
  {"positions", "table row of each token: [T], [B,T], [B*T], or [3,..] for M-RoPE",               \
   RLK_READ,    kIntegers,                                                                        \
   1,           3,                                                                                \
   -1,          kIndexFlags},                                                                     \
      {"starts", "[B], or one per packed sequence: position of the first token",                  \
       RLK_READ, kIntegers,                                                                       \
       1,        1,                                                                               \
       -1,       kIndexFlags},                                                                    \
  {                                                                                               \
    "cu_seqlens", "[sequences + 1]: where packed sequences begin", RLK_READ, kIntegers, 1, 1, -1, \
        kIndexFlags                                                                               \
  }
#define RLK_ROPE_AXIS_MAP                                                            \
  {"axis_map", "[rotary_dim / 2]: which axis of [3,..] positions each pair follows", \
   RLK_READ,   RLK_I32,                                                              \
   1,          1,                                                                    \
   -1,         kIndexFlags | RLK_HOST}

constexpr rlk_argument kRope[] = {
    {"x", "q, or whatever is to be rotated, in `layout`", RLK_READ, kFloats, 2, 4, 0, RLK_STRIDED},
    RLK_ROPE_TABLES,
    {"k", "rotated in the same launch, may have other heads", RLK_READ, kFloats, 2, 4, 0,
     RLK_OPTIONAL | RLK_STRIDED},
    RLK_ROPE_ROWS,
    RLK_ROPE_AXIS_MAP,
    {"out", "as x", RLK_WRITE, kResult, 2, 4, 0, RLK_STRIDED},
    {"k_out", "as k", RLK_WRITE, kResult, 2, 4, 0, RLK_OPTIONAL | RLK_STRIDED},
};
constexpr rlk_argument kRopeBwd[] = {
    {"d_out", "gradient of out", RLK_READ, kFloats, 2, 4, 0, RLK_STRIDED},
    RLK_ROPE_TABLES,
    {"d_k_out", "gradient of k_out", RLK_READ, kFloats, 2, 4, 0, RLK_OPTIONAL | RLK_STRIDED},
    RLK_ROPE_ROWS,
    RLK_ROPE_AXIS_MAP,
    {"d_x", "gradient of x", RLK_WRITE, kResult, 2, 4, 0, RLK_STRIDED},
    {"d_k", "gradient of k", RLK_WRITE, kResult, 2, 4, 0, RLK_OPTIONAL | RLK_STRIDED},
};
constexpr rlk_argument kRopeInPlace[] = {
    {"x", "rotated where it lies", RLK_READWRITE, kFloats, 2, 4, 0, RLK_STRIDED},
    RLK_ROPE_TABLES,
    {"k", "rotated in the same launch", RLK_READWRITE, kFloats, 2, 4, 0, RLK_OPTIONAL | RLK_STRIDED},
    RLK_ROPE_ROWS,
    RLK_ROPE_AXIS_MAP,
};
static_assert(std::size(kRope) == kRopeArguments && std::size(kRopeBwd) == kRopeArguments &&
              std::size(kRopeInPlace) == kOut);

#define RLK_ROPE_CONTEXT                                                                                \
  {"cp_rank", "rank in the context-parallel group", RLK_INT, 0, 0, nullptr}, {                          \
    "cp_size", "ranks that share a sequence, two mirrored chunks each; 1: none", RLK_INT, 1, 0, nullptr \
  }
constexpr rlk_attribute kRopeAttributeTable[] = {
    {"layout", "order of the axes of x; rank 3 leaves the batch out", RLK_CHOICE, 0, 0, "bhsd|bshd|sbhd|thd"},
    {"pairing", "which dims turn together: p and p + rotary_dim/2, or 2p and 2p + 1", RLK_CHOICE, 0, 0,
     "half|adjacent|adjacent_to_half"},
    {"table", "width of cos and sin: rotary_dim / 2, or all of it", RLK_CHOICE, 0, 0, "any|half|full"},
    {"rotary_dim", "dims that turn; 0: as the tables say", RLK_INT, 0, 0, nullptr},
    {"rotary_offset", "first dim that turns", RLK_INT, 0, 0, nullptr},
    {"transpose", "apply the transposed rotation (the inverse when cos^2 + sin^2 = 1)", RLK_FLAG, 0, 0,
     nullptr},
    RLK_ROPE_CONTEXT,
    {"mrope_t", "pairs that follow the first axis of [3,..] positions", RLK_INT, 0, 0, nullptr},
    {"mrope_h", "pairs that follow the second axis", RLK_INT, 0, 0, nullptr},
    {"mrope_w", "pairs that follow the third axis", RLK_INT, 0, 0, nullptr},
    {"mrope_interleaved", "pairs take turns (t h w t h w ..) instead of lying in sections", RLK_FLAG, 0, 0,
     nullptr},
};
static_assert(std::size(kRopeAttributeTable) == kRopeAttributes);

int32_t report(const std::string& error, const rlk_host* host) {
  return error.empty() ? RLK_OK : host->fail(RLK_INVALID_ARGUMENT, error.c_str());
}

rlk_shape same(const DLTensor* t) { return like(t, static_cast<uint32_t>(dtype(t)), dtype(t)); }

// [batch, tokens, heads, dim] under the default layout bhsd is served as [batch, heads, tokens, dim] wherever
// the table has a row for every head. The same shapes may be meant, so it is not refused; the log says once
// that it is unlikely: no argument names rows, no k has other heads than x, the table does not end with the
// tokens, and it ends with the heads or there are more of them than any model has.
void doubt_layout(const rlk_slot* s, const Geometry& g, const rlk_host* host, const char* op) {
  constexpr int64_t kMostHeads = 256;
  const int64_t heads = g.part[0].heads, tokens = g.tokens, rows = g.rows.count;
  const bool named = s[kPositions].tensor || s[kStarts].tensor || s[kCuSeqlens].tensor || g.rows.cp_size > 1;
  if (named || tokens == rows || tokens >= heads || heads > rows) return;
  if (heads != rows && heads <= kMostHeads) return;
  if (g.parts > 1 && g.part[1].heads != heads) return;
  static std::atomic_flag said;
  if (said.test_and_set()) return;
  constexpr int32_t kWarning = 3;
  host->log(kWarning,
            fmt::format("{}: x is {} in layout bhsd, so it has {} heads and {} tokens, and cos has {} rows; "
                        "data that lie [batch, tokens, heads, dim] need layout=bshd",
                        op, detail::shape_text(*s[kX].tensor), heads, tokens, rows)
                .c_str());
}

template <Form F>
int32_t infer_rope(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  Geometry g;
  if (const auto error = read_rope(s, F, g); !error.empty()) return report(error, host);
  const rlk_slot* attributes = s + (F == Form::in_place ? kOut : kRopeArguments);
  if (static_cast<Layout>(attributes[kLayout].i) == Layout::bhsd)
    doubt_layout(s, g, host, F == Form::backward ? "rope_bwd" : F == Form::in_place ? "rope_" : "rope");
  if (F == Form::in_place) {
    shapes[kX] = same(s[kX].tensor);
    if (s[kK].tensor) shapes[kK] = same(s[kK].tensor);
    return RLK_OK;
  }
  shapes[kOut] = same(s[kX].tensor);
  if (s[kK].tensor) shapes[kKOut] = same(s[kK].tensor);
  return RLK_OK;
}

constexpr rlk_argument kMlaQ[] = {
    {"x", "query with the rotary dims last, in `layout`", RLK_READ, kFloats, 2, 4, 0, RLK_STRIDED},
    RLK_ROPE_TABLES,
    RLK_ROPE_ROWS,
    {"out", "as x; pairs that lay side by side lie apart unless remove_interleaving", RLK_WRITE, kResult, 2,
     4, 0, RLK_STRIDED},
};
constexpr rlk_argument kMlaQBwd[] = {
    {"d_out", "gradient of out", RLK_READ, kFloats, 2, 4, 0, RLK_STRIDED},
    RLK_ROPE_TABLES,
    RLK_ROPE_ROWS,
    {"d_x", "gradient of x", RLK_WRITE, kResult, 2, 4, 0, RLK_STRIDED},
};
static_assert(std::size(kMlaQ) == kMlaQArguments && std::size(kMlaQBwd) == kMlaQArguments);
constexpr rlk_attribute kMlaQAttributeTable[] = {
    {"layout", "order of the axes of x", RLK_CHOICE, 2, 0, "bhsd|bshd|sbhd|thd"},
    {"rotary_dim", "trailing dims that turn; 0: the tables' width", RLK_INT, 0, 0, nullptr},
    {"remove_interleaving", "results go back to the pairs' own places", RLK_FLAG, 0, 0, nullptr},
    {"inverse", "apply the transposed rotation", RLK_FLAG, 0, 0, nullptr},
    RLK_ROPE_CONTEXT,
};
static_assert(std::size(kMlaQAttributeTable) == kMlaQAttributes);

template <bool Backward>
int32_t infer_mla_q(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  Geometry g;
  if (const auto error = read_mla_q(s, Backward, g); !error.empty()) return report(error, host);
  shapes[kMlaOut] = same(s[kMlaX].tensor);
  return RLK_OK;
}

constexpr rlk_argument kMlaKv[] = {
    {"kv", "[.., heads, k_dim + v_dim]", RLK_READ, kFloats, 2, 4, 0, RLK_STRIDED},
    {"k_pos_emb", "[.., 1, R], shared by all heads", RLK_READ, kFloats, 2, 4, 0, RLK_STRIDED},
    RLK_ROPE_TABLES,
    RLK_ROPE_ROWS,
    {"key", "[.., heads, k_dim + R]", RLK_WRITE, kResult, 2, 4, 0, RLK_STRIDED},
    {"value", "[.., heads, v_dim]", RLK_WRITE, kResult, 2, 4, 0, RLK_STRIDED},
};
constexpr rlk_argument kMlaKvBwd[] = {
    {"d_key", "gradient of key", RLK_READ, kFloats, 2, 4, 0, RLK_STRIDED},
    {"d_value", "gradient of value", RLK_READ, kFloats, 2, 4, 0, RLK_STRIDED},
    RLK_ROPE_TABLES,
    RLK_ROPE_ROWS,
    {"d_kv", "gradient of kv", RLK_WRITE, kResult, 2, 4, 0, RLK_STRIDED},
    {"d_k_pos_emb", "gradient of k_pos_emb, summed over heads in fp32", RLK_WRITE, kResult, 2, 4, 0,
     RLK_STRIDED},
};
static_assert(std::size(kMlaKv) == kMlaKvArguments && std::size(kMlaKvBwd) == kMlaKvArguments);
constexpr rlk_attribute kMlaKvAttributeTable[] = {
    {"layout", "order of the axes", RLK_CHOICE, 2, 0, "bhsd|bshd|sbhd|thd"},
    {"k_dim", "columns of kv that belong to the key", RLK_INT, -1, 0, nullptr},
    {"remove_interleaving", "results go back to the pairs' own places", RLK_FLAG, 0, 0, nullptr},
    RLK_ROPE_CONTEXT,
};
static_assert(std::size(kMlaKvAttributeTable) == kMlaKvAttributes);

template <bool Backward>
int32_t infer_mla_kv(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  KvGeometry g;
  if (const auto error = read_mla_kv(s, Backward, g); !error.empty()) return report(error, host);
  const DLTensor *a = s[kKvIn0].tensor, *b = s[kKvIn1].tensor;
  const auto type = static_cast<uint32_t>(dtype(a));
  const Layout layout = static_cast<Layout>((s + kMlaKvArguments)[kKvLayout].i);
  detail::Axes axes;
  detail::axes_of(layout, a->ndim, axes);
  if (Backward) {
    shapes[kKvOut0] = with_last(a, int64_t{g.k_dim} + g.v_dim, type, dtype(a));
    shapes[kKvOut1] = with_last(a, g.turn.rotary_dim, type, dtype(a));
    if (axes.head >= 0) shapes[kKvOut1].dim[axes.head] = 1;
  } else {
    shapes[kKvOut0] = with_last(a, g.k_dim + dim(b, -1), type, dtype(a));
    shapes[kKvOut1] = with_last(a, g.v_dim, type, dtype(a));
  }
  return RLK_OK;
}

constexpr rlk_op_schema make(const char* name, const char* aliases, const char* doc,
                             std::span<const rlk_argument> arguments,
                             std::span<const rlk_attribute> attributes, const char* backward,
                             const char* saves, decltype(rlk_op_schema::infer) infer) {
  rlk_op_schema s{};
  s.struct_size = sizeof(rlk_op_schema);
  s.version = 1;
  s.name = name, s.aliases = aliases, s.doc = doc;
  s.arguments = arguments.data(), s.num_arguments = static_cast<uint32_t>(arguments.size());
  s.attributes = attributes.data(), s.num_attributes = static_cast<uint32_t>(attributes.size());
  s.backward = backward, s.saves = saves, s.infer = infer, s.may_alias = "";
  return s;
}

constexpr rlk_argument kTables[] = {
    {"cos", "[rows, width]; rounded to fp32, then to its dtype", RLK_WRITE, kResult, 2, 2, 0, RLK_STRIDED},
    {"sin", "as cos", RLK_WRITE, kResult, 2, 2, 0, RLK_STRIDED},
    {"positions", "[rows]: the position of each row; absent: start, start + 1, ..", RLK_READ, kIntegers, 1, 1,
     0, RLK_OPTIONAL | RLK_NO_GRADIENT | RLK_STRIDED},
    {"factors", "longrope: divisor of each frequency [rotary_dim / 2]", RLK_READ, RLK_F32 | RLK_F64, 1, 1, -1,
     RLK_OPTIONAL | RLK_NO_GRADIENT | RLK_HOST | RLK_STRIDED},
};
constexpr rlk_attribute kTableAttributeTable[] = {
    {"rotary_dim", "dims that turn", RLK_INT, 0, 0, nullptr},
    {"rows", "rows to build; 0: one per position given", RLK_INT, 0, 0, nullptr},
    {"start", "position of row 0 when no positions are given", RLK_INT, 0, 0, nullptr},
    {"width", "half: rotary_dim / 2 columns; full: [half | half]; full_adjacent: each twice in a row",
     RLK_CHOICE, 0, 0, "half|full|full_adjacent"},
    {"base", "base of the frequencies", RLK_FLOAT, 0, 10000, nullptr},
    {"scaling", "how frequencies are stretched beyond the trained length", RLK_CHOICE, 0, 0,
     "none|linear|ntk|dynamic|yarn|llama3|longrope"},
    {"factor", "how far", RLK_FLOAT, 0, 1, nullptr},
    {"original_max", "trained length (dynamic, yarn, llama3, longrope)", RLK_INT, 0, 0, nullptr},
    {"seq_len", "length now (dynamic)", RLK_INT, 0, 0, nullptr},
    {"beta_fast", "yarn: turns that mark unstretched dims", RLK_FLOAT, 0, 32, nullptr},
    {"beta_slow", "yarn: turns that mark fully stretched dims", RLK_FLOAT, 0, 1, nullptr},
    {"mscale", "yarn: 0: not set", RLK_FLOAT, 0, 0, nullptr},
    {"mscale_all_dim", "yarn: 0: not set", RLK_FLOAT, 0, 0, nullptr},
    {"truncate", "yarn: round the bounds of the ramp to whole dims", RLK_FLAG, 1, 0, nullptr},
    {"low_freq_factor", "llama3", RLK_FLOAT, 0, 1, nullptr},
    {"high_freq_factor", "llama3", RLK_FLOAT, 0, 4, nullptr},
    {"attention_factor", "multiplies cos and sin; 0: what the scaling rule gives", RLK_FLOAT, 0, 0, nullptr},
};
static_assert(std::size(kTables) == kTableArguments && std::size(kTableAttributeTable) == kTableAttributes);

int32_t infer_tables(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  TableRule rule;
  int64_t rows = 0;
  bool full = false;
  if (const auto error = read_table_rule(s, rule, rows, full); !error.empty()) return report(error, host);
  shapes[kTableCos] = shapes[kTableSin] =
      shape_of({rows, full ? rule.rotary_dim : rule.rotary_dim / 2}, kFloats, DType::f32);
  return RLK_OK;
}

constexpr const char* kSaves = "cos,sin,positions,starts,cu_seqlens";

}  // namespace

extern const rlk_op_schema rope_schema =
    make("rope", "rope_i:pairing=adjacent,rope_thd:layout=bshd,apply_rotary_pos_emb:layout=sbhd:table=full",
         "rotary position embedding of x, or of x and k in one launch", kRope, kRopeAttributeTable,
         "rope_bwd", "cos,sin,positions,starts,cu_seqlens,axis_map", infer_rope<Form::out_of_place>);
extern const rlk_op_schema rope_bwd_schema =
    make("rope_bwd", "", "gradient of rope: the transposed rotation, back in x's layout", kRopeBwd,
         kRopeAttributeTable, nullptr, "", infer_rope<Form::backward>);
extern const rlk_op_schema rope__schema =
    make("rope_", "", "rope in place, without a gradient: x must not be saved for a backward", kRopeInPlace,
         kRopeAttributeTable, nullptr, "", infer_rope<Form::in_place>);
extern const rlk_op_schema rope_mla_q_schema = make(
    "rope_mla_q", "fused_apply_mla_rope_for_q", "rope of a latent-attention query: the trailing dims turn",
    kMlaQ, kMlaQAttributeTable, "rope_mla_q_bwd", kSaves, infer_mla_q<false>);
extern const rlk_op_schema rope_mla_q_bwd_schema =
    make("rope_mla_q_bwd", "", "gradient of rope_mla_q", kMlaQBwd, kMlaQAttributeTable, nullptr, "",
         infer_mla_q<true>);
extern const rlk_op_schema rope_mla_kv_schema =
    make("rope_mla_kv", "fused_apply_mla_rope_for_kv",
         "splits kv into key and value and gives every head the rotated shared embedding", kMlaKv,
         kMlaKvAttributeTable, "rope_mla_kv_bwd", kSaves, infer_mla_kv<false>);
extern const rlk_op_schema rope_mla_kv_bwd_schema =
    make("rope_mla_kv_bwd", "", "gradient of rope_mla_kv", kMlaKvBwd, kMlaKvAttributeTable, nullptr, "",
         infer_mla_kv<true>);

extern const rlk_op_schema rope_tables_schema =
    make("rope_tables", "", "cos and sin tables, built in fp64", kTables, kTableAttributeTable, nullptr, "",
         infer_tables);

}  // namespace rlk::registry
