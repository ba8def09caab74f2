// sample's log-probabilities by another of logp's rules than lse128/l8: its rows as a call of logp has them.
#pragma once

#include "arithmetic/logp/logp.hpp"
#include "arithmetic/sample/sample.hpp"

namespace rlk::sampling {

// But for targets, temperatures and what is kept.
inline lse128::Problem sums_of(const Problem& p) {
  lse128::Problem q;
  q.rows = p.rows, q.columns = q.here = p.vocab;
  q.vocab = p.whole, q.start = p.first, q.leaf = p.leaf();
  q.first = p.first_leaf, q.count = p.leaves;
  q.logits = {const_cast<void*>(p.logits), p.type, p.stride};
  q.round = p.round, q.cap = p.softcap;
  return q;
}

RLK_HD Part part_of(const lse128::State& all) { return {all.m, all.s}; }

}  // namespace rlk::sampling
