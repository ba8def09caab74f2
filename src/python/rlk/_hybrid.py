"""Blocks of the Kimi-Linear kind for rlk.model: KDA behind a short convolution, with a gated norm; and latent attention without
rotation. A layer's MLP is Block's own."""

from functools import lru_cache

import torch
from torch import nn

import rlk
from rlk import _C


class Recurrent(nn.Module):
    """KDA in place of attention. `recur` is what sees more than a row: the convolution and the recurrence."""

    def __init__(self, c, make):
        super().__init__()
        wide = c.heads * c.state_dim
        self.qkv = make(3 * wide, c.width)
        self.conv = make(3 * wide, c.conv)
        self.decay_in, self.decay_out = make(c.state_dim, c.width), make(wide, c.state_dim)
        self.gate_in, self.gate_out = make(c.state_dim, c.width), make(wide, c.state_dim)
        self.beta = make(c.heads, c.width)
        self.a_log = nn.Parameter(make(c.heads, 1).data.float().flatten())
        self.dt_bias = nn.Parameter(make(c.heads, c.state_dim).data.float())
        self.out_norm = make(c.state_dim, ones=True)
        self.heads, self.dim, self.eps = c.heads, c.state_dim, c.eps

    def names(self):
        """Names in a checkpoint, and what they are here."""
        for name, weight, conv in zip("qkv", self.qkv.detach().chunk(3), self.conv.detach().chunk(3)):
            yield f"{name}_proj.weight", weight
            yield f"{name}_conv1d.weight", conv[:, None]
        for name, weight in (("f_a", self.decay_in), ("f_b", self.decay_out), ("g_a", self.gate_in), ("g_b", self.gate_out), ("b", self.beta)):
            yield f"{name}_proj.weight", weight.detach()
        yield "A_log", self.a_log.detach().view(1, 1, -1, 1)
        yield "dt_bias", self.dt_bias.detach().flatten()
        yield "o_norm.weight", self.out_norm.detach()

    def forward(self, ops, x, attend, recur, note, tag):
        tag("qkv")
        qkv = ops.linear(x, self.qkv)
        note("qkv", qkv)
        tag("decay")
        g = ops.linear(ops.linear(x, self.decay_in), self.decay_out).unflatten(-1, (self.heads, self.dim))
        tag("beta")
        beta = ops.linear(x, self.beta)
        x_gate = x
        tag("recurrence")
        x = recur(self, qkv, g, beta)
        note("recurrence", x)
        tag("gate")
        gate = ops.linear(ops.linear(x_gate, self.gate_in), self.gate_out).unflatten(-1, (self.heads, self.dim))
        tag("out_norm")
        return ops.rms_norm(x, self.out_norm, gate=gate, gate_act="sigmoid", eps=self.eps)

    def mixed(self, op, qkv, g, beta, bounds, **more):
        """The recurrence, kda_fwd or kda_step, over packed rows qkv that the convolution left."""
        q, k, v = (t[None] for t in qkv.unflatten(-1, (3, self.heads, self.dim)).unbind(1))
        return op(q, k, v, g[None], beta[None], a_log=self.a_log, dt_bias=self.dt_bias, cu_seqlens=bounds, qk_l2norm=True,
                  beta_sigmoid=True, gate="softplus", **more)[0]


class Latent(nn.Module):
    """Attention whose keys and values come from one narrow row, without rotation."""

    def __init__(self, c, make):
        super().__init__()
        self.q = make(c.heads * (c.plain_dim + c.extra_dim), c.width)
        self.narrow = make(c.latent + c.extra_dim, c.width)
        self.narrow_norm = make(c.latent, ones=True)
        self.kv = make(c.heads * (c.plain_dim + c.value_dim), c.latent)
        self.config = c

    def names(self):
        """Names in a checkpoint, and what they are here."""
        yield "q_proj.weight", self.q.detach()
        yield "kv_a_proj_with_mqa.weight", self.narrow.detach()
        yield "kv_a_layernorm.weight", self.narrow_norm.detach()
        yield "kv_b_proj.weight", self.kv.detach()

    def forward(self, ops, x, attend, recur, note, tag):
        c = self.config
        tag("q")
        q = ops.linear(x, self.q).unflatten(-1, (c.heads, -1))
        note("qkv", q.flatten(1))
        tag("narrow")
        narrow, extra = ops.linear(x, self.narrow).split([c.latent, c.extra_dim], -1)
        tag("narrow_norm")
        narrow = ops.rms_norm(narrow, self.narrow_norm, eps=c.eps)
        tag("kv")
        plain, v = ops.linear(narrow, self.kv).unflatten(-1, (c.heads, -1)).split([c.plain_dim, c.value_dim], -1)
        k = torch.cat((plain, extra[:, None].expand(-1, c.heads, -1)), -1)
        tag("attention")
        x = attend(q, k, v.contiguous())
        note("attention", x)
        return x


class Packed:
    """The trainer's `recur`: whole sequences from nothing."""

    def __init__(self, ops, bounds):
        self.ops, self.bounds = ops, bounds.long()

    def __call__(self, layer, block, qkv, g, beta):
        rows = self.ops.short_conv(qkv[None], block.conv, cu_seqlens=self.bounds)[0]
        return block.mixed(self.ops.kda_fwd, rows, g, beta, self.bounds)


class Stepped:
    """The sampler's: a sequence comes in pieces of any size. KDA works in chunks of 64 tokens from a sequence's start; what is kept
    is the state at the open chunk's start and kda_step's cache of the rows behind it, whose tokens have the bits that the whole has."""

    chunk = 64

    def __init__(self, ops, kept, counts):
        """`kept`: of every sequence a dict by layer; `counts`: how many rows each has now."""
        self.ops, self.kept, self.counts = ops, kept, counts

    def __call__(self, layer, block, qkv, g, beta):
        device, ops = qkv.device, self.ops
        open_ = [kept.get(layer) or _nothing(block, qkv) for kept in self.kept]
        conv, ends = ops.short_conv(qkv[None], block.conv, initial_state=torch.stack([o["conv"] for o in open_]),
                                    cu_seqlens=_bounds(self.counts, device), final_state=True)
        given = [rows.split(self.counts) for rows in (conv[0], g, beta)]
        batch = _together(open_)
        rows, done, found = [o["rows"] for o in open_], [0] * len(open_), [[] for _ in open_]
        while done != self.counts:  # once, unless a sequence's piece reaches over the end of its chunk
            now = [min(n - d, self.chunk - r % self.chunk) for n, d, r in zip(self.counts, done, rows)]
            parts = [torch.cat([t[d:d + n] for t, d, n in zip(part, done, now)]) for part in given]
            out = block.mixed(ops.kda_step, *parts, _bounds(now, device), rows=torch.tensor(rows).to(device), state=batch[0],
                              cache=batch[1])
            for pieces, piece in zip(found, out.split(now)):
                pieces.append(piece)
            rows, done = [r % self.chunk + n for r, n in zip(rows, now)], [d + n for d, n in zip(done, now)]
        for i, kept in enumerate(self.kept):
            kept[layer] = {"conv": ends[i], "rows": rows[i], "batch": batch, "place": i}
        return torch.cat(sum(found, []))


def _bounds(lengths, device):
    return torch.tensor([0, *lengths]).cumsum(0).to(device)


def _nothing(block, qkv):
    """What is kept of a sequence before its first token: a batch of one, at place 0."""
    shapes = _shapes(block.heads, block.dim)
    return {"conv": qkv.new_zeros(block.conv.shape[1] - 1, qkv.shape[1]), "rows": 0, "place": 0,
            "batch": tuple(qkv.new_zeros(shape, dtype=torch.float32) for shape in shapes)}


def copied(kept):
    """What is kept of a sequence, in memory of its own: the batch it lies in goes on."""
    return {layer: {"conv": o["conv"].clone(), "rows": o["rows"], "place": 0,
                    "batch": tuple(t[o["place"]:o["place"] + 1].clone() for t in o["batch"])} for layer, o in kept.items()}


@lru_cache
def _shapes(heads, dim):
    """Of the state and the cache of one sequence."""
    row, state = rlk.Spec([1, 1, heads, dim], "fp32"), [1, heads, dim, dim]
    found = _C.infer("kda_step", row, row, row, row, rlk.Spec([1, 1, heads], "fp32"), rlk.Spec([1], "int64"), rlk.Spec(state, "fp32"))
    return state, found["cache"][0]


def _together(open_):
    """State and cache of these sequences: where they lie, if they are the batch of the call before, in its order."""
    batch = open_[0]["batch"]
    if [o["place"] for o in open_] == list(range(len(batch[0]))) and all(o["batch"] is batch for o in open_):
        return batch
    return tuple(torch.stack([o["batch"][which][o["place"]] for o in open_]) for which in range(2))
