#!/usr/bin/env python3
"""rlk.parallel on the GPUs of one host: its bits beside those of one GPU, then its times beside NCCL's all-reduce and cuBLAS.

    PYTHONPATH=build/release/python python tools/bench/parallel_gpu.py --ranks 2 [--rounds 20] [--bits-only] [--one-gpu] [--no-peers] [--layers 8] [--only sums linears scaling]

Starts a process for each GPU. First a decoder is run at degree 1 on each GPU and over all: rows of every layer, log-probabilities, gradients
of all weights and sampled tokens are compared by digest. Then, microseconds, medians over rounds in which candidates take turns, the
slowest rank's: the sum over ranks of [M, N]; a row-parallel linear with its sum, from bf16 operands to a bf16 result on all ranks; and
layers of qwen3-8b with attention, decoding and training, on one GPU and on all. Everything is captured, so none waits for Python. --one-gpu starts all ranks on one GPU, sums through symmetric memory and the rest over gloo: the bits
alone, where there is no second GPU.
"""

import argparse
import datetime
import hashlib
import os
import socket
import statistics
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import rlk
import rlk.model
import rlk.parallel as parallel
import rlk.torch
import rlk.trainer
from rlk import _peer, sampler, verify_model
from rlk.parallel import ops

SHAPE = rlk.model.Config(1024, 1024, 2, 16, 8, 128, 3072, max_length=512)


def digest(tensors):
    h = hashlib.sha256()
    for t in tensors:
        h.update(t.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes())
    return h.hexdigest()[:12]


def proof(group):
    """Digests of what a decoder over the group leaves."""
    model = parallel.decoder(rlk.model.Decoder(SHAPE, seed=5, dtype=torch.bfloat16, device="cuda"), group)
    model.whole_notes = True
    sequences = verify_model.corpus(model, 4, 150, 2)
    rows = verify_model.packed(model, sequences).digest()
    tokens = torch.tensor(sum(sequences, []), device="cuda")
    cu = torch.tensor([0, *map(len, sequences)]).cumsum(0).to(torch.int32).cuda()
    logp = model.score(tokens, cu, temperature=0.8)
    (logp * torch.randn(len(tokens), generator=torch.Generator().manual_seed(3)).cuda()).sum().backward()
    gradients = digest(g for _, g in parallel.state(model, gradients=True))
    answers = sampler.Sampler(model, pages=80).run([sampler.Request([3, 1, 4 + i], most=12, seed=4, stream=i) for i in range(6)])
    drawn = hashlib.sha256(repr([(a.tokens, a.logp) for a in answers]).encode()).hexdigest()[:12]
    return {"rows": rows, "logp": digest([logp]), "gradients": gradients, "tokens": drawn}


def compare(group, say):
    alone = proof(parallel.Group(0, 1))
    together = proof(group)
    found = [None] * group.size
    dist.all_gather_object(found, (alone, together))
    good = all(a == b == found[0][0] for a, b in found)
    for name, value in alone.items():
        say(f"bits: {name:10} degree 1 {value}, degree {group.size} {[b[name] for _, b in found]}")
    say("bits: " + ("the same" if good else "DIFFERENT"))
    return good


def times(candidates, rounds, inner=10):
    """Median microseconds of each, the slowest rank's."""
    found = {name: [] for name in candidates}
    for name, call in candidates.items():
        for _ in range(3):
            call()
    for _ in range(rounds):
        for name, call in candidates.items():
            torch.cuda.synchronize()
            dist.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(inner):
                call()
            end.record()
            end.synchronize()
            found[name].append(begin.elapsed_time(end) * 1000 / inner)
    mine = torch.tensor([statistics.median(v) for v in found.values()], device="cuda")
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return dict(zip(candidates, mine.tolist()))


def captured(call):
    """The call as a graph: what the GPU takes, without the time of Python."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def sums(group, rounds, say):
    say(f"{'M':>6} {'N':>6} {'all_reduce':>11} {'gathered':>9} {'exchanged':>10}{'peers':>8}   us, the sum over {group.size} GPUs")
    for m, n in ((1, 4096), (16, 4096), (128, 4096), (1024, 4096), (8192, 4096)):
        partial, wide = torch.randn(m, n, device="cuda"), torch.randn(m, n, device="cuda").to(torch.bfloat16)

        def by(limit, peers=None):
            def call():
                kept, group.peers = group.peers, peers
                ops.GATHERED, before = limit, ops.GATHERED
                try:
                    return ops.join(partial, group, torch.bfloat16)
                finally:
                    ops.GATHERED, group.peers = before, kept
            return call

        ways = {"all_reduce": lambda: dist.all_reduce(wide), "exchanged": by(0)}  # NCCL's result is of bf16, and grows: only its time counts
        if m <= 1024:
            ways["gathered"] = by(1 << 40)
        if getattr(group, "peers", None):
            ways["peers"] = by(ops.GATHERED, group.peers)
        same = len({digest([w()]) for name, w in ways.items() if name != "all_reduce"}) == 1
        found = times({k: captured(w) for k, w in ways.items()}, rounds)
        say(f"{m:6} {n:6} {found['all_reduce']:11.1f} {found.get('gathered', 0):9.1f} {found['exchanged']:10.1f} {found.get('peers', 0):7.1f}   "
            + ("same bits" if same else "DIFFERENT BITS"))


def linears(group, rounds, say):
    say(f"{'M':>6} {'N':>6} {'K':>6} {'cuBLAS + NCCL':>14} {'rlk':>8}   us, row-parallel linear with its sum; ratio of speeds")
    for m, n, k in ((1, 4096, 4096), (16, 4096, 12288), (128, 4096, 4096), (1024, 4096, 12288), (8192, 4096, 12288),
                    (4100, 4096, 4096), (4100, 4096, 12288), (4100, 2560, 9728), (8192, 4096, 4096)):
        x = torch.randn(m, k // group.size, device="cuda").to(torch.bfloat16)
        w = torch.randn(n, k // group.size, device="cuda").to(torch.bfloat16)

        def vendor():
            y = torch.nn.functional.linear(x, w)
            dist.all_reduce(y)
            return y

        with torch.no_grad():
            found = times({"vendor": captured(vendor), "rlk": captured(lambda: parallel.row_linear(x, w, group=group))}, rounds)
        say(f"{m:6} {n:6} {k:6} {found['vendor']:14.1f} {found['rlk']:8.1f}   {found['vendor'] / found['rlk']:.2f}x")


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, d):
        d = d.contiguous()
        dist.all_reduce(d)
        return d


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, d):
        return d


class Vendor:
    """PyTorch's ops, with NCCL's all-reduce over ranks."""

    spread_rows, rows = False, None

    def __init__(self, model):
        self.parts, self.alone = model.ops.parts, model.ops.group.size == 1

    def __getattr__(self, name):
        return getattr(_peer, name)

    def linear(self, x, weight):
        column = self.parts[id(weight)][0].kind == "column"
        if self.alone:
            return torch.nn.functional.linear(x, weight)
        return torch.nn.functional.linear(_Copied.apply(x), weight) if column else _Reduced.apply(torch.nn.functional.linear(x, weight))

    def embedding(self, ids, weight):
        return torch.nn.functional.embedding(ids % len(weight), weight)  # of that size and no more is asked


KEYS, PAGE = 1024, 64


class Attend:
    """Attention of one kind of step, by rlk and by PyTorch: `tokens` of sequences of KEYS, or one more for each of `tokens` sequences."""

    def __init__(self, config, tokens, decode):
        self.decode, device = decode, "cuda"
        heads, dim = config.kv_heads, config.head_dim
        if decode:
            self.k, self.v = (torch.randn(config.layers, tokens * KEYS // PAGE, PAGE, heads, dim, device=device).to(torch.bfloat16) for _ in range(2))
            self.table = torch.arange(tokens * KEYS // PAGE, dtype=torch.int32, device=device).view(tokens, -1)
            self.lengths = torch.full((tokens,), KEYS, dtype=torch.int32, device=device)
            self.cu = torch.arange(tokens + 1, dtype=torch.int32, device=device)
        else:
            self.cu = torch.arange(0, tokens + 1, KEYS, dtype=torch.int32, device=device)

    def ours(self, layer, q, k, v):
        if not self.decode:
            return rlk.torch.attention(q, k, v, self.cu, self.cu)
        self.k[layer, self.table[:, -1].long(), -1], self.v[layer, self.table[:, -1].long(), -1] = k, v
        return rlk.torch.attention(q, self.k[layer], self.v[layer], self.cu, kv_len=self.lengths, block_table=self.table)

    def theirs(self, layer, q, k, v):
        attention = torch.nn.functional.scaled_dot_product_attention
        if not self.decode:
            q, k, v = (t.unflatten(0, (-1, KEYS)).transpose(1, 2) for t in (q, k, v))
            return attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(0, 1)
        self.k[layer, self.table[:, -1].long(), -1], self.v[layer, self.table[:, -1].long(), -1] = k, v
        keys, values = (t[layer].view(len(q), KEYS, *t.shape[-2:]).transpose(1, 2) for t in (self.k, self.v))
        return attention(q[:, :, None], keys, values, enable_gqa=True)[:, :, 0]


def scaling(group, rounds, say):
    """Layers of qwen3-8b: on one GPU and on all."""
    shape = rlk.model.config("qwen3-8b", layers=group.layers, vocab=2048, max_length=8192)
    say(f"{shape.layers} layers of qwen3-8b, us; training is forward and backward: {'torch, 1 GPU':>14} {f'torch, {group.size}':>10} {'rlk, 1':>10} "
        f"{f'rlk, {group.size}':>10}   torch / rlk, rlk's speed-up")
    models = {}
    for name, spread_over in (("1", parallel.Group(0, 1)), (str(group.size), group)):
        model = parallel.decoder(rlk.model.Decoder(shape, seed=None, dtype=torch.bfloat16, device="cuda"), spread_over)
        models[name] = model, model.ops, Vendor(model)
    for tokens, learn in ((1, False), (16, False), (128, False), (4096, True)):
        ids = torch.randint(2048, (tokens,), device="cuda")
        at = (torch.arange(tokens, device="cuda") % KEYS if learn else torch.full((tokens,), KEYS - 1, device="cuda")).to(torch.int32)
        cotangent = torch.randn(tokens, shape.width, device="cuda").to(torch.bfloat16)
        found = {}
        for n, (model, ours, theirs) in models.items():
            attend = Attend(model.config, tokens, not learn)
            ways = {}
            for who, by, sees in (("torch", theirs, attend.theirs), ("rlk", ours, attend.ours)):
                def call(model=model, by=by, sees=sees):
                    model.ops = by
                    with torch.set_grad_enabled(learn):
                        hidden = model(ids, at, sees)
                        loss = (hidden * cotangent).sum() if learn else hidden
                    model.ops = ours  # noqa: B023
                    return loss
                ways[f"{who}, {n}"] = rlk.trainer.Step(model, lambda call=call: call()) if learn else captured(call)
            found |= times(ways, rounds, inner=2 if learn else 10)
            del ways
            torch.cuda.empty_cache()
        one, all_, ours, ours_all = (found[f"{who}, {n}"] for who in ("torch", "rlk") for n in models)
        say(f"{f'training, {tokens} tokens' if learn else f'decoding, {tokens} x {KEYS} cached':>40} {one:18.0f} {all_:10.0f} {ours:10.0f} {ours_all:10.0f}"
            f"   {all_ / ours_all:.2f}x, {ours / ours_all:.2f}x")


def rank(r, given, port):
    """What one process does."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    device, timeout = 0 if given.one_gpu else r, datetime.timedelta(seconds=60)
    os.environ.update(TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NCCL_NVLS_ENABLE="0")
    torch.cuda.set_device(device)
    if given.one_gpu:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        dist.init_process_group("gloo", rank=r, world_size=given.ranks, timeout=timeout)
    else:
        dist.init_process_group("nccl", rank=r, world_size=given.ranks, timeout=timeout, device_id=torch.device("cuda", device))
    group = parallel.as_group(timeout=timeout, **({} if given.no_peers else {"peers": True}))

    def say(text):
        if r == 0:
            print(text, flush=True)

    say(f"{given.ranks} {'ranks on one' if given.one_gpu else 'x'} {torch.cuda.get_device_name()}, torch {torch.__version__}, rlk {rlk.__version__}")
    good = given.no_bits or compare(group, say)
    if not given.bits_only and not given.one_gpu:
        group.layers = given.layers
        for part in [globals()[name] for name in given.only]:
            try:
                part(group, given.rounds, say)
            except Exception as error:  # the same on all ranks, or theirs time out; what was found before is printed
                print(f"rank {r}, {part.__name__}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                good = False
                break
    dist.destroy_process_group()
    sys.exit(0 if good else 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--bits-only", action="store_true")
    parser.add_argument("--one-gpu", action="store_true", help="all ranks on one GPU; the bits alone")
    parser.add_argument("--no-peers", action="store_true", help="NCCL alone, no memory of other GPUs")
    parser.add_argument("--layers", type=int, default=8, help="of qwen3-8b")
    parser.add_argument("--only", nargs="+", choices=("sums", "linears", "scaling"), default=["sums", "linears", "scaling"])
    parser.add_argument("--no-bits", action="store_true", help="times alone")
    given = parser.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.start_processes(rank, (given, port), nprocs=given.ranks, start_method="spawn")


if __name__ == "__main__":
    main()
