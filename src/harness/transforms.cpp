#include "src/harness/transforms.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

namespace rlk::harness {
namespace {

std::vector<int64_t> iota(int64_t from, int64_t to) {
  std::vector<int64_t> v(static_cast<std::size_t>(std::max<int64_t>(0, to - from)));
  std::iota(v.begin(), v.end(), from);
  return v;
}

// A fixed permutation that moves every row.
std::vector<int64_t> permutation(int64_t n, uint64_t seed) {
  std::vector<int64_t> v = iota(0, n);
  for (int64_t i = n - 1; i > 0; --i) {
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    std::swap(v[static_cast<std::size_t>(i)],
              v[static_cast<std::size_t>(seed >> 33) % static_cast<std::size_t>(i + 1)]);
  }
  return v;
}

// Hands out variants while they are wanted.
class Maker {
 public:
  Maker(const Problem& p, const Subject& subject, bool thorough,
        const std::function<bool(const Variant&)>& take)
      : p_(p), subject_(subject), thorough_(thorough), take_(take), rows_(row_count(p)) {}

  void all() {
    manners();
    if (!rows_ || *rows_ == 0) return;
    batch_sizes();
    positions();
    neighbours();
    slices();
    padding();
    shape();
    if (subject_.services) streams();
  }

 private:
  bool wanted() const { return going_; }
  void give(const Variant& v) {
    if (going_) going_ = take_(v);
  }
  void rows(const char* dimension, std::string text, const std::vector<int64_t>& source, Filler filler) {
    if (!wanted() || source.empty()) return;
    if (auto q = compose(p_, source, filler)) give({dimension, std::move(text), std::move(*q), source, {}});
  }
  void same(const char* dimension, std::string text, Manner manner, int32_t users = 1, int32_t repeats = 1) {
    if (wanted()) give({dimension, std::move(text), p_, {}, manner, users, repeats});
  }

  void batch_sizes() {
    std::vector<int64_t> sizes{1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 61};
    if (thorough_) sizes.insert(sizes.end(), {127, 128, 129, 255, 256, 257, 509, 511, 512, 513});
    if (thorough_ && !p_.large) sizes.insert(sizes.end(), {1000, 1024, 2048, 4096});
    for (int64_t m : sizes) {
      if (m > p_.most_rows) continue;
      // The original's rows first, spread with fillers to m rows; or a part of them.
      std::vector<int64_t> source(static_cast<std::size_t>(m), -1);
      const int64_t kept = std::min(m, *rows_), step = m / kept;
      for (int64_t i = 0; i < kept; ++i) source[static_cast<std::size_t>(i * step)] = (i * 5 + m) % *rows_;
      rows("batch size", fmt::format("m={}", m), source, Filler::other);
    }
  }
  void positions() {
    // The probe stands at several places of one batch, rows of others between; together the batches reach
    // every place.
    const int64_t probe = *rows_ / 2,
                  last = !thorough_           ? 17
                         : p_.most_rows >= 64 ? 64
                                              : 16,
                  apart = thorough_ ? 8 : last;
    for (int64_t group = 0; group < apart; ++group) {
      std::vector<int64_t> source(static_cast<std::size_t>(last), -1);
      for (int64_t block = 0; block * apart < last; ++block)
        source[static_cast<std::size_t>(block * apart + (block + group) % apart)] = probe;
      rows("position", fmt::format("row {} at {} of every {} of {}", probe, group, apart, last), source,
           Filler::other);
    }
    rows("position", "permutation", permutation(*rows_, p_.seed), Filler::other);
  }
  void neighbours() {
    for (Filler f :
         {Filler::zeros, Filler::copies, Filler::scaled, Filler::denormal, Filler::infinity, Filler::nan}) {
      std::vector<int64_t> source;
      for (int64_t r = 0; r < std::min<int64_t>(*rows_, 16); ++r) source.insert(source.end(), {r, -1});
      rows("neighbours", name_of(f), source, f);
    }
  }
  void slices() {
    for (int64_t offset : {0, 1, 2, 7, 8, 15, 16, 64})
      if (offset < *rows_) rows("slice", fmt::format("from {}", offset), iota(offset, *rows_), Filler::other);
    for (int64_t cut : {int64_t{1}, *rows_ / 2, *rows_ - 1})
      if (cut > 0 && cut < *rows_) rows("slice", fmt::format("up to {}", cut), iota(0, cut), Filler::other);
  }
  void padding() {
    std::vector<int64_t> extra{1, 3, 16, 127};
    if (thorough_) extra = {1, 2, 3, 5, 8, 15, 16, 31, 64, 100, 127};
    for (int64_t n : extra) {
      if (n > p_.most_rows) continue;
      for (Filler f : {Filler::zeros, Filler::other, Filler::nan}) {
        std::vector<int64_t> source = iota(0, *rows_);
        source.insert(source.end(), static_cast<std::size_t>(n), -1);
        rows("padding", fmt::format("{} rows of {}", n, name_of(f)), source, f);
      }
    }
  }
  void shape() {
    if (auto q = reshaped(p_)) give({"shape view", "leading axes", std::move(*q), iota(0, *rows_), {}});
  }
  void manners() {
    for (int64_t bytes : {2, 4, 8, 16, 32, 64, 128})
      same("alignment", fmt::format("offset {}", bytes), {.offset = bytes});
    for (int64_t pad : {1, 8}) same("stride", fmt::format("row padding {}", pad), {.row_padding = pad});
    if (subject_.implementation->traits & RLK_WORKSPACE_OPTIONAL)
      for (int64_t percent : {0, 50})
        same("workspace", fmt::format("{}% of it", percent), {.workspace_percent = percent});
    same("repeats", "again", {}, 1, thorough_ ? 100 : 3);
    if (subject_.services) return;
    for (int32_t threads : {1, 2, 3, 4, 7, 8, 16, 64})
      same("threads", fmt::format("{}", threads), {.threads = threads});
    same("threads", "4 callers at once", {}, 4, thorough_ ? 10 : 2);
    if (!wanted()) return;
    Variant hostile{"float environment", "flush to zero, round toward zero", p_, {}, {}};
    hostile.hostile = true;
    give(hostile);
  }
  void streams() {
    const rlk_device_services& d = *subject_.services;
    if (!d.stream_create || !d.stream_destroy) return;
    for (int i = 0; i < (thorough_ ? 8 : 2) && wanted(); ++i) {
      void* stream = nullptr;
      if (d.stream_create(&subject_.device, &stream) != RLK_OK) return;
      same("streams", fmt::format("stream {}", i), {.stream = stream});
      if (subject_.implementation->traits & RLK_CAPTURE_SAFE && d.capture_begin && d.capture_end &&
          d.graph_launch && d.graph_destroy)
        same("graphs", fmt::format("captured on stream {}", i), {.stream = stream, .graph = true});
      d.stream_destroy(&subject_.device, stream);
    }
  }

  const Problem& p_;
  const Subject& subject_;
  const bool thorough_;
  const std::function<bool(const Variant&)>& take_;
  const std::optional<int64_t> rows_;
  bool going_ = true;
};

}  // namespace

void for_variants(const Problem& p, const Subject& subject, bool thorough,
                  const std::function<bool(const Variant&)>& take) {
  Maker(p, subject, thorough, take).all();
}

}  // namespace rlk::harness
