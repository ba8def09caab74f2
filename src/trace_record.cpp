#include "src/trace_record.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "rlk/tensor.hpp"
#include "src/digest.hpp"
#include "src/footprint.hpp"

namespace rlk {

bool TraceReader::wait() const {
  if (!device_ || device_->type == kDLCPU) return true;
  return services_ && services_->synchronize && services_->copy_out &&
         services_->synchronize(device_, stream_) == RLK_OK;
}

const std::byte* TraceReader::read(const DLTensor& t) {
  const Footprint all(t);
  const auto* here = static_cast<const std::byte*>(t.data) + t.byte_offset;
  if (all.device().device_type == kDLCPU || all.empty()) return here;
  if (!services_ || !services_->copy_out) return nullptr;
  bytes_.resize(all.high() - all.low());
  if (services_->copy_out(device_, bytes_.data(), reinterpret_cast<const void*>(all.low()), bytes_.size()) !=
      RLK_OK)
    return nullptr;
  return bytes_.data() + (reinterpret_cast<uintptr_t>(here) - all.low());
}

int32_t leading(const DLTensor& t, std::size_t keys) {
  if (t.ndim == 0) return -1;
  if (keys == 0) return 1;
  uint64_t rows = 1;
  for (int32_t d = 0; d < t.ndim; ++d) {
    rows *= static_cast<uint64_t>(t.shape[d]);
    if (rows == keys) return d + 1;
    if (rows > keys) return -1;
  }
  return -1;
}

namespace {

int64_t rows_of(const DLTensor& t, int32_t lead) {
  int64_t rows = 1;
  for (int32_t d = 0; d < lead; ++d) rows *= t.shape[d];
  return rows;
}

// The rows of a tensor: its leading dimensions, walked in order, each with all of its elements.
class Walk {
 public:
  Walk(const DLTensor& t, int32_t lead) : t_(t), lead_(lead), size_((t.dtype.bits * t.dtype.lanes + 7) / 8) {
    int64_t step = 1;
    for (int32_t d = t.ndim; d-- > 0;) {
      strides_[d] = t.strides ? t.strides[d] : step;
      step *= t.shape[d];
    }
    dense_ = true;
    step = 1;
    for (int32_t d = t.ndim; d-- > lead;) {
      if (t.shape[d] != 1 && strides_[d] != step) dense_ = false;
      step *= t.shape[d];
    }
    row_ = static_cast<std::size_t>(step) * size_;
  }

  uint64_t row(const std::byte* base, int64_t index) {
    int64_t offset = 0;
    for (int32_t d = lead_; d-- > 0;) {
      offset += index % t_.shape[d] * strides_[d];
      index /= t_.shape[d];
    }
    const std::byte* at = base + offset * static_cast<int64_t>(size_);
    if (dense_) return digest(at, row_);
    packed_.clear();
    pack(at, lead_);
    return digest(packed_.data(), packed_.size());
  }

 private:
  void pack(const std::byte* at, int32_t d) {
    if (d == t_.ndim) {
      packed_.insert(packed_.end(), at, at + size_);
      return;
    }
    const int64_t step = strides_[d] * static_cast<int64_t>(size_);
    for (int64_t i = 0; i < t_.shape[d]; ++i) pack(at + i * step, d + 1);
  }

  const DLTensor& t_;
  const int32_t lead_;
  const std::size_t size_;
  int64_t strides_[RLK_MAX_RANK] = {};
  std::size_t row_ = 0;
  bool dense_ = false;
  std::vector<std::byte> packed_;
};

void append_hex(std::string& out, uint64_t value) {
  char digits[16];
  for (int i = 16; i-- > 0; value >>= 4) digits[i] = "0123456789abcdef"[value & 15];
  out.append(digits, sizeof digits);
}

std::string hex(uint64_t value) {
  std::string out;
  append_hex(out, value);
  return out;
}

JsonObject begin(const char* name, const char* role, const DLTensor& t) {
  JsonArray shape;
  for (int32_t d = 0; d < t.ndim; ++d) shape.raw(std::to_string(t.shape[d]));
  JsonObject out;
  out.text("name", name)
      .text("role", role)
      .text("dtype", name_of(dtype_of(t.dtype)))
      .raw("shape", shape.str());
  return out;
}

// What a column holds that has one value: a temperature, a filter.
void add_value(JsonObject& out, const DLTensor& t, const std::byte* base) {
  const auto as = [&]<class T>(T value) {
    std::memcpy(&value, base, sizeof value);
    return value;
  };
  const DType type = dtype_of(t.dtype);
  if (type == DType::f32 && std::isfinite(as(0.0F))) out.number("value", as(0.0F));
  if (type == DType::i32) out.number("value", as(int32_t{}));
  if (type == DType::i64) out.number("value", as(int64_t{}));
}

}  // namespace

void TraceRecord::add(const char* name, const char* role, const DLTensor& t, int32_t lead) {
  JsonObject out = begin(name, role, t);
  if (const std::byte* base = reader_.read(t)) {
    Walk walk(t, std::max(lead, 0));
    const int64_t rows = rows_of(t, lead);
    std::vector<uint64_t> all(static_cast<std::size_t>(rows));
    for (int64_t i = 0; i < rows; ++i) all[static_cast<std::size_t>(i)] = walk.row(base, i);
    out.text("digest", hex(digest(all.data(), all.size() * sizeof(uint64_t))));
    if (lead >= 0) out.raw("rows", '"' + chosen(all) + '"');  // no character of it needs another form
    const bool alike = std::all_of(all.begin(), all.end(), [&](uint64_t row) { return row == all[0]; });
    if (lead == t.ndim && rows > 0 && alike) add_value(out, t, base);
  }
  tensors_.raw(out.str());
}

void TraceRecord::add_weight(const char* name, const DLTensor& t) {
  const Footprint all(t);
  const TraceFile::Place place{all.device().device_type, all.device().device_id, all.low(),
                               all.high() - all.low(), t.dtype.bits};
  uint64_t found = 0;
  const bool once = file_.choice().weights_once;
  if (!once || !file_.find_weight(place, found)) {
    const std::byte* base = reader_.read(t);
    if (!base) return mention(name, "weight", t);
    found = Walk(t, 0).row(base, 0);
    found = digest(&found, sizeof found);
    if (once) file_.keep_weight(place, found);
  }
  tensors_.raw(begin(name, "weight", t).text("digest", hex(found)).str());
}

void TraceRecord::mention(const char* name, const char* role, const DLTensor& t) {
  tensors_.raw(begin(name, role, t).str());
}

void TraceRecord::write(JsonObject head) {
  head.text("tag", marks_.tag).number("keys", keys_).raw("tensors", tensors_.str());
  const std::string text = head.str();
  file_.record(std::string_view(text).substr(1, text.size() - 2));
}

// Digests of the rows that were chosen, one after another.
std::string TraceRecord::chosen(const std::vector<uint64_t>& all) const {
  std::string out;
  out.reserve(16 * all.size());
  const int64_t every = keys_ ? file_.choice().every : 1;
  for (std::size_t i = 0; i < all.size(); ++i)
    if (every <= 1 || marks_.rows[i].second % every == 0) append_hex(out, all[i]);
  return out;
}

}  // namespace rlk
