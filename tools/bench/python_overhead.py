#!/usr/bin/env python3
"""What a call costs beside its work: one tiny lm_head from C, from Python without torch, through torch eagerly, with a recorded
gradient and compiled, beside torch's own F.linear and an empty torch custom op, in one run.

    PYTHONPATH=build/release/python python tools/bench/python_overhead.py [--json FILE] [--rounds N]

Rounds of all candidates take turns; the figure is the fastest round's nanoseconds of one call, of the calling thread's own time.
Other programs on the machine still slow memory and caches for every candidate alike, so read the ratios.
"""

import argparse
import ctypes
import json
import statistics
import time
from pathlib import Path

import numpy
import rlk
from rlk import _C

M, K, V = 1, 16, 8


class Slot(ctypes.Union):
    _fields_ = [("tensor", ctypes.c_void_p), ("i", ctypes.c_int64), ("f", ctypes.c_double)]


class DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.c_void_p), ("offset", ctypes.c_uint64)]


def c_calls():
    """Nanoseconds of one rlk_run_slots in a loop that C itself runs: the kernel is part of it. None where no compiler is found."""
    import shutil
    import subprocess
    import tempfile
    compiler = shutil.which("cc") or shutil.which("gcc")
    root = Path(__file__).resolve().parents[2]
    library = next((p for p in [Path(_C.__file__).resolve().parents[2] / "lib/librlk_registry.so"] if p.exists()), None)
    if not compiler or not library:
        return None
    source = """
#include <time.h>
#include "rlk/binding.h"
double per_call(int32_t op, const rlk_slot* slots, uint32_t count, int n) {
  struct timespec a, b;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &a);
  for (int i = 0; i < n; ++i) if (rlk_run_slots(op, slots, count, 0) != RLK_OK) return -1;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &b);
  return ((b.tv_sec - a.tv_sec) * 1e9 + (b.tv_nsec - a.tv_nsec)) / n;
}
"""
    folder = Path(tempfile.mkdtemp())
    (folder / "call.c").write_text(source)
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-I", root / "include", folder / "call.c", library,
                    f"-Wl,-rpath,{library.parent}", "-o", folder / "call.so"], check=True)
    per_call = ctypes.CDLL(folder / "call.so").per_call
    per_call.restype = ctypes.c_double
    arrays = [numpy.ones(s, numpy.float32) for s in ((M, K), (V, K))] + [numpy.empty((M, V), numpy.float32)]
    tensors = [DLTensor(a.ctypes.data, 1, 0, 2, 2, 32, 1, (ctypes.c_int64 * 2)(*a.shape), None, 0) for a in arrays]
    slots = (Slot * 4)()
    for i, t in zip((0, 1, 3), tensors):
        slots[i].tensor = ctypes.addressof(t)
    keep = (arrays, tensors)
    return lambda n, _=keep: per_call(rlk.ops.index("lm_head"), slots, 4, n)


def floor(h, w, out):
    """An empty function that does with the same three tensors what torch itself must be asked for, step by step."""
    import shutil
    import subprocess
    import sys
    import sysconfig
    import tempfile
    compiler = shutil.which("cc") or shutil.which("gcc")
    headers = Path(sysconfig.get_paths()["include"])
    if not compiler or not (headers / "Python.h").exists() or not hasattr(type(h), "__dlpack_c_exchange_api__"):
        return {}
    here, folder = Path(__file__).resolve().parent, tempfile.mkdtemp()
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-I", headers, "-I", here.parents[1] / "include",
                    here / "python_floor.c", "-o", f"{folder}/python_floor.abi3.so"], check=True)
    sys.path.insert(0, folder)
    import python_floor as f
    f.prepare(h)
    return {"an empty function of C": timed(lambda: f.nothing(h, w, out=out)),
            "... the views exchanged": timed(lambda: f.exchanged(h, w, out=out)),
            "... is_neg, requires_grad": timed(lambda: f.asked(h, w, out=out)),
            "... the result marked as written": timed(lambda: f.marked(h, w, out=out))}


def timed(call):
    def run(n):
        begin = time.thread_time_ns()
        for _ in range(n):
            call()
        return (time.thread_time_ns() - begin) / n
    return run


def numpy_candidates():
    h, w, out = numpy.ones((M, K), numpy.float32), numpy.ones((V, K), numpy.float32), numpy.empty((M, V), numpy.float32)
    return {"numpy, out given": timed(lambda: rlk.lm_head(h, w, out=out)), "numpy": timed(lambda: rlk.lm_head(h, w)),
            "numpy's own matmul": timed(lambda: h @ w.T)}


def torch_candidates():
    try:
        import torch
    except ImportError:
        return {}
    torch.set_num_threads(1)
    h, w, out = torch.ones(M, K), torch.ones(V, K), torch.empty(M, V)
    turned = w.t()
    hg, wg = torch.ones(M, K, requires_grad=True), torch.ones(V, K, requires_grad=True)
    global library  # its ops end with it
    library = torch.library.Library("rlk_bench", "DEF")
    library.define("empty(Tensor hidden, Tensor weight) -> Tensor")
    library.impl("empty", lambda hidden, weight: hidden.new_empty(M, V), "CPU")
    torch.library.register_fake("rlk_bench::empty", lambda hidden, weight: hidden.new_empty(M, V), lib=library)
    torch.library.register_autograd("rlk_bench::empty", lambda ctx, g: (None, None), lib=library)
    empty, linear, mine = torch.ops.rlk_bench.empty.default, torch.nn.functional.linear, rlk.torch.lm_head
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight):
            return hidden.new_empty(M, V)

        @staticmethod
        def backward(ctx, gradient):
            return None, None

    def recorded(f):
        def step():
            f(hg, wg).sum().backward()
            hg.grad = wg.grad = None
        return step

    return {**floor(h, w, out), "torch plain face, out given": timed(lambda: rlk.lm_head(h, w, out=out)),
            "rlk.torch, out given": timed(lambda: mine(h, w, out=out)),
            "torch.mm, out given": timed(lambda: torch.mm(h, turned, out=out)),
            "torch plain face": timed(lambda: rlk.lm_head(h, w)),
            "rlk.torch": timed(lambda: mine(h, w)),
            "F.linear": timed(lambda: linear(h, w)),
            "empty custom op": timed(lambda: empty(h, w)),
            "an empty autograd.Function": timed(lambda: Nothing.apply(hg, wg)),
            "rlk.torch, gradient recorded": timed(lambda: mine(hg, wg)),
            "F.linear, gradient recorded": timed(lambda: linear(hg, wg)),
            "empty custom op, gradient recorded": timed(lambda: empty(hg, wg)),
            "rlk.torch, forward and backward": timed(recorded(mine)),
            "F.linear, forward and backward": timed(recorded(linear))}


def compiled_candidates():
    try:
        import torch
    except ImportError:
        return {}
    h, w = torch.ones(M, K), torch.ones(V, K)
    empty = torch.ops.rlk_bench.empty.default
    mine = torch.compile(lambda a, b: rlk.torch.lm_head(a, b), fullgraph=True, backend="eager")
    nothing = torch.compile(lambda a, b: empty(a, b), fullgraph=True, backend="eager")
    return {"rlk.torch, compiled": timed(lambda: mine(h, w)), "empty custom op, compiled": timed(lambda: nothing(h, w))}


def measure(candidates, count):
    """Nanoseconds of each in every round."""
    candidates = {n: c for n, c in candidates.items() if c}
    rounds = {n: [] for n in candidates}
    for run in candidates.values():
        run(200)
    for _ in range(count):
        for name, run in candidates.items():
            rounds[name].append(run(500))
    return rounds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="writes the figures to this file")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    rounds = measure({"C, rlk_run_slots": c_calls(), **numpy_candidates(), **torch_candidates()}, options.rounds)
    # Last: where torch.compile was used, the interpreter calls every Python function more slowly.
    rounds |= measure(compiled_candidates(), options.rounds)
    figures = {n: min(r) for n, r in rounds.items()}
    for name, ns in figures.items():
        print(f"{name:<36} {ns:9.0f} ns")
    if options.json:
        document = {"call": f"lm_head {M}x{K} by {V}x{K} fp32", "unit": "ns", "rounds": options.rounds, "fastest": figures,
                    "median": {n: statistics.median(r) for n, r in rounds.items()}}
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
