"""The peer of attention_cuda_bench: scaled_dot_product_attention of PyTorch, its cuDNN and its flash kernels, on the same shapes.

Needs a GPU and torch. One line of JSON for every shape and kernel: medians in microseconds.
"""
import json
import statistics

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


def measure(batch, queries, keys, heads=32, kv_heads=8, width=128):
    def normal(tokens, count):
        return torch.randn(batch, count, tokens, width, device="cuda", dtype=torch.bfloat16)

    q, k, v = normal(queries, heads), normal(keys, kv_heads), normal(keys, kv_heads)
    for name, backend in PEERS.items():
        with sdpa_kernel(backend):
            us = median(lambda: scaled_dot_product_attention(q, k, v, is_causal=queries > 1, enable_gqa=True))
        print(json.dumps({"peer": name, "batch": batch, "queries": queries, "keys": keys, "us": us}), flush=True)


if __name__ == "__main__":
    measure(1, 8192, 8192)
    measure(4, 4096, 4096)
    for batch in (1, 16):
        for keys in (2048, 16384, 65536):
            measure(batch, 1, keys)
