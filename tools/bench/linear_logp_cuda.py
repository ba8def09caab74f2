"""linear_logp on a GPU beside torch: log-probabilities of rows of hidden states, and their gradients, in one run.

    PYTHONPATH=build/release/python python3 tools/bench/linear_logp_cuda.py [--rows 512 4096 8192] [--width 1024] [--vocab 151936]

bf16. The peers take the mean of F.cross_entropy of F.linear, as it is and compiled, and Liger's fused linear cross entropy where it can
be imported. Medians of --rounds runs that take turns, and the most memory that a forward and backward take beside inputs and results."""

import argparse
import statistics

import torch
import torch.nn.functional as F

import rlk
import rlk.torch


def peers():
    def eager(hidden, weight, target):
        return F.cross_entropy(F.linear(hidden, weight), target, reduction="none")

    yield "torch", eager
    yield "torch.compile", torch.compile(eager)
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
        yield "Liger", lambda hidden, weight, target: LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, target)[0]
    except ImportError:
        print("Liger cannot be imported")


def ours(backend):
    def run(hidden, weight, target):
        return rlk.torch.linear_logp(hidden, weight, target=target, logp=True, backend=backend)

    return run


def milliseconds(run):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def measured(contenders, hidden, weight, target, rounds):
    """Of each contender: forward, forward and backward in ms, and MiB."""
    def forward(call):
        with torch.no_grad():
            return call(hidden, weight, target)

    def both(call):
        hidden.grad = weight.grad = None
        found = call(hidden, weight, target)
        found.backward(torch.ones_like(found))

    times, memory = {}, {}
    for name, call in list(contenders.items()):
        try:
            for _ in range(2):
                forward(call), both(call)
            torch.cuda.synchronize()
            hidden.grad = weight.grad = None
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            both(call)
            torch.cuda.synchronize()
            results = hidden.grad.nbytes + weight.grad.nbytes
            memory[name] = (torch.cuda.max_memory_allocated() - before - results) / 2**20
            times[name] = ([], [])
        except (torch.OutOfMemoryError, rlk.Error) as error:
            print(name, "leaves out:", str(error).splitlines()[0][:100])
        torch.cuda.empty_cache()
    for _ in range(rounds):
        for name in times:
            times[name][0].append(milliseconds(lambda: forward(contenders[name])))
            times[name][1].append(milliseconds(lambda: both(contenders[name])))
    return {n: (*map(statistics.median, times[n]), memory[n]) for n in times}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 2048, 4096, 8192])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backends", nargs="+", default=["cuda.sm90", "cuda.simt"])
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    contenders = {b: ours(b) for b in options.backends} | dict(peers())
    weight = (torch.randn(options.vocab, options.width, device="cuda") / options.width**0.5).bfloat16().requires_grad_()
    for rows in options.rows:
        hidden = torch.randn(rows, options.width, device="cuda").bfloat16().requires_grad_()
        target = torch.randint(options.vocab, (rows,), device="cuda")
        here = {n: c for n, c in contenders.items() if n != "cuda.simt" or rows <= 512}  # 60 times as long
        for name, (forward, both, memory) in measured(here, hidden, weight, target, options.rounds).items():
            print(f"| {rows}, {options.width} | {name} | {forward:.2f} | {both:.2f} | {memory:.0f} |", flush=True)


if __name__ == "__main__":
    main()
