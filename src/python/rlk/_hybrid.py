"""Blocks of the Kimi-Linear kind for rlk.model: KDA behind a short convolution, with a gated norm; and latent attention without
rotation. A layer's MLP is Block's own."""

import torch
from torch import nn

import rlk


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

    def mixed(self, ops, rows, g, beta, bounds, state=None, final=False):
        """The recurrence over packed rows that the convolution left; with `final` also the state behind each sequence."""
        q, k, v = (t[None] for t in rows.unflatten(-1, (3, self.heads, self.dim)).unbind(1))
        return ops.kda_fwd(q, k, v, g[None], beta[None], initial_state=state, a_log=self.a_log, dt_bias=self.dt_bias,
                           cu_seqlens=bounds, qk_l2norm=True, beta_sigmoid=True, gate="softplus", final_state=final)


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
        return block.mixed(self.ops, rows, g, beta, self.bounds)[0]


class Stepped:
    """The sampler's: a sequence comes in pieces of any size. KDA works in chunks of 64 tokens from a sequence's start, so what is kept is
    the state at the last chunk's start and the rows behind it; a token computes its chunk again, to the bits that the whole has."""

    chunk = 64

    def __init__(self, ops, kept, counts):
        """`kept`: of every sequence a dict by layer; `counts`: how many rows each has now."""
        self.ops, self.kept, self.counts = ops, kept, counts

    def __call__(self, layer, block, qkv, g, beta):
        device, ops = qkv.device, self.ops
        open_ = [kept.get(layer) or _nothing(block, qkv, g, beta) for kept in self.kept]
        bounds = _bounds(self.counts, device)
        conv = ops.short_conv(qkv[None], block.conv, initial_state=torch.stack([o["conv"] for o in open_]), cu_seqlens=bounds,
                              final_state=True)
        whole = [[torch.cat((o[name], new)) for o, new in zip(open_, rows.split(self.counts))]
                 for name, rows in (("rows", conv[0][0]), ("g", g), ("beta", beta))]
        state = torch.stack([o["state"] for o in open_])
        lengths = [len(rows) for rows in whole[0]]
        out = block.mixed(ops, *map(torch.cat, whole), _bounds(lengths, device), state)[0]
        found = torch.cat([rows[-n:] for rows, n in zip(out.split(lengths), self.counts)])
        full = [n // self.chunk * self.chunk for n in lengths]
        if any(full):
            state = block.mixed(ops, *(torch.cat([t[:n] for t, n in zip(part, full)]) for part in whole), _bounds(full, device),
                                state, final=True)[1]
        for i, kept in enumerate(self.kept):
            kept[layer] = {"conv": conv[1][i], "state": state[i]} | {
                name: part[i][full[i]:] for name, part in zip(("rows", "g", "beta"), whole)}
        return found


def _bounds(lengths, device):
    return torch.tensor([0, *lengths]).cumsum(0).to(device)


def _nothing(block, qkv, g, beta):
    """What is kept of a sequence before its first token."""
    return {"conv": qkv.new_zeros(block.conv.shape[1] - 1, qkv.shape[1]), "rows": qkv[:0], "g": g[:0], "beta": beta[:0],
            "state": torch.zeros(block.heads, block.dim, block.dim, device=qkv.device)}
