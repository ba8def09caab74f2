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
        self.config, self.dim, self.eps = c, c.state_dim, c.eps

    @property
    def heads(self):
        return self.config.heads

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

    def arithmetic(self, qkv, g, beta):
        """That of kda_step on this device, which a trainer must have too: not every arithmetic of kda_fwd on a GPU has a step."""
        if not qkv.is_cuda or not len(qkv):
            return None
        found, (state, cache) = [], _nothing(self, qkv)["batch"]
        bounds, rows = torch.tensor([0, 1], device=qkv.device), torch.zeros(1, dtype=torch.int64, device=qkv.device)
        given = [t.detach()[:1] for t in (qkv, g, beta)]
        with torch.no_grad():
            self.mixed(lambda *t, **more: found.append(rlk.resolve("kda_step", *t, **more)) or [None], *given, bounds, rows=rows, state=state, cache=cache)
        return found[0].arithmetic


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
        k = torch.cat((plain, getattr(ops, "to_heads", to_heads)(extra, c.heads)), -1)
        tag("attention")
        x = attend(q, k, v.contiguous())
        note("attention", x)
        return x


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, heads):
        return x[:, None].expand(-1, heads, -1).clone()

    @staticmethod
    def backward(ctx, d):
        return over_heads(d), None


def over_heads(d):
    """The sum over dimension 1 in fp32, neighbours first, rounded once: an order that no shape and no device chooses."""
    total = d.float()
    while total.shape[1] > 1:
        pairs = total[:, 0:total.shape[1] // 2 * 2:2] + total[:, 1::2]
        total = torch.cat((pairs, total[:, -1:]), 1) if total.shape[1] % 2 else pairs
    return total[:, 0].to(d.dtype)


def to_heads(x, heads):
    """[T, heads, D] of [T, D]."""
    return _ToHeads.apply(x, heads)


class Packed:
    """The trainer's `recur`: whole sequences from nothing."""

    def __init__(self, ops, bounds):
        self.ops, self.bounds = ops, bounds.long()

    def __call__(self, layer, block, qkv, g, beta):
        rows = self.ops.short_conv(qkv[None], block.conv, cu_seqlens=self.bounds)[0]
        return block.mixed(self.ops.kda_fwd, rows, g, beta, self.bounds, arithmetic=block.arithmetic(rows, g, beta))


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


class Resident:
    """The sampler's for steps of one token of each of `rows` sequences, in memory that stays where it is, so that a GPU replays the
    step: what is kept of the sequence at place i lies at place i of every layer. Places that are nobody's compute with what they hold."""

    def __init__(self, model, rows):
        blocks = {i: block.other for i, block in enumerate(model.blocks) if isinstance(block.other, Recurrent)}
        self.ops, self.layers, self.open = model.ops, {}, None
        self.nothing = {i: _nothing(block, block.qkv.detach()[None, :, 0]) for i, block in blocks.items()}
        for i, empty in self.nothing.items():
            conv, (state, cache) = empty["conv"], empty["batch"]
            self.layers[i] = conv.new_zeros(rows, *conv.shape), (state.new_zeros(rows, *state.shape[1:]), cache.new_zeros(rows, *cache.shape[1:]))
        self.bounds = torch.arange(rows + 1, device=model.device)
        self.first = min(blocks)

    def take(self, sequences):
        """Moves what is kept of these sequences here, unless it lies here already. Returns how many rows of its chunk each has."""
        here = self.layers[self.first][1]
        for s in sequences:
            s.kept = s.kept or dict(self.nothing)
        own = [s.kept[self.first] for s in sequences]
        if not all(o["place"] == i and o["batch"] is here for i, o in enumerate(own)):
            for layer, (conv, batch) in self.layers.items():
                kept = [s.kept[layer] for s in sequences]
                conv[:len(kept)] = torch.stack([o["conv"] for o in kept])
                for t, moved in zip(batch, _together(kept)):
                    t[:len(kept)] = moved[:len(kept)].clone() if moved is t else moved
                self._give(sequences, layer, [o["rows"] for o in kept])
        return [o["rows"] for o in own]

    def _give(self, sequences, layer, rows):
        conv, batch = self.layers[layer]
        for i, (s, n) in enumerate(zip(sequences, rows)):
            s.kept[layer] = {"conv": conv[i], "rows": n, "batch": batch, "place": i}

    def step(self, sequences):
        """Every one of them has a row more."""
        for layer in self.layers:
            self._give(sequences, layer, [s.kept[layer]["rows"] % Stepped.chunk + 1 for s in sequences])

    def began(self, sequences):
        """Whether one of them has begun a chunk: its count then does not go on by one."""
        return any(s.kept[self.first]["rows"] == 1 for s in sequences)

    def tensors(self):
        return [t for conv, batch in self.layers.values() for t in (conv, *batch)]

    def __call__(self, layer, block, qkv, g, beta):
        conv, (state, cache) = self.layers[layer]
        rows, ends = self.ops.short_conv(qkv[None], block.conv, initial_state=conv, cu_seqlens=self.bounds, final_state=True)
        conv.copy_(ends)
        return block.mixed(self.ops.kda_step, rows[0], g, beta, self.bounds, rows=self.open, state=state, cache=cache)


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
