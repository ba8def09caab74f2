#include "src/harness/memory.hpp"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace rlk::harness {
namespace {

// What a signal handler may look at: plain atomics, no locks.
struct Watched {
  std::atomic<uintptr_t> base{0}, end{0};                  // the whole mapping; 0: none
  std::atomic<uintptr_t> body{0}, body_end{0};             // of the array
  std::atomic<uintptr_t> before{0}, behind{0}, inside{0};  // the first address touched there
};
constexpr int kWatched = 1024;
Watched table[kWatched];
struct sigaction previous_fault, previous_bus;

std::size_t page_size() {
  static const auto size = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return size;
}
std::size_t pages(std::size_t bytes) { return (bytes + page_size() - 1) / page_size() * page_size(); }

void note(std::atomic<uintptr_t>& first, uintptr_t address) {
  uintptr_t none = 0;
  first.compare_exchange_strong(none, address);
}

// Opens the page that was touched, so that the access succeeds when it is tried again.
void on_fault(int signal, siginfo_t* info, void* context) {
  const bool sent = info->si_code <= 0;  // by raise or kill: no access stands behind it
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  for (Watched& w : table) {
    if (sent || address < w.base.load() || address >= w.end.load()) continue;
    note(address < w.body.load() ? w.before : address < w.body_end.load() ? w.inside : w.behind, address);
    const std::size_t page = page_size();
    if (mprotect(reinterpret_cast<void*>(address / page * page), page, PROT_READ | PROT_WRITE) == 0) return;
  }
  // Not ours: whoever was asked before, and by default the end of the process.
  const struct sigaction& before = signal == SIGSEGV ? previous_fault : previous_bus;
  if (before.sa_flags & SA_SIGINFO && before.sa_sigaction) return before.sa_sigaction(signal, info, context);
  sigaction(signal, &before, nullptr);
  if (sent) raise(signal);  // an access would be tried again by itself
}

// Test frameworks set handlers of their own around every test, so ours is put in front again when it is gone.
void install() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  for (const auto& [signal, previous] : {std::pair{SIGSEGV, &previous_fault}, {SIGBUS, &previous_bus}}) {
    struct sigaction now{};
    if (sigaction(signal, nullptr, &now) == 0 && now.sa_sigaction == on_fault) continue;
    *previous = now;
    now = {};
    now.sa_sigaction = on_fault;
    now.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigaction(signal, &now, nullptr);
  }
}

// Mappings that are kept for the next array of their size: making one costs more than most calls. Whoever
// remembers addresses meets other contents there, as in a program that frees and allocates.
class Mappings {
 public:
  // Of at least so many bytes, which become its own.
  int take(std::size_t& bytes) {
    const std::lock_guard lock(mutex_);
    auto& list = free_[bytes];
    if (!list.empty()) {
      kept_ -= bytes;
      return pop(list);
    }
    // A larger one may do: the kernel would clear every page of a new one.
    if (bytes >= kHuge)
      if (const auto larger = std::find_if(free_.upper_bound(bytes), free_.end(),
                                           [](const auto& f) { return !f.second.empty(); });
          larger != free_.end()) {
        bytes = larger->first;
        kept_ -= bytes;
        return pop(larger->second);
      }
    if (next_ == kWatched && unused_.empty()) evict();
    const int slot = next_ < kWatched ? next_++ : unused_.empty() ? -1 : pop(unused_);
    if (slot < 0) return -1;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return unused_.push_back(slot), -1;
    const std::size_t page = page_size();
    auto* base = static_cast<std::byte*>(memory);
#if defined(MADV_HUGEPAGE)
    // Most of the time that a large array takes here would go into the faults of its small pages.
    if (bytes >= kHuge) madvise(base, bytes, MADV_HUGEPAGE);
#endif
    for (std::byte* edge : {base, base + bytes - page}) {
      std::fill(edge, edge + page, WatchedMemory::kFill);
      mprotect(edge, page, PROT_NONE);
    }
    table[slot].end = reinterpret_cast<uintptr_t>(base) + bytes;
    table[slot].base = reinterpret_cast<uintptr_t>(base);
    return slot;
  }
  void give_back(int slot, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    free_[bytes].push_back(slot);
    kept_ += bytes;
    // The largest of another size first: what is used now is likely to be used again.
    for (auto at = free_.rbegin(); kept_ > kMost && at != free_.rend(); ++at)
      while (kept_ > kMost && !at->second.empty() && (at->first != bytes || at->second.size() > 4)) {
        kept_ -= at->first;
        unmap(pop(at->second), at->first);
      }
  }

 private:
  static int pop(std::vector<int>& list) {
    const int slot = list.back();
    list.pop_back();
    return slot;
  }
  void unmap(int slot, std::size_t bytes) {
    const uintptr_t base = table[slot].base;
    table[slot].base = table[slot].end = 0;
    munmap(reinterpret_cast<void*>(base), bytes);
    unused_.push_back(slot);
  }
  void evict() {
    for (auto& [bytes, list] : free_)
      if (!list.empty()) {
        kept_ -= bytes;
        return unmap(pop(list), bytes);
      }
  }
  static constexpr std::size_t kMost = std::size_t{512} << 20;  // bytes kept
  static constexpr std::size_t kHuge = std::size_t{4} << 20;
  std::mutex mutex_;
  std::map<std::size_t, std::vector<int>> free_;
  std::vector<int> unused_;
  int next_ = 0;
  std::size_t kept_ = 0;
};
Mappings& mappings() {
  static auto* all = new Mappings;  // threads may outlive statics
  return *all;
}

}  // namespace

WatchedMemory::WatchedMemory(std::size_t bytes, std::size_t offset, std::size_t alignment, Edge edge)
    : bytes_(bytes) {
  const std::size_t page = page_size();
  const std::size_t around = edge == apart ? kGuard + 256 + offset + kGuard : alignment;
  // In powers of two, so that few sizes serve all arrays: the kernel clears the pages of every new one.
  mapped_ = std::bit_ceil(pages(std::max<std::size_t>(1, bytes + around))) + 2 * page;
  slot_ = mappings().take(mapped_);
  if (slot_ < 0) return;
  const std::size_t open = mapped_ - 2 * page;
  install();
  base_ = reinterpret_cast<std::byte*>(table[slot_].base.load());
  low_ = base_ + page;
  high_ = low_ + open;
  if (edge == end)
    body_ = high_ - (bytes + alignment - 1) / alignment * alignment;
  else
    body_ = edge == start ? low_ : low_ + (kGuard + 255) / 256 * 256 + offset;
  // What a stray read finds is not a number; far from a large array it is whatever was there.
  constexpr std::ptrdiff_t kFar = 1 << 20;
  std::fill(body_ - std::min(body_ - low_, kFar), body_, kFill);
  std::fill(body_ + bytes_, body_ + bytes_ + std::min(high_ - (body_ + bytes_), kFar), kFill);
  Watched& w = table[slot_];
  w.before = w.behind = w.inside = 0;
  w.body = reinterpret_cast<uintptr_t>(body_), w.body_end = w.body + bytes_;
}

WatchedMemory::~WatchedMemory() {
  if (slot_ < 0) return;
  rest();
  Watched& w = table[slot_];
  const std::size_t page = page_size();
  if (w.before || w.behind)  // opened by a touch
    for (std::byte* edge : {base_, high_}) {
      mprotect(edge, page, PROT_READ | PROT_WRITE);
      std::fill(edge, edge + page, kFill);
      mprotect(edge, page, PROT_NONE);
    }
  mappings().give_back(slot_, mapped_);
}

void WatchedMemory::watch(bool read_only) {
  read_only_ = read_only;
  if (read_only) mprotect(low_, static_cast<std::size_t>(high_ - low_), PROT_READ);
}

void WatchedMemory::rest() {
  if (read_only_) mprotect(low_, static_cast<std::size_t>(high_ - low_), PROT_READ | PROT_WRITE);
  read_only_ = false;
}

std::string WatchedMemory::touched() const {
  const Watched& w = table[slot_];
  const auto text = [](uintptr_t distance, const char* where) {
    return std::string(" was touched ") + std::to_string(distance) + " bytes " + where;
  };
  if (const uintptr_t at = w.behind) return text(at - w.body_end, "behind its end");
  if (const uintptr_t at = w.before) return text(w.body - at, "before its start");
  if (w.inside) return " is a read argument and was written";
  return {};
}

}  // namespace rlk::harness
