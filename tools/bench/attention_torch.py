"""Peers of attention_cuda_bench on the same shapes: PyTorch's scaled_dot_product_attention, its cuDNN and its flash
kernels, and FlashAttention-4 (fa4) where it can be imported.

Needs a GPU and torch. One line of JSON for every shape and kernel: medians in microseconds.
"""
import contextlib
import json
import statistics
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import others

PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def peers(*inputs, causal):
    """By name: what a call is inside of, the call, and its inputs, [batch, heads, tokens, width] but for fa4."""
    for name, backend in PEERS.items():
        yield name, sdpa_kernel(backend), \
            lambda *t: scaled_dot_product_attention(*t, is_causal=causal, enable_gqa=True), inputs
    if flash := others.module("flash_attn.cute"):
        yield "fa4", contextlib.nullcontext(), lambda *t: flash.flash_attn_func(*t, causal=causal)[0], \
            [t.detach().transpose(1, 2).contiguous().requires_grad_(t.requires_grad) for t in inputs]


def median(run, rounds=15, calls=4):
    times = []
    for i in range(rounds + 3):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)


def measure(batch, queries, keys, heads=32, kv_heads=8, width=128, value_width=None):
    def normal(tokens, count, width):
        return torch.randn(batch, count, tokens, width, device="cuda", dtype=torch.bfloat16)

    q, k, v = normal(queries, heads, width), normal(keys, kv_heads, width), normal(keys, kv_heads, value_width or width)
    for name, inside, call, inputs in peers(q, k, v, causal=queries > 1):
        row = {"peer": name, "batch": batch, "queries": queries, "keys": keys, "heads": f"{heads}/{kv_heads}",
               "width": f"{width}/{value_width or width}"}
        try:
            with inside:
                row["us"] = median(lambda: call(*inputs))
        except Exception as error:  # not every kernel takes every width
            row["error"] = (str(error) or type(error).__name__).splitlines()[0][:200]
        print(json.dumps(row), flush=True)


def wide():
    measure(1, 8192, 8192, 16, 2, 256)
    measure(1, 8192, 8192, 16, 16, 192, 128)
    for keys in (2048, 16384, 65536):
        measure(1, 1, keys, 16, 2, 256)
        measure(16, 1, keys, 16, 2, 256)


def narrow():
    measure(1, 8192, 8192)
    measure(4, 4096, 4096)
    measure(4, 4096, 4096, 64, 8, 64)
    for batch in (1, 16):
        for keys in (2048, 16384, 65536):
            measure(batch, 1, keys)


def decode():
    for group in (1, 2, 4, 8):
        for batch in (1, 16, 128):
            for keys in (1024, 8192, 32768):
                if batch * keys <= 1 << 20:
                    measure(batch, 1, keys, 8 * group)


def measure_backward(batch, tokens, heads=32, kv_heads=8, width=128):
    def normal(count):
        return torch.randn(batch, count, tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    for name, inside, call, inputs in peers(normal(heads), normal(kv_heads), normal(kv_heads), causal=True):
        row = {"peer": name, "gradients": "all", "batch": batch, "tokens": tokens, "heads": f"{heads}/{kv_heads}"}
        try:
            with inside:
                out = call(*inputs)
                d_out = torch.randn_like(out)
                row["us"] = median(lambda: torch.autograd.grad(out, inputs, d_out, retain_graph=True))
        except Exception as error:
            row["error"] = (str(error) or type(error).__name__).splitlines()[0][:200]
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["backward"]:
        measure_backward(4, 4096)
        measure_backward(1, 8192)
        measure_backward(8, 2048, 16)
        sys.exit()
    if sys.argv[1:] == ["decode"]:
        decode()
        sys.exit()
    if sys.argv[1:] != ["wide"]:
        narrow()
    wide()
