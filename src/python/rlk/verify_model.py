"""The same tokens through every path of a model, compared to the bit, op by op.

    python -m rlk.verify_model tiny-qwen3
    python -m rlk.verify_model tiny-qwen3 --peer torch      # beside it the control: PyTorch's own ops, which differ
    python -m rlk.verify_model tiny-ranks --ranks 2 4 8     # also over several ranks, which are threads
    python -m rlk.verify_model tiny-qwen3 --device cuda --replay  # also every op of a GPU again on the CPU

The reference is the trainer's packed forward. Beside it: each sequence alone; prefill in one piece and in chunks; a prefix found in the
cache; other pages; other company; and decoding token by token. For every layer the table says whether all rows that a path computed are
those of the reference, or the first op that left other bits. The last columns are the largest difference between log-probabilities
and how many tokens a second the path took (of this small run: no benchmark). 0 is the claim.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import rlk
import rlk.model
import rlk.sampler
import rlk.torch
from rlk import _tools, parallel

_OPS = {"embedding": "embedding", "qkv": "linear", "rope": "rope", "attention": "attention", "stream": "linear", "mlp": "linear",
        "recurrence": "kda_fwd",
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

    def digest(self, *only):
        """Of all rows, in the order of their keys, or of those after one op."""
        h = hashlib.sha256()
        for at in only or self.order:
            for key in sorted(self.found[at]):
                h.update(repr((at, key)).encode())
                h.update(self.found[at][key])
        return h.hexdigest()[:16]


def packed(model, sequences, each=False, gradients=False):
    """The trainer's forward, of all sequences at once or of each alone, with `gradients` as for a backward."""
    out = Rows()
    groups = [[i] for i in range(len(sequences))] if each else [list(range(len(sequences)))]
    for group in groups:
        keys = [(i, p) for i in group for p in range(len(sequences[i]))]
        tokens = torch.tensor([t for i in group for t in sequences[i]], device=model.device)
        cu = torch.tensor([0, *(len(sequences[i]) for i in group)]).cumsum(0).to(torch.int32).to(model.device)
        started = time.perf_counter()
        with torch.set_grad_enabled(gradients):
            logp = model.score(tokens, cu, sequences=group, note=lambda layer, name, rows: out.take(layer, name, rows, keys))
        out.logp.update(zip(keys, logp.tolist()))
        out.seconds, out.tokens = out.seconds + time.perf_counter() - started, out.tokens + len(keys)
    return out


class Forced(rlk.sampler.Sampler):
    """A sampler that is told what it draws: its rows are then those of given tokens."""

    def __init__(self, model, sequences, **options):
        super().__init__(model, **options)
        self.sequences = sequences
        self.out = Rows()
        longest = max(map(len, sequences))
        self.table = torch.tensor([s + [0] * (longest + 1 - len(s)) for s in sequences], dtype=torch.int32).to(model.device)
        self.note = lambda layer, name, rows, keys: self.out.take(layer, name, rows, [(r.stream, p) for r, p in keys])

    def _logits(self, hidden):
        return hidden

    def _sample(self, hidden, given):
        """In a captured step: the token goes by the row's sequence and position, which are those that sample is given."""
        target = self.table[given["stream"], given["position"]]
        return target, self._score(hidden, target)

    def _draw(self, running, hidden):
        target = torch.tensor([self.sequences[s.request.stream][len(s.tokens)] for s in running], dtype=torch.int32)
        rlk.sampler.trace_drawn(running, "score")
        logp = self._score(hidden, target.to(hidden.device))
        rlk.sampler.trace_drawn((), None)
        return target, logp

    def _score(self, hidden, target):
        with torch.no_grad():
            return self.model.ops.linear_logp(hidden, self.model.head_weight, target=target, logp=True)

    def _append(self, sequences, token, logp):
        for s, value in zip(sequences, logp.tolist()):
            self.out.logp[s.request.stream, len(s.tokens)] = value
        super()._append(sequences, token, logp)


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


def over(degree, make, path):
    """What a path leaves on every rank of the model spread over so many."""
    def rank(group):
        model = parallel.decoder(make(), group)
        model.whole_notes = True
        return path(model)

    return parallel.Threads.run(degree, rank, timeout=600.0)


def paths(model, sequences, ranks=(), make=None):
    """Names and functions of all paths but the reference. Those over ranks, whose models make() gives, have the rows of each."""
    most = max(map(len, sequences))
    for n in ranks:
        yield f"packed, over {n} ranks", lambda n=n: over(n, make, lambda m: packed(m, sequences))
        yield f"decoded, over {n} ranks", lambda n=n: over(n, make, lambda m: sampled(m, sequences, 1, graphs=False))
    yield "packed, for a backward", lambda: packed(model, sequences, gradients=True)
    yield "packed, each alone", lambda: packed(model, sequences, each=True)
    yield "prefill in one piece", lambda: sampled(model, sequences, most, chunk=most, reuse=False)
    for chunk in (1, 17, 128, 1000):
        if chunk < most:
            yield f"prefill in chunks of {chunk}", lambda chunk=chunk: sampled(model, sequences, most, chunk=chunk, reuse=False)
    yield "a prefix from the cache", lambda: sampled(model, sequences, most, page_size=16, batch=1)
    for size in (1, 32, 128):
        yield f"pages of {size}", lambda size=size: sampled(model, sequences, most // 2, page_size=size)
    yield "other company", lambda: sampled(model, sequences, most // 3, order=list(range(len(sequences)))[::-1], batch=2)
    yield "decoded from the first token", lambda: sampled(model, sequences, 1, graphs=False)
    if model.ops is rlk.torch:
        yield "decoded by captured steps", lambda: sampled(model, sequences, 1, graphs=True)


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


def differences(reference, other, titles):
    """For every op, how many rows a path has and how many differ."""
    found = []
    for at in reference.order:
        rows = other.found.get(at, {})
        found.append({"layer": titles[at[0]], "op": at[1], "rows": len(rows),
                      "differ": sum(reference.found[at][key] != row for key, row in rows.items())})
    return found


def arithmetic_of(model, names=_OPS):
    """Which implementation and arithmetic come first for this model's ops; a call that one refuses goes to the next."""
    device = model.device.type
    dtype = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[model.embed.dtype]
    found = {}
    for op in sorted({_OPS[name] for name in names}):
        best = max((i for i in rlk.implementations() if i["op"] == op and str(i["usable"]).startswith(("True", "yes")) and i["device"] == device and
                    (dtype in i["dtypes"] or op == "embedding")), key=lambda i: i["priority"], default=None)
        found[op] = f"{best['id']} ({best['arithmetic']})" if best else "none"
    return found


def corpus(model, count, longest, seed):
    """Sequences of other lengths, the last two of which begin alike."""
    draw = torch.Generator().manual_seed(seed)
    lengths = [longest, 2, 65, longest // 2 + 1, longest // 3 + 2, 33][:max(count - 1, 1)]
    made = [torch.randint(model.config.vocab, (max(2, min(n, longest)),), generator=draw, device="cpu").tolist() for n in lengths]
    return [*made, [*made[0][:-3], *made[0][-3:][::-1]]]


def options(arguments):
    parser = argparse.ArgumentParser(prog="python -m rlk.verify_model", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="tiny-qwen3", help=f"{', '.join(rlk.model.CONFIGS)}, or a folder with weights")
    parser.add_argument("--layers", type=int, help="only so many")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--peer", choices=("torch",), help="beside rlk, the same model on PyTorch's ops")
    parser.add_argument("--ranks", type=int, nargs="+", default=[], choices=parallel.DEGREES, metavar="N",
                        help="also over so many ranks, which are threads: 1, 2, 4, 8")
    parser.add_argument("--replay", action="store_true",
                        help="also compute every call of a packed forward again on the CPU, by the same arithmetic; for small models")
    parser.add_argument("--sequences", type=int, default=6)
    parser.add_argument("--longest", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--certificate", "--json", metavar="FILE", help="write what was found, as JSON")
    parser.add_argument("--report", metavar="FILE", help="write a page with the table and plots")
    parser.add_argument("--trace", metavar="FOLDER", help="record every path there; where one differs, say where and why")
    return parser.parse_args(arguments)


def build(given, peer=False):
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[given.dtype]
    made = {"dtype": dtype, "device": given.device}
    if peer:
        from rlk import _peer
        if given.model in rlk.model.CONFIGS and rlk.model.CONFIGS[given.model].period:
            raise rlk.InvalidArgument(f"--peer torch: PyTorch has no ops for the recurrent layers of {given.model}")
        made["ops"] = _peer
    if Path(given.model).is_dir():
        return rlk.model.load(given.model, **made)
    shape = rlk.model.config(given.model, **({"layers": given.layers} if given.layers else {}))
    return rlk.model.Decoder(shape, seed=given.seed, **made)


def recorded(path, folder, name):
    """What a path leaves, and the file of its trace where one is asked for."""
    if not folder:
        return path(), None
    Path(folder).mkdir(parents=True, exist_ok=True)
    file = Path(folder) / ("".join(c if c.isalnum() else " " for c in name).strip().replace("  ", " ").replace(" ", "-") + ".trace")
    with rlk.trace(file):
        return path(), file


def explained(reference, file):
    """What trace-diff says of two traces."""
    done = subprocess.run([_tools.dispatch_program(), "trace-diff", reference, file], capture_output=True, text=True)
    return "  " + (done.stdout or done.stderr).strip().replace("\n", "\n  ")


def write(given, certificate):
    """The certificate, and the page that rlk-dispatch makes of one."""
    if not given.certificate and not given.report:
        return
    with tempfile.TemporaryDirectory() as folder:
        file = given.certificate or str(Path(folder) / "certificate.json")
        Path(file).write_text(json.dumps(certificate, indent=1))
        if given.report:
            source = Path(folder) / "report.json"
            source.write_text(json.dumps(certificate))
            done = subprocess.run([_tools.dispatch_program(), "--verify-model", source, "--report", given.report],
                                  capture_output=True, text=True)
            if done.returncode not in (0, 1):
                raise SystemExit(f"{given.report}: {done.stderr.strip()}")


class Replayed:
    """rlk.torch, every call of which is computed again on the CPU by the same arithmetic: bits of a GPU are those of any machine. Where
    the model is on a CPU, again by the code without vectors."""

    def __init__(self):
        self.found = {}  # by op and arithmetic: calls, rows, how many differ, why it was not computed again

    def __getattr__(self, name):
        op = getattr(rlk.torch, name)

        def call(*args, **given):
            result = op(*args, **given)
            self._again(name, op, args, given, result)
            return result

        return call

    def _again(self, name, op, args, given, result):
        arithmetic = rlk.resolve(name, *args, **given).arithmetic
        found = self.found.setdefault((name, arithmetic), {"calls": 0, "rows": 0, "differ": 0, "refused": ""})
        found["calls"] += 1
        here = any(isinstance(t, torch.Tensor) and t.device.type == "cpu" for t in args)
        args, given = [_on_cpu(t) for t in args], {k: _on_cpu(t) for k, t in given.items()} | {"arithmetic": arithmetic}
        try:
            again = self._scalar(name, op, args, given) if here else op(*args, **given)
        except (rlk.NoImplementation, rlk.Unsupported) as refused:
            found["refused"] = str(refused)
            return
        for a, b in zip(*(t if isinstance(t, tuple) else (t,) for t in (result, again))):
            a, b = (t.detach().cpu().reshape(-1, t.shape[-1] if t.dim() > 1 else 1).contiguous().view(torch.uint8) for t in (a, b))
            found["rows"] += len(a)
            found["differ"] += int((a != b).any(1).sum())

    @staticmethod
    def _scalar(name, op, args, given):
        try:
            with rlk.backend(f"{name}=native.scalar"):
                return op(*args, **given)
        except rlk.NoImplementation:
            return op(*args, **given)


def _on_cpu(t):
    return t.detach().cpu() if isinstance(t, torch.Tensor) else t


def replay(model, sequences):
    """Prints for every op how many rows of a packed forward another machine has with other bits. Returns what a certificate says of it."""
    plain, model.ops = model.ops, Replayed()
    try:
        with torch.no_grad():
            model.score(torch.tensor(sum(sequences, []), device=model.device),
                        torch.tensor([0, *map(len, sequences)]).cumsum(0).to(torch.int32).to(model.device))
        again = model.ops.found
    finally:
        model.ops = plain
    print(f"{'computed again on the CPU':30}{'calls':>8}{'rows':>10}{'differ':>8}  arithmetic")
    for (op, arithmetic), f in again.items():
        print(f"{op:30}{f['calls']:8}{f['rows']:10}{f['differ'] if not f['refused'] else '-':>8}  {arithmetic}"
              + (f": {f['refused']}" if f["refused"] else ""))
    return [{"op": op, "arithmetic": arithmetic, **f} for (op, arithmetic), f in again.items()]


def line(name, verdicts, apart, speed):
    print(f"{name:30}" + "".join(f"{v:>19}" for v in verdicts) + f"{apart:>14}{speed:10.0f}", flush=True)


def table(given, model, sequences, folder=None):
    """Sends the sequences through every path and prints a line for each. Returns what a certificate says of it."""
    reference, first = recorded(lambda: packed(model, sequences), folder, "packed (reference)")
    layers = sorted({layer for layer, _ in reference.order})
    titles = {i: "embed" if i < 0 else "last" if i == len(model.blocks) else f"layer {i}" for i in layers}
    ids = arithmetic_of(model, {name for _, name in reference.order} | {"logp"}) if model.ops is rlk.torch else {}
    for op, text in ids.items():
        print(f"  {op:12} {text}")
    print(f"{'path':30}" + "".join(f"{t:>19}" for t in titles.values()) + f"{'max |d logp|':>14}{'tokens/s':>10}")
    line("packed (reference)", [""] * len(layers), "", reference.tokens / reference.seconds)
    results = []
    ranks = given.ranks if model.ops is rlk.torch else ()
    for name, path in paths(model, sequences, ranks, lambda: build(given)):
        found, file = recorded(path, folder, name)
        every = [(*compare(reference, rows), rows) for rows in (found if isinstance(found, list) else [found])]  # of every rank
        verdict, apart, rows = next((e for e in every if e[1] != 0 or any(e[0].values())), every[0])
        same, speed = apart == 0 and not any(verdict.values()), rows.tokens / rows.seconds
        line(name, [verdict[i] or "same" for i in layers], "-" if apart is None else f"{apart:.2g}", speed)
        if file and not same:
            print(explained(first, file), flush=True)
        results.append({"path": name, "layers": {t: verdict[i] or "same" for i, t in titles.items()}, "d_logp": apart,
                        "ops": differences(reference, rows, titles), "tokens_per_second": speed, "same": same})
    digests = [{"layer": titles[at[0]], "op": at[1], "arithmetic": ids.get(_OPS[at[1]], ""), "digest": reference.digest(at)}
               for at in reference.order]
    return {"implementations": ids, "digest": reference.digest(), "digests": digests, "paths": results,
            "good": all(r["same"] for r in results)}


def verify(given):
    model, peer = build(given), build(given, peer=True) if given.peer else None
    sequences = corpus(model, given.sequences, given.longest, given.seed)
    print(f"{given.model} {given.dtype} on {given.device}: {rlk.model.describe(model.config)}")
    found = table(given, model, sequences, given.trace)
    if given.trace:
        print(f"traces: {', '.join(sorted(f.stem for f in Path(given.trace).glob('*.trace')))}")
    print(f"{'every path has the same bits' if found['good'] else 'paths differ'}; digest of the reference {found['digest']}")
    again = replay(model, sequences) if given.replay else []
    if again:
        differ = [f["op"] for f in again if f["differ"]]
        found["good"] = found["good"] and not differ
        print(f"computed again on the CPU: {', '.join(differ) + ' differ' if differ else 'the same bits'}")
    control = None
    if peer:
        print("\nThe control, the same model on PyTorch's own ops:")
        control = table(given, peer, sequences)
        differ = [p for p in control["paths"] if not p["same"]]
        print(f"PyTorch: {len(differ)} of {len(control['paths'])} paths differ, by up to {max(p['d_logp'] or 0 for p in control['paths']):.2g}")
    write(given, {"model": given.model, "dtype": given.dtype, "device": given.device, "peer": control, "seed": given.seed,
                  "version": rlk.__version__, "replay": again, **found})
    return 0 if found["good"] else 1


def main(arguments=None):
    try:
        return verify(options(arguments))
    except rlk.Error as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
