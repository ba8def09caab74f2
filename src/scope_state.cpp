#include "src/scope_state.hpp"

namespace rlk {

constinit thread_local ScopeState scope_state [[gnu::tls_model("initial-exec")]];

}  // namespace rlk
