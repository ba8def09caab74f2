// How one process tells another what it found: a line for each event, its fields separated by tabs. One list
// of fields for each struct serves both ends.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace rlk::harness {

class LineWriter {
 public:
  template <class... T>
  LineWriter& operator()(const T&... values) {
    (put(values), ...);
    return *this;
  }
  const std::string& text() const { return text_; }

 private:
  void word(std::string_view raw);
  void put(std::string_view value) { word(value); }
  void put(const std::string& value) { word(value); }
  void put(const char* value) { word(value); }
  void put(double value);
  template <class T>
    requires(std::is_integral_v<T> || std::is_enum_v<T>)
  void put(T value) {
    word(std::to_string(static_cast<int64_t>(value)));
  }
  template <class A, class B>
  void put(const std::pair<A, B>& value) {
    put(value.first), put(value.second);
  }
  template <class T, std::size_t N>
  void put(const std::array<T, N>& values) {
    for (const T& v : values) put(v);
  }
  template <class T>
  void put(const std::vector<T>& values) {
    put(values.size());
    for (const T& v : values) put(v);
  }
  std::string text_;
};

// Reads what LineWriter wrote; what is missing or no number reads as nothing and leaves good() false.
class LineReader {
 public:
  explicit LineReader(std::string_view line) : rest_(line) {}
  template <class... T>
  LineReader& operator()(T&... values) {
    (get(values), ...);
    return *this;
  }
  bool good() const { return good_; }

 private:
  std::string word();
  int64_t integer();
  void get(std::string& value) { value = word(); }
  void get(double& value);
  template <class T>
    requires(std::is_integral_v<T> || std::is_enum_v<T>)
  void get(T& value) {
    value = static_cast<T>(integer());
  }
  template <class A, class B>
  void get(std::pair<A, B>& value) {
    get(value.first), get(value.second);
  }
  template <class T, std::size_t N>
  void get(std::array<T, N>& values) {
    for (T& v : values) get(v);
  }
  template <class T>
  void get(std::vector<T>& values) {
    const int64_t n = integer();
    values.clear();
    for (int64_t i = 0; i < n && good_; ++i) get(values.emplace_back());
  }
  std::string_view rest_;
  bool good_ = true, ended_ = false;
};

}  // namespace rlk::harness
