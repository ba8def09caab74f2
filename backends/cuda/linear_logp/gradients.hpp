// linear_logp's gradients on Hopper: logits of a leaf again, their gradient in hidden's dtype, and of that, while it lies there,
// the leaf's share of d_hidden and its columns of d_weight.
//
// A leaf's share is one chain of sm90/t25k16, and so is a d_weight of up to 4096 rows: both are products of lm_head's kind, of
// which the fastest is taken. Shares are joined by tp_sum as soon as they are two of a kind, so that four are held at most.
//
// The gradient of a leaf's logits of all rows is held where it has room: then the logits are computed once. Else d_hidden takes
// them block of rows by block of rows, and d_weight once more, panel of columns by panel.
#pragma once

#include <array>

#include "arithmetic/logp/ex2.hpp"
#include "simt/linear_logp/run.hpp"
#include "simt/portable.hpp"

namespace rlk::cuda::linear_logp {

using logp_parts::BackwardCut;
using logp_parts::Limits;
using logp_parts::Room;

using lse128::Matrix;
using lse128::Problem;
using lse128::State;
using simt::logp::Panel;

// What logp's part is computed by: portable kernels (lse128/l8), or the special function units' exponential
// (sm90/ex2/lse2048/l8).
enum class By { portable, unit };
constexpr std::int64_t tile_of(By by) { return by == By::unit ? lse2048::kTile : lse128::kTile; }

// The forward's kernels; the first bytes of a workspace are what cuBLASLt's may use.
struct Hopper : simt::linear_logp::LogpIn {
  static constexpr std::uint64_t kOwn = 64;
  const Call& call;
  const By by;

  Hopper(const Call& c, By kernels) : LogpIn{c.stream(), c.device().id}, call(c), by(kernels) {}
  std::byte* behind() const { return call.workspace().data() + kOwn; }
  const char* logits(const LmHead& a) const;
  const char* fold(const Problem& p, const Panel& panel, State* states, float* targets) const;
  const char* gradient(const Problem& p, const Panel& panel, const Matrix& to, std::int64_t columns,
                       const State* states) const;
  // Of lm_head's gradients the one that is asked for.
  const char* product(const LmHeadBwd& a) const;
  // A portable one.
  const char* product(const simt::linear::Product& p) const;
};

class Gradients {
 public:
  Gradients(const LinearLogpBwd& a, const Call& call, By by);
  static std::uint64_t bytes(const LinearLogpBwd& a, By by);
  rlk_code run();

 private:
  static constexpr int kShares = 4;
  // Rows and columns of logits.
  struct Area {
    std::int64_t row, rows, begin, end;
    std::int64_t columns() const { return end - begin; }
    std::int64_t stride() const { return (columns() + 15) / 16 * 16; }  // of their gradient
  };
  struct Sizes {
    bool together;         // the logits are computed once
    std::int64_t rows;     // of a block of d_hidden
    std::int64_t columns;  // of a panel of d_weight
    std::int64_t at_once;  // rows of logits
    explicit Sizes(const BackwardCut& cut);
  };
  struct Held {
    simt::linear_logp::Held forward;  // logits, and where the stats are not given what the forward has
    std::byte* d_logits;
    std::array<std::byte*, kShares> shares;
    Held(const BackwardCut& cut, const Sizes& sizes, Room& room);
  };

  Tensor d_logits(const Area& area, std::int64_t row, std::int64_t n) const;
  const char* slopes(const Area& area, int leaf);
  const char* leaves(std::int64_t row, std::int64_t rows, bool to_hidden, bool to_weight);
  const char* add_share(const Area& area, int leaf);
  const char* weight(const Area& area);
  const char* clear_rest(const Out& t, const In& before);
  const char* all();

  BackwardCut cut_;
  const Call& call_;
  Hopper kernels_;
  Sizes sizes_;
  Room room_;
  Held held_;
  int shares_ = 0;  // that wait to be joined
  rlk_code code_ = RLK_OK;
};

}  // namespace rlk::cuda::linear_logp
