"""rlk.model's decoder over a group of ranks, by one call:

    model = rlk.parallel.decoder(rlk.model.Decoder("qwen3-8b"), group)       # the same calls as before, on every rank

Heads (of attention, of latent attention and of KDA), the MLP and the vocabulary are spread, norms and the stream are on every rank. Forward, log-probabilities and tokens are those of the
model on one device; gradients are the same at every degree, 1 included, and differ from the model's own where a sum over a spread
dimension has leaves (rlk.parallel.ops).
"""

from dataclasses import replace

import torch
from torch import nn

import rlk
import rlk.model
import rlk.torch
from rlk import _errors
from rlk._add_norm import AddNorm
from rlk.parallel import ops
from rlk.parallel.transport import as_group, cut


class _Part:
    """What a rank has of a weight: leaves of `dim`, in every one of `segments`; a norm's weight over spread heads is whole."""

    def __init__(self, kind, dim=None, segments=None):
        self.kind, self.dim, self.segments = kind, dim, segments

    def of(self, whole, group):
        return whole.clone() if self.dim is None else ops.shard(whole, group, self.dim, self.segments).clone()

    def whole(self, part, group):
        return part if self.dim is None else ops.unshard(part, group, self.dim, self.segments)


class _Heads(_Part):
    """A weight with a row for each head, of which a rank has those of its heads."""

    def __init__(self):
        super().__init__("per head", 0)

    def of(self, whole, group):
        return whole.unflatten(0, (group.size, -1))[group.rank].clone()

    def whole(self, part, group):
        return group.gather(part).flatten(0, 1)


class Ops:
    """rlk.torch, but for what is spread."""

    gates = True  # rlk.model.gated

    def __init__(self, group, vocab, spread_rows):
        self.group, self.vocab, self.parts, self._chain = group, vocab, {}, None
        self.whole_logits = False
        self.spread_rows, self.rows = spread_rows, None  # the rows of the present forward, where they are spread

    def __getattr__(self, name):
        return getattr(rlk.torch, name)

    def _part(self, op, weight):
        if id(weight) not in self.parts:
            raise _errors.InvalidArgument(f"parallel: {op} has a weight {list(weight.shape)} that was not spread with the model")
        return self.parts[id(weight)][0]

    def linear(self, x, weight, bias=None, residual=None, **options):
        p = self._part("linear", weight)
        if p.kind in ("column", "inner column") and residual is None:
            rows = self.rows if p.kind == "column" else None
            return ops.column_linear(x, weight, bias, segments=p.segments, group=self.group, rows=rows, **options)
        if p.kind.startswith("whole") and residual is None:
            x = x if self.rows is None else ops.gathered(x, group=self.group, rows=self.rows)
            y = rlk.torch.linear(x, weight, bias, **options)
            return ops.own_heads(y, group=self.group) if p.kind == "whole, of own heads" else y
        if p.kind == "row":
            return ops.row_linear(x, weight, bias, residual, k_total=p.segments[0], group=self.group, rows=self.rows, **options)
        raise _errors.Unsupported(f"parallel: linear has a residual and a weight that is spread by {p.kind}")

    def rms_norm(self, x, weight, *more, **options):
        kind = self._part("rms_norm", weight).kind
        heads = kind == "heads"
        if (heads or self.rows is not None and kind != "whole norm") and not more and torch.is_grad_enabled() and (weight.requires_grad or x.requires_grad):
            return ops.rms_norm(x, weight, dim=1, rows=None if heads else self.rows, group=self.group, **options)
        return rlk.torch.rms_norm(x, weight, *more, **options)

    def add_norm(self, added, stream, weight, eps):
        if self.rows is None:
            return AddNorm.apply(added, stream, weight, eps)
        return ops.add_norm(added, stream, weight, eps, group=self.group, rows=self.rows)

    def to_heads(self, x, heads):
        return ops.to_heads(x, heads, group=self.group)

    def embedding(self, ids, weight, **options):
        rows = ops.embedding(ids, weight, vocab=self.vocab, group=self.group, **options)
        self.rows = len(rows) if self.spread_rows else None
        return ops.spread(rows, group=self.group) if self.spread_rows else rows

    def sample(self, logits, *rows, **options):
        if logits.shape[1] == self.vocab:
            return rlk.torch.sample(logits, *rows, **options)
        return ops.sample(logits, *rows, vocab=self.vocab, group=self.group, **options)

    def linear_logp(self, hidden, weight, bias=None, **options):
        return ops.linear_logp(hidden, weight, bias, vocab=self.vocab, group=self.group, **options)

    def lm_head(self, hidden, weight, bias=None, **options):
        """By linear_logp's chain of sums: what is drawn is what is scored."""
        if self._chain is None:
            target = torch.zeros(len(hidden), dtype=torch.int32, device=hidden.device)
            found = rlk.resolve("linear_logp", hidden.detach(), weight.detach(), target=target, logp=True)
            self._chain = rlk.model.chain_of(found.arithmetic)
        return ops.lm_head(hidden, weight, bias, vocab=self.vocab, group=self.group, whole=self.whole_logits, **{"arithmetic": self._chain} | options)


class Decoder(rlk.model.Decoder):
    """What ``decoder`` makes of a model: `config` is this rank's, `whole_config` the model's."""

    whole_config = None
    #: Whether note() is shown all heads and rows, gathered, and not this rank's alone.
    whole_notes = False

    def forward(self, tokens, positions, attend, note=None, recur=None, keep=None, bounds=None, prefix_of=None):
        more = {"recur": recur, "keep": keep, "bounds": bounds, "prefix_of": prefix_of} | ({} if note is None else {"note": self._noted(note) if self.whole_notes else note})
        try:
            hidden = super().forward(tokens, positions, attend, **more)
            return ops.gathered(hidden, group=self.ops.group, rows=self.ops.rows) if self.ops.spread_rows else hidden
        finally:
            self.ops.rows = None

    def _noted(self, note):
        group, c = self.ops.group, self.whole_config

        def noted(layer, name, rows):
            if name == "qkv":
                rows = ops.unshard(rows.detach(), group, 1, _segments(c, layer))
            elif name in ("rope", "attention", "recurrence"):
                rows = group.gather(rows.detach()).movedim(0, 1).flatten(1, 2)
            elif self.ops.spread_rows:
                rows = ops.gather_rows(rows.detach(), group, self.ops.rows)
            note(layer, name, rows)

        return noted

    def logits(self, hidden, whole=False):
        """[T, this rank's columns] in fp32, of which ops.sample draws; `whole`: [T, vocab]."""
        self.ops.whole_logits = whole
        return super().logits(hidden)

    def save(self, folder):
        raise _errors.Unsupported("parallel: a rank has parts of the weights: rlk.parallel.whole(model).save(folder)")

    def load_weights(self, folder):
        raise _errors.Unsupported("parallel: a rank has parts of the weights: rlk.parallel.decoder(rlk.model.load(folder), group)")


def _recurrent(c, layer):
    return c.period and (layer + 1) % c.period


def _segments(c, layer):
    """What the first product of a layer's attention is cut into."""
    if _recurrent(c, layer):
        return (c.heads * c.state_dim,) * 3
    if c.period:
        return (c.heads * (c.plain_dim + c.extra_dim),)
    return c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim


def _known(c, layer):
    """What a rank has of each weight of a layer, by its name in the block."""
    first, width = _Part("column", 0, _segments(c, layer)), c.heads * (c.head_dim if not c.period else c.value_dim)
    known = {"norm": _Part("norm"), "mlp_norm": _Part("norm"), "gate_up": _Part("column", 0, (c.mlp, c.mlp)), "down": _Part("row", 1, (c.mlp,))}
    if _recurrent(c, layer):
        width = c.heads * c.state_dim
        wide, whole, each = _Part("inner column", 0, (width,)), _Part("whole"), _Heads()
        known |= {"other.qkv": first, "other.conv": _Part("channels", 0, _segments(c, layer)), "other.decay_in": whole, "other.decay_out": wide,
                  "other.gate_in": whole, "other.gate_out": wide, "other.beta": _Part("whole, of own heads"), "other.a_log": each,
                  "other.dt_bias": each, "other.out_norm": _Part("heads")}
    elif c.period:
        known |= {"other.q": first, "other.narrow": _Part("whole"), "other.narrow_norm": _Part("whole norm"),
                  "other.kv": _Part("inner column", 0, (c.heads * (c.plain_dim + c.value_dim),))}
    else:
        known |= {"qkv": first, "q_norm": _Part("heads"), "k_norm": _Part("heads")}
    return known | {"out": _Part("row", 1, (width,))}


def _parts(model, c):
    """(name, the module that has the weight, its name there, what a rank has of it)."""
    vocabulary = _Part("vocabulary", 0, (c.vocab,))
    yield "embed", model, "embed", vocabulary
    if model.head is not None:
        yield "head", model, "head", vocabulary
    yield "norm", model, "norm", _Part("norm")
    for i, block in enumerate(model.blocks):
        known = _known(c, i)
        for name, weight in list(block.named_parameters()):
            if name not in known:
                raise _errors.Unsupported(f"parallel: layer {i} has a weight '{name}', known are {', '.join(known)}")
            inner, _, last = name.rpartition(".")
            yield f"blocks.{i}.{name}", block.get_submodule(inner), last, known[name]


def _refuse(c, group):
    """Heads must lie as leaves do."""
    widths = {"heads": [c.head_dim], "kv_heads": [c.head_dim]}
    if c.period:
        widths = {"heads": sorted({c.state_dim, c.plain_dim + c.extra_dim, c.plain_dim + c.value_dim, c.value_dim})}
    for word, dims in widths.items():
        for dim in dims:
            count = getattr(c, word)
            n, size = count * dim, group.size
            if cut(n, size) != [r * n // size for r in range(size + 1)] or count % size:
                raise _errors.InvalidArgument(
                    f"parallel: {count} {word} of {dim} over {size} ranks: heads divided by ranks and {word} * {dim}={n} divided by 128 must leave "
                    "nothing, so that a rank's heads are whole leaves")


def decoder(model, group=None, spread_rows=False):
    """Spreads a model of rlk.model over the ranks of `group`, in place: every rank has the whole one before, and its part of it after. With
    `spread_rows` the stream is spread too: between a layer's sums each rank has its own tokens alone, which saves memory."""
    group, c = as_group(group), model.config
    if isinstance(model, Decoder):
        raise _errors.InvalidArgument("parallel: the model is spread already")
    if model.ops is not rlk.torch:
        raise _errors.Unsupported("parallel: the model's ops are not rlk.torch")
    refused = None
    try:
        _refuse(c, group)
        parts = list(_parts(model, c))
    except _errors.Error as error:
        refused = error
    group.agree("parallel.decoder", f"{spread_rows} {model.embed.dtype} {c}", refused)
    model.ops = Ops(group, c.vocab, spread_rows)
    with torch.no_grad():
        for name, module, weight, part in parts:
            whole = getattr(module, weight)
            mine = nn.Parameter(part.of(whole.detach(), group), requires_grad=whole.requires_grad)
            setattr(module, weight, mine)
            model.ops.parts[id(mine)] = part, name
    local = replace(c, heads=c.heads // group.size, kv_heads=c.kv_heads // group.size)
    for module in (model, *model.blocks, *[block.other for block in model.blocks if block.other is not None]):
        module.config = local
    model.__class__, model.whole_config = Decoder, c  # all else that a decoder has stays as it is
    return model


def state(model, gradients=False):
    """(name, whole weight or gradient) of a spread model, one by one, on every rank."""
    for name, module, weight, part in _parts(model, model.whole_config):
        mine = getattr(module, weight)
        mine = mine.grad if gradients else mine.detach()
        yield name, None if mine is None else part.whole(mine, model.ops.group)


def reshard(source, target):
    """Writes the weights of one model into another that is spread otherwise; either may be whole. Every rank of both calls it."""
    if _config(source) != _config(target):
        raise _errors.InvalidArgument(f"parallel.reshard: the models differ: {rlk.model.describe(_config(source))}; {rlk.model.describe(_config(target))}")
    with torch.no_grad():
        to = {name: (getattr(module, weight), part) for name, module, weight, part in _parts(target, _config(target))}
        weights = state(source) if isinstance(source, Decoder) else (
            (name, getattr(module, weight).detach()) for name, module, weight, _ in _parts(source, source.config))
        for name, whole in weights:
            mine, part = to[name]
            mine.copy_(part.of(whole, target.ops.group) if isinstance(target, Decoder) else whole)
    return target


def _config(model):
    return model.whole_config if isinstance(model, Decoder) else model.config


def whole(model):
    """The model of one device, with a spread one's weights."""
    return reshard(model, rlk.model.Decoder(model.whole_config, dtype=model.embed.dtype, device=model.device))
