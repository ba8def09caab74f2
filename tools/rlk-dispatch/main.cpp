// rlk-dispatch: what there is, what would run and why, what was proved. Results on stdout, everything else on
// stderr.
#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>

#include "commands.hpp"
#include "library.hpp"
#include "rlk/harness.hpp"
#include "words.hpp"

namespace rlk::cli {
namespace {

// One line per command: the option that asks for it, and its function.
struct Command {
  CLI::Option* option;
  int (*run)(const Options&);
};

std::vector<Command> add_commands(CLI::App& app, Options& o) {
  // Not add_flag's own description: a std::string there would be taken for the flag's variable.
  const auto flag = [&](const char* name, const char* text) { return app.add_flag(name)->description(text); };
  return {
      {app.add_option("--list", o.what, "List ops, impls (default), backends, plugins or env")
           ->expected(0, 1),
       list},
      {app.add_option("--explain", o.op,
                      "How a call of OP would be resolved: every candidate, why not, what would change it"),
       explain},
      {app.add_option("--verify", o.op, "Prove what the implementations of OP (default: all) promise")
           ->expected(0, 1),
       verify},
      {app.add_option(
              "--verify-model", o.model,
              "Compare every path of a model, trainer's and sampler's, bit for bit (in Python); or, of a "
              "certificate (.json), write the page")
           ->expected(1),
       verify_model},
      {app.add_option("--compare", o.files, "The first difference between two certificates")->expected(2),
       compare},
      {app.add_option("--trace-diff", o.files, "The first call at which two traces part, and why")
           ->expected(2),
       trace_diff},
      {flag("--env", "The six variables and their values"), env},
      {app.add_option("--probe", o.plugin, "Check a plugin file without loading it"), probe},
      {flag("--version", "Versions of this program and of the library"), version},
      {app.add_option("--bench", o.op, "Time every implementation that takes a call of OP, on the CPU"),
       bench},
  };
}

void add_options(CLI::App& app, Options& o) {
  app.add_option("--device", o.device, "cpu, cuda, hip, with a number: cuda:1")->capture_default_str();
  app.add_option("--dtype", o.dtype, "fp32, bf16, fp16, ... for every argument that can have it");
  app.add_option("--shape", o.shapes,
                 "Shapes of arguments: hidden=512x4096,weight=151936x4096, with a dtype: positions=16:int64")
      ->delimiter(',');
  app.add_option("--attr", o.attributes, "Attributes: pairing=half")->delimiter(',');
  app.add_option("--policy", o.policy,
                 "standard, strict or golden; deterministic; backward; arithmetic=ID; backend=CHAIN")
      ->delimiter(',');
  app.add_option("--against", o.against,
                 "--verify OP (default: lm_head): replay the call in a safetensors dump of another machine");
  app.add_option("--impl", o.implementation, "--verify: one implementation or backend");
  app.add_option("--seed", o.seed, "--verify: seed of all data")
      ->check([](const std::string& seed) {
        return seed.find('-') == seed.npos ? std::string() : "it is " + seed + ", it must be 0 or more";
      })
      ->capture_default_str();
  app.add_option("--budget", o.budget, "--verify: short, normal, full, or seconds")->capture_default_str();
  app.add_option("--case", o.case_name, "--verify: one case, as a failure names it");
  app.add_option("--transform", o.transform, "--verify: one transform, as a failure names it");
  app.add_option("--certificate", o.certificate,
                 "--verify, --verify-model, --trace-diff: write what was proved or found, as JSON");
  app.add_option("--mutants", o.mutants,
                 "--verify: a plugin of deliberate errors (tests/harness/mutants in a build tree); what is "
                 "caught goes into the certificate");
  app.add_option("--report", o.report, "--verify, --verify-model: write a page with the table and plots");
  app.add_option("--peer", o.peer, "--verify-model: torch, the same model on PyTorch's own ops beside it");
  app.add_option("--ranks", o.ranks, "--verify-model: also over so many ranks: 2,4,8")->delimiter(',');
  app.add_flag("--replay", o.replay,
               "--verify-model: also compute every call again on the CPU, by the same arithmetic");
  app.add_flag("--json", o.json, "Results as JSON with a schema number");
  app.add_flag("--strict", o.strict, "Exit with 4 when any plugin was refused or failed to load");
}

// Under --strict a plugin that could not be used spoils an otherwise good run.
int strict_exit(int exit) {
  const Json all = listed("plugins");
  for (const Json& p : all["plugins"])
    if (p["state"] == "refused" || p["state"] == "load_failed") {
      std::fprintf(stderr, "error: plugin %s: %s\n", p["state"].get<std::string>().c_str(),
                   p["reason"].get<std::string>().c_str());
      if (exit == kGood) exit = kPluginFailed;
    }
  return exit;
}

// The first word that no option takes, and what it may have been meant to be.
std::string unexpected(const CLI::App& app) {
  const std::vector<std::string> words = app.remaining();
  const auto option = std::find_if(words.begin(), words.end(), [](const auto& w) { return w[0] == '-'; });
  const std::string word = option != words.end() ? *option : words.at(0);
  std::vector<std::string> known;
  for (const CLI::Option* o : app.get_options()) known.push_back(o->get_name());
  const std::string near = meant(word, known);
  return "'" + word + "' is not expected here" + (near.empty() ? "; --help shows what is" : near);
}

int run(int argc, char** argv) {
  Options options;
  CLI::App app("rlk: numerically pinned kernels, one registry, one dispatcher", "rlk-dispatch");
  app.footer(
      "Exit codes: 0 good, 1 verification failed, 2 usage or configuration, 3 no implementation, 4 plugin "
      "failed; --trace-diff: 1 promise broken, 10 arithmetic, 11 semantics, 12 weights, 13 upstream, 14 "
      "nothing in "
      "common");
  const std::vector<Command> commands = add_commands(app, options);
  add_options(app, options);
  try {
    std::vector<std::string> words(argv + 1, argv + argc);
    if (!words.empty() && words[0] == "trace-diff") words[0] = "--trace-diff";  // as one says it
    std::reverse(words.begin(), words.end());                                   // as CLI11 takes them
    app.parse(std::move(words));
  } catch (const CLI::ExtrasError&) {
    throw Failure(kUsage, unexpected(app));
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e), kGood;
    std::fprintf(stderr, "%s\nRun with --help for more information.\n", printable(e.what()).c_str());
    return kUsage;
  }
  if (!options.against.empty()) return against(options);
  std::vector<const Command*> asked;
  for (const Command& command : commands)
    if (command.option->count()) asked.push_back(&command);
  if (asked.size() > 1)
    throw Failure(kUsage, asked[0]->option->get_name() + " and " + asked[1]->option->get_name() +
                              " are two commands; give one at a time");
  if (asked.size() == 1) {
    const int exit = asked[0]->run(options);
    return options.strict ? strict_exit(exit) : exit;
  }
  std::fputs(app.help().c_str(), stderr);
  return kUsage;
}

}  // namespace
}  // namespace rlk::cli

int main(int argc, char** argv) {
  // As the child of a verification; see harness.hpp.
  if (const int exit = rlk::harness::child_main(argc, argv); exit >= 0) return exit;
  try {
    // A file that is opened later must not become stdout.
    if (fcntl(STDOUT_FILENO, F_GETFD) < 0)
      throw rlk::cli::Failure(rlk::cli::kUsage, "stdout is closed: there is nowhere to write the results");
    return rlk::cli::finish(rlk::cli::run(argc, argv));
  } catch (const rlk::cli::Failure& failure) {
    std::fprintf(stderr, "error: %s\n", failure.what());
    return rlk::cli::finish(failure.exit());
  } catch (const std::exception& e) {
    std::fprintf(stderr, "error: %s\n", rlk::printable(e.what()).c_str());
    return rlk::cli::kUsage;
  }
}
