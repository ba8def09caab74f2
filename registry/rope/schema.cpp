// The rope family: rotary position embedding out of place, in place, backward, for latent attention, and its
// tables. What the arguments mean is worked out in registry/rope/geometry.hpp, which every backend shares.
#include "registry/schema.hpp"

#include <atomic>

#include "registry/rope/geometry.hpp"

namespace rlk::registry {
namespace {

using namespace rotary;

constexpr auto kTables = arguments(read("cos",
                                        "[rows, width], [batch, rows, width] or x's own layout with one "
                                        "head; fp32 or x's dtype, any for fp32 x")
                                       .rank(2, 4)
                                       .no_gradient()
                                       .saved()
                                       .strided(),
                                   read("sin", "as cos").rank(2, 4).no_gradient().saved().strided());
constexpr auto kRows =
    arguments(read("positions", "table row of each token: [T], [B,T], [B*T], or [3,..] for M-RoPE")
                  .of(kIntegers)
                  .rank(1, 3)
                  .optional()
                  .no_gradient()
                  .saved()
                  .strided(),
              read("starts", "[B], or one per packed sequence: position of the first token")
                  .of(kIntegers)
                  .rank(1)
                  .optional()
                  .no_gradient()
                  .saved()
                  .strided(),
              read("cu_seqlens", "[sequences + 1]: where packed sequences begin")
                  .of(kIntegers)
                  .rank(1)
                  .optional()
                  .no_gradient()
                  .saved()
                  .strided());
constexpr auto kAxisMap =
    read("axis_map", "[rotary_dim / 2]: which axis of [3,..] positions each pair follows")
        .of(RLK_I32)
        .rank(1)
        .optional()
        .no_gradient()
        .saved()
        .strided()
        .on_host();

// Data in `layout`.
constexpr Argument in(const char* name, const char* doc) {
  return read(name, doc).rank(2, 4).rows(0).strided();
}
constexpr Argument out(const char* name, const char* doc) {
  return write(name, doc).rank(2, 4).rows(0).strided();
}
constexpr Argument in_place(const char* name, const char* doc) {
  return update(name, doc).rank(2, 4).rows(0).strided();
}

constexpr auto kRope = arguments(in("x", "q, or whatever is to be rotated, in `layout`"), kTables,
                                 in("k", "rotated in the same launch, may have other heads").optional(),
                                 kRows, kAxisMap, out("out", "as x"), out("k_out", "as k").optional());
constexpr auto kRopeBwd =
    arguments(in("d_out", "gradient of out"), kTables, in("d_k_out", "gradient of k_out").optional(), kRows,
              kAxisMap, out("d_x", "gradient of x"), out("d_k", "gradient of k").optional());
constexpr auto kRopeInPlace =
    arguments(in_place("x", "rotated where it lies"), kTables,
              in_place("k", "rotated in the same launch").optional(), kRows, kAxisMap);
static_assert(kRope.size() == kRopeArguments && kRopeBwd.size() == kRopeArguments &&
              kRopeInPlace.size() == kOut);

constexpr char kLayouts[] = "bhsd|bshd|sbhd|thd";
constexpr auto kContext =
    attributes(integer("cp_rank", "rank in the context-parallel group", 0),
               integer("cp_size", "ranks that share a sequence, two mirrored chunks each; 1: none", 1));
constexpr auto kRopeTable =
    attributes(choice("layout", "order of the axes of x; rank 3 leaves the batch out", kLayouts),
               choice("pairing", "which dims turn together: p and p + rotary_dim/2, or 2p and 2p + 1",
                      "half|adjacent|adjacent_to_half"),
               choice("table", "width of cos and sin: rotary_dim / 2, or all of it", "any|half|full"),
               integer("rotary_dim", "dims that turn; 0: as the tables say", 0),
               integer("rotary_offset", "first dim that turns", 0),
               flag("transpose", "apply the transposed rotation (the inverse when cos^2 + sin^2 = 1)"),
               kContext, integer("mrope_t", "pairs that follow the first axis of [3,..] positions", 0),
               integer("mrope_h", "pairs that follow the second axis", 0),
               integer("mrope_w", "pairs that follow the third axis", 0),
               flag("mrope_interleaved", "pairs take turns (t h w t h w ..) instead of lying in sections"),
               choice("negative", "a token at a negative position: an error, or turned by no angle",
                      "refuse|unrotated"));
static_assert(kRopeTable.size() == kRopeAttributes);

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

constexpr auto kMlaQ =
    arguments(in("x", "query with the rotary dims last, in `layout`"), kTables, kRows,
              out("out", "as x; pairs that lay side by side lie apart unless remove_interleaving"));
constexpr auto kMlaQBwd =
    arguments(in("d_out", "gradient of out"), kTables, kRows, out("d_x", "gradient of x"));
static_assert(kMlaQ.size() == kMlaQArguments && kMlaQBwd.size() == kMlaQArguments);
constexpr auto kMlaQTable =
    attributes(choice("layout", "order of the axes of x", kLayouts, "sbhd"),
               integer("rotary_dim", "trailing dims that turn; 0: the tables' width", 0),
               flag("remove_interleaving", "results go back to the pairs' own places"),
               flag("inverse", "apply the transposed rotation"), kContext);
static_assert(kMlaQTable.size() == kMlaQAttributes);

template <bool Backward>
int32_t infer_mla_q(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  Geometry g;
  if (const auto error = read_mla_q(s, Backward, g); !error.empty()) return report(error, host);
  shapes[kMlaOut] = same(s[kMlaX].tensor);
  return RLK_OK;
}

constexpr auto kMlaKv =
    arguments(in("kv", "[.., heads, k_dim + v_dim]"), in("k_pos_emb", "[.., 1, R], shared by all heads"),
              kTables, kRows, out("key", "[.., heads, k_dim + R]"), out("value", "[.., heads, v_dim]"));
constexpr auto kMlaKvBwd = arguments(in("d_key", "gradient of key"), in("d_value", "gradient of value"),
                                     kTables, kRows, out("d_kv", "gradient of kv"),
                                     out("d_k_pos_emb", "gradient of k_pos_emb, summed over heads in fp32"));
static_assert(kMlaKv.size() == kMlaKvArguments && kMlaKvBwd.size() == kMlaKvArguments);
constexpr auto kMlaKvTable =
    attributes(choice("layout", "order of the axes", kLayouts, "sbhd"),
               integer("k_dim", "columns of kv that belong to the key", -1),
               flag("remove_interleaving", "results go back to the pairs' own places"), kContext);
static_assert(kMlaKvTable.size() == kMlaKvAttributes);

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

constexpr auto kBuilt =
    arguments(write("cos", "[rows, width]; rounded to fp32, then to its dtype").rank(2).rows(0).strided(),
              write("sin", "as cos").rank(2).rows(0).strided(),
              read("positions", "[rows]: the position of each row; absent: start, start + 1, ..")
                  .of(kIntegers)
                  .rank(1)
                  .rows(0)
                  .optional()
                  .no_gradient()
                  .strided(),
              read("factors", "longrope: divisor of each frequency [rotary_dim / 2]")
                  .of(RLK_F32 | RLK_F64)
                  .rank(1)
                  .optional()
                  .no_gradient()
                  .on_host()
                  .strided());
constexpr auto kBuildRule = attributes(
    integer("rotary_dim", "dims that turn", 0),
    integer("rows", "rows to build; 0: one per position given", 0),
    integer("start", "position of row 0 when no positions are given", 0),
    choice("width", "half: rotary_dim / 2 columns; full: [half | half]; full_adjacent: each twice in a row",
           "half|full|full_adjacent"),
    real("base", "base of the frequencies", 10000),
    choice("scaling", "how frequencies are stretched beyond the trained length",
           "none|linear|ntk|dynamic|yarn|llama3|longrope"),
    real("factor", "how far", 1),
    integer("original_max", "trained length (dynamic, yarn, llama3, longrope)", 0),
    integer("seq_len", "length now (dynamic)", 0),
    real("beta_fast", "yarn: turns that mark unstretched dims", 32),
    real("beta_slow", "yarn: turns that mark fully stretched dims", 1), real("mscale", "yarn: 0: not set", 0),
    real("mscale_all_dim", "yarn: 0: not set", 0),
    flag("truncate", "yarn: round the bounds of the ramp to whole dims", true),
    real("low_freq_factor", "llama3", 1), real("high_freq_factor", "llama3", 4),
    real("attention_factor", "multiplies cos and sin; 0: what the scaling rule gives", 0));
static_assert(kBuilt.size() == kTableArguments && kBuildRule.size() == kTableAttributes);

int32_t infer_tables(const rlk_slot* s, rlk_shape* shapes, const rlk_host* host) {
  TableRule rule;
  int64_t rows = 0;
  bool full = false;
  if (const auto error = read_table_rule(s, rule, rows, full); !error.empty()) return report(error, host);
  shapes[kTableCos] = shapes[kTableSin] =
      shape_of({rows, full ? rule.rotary_dim : rule.rotary_dim / 2}, kFloats, DType::f32);
  return RLK_OK;
}

}  // namespace

extern const rlk_op_schema rope_schema =
    Schema("rope", "rotary position embedding of x, or of x and k in one launch", kRope, kRopeTable,
           infer_rope<Form::out_of_place>)
        .aliases("rope_i:pairing=adjacent,rope_thd:layout=bshd,apply_rotary_pos_emb:layout=sbhd:table=full")
        .gradient("rope_bwd");
extern const rlk_op_schema rope_bwd_schema =
    Schema("rope_bwd", "gradient of rope: the transposed rotation, back in x's layout", kRopeBwd, kRopeTable,
           infer_rope<Form::backward>);
extern const rlk_op_schema rope__schema =
    Schema("rope_", "rope in place, without a gradient: x must not be saved for a backward", kRopeInPlace,
           kRopeTable, infer_rope<Form::in_place>);
extern const rlk_op_schema rope_mla_q_schema =
    Schema("rope_mla_q", "rope of a latent-attention query: the trailing dims turn", kMlaQ, kMlaQTable,
           infer_mla_q<false>)
        .aliases("fused_apply_mla_rope_for_q")
        .gradient("rope_mla_q_bwd");
extern const rlk_op_schema rope_mla_q_bwd_schema =
    Schema("rope_mla_q_bwd", "gradient of rope_mla_q", kMlaQBwd, kMlaQTable, infer_mla_q<true>);
extern const rlk_op_schema rope_mla_kv_schema =
    Schema("rope_mla_kv", "splits kv into key and value and gives every head the rotated shared embedding",
           kMlaKv, kMlaKvTable, infer_mla_kv<false>)
        .aliases("fused_apply_mla_rope_for_kv")
        .gradient("rope_mla_kv_bwd");
extern const rlk_op_schema rope_mla_kv_bwd_schema =
    Schema("rope_mla_kv_bwd", "gradient of rope_mla_kv", kMlaKvBwd, kMlaKvTable, infer_mla_kv<true>);
extern const rlk_op_schema rope_tables_schema =
    Schema("rope_tables", "cos and sin tables, built in fp64", kBuilt, kBuildRule, infer_tables);

}  // namespace rlk::registry
