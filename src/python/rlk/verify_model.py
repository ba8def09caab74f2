"""The same tokens through every path of a model, compared to the bit, op by op.

    python -m rlk.verify_model tiny-qwen3
    python -m rlk.verify_model tiny-qwen3 --peer torch      # the control: PyTorch's own ops, which differ

The reference is the trainer's packed forward. Beside it: each sequence alone; prefill in one piece and in chunks; a prefix found in the
cache; other pages; other company; and decoding token by token. For every layer the table says whether all rows that a path computed are
those of the reference, or the first op that left other bits. The last columns are the largest difference between log-probabilities
and how many tokens a second the path took (of this small run: no benchmark). 0 is the claim.
"""

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path

import torch

import rlk
import rlk.model
import rlk.sampler
import rlk.torch

_OPS = {"embedding": "embedding", "qkv": "linear", "rope": "rope", "attention": "attention", "stream": "linear", "mlp": "linear",
        "hidden": "rms_norm", "logp": "linear_logp"}


class Rows:
    """What a path left: the bits of every row, by (layer, name) and then by (sequence, position)."""

    def __init__(self):
        self.found, self.order, self.logp, self.seconds, self.tokens = {}, [], {}, 0.0, 0

    def take(self, layer, name, rows, keys):
        if (layer, name) not in self.found:
            self.found[layer, name] = {}
            self.order.append((layer, name))
        flat = rows.detach().flatten(1).contiguous().cpu().view(torch.uint8)
        self.found[layer, name].update(zip(keys, (row.numpy().tobytes() for row in flat)))

    def digest(self):
        """Of all rows, in the order of their keys."""
        h = hashlib.sha256()
        for at in self.order:
            for key in sorted(self.found[at]):
                h.update(repr((at, key)).encode())
                h.update(self.found[at][key])
        return h.hexdigest()[:16]


def packed(model, sequences, each=False):
    """The trainer's forward, of all sequences at once or of each alone."""
    out = Rows()
    groups = [[i] for i in range(len(sequences))] if each else [list(range(len(sequences)))]
    for group in groups:
        keys = [(i, p) for i in group for p in range(len(sequences[i]))]
        tokens = torch.tensor([t for i in group for t in sequences[i]], device=model.device)
        cu = torch.tensor([0, *(len(sequences[i]) for i in group)]).cumsum(0).to(torch.int32).to(model.device)
        started = time.perf_counter()
        with torch.no_grad():
            logp = model.score(tokens, cu, note=lambda layer, name, rows: out.take(layer, name, rows, keys))
        out.logp.update(zip(keys, logp.tolist()))
        out.seconds, out.tokens = out.seconds + time.perf_counter() - started, out.tokens + len(keys)
    return out


class Forced(rlk.sampler.Sampler):
    """A sampler that is told what it draws: its rows are then those of given tokens."""

    def __init__(self, model, sequences, **options):
        super().__init__(model, **options)
        self.sequences = sequences
        self.out = Rows()
        self.note = lambda layer, name, rows, keys: self.out.take(layer, name, rows, [(r.stream, p) for r, p in keys])

    def _draw(self, running, hidden):
        target = torch.tensor([self.sequences[s.request.stream][len(s.tokens)] for s in running], dtype=torch.int32)
        with torch.no_grad():
            logp = self.model.ops.linear_logp(hidden, self.model.head_weight, target=target.to(hidden.device), logp=True)
        for s, token, value in zip(list(running), target.tolist(), logp.tolist()):
            self.out.logp[s.request.stream, len(s.tokens)] = value
            s.tokens.append(token)
            s.answer.tokens.append(token)
            if len(s.answer.tokens) == s.request.most:
                self.running.remove(s)
                self.cache.give_back(s.table)


def sampled(model, sequences, prompt, order=None, **options):
    """The sampler's way: `prompt` tokens of every sequence are prefilled, the rest decoded one by one."""
    pages = sum(-(-len(s) // options.get("page_size", 16)) + 1 for s in sequences)
    sampler = Forced(model, sequences, pages=pages, **options)
    started = time.perf_counter()
    for i in order or range(len(sequences)):
        cut = min(prompt, len(sequences[i]) - 1)
        sampler.add(rlk.sampler.Request(sequences[i][:cut], most=len(sequences[i]) - cut, stream=i))
    while sampler.step():
        pass
    sampler.out.seconds, sampler.out.tokens = time.perf_counter() - started, sum(map(len, sequences)) - len(sequences)
    return sampler.out


def paths(model, sequences):
    """Names and functions of all paths but the reference."""
    most = max(map(len, sequences))
    yield "packed, each alone", lambda: packed(model, sequences, each=True)
    yield "prefill in one piece", lambda: sampled(model, sequences, most, chunk=most, reuse=False)
    for chunk in (1, 17, 128, 1000):
        if chunk < most:
            yield f"prefill in chunks of {chunk}", lambda chunk=chunk: sampled(model, sequences, most, chunk=chunk, reuse=False)
    yield "a prefix from the cache", lambda: sampled(model, sequences, most, page_size=16, batch=1)
    for size in (1, 32, 128):
        yield f"pages of {size}", lambda size=size: sampled(model, sequences, most // 2, page_size=size)
    yield "other company", lambda: sampled(model, sequences, most // 3, order=list(range(len(sequences)))[::-1], batch=2)
    yield "decoded from the first token", lambda: sampled(model, sequences, 1)


def compare(reference, other):
    """Per layer '' or the first op whose rows differ, and the largest difference between log-probabilities."""
    verdict = {}
    for layer, name in reference.order:
        rows = other.found.get((layer, name), {})
        wrong = sum(reference.found[layer, name][key] != row for key, row in rows.items())
        if not rows:
            verdict.setdefault(layer, "not covered")
        elif wrong and not verdict.get(layer):
            verdict[layer] = f"{name} {wrong}/{len(rows)}"
        else:
            verdict.setdefault(layer, "")
    shared = [abs(value - reference.logp[key]) for key, value in other.logp.items() if key[1] > 0]
    return verdict, max(shared) if shared else None


def arithmetic_of(model):
    """Which implementation and arithmetic come first for this model's ops; a call that one refuses goes to the next."""
    device = model.device.type
    dtype = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[model.embed.dtype]
    found = {}
    for op in sorted(set(_OPS.values())):
        best = max((i for i in rlk.implementations() if i["op"] == op and str(i["usable"]).startswith(("True", "yes")) and i["device"] == device and
                    (dtype in i["dtypes"] or op == "embedding")), key=lambda i: i["priority"], default=None)
        found[op] = f"{best['id']} ({best['arithmetic']})" if best else "none"
    return found


def corpus(model, count, longest, seed):
    """Sequences of other lengths, the last two of which begin alike."""
    draw = torch.Generator().manual_seed(seed)
    lengths = [longest, 2, 65, longest // 2 + 1, longest // 3 + 2, 33][:max(count - 1, 1)]
    made = [torch.randint(model.config.vocab, (max(2, min(n, longest)),), generator=draw).tolist() for n in lengths]
    return [*made, [*made[0][:-3], *made[0][-3:][::-1]]]


def options(arguments):
    parser = argparse.ArgumentParser(prog="python -m rlk.verify_model", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="tiny-qwen3", help=f"{', '.join(rlk.model.CONFIGS)}, or a folder with weights")
    parser.add_argument("--layers", type=int, help="only so many")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--peer", choices=("torch",), help="PyTorch's ops in place of rlk's")
    parser.add_argument("--sequences", type=int, default=6)
    parser.add_argument("--longest", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", help="write what was found")
    return parser.parse_args(arguments)


def build(given):
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[given.dtype]
    made = {"dtype": dtype, "device": given.device}
    if given.peer:
        from rlk import _peer
        made["ops"] = _peer
    if Path(given.model).is_dir():
        return rlk.model.load(given.model, **made)
    shape = rlk.model.config(given.model, **({"layers": given.layers} if given.layers else {}))
    return rlk.model.Decoder(shape, seed=given.seed, **made)


def main(arguments=None):
    given = options(arguments)
    model = build(given)
    sequences = corpus(model, given.sequences, given.longest, given.seed)
    print(f"{given.model} {given.dtype} on {given.device}: {rlk.model.describe(model.config)}")
    ids = arithmetic_of(model) if not given.peer else {}
    for op, text in ids.items():
        print(f"  {op:12} {text}")
    reference = packed(model, sequences)
    layers = sorted({layer for layer, _ in reference.order})
    titles = ["embed" if i < 0 else "last" if i == len(model.blocks) else f"layer {i}" for i in layers]
    print(f"{'path':30}" + "".join(f"{t:>19}" for t in titles) + f"{'max |d logp|':>14}{'tokens/s':>10}")
    print(f"{'packed (reference)':30}" + " " * 19 * len(titles) + f"{'':>14}{reference.tokens / reference.seconds:10.0f}")
    results, good = [], True
    for name, path in paths(model, sequences):
        found = path()
        verdict, apart = compare(reference, found)
        same = apart == 0 and not any(verdict.values())
        good &= same
        print(f"{name:30}" + "".join(f"{verdict[i] or 'same':>19}" for i in layers) +
              f"{'-' if apart is None else f'{apart:.2g}':>14}{found.tokens / found.seconds:10.0f}", flush=True)
        results.append({"path": name, "layers": {t: verdict[i] or "same" for t, i in zip(titles, layers)}, "d_logp": apart,
                        "tokens_per_second": found.tokens / found.seconds, "same": same})
    print(f"{'every path has the same bits' if good else 'paths differ'}; digest of the reference {reference.digest()}")
    if given.json:
        Path(given.json).write_text(json.dumps(
            {"model": given.model, "dtype": given.dtype, "device": given.device, "peer": given.peer, "seed": given.seed,
             "version": rlk.__version__, "implementations": ids, "digest": reference.digest(), "paths": results, "good": good},
            indent=1))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
