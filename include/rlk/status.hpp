// Status and Result: how rlk's C++ face reports failure without exceptions.
//
//   if (rlk::Status s = rlk::lm_head(args); !s) fmt::print("{}\n", s.message());
//   rlk::check(rlk::lm_head(args));   // or throw rlk::Error
#pragma once

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "rlk/rlk.h"

namespace rlk {

// One pointer wide, null when fine; the text is allocated only on failure.
class [[nodiscard]] Status {
 public:
  Status() noexcept = default;
  Status(rlk_code code, std::string message)
      : failure_(code == RLK_OK ? nullptr
                                : std::make_shared<const Failure>(Failure{code, std::move(message)})) {}

  explicit operator bool() const noexcept { return failure_ == nullptr; }
  rlk_code code() const noexcept { return failure_ ? failure_->code : RLK_OK; }
  // One line naming the argument and both values; empty when fine.
  std::string_view message() const noexcept { return failure_ ? std::string_view(failure_->message) : ""; }

 private:
  struct Failure {
    rlk_code code;
    std::string message;
  };
  std::shared_ptr<const Failure> failure_;
};

// A value or the Status that says why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Status failure) : status_(std::move(failure)) {}

  explicit operator bool() const noexcept { return value_.has_value(); }
  const Status& status() const noexcept { return status_; }
  T& operator*() & { return *value_; }
  const T& operator*() const& { return *value_; }
  T&& operator*() && { return *std::move(value_); }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }

 private:
  std::optional<T> value_;
  Status status_;
};

// What check() throws.
class Error : public std::runtime_error {
 public:
  explicit Error(const Status& status)
      : std::runtime_error(std::string(status.message())), code_(status.code()) {}
  rlk_code code() const noexcept { return code_; }

 private:
  rlk_code code_;
};

inline void check(const Status& status) {
  if (!status) throw Error(status);
}
template <class T>
T check(Result<T> result) {
  if (!result) throw Error(result.status());
  return *std::move(result);
}

}  // namespace rlk
