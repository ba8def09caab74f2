"""GRPO on a task that needs no download: what a sampler draws, a trainer scores, and the two agree to the bit.

    python -m rlk.onpolicy                    # half a minute on two CPU cores
    python -m rlk.onpolicy --peer torch       # beside it the control: the same loop on PyTorch's own ops
    python -m rlk.onpolicy --ranks 4 2        # the trainer over four ranks, the sampler over two
    python -m rlk.onpolicy --checkpoint FILE  # written after every step, and gone on from where it exists

The task: repeat the letters of the prompt. Each step draws a group of answers for every prompt, scores them with the trainer's packed
forward, takes one policy step, and goes on with the new weights. Printed per step: the reward; KL, the largest |sampler's - trainer's
log-probability| of any token; and how far from 1 the first ratio is. Here both are 0. With kernels that only nearly agree they are not.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch

import rlk.model
import rlk.sampler
import rlk.torch
from rlk import parallel
from rlk.parallel.model import Decoder as Spread

_STOP, _ASK, _FIRST = 0, 1, 2  # tokens: end of an answer, end of a prompt, the first letter


class Policy:
    """The model that learns and the one that draws. Without ranks they are one; with them each is spread over ranks that are threads,
    to degrees of their own, and what was learnt is handed over after every step."""

    def __init__(self, make, rate, ranks=None):
        self.whole = make()
        learns, draws = ranks or (0, 1)
        self.learning = self._spread(make, learns) if learns else [self.whole]
        self.drawing = self._spread(make, draws) if draws > 1 else [self.whole]
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, betas=(0.9, 0.95))
                           for model in self.learning]
        self.samplers = None

    @staticmethod
    def _spread(make, degree):
        return parallel.Threads.run(degree, lambda group: parallel.decoder(make(), group))

    @staticmethod
    def together(models, work):
        """[work(rank, model)] of all ranks, side by side."""
        if not isinstance(models[0], Spread):
            return [work(0, models[0])]

        def rank(group):
            models[group.rank].ops.group = group
            return work(group.rank, models[group.rank])

        return parallel.Threads.run(len(models), rank, timeout=600.0)

    def draw(self, requests, pages):
        """The answers, which are the same on every rank."""
        if self.samplers is None:
            self.samplers = [rlk.sampler.Sampler(m, pages=pages, batch=len(requests)) for m in self.drawing]
        for sampler in self.samplers:
            sampler.weights_changed()
        answers = self.together(self.drawing, lambda rank, _: self.samplers[rank].run(requests))
        if any(other != answers[0] for other in answers):
            raise rlk.Error("onpolicy: the sampler's ranks drew different answers")
        return answers[0]

    def learn(self, epochs, loss_of):
        """Policy steps on one batch: loss_of(model, epoch)."""
        def work(rank, model):
            optimizer = self.optimizers[rank]
            for epoch in range(epochs):
                loss = loss_of(model, epoch)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                clip(model, 1.0)
                optimizer.step()

        self.together(self.learning, work)
        self.hand_over()

    def hand_over(self):
        """The learnt weights to the model that draws."""
        if self.learning[0] is not self.whole:
            weights = self.together(self.learning, lambda rank, model: dict(parallel.state(model)))[0]
            self.whole.load_state_dict(weights)
            for model in self.drawing:
                if model is not self.whole:
                    parallel.reshard(self.whole, model)

    def digest(self):
        """Of all weights."""
        h = hashlib.sha256()
        for name, weight in sorted(self.whole.state_dict().items()):
            h.update(name.encode())
            h.update(weight.contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes())
        return h.hexdigest()[:16]

    def state(self):
        return [{"model": m.state_dict(), "optimizer": o.state_dict()} for m, o in zip(self.learning, self.optimizers)]

    def load(self, state):
        for model, optimizer, kept in zip(self.learning, self.optimizers, state, strict=True):
            model.load_state_dict(kept["model"])
            optimizer.load_state_dict(kept["optimizer"])
        self.hand_over()


def clip(model, most):
    """Scales gradients down to a norm of `most`, which is that of whole gradients also where ranks have parts."""
    if isinstance(model, Spread):
        whole = [g for _, g in parallel.state(model, gradients=True)]
    else:
        whole = [p.grad for p in model.parameters()]
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), most, torch.nn.utils.get_total_norm(whole))


class Loop:
    """The state of a run: all that a checkpoint holds, and one step."""

    def __init__(self, given, peer=False):
        self.given = given
        if peer:
            from rlk import _peer
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[given.dtype]

        def make():
            return rlk.model.Decoder(given.model, seed=given.seed, dtype=dtype, device=given.device,
                                     ops=_peer if peer else rlk.torch)

        self.policy = Policy(make, given.rate, None if peer else given.ranks)
        self.config = self.policy.whole.config
        self.step = 0

    def prompts(self):
        """Those of this step: letters, then the sign that ends a prompt. The same for the same seed and step."""
        draw = torch.Generator().manual_seed(self.given.seed * 1_000_003 + self.step)
        letters = min(self.given.letters, self.config.vocab - _FIRST)
        return [(_FIRST + torch.randint(letters, (self.given.length,), generator=draw, device="cpu")).tolist() + [_ASK]
                for _ in range(self.given.prompts)]

    def sample(self, prompts):
        g = self.given
        requests = [rlk.sampler.Request(p, most=g.length + 1, seed=g.seed, stream=(self.step * len(prompts) + i) * g.group + j,
                                        stop=_STOP)
                    for i, p in enumerate(prompts) for j in range(g.group)]
        return requests, self.policy.draw(requests, len(requests) * (-(-(2 * g.length + 2) // 16) + 1))

    def one(self):
        """Draws, scores, learns. Returns what is printed."""
        g, ops = self.given, rlk.torch
        started = time.perf_counter()
        requests, answers = self.sample(self.prompts())
        drawn = time.perf_counter()
        rewards = torch.tensor([reward(r.prompt, a.tokens) for r, a in zip(requests, answers)])
        advantages = ops.group_advantage(rewards, torch.arange(0, len(requests) + 1, g.group, dtype=torch.int32)).to(g.device)
        rows = [r.prompt + a.tokens for r, a in zip(requests, answers)]
        tokens = torch.tensor(sum(rows, [])).to(g.device)
        cu = torch.tensor([0, *map(len, rows)]).cumsum(0).to(torch.int32).to(g.device)
        old = torch.tensor(sum([[0.0] * len(r.prompt) + a.logp for r, a in zip(requests, answers)], [])).to(g.device)
        answered = torch.tensor(sum([[False] * len(r.prompt) + [True] * len(a.tokens) for r, a in zip(requests, answers)], []))
        answered = answered.to(g.device)
        apart = []  # of every rank: KL and ratio

        def loss_of(model, epoch):
            logp = model.score(tokens, cu)
            if epoch == 0:
                with torch.no_grad():
                    first = ops.ratio_kl(logp.detach(), old, mask=answered, ratio=True, kl=False)
                    apart.append((float((logp - old).abs()[answered].max()), float((first - 1).abs().max())))
            return ops.policy_loss(logp, old, advantages, answered, cu, advantages_per="sequence", factor=True)[0]

        self.policy.learn(g.epochs, loss_of)
        self.step += 1
        kl, ratio = (max(values) for values in zip(*apart))
        return {"step": self.step, "reward": float(rewards.mean()), "kl": kl, "ratio": ratio,
                "sample_s": drawn - started, "learn_s": time.perf_counter() - drawn}


class Run:
    """The loop, beside it the control where there is one, and what both have printed."""

    def __init__(self, given):
        self.given = given
        self.loops = {"rlk": Loop(given)} | ({"peer": Loop(given, peer=True)} if given.peer else {})
        self.history = []

    @property
    def step(self):
        return self.loops["rlk"].step

    def one(self):
        line = self.loops["rlk"].one()
        if "peer" in self.loops:
            line["peer"] = self.loops["peer"].one()
        self.history.append(line)
        return line

    def save(self, file):
        """Whole or not at all: a run that is cut off while it writes keeps the state before."""
        beside = Path(f"{file}.new")
        torch.save({"task": task(self.given), "step": self.step, "history": self.history,
                    "policies": {name: loop.policy.state() for name, loop in self.loops.items()}}, beside)
        os.replace(beside, file)

    def load(self, file):
        try:
            state = torch.load(file, weights_only=True)
            theirs = state["task"]
        except Exception as error:  # torch has many for a file that is not its own
            raise SystemExit(f"{file}: is no checkpoint of this program: {str(error).splitlines()[0]}") from None
        mine = task(self.given)
        if theirs != mine:
            other = {k: v for k, v in theirs.items() if v != mine.get(k)}
            raise SystemExit(f"{file}: was written with {other}; give the same, or another file")
        for name, loop in self.loops.items():
            loop.policy.load(state["policies"][name])
            loop.step = state["step"]
        self.history = state["history"]


def task(given):
    """The options that decide what is computed."""
    return {k: getattr(given, k) for k in ("model", "dtype", "peer", "ranks", "seed", "rate", "letters", "length", "prompts", "group", "epochs")}


def reward(prompt, answer):
    """The share of places that are right, a stop after the last letter among them."""
    wanted = [*prompt[:-1], _STOP]
    return sum(a == w for a, w in zip(answer, wanted)) / len(wanted)


def curves(name, history):
    """(name, lines) of a run, and of the control beside it."""
    yield name, history
    if "peer" in history[0]:
        yield f"{name}, PyTorch" if name != "rlk" else "PyTorch", [line["peer"] for line in history]


def plot(histories, target):
    """Reward and KL over steps, of one run or of several, as SVG. histories: (name, lines)."""
    runs = [curve for name, history in histories for curve in curves(name, history)]
    wide, high, gap = 640, 180, 40
    colors = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide + 2 * gap}" height="{2 * high + 3 * gap}" font-family="sans-serif" '
             'font-size="12">', '<rect width="100%" height="100%" fill="white"/>']
    last = max(len(lines) for _, lines in runs)
    for panel, (key, title) in enumerate((("reward", "reward"), ("kl", "largest |sampler's - trainer's log-probability|"))):
        top = gap + panel * (high + gap)
        most = max([line[key] for _, lines in runs for line in lines] + [1e-12])
        parts.append(f'<text x="{gap}" y="{top - 8}">{title} (to {most:.3g})</text>'
                     f'<rect x="{gap}" y="{top}" width="{wide}" height="{high}" fill="none" stroke="#999"/>')
        for (name, lines), color in zip(runs, colors):
            points = " ".join(f"{gap + wide * i / max(last - 1, 1):.1f},{top + high * (1 - line[key] / most):.1f}"
                              for i, line in enumerate(lines))
            parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
    for i, ((name, _), color) in enumerate(zip(runs, colors)):
        parts.append(f'<text x="{gap + 120 * i}" y="{2 * high + 3 * gap - 12}" fill="{color}">{name}</text>')
    Path(target).write_text("\n".join([*parts, "</svg>\n"]))


def positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}, it must be at least 1")
    return value


def options(arguments):
    parser = argparse.ArgumentParser(prog="python -m rlk.onpolicy", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(rlk.model.CONFIGS), help="absent: tiny-qwen3, with --ranks tiny-ranks")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--peer", choices=("torch",), help="beside rlk, the same loop on PyTorch's ops")
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N",
                        help="degrees of the trainer and of the sampler (1 where one is given), of 1, 2, 4 and 8; ranks are threads")
    parser.add_argument("--steps", type=positive, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--letters", type=positive, default=8, help="letters that prompts are made of")
    parser.add_argument("--length", type=positive, default=4, help="letters of a prompt")
    parser.add_argument("--prompts", type=positive, default=8, help="prompts of a step")
    parser.add_argument("--group", type=positive, default=16, help="answers to a prompt")
    parser.add_argument("--epochs", type=positive, default=1, help="policy steps on the same answers")
    parser.add_argument("--checkpoint", help="a file with the state, read if it exists, written after every step")
    parser.add_argument("--json", help="write every step's figures")
    parser.add_argument("--plot", nargs="+", metavar=("SVG", "JSON"), help="draw this run; with files of --json draw those and run nothing")
    given = parser.parse_args(arguments)
    if given.ranks:
        if len(given.ranks) > 2:
            parser.error(f"--ranks takes the trainer's degree and the sampler's, {len(given.ranks)} are given")
        wrong = next((n for n in given.ranks if n not in parallel.DEGREES), None)
        if wrong is not None:
            parser.error(f"--ranks: {wrong} is no degree, it must be 1, 2, 4 or 8")
        given.ranks = [*given.ranks, 1][:2]
    given.model = given.model or ("tiny-ranks" if given.ranks else "tiny-qwen3")
    return given


def write(file, text):
    """Whole or not at all."""
    Path(f"{file}.new").write_text(text)
    os.replace(f"{file}.new", file)


def columns(line):
    return f"{line['reward']:7.3f} {line['kl']:9.2g} {line['ratio']:12.2g}"


def summary(lines):
    return (f"reward {lines[0]['reward']:.3f} -> {lines[-1]['reward']:.3f}; largest difference between sampler and trainer: "
            f"{max(line['kl'] for line in lines):g}")


def follow(run, given):
    """Step by step, each with its line."""
    over = f", trainer over {given.ranks[0]} ranks, sampler over {given.ranks[1]}" if given.ranks else ""
    print(f"{given.model} {given.dtype} on {given.device}{over}: repeat {given.length} letters of {given.letters}; "
          f"{given.prompts} prompts x {given.group} answers a step")
    title = f"{'reward':>7} {'KL':>9} {'|ratio - 1|':>12}"
    print(f"{'step':>5} {title} {'drawn in':>9} {'learnt in':>9}" + (f"  PyTorch: {title}" if given.peer else ""))
    while run.step < given.steps:
        line = run.one()
        beside = f"{'':11}{columns(line['peer'])}" if given.peer else ""
        print(f"{line['step']:5} {columns(line)} {line['sample_s']:8.2f}s {line['learn_s']:8.2f}s{beside}", flush=True)
        if given.checkpoint:
            run.save(given.checkpoint)
        if given.json:
            write(given.json, json.dumps(run.history))


def main(arguments=None):
    given = options(arguments)
    if given.plot and len(given.plot) > 1:
        plot([(Path(f).stem, json.loads(Path(f).read_text())) for f in given.plot[1:]], given.plot[0])
        return 0
    try:
        run = Run(given)
        if given.checkpoint and Path(given.checkpoint).exists():
            run.load(given.checkpoint)
            print(f"going on from step {run.step} of {given.checkpoint}")
        follow(run, given)
    except rlk.Error as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"stopped{f'; the same command goes on from {given.checkpoint}' if given.checkpoint else ''}", file=sys.stderr)
        return 130
    if given.plot:
        plot([("rlk", run.history)], given.plot[0])
    print(summary(run.history))
    if given.peer:
        print(f"PyTorch: {summary([line['peer'] for line in run.history])}")
    print(f"digest of the weights {run.loops['rlk'].policy.digest()}")
    return 0 if all(line["kl"] == 0 for line in run.history) else 1


if __name__ == "__main__":
    sys.exit(main())
