"""Ops whose weights, heads, rows or vocabulary are spread over a group of ranks, with the bits of one device, forward and backward.

A sum over ranks is never made by a transport: partial sums of whole leaves travel in fp32 and are added by ``tp_sum``, the top of linear's
tree. Every function takes ``group``: what ``as_group`` takes. Each is a step of all its ranks: all call it, with tensors that fit.
"""

import functools

import torch

import rlk
import rlk.torch as ops
from rlk import _errors, _scopes
from rlk._add_norm import AddNorm
from rlk._hybrid import over_heads
from rlk.parallel.transport import as_group, cut

#: Partial sums of at most so many bytes are gathered whole by every rank; larger ones are exchanged, so that each rank adds its share of
#: the rows. Only time depends on it.
GATHERED = 1 << 20


# ---- what is whose


def part(group, n):
    """This rank's part of a dimension of n, as a slice."""
    group = as_group(group)
    bounds = cut(n, group.size)
    return slice(bounds[group.rank], bounds[group.rank + 1])


def shard(t, group, dim=0, segments=None):
    """This rank's part of a whole weight: leaves of dimension `dim`, of every one of `segments` (sizes along it) where several lie there."""
    group = as_group(group)
    segments = segments or (t.shape[dim],)
    if sum(segments) != t.shape[dim]:
        raise _errors.InvalidArgument(f"parallel: segments {tuple(segments)} are {sum(segments)} together, dimension {dim} has {t.shape[dim]}")
    pieces = [piece.narrow(dim, s.start, s.stop - s.start)
              for piece, s in zip(t.split(tuple(segments), dim), (part(group, n) for n in segments))]
    return torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0].contiguous()


def unshard(t, group, dim=0, segments=None):
    """The whole of what `shard` cut, on every rank. `segments`: the whole sizes; one that is absent cannot be known from a part."""
    group = as_group(group)
    segments = segments or (t.shape[dim] * group.size,)
    bounds = [cut(n, group.size) for n in segments]
    each = [[b[r + 1] - b[r] for b in bounds] for r in range(group.size)]
    t = t.movedim(dim, 0)
    most = max(map(sum, each))
    if len(t) != sum(each[group.rank]):
        raise _errors.InvalidArgument(f"parallel: rank {group.rank} has {len(t)} of {sum(segments)} in dimension {dim}, its part is {sum(each[group.rank])}")
    padded = t if len(t) == most else torch.cat([t, t.new_zeros(most - len(t), *t.shape[1:])])
    rows = [whole[:sum(sizes)].split(sizes) for whole, sizes in zip(group.gather(padded), each)]
    return torch.cat([rows[r][s] for s in range(len(segments)) for r in range(group.size)]).movedim(0, dim).contiguous()


def rows_of(group, rows):
    """The rows of `rows` that this rank has where rows are spread: as many each, the last ones fewer."""
    each = -(-rows // group.size)
    return slice(min(rows, group.rank * each), min(rows, (group.rank + 1) * each))


def _padded(t, rows):
    return t.contiguous() if len(t) == rows else torch.cat([t, t.new_zeros(rows - len(t), *t.shape[1:])])


def gather_rows(t, group, rows):
    """All rows of what is spread by rows."""
    return group.gather(_padded(t, -(-rows // group.size))).flatten(0, 1)[:rows]


# ---- the sum over ranks


def join(partial, group, dtype, bias=None, residual=None, spread=False):
    """[M, N] of this rank's fp32 part of a sum, in the order of the tree; bias and residual, of `dtype`, are added once. With `spread` only
    this rank's rows come back, and `residual` has those rows alone."""
    rows, size, mine = len(partial), group.size, rows_of(group, len(partial))
    if group.peers is not None and size > 1 and group.peers.takes(partial, dtype):
        return group.peers.sum(partial, dtype, bias, residual, spread)
    few = partial.numel() * 4 <= GATHERED and not spread

    def add(parts, some):
        h = residual if residual is None or spread else residual[some]
        return ops.tp_sum(parts, bias=bias, residual=h, y=dtype)

    if size == 1 or few:
        return add(group.gather(partial), slice(None))
    each = -(-rows // size)
    y = add(group.exchange(_padded(partial, each * size).view(size, each, -1))[:, :mine.stop - mine.start], mine)
    return y if spread else gather_rows(y, group, rows)


def _summed(group, op, words, make, x, width, bias=None, residual=None, spread=False):
    """The sum over ranks of what make() gives, [rows of x, width], in x's dtype, where ranks agree on it; that itself where this rank is
    alone. make(rows, to) makes those rows alone, and writes them there."""
    peers, shape = group.peers if group.size > 1 else None, (len(x), width)
    if peers is not None and peers.lands(x, width):
        _tried(group, op, words, lambda: peers.land(*shape, make))
        return peers.landed(*shape, x.dtype, bias, residual, spread)
    partial = _tried(group, op, words, make)
    return partial if group.size == 1 else join(partial, group, x.dtype, bias, residual, spread)


def _leaves(group):
    each = 8 // group.size
    return each * group.rank, each


# ---- linear


class _Options:
    """What a forward was held to, for its backward, which may run on another thread."""

    def __init__(self, options):
        self.forward, self.scopes = options, _scopes.options_of_scopes()

    def backward(self, op):
        return ops._for_backward(op, self.forward) if self.forward else {}

    def within(self):
        return _scopes.within(self.scopes)


def _tried(group, op, words, run):
    """run(), and then the group's agreement that every rank's has run: what one refuses, or fails at, all refuse."""
    refused, found, said = None, None, ""
    try:
        found = run()
        said = words()
    except Exception as error:  # also torch's own, as for want of memory: the others would wait
        refused = error
    group.agree(op, said, refused)
    return found


def _flat(t):
    """[rows, last]; reshape cannot where a rank's part is empty."""
    return t.flatten(0, -2) if t.dim() > 2 else t


def _words(x, *more):
    return " ".join([str(list(x.shape)), str(x.dtype).removeprefix("torch."), *map(str, more)])


def _arithmetic(op, *args, **keywords):
    return rlk.resolve(op, *[None if t is None else t.detach() for t in args], **keywords).arithmetic


def _stand_in(t, dim, group, segments):
    """`t`, or for a part without a leaf what rank 0 has: an empty one has no bits, and no kernel of its own that ranks could differ in."""
    if t.shape[dim] or not sum(segments):
        return t
    return t.new_empty(*t.shape[:dim], sum(cut(n, group.size)[1] for n in segments), *t.shape[dim + 1:])


@functools.lru_cache(maxsize=64)
def _leaf_order(sizes, first, count, device):
    """Rows of a fused weight's part in the order of leaves: leaf j of every segment, filled up to its width with the row behind the last."""
    order, starts, start = [], [], 0
    bounds = [cut(n, 8) for n in sizes]
    for b in bounds:
        starts.append(start)
        start += b[first + count] - b[first]
    for j in range(first, first + count):
        for b, at, n in zip(bounds, starts, sizes):
            length, width = b[j + 1] - b[j], 16 * -(-n // 128)
            begin = at + b[j] - b[first]
            order += [*range(begin, begin + length), *[start] * (width - length)]
    return torch.tensor(order, device=device)


def _d_x(d_y, x, weight, group, segments, options):
    """make() of this rank's part of d_y * weight, in fp32, for _summed; whole and in x's dtype where it is alone."""
    total = sum(segments)
    if len(segments) > 1:
        order = _leaf_order(segments, *_leaves(group), weight.device)
        weight = torch.cat([weight, weight.new_zeros(1, weight.shape[1])])[order]
        d_y = torch.cat([d_y, d_y.new_zeros(len(d_y), 1)], 1)[:, order]
        total = sum(8 * 16 * -(-n // 128) for n in segments)
    first, count = _leaves(group)

    def make(some=slice(None), to=True):
        return ops.linear_bwd(d_y[some], x[some], weight, d_x=to, d_x_leaf_first=first, d_x_leaf_count=count, n_total=total, **options)

    return make


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, group, segments, rows, options):
        shape, x = x.shape, _flat(x)

        def run():
            mine = sum(b[group.rank + 1] - b[group.rank] for b in (cut(n, group.size) for n in segments))
            if weight.shape[0] != mine:
                raise _errors.InvalidArgument(f"parallel.column_linear: weight has N={weight.shape[0]}, rank {group.rank} of {group.size} has "
                                              f"{mine} of {list(segments)}")
            if rows is not None:
                _expect_rows("column_linear", x, group, rows)
                return x  # the product waits for the other ranks' rows
            return ops.linear(x, weight, bias, **options.forward)

        def words():
            return _words(x if rows is None else x[:0], *segments, rows, weight.dtype, bias is not None,
                          _arithmetic("linear", x, _stand_in(weight, 0, group, segments), **options.forward))

        y = _tried(group, "parallel.column_linear", words, run)
        whole = x
        if rows is not None:
            whole = gather_rows(x, group, rows)
            y = ops.linear(whole, weight, bias, **options.forward)
        ctx.save_for_backward(x if rows is not None else whole, weight)
        ctx.rlk = group, segments, rows, shape, options, bias is not None
        return y if rows is not None else y.view(*shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx, d_y):
        x, weight = ctx.saved_tensors
        group, segments, rows, shape, options, biased = ctx.rlk
        d_y, d_x, d_weight, d_bias = _flat(d_y).contiguous(), None, None, None
        with options.within():
            keywords = options.backward("linear_bwd")
            whole = x if rows is None else gather_rows(x, group, rows)
            if ctx.needs_input_grad[0]:
                def words():
                    there = _stand_in(d_y, 1, group, segments), whole, _stand_in(weight, 0, group, segments)
                    return _words(d_y[:, :0], *segments, _arithmetic("linear_bwd", *there, d_x=True, **keywords))

                d_x = _summed(group, "parallel.column_linear's gradient", words, _d_x(d_y, whole, weight, group, segments, keywords),
                              whole, whole.shape[1], spread=rows is not None).view(shape)
            d_weight, d_bias = _weights(d_y, whole, weight, ctx.needs_input_grad[1], biased and ctx.needs_input_grad[2], keywords)
        return d_x, d_weight, d_bias, None, None, None, None


def _weights(d_y, x, weight, wanted, biased, keywords):
    asked = {"d_weight": wanted, "d_bias": biased}
    if not any(asked.values()):
        return None, None
    found = iter(ops._as_tuple(ops.linear_bwd(d_y, x, weight, **{k: True for k, v in asked.items() if v}, **keywords)))
    return tuple(next(found) if v else None for v in asked.values())


def _expect_rows(op, x, group, rows):
    mine = rows_of(group, rows)
    if len(x) != mine.stop - mine.start:
        raise _errors.InvalidArgument(f"parallel.{op}: x has {len(x)} rows, rank {group.rank} of {group.size} has {mine.stop - mine.start} of {rows}")


def column_linear(x, weight, bias=None, *, group=None, segments=None, rows=None, **options):
    """linear whose N is spread: this rank's columns of y. `weight` is this rank's part (``shard(whole, group)``), of every one of
    `segments` where several projections lie in it (whole sizes: q, k, v or gate, up). The gradient of x is the whole one, on all ranks.

    With `rows`, x has this rank's rows of so many (the sequence-parallel form): they are gathered first, and so is the gradient spread."""
    group = as_group(group)
    segments = tuple(segments) if segments else (weight.shape[0] * group.size,)
    return _Column.apply(x, weight, bias, group, segments, rows, _Options(options))


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, residual, group, k_total, rows, options):
        shape, x = x.shape, _flat(x)
        first, count = _leaves(group)
        flat = None if residual is None else _flat(residual)

        def make(some=slice(None), to=None):
            if rows is not None and len(x) != rows:
                raise _errors.InvalidArgument(f"parallel.row_linear: x has {len(x)} rows, rows is {rows}")
            if flat is not None and rows is not None:
                _expect_rows("row_linear", flat, group, rows)
            if group.size == 1:
                return ops.linear(x, weight, bias, flat, **options.forward)
            for name, t in (("bias", bias), ("residual", flat)):
                if t is not None and (t.dtype != x.dtype or t.shape[-1] != weight.shape[0]):
                    raise _errors.InvalidArgument(f"parallel.row_linear: {name} is {list(t.shape)} of {t.dtype}, y has N={weight.shape[0]} of {x.dtype}")
            return ops.linear(x[some], weight, y=to, leaf_first=first, leaf_count=count, k_total=k_total, **options.forward)

        def words():
            there = x.shape[1] > 0 or k_total == 0
            more = {} if group.size == 1 else {"leaf_first": first if there else 0, "leaf_count": count, "k_total": k_total}
            operands = [_stand_in(t, 1, group, (k_total,)) for t in (x, weight)]
            return _words(x[:, :0], *weight.shape[:1], k_total, rows, bias is not None, residual is not None,
                          _arithmetic("linear", *operands, **more, **options.forward))

        y = _summed(group, "parallel.row_linear", words, make, x, weight.shape[0], bias, flat, rows is not None)
        ctx.save_for_backward(x, weight)
        ctx.rlk = group, rows, shape, options, bias is not None
        return y if rows is not None else y.view(*shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx, d_y):
        x, weight = ctx.saved_tensors
        group, rows, shape, options, biased = ctx.rlk
        needs = ctx.needs_input_grad
        d_residual = d_y if needs[3] else None
        with options.within():
            keywords = options.backward("linear_bwd")
            d_y = _flat(d_y).contiguous()
            if rows is not None:
                d_y = gather_rows(d_y, group, rows)
            d_x = ops.linear_bwd(d_y, x, weight, d_x=True, **keywords).view(shape) if needs[0] else None
            d_weight, d_bias = _weights(d_y, x, weight, needs[1], biased and needs[2], keywords)
        return d_x, d_weight, d_bias, d_residual, None, None, None, None


def row_linear(x, weight, bias=None, residual=None, *, group=None, k_total=None, rows=None, **options):
    """linear whose K is spread: x has this rank's columns, `weight` (``shard(whole, group, dim=1)``) likewise, and y is whole on all ranks.
    bias and residual are whole, and added once. `k_total`: the whole K; absent: as much on every rank.

    With `rows`, the number of x's rows, y has this rank's rows of them alone (the sequence-parallel form), and so has `residual`."""
    group = as_group(group)
    return _Row.apply(x, weight, bias, residual, group, k_total or x.shape[-1] * group.size, rows, _Options(options))


# ---- rows that are spread, and the norm


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, rows):
        ctx.rlk = group, rows

        def run():
            _expect_rows("gathered", x, group, rows)

        _tried(group, "parallel.gathered", lambda: _words(x[:0], rows), run)
        return gather_rows(x, group, rows)

    @staticmethod
    def backward(ctx, d_y):
        group, rows = ctx.rlk
        return d_y[rows_of(group, rows)], None, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.rlk = group, len(x)
        group.agree("parallel.spread", _words(x))
        return x[rows_of(group, len(x))].clone()

    @staticmethod
    def backward(ctx, d_y):
        group, rows = ctx.rlk
        return gather_rows(d_y, group, rows), None


def gathered(x, *, group=None, rows):
    """All rows of x, of which this rank has its own; every rank must then have the whole gradient."""
    return _Gathered.apply(x, as_group(group), rows)


def spread(x, *, group=None):
    """This rank's rows of x, which all ranks have; the gradient is gathered."""
    return _Spread.apply(x, as_group(group))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, gate, group, dim, rows, options):
        y = ops.rms_norm(x, weight, gate=gate, **options.forward)
        ctx.save_for_backward(x, weight, gate)
        ctx.rlk = group, dim, rows, options
        return y

    @staticmethod
    def backward(ctx, d_y):
        x, weight, gate = ctx.saved_tensors
        group, dim, rows, options = ctx.rlk
        d_y, d_weight = d_y.contiguous(), None
        names = [n for n, want in (("d_x", ctx.needs_input_grad[0]), ("d_gate", ctx.needs_input_grad[2])) if want]
        with options.within():
            keywords = options.backward("rms_norm_bwd")
            found = {}
            if names:
                found = dict(zip(names, ops._as_tuple(ops.rms_norm_bwd(d_y, x, weight, gate, **dict.fromkeys(names, True), **keywords))))
            if ctx.needs_input_grad[1]:  # sums over all rows, in their order
                group.agree("parallel.rms_norm's gradient", _words(x if rows is None else x[:0], dim, rows, gate is not None))
                given = [t for t in (d_y, x, gate) if t is not None]
                if rows is None:
                    given = [group.gather(t).movedim(0, dim).flatten(dim, dim + 1) for t in given]
                else:
                    given = [gather_rows(t, group, rows) for t in given]
                d_weight = ops.rms_norm_bwd(*given[:2], weight, *given[2:], d_weight=True, **keywords)
        return found.get("d_x"), d_weight, found.get("d_gate"), None, None, None, None


def rms_norm(x, weight, *, gate=None, group=None, dim=0, rows=None, **options):
    """rms_norm where ranks have different rows: with `rows`, this rank's of so many; else as many of dimension `dim` (heads) each. The
    gradient of `weight`, which all ranks have, is that of all rows."""
    return _Norm.apply(x, weight, gate, as_group(group), dim, rows, _Options(options))


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, added, stream, weight, eps, group, rows):
        ctx.spread = group, rows
        return AddNorm.forward(ctx, added, stream, weight, eps)

    @staticmethod
    def backward(ctx, d_y, d_stream):
        group, rows = ctx.spread

        def others(d_y, stream):
            group.agree("parallel.add_norm's gradient", _words(d_y[:0], rows))
            return gather_rows(d_y, group, rows), gather_rows(stream, group, rows)

        return *AddNorm.backward(ctx, d_y, d_stream, others), None, None


def add_norm(added, stream, weight, eps, *, group=None, rows):
    """rms_norm of added + stream, and that sum, of this rank's rows of so many. The gradient of `weight` is that of all rows."""
    return _AddNorm.apply(added, stream, weight, eps, as_group(group), rows)


# ---- heads that are spread, of what all ranks have


class _OwnHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.rlk = group
        if x.shape[1] % group.size:
            raise _errors.InvalidArgument(f"parallel.own_heads: x has {x.shape[1]} heads, no multiple of {group.size} ranks")
        return x.unflatten(1, (group.size, -1))[:, group.rank].contiguous()

    @staticmethod
    def backward(ctx, d_y):
        ctx.rlk.agree("parallel.own_heads' gradient", _words(d_y))
        return ctx.rlk.gather(d_y).movedim(0, 1).flatten(1, 2), None


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, heads, group):
        ctx.rlk = group
        return x[:, None].expand(-1, heads, -1).clone()

    @staticmethod
    def backward(ctx, d_y):
        ctx.rlk.agree("parallel.to_heads' gradient", _words(d_y))
        return over_heads(ctx.rlk.gather(d_y).movedim(0, 1).flatten(1, 2)), None, None


def own_heads(x, *, group=None):
    """This rank's heads of x [rows, heads, ..], which all ranks have; the gradient is gathered."""
    return _OwnHeads.apply(x, as_group(group))


def to_heads(x, heads, *, group=None):
    """[rows, heads, D] of x [rows, D], which all ranks have: x for each of this rank's `heads`. The gradient is the sum over the heads of all
    ranks, neighbours first."""
    return _ToHeads.apply(x, heads, as_group(group))


# ---- the vocabulary


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight, group, vocab, options):
        bounds = cut(vocab, group.size)
        start = bounds[group.rank]

        def run():
            _expect_vocabulary("embedding", weight, group, vocab)
            return ops.embedding(ids, weight, vocab_start=start, vocab=vocab, **options.forward)

        rows = _tried(group, "parallel.embedding", lambda: _words(ids, vocab, weight.shape[1], weight.dtype), run)
        ctx.save_for_backward(ids, weight)
        ctx.rlk = group, start, options
        if group.size == 1:
            return rows
        owner = (ids.flatten().long() // max(bounds[1], 1)).clamp(0, group.size - 1)
        flat, count = rows.flatten(0, -2), ids.numel()
        if flat.numel() * flat.element_size() <= GATHERED:
            flat = _of_owner(group.gather(flat), owner)
        else:
            each, mine = -(-count // group.size), rows_of(group, count)
            parts = group.exchange(_padded(flat, each * group.size).view(group.size, each, -1))
            flat = gather_rows(_of_owner(parts[:, :mine.stop - mine.start], owner[mine]), group, count)
        return flat.view(rows.shape)

    @staticmethod
    def backward(ctx, d_out):
        ids, weight = ctx.saved_tensors
        group, start, options = ctx.rlk
        keywords = {k: v for k, v in options.forward.items() if k in ("scale", "padding_idx")}
        with options.within():
            d_weight = ops.embedding_bwd(ids, d_out.contiguous(), weight, d_weight=True, vocab_start=start, **keywords)
        return None, d_weight, None, None, None


def _of_owner(parts, owner):
    """[M, H] of [T, M, H]: each row as its rank has it. A sum with the others' zeros would lose the sign of -0."""
    return parts[owner, torch.arange(len(owner), device=owner.device)]


def _expect_vocabulary(op, weight, group, vocab):
    mine = cut(vocab, group.size)
    mine = mine[group.rank + 1] - mine[group.rank]
    if weight.shape[0] != mine:
        raise _errors.InvalidArgument(f"parallel.{op}: weight has V={weight.shape[0]}, rank {group.rank} of {group.size} has {mine} of {vocab}")


def embedding(ids, weight, *, vocab, group=None, **options):
    """embedding whose vocabulary is spread: `weight` is this rank's part of `vocab` rows, ids and results are whole on all ranks."""
    return _Embedding.apply(ids, weight, as_group(group), vocab, _Options(options))


class _LmHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, group, vocab, whole, options):
        def run():
            _expect_vocabulary("lm_head", weight, group, vocab)
            return ops.lm_head(hidden, weight, bias, **options.forward)

        # Not the result's dtype: only those of the operands choose who serves.
        plain = {k: v for k, v in options.forward.items() if k != "out"}
        part_ = _tried(group, "parallel.lm_head", lambda: _words(hidden, vocab, whole, options.forward.get("out"), _arithmetic(
            "lm_head", hidden, weight, bias, **plain)), run)
        ctx.save_for_backward(hidden, weight)
        ctx.rlk = group, vocab, bias is not None, _Options(plain), whole
        return unshard(part_, group, part_.dim() - 1, (vocab,)) if whole else part_

    @staticmethod
    def backward(ctx, d_logits):
        hidden, weight = ctx.saved_tensors
        group, vocab, biased, options, whole = ctx.rlk
        mine = part(group, vocab) if whole else slice(None)
        d_y, x = _flat(d_logits)[:, mine].contiguous(), _flat(hidden)
        d_hidden = d_weight = d_bias = None
        with options.within():
            if ctx.needs_input_grad[0]:
                make = _d_x(d_y, x, weight, group, (vocab,), options.backward("linear_bwd"))
                d_hidden = _summed(group, "parallel.lm_head's gradient", lambda: _words(x, vocab), make, x, x.shape[1]).view(hidden.shape)
            asked = {n: True for n, want in (("d_weight", ctx.needs_input_grad[1]), ("d_bias", biased and ctx.needs_input_grad[2])) if want}
            if asked:
                found = dict(zip(asked, ops._as_tuple(ops.lm_head_bwd(d_y, x, weight, **asked, **options.backward("lm_head_bwd")))))
                d_weight, d_bias = found.get("d_weight"), found.get("d_bias")
        return d_hidden, d_weight, d_bias, None, None, None, None


def lm_head(hidden, weight, bias=None, *, vocab, group=None, whole=True, **options):
    """The logits of the whole vocabulary on all ranks, or if not `whole` this rank's columns, each with its part of `weight` and `bias`.
    lm_head's bits; the gradient of hidden is linear's, for lm_head sums over the vocabulary in one chain, which no part of it can give:
    on one device lm_head_bwd has it by arithmetic fma32/tree8, on Hopper sm90/t25k16/tree8."""
    return _LmHead.apply(hidden, weight, bias, as_group(group), vocab, whole, _Options(options))


def _keep_part(keep, start, count):
    """The bits of columns [start, start + count) of a whole mask of kept entries; start is a multiple of 16."""
    words, whole = -(-count // 32), keep.long() & 0xffffffff
    whole = torch.nn.functional.pad(whole, (0, 2))[:, start // 32:start // 32 + words + 1]
    if start % 32:
        whole = (whole[:, :-1] >> 16) | ((whole[:, 1:] & 0xffff) << 16)
    return torch.where(whole[:, :words] >= 1 << 31, whole[:, :words] - (1 << 32), whole[:, :words]).to(torch.int32).contiguous()


class _Logp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, target, temperatures, keep, group, vocab, attributes, asked, options):
        bounds = cut(vocab, group.size)
        first, count = _leaves(group)
        start, end = bounds[group.rank], bounds[group.rank + 1]
        keep = None if keep is None else _keep_part(keep, start, end - start)
        mine = attributes | {"vocab": vocab, "vocab_start": start, "leaf_first": first, "leaf_count": count}
        rows = {"target": target, "temperatures": temperatures, "keep": keep}

        def run():
            _expect_vocabulary("linear_logp", weight, group, vocab)
            return ops.linear_logp(hidden, weight, bias, **rows, **mine, stats=True, **options.forward)

        def words():
            chain = _arithmetic("linear_logp", hidden, weight, bias, **rows, **mine, stats=True, **options.forward)
            return _words(hidden, vocab, target.dtype, bias is not None, temperatures is not None, keep is not None, attributes, *asked, chain)

        stats = _tried(group, "parallel.linear_logp", words, run)
        found = ops._as_tuple(ops.logp_merge(group.gather(stats), temperatures, temperature=attributes.get("temperature", 1.0),
                                             **{name: True for name in asked}, stats=True))
        ctx.save_for_backward(hidden, weight, bias, target, temperatures, keep, found[-1])
        ctx.rlk = group, vocab, mine, asked, options
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[t for n, t in zip(asked, found) if n == "lse"])
        return found[:-1] if len(asked) > 1 else found[0]

    @staticmethod
    def backward(ctx, *gradients):
        hidden, weight, bias, target, temperatures, keep, stats = ctx.saved_tensors
        group, vocab, attributes, asked, options = ctx.rlk
        given = {f"d_{n}": g.contiguous() for n, g in zip(asked, gradients) if n != "lse" and g is not None}
        wanted = [n for n, want in (("d_hidden", ctx.needs_input_grad[0]), ("d_weight", ctx.needs_input_grad[1]),
                                    ("d_bias", ctx.needs_input_grad[2])) if want]
        if not given or not wanted:
            return (None,) * 11
        names = dict.fromkeys(wanted, True)
        with options.within():
            found = dict(zip(wanted, ops._as_tuple(ops.linear_logp_bwd(
                hidden, weight, bias, target=target, temperatures=temperatures, keep=keep, stats=stats, **given, **attributes, **names,
                **options.backward("linear_logp_bwd")))))
            partial = found.get("d_hidden")
            if partial is not None and group.size > 1:
                group.agree("parallel.linear_logp's gradient", _words(partial, vocab))
                found["d_hidden"] = join(partial, group, hidden.dtype)
        return found.get("d_hidden"), found.get("d_weight"), found.get("d_bias"), *[None] * 8


def linear_logp(hidden, weight, bias=None, *, target, vocab, group=None, temperatures=None, keep=None, logp=True, lse=False, entropy=False,
                temperature=1.0, logits_round="fp32", softcap=0.0, ignore_index=-100, **options):
    """linear_logp whose vocabulary is spread: each rank with its part of `weight` and `bias`; `keep` is whole. Results and gradients have
    the bits of one device."""
    asked = [n for n, want in (("logp", logp), ("lse", lse), ("entropy", entropy)) if want]
    if not asked:
        raise _errors.InvalidArgument("parallel.linear_logp: no result is asked for, each is optional: logp=True asks for one")
    attributes = {"temperature": temperature, "logits_round": logits_round, "softcap": softcap, "ignore_index": ignore_index}
    return _Logp.apply(hidden, weight, bias, target, temperatures, keep, as_group(group), vocab, attributes, asked, _Options(options))


def sample(logits, temperature=None, top_k=None, top_p=None, min_p=None, seed=None, stream=None, position=None, *, vocab, group=None, logp=False,
           logp_raw=False, count=False, keep=False, bad_count=False, raw_temperature=True, **options):
    """sample from this rank's columns of the logits ([N, its part of vocab]): the same tokens on all ranks. Histograms are exchanged where rows
    are filtered, and a few numbers of each row where they are not; never logits. `keep` is this rank's part of the bits."""
    group = as_group(group)
    first, leaves = _leaves(group)
    rows = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    mine = rows | {"min_p": min_p, "seed": seed, "stream": stream, "position": position} | options | {
        "vocab": vocab, "vocab_start": cut(vocab, group.size)[group.rank], "leaf_first": first, "leaf_count": leaves, "raw_temperature": raw_temperature}
    steps = [("largest", 0), *[(name, digit) for name in ("top_k", "top_p") if rows[name] is not None for digit in range(3)], ("token", 0)]
    asked = {n: True for n, want in (("logp", logp), ("logp_raw", logp_raw), ("count", count), ("bad_count", bad_count)) if want}
    state = None
    for step, digit in steps:
        last = step == "token"

        def run():
            if state is None:
                _expect_columns("sample", logits, group, vocab)
            more = {"keep": True} if last and keep else {}
            return ops._as_tuple(ops.sample_part(logits, **mine, state=state, step=step, digit=digit, partials=True, **more))

        part_ = _tried(group, "parallel.sample", lambda: _words(logits[:, :0], vocab, step, digit, options), run)
        found = ops.sample_merge(group.gather(part_[0]), **rows, state=state, step=step, digit=digit, raw_temperature=raw_temperature,
                                 **({"token": True} | asked if last else {"next": True}))
        state = None if last else found
    named = dict(zip(("token", *asked), ops._as_tuple(found))) | ({"keep": part_[1]} if keep else {})
    out = [named[n] for n in ("token", "logp", "logp_raw", "count", "keep", "bad_count") if n in named]
    return tuple(out) if len(out) > 1 else out[0]


def _expect_columns(op, logits, group, vocab):
    mine = part(group, vocab)
    if logits.shape[1] != mine.stop - mine.start:
        raise _errors.InvalidArgument(f"parallel.{op}: logits has V={logits.shape[1]}, rank {group.rank} of {group.size} has "
                                      f"{mine.stop - mine.start} of {vocab}")
