// Bounds, lengths and pages that a call of attention, of a part of its keys or of its gradients brings, held to the tensors.
#pragma once

#include <string>

#include "arithmetic/attention/problem.hpp"
#include "rlk/backend.hpp"

namespace rlk::native::attention {

class Check {
 public:
  Check(const char* op, const attn128::Problem& p, const Call& call) : op_(op), p_(p), call_(call) {}

  rlk_code operator()() const {
    if (const rlk_code code = bounds("cu_q", p_.cu_q, p_.queries)) return code;
    if (const rlk_code code = bounds("cu_k", p_.cu_k, p_.room)) return code;
    if (const rlk_code code = prefixes()) return code;
    return keys();
  }

 private:
  rlk_code fail(const char* name, std::int64_t i, std::int64_t is, const char* relation,
                std::int64_t expected) const {
    return call_.fail(RLK_INVALID_ARGUMENT, std::string(op_) + ": " + name + "[" + std::to_string(i) +
                                                "] is " + std::to_string(is) + ", expected " + relation +
                                                std::to_string(expected));
  }

  rlk_code bounds(const char* name, const attn128::Integers& cu, std::int64_t rows) const {
    if (!cu) return RLK_OK;
    if (cu.get(0) != 0) return fail(name, 0, cu.get(0), "", 0);
    for (std::int64_t n = 1; n <= p_.sequences; ++n) {
      if (cu.get(n) < cu.get(n - 1)) return fail(name, n, cu.get(n), "at least ", cu.get(n - 1));
      if (cu.get(n) > rows) return fail(name, n, cu.get(n), "at most ", rows);
    }
    return RLK_OK;
  }

  rlk_code prefixes() const {
    for (std::int64_t n = 0; p_.prefix_of && n < p_.sequences; ++n) {
      const std::int64_t first = p_.prefix_of.get(n);
      if (first < -1) return fail("prefix_of", n, first, "at least ", -1);
      if (first >= n) return fail("prefix_of", n, first, "less than ", n);
      if (first >= 0 && p_.prefix_of.get(first) != -1)
        return call_.fail(RLK_INVALID_ARGUMENT,
                          std::string(op_) + ": prefix_of[" + std::to_string(n) + "] is " +
                              std::to_string(first) + ", which has a prefix itself: prefix_of[" +
                              std::to_string(first) + "] is " + std::to_string(p_.prefix_of.get(first)));
    }
    return RLK_OK;
  }

  rlk_code keys() const {
    for (std::int64_t n = 0; p_.kv_len && n < p_.sequences; ++n) {
      const std::int64_t length = p_.kv_len.get(n), most = p_.shared(n) + p_.own_room(n);
      if (length < 0) return fail("kv_len", n, length, "at least ", 0);
      if (p_.k_first) {
        if (const rlk_code code = part(n, length, most)) return code;
      } else if (length > most) {
        return fail("kv_len", n, length, "at most ", most);
      }
      const attn128::Visible here = p_.here(n);
      for (std::int64_t i = 0; p_.block_table && i * p_.page_size < here.last - here.first; ++i) {
        const std::int64_t page = p_.block_table.get(n, i);
        if (page >= 0 && page < p_.pages) continue;
        return call_.fail(RLK_INVALID_ARGUMENT, std::string(op_) + ": block_table[" + std::to_string(n) +
                                                    ", " + std::to_string(i) + "] is " +
                                                    std::to_string(page) + ", k has " +
                                                    std::to_string(p_.pages) + " pages");
      }
    }
    return RLK_OK;
  }

  // The splits of a sequence that are here are whole, but for its last one.
  rlk_code part(std::int64_t n, std::int64_t length, std::int64_t most) const {
    const std::int64_t first = p_.k_first.get(n);
    if (first < 0 || first > attn128::kMostKeys)
      return fail("k_first", n, first, "from 0 to ", attn128::kMostKeys);
    if (p_.split == 0 && first != 0) return fail("k_first", n, first, "with one split ", 0);
    if (p_.split != 0 && first % p_.split != 0) return fail("k_first", n, first, "a multiple of ", p_.split);
    std::int64_t last = length;
    if (p_.k_last && p_.k_last.get(n) < length) last = p_.k_last.get(n);
    if (last <= first) return RLK_OK;
    if (p_.k_last && last - first > most)
      return fail("k_last", n, p_.k_last.get(n), "at most ", first + most);
    if (!p_.k_last && last - first > most) last = first + most;
    if (last == first || last == length || (p_.split != 0 && last % p_.split == 0)) return RLK_OK;
    return call_.fail(
        RLK_INVALID_ARGUMENT,
        std::string(op_) + ": the keys of sequence " + std::to_string(n) + " end at " + std::to_string(last) +
            ", kv_len is " + std::to_string(length) +
            (p_.split == 0 ? ": with one split they are all here"
                           : ": where others follow they end at a multiple of " + std::to_string(p_.split)));
  }

  const char* op_;
  const attn128::Problem& p_;
  const Call& call_;
};

}  // namespace rlk::native::attention
