#!/usr/bin/env python3
"""Ops of the dense chain, and those beside linear attention, on a GPU beside PyTorch's, eager and compiled, in one run.

    PYTHONPATH=build/release/python python tools/bench/chain_gpu.py [--json FILE] [--only PATTERN...] [--rounds N] [--no-compile]

Every candidate is captured in a CUDA graph, so host time is left out; the graphs of a row take turns, and a figure is the median
over rounds. `floor` is the time that a copy of as many bytes takes, measured in the same turns: 1.00 would be a copy's speed.
"""

import argparse
import fnmatch
import json
import statistics

import torch
import torch.nn.functional as F

import rlk
import rlk.torch as ops

BF16, FP32 = torch.bfloat16, torch.float32


def normal(*shape, dtype=BF16, scale=1.0):
    return (torch.randn(*shape, device="cuda", dtype=FP32) * scale).to(dtype)


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
              torch=lambda: norm(x, w), compiled=(norm, x, w))
    yield Row(f"rms_norm + residual {shape}", size(x, r, s, y, w),
              rlk=lambda: ops.rms_norm(x, w, r, y=y, sum=s, eps=1e-6),
              torch=lambda: add_norm(x, r, w), compiled=(add_norm, x, r, w))
    yield Row(f"rms_norm backward {shape}", size(x, dy, dx, w, dw),
              rlk=lambda: ops.rms_norm_bwd(dy, x, w, d_x=dx, d_weight=dw, eps=1e-6),
              compiled=("backward", norm, (leaf_x, leaf_w), dy))


    yield Row(f"rms_norm backward, d_x {shape}", size(x, dy, dx, w), rlk=lambda: ops.rms_norm_bwd(dy, x, w, d_x=dx, eps=1e-6))


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
    positions = torch.arange(tokens, dtype=torch.int32, device="cuda")
    slots = torch.randperm(2 * tokens, device="cuda")[:tokens]
    k_cache, v_cache = (normal(2 * tokens, kv_heads, width) for _ in range(2))
    q_out, k_out = torch.empty_like(q, memory_format=torch.contiguous_format), torch.empty_like(k, memory_format=torch.contiguous_format)
    q_norm, k_norm = torch.empty_like(q_out), torch.empty_like(k_out)

    def steps():
        ops.rms_norm(q, q_weight, y=q_norm, eps=1e-6)
        ops.rms_norm(k, k_weight, y=k_norm, eps=1e-6)
        ops.rope(q_norm, cos, sin, k=k_norm, positions=positions, layout="thd", out=q_out, k_out=k_out)
        k_cache[slots], v_cache[slots] = k_out, v

    yield Row(f"qk_norm_rope [{tokens}, {heads} + {kv_heads}, {width}]", 2 * size(qkv),
              rlk=lambda: ops.qk_norm_rope(q, k, cos, sin, positions, v, q_weight, k_weight, slots, k_cache, v_cache, q_out=q_out, eps=1e-6),
              steps=steps)


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
    g, beta = -torch.rand(batch, 1, heads, width, device="cuda") / 10, torch.rand(batch, 1, heads, device="cuda")
    state = normal(batch, heads, width, width, dtype=FP32)
    row = rlk.Spec([1, 1, heads, width], "bf16")
    kept = rlk._C.infer("kda_step", row, row, row, rlk.Spec([1, 1, heads, width], "fp32"), rlk.Spec([1, 1, heads], "fp32"),
                        rlk.Spec([1], "int64"), rlk.Spec([1, heads, width, width], "fp32"))
    floats = kept["cache"][0][2]
    cache, out = torch.zeros(batch, heads, floats, device="cuda"), torch.empty_like(v)
    start = torch.arange(batch, device="cuda") * 64 // batch
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
              compiled=(act, g, u))
    yield Row(f"swiglu backward {shape}", size(g, u, d, dg, du),
              rlk=lambda: ops.swiglu_bwd(d, g, u, d_gate=dg, d_up=du),
              compiled=("backward", act, (leaf_g, leaf_u), d))


def embedding_rows(tokens, width, vocab):
    table, ids, d = normal(vocab, width), torch.randint(vocab, (tokens,), device="cuda"), normal(tokens, width)
    out, d_table = torch.empty_like(d), torch.empty_like(table)
    shape = f"[{tokens}, {width}] of {vocab}"
    leaf = table.clone().requires_grad_()
    yield Row(f"embedding {shape}", size(d, out), rlk=lambda: ops.embedding(ids, table, out=out),
              torch=lambda: F.embedding(ids, table))
    yield Row(f"embedding backward {shape}", size(d, d_table),
              rlk=lambda: ops.embedding_bwd(ids, d, table, d_weight=d_table),
              torch=lambda: torch.ops.aten.embedding_dense_backward(d, ids, vocab, -1, False))
    del leaf


def logp_rows(tokens, vocab):
    z, target = normal(tokens, vocab, scale=3.0), torch.randint(vocab, (tokens,), device="cuda", dtype=torch.int32)
    wide = target.long()
    value, stats = torch.empty(tokens, device="cuda"), torch.empty(tokens, 4, device="cuda")
    d, dz = normal(tokens, dtype=FP32), torch.empty_like(z)
    shape = f"[{tokens}, {vocab}]"

    def pick(z, wide):
        return -F.cross_entropy(z.float(), wide, reduction="none")

    leaf = z.clone().requires_grad_()
    yield Row(f"logp {shape}", size(z, value), rlk=lambda: ops.logp(z, target, logp=value, stats=stats),
              compiled=(pick, z, wide))
    ops.logp(z, target, logp=value, stats=stats)
    yield Row(f"logp backward {shape}", size(z, dz), rlk=lambda: ops.logp_bwd(z, target, stats=stats, d_logp=d, d_logits=dz))
    yield Row(f"logp forward and backward {shape}", size(z, z, dz),
              rlk=lambda: (ops.logp(z, target, logp=value, stats=stats),
                           ops.logp_bwd(z, target, stats=stats, d_logp=d, d_logits=dz)),
              compiled=("both", lambda z: pick(z, wide), (leaf,), d))


def sample_rows(rows, vocab):
    z = normal(rows, vocab, scale=3.0)
    seed = torch.arange(rows, device="cuda")
    full = lambda v, t: torch.full((rows,), v, device="cuda", dtype=t)  # noqa: E731
    token, value = torch.empty(rows, device="cuda", dtype=torch.int32), torch.empty(rows, device="cuda")
    shape = f"[{rows}, {vocab}]"
    warm, k, p, least = full(0.8, FP32), full(50, torch.int32), full(0.9, FP32), full(0.02, FP32)

    def peer():
        return torch.multinomial(torch.softmax(z.float() / 0.8, -1), 1)

    yield Row(f"sample {shape}", size(z), rlk=lambda: ops.sample(z, warm, seed=seed, token=token, logp=value), torch=peer)
    for name, filters in {"top_k": {"top_k": k}, "top_p": {"top_p": p}, "min_p": {"min_p": least}}.items():
        yield Row(f"sample, {name} {shape}", size(z),
                  rlk=lambda filters=filters: ops.sample(z, warm, **filters, seed=seed, token=token, logp=value))
    yield Row(f"sample, every filter {shape}", size(z),
              rlk=lambda: ops.sample(z, warm, k, p, least, seed=seed, token=token, logp=value))


def tp_sum_rows(ranks, tokens, width):
    parts, y = normal(ranks, tokens, width, dtype=FP32), torch.empty(tokens, width, device="cuda", dtype=BF16)
    yield Row(f"tp_sum [{ranks}, {tokens}, {width}]", size(parts, y), rlk=lambda: ops.tp_sum(parts, y=y),
              torch=lambda: parts.sum(0).to(BF16))


def loss_rows(sequences, length):
    shape = (sequences, length)
    new, old, ref = (-torch.rand(shape, device="cuda") for _ in range(3))
    adv, mask = torch.randn(sequences, device="cuda"), torch.ones(shape, device="cuda", dtype=torch.bool)
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
    y = torch.empty(m, n, device="cuda", dtype=BF16)
    yield Row(f"linear {m} x {n} x {k}", size(x, w, y), rlk=lambda: ops.linear(x, w, y=y), torch=lambda: F.linear(x, w))


def attention_rows(batch, length, heads, kv_heads, width=128):
    q = normal(batch, length, heads, width)
    k, v = (normal(batch, length, kv_heads, width) for _ in range(2))
    flat = lambda x: x.transpose(1, 2)  # noqa: E731
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def peer(backend):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(flat(q), flat(k), flat(v), is_causal=True, enable_gqa=True)

    yield Row(f"attention causal {batch} x {length}, {heads}/{kv_heads} x {width}", size(q, k, v, q),
              rlk=lambda: ops.attention(q, k, v, causal=True), cudnn=lambda: peer(SDPBackend.CUDNN_ATTENTION),
              flash=lambda: peer(SDPBackend.FLASH_ATTENTION))


def all_rows():
    for tokens in (1, 64, 1000, 8192, 32768):
        yield from rms_norm_rows(tokens, 4096)
    for tokens, width in ((262144, 128), (65536, 256), (65536, 512), (32768, 1024), (65536, 2048)):
        yield from rms_norm_rows(tokens, width)
    for heads in (32768, 262144):
        yield from gated_norm_rows(heads, 128)
    for tokens in (1, 64, 1000, 8192, 32768):
        yield from qk_norm_rope_rows(tokens)
    for tokens in (1, 64, 1000, 8192):
        yield from swiglu_rows(tokens, 12288)
    yield from swiglu_rows(8192, 4096)
    for tokens in (64, 8192, 32768):
        yield from short_conv_rows(tokens, 4096)
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


def runnable(kind, candidate):
    """A function without arguments; torch.compile's, where the row says what to compile."""
    if not isinstance(candidate, tuple):
        return candidate
    if candidate[0] not in ("backward", "both"):
        function = torch.compile(candidate[0])
        return lambda: function(*candidate[1:])
    mode, body, leaves, cotangent = candidate
    function = torch.compile(body)
    if mode == "both":
        return lambda: torch.autograd.grad(function(*leaves), leaves, cotangent)
    value = function(*leaves)
    return lambda: torch.autograd.grad(value, leaves, cotangent, retain_graph=True)


def captured(run, calls):
    """A graph of some calls, or None with the reason why it cannot be captured."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(calls):
            run()
    return graph


def measure(row, rounds, compiles):
    calls = 1 if row.calls * row.moved > 2**30 else 4
    half = row.moved // 2
    source, target = (torch.empty(half, device="cuda", dtype=torch.uint8) for _ in range(2))
    graphs, failures = {}, {}
    for kind, candidate in [*row.candidates.items(), ("copy", lambda: target.copy_(source))]:
        if kind == "compiled" and not compiles:
            continue
        try:
            graphs[kind] = captured(runnable(kind, candidate), calls)
        except Exception as error:  # a peer that is not there, or an op that nobody serves
            failures[kind] = str(error).splitlines()[0][:150]
            torch.cuda.synchronize()
    times = {kind: [] for kind in graphs}
    for turn in range(rounds + 2):
        for kind, graph in graphs.items():
            start, end = torch.cuda.Event(True), torch.cuda.Event(True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= 2:
                times[kind].append(start.elapsed_time(end) * 1000 / calls / (1 if kind == "copy" else row.calls))
    return {kind: statistics.median(t) for kind, t in times.items()}, failures


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--only", nargs="+", default=["*"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-compile", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(1)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, us; `of copy` = copy's time / ours, `of peer` = best peer's / ours")
    print(f"{'':52}{'rlk':>9}{'copy':>9}{'of copy':>9}{'GB/s':>7}{'torch':>9}{'compiled':>9}{'cudnn':>9}{'flash':>9}{'of peer':>9}")
    results = []
    for row in all_rows():
        if not any(fnmatch.fnmatch(row.name, pattern) for pattern in given.only):
            continue
        us, failures = measure(row, given.rounds, not given.no_compile)
        peers = [t for kind, t in us.items() if kind not in ("rlk", "copy")]
        ours = us.get("rlk")
        text = lambda t, form=".1f": f"{t:{form}}" if t is not None else "-"  # noqa: E731
        print(f"{row.name:52}{text(ours):>9}{text(us['copy']):>9}{text(ours and us['copy'] / ours, '.2f'):>9}"
              f"{text(ours and row.moved / ours / 1000, '.0f'):>7}" +
              "".join(f"{text(us.get(kind)):>9}" for kind in ("torch", "compiled", "cudnn", "flash")) +
              f"{text(min(peers) / ours if peers and ours else None, '.2f'):>9}", flush=True)
        for kind, why in failures.items():
            print(f"    {kind}: {why}", flush=True)
        results.append({"name": row.name, "bytes": row.moved, "us": us, "failures": failures})
        torch.cuda.empty_cache()
    if given.json:
        with open(given.json, "w") as out:
            json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": results}, out, indent=1)


if __name__ == "__main__":
    main()
