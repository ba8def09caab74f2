"""Attention whose tokens, or whose cache of keys and values, are spread over ranks, with the bits of one device.

Tokens of a packed batch, in three forms. *heads*: tokens are exchanged for heads, so that each rank attends over all tokens with its
share of the heads, and back; where there are enough key heads. *keys*: keys and values are gathered, and each rank's own queries attend.
*splits*: queries are gathered, every rank computes what its own keys add to each of them (``attention_part``), that is exchanged for the
rank's own queries, and ``attention_merge`` joins it, ascending; where ranks begin with a split of the sequence that they cut. The gradients
of the last two are one: those of the rank's own keys sum over all queries that see them, so the queries are gathered; those of its own
queries need all keys, which are gathered too.

A cache (``cached_attention``): each rank has a run of splits of every sequence's keys, and all have all queries.
"""

import torch

import rlk.torch as ops
from rlk import _errors
from rlk.parallel import ops as _ops
from rlk.parallel.ops import _arithmetic, _expect_rows, _Options, _padded, _tried, _words, gather_rows, rows_of
from rlk.parallel.transport import as_group


def _to_heads(t, group, rows):
    """[rows, H / size, D]: all tokens of this rank's heads, of [own rows, H, D]."""
    each = -(-rows // group.size)
    parts = _padded(t, each).unflatten(1, (group.size, -1)).movedim(1, 0)
    return group.exchange(parts).flatten(0, 1)[:rows].contiguous()


def _to_rows(t, group, rows):
    """[own rows, H, D] of [rows, H / size, D]."""
    each, mine = -(-rows // group.size), rows_of(group, rows)
    parts = group.exchange(_padded(t, each * group.size).unflatten(0, (group.size, each)))
    return parts.movedim(0, 1).flatten(1, 2)[:mine.stop - mine.start].contiguous()


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, group, rows, back):
        ctx.rlk = group, rows, back
        return (_to_rows if back else _to_heads)(t, group, rows)

    @staticmethod
    def backward(ctx, d):
        group, rows, back = ctx.rlk
        return (_to_heads if back else _to_rows)(d, group, rows), None, None, None


_TILE = 128  # keys


def _seen(bounds, mine, causal):
    """Sequences that have queries in the rows `mine`: cu_q of those, cu_k of the keys that they see, and where these lie."""
    cu_q, cu_k, first, last = [0], [0], None, 0
    for a, b in zip(bounds, bounds[1:]):
        lo, hi = max(a, mine.start), min(b, mine.stop)
        if lo < hi:
            first, last = a if first is None else first, hi if causal else b
            cu_q.append(cu_q[-1] + hi - lo)
            cu_k.append(cu_k[-1] + last - a)
    return cu_q, cu_k, slice(first or 0, last)


def _seeing(bounds, mine, causal):
    """The other way: for the keys in the rows `mine`, the rows of queries that may see them, which are those of these keys' sequences from
    there on, and their bounds. They begin with a tile of the sequence, since tensor cores' groups of queries are counted from a call's first."""
    cu, first, last = [0], None, 0
    for a, b in zip(bounds, bounds[1:]):
        lo, hi = max(a, mine.start), min(b, mine.stop)
        if lo < hi:
            start = a + (lo - a) // _TILE * _TILE if causal else a
            first, last = start if first is None else first, b
            cu.append(cu[-1] + b - start)
    return cu, slice(first or 0, last)


def _bounds(device, *bounds):
    return [torch.tensor(b, dtype=torch.int32, device=device) for b in bounds]


def _by_keys(q, k, v, sinks, group, rows, bounds, attributes, options):
    """out and lse of this rank's queries."""
    cu_q, cu_k, at = _seen(bounds, rows_of(group, rows), attributes.get("causal", True))
    k, v = (gather_rows(t, group, rows)[at] for t in (k, v))
    out, lse = ops.attention(q, k, v, *_bounds(q.device, cu_q, cu_k), sinks=sinks, lse=True, **attributes, **options.forward)
    out[cu_q[-1]:], lse[cu_q[-1]:] = 0, 0  # rows behind the last bound are nobody's
    return out, lse


def _parts(bounds, mine):
    """For every sequence: the bound of its keys in the rows `mine`, how many tokens it has, and the first one of these keys."""
    cu, first = [0], []
    for a, b in zip(bounds, bounds[1:]):
        lo, hi = max(a, mine.start), min(b, mine.stop)
        cu.append(cu[-1] + max(0, hi - lo))
        first.append(lo - a if lo < hi else 0)
    return cu, [b - a for a, b in zip(bounds, bounds[1:])], first


def _by_splits(q, k, v, sinks, group, rows, bounds, attributes, options):
    """Likewise, by what each rank's keys add."""
    each, mine = -(-rows // group.size), rows_of(group, rows)
    cu_q, cu_k, kv_len, k_first = _bounds(q.device, bounds, *_parts(bounds, mine))
    partials = ops.attention_part(gather_rows(q, group, rows), _padded(k, each), _padded(v, each), cu_q, cu_k, kv_len, k_first=k_first,
                                  **attributes, **options.forward)
    partials[bounds[-1]:] = 0
    return _merged_rows(group, partials, sinks, q.dtype, mine)


def _merged_rows(group, partials, sinks, dtype, mine):
    """out and lse of the rows `mine`, of every rank's partials of all rows."""
    each = -(-len(partials) // group.size)
    parts = group.exchange(_padded(partials, each * group.size).unflatten(0, (group.size, each)))
    return ops.attention_merge(parts[:, :mine.stop - mine.start], sinks, out=dtype, lse=True)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, group, rows, bounds, form, attributes, options):
        out, lse = (_by_splits if form == "splits" else _by_keys)(q, k, v, sinks, group, rows, bounds, attributes, options)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.rlk = group, rows, bounds, attributes, options
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, sinks, out, lse = ctx.saved_tensors
        group, rows, bounds, attributes, options = ctx.rlk
        attributes = {name: value for name, value in attributes.items() if name != "split"}
        causal, mine = attributes.get("causal", True), rows_of(group, rows)
        d_out, d_q, d_k, d_v = d_out.contiguous(), None, None, None
        with options.within():
            keywords = attributes | options.backward("attention_bwd") | {"sinks": sinks}
            group.agree("parallel.attention's gradient", _words(q[:0], rows))
            all_k, all_v = (gather_rows(t, group, rows) for t in (k, v))
            if ctx.needs_input_grad[0]:
                cu_q, cu_k, at = _seen(bounds, mine, causal)
                cu_q, cu_k = _bounds(q.device, cu_q, cu_k)
                d_q = ops.attention_bwd(q=q, k=all_k[at], v=all_v[at], out=out, lse=lse, d_out=d_out, cu_q=cu_q, cu_k=cu_k, d_q=True, **keywords)
            if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
                cu, some = _seeing(bounds, mine, causal)
                cu, = _bounds(q.device, cu)
                whole = {name: gather_rows(t, group, rows)[some] for name, t in (("q", q), ("out", out), ("lse", lse), ("d_out", d_out))}
                d_k, d_v = ops.attention_bwd(**whole, k=all_k[some], v=all_v[some], cu_q=cu, cu_k=cu, d_k=True, d_v=True, **keywords)
                d_k, d_v = (_fitted(t, some, mine) for t in (d_k, d_v))
        return d_q, d_k, d_v, *[None] * 7


def _fitted(t, at, mine):
    """The rows `mine` of t, which has the rows `at`; zeros where it has none."""
    lo, hi = max(at.start, mine.start), min(at.stop, mine.stop)
    whole = t.new_zeros(mine.stop - mine.start, *t.shape[1:])
    if lo < hi:
        whole[lo - mine.start:hi - mine.start] = t[lo - at.start:hi - at.start]
    return whole


_ATTRIBUTES = ("scale", "causal", "window", "softcap", "split")
_FORMS = ("heads", "keys", "splits")


def attention(q, k, v, cu_seqlens, *, group=None, rows, form=None, sinks=None, **options):
    """attention of a packed batch of `rows` tokens, of which each rank has its rows (``rows_of``) of q, k and v, and gets those of the result.
    cu_seqlens are the whole batch's bounds, on all ranks. `form`: "heads", "keys" or "splits"; absent: heads where the ranks divide the key
    heads, else keys."""
    group = as_group(group)
    attributes = {name: options.pop(name) for name in _ATTRIBUTES if name in options}
    bounds = cu_seqlens.tolist()
    form = form or ("heads" if k.shape[1] % group.size == 0 else "keys")

    def run():
        for name, t in (("q", q), ("k", k), ("v", v)):
            if t.dim() != 3:
                raise _errors.InvalidArgument(f"parallel.attention: {name} has rank {t.dim()}, it must be 3: [rows, heads, channels]")
            _expect_rows("attention", t, group, rows)
        if form not in _FORMS:
            raise _errors.InvalidArgument(f"parallel.attention: form is {form!r}, it must be 'heads', 'keys' or 'splits'")
        if form == "heads" and k.shape[1] % group.size:
            raise _errors.InvalidArgument(f"parallel.attention: {k.shape[1]} key heads are no multiple of {group.size} ranks: form='keys' takes them")
        if bounds[0] != 0 or bounds[-1] > rows or any(a > b for a, b in zip(bounds, bounds[1:])):
            raise _errors.InvalidArgument(f"parallel.attention: cu_seqlens runs from {bounds[0]} to {bounds[-1]}, it must rise from 0 to at most {rows}")
        if sinks is not None and sinks.requires_grad and torch.is_grad_enabled():
            raise _errors.Unsupported("parallel.attention: sinks require a gradient, which sums over all rows: detach them")
        if form == "splits":
            _expect_whole_splits(group, rows, bounds, attributes.get("split", 1024))

        options.update(arithmetic=_arithmetic("attention", q, k, v, cu_seqlens, cu_seqlens, **attributes, **options))

    _tried(group, "parallel.attention", lambda: _words(q[:0], *k.shape[1:], *v.shape[1:], rows, form, bounds, attributes, sinks is not None,
                                                       options["arithmetic"]), run)
    if form != "heads":
        return _Attention.apply(q, k, v, sinks, group, rows, bounds, form, attributes, _Options(options))
    if sinks is not None:
        sinks = sinks.unflatten(0, (group.size, -1))[group.rank].contiguous()
    q, k, v = (_Turned.apply(t, group, rows, False) for t in (q, k, v))
    out = ops.attention(q, k, v, cu_seqlens, cu_seqlens, sinks=sinks, **attributes, **options)
    return _Turned.apply(out, group, rows, True)


def _expect_whole_splits(group, rows, bounds, split):
    each = -(-rows // group.size)
    for cut in range(each, rows, max(1, each)):
        for a, b in zip(bounds, bounds[1:]):
            if a < cut < b and (split == 0 or (cut - a) % split):
                raise _errors.InvalidArgument(f"parallel.attention: rank {cut // each} begins with token {cut - a} of a sequence, form='splits' needs "
                                              f"a multiple of split={split} there")


def cached_attention(q, k, v, *, kv_len, k_first, k_last=None, cu_q=None, cu_k=None, block_table=None, sinks=None, group=None, lse=False, **options):
    """attention over a cache whose keys are spread: q, kv_len (of whole sequences) and the result are the same on all ranks, k, v and
    block_table are this rank's, with the keys [k_first[n], k_last[n]) of sequence n, or without k_last as many as there is room for. The
    sequences' keys lie ascending by rank and are cut at multiples of `split`; every rank has room for as many splits. No gradient."""
    group = as_group(group)
    attributes = {name: options.pop(name) for name in _ATTRIBUTES if name in options}

    where = {"cu_q": cu_q, "cu_k": cu_k, "kv_len": kv_len, "block_table": block_table} | attributes | options
    splits = []

    def run():
        if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
            raise _errors.Unsupported("parallel.cached_attention: a gradient is required, a cache has none: parallel.attention has")
        where.update(arithmetic=_arithmetic("attention", q, k, v, **where))  # no other: one device has its bits
        found = ops.attention_part(q, k, v, **where, k_first=k_first, k_last=k_last)
        splits.append(found.shape[-2])
        return found

    def words():
        return _words(q, *splits, sinks is not None, lse, attributes, where["arithmetic"])

    partials = _tried(group, "parallel.cached_attention", words, run)
    rows = partials.flatten(0, 1) if q.dim() == 4 else partials
    if rows.numel() * 4 <= _ops.GATHERED or group.size == 1:
        found = ops.attention_merge(group.gather(rows), sinks, out=q.dtype, lse=True)
    else:
        mine = rows_of(group, len(rows))
        found = [gather_rows(t, group, len(rows)) for t in _merged_rows(group, rows, sinks, q.dtype, mine)]
    found = [t.view(*q.shape[:-2], *t.shape[1:]) for t in found]
    return tuple(found) if lse else found[0]
