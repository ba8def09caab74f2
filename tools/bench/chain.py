#!/usr/bin/env python3
"""Ops of the dense chain, and those beside linear attention, beside PyTorch's, eager and compiled, in one run; on a GPU
also beside those of Liger, Quack, FlashInfer and FlashAttention-4, where they can be imported (others.py).

    PYTHONPATH=build/release/python python tools/bench/chain.py [--device cpu] [--dtype fp32]
        [--json FILE] [--only PATTERN...] [--rounds N] [--no-compile]

The candidates of a row take turns, and a figure is the median over rounds. On a GPU each is captured in a CUDA graph,
so host time is left out; what cannot be captured is timed with it, and a line says so. `copy` is what a copy of as many
bytes takes, measured in the same turns: at 1.00 of it an op has a copy's speed.
"""

import argparse
import fnmatch
import json
import os
import statistics
import time

import torch
import torch.nn.functional as F

import rlk
import rlk.torch as ops

import others

FP32 = torch.float32
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": FP32}
DEVICE, DTYPE = "cuda", torch.bfloat16  # main() sets both


def normal(*shape, dtype=None, scale=1.0):
    return (torch.randn(*shape, device=DEVICE, dtype=FP32) * scale).to(dtype or DTYPE)


def size(*tensors):
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


class Row:
    """A name, what the operands of a call weigh, and candidates: functions that compute the same, each `calls` calls."""

    def __init__(self, name, moved, calls=1, **candidates):
        self.name, self.moved, self.calls, self.candidates = name, moved, calls, candidates


def rms_norm_rows(tokens, width):
    x, w, dy, r = normal(tokens, width), normal(width), normal(tokens, width), normal(tokens, width)
    y, s, dx, dw = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x), torch.empty_like(w)
    shape = f"[{tokens}, {width}]"

    def norm(x, w):
        return F.rms_norm(x, (width,), w, 1e-6)

    def add_norm(x, r, w):
        a = x + r
        return a, F.rms_norm(a, (width,), w, 1e-6)

    leaf_x, leaf_w = x.clone().requires_grad_(), w.clone().requires_grad_()
    yield Row(f"rms_norm {shape}", size(x, y, w), rlk=lambda: ops.rms_norm(x, w, y=y, eps=1e-6),
              torch=lambda: norm(x, w), compiled=(norm, x, w), **others.rms_norm(x, w, 1e-6))
    yield Row(f"rms_norm + residual {shape}", size(x, r, s, y, w),
              rlk=lambda: ops.rms_norm(x, w, r, y=y, sum=s, eps=1e-6),
              torch=lambda: add_norm(x, r, w), compiled=(add_norm, x, r, w), **others.add_rms_norm(x, r, w, 1e-6))
    yield Row(f"rms_norm backward {shape}", size(x, dy, dx, w, dw),
              rlk=lambda: ops.rms_norm_bwd(dy, x, w, d_x=dx, d_weight=dw, eps=1e-6),
              compiled=("backward", norm, (leaf_x, leaf_w), dy), **others.rms_norm_bwd(dy, x, w, 1e-6))
    yield Row(f"rms_norm backward, d_x {shape}", size(x, dy, dx, w), rlk=lambda: ops.rms_norm_bwd(dy, x, w, d_x=dx, eps=1e-6))
    yield Row(f"rms_norm + residual backward {shape}", size(x, r, dy, dx, w, dw),
              rlk=lambda: ops.rms_norm_bwd(dy, x, w, d_sum=r, d_x=dx, d_weight=dw, eps=1e-6),
              compiled=("backward", add_norm, (leaf_x, r.clone().requires_grad_(), leaf_w), (r, dy)),
              **others.rms_norm_bwd(dy, x, w, 1e-6, d_sum=r))


def gated_norm_rows(heads, width):
    """Norms of heads, with a gate behind them."""
    x, gate, dy, w = normal(heads, width), normal(heads, width), normal(heads, width), normal(width)
    y, dx, dg, dw = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x), torch.empty_like(w)
    shape = f"[{heads}, {width}]"
    yield Row(f"rms_norm, gate {shape}", size(x, gate, y, w), rlk=lambda: ops.rms_norm(x, w, gate=gate, y=y, eps=1e-6))
    yield Row(f"rms_norm, gate, backward, d_x and d_gate {shape}", size(dy, x, gate, dx, dg, w),
              rlk=lambda: ops.rms_norm_bwd(dy, x, w, gate=gate, d_x=dx, d_gate=dg, eps=1e-6))
    yield Row(f"rms_norm, gate, backward, all {shape}", size(dy, x, gate, dx, dg, w, dw),
              rlk=lambda: ops.rms_norm_bwd(dy, x, w, gate=gate, d_x=dx, d_gate=dg, d_weight=dw, eps=1e-6))


def qk_norm_rope_rows(tokens, heads=16, kv_heads=8, width=128):
    """Heads as views of one product, keys and values into a cache; and the same op by op."""
    qkv, q_weight, k_weight = normal(tokens, heads + 2 * kv_heads, width), normal(width), normal(width)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
    cos, sin = (normal(40960, width // 2, dtype=FP32) for _ in range(2))
    positions = torch.arange(tokens, dtype=torch.int32, device=DEVICE)
    slots = torch.randperm(2 * tokens, device=DEVICE)[:tokens]
    k_cache, v_cache = (normal(2 * tokens, kv_heads, width) for _ in range(2))
    q_out, k_out = torch.empty_like(q, memory_format=torch.contiguous_format), torch.empty_like(k, memory_format=torch.contiguous_format)
    q_norm, k_norm = torch.empty_like(q_out), torch.empty_like(k_out)

    def steps():
        ops.rms_norm(q, q_weight, y=q_norm, eps=1e-6)
        ops.rms_norm(k, k_weight, y=k_norm, eps=1e-6)
        ops.rope(q_norm, cos, sin, k=k_norm, positions=positions, layout="thd", out=q_out, k_out=k_out)
        k_cache[slots], v_cache[slots] = k_out, v

    yield Row(f"qk_norm_rope [{tokens}, {heads} + {kv_heads}, {width}]", 2 * size(qkv),
              rlk=lambda: ops.qk_norm_rope(q, k, cos, sin, positions, v, q_weight, k_weight, slots, k_cache=k_cache, v_cache=v_cache,
                                           q_out=q_out, eps=1e-6),
              steps=steps)
    k_8, v_8 = (torch.zeros(k_cache.shape, dtype=torch.float8_e4m3fn, device=DEVICE) for _ in range(2))
    yield Row(f"qk_norm_rope, fp8 cache [{tokens}, {heads} + {kv_heads}, {width}]", size(qkv, q_out, k_8[:tokens], v_8[:tokens]),
              rlk=lambda: ops.qk_norm_rope(q, k, cos, sin, positions, v, q_weight, k_weight, slots, k_cache=k_8, v_cache=v_8,
                                           q_out=q_out, eps=1e-6))


def short_conv_rows(tokens, width):
    """One sequence, four taps."""
    x, dy, w = normal(1, tokens, width), normal(1, tokens, width), normal(width, 4)
    y, dx, dw = torch.empty_like(x), torch.empty_like(x), torch.empty_like(w)
    shape = f"[{tokens}, {width}]"
    yield Row(f"short_conv {shape}", size(x, y, w), rlk=lambda: ops.short_conv(x, w, y=y))
    yield Row(f"short_conv backward {shape}", size(x, dy, dx, w, dw),
              rlk=lambda: ops.short_conv_bwd(x, w, d_y=dy, d_x=dx, d_weight=dw))


def kda_step_rows(batch, heads=32, width=128):
    """One token of every sequence; sequences are spread over the chunk of 64, and 64 calls take each around it once."""
    q, k, v = (F.normalize(normal(batch, 1, heads, width), dim=-1) for _ in range(3))
    g, beta = -torch.rand(batch, 1, heads, width, device=DEVICE) / 10, torch.rand(batch, 1, heads, device=DEVICE)
    state = normal(batch, heads, width, width, dtype=FP32)
    row = rlk.Spec([1, 1, heads, width], next(name for name in DTYPES if DTYPES[name] is DTYPE))
    kept = rlk._C.infer("kda_step", row, row, row, rlk.Spec([1, 1, heads, width], "fp32"), rlk.Spec([1, 1, heads], "fp32"),
                        rlk.Spec([1], "int64"), rlk.Spec([1, heads, width, width], "fp32"))
    floats = kept["cache"][0][2]
    cache, out = torch.zeros(batch, heads, floats, device=DEVICE), torch.empty_like(v)
    start = torch.arange(batch, device=DEVICE) * 64 // batch
    turns = [(start + turn) % 64 + (64 if turn else 0) * ((start + turn) % 64 == 0) for turn in range(64)]
    moved = size(q, k, v, g, beta, out) + 2 * size(state)
    yield Row(f"kda_step of {batch}", moved, calls=64,
              rlk=lambda: [ops.kda_step(q, k, v, g, beta, rows, state=state, cache=cache, out=out) for rows in turns])
    one = [t[:, 0] for t in (q, k, v, g, beta)]
    yield Row(f"kda_decode of {batch}", moved, rlk=lambda: ops.kda_decode(*one, state=state, out=out[:, 0]))


def swiglu_rows(tokens, width):
    g, u, d = normal(tokens, width), normal(tokens, width), normal(tokens, width)
    out, dg, du = torch.empty_like(g), torch.empty_like(g), torch.empty_like(g)
    shape = f"[{tokens}, {width}]"

    def act(g, u):
        return F.silu(g) * u

    leaf_g, leaf_u = g.clone().requires_grad_(), u.clone().requires_grad_()
    yield Row(f"swiglu {shape}", size(g, u, out), rlk=lambda: ops.swiglu(g, u, out=out), torch=lambda: act(g, u),
              compiled=(act, g, u), **others.swiglu(g, u))
    yield Row(f"swiglu backward {shape}", size(g, u, d, dg, du),
              rlk=lambda: ops.swiglu_bwd(d, g, u, d_gate=dg, d_up=du),
              compiled=("backward", act, (leaf_g, leaf_u), d), **others.swiglu_bwd(d, g, u))


def embedding_rows(tokens, width, vocab):
    table, ids, d = normal(vocab, width), torch.randint(vocab, (tokens,), device=DEVICE), normal(tokens, width)
    out, out_torch, d_table = torch.empty_like(d), torch.empty_like(d), torch.empty_like(table)
    shape = f"[{tokens}, {width}] of {vocab}"
    yield Row(f"embedding {shape}", size(d, out), rlk=lambda: ops.embedding(ids, table, out=out),
              torch=lambda: torch.index_select(table, 0, ids, out=out_torch), **others.embedding(ids, table))
    yield Row(f"embedding backward {shape}", size(d, d_table),
              rlk=lambda: ops.embedding_bwd(ids, d, table, d_weight=d_table),
              torch=lambda: torch.ops.aten.embedding_dense_backward(d, ids, vocab, -1, False),
              **others.embedding_bwd(ids, d, table))


def logp_rows(tokens, vocab):
    z, target = normal(tokens, vocab, scale=3.0), torch.randint(vocab, (tokens,), device=DEVICE, dtype=torch.int32)
    wide = target.long()
    value, stats = torch.empty(tokens, device=DEVICE), torch.empty(tokens, 4, device=DEVICE)
    d, dz = normal(tokens, dtype=FP32), torch.empty_like(z)
    shape = f"[{tokens}, {vocab}]"

    def pick(z, wide):
        return -F.cross_entropy(z.float(), wide, reduction="none")

    leaf = z.clone().requires_grad_()
    yield Row(f"logp {shape}", size(z, value), rlk=lambda: ops.logp(z, target, logp=value, stats=stats),
              compiled=(pick, z, wide), **others.logp(z, target))
    ops.logp(z, target, logp=value, stats=stats)
    yield Row(f"logp backward {shape}", size(z, dz),
              rlk=lambda: ops.logp_bwd(z, target, stats=stats, d_logp=d, d_logits=dz), **others.logp_bwd(z, target, d))
    yield Row(f"logp forward and backward {shape}", size(z, z, dz),
              rlk=lambda: (ops.logp(z, target, logp=value, stats=stats),
                           ops.logp_bwd(z, target, stats=stats, d_logp=d, d_logits=dz)),
              compiled=("both", lambda z: pick(z, wide), (leaf,), d), **others.logp_both(z, target, d))


def sample_rows(rows, vocab):
    z = normal(rows, vocab, scale=3.0)
    seed = torch.arange(rows, device=DEVICE)
    full = lambda v, t: torch.full((rows,), v, device=DEVICE, dtype=t)  # noqa: E731
    token, value = torch.empty(rows, device=DEVICE, dtype=torch.int32), torch.empty(rows, device=DEVICE)
    shape = f"[{rows}, {vocab}]"
    warm, k, p, least = full(0.8, FP32), full(50, torch.int32), full(0.9, FP32), full(0.02, FP32)

    def peer():
        return torch.multinomial(torch.softmax(z.float() / 0.8, -1), 1)

    yield Row(f"sample {shape}", size(z), rlk=lambda: ops.sample(z, warm, seed=seed, token=token, logp=value),
              torch=peer, **others.sample(z, warm, seed))
    filters = {"top_k": ({"top_k": k}, {"top_k": 50}), "top_p": ({"top_p": p}, {"top_p": 0.9}),
               "min_p": ({"min_p": least}, {"min_p": 0.02}),
               "top_k and top_p": ({"top_k": k, "top_p": p}, {"top_k": 50, "top_p": 0.9})}
    for name, (ours, theirs) in filters.items():
        yield Row(f"sample, {name} {shape}", size(z),
                  rlk=lambda ours=ours: ops.sample(z, warm, **ours, seed=seed, token=token, logp=value),
                  **others.sample(z, warm, seed, **theirs))
    yield Row(f"sample, every filter {shape}", size(z),
              rlk=lambda: ops.sample(z, warm, k, p, least, seed=seed, token=token, logp=value))


def tp_sum_rows(ranks, tokens, width):
    parts, y = normal(ranks, tokens, width, dtype=FP32), torch.empty(tokens, width, device=DEVICE, dtype=DTYPE)
    yield Row(f"tp_sum [{ranks}, {tokens}, {width}]", size(parts, y), rlk=lambda: ops.tp_sum(parts, y=y),
              torch=lambda: parts.sum(0).to(DTYPE))


def loss_rows(sequences, length):
    shape = (sequences, length)
    new, old, ref = (-torch.rand(shape, device=DEVICE) for _ in range(3))
    adv, mask = torch.randn(sequences, device=DEVICE), torch.ones(shape, device=DEVICE, dtype=torch.bool)
    yield Row(f"ratio_kl {list(shape)}", 5 * size(new) + size(mask), rlk=lambda: ops.ratio_kl(new, old, ref, mask))
    try:
        ops.policy_loss(new, old, adv, mask, advantages_per="sequence", ref_logp=ref, kl_coef=0.1)
    except rlk.Error as error:
        print(f"policy_loss: {error}")
        return
    yield Row(f"policy_loss {list(shape)}", 4 * size(new) + size(mask),
              rlk=lambda: ops.policy_loss(new, old, adv, mask, advantages_per="sequence", ref_logp=ref, kl_coef=0.1))


def linear_rows(m, n, k):
    x, w = normal(m, k), normal(n, k, scale=k**-0.5)
    y = torch.empty(m, n, device=DEVICE, dtype=DTYPE)
    yield Row(f"linear {m} x {n} x {k}", size(x, w, y), rlk=lambda: ops.linear(x, w, y=y), torch=lambda: F.linear(x, w))
    if DEVICE == "cuda":
        return
    dy, dx, dw = normal(m, n), torch.empty_like(x), torch.empty_like(w)
    dx_torch, dw_torch = torch.empty_like(x), torch.empty_like(w)
    yield Row(f"linear backward {m} x {n} x {k}", size(x, w, y, dx, dw),
              rlk=lambda: ops.linear_bwd(dy, x, w, d_x=dx, d_weight=dw),
              torch=lambda: (torch.mm(dy, w, out=dx_torch), torch.mm(dy.T, x, out=dw_torch)))


def scaled_dot_product(q, k, v, causal, backend):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, backend)):
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=True)


def attention_rows(batch, length, heads, kv_heads, width=128):
    q = normal(batch, length, heads, width)
    k, v = (normal(batch, length, kv_heads, width) for _ in range(2))
    shape = f"{batch} x {length}, {heads}/{kv_heads} x {width}"
    kinds = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION"} if DEVICE == "cuda" else {"flash": "FLASH_ATTENTION"}
    peers = {kind: lambda name=name: scaled_dot_product(q, k, v, True, name) for kind, name in kinds.items()}
    yield Row(f"attention causal {shape}", size(q, k, v, q), rlk=lambda: ops.attention(q, k, v, causal=True), **peers,
              **others.attention(q, k, v, True))
    leaves, d = [t.clone().requires_grad_() for t in (q, k, v)], normal(batch, heads, length, width)
    d_out = d.transpose(1, 2).contiguous()

    def ours():
        out, lse = ops.attention(q, k, v, causal=True, lse=True)
        given = {"out": out, "lse": lse, "d_out": d_out, "causal": True}
        return lambda: ops.attention_bwd(q, k, v, **given, d_q=True, d_k=True, d_v=True)

    peers = {kind: ("backward", lambda *inputs, name=name: scaled_dot_product(*inputs, True, name), leaves, d)
             for kind, name in kinds.items()}
    yield Row(f"attention backward {shape}", 2 * size(q, k, v, q), rlk=("prepared", ours), **peers,
              **others.attention_bwd(d_out, q, k, v, True))


def decode_rows(batch, keys, heads, kv_heads, width=128):
    q = normal(batch, 1, heads, width)
    k, v = (normal(batch, keys, kv_heads, width) for _ in range(2))
    yield Row(f"attention of one token {batch} x {keys}, {heads}/{kv_heads} x {width}", size(q, k, v, q),
              rlk=lambda: ops.attention(q, k, v), flash=lambda: scaled_dot_product(q, k, v, False, "FLASH_ATTENTION"))


def gpu_rows():
    for tokens in (1, 64, 1000, 8192, 32768):
        yield from rms_norm_rows(tokens, 4096)
    for tokens, width in ((262144, 128), (65536, 256), (65536, 512), (32768, 1024), (65536, 2048)):
        yield from rms_norm_rows(tokens, width)
    for heads in (32768, 262144):
        yield from gated_norm_rows(heads, 128)
    for tokens in (1, 64, 256, 512, 1000, 2000, 8192, 32768):
        yield from qk_norm_rope_rows(tokens)
    for heads in ((32, 8), (8, 1), (16, 2, 256)):
        for tokens in (512, 8192):
            yield from qk_norm_rope_rows(tokens, *heads)
    for tokens in (1, 64, 1000, 8192):
        yield from swiglu_rows(tokens, 12288)
    yield from swiglu_rows(8192, 4096)
    for tokens in (1, 64, 200, 512, 1000, 2000, 4000, 8192, 32768):
        yield from short_conv_rows(tokens, 4096)
    for shape in ((8192, 2048), (2000, 12288)):
        yield from short_conv_rows(*shape)
    for batch in (1, 16, 64, 256):
        yield from kda_step_rows(batch)
    yield from embedding_rows(8192, 4096, 151936)
    yield from logp_rows(512, 151936)
    yield from logp_rows(2048, 151936)
    yield from logp_rows(4096, 151936)
    for rows in (1, 32, 256):
        yield from sample_rows(rows, 151936)
    for tokens in (16, 1000, 8192):
        yield from tp_sum_rows(4, tokens, 4096)
    yield from loss_rows(64, 1024)
    for m in (1, 16, 64, 200, 512, 4096):
        for n, k in ((1024, 4096), (4096, 4096), (24576, 4096), (4096, 12288)):
            yield from linear_rows(m, n, k)
    yield from attention_rows(1, 8192, 32, 8)
    yield from attention_rows(4, 4096, 32, 8)
    yield from attention_rows(8, 2048, 16, 8)


def cpu_rows():
    for tokens, width in ((1, 4096), (64, 4096), (1000, 4096), (16384, 128)):
        yield from rms_norm_rows(tokens, width)
    yield from gated_norm_rows(16384, 128)
    for tokens in (1, 1000):
        yield from qk_norm_rope_rows(tokens)
    for tokens in (1, 64, 700):
        yield from swiglu_rows(tokens, 4096)
    yield from short_conv_rows(1000, 4096)
    yield from embedding_rows(1000, 2048, 50257)
    yield from logp_rows(64, 151936)
    for rows in (1, 32):
        yield from sample_rows(rows, 151936)
    yield from tp_sum_rows(4, 512, 4096)
    yield from loss_rows(64, 1024)
    for m in (1, 16, 64, 200):
        for n, k in ((1024, 1024), (4096, 4096), (700, 2880)):
            yield from linear_rows(m, n, k)
    yield from attention_rows(1, 1024, 8, 2)
    yield from attention_rows(3, 333, 8, 8, 64)
    yield from decode_rows(4, 4096, 8, 2)


def runnable(kind, candidate):
    """A function without arguments; torch.compile's, where the row says what to compile.

    A candidate is such a function, or ("prepared", what gives it), ("uncaptured", it), (a function, its arguments), or
    ("backward" or "both", a function, leaves, gradients of its results)."""
    if not isinstance(candidate, tuple):
        return candidate
    if candidate[0] in ("prepared", "uncaptured"):
        return candidate[1]() if candidate[0] == "prepared" else candidate[1]
    prepare = torch.compile if kind == "compiled" else lambda function: function
    if candidate[0] not in ("backward", "both"):
        function = prepare(candidate[0])
        return lambda: function(*candidate[1:])
    mode, body, leaves, cotangent = candidate
    function = prepare(body)
    if mode == "both":
        return lambda: torch.autograd.grad(function(*leaves), leaves, cotangent)
    value = []

    def backward():  # its kernels run on the stream of the forward, so that belongs to the first call and not here
        if not value:
            value.append(function(*leaves))
        return torch.autograd.grad(value[0], leaves, cotangent, retain_graph=True)

    return backward


def captured(run, calls):
    """A graph of some calls, or None with the reason why it cannot be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # which makes the operands
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(calls):
            run()
    return graph


def gpu_timer(row, run, captures):
    """A function that makes the call and returns its microseconds."""
    calls = 1 if row.calls * row.moved > 2**30 else 4
    if not captures:
        run()
    replay = captured(run, calls).replay if captures else lambda: [run() for _ in range(calls)]

    def timed():
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1000 / calls

    timed.reads = run  # a graph reads what the function holds, such as the results of a forward
    return timed


def cpu_timer(_, run, __):
    """Likewise, of calls enough for a millisecond; on one CPU (taskset) by processor time."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    run()
    start = clock()
    run()
    calls = max(1, min(1000, int(1e-3 / (clock() - start))))

    def timed():
        start = clock()
        for _ in range(calls):
            run()
        return (clock() - start) * 1e6 / calls

    return timed


def copied(moved):
    """Bytes to copy for as many that move: a size that cudaMemcpy takes at full speed. On an H200 it takes 1.5 times as
    long for 64 MiB and 128 bytes as for 64 MiB; up to 0.8% more are copied than asked for. Seen to be so up to 256 MiB:
    622 MB took that long all the same."""
    size = moved // 2
    grain = 1 << 16 if size >= 1 << 23 else 1 << 13 if size >= 1 << 20 else 1
    return -(-size // grain) * grain


def measure(row, rounds, compiles):
    """Microseconds of what can run of a row and of a copy of as many bytes, and why the rest cannot."""
    source, target = (torch.empty(copied(row.moved), device=DEVICE, dtype=torch.uint8) for _ in range(2))
    timers, failures = {}, {}
    candidates = dict(row.candidates, copy=lambda: target.copy_(source))
    if isinstance(row.candidates.get("compiled"), tuple):
        candidates.setdefault("torch", row.candidates["compiled"])
    for kind, candidate in candidates.items():
        if kind == "compiled" and not compiles:
            continue
        try:
            captures = not (isinstance(candidate, tuple) and candidate[0] == "uncaptured")
            timers[kind] = (gpu_timer if DEVICE == "cuda" else cpu_timer)(row, runnable(kind, candidate), captures)
            if not captures:
                failures[kind] = "cannot be captured, host time is in"
        except Exception as error:  # a peer that is not there, or an op that nobody serves
            failures[kind] = (str(error).splitlines() or [type(error).__name__])[0][:150]
            if DEVICE == "cuda":
                torch.cuda.synchronize()
    times = {kind: [] for kind in timers}
    for turn in range(rounds + 2):
        for kind, timer in timers.items():
            us = timer() / (1 if kind == "copy" else row.calls)
            if turn >= 2:
                times[kind].append(us)
    return {kind: statistics.median(t) for kind, t in times.items()}, failures


def processor():
    names = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return f"{names[0]}, {torch.get_num_threads()} threads"


def main():
    global DEVICE, DTYPE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", choices=[*DTYPES], default="bf16")
    parser.add_argument("--json")
    parser.add_argument("--only", nargs="+", default=["*"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-compile", action="store_true")
    given = parser.parse_args()
    DEVICE, DTYPE = given.device, DTYPES[given.dtype]
    torch.manual_seed(1)
    if DEVICE == "cpu":
        torch.set_num_threads(len(os.sched_getaffinity(0)))  # as many as rlk takes
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else processor()
    peers = ["torch", "compiled", *(["cudnn", *others.NAMES] if DEVICE == "cuda" else []), "flash"]
    print(f"{device}, {given.dtype}, torch {torch.__version__}, us; `of copy` = copy's time / ours, `of peer` = best peer's / ours")
    print(f"{'':52}" + "".join(f"{word:>10}" for word in ("rlk", "copy", "of copy", "GB/s", *peers, "of peer")))
    results = []
    for row in gpu_rows() if DEVICE == "cuda" else cpu_rows():
        if not any(fnmatch.fnmatch(row.name, pattern) for pattern in given.only):
            continue
        us, failures = measure(row, given.rounds, not given.no_compile)
        ours, best = us.get("rlk"), min((us[kind] for kind in peers if kind in us), default=None)
        text = lambda t, form=".1f": f"{t:{form}}" if t is not None else "-"  # noqa: E731
        cells = [text(ours), text(us["copy"]), text(ours and us["copy"] / ours, ".2f"), text(ours and row.moved / ours / 1000),
                 *(text(us.get(kind)) for kind in peers), text(ours and best and best / ours, ".2f")]
        print(f"{row.name:52}" + "".join(f"{cell:>10}" for cell in cells), flush=True)
        for kind, why in failures.items():
            print(f"    {kind}: {why}", flush=True)
        results.append({"name": row.name, "bytes": row.moved, "us": us, "failures": failures})
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    if given.json:
        with open(given.json, "w") as out:
            json.dump({"device": device, "dtype": given.dtype, "torch": torch.__version__, "rows": results}, out, indent=1)


if __name__ == "__main__":
    main()
