"""The peer of attention_cuda_bench: scaled_dot_product_attention of PyTorch, its cuDNN and its flash kernels, on the same shapes.

Needs a GPU and torch. One line of JSON for every shape and kernel: medians in microseconds.
"""
import json
import statistics
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


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
    for name, backend in PEERS.items():
        row = {"peer": name, "batch": batch, "queries": queries, "keys": keys, "heads": f"{heads}/{kv_heads}",
               "width": f"{width}/{value_width or width}"}
        try:
            with sdpa_kernel(backend):
                row["us"] = median(lambda: scaled_dot_product_attention(q, k, v, is_causal=queries > 1, enable_gqa=True))
        except RuntimeError as error:  # not every kernel takes every width
            row["error"] = str(error).splitlines()[0]
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

    inputs = normal(heads), normal(kv_heads), normal(kv_heads)
    for name, backend in PEERS.items():
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
            d_out = torch.randn_like(out)
            us = median(lambda: torch.autograd.grad(out, inputs, d_out, retain_graph=True))
        print(json.dumps({"peer": name, "gradients": "all", "batch": batch, "tokens": tokens, "us": us}), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["backward"]:
        measure_backward(4, 4096)
        measure_backward(1, 8192)
        sys.exit()
    if sys.argv[1:] == ["decode"]:
        decode()
        sys.exit()
    if sys.argv[1:] != ["wide"]:
        narrow()
    wide()
