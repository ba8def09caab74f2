"""GRPO on a task that needs no download: what a sampler draws, a trainer scores, and the two agree to the bit.

    python -m rlk.onpolicy                    # half a minute on two CPU cores
    python -m rlk.onpolicy --peer torch       # the control: the same loop on PyTorch's own ops
    python -m rlk.onpolicy --checkpoint FILE  # written after every step, and gone on from where it exists

The task: repeat the letters of the prompt. Each step draws a group of answers for every prompt, scores them with the trainer's packed
forward, takes one policy step, and goes on with the new weights. Printed per step: the reward; KL, the largest |sampler's - trainer's
log-probability| of any token; and how far from 1 the first ratio is. Here both are 0. With kernels that only nearly agree they are not.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch

import rlk.model
import rlk.sampler
import rlk.torch

_STOP, _ASK, _FIRST = 0, 1, 2  # tokens: end of an answer, end of a prompt, the first letter


class Loop:
    """The state of a run: all that a checkpoint holds, and one step."""

    def __init__(self, given):
        self.given = given
        peer = given.peer == "torch"
        if peer:
            from rlk import _peer
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[given.dtype]
        self.model = rlk.model.Decoder(given.model, seed=given.seed, dtype=dtype, device=given.device,
                                       ops=_peer if peer else rlk.torch)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=given.rate, weight_decay=0.0, betas=(0.9, 0.95))
        self.step = 0
        self.history = []
        self.sampler = None

    def prompts(self):
        """Those of this step: letters, then the sign that asks. The same for the same seed and step."""
        draw = torch.Generator().manual_seed(self.given.seed * 1_000_003 + self.step)
        letters = min(self.given.letters, self.model.config.vocab - _FIRST)
        return [(_FIRST + torch.randint(letters, (self.given.length,), generator=draw)).tolist() + [_ASK]
                for _ in range(self.given.prompts)]

    def sample(self, prompts):
        g = self.given
        requests = [rlk.sampler.Request(p, most=g.length + 1, seed=g.seed, stream=(self.step * len(prompts) + i) * g.group + j,
                                        stop=_STOP)
                    for i, p in enumerate(prompts) for j in range(g.group)]
        most = 2 * g.length + 2
        if self.sampler is None:
            self.sampler = rlk.sampler.Sampler(self.model, pages=len(requests) * (-(-most // 16) + 1), batch=len(requests))
        self.sampler.weights_changed()
        return requests, self.sampler.run(requests)

    def one(self):
        """Draws, scores, learns. Returns what is printed."""
        g, ops = self.given, rlk.torch
        self.model.eval()
        started = time.perf_counter()
        prompts = self.prompts()
        requests, answers = self.sample(prompts)
        drawn = time.perf_counter()
        rewards = torch.tensor([reward(r.prompt, a.tokens) for r, a in zip(requests, answers)])
        advantages = ops.group_advantage(rewards, torch.arange(0, len(requests) + 1, g.group, dtype=torch.int32))
        advantages = advantages.to(g.device)
        rows = [r.prompt + a.tokens for r, a in zip(requests, answers)]
        tokens = torch.tensor(sum(rows, [])).to(g.device)
        cu = torch.tensor([0, *map(len, rows)]).cumsum(0).to(torch.int32).to(g.device)
        old = torch.tensor(sum([[0.0] * len(r.prompt) + a.logp for r, a in zip(requests, answers)], [])).to(g.device)
        answered = torch.tensor(sum([[False] * len(r.prompt) + [True] * len(a.tokens) for r, a in zip(requests, answers)], []))
        answered = answered.to(g.device)
        kl = ratio = None
        for epoch in range(g.epochs):
            logp = self.model.score(tokens, cu)
            if epoch == 0:
                with torch.no_grad():
                    kl = float((logp - old).abs()[answered].max())
                    first = ops.ratio_kl(logp.detach(), old, mask=answered, ratio=True, kl=False)
                    ratio = float((first - 1).abs().max())
            loss, *_ = ops.policy_loss(logp, old, advantages, answered, cu, advantages_per="sequence", factor=True)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        self.step += 1
        line = {"step": self.step, "reward": float(rewards.mean()), "kl": kl, "ratio": ratio,
                "sample_s": drawn - started, "learn_s": time.perf_counter() - drawn}
        self.history.append(line)
        return line

    def save(self, file):
        """Whole or not at all: a run that is cut off while it writes keeps the state before."""
        beside = Path(f"{file}.new")
        torch.save({"task": task(self.given), "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                    "step": self.step, "history": self.history}, beside)
        os.replace(beside, file)

    def load(self, file):
        state = torch.load(file, weights_only=True)
        if state["task"] != task(self.given):
            theirs = {k: v for k, v in state["task"].items() if v != task(self.given)[k]}
            raise SystemExit(f"{file}: was written with {theirs}; give the same, or another file")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.history = state["step"], state["history"]


def task(given):
    """The options that decide what is computed."""
    return {k: getattr(given, k) for k in ("model", "dtype", "peer", "seed", "rate", "letters", "length", "prompts", "group", "epochs")}


def reward(prompt, answer):
    """The share of places that are right, a stop after the last letter among them."""
    wanted = [*prompt[:-1], _STOP]
    return sum(a == w for a, w in zip(answer, wanted)) / len(wanted)


def plot(files, target):
    """Reward and KL over steps, of one run or of several, as SVG."""
    runs = [(Path(f).stem, json.loads(Path(f).read_text())) for f in files]
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


def options(arguments):
    parser = argparse.ArgumentParser(prog="python -m rlk.onpolicy", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-qwen3", choices=sorted(rlk.model.CONFIGS))
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--peer", choices=("torch",), help="PyTorch's ops in place of rlk's")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--letters", type=int, default=8, help="letters that prompts are made of")
    parser.add_argument("--length", type=int, default=4, help="letters of a prompt")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a step")
    parser.add_argument("--group", type=int, default=16, help="answers to a prompt")
    parser.add_argument("--epochs", type=int, default=1, help="policy steps on the same answers")
    parser.add_argument("--checkpoint", help="a file with the state, read if it exists, written after every step")
    parser.add_argument("--json", help="write every step's figures")
    parser.add_argument("--plot", nargs="+", metavar=("SVG", "JSON"), help="draw files of --json; runs nothing")
    return parser.parse_args(arguments)


def main(arguments=None):
    given = options(arguments)
    if given.plot:
        plot(given.plot[1:], given.plot[0])
        return 0
    loop = Loop(given)
    if given.checkpoint and Path(given.checkpoint).exists():
        loop.load(given.checkpoint)
        print(f"going on from step {loop.step} of {given.checkpoint}")
    print(f"{given.model} {given.dtype} on {given.device}, {'PyTorch' if given.peer else 'rlk'}: repeat {given.length} letters of "
          f"{given.letters}; {given.prompts} prompts x {given.group} answers a step")
    print(f"{'step':>5} {'reward':>7} {'KL':>9} {'|ratio - 1|':>12} {'drawn in':>9} {'learnt in':>9}")
    while loop.step < given.steps:
        line = loop.one()
        print(f"{line['step']:5} {line['reward']:7.3f} {line['kl']:9.2g} {line['ratio']:12.2g} {line['sample_s']:8.2f}s "
              f"{line['learn_s']:8.2f}s", flush=True)
        if given.checkpoint:
            loop.save(given.checkpoint)
        if given.json:
            Path(given.json).write_text(json.dumps(loop.history))
    worst = max(line["kl"] for line in loop.history)
    print(f"reward {loop.history[0]['reward']:.3f} -> {loop.history[-1]['reward']:.3f}; largest difference between sampler and "
          f"trainer: {worst:g}")
    return 0 if given.peer or worst == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
