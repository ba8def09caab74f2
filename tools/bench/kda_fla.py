"""The peer of kda_cuda_bench: chunk_kda of flash-linear-attention on the same shapes, in milliseconds.

    for i in $(seq 0 5); do python3 kda_fla.py $i 6 & done; wait    # compiles every configuration, side by side
    python3 kda_fla.py                                              # tunes on them and measures

Needs a GPU, torch, triton and flash-linear-attention, and TRITON_CACHE_DIR for what the first line compiles.
"""
import statistics
import sys

import torch
import triton.testing
from triton.runtime import autotuner

part, parts = (int(sys.argv[1]), int(sys.argv[2])) if len(sys.argv) > 2 else (0, 1)
before = autotuner.Autotuner.__init__


def time_quickly(fn, quantiles=None, **_):
    return triton.testing.do_bench(fn, warmup=1, rep=1 if parts > 1 else 6, quantiles=quantiles)


def init(self, *args, **named):
    before(self, *args, **named)
    if parts > 1:
        self.configs = self.configs[part::parts] or self.configs[:1]
    self._do_bench = time_quickly
    try:
        self.do_bench = time_quickly
    except Exception:  # a property in some versions, which then asks _do_bench
        pass


autotuner.Autotuner.__init__ = init
from fla.ops.kda import chunk_kda  # noqa: E402  (its kernels are made on import)


def inputs(batch, tokens, heads, width=128):
    def normal():
        return torch.randn(batch, tokens, heads, width, device="cuda")

    q, k = (torch.nn.functional.normalize(normal(), dim=-1).bfloat16() for _ in range(2))
    g = torch.nn.functional.logsigmoid(normal()).clamp(-5, 0)
    beta = torch.rand(batch, tokens, heads, device="cuda").bfloat16()
    return [x.requires_grad_() for x in (q, k, normal().bfloat16(), g, beta)]


def median(run, rounds=11):
    times = []
    for i in range(rounds + 3):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def one(shape, safe, keep):
    x = inputs(*shape)
    options = dict(safe_gate=safe, lower_bound=-5.0 if safe else None, disable_recompute=keep)
    out, _ = chunk_kda(*x, **options)
    d_out = torch.randn_like(out)
    out.backward(d_out)
    torch.cuda.synchronize()
    if parts > 1:
        return
    forward = median(lambda: chunk_kda(*x, **options))
    out, _ = chunk_kda(*x, **options)
    backward = median(lambda: torch.autograd.grad(out, x, d_out, retain_graph=True))
    print(f"{shape} safe_gate={safe} disable_recompute={keep}: forward {forward:.3f} backward {backward:.3f}",
          flush=True)


torch.manual_seed(0)
if parts > 1:
    shapes = ((1, 256, 16), (1, 256, 32))
else:
    shapes = ((8, 4096, 16), (8, 4096, 32), (1, 8192, 32), (1, 32768, 32))
for shape in shapes:
    for safe, keep in ((True, False), (True, True), (False, False)):
        one(shape, safe, keep)
