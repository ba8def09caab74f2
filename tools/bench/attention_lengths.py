#!/usr/bin/env python3
"""attention over lengths beside others' kernels: one sequence's prefill and gradients, and a new token of each of many.

  tools/bench/attention_lengths.py [--json FILE] [--rounds N] [--most TOKENS] [prefill] [gradients] [decode] [gradients_256]
                                   [gradients_192] [prompt] [decode_one] [decode_pages] [chunk] [packs] [packs_any]
                                   [chunks]

bf16, 32 heads on 8 of width 128, causal; those of wide heads 16 on 2 of 256, and 16 of 192 with values of 128. prompt: forward
and gradients of eight samples, each a quarter of their prompt, that share its keys, or have copies of them. decode_one: of one
sequence; decode_pages: of 16 sequences of any lengths up to that, in pages of 64 tokens, of 16 bits and of fp8; chunk: the
last 512 tokens of a prefill. packs: 16,384 tokens in packed sequences of one length, packs_any: of any up to twice that;
chunks: the last 64 tokens of 16 packed sequences of any lengths up to that. Needs a GPU, torch and rlk's Python. Peers are
PyTorch's cuDNN kernel, FlashAttention-3 (flash_attn_interface), FlashAttention-4 (flash_attn.cute) and FlashInfer's FA3
template and decoding kernel, where they can be imported. Kernels of a length run by turns in CUDA graphs; medians. Caches of a
decode are copies that L2 does not hold.
tools/bench/plot.py draws what --json leaves as registry/attention/lengths.json.
"""
import argparse
import json
import statistics
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import others

HEADS, KV_HEADS, WIDTH = 32, 8, 128
LENGTHS = {"prefill": [512, 1024, 2048, 3000, 4096, 6000, 8192, 12000, 16384, 32768],
           "gradients": [512, 1024, 2048, 3000, 4096, 6000, 8192, 12000, 16384],
           "decode": [512, 1024, 2048, 4096, 5000, 8192, 16384, 32768],
           "gradients_256": [512, 1024, 2048, 3000, 4096, 8192, 16384],
           "gradients_192": [512, 1024, 2048, 3000, 4096, 8192, 16384],
           "prompt": [512, 1024, 4096, 8192],
           "decode_one": [512, 1024, 2048, 3000, 4096, 8192, 16384, 32768, 65536],
           "decode_pages": [1024, 2048, 4096, 8192, 16384, 32768],
           "chunk": [1024, 2048, 4096, 8192, 16384, 32768],
           "packs": [64, 128, 256, 1024, 4096],
           "packs_any": [64, 256, 1000, 4096],
           "chunks": [1024, 2048, 4096, 8192]}
USUAL = ["prefill", "chunk", "gradients", "decode"]
SEQUENCES = 16  # of a decode
PACK = 16384  # tokens
L2 = 256 << 20


def normal(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def cudnn(q, k, v, causal):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=causal, enable_gqa=True).transpose(1, 2)


def first(x):
    return x[0] if isinstance(x, tuple) else x


def forwards():
    """By name: a function of q, k, v [sequences, tokens, heads, width]."""
    found = {"cuDNN": cudnn}
    if flash := others.module("flash_attn_interface"):
        found["FlashAttention-3"] = lambda q, k, v, causal: first(flash.flash_attn_func(q, k, v, causal=causal))
    if cute := others.module("flash_attn.cute"):
        found["FlashAttention-4"] = lambda q, k, v, causal: first(cute.flash_attn_func(q, k, v, causal=causal))
    return found


def prefill(tokens):
    import rlk.torch as ops
    q, k, v = normal(1, tokens, HEADS, WIDTH), normal(1, tokens, KV_HEADS, WIDTH), normal(1, tokens, KV_HEADS, WIDTH)
    calls = {"rlk": [lambda: ops.attention(q, k, v, causal=True, out=True, lse=True)]}
    calls |= {name: [lambda f=f: f(q, k, v, True)] for name, f in forwards().items()}
    if flashinfer := others.module("flashinfer.prefill"):
        def prepare():
            bounds = torch.tensor([0, tokens], device="cuda", dtype=torch.int32)
            run = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(scratch(), "NHD", backend="fa3")
            run.plan(bounds, bounds, HEADS, KV_HEADS, WIDTH, causal=True, q_data_type=q.dtype, kv_data_type=q.dtype)
            return [lambda: run.run(q[0], k[0], v[0])]
        calls["FlashInfer"] = prepare
    return calls, 2 * HEADS * tokens * tokens * WIDTH * 1e-12


def gradients(tokens, heads=HEADS, kv_heads=KV_HEADS, width=WIDTH, values=WIDTH):
    import rlk.torch as ops
    shapes = [(1, tokens, heads, width), (1, tokens, kv_heads, width), (1, tokens, kv_heads, values)]
    q, k, v = (normal(*shape).requires_grad_() for shape in shapes)
    d_out = normal(1, tokens, heads, values)
    with torch.no_grad():
        out, lse = ops.attention(q, k, v, causal=True, out=True, lse=True)
    own = [torch.empty_like(t) for t in (q, k, v)]

    def ours():
        with torch.no_grad():
            ops.attention_bwd(q, k, v, out=out, lse=lse, d_out=d_out, d_q=own[0], d_k=own[1], d_v=own[2], causal=True)

    def theirs(f):
        def prepare():
            result = f(q, k, v, True)
            return [lambda: torch.autograd.grad(result, (q, k, v), d_out, retain_graph=True)]
        return prepare

    work = heads * tokens * tokens * (3 * width + 2 * values) * 1e-12
    return {"rlk": [ours]} | {name: theirs(f) for name, f in forwards().items()}, work


def gradients_256(tokens):
    return gradients(tokens, 16, 2, 256, 256)


def gradients_192(tokens):
    return gradients(tokens, 16, 16, 192, 128)


def prompt(tokens):
    """The prompt has queries once where it is shared, and in every sample where it is copied."""
    import rlk.torch as ops
    samples, own = 8, tokens // 4

    def call(lengths, prefix_of):
        bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
        rows = sum(lengths)
        q, k, v = normal(rows, HEADS, WIDTH), normal(rows, KV_HEADS, WIDTH), normal(rows, KV_HEADS, WIDTH)
        d_out, results = normal(rows, HEADS, WIDTH), [torch.empty_like(t) for t in (q, k, v)]

        def run():
            with torch.no_grad():
                out, lse = ops.attention(q, k, v, bounds, bounds, prefix_of=prefix_of, lse=True)
                ops.attention_bwd(q, k, v, bounds, bounds, prefix_of=prefix_of, out=out, lse=lse, d_out=d_out,
                                  d_q=results[0], d_k=results[1], d_v=results[2])
        return [run]

    prefix_of = torch.tensor([-1] + [0] * samples, device="cuda", dtype=torch.int32)
    work = 14 * HEADS * WIDTH * (tokens * tokens / 2 + samples * own * (tokens + own / 2)) * 1e-12
    return {"rlk": call([tokens] + [own] * samples, prefix_of), "rlk, copies": call([tokens + own] * samples, None)}, work


def decode(keys, sequences=SEQUENCES):
    import rlk.torch as ops
    size = 2 * sequences * keys * KV_HEADS * WIDTH * 2
    q = normal(sequences, 1, HEADS, WIDTH)
    caches = [[normal(sequences, keys, KV_HEADS, WIDTH) for _ in range(2)] for _ in range(-(-L2 // size))]
    calls = {"rlk": [lambda c=c: ops.attention(q, *c, causal=True, out=True) for c in caches],
             "cuDNN": [lambda c=c: cudnn(q, *c, False) for c in caches]}
    if flash := others.module("flash_attn_interface"):
        calls["FlashAttention-3"] = [lambda c=c: flash.flash_attn_with_kvcache(q, *c) for c in caches]
    if flashinfer := others.module("flashinfer.decode"):
        def prepare():
            page = 16
            while keys % page:
                page //= 2
            pages = sequences * keys // page
            begins = torch.arange(sequences + 1, device="cuda", dtype=torch.int32) * (keys // page)
            last = torch.full((sequences,), page, device="cuda", dtype=torch.int32)
            run = flashinfer.BatchDecodeWithPagedKVCacheWrapper(scratch(), "NHD", use_tensor_cores=True, backend="fa2")
            run.plan(begins, torch.arange(pages, device="cuda", dtype=torch.int32), last, HEADS, KV_HEADS, WIDTH, page,
                     q_data_type=q.dtype, kv_data_type=q.dtype)
            paged = [tuple(t.view(pages, page, KV_HEADS, WIDTH) for t in c) for c in caches]
            return [lambda c=c: run.run(q[:, 0], c) for c in paged]
        calls["FlashInfer"] = prepare
    return calls, size * 1e-12


def decode_one(keys):
    return decode(keys, 1)


def decode_pages(keys, page=64):
    import rlk.torch as ops
    lengths = torch.randint(1, keys + 1, (SEQUENCES,), device="cuda", dtype=torch.int32)
    size = 2 * int(lengths.sum()) * KV_HEADS * WIDTH * 2
    q, pages = normal(SEQUENCES, 1, HEADS, WIDTH), SEQUENCES * keys // page
    table = torch.randperm(pages, device="cuda").to(torch.int32).view(SEQUENCES, -1)
    caches = [[normal(pages, page, KV_HEADS, WIDTH) for _ in range(2)] for _ in range(-(-L2 // size))]
    halves = [[t.to(torch.float8_e4m3fn) for t in c] for c in caches]
    scale = torch.ones(1, device="cuda")
    calls = {"rlk": [lambda c=c: ops.attention(q, *c, kv_len=lengths, block_table=table, out=True) for c in caches],
             "rlk, fp8": [lambda c=c: ops.attention(q, *c, kv_len=lengths, block_table=table, k_scale=scale, v_scale=scale, out=True)
                          for c in halves]}
    if flash := others.module("flash_attn_interface"):
        calls["FlashAttention-3"] = [lambda c=c: flash.flash_attn_with_kvcache(q, *c, cache_seqlens=lengths, page_table=table)
                                     for c in caches]
    return calls, size * 1e-12


def chunk(keys, tokens=512):
    import rlk.torch as ops
    q, k, v = normal(1, tokens, HEADS, WIDTH), normal(1, keys, KV_HEADS, WIDTH), normal(1, keys, KV_HEADS, WIDTH)
    calls = {"rlk": [lambda: ops.attention(q, k, v, causal=True, out=True, lse=True)]}
    if flash := others.module("flash_attn_interface"):
        calls["FlashAttention-3"] = [lambda: first(flash.flash_attn_func(q, k, v, causal=True))]
    return calls, 4 * HEADS * tokens * (keys - tokens / 2) * WIDTH * 1e-12


def packed(lengths, new=None):
    """Sequences one behind the other, all of their tokens or the `new` last ones of each."""
    import rlk.torch as ops
    queries = lengths if new is None else [new] * len(lengths)
    bounds = [torch.tensor([0, *x], device="cuda").cumsum(0).to(torch.int32) for x in (queries, lengths)]
    q, k, v = normal(sum(queries), HEADS, WIDTH), normal(sum(lengths), KV_HEADS, WIDTH), normal(sum(lengths), KV_HEADS, WIDTH)
    calls = {"rlk": [lambda: ops.attention(q, k, v, *bounds, causal=True, lse=True)]}
    if flash := others.module("flash_attn_interface"):
        longest, splits = (max(queries), max(lengths)), 1 if new is None else 0  # 0: as many as it thinks best
        calls["FlashAttention-3"] = [
            lambda: first(flash.flash_attn_varlen_func(q, k, v, *bounds, *longest, causal=True, num_splits=splits))]
    return calls, 4 * HEADS * WIDTH * sum(n * (m - n / 2) for n, m in zip(queries, lengths)) * 1e-12


def packs(tokens):
    return packed([tokens] * (PACK // tokens))


def packs_any(tokens):
    return packed(torch.randint(1, 2 * tokens + 1, (PACK // tokens,)).tolist())


def chunks(keys, new=64):
    return packed(torch.randint(new, keys + 1, (SEQUENCES,)).tolist(), new)


def scratch():
    if not hasattr(scratch, "kept"):
        scratch.kept = torch.zeros(512 << 20, device="cuda", dtype=torch.uint8)
    return scratch.kept


def captured(calls, least_us=1500):
    """A graph of calls that take a while together, how many they are, and the calls, whose memory it uses."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        if not isinstance(calls, list):
            calls = calls()
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        for _ in range(2):  # the first call may compile
            start.record()
            for call in calls:
                call()
            end.record()
        stream.synchronize()
        repeat = max(1, min(64, round(least_us / max(1e3 * start.elapsed_time(end), 1))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeat):
                for call in calls:
                    call()
    return graph, repeat * len(calls), calls


def measure(calls, rounds):
    graphs, times = {}, {}
    for name, call in calls.items():
        try:
            graphs[name] = captured(call)
        except Exception as error:
            torch.cuda.synchronize()
            print(f"  {name}: {(str(error).splitlines() or [type(error).__name__])[0][:150]}", file=sys.stderr, flush=True)
    for _ in range(rounds + 1):
        for name, (graph, count, _) in graphs.items():
            start, end = torch.cuda.Event(True), torch.cuda.Event(True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.setdefault(name, []).append(1e3 * start.elapsed_time(end) / count)
    return {name: statistics.median(t[1:]) for name, t in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--most", type=int, default=1 << 20)
    parser.add_argument("what", nargs="*", choices=[*LENGTHS, []], default=[])
    words = parser.parse_args()
    card = torch.cuda.get_device_name().removeprefix("NVIDIA ")
    result = {"title": f"attention beside others' kernels, one {card}, bf16, {HEADS} heads on {KV_HEADS} of width {WIDTH}, causal",
              "us": {}, "work": {}}
    for what in words.what or USUAL:
        unit = "TB/s" if what.startswith("decode") else "TFLOP/s"
        for length in (x for x in LENGTHS[what] if x <= words.most):
            torch.manual_seed(length)
            calls, work = globals()[what](length)
            times = measure(calls, words.rounds)
            result["us"].setdefault(what, {})[length] = {name: round(t, 2) for name, t in times.items()}
            result["work"].setdefault(what, {})[length] = work
            print(f"{what} {length}:", ", ".join(f"{name} {t:.1f} us {work / t * 1e6:.4g}" for name, t in times.items()), unit, flush=True)
            if words.json:
                with open(words.json, "w") as file:
                    json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
