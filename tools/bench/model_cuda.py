"""Tokens per second of rlk.model on a GPU: training, prefill, decode, beside the same model on PyTorch's kernels, in one run.

    PYTHONPATH=build/release/python python3 tools/bench/model_cuda.py --model qwen3-0.6b qwen3-8b [--layers N] [--check]

The peer has the same shapes, bf16 and packed weights: F.linear (cuBLAS), scaled_dot_product_attention (the fastest of its kernels),
everything between them compiled by torch.compile (one block, for all layers), its decode step captured in a CUDA graph over a dense
cache, its loss by F.cross_entropy on logits, its training step as it comes or captured as ours is, whichever is faster. Medians of --rounds
runs that take turns; training steps of a model whose gradients do not fit twice run one after the other. --check first compares the sampler's eager and
captured steps, bit for bit, and what it drew with what the trainer scores."""

import argparse
import gc
import statistics
import time

import torch
import torch.nn.functional as F

import rlk
import rlk.model
import rlk.sampler
import rlk.trainer


#: Steps of decoding in a row, as a server takes them: the sampler begins the next one before the host looks at the last.
MANY = 10


def many(step):
    return lambda: [step() for _ in range(MANY)]


def seconds(run, rounds):
    """Of each of `rounds` runs, the GPU done."""
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return found


# ---- the peer ----


def rotated(x, cos, sin):
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def before_attention(added, stream, norm, qkv, q_norm, k_norm, cos, sin, heads, kv_heads, dim, eps):
    stream = added if stream is None else stream + added
    x = F.linear(F.rms_norm(stream, (stream.shape[-1],), norm, eps), qkv)
    q, k, v = x.unflatten(-1, (-1, dim)).split([heads, kv_heads, kv_heads], -2)
    q, k = F.rms_norm(q, (dim,), q_norm, eps), F.rms_norm(k, (dim,), k_norm, eps)
    return rotated(q, cos, sin), rotated(k, cos, sin), v, stream


def after_attention(x, stream, out, mlp_norm, gate_up, down, eps):
    stream = stream + F.linear(x.flatten(-2), out)
    gate, up = F.linear(F.rms_norm(stream, (stream.shape[-1],), mlp_norm, eps), gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down), stream


class Peer:
    def __init__(self, model, compiled):
        self.model, self.config = model, model.config
        wrap = torch.compile if compiled else (lambda f: f)
        self.before, self.after = wrap(before_attention), wrap(after_attention)

    def hidden(self, tokens, positions, attend):
        """[B, S, width] for tokens [B, S]."""
        c, m = self.config, self.model
        cos, sin = m.cos[positions][..., None, :], m.sin[positions][..., None, :]
        added, stream = F.embedding(tokens, m.embed), None
        for i, b in enumerate(m.blocks):
            q, k, v, stream = self.before(added, stream, b.norm, b.qkv, b.q_norm, b.k_norm, cos, sin, c.heads, c.kv_heads,
                                          c.head_dim, c.eps)
            x = attend(i, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)
            added, stream = self.after(x, stream, b.out, b.mlp_norm, b.gate_up, b.down, c.eps)
        return F.rms_norm(stream + added, (c.width,), m.norm, c.eps)

    def dense(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return self.hidden(tokens, positions, lambda i, q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True,
                                                                                                   enable_gqa=True))

    def loss(self, tokens):
        logits = F.linear(self.dense(tokens)[:, :-1], self.model.head_weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class PeerDecode:
    """One token for each of B sequences of `length` cached tokens, as one CUDA graph: model, softmax, draw."""

    def __init__(self, peer, batch, length, steps):
        c, self.peer = peer.config, peer
        device = peer.model.device
        self.k, self.v = (torch.zeros(c.layers, batch, c.kv_heads, length + steps, c.head_dim, dtype=torch.bfloat16,
                                      device=device) for _ in range(2))
        self.tokens = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.place = torch.full((1,), length, device=device)
        self.columns = torch.arange(length + steps, device=device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            for _ in range(3):
                self.compute()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self.graph):
            self.compute()
        self.place.fill_(length)

    def compute(self):
        seen = (self.columns <= self.place)[None, None, None]

        def attend(i, q, k, v):
            self.k[i].index_copy_(2, self.place, k)
            self.v[i].index_copy_(2, self.place, v)
            return F.scaled_dot_product_attention(q, self.k[i], self.v[i], attn_mask=seen, enable_gqa=True)

        hidden = self.peer.hidden(self.tokens, self.place.expand(len(self.tokens), 1), attend)
        logp = torch.log_softmax(F.linear(hidden[:, -1], self.peer.model.head_weight).float(), -1)
        token = torch.multinomial(logp.exp(), 1)
        self.drawn = token, logp.gather(1, token)
        self.tokens.copy_(token)
        self.place.add_(1).clamp_(max=len(self.columns) - 1)

    def step(self):
        self.graph.replay()
        self.drawn[0].tolist(), self.drawn[1].tolist()  # a server looks at them


# ---- ours ----


def decoding(model, batch, length, steps, **options):
    """A sampler whose sequences all have `length` tokens in the cache and draw from now on."""
    draw = torch.Generator().manual_seed(1)
    pages = batch * (-(-(length + steps + 1) // 64) + 1)
    sampler = rlk.sampler.Sampler(model, pages=pages, page_size=64, chunk=4096, batch=batch, reuse=False, **options)
    for i in range(batch):
        sampler.add(rlk.sampler.Request(torch.randint(model.config.vocab, (length,), generator=draw).tolist(), most=steps, stream=i))
    while any(len(s.tokens) - s.cached > 1 for s in sampler.running) or not sampler.running:
        sampler.step()
    return sampler


def train(model, peer, tokens, cu, rounds, profiled):
    """Seconds of ours and of the peer's forward and backward, captured; the peer's also as it comes."""
    ours = rlk.trainer.Step(model, lambda tokens, cu: -model.score(tokens, cu).sum() / len(tokens))
    theirs = {"captured": rlk.trainer.Step(model, peer.loss), "as it comes": rlk.trainer.Step(model, peer.loss, graphs=0)}
    dense = tokens.view(len(cu) - 1, -1)
    runs = {"ours": lambda: ours(tokens, cu)} | {name: lambda step=step: step(dense) for name, step in theirs.items()}
    small = sum(p.numel() for p in model.parameters()) < 2e9
    found = {}
    for name in runs if not small else ("as it comes", "ours", "captured"):
        try:
            seconds(runs[name], 2)
            if not small:
                found[name] = seconds(runs[name], rounds)
                print(f"    {name}: {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB", flush=True)
                ours._captured.clear(), theirs["captured"]._captured.clear()
                clean(model)
        except torch.OutOfMemoryError as error:
            print(f"    {name}: {str(error).splitlines()[0][:100]}", flush=True)
            clean(model)
    if small:
        found = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                found[name] += seconds(run, 1)
    if profiled:
        profile(runs["ours"])
    peers = {name: found[name] for name in theirs if name in found}
    for name, times in peers.items():
        print(f"    torch {name}: {statistics.median(times) * 1e3:.2f} ms", flush=True)
    best = min(peers.values(), key=statistics.median, default=None)
    if "ours" in found and best:
        report(f"training step, {len(cu) - 1} x {len(tokens) // (len(cu) - 1)}", len(tokens), found["ours"], best)


def clean(model):
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def check(model):
    """Eager and captured steps have the same bits, and the trainer's score is the sampler's."""
    draw = torch.Generator().manual_seed(3)
    requests = [rlk.sampler.Request(torch.randint(model.config.vocab, (5 + 29 * i,), generator=draw).tolist(), most=4 + 9 * i, seed=2,
                                    stream=i) for i in range(5)]
    eager, graphs = (rlk.sampler.Sampler(model, pages=200, graphs=g).run(requests) for g in (False, True))
    same = [(a.tokens, a.logp) for a in eager] == [(a.tokens, a.logp) for a in graphs]
    rows = [r.prompt + a.tokens for r, a in zip(requests, graphs)]
    cu = torch.tensor([0, *map(len, rows)], dtype=torch.int32).cumsum(0).to(torch.int32).to(model.device)
    with torch.no_grad():
        scored = model.score(torch.tensor(sum(rows, []), device=model.device), cu).tolist()
    starts = [int(c) for c in cu]
    agree = all(scored[starts[i] + len(r.prompt):starts[i + 1]] == a.logp for i, (r, a) in enumerate(zip(requests, graphs)))
    print(f"eager steps and captured ones: {'same bits' if same else 'DIFFER'}; sampled and scored: "
          f"{'same bits' if agree else 'DIFFER'} ({sum(len(a.tokens) for a in graphs)} tokens)", flush=True)


def report(name, tokens, ours, peers):
    mine, theirs = statistics.median(ours), statistics.median(peers)
    print(f"{name:34}{tokens / mine:12.0f}{tokens / theirs:12.0f}{theirs / mine:8.2f}{mine * 1e3:10.2f}{theirs * 1e3:10.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["qwen3-0.6b"])
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 16, 128], help="sequences that decode")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--length", type=int, default=1024, help="cached tokens of a sequence that decodes")
    parser.add_argument("--eager-peer", action="store_true", help="the peer without torch.compile")
    parser.add_argument("--profile", action="store_true", help="what a decode step and a training step spend their time on")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    for name in given.model:
        measure(name, given)


def measure(name, given):
    shape = rlk.model.config(name, **({"layers": given.layers} if given.layers else {}))
    model = rlk.model.Decoder(shape, seed=None, dtype=torch.bfloat16, device="cuda")
    print(f"{name}: {torch.cuda.get_device_name()}, torch {torch.__version__}, {shape.layers} layers, bf16", flush=True)
    if given.check:
        check(model)
    peer = Peer(model, not given.eager_peer)
    print(f"{'':34}{'tokens/s':>12}{'torch':>12}{'ratio':>8}{'ms':>10}{'torch ms':>10}")
    for batch in given.batch:
        decode(model, peer, batch, given)
        clean(model)
    tokens = torch.randint(shape.vocab, (8192,), device="cuda")
    with torch.no_grad():
        cu = torch.tensor([0, 8192], dtype=torch.int32, device="cuda")
        runs = lambda: model.packed(tokens, cu), lambda: peer.dense(tokens[None])  # noqa: E731
        for run in runs:
            seconds(run, 2)
        report("prefill, 1 x 8192", 8192, *zip(*((seconds(runs[0], 1)[0], seconds(runs[1], 1)[0]) for _ in range(given.rounds))))
        if given.profile:
            profile(runs[0])
    clean(model)
    train(model, peer, tokens[:4096], torch.arange(0, 4097, 1024, dtype=torch.int32, device="cuda"), given.rounds, given.profile)


def decode(model, peer, batch, given):
    steps = MANY * (given.rounds + 1) + 8
    ours, theirs = decoding(model, batch, given.length, steps + 2 * batch), PeerDecode(peer, batch, given.length, steps)
    for run in (ours.step, theirs.step):
        seconds(many(run), 1)
    report(f"decode, {batch} x {given.length} cached", MANY * batch,
           *zip(*((seconds(many(ours.step), 1)[0], seconds(many(theirs.step), 1)[0]) for _ in range(given.rounds))))
    if given.profile:
        profile(ours._last.graph.replay)


def profile(run):
    from torch.profiler import ProfilerActivity
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    kernels = sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in kernels)
    named = [f"{e.key.replace('void ', '').replace('rlk::', '')[:52]} x{e.count} {e.self_device_time_total / 1e3:.2f}"
             for e in kernels[:24] if e.self_device_time_total]
    print(f"    kernels {total / 1e3:.2f} ms; " + "; ".join(named))


if __name__ == "__main__":
    main()
