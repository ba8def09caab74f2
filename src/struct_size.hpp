// The one rule for structs that grow (rlk.h states it for callers): a smaller one is read with 0 for what it
// lacks, a larger one if all that is behind the known members is 0, anything else is an error.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "rlk/plugin.h"
#include "rlk/status.hpp"

namespace rlk {

// The first sizes that were ever valid, by their last member.
inline constexpr uint32_t kSmallestOptions = offsetof(rlk_options, stream);
inline constexpr uint32_t kSmallestBackend = RLK_BACKEND_MIN_SIZE;
inline constexpr uint32_t kSmallestImplementation = offsetof(rlk_implementation, run) + sizeof(void*);
inline constexpr uint32_t kSmallestSchema = offsetof(rlk_op_schema, may_alias) + sizeof(void*);
inline constexpr uint32_t kSmallestServices = offsetof(rlk_device_services, describe) + sizeof(void*);

// Whether `given` may be read: all of its bytes up to struct_size are looked at.
template <class T>
Status check_struct(std::string_view what, const T& given, uint32_t smallest) {
  constexpr uint32_t kLargest = 4096;  // beyond this it is no size but a mistake
  const uint32_t size = given.struct_size;
  if (size < smallest || size > kLargest || size % alignof(T) != 0)
    return {RLK_INVALID_ARGUMENT,
            fmt::format("{}: struct_size is {}, this library's struct has {} bytes", what, size, sizeof(T))};
  const auto* bytes = reinterpret_cast<const unsigned char*>(&given);
  if (size > sizeof(T) &&
      std::any_of(bytes + sizeof(T), bytes + size, [](unsigned char b) { return b != 0; }))
    return {
        RLK_INVALID_ARGUMENT,
        fmt::format("{}: struct_size is {}, this library's struct has {} bytes, and something behind them is "
                    "set: it asks for what only a newer library has",
                    what, size, sizeof(T))};
  return {};
}

// The struct with every member of this library.
template <class T>
Status read_struct(std::string_view what, const T& given, uint32_t smallest, T& whole) {
  if (Status s = check_struct(what, given, smallest); !s) return s;
  whole = T{};
  std::memcpy(static_cast<void*>(&whole), &given, std::min<std::size_t>(given.struct_size, sizeof whole));
  return {};
}

// Whether a struct that lives on holds this member.
template <class T, class Member>
bool has_member(const T& given, Member T::* member) noexcept {
  const auto* end = reinterpret_cast<const char*>(&(given.*member) + 1);
  return static_cast<std::size_t>(end - reinterpret_cast<const char*>(&given)) <= given.struct_size;
}

}  // namespace rlk
