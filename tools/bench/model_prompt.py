#!/usr/bin/env python3
"""A training step of rlk.model on samples of one prompt, whose rows are there once, or once for every sample.

  PYTHONPATH=build/release/python tools/bench/model_prompt.py [--model NAME] [--layers N] [--prompt N] [--own N] [--samples N]
                                                             [--dtype bf16|fp32] [--device cuda|cpu] [--rounds N]

By rlk.trainer.Step, a captured graph on a GPU; medians of --rounds after two, and on a GPU the most memory of each. First compares the samples'
log-probabilities of both, bit for bit."""
import argparse
import statistics
import time

import torch

import rlk.model
import rlk.trainer


def batches(words, vocab):
    """tokens, cu_seqlens and prefix_of of the prompt and its samples; tokens and cu_seqlens of the samples with a copy each."""
    draw = torch.Generator().manual_seed(1)
    prompt, *samples = (torch.randint(vocab, (n,), generator=draw) for n in [words.prompt] + [words.own] * words.samples)

    def packed(rows):
        return torch.cat(rows).to(words.device), torch.tensor([0, *map(len, rows)]).cumsum(0).to(torch.int32).to(words.device)

    prefix_of = torch.tensor([-1] + [0] * words.samples, dtype=torch.int32, device=words.device)
    return (*packed([prompt, *samples]), prefix_of), packed([torch.cat([prompt, s]) for s in samples])


def measure(step, batch, words):
    gpu = words.device == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(words.rounds + 2):
        started = time.perf_counter()
        step(*batch)
        if gpu:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[2:]), torch.cuda.max_memory_allocated() / 2**30 if gpu else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    for name, default in (("layers", 4), ("prompt", 2048), ("own", 512), ("samples", 8), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    words = parser.parse_args()
    model = rlk.model.Decoder(rlk.model.config(words.model, layers=words.layers), seed=1, device=words.device,
                              dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[words.dtype])
    (tokens, cu, prefix_of), (copied, cu_copied) = shared, copies = batches(words, model.config.vocab)
    with torch.no_grad():
        once, whole = model.score(tokens, cu, prefix_of=prefix_of), model.score(copied, cu_copied).view(words.samples, -1)
    if not torch.equal(once[words.prompt:].view(words.samples, -1), whole[:, words.prompt:]):
        raise SystemExit("the samples' log-probabilities differ")
    steps = {"shared": (lambda t, c, of: -model.score(t, c, prefix_of=of).mean(), shared), "copies": (lambda t, c: -model.score(t, c).mean(), copies)}
    for name, (loss, batch) in steps.items():
        took, memory = measure(rlk.trainer.Step(model, loss), batch, words)
        print(f"{name}: {took:.1f} ms" + (f", {memory:.2f} GiB" if memory else ""), flush=True)


if __name__ == "__main__":
    main()
