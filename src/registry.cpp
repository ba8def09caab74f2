// Building and publishing snapshots.
#include "src/registry.hpp"

#include <fmt/format.h>
#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <tuple>

#include "registry/op.hpp"
#include "src/build_id.hpp"
#include "src/cancel.hpp"
#include "src/environment.hpp"
#include "src/fnv.hpp"
#include "src/gate.hpp"
#include "src/log.hpp"
#include "src/machine.hpp"
#include "src/plugin.hpp"
#include "src/plugin_table.hpp"
#include "src/trace_begin.hpp"

namespace rlk {

// The one table that lists built-in backends.
extern const rlk_backend native_backend;

namespace {

// Backends this project knows; one that is neither built in nor found as a plugin is shown as absent.
constexpr const char* kKnownBackends[] = {"native", "onednn", "cuda", "hip"};

std::mutex publish_mutex;
std::atomic<const Snapshot*> published{nullptr};
// The last that was built, and through it all.
std::atomic<const Snapshot*> newest{nullptr};

bool equal(const Status& a, const Status& b) { return a.code() == b.code() && a.message() == b.message(); }

// A loaded one is itself for ever; the others are made anew by every reload.
bool equal(const std::shared_ptr<Backend>& a, const std::shared_ptr<Backend>& b) {
  if (a == b) return true;
  const auto of = [](const Backend& x) {
    return std::tie(x.name, x.origin, x.fixed_state, x.fixed_reason, x.built);
  };
  return !a->table && !b->table && of(*a) == of(*b);
}

// The ops and implementations are those of the backends.
bool equal(const Snapshot& a, const Snapshot& b) {
  return a.environment.text() == b.environment.text() &&
         equal(a.environment.error(), b.environment.error()) && equal(a.cpu, b.cpu) &&
         a.plugin_notes == b.plugin_notes &&
         std::equal(a.backends.begin(), a.backends.end(), b.backends.begin(), b.backends.end(),
                    [](const auto& x, const auto& y) { return equal(x, y); });
}

// What was said before is said again by the same snapshot: a program that reloads in a loop keeps one for each of its
// environments, not for each reload. Nothing here is half done when another thread forks.
void publish(std::unique_ptr<Snapshot> next) {
  const Snapshot* last = newest.load(std::memory_order_relaxed);
  const Snapshot* now = last;
  while (now && !equal(*now, *next)) now = now->before;
  if (!now) {
    next->before = last;
    now = next.release();
    newest.store(now, std::memory_order_relaxed);
  }
  published.store(now, std::memory_order_release);
  move_gate();
}

// One thread at a time builds a snapshot. A plugin that asks the library while it is being loaded would wait
// for itself: it gets an error instead.
class Publishing {
 public:
  Publishing() {
    if (builder.load(std::memory_order_relaxed) == std::this_thread::get_id())
      throw Error(Status(RLK_PLUGIN, "a plugin called the library while the library was loading it"));
    publish_mutex.lock();
    builder.store(std::this_thread::get_id(), std::memory_order_relaxed);
  }
  ~Publishing() {
    builder.store({}, std::memory_order_relaxed);
    publish_mutex.unlock();
  }
  Publishing(const Publishing&) = delete;
  Publishing& operator=(const Publishing&) = delete;

 private:
  // A builder that was another thread is not there in the child of a fork. What it built was its own until it
  // published it, so a free lock is all that is needed. No ForkMutex: plugins, which may fork, run under it.
  static void in_child() noexcept {
    if (builder.load(std::memory_order_relaxed) == std::this_thread::get_id()) return;
    builder.store({}, std::memory_order_relaxed);
    new (&publish_mutex) std::mutex;
  }
  static inline std::atomic<std::thread::id> builder{};
  // When the library is loaded: a handler that is registered while another thread forks would miss that fork.
  static inline const int at_fork = pthread_atfork(nullptr, nullptr, in_child);
};

std::string origin_of(const Snapshot& s, std::string_view op) {
  for (const registry::Op& known : registry::ops())
    if (op == known.schema->name) return "built in";
  for (const auto& b : s.backends)
    if (b->table)
      for (uint32_t i = 0; i < b->table->num_ops; ++i)
        if (op == b->table->ops[i]->name) return b->origin;
  return "unknown";
}

Status clash(std::string text) { return {RLK_PLUGIN, std::move(text)}; }

Status add_op(Snapshot& s, const rlk_op_schema* schema, const std::string& origin) {
  const auto index = static_cast<int32_t>(s.ops.size());
  std::vector<std::string_view> names{schema->name};
  for (const std::string_view alias : split(schema->aliases ? schema->aliases : "", ','))
    names.push_back(alias.substr(0, alias.find(':')));
  for (std::string_view name : names)
    if (auto it = s.op_index.find(name); it != s.op_index.end()) {
      const char* taken = s.ops[static_cast<std::size_t>(it->second)].schema->name;
      return clash(
          fmt::format("op '{}' from {} is already registered by {}", name, origin, origin_of(s, taken)));
    }
  s.ops.push_back({schema, {}});
  for (std::string_view name : names) s.op_index.emplace(name, index);
  return {};
}

Status add_implementation(Snapshot& s, const rlk_implementation* impl, Backend* backend) {
  const auto it = s.op_index.find(impl->op);
  if (it == s.op_index.end())
    return clash(fmt::format("implementation '{}' from {}: no op is called '{}'", impl->id, backend->origin,
                             impl->op));
  auto& [schema, list] = s.ops[static_cast<std::size_t>(it->second)];
  for (const ImplementationEntry& e : list)
    if (std::strcmp(e.implementation->id, impl->id) == 0)
      return clash(fmt::format("implementation '{}' of {} from {} is already registered by {}", impl->id,
                               impl->op, backend->origin, e.backend->origin));
  const auto before = [](const rlk_implementation* a, const rlk_implementation* b) {
    return a->priority != b->priority ? a->priority > b->priority : std::strcmp(a->id, b->id) < 0;
  };
  auto at = std::find_if(list.begin(), list.end(),
                         [&](const ImplementationEntry& e) { return before(impl, e.implementation); });
  const uint64_t named = hashed(hashed(kFnvStart, schema->name), impl->id);
  list.insert(at, {impl, backend, hashed(named, backend->build_id)});
  return {};
}

// All or nothing: the snapshot is a draft until published.
Status add_backend(Snapshot& s, const rlk_backend* table, std::string origin) {
  if (Status wrong = check_backend_table(table, ""); !wrong)
    return clash(fmt::format("backend from {}: {}", quoted_path(origin), wrong.message()));
  auto same = std::find_if(s.backends.begin(), s.backends.end(),
                           [&](const auto& b) { return b->name == table->name; });
  if (same != s.backends.end() && (*same)->table)
    return clash(fmt::format("backend '{}' from {} is already registered by {}", table->name, origin,
                             (*same)->origin));
  auto backend = std::make_shared<Backend>();
  backend->name = table->name;
  backend->origin = std::move(origin);
  backend->table = table;
  backend->build_id = build_id_of(table);
  for (uint32_t i = 0; i < table->num_ops; ++i)
    if (Status status = add_op(s, table->ops[i], backend->origin); !status) return status;
  for (uint32_t i = 0; i < table->num_implementations; ++i)
    if (Status status = add_implementation(s, table->implementations[i], backend.get()); !status)
      return status;
  if (same != s.backends.end()) s.backends.erase(same);
  s.backends.push_back(std::move(backend));
  return {};
}

void add_absent(Snapshot& s, std::string name, Backend::State state, std::string reason, std::string origin,
                bool built) {
  for (const auto& b : s.backends)
    if (b->name == name) return;
  auto backend = std::make_shared<Backend>();
  backend->name = std::move(name);
  backend->origin = std::move(origin);
  backend->fixed_state = state;
  backend->fixed_reason = std::move(reason);
  backend->built = built;
  s.backends.push_back(std::move(backend));
}

void load_environment(Snapshot& s) {
  s.environment = Override::parse(environment().backend, "RLK_BACKEND", s.names());
  s.cpu = check_cpu_cap(environment().cpu);
}

void load_plugins(Snapshot& s) {
  s.plugin_notes.clear();
  const std::vector<PluginFile> files = find_plugins(&s.plugin_notes);
  for (const std::string& note : s.plugin_notes) log(LogLevel::warn, note);
  // A reload keeps what is loaded, which is for ever, and judges the rest again.
  std::erase_if(s.backends, [](const auto& b) { return !b->table; });
  for (const PluginFile& file : files) {
    if (std::any_of(s.backends.begin(), s.backends.end(),
                    [&](const auto& b) { return b->origin == file.path; }))
      continue;
    const PluginLoad load = load_plugin(file);
    if (load.table) {
      Snapshot draft = s;
      if (Status status = add_backend(draft, load.table, file.path); status) {
        s = std::move(draft);
      } else {
        log(LogLevel::warn, status.message());
        add_absent(s, file.name, Backend::refused, std::string(status.message()), file.path, true);
      }
      continue;
    }
    // A missing driver or vendor library is an ordinary machine; a file that broke a rule is somebody's
    // mistake.
    log(load.refused ? LogLevel::warn : LogLevel::info, load.reason);
    add_absent(s, file.name, load.refused ? Backend::refused : Backend::load_failed, load.reason, file.path,
               true);
  }
  for (const char* name : kKnownBackends) add_absent(s, name, Backend::absent, "", "", false);
}

std::unique_ptr<Snapshot> first_snapshot() {
  auto s = std::make_unique<Snapshot>();
  for (const registry::Op& op : registry::ops())
    if (Status status = add_op(*s, op.schema, "built in"); !status) log(LogLevel::error, status.message());
  if (Status status = add_backend(*s, &native_backend, "built in"); !status)
    log(LogLevel::error, status.message());
  load_plugins(*s);
  load_environment(*s);
  return s;
}

}  // namespace

KnownNames Snapshot::names() const {
  KnownNames n;
  for (const auto& [name, index] : op_index) {
    n.ops.push_back(name);
    const char* op = ops[static_cast<std::size_t>(index)].schema->name;
    if (name != op) n.aliases.emplace_back(name, op);
  }
  std::sort(n.ops.begin(), n.ops.end());
  for (const auto& b : backends) n.backends.push_back(b->name);
  std::sort(n.backends.begin(), n.backends.end());
  for (const OpEntry& op : ops)
    for (const ImplementationEntry& e : op.implementations) n.implementations.push_back(e.implementation->id);
  std::sort(n.implementations.begin(), n.implementations.end());
  n.implementations.erase(std::unique(n.implementations.begin(), n.implementations.end()),
                          n.implementations.end());
  return n;
}

const Snapshot& snapshot() {
  if (const Snapshot* s = published.load(std::memory_order_acquire)) return *s;
  const NoCancel whole;
  environment();  // it logs, so it is read before the lock is held
  const HeldLog held;
  bool first = false;
  {
    const Publishing publishing;
    first = !published.load(std::memory_order_relaxed);
    if (first) publish(first_snapshot());
  }
  if (first && !environment().trace.empty()) trace_environment();
  return *published.load(std::memory_order_acquire);
}

Status register_backend(const rlk_backend* table, std::string origin) {
  snapshot();
  const HeldLog held;
  const Publishing publishing;
  auto next = std::make_unique<Snapshot>(*published.load(std::memory_order_relaxed));
  if (Status status = add_backend(*next, table, std::move(origin)); !status) return status;
  load_environment(*next);
  publish(std::move(next));
  return {};
}

Status reload_environment() {
  const NoCancel whole;
  snapshot();
  reload_environment_variables();
  const HeldLog held;
  const Publishing publishing;
  auto next = std::make_unique<Snapshot>(*published.load(std::memory_order_relaxed));
  load_plugins(*next);
  load_environment(*next);
  Status error = next->misconfigured();
  publish(std::move(next));
  return error;
}

}  // namespace rlk
