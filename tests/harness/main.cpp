// A main that is also the harness's child: the mutants are registered in both.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include "mutants.hpp"
#include "rlk/harness.hpp"

int main(int argc, char** argv) {
  // "mutant" is no backend the project knows; programs that look at real ones only name them.
  if (rlk_register_backend(&rlk::mutants::backend, "tests/mutants") != RLK_OK) return 3;
  if (const int code = rlk::harness::child_main(argc, argv); code >= 0) return code;
  return doctest::Context(argc, argv).run();
}
