#!/usr/bin/env python3
"""rlk.torch on a GPU beside what it replaces, end to end: lm_head and torch.nn.functional.linear, rope and Liger's.

    PYTHONPATH=build/release/python python tools/bench/python_cuda.py [--json FILE] [--rounds N]

Two figures of each call: `host`, the microseconds until it returns, queued behind work that keeps the GPU busy; and `all`, the
microseconds per call of many in a row until the GPU is done. Candidates take turns; figures are medians over rounds.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import rlk
import rlk.torch
import torch


def leaves(*shapes, grad):
    return [torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=grad) for s in shapes]


def stepping(function, inputs, grad):
    """A call, and where a gradient is wanted its backward with a cotangent that is made once."""
    if not grad:
        return lambda: function(*inputs)
    out = function(*inputs)
    out = out if isinstance(out, tuple) else (out,)
    cotangents = [torch.randn_like(o) for o in out]
    del out

    def step():
        made = function(*inputs)
        torch.autograd.grad(made, inputs, cotangents)

    return step


def lm_head_pairs():
    for m, k, v in ((1, 64, 64), (1, 4096, 4096), (8, 4096, 151936), (512, 4096, 151936)):
        for grad in (False, True):
            yield f"lm_head {m}x{k} by {v}" + (", both ways" if grad else ""), {
                "rlk": stepping(rlk.torch.lm_head, leaves((m, k), (v, k), grad=grad), grad),
                "F.linear": stepping(torch.nn.functional.linear, leaves((m, k), (v, k), grad=grad), grad)}


def rope_pairs():
    try:
        from liger_kernel.ops.rope import LigerRopeFunction
    except ImportError:
        return
    for batch, length in ((1, 1), (1, 4096), (8, 2048)):
        cos, sin = (t.cuda() for t in rlk.torch.rope_tables(rotary_dim=128, rows=length))
        wide = [torch.cat((t, t), -1).unsqueeze(0).to(torch.bfloat16) for t in (cos, sin)]
        shapes = (batch, 32, length, 128), (batch, 8, length, 128)
        for grad in (False, True):
            pair = {}
            # As transformers has them: [batch, heads, tokens, dim] views of memory in the order of tokens.
            for name, function in (("rlk", lambda q, k: rlk.torch.rope(q, cos, sin, k=k)),
                                   ("Liger", lambda q, k: LigerRopeFunction.apply(q, k, *wide))):
                q, k = (t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(grad)
                        for t in leaves(*shapes, grad=False))
                pair[name] = stepping(function, (q, k), grad)
            yield f"rope {batch}x{length} q 32 k 8 heads of 128" + (", both ways" if grad else ""), pair


def all_done(step, n):
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(n):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / n * 1e6


def host_alone(step, n):
    """With the GPU asleep for longer than the calls take to be queued, so that none waits for it."""
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)
    begin = time.perf_counter()
    for _ in range(n):
        step()
    taken = (time.perf_counter() - begin) / n * 1e6
    torch.cuda.synchronize()
    return taken


def measure(pair, rounds):
    figures = {name: {"host": [], "all": []} for name in pair}
    for step in pair.values():
        for _ in range(3):
            step()
    once = max(all_done(step, 3) for step in pair.values())
    n = max(3, min(100, int(20_000 / once)))
    for _ in range(rounds):
        for name, step in pair.items():
            figures[name]["all"].append(all_done(step, n))
            figures[name]["host"].append(host_alone(step, min(n, 30)))
    return {name: {kind: statistics.median(f) for kind, f in both.items()} for name, both in figures.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="writes the figures to this file")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", default="", help="calls whose name holds this")
    options = parser.parse_args()
    document = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rlk": rlk.__version__, "us": {}}
    print(f"{'':<48} {'host us':>18} {'all us':>20}  rlk / other")
    for pairs in (rope_pairs(), lm_head_pairs()):
        for name, pair in pairs:
            if options.only not in name:
                continue
            f = document["us"][name] = measure(pair, options.rounds)
            mine, other = f.values()
            print(f"{name:<48} {mine['host']:8.1f} {other['host']:9.1f} {mine['all']:10.1f} {other['all']:9.1f} "
                  f"{mine['all'] / other['all']:8.2f}", flush=True)
            del pair
    if options.json:
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
