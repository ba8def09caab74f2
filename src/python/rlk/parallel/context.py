"""Attention over a packed batch whose tokens are spread over ranks, with the bits of one device.

Two forms. *heads*: tokens are exchanged for heads, so that each rank attends over all tokens with its share of the heads, and back; where
there are enough key heads. *keys*: keys and values are gathered, and each rank's own queries attend; the gradients of its own keys are
summed over all queries that see them, so the queries are gathered too. Results of splits are not exchanged: the op does not show them.
"""

import torch

import rlk.torch as ops
from rlk import _errors
from rlk.parallel.ops import _expect_rows, _Options, _padded, _tried, _words, gather_rows, rows_of
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
    there on, and their bounds."""
    cu, first, last = [0], None, 0
    for a, b in zip(bounds, bounds[1:]):
        lo, hi = max(a, mine.start), min(b, mine.stop)
        if lo < hi:
            start = lo if causal else a
            first, last = start if first is None else first, b
            cu.append(cu[-1] + b - start)
    return cu, slice(first or 0, last)


class _ByKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, group, rows, bounds, attributes, options):
        mine = rows_of(group, rows)
        cu_q, cu_k, at = _seen(bounds, mine, attributes.get("causal", True))
        cu_q, cu_k = (torch.tensor(c, dtype=torch.int32, device=q.device) for c in (cu_q, cu_k))
        k, v = (gather_rows(t, group, rows)[at] for t in (k, v))
        out, lse = ops.attention(q, k, v, cu_q, cu_k, sinks=sinks, lse=True, **attributes, **options.forward)
        used = int(cu_q[-1])  # rows behind the last bound are nobody's
        out[used:], lse[used:] = 0, 0
        ctx.save_for_backward(q, k, v, sinks, out, lse, cu_q, cu_k)
        ctx.rlk = group, rows, bounds, at, attributes, options
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, sinks, out, lse, cu_q, cu_k = ctx.saved_tensors
        group, rows, bounds, at, attributes, options = ctx.rlk
        attributes = {name: value for name, value in attributes.items() if name != "split"}
        d_out, d_q, d_k, d_v = d_out.contiguous(), None, None, None
        with options.within():
            keywords = attributes | options.backward("attention_bwd")
            if ctx.needs_input_grad[0]:
                d_q = ops.attention_bwd(q=q, k=k, v=v, out=out, lse=lse, d_out=d_out, cu_q=cu_q, cu_k=cu_k, sinks=sinks, d_q=True, **keywords)
            if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
                group.agree("parallel.attention's gradient", _words(q[:0], rows))
                mine = rows_of(group, rows)
                cu, some = _seeing(bounds, mine, attributes.get("causal", True))
                cu = torch.tensor(cu, dtype=torch.int32, device=q.device)
                whole = {name: gather_rows(t, group, rows)[some] for name, t in (("q", q), ("out", out), ("lse", lse), ("d_out", d_out))}
                whole |= {name: gather_rows(_fitted(t, at, mine), group, rows)[some] for name, t in (("k", k), ("v", v))}
                d_k, d_v = ops.attention_bwd(**whole, cu_q=cu, cu_k=cu, sinks=sinks, d_k=True, d_v=True, **keywords)
                d_k, d_v = (_fitted(t, some, mine) for t in (d_k, d_v))
        return d_q, d_k, d_v, None, None, None, None, None, None


def _fitted(t, at, mine):
    """The rows `mine` of t, which has the rows `at`; zeros where it has none."""
    lo, hi = max(at.start, mine.start), min(at.stop, mine.stop)
    whole = t.new_zeros(mine.stop - mine.start, *t.shape[1:])
    if lo < hi:
        whole[lo - mine.start:hi - mine.start] = t[lo - at.start:hi - at.start]
    return whole


def attention(q, k, v, cu_seqlens, *, group=None, rows, form=None, sinks=None, **options):
    """attention of a packed batch of `rows` tokens, of which each rank has its rows (``rows_of``) of q, k and v, and gets those of the result.
    cu_seqlens are the whole batch's bounds, on all ranks. `form`: "heads" or "keys"; absent: heads where the ranks divide the key heads."""
    group = as_group(group)
    attributes = {k_: options.pop(k_) for k_ in ("scale", "causal", "window", "softcap", "split") if k_ in options}
    bounds = cu_seqlens.tolist()
    form = form or ("heads" if k.shape[1] % group.size == 0 else "keys")

    def run():
        for name, t in (("q", q), ("k", k), ("v", v)):
            if t.dim() != 3:
                raise _errors.InvalidArgument(f"parallel.attention: {name} has rank {t.dim()}, it must be 3: [rows, heads, channels]")
            _expect_rows("attention", t, group, rows)
        if form not in ("heads", "keys"):
            raise _errors.InvalidArgument(f"parallel.attention: form is {form!r}, it must be 'heads' or 'keys'")
        if form == "heads" and k.shape[1] % group.size:
            raise _errors.InvalidArgument(f"parallel.attention: {k.shape[1]} key heads are no multiple of {group.size} ranks: form='keys' takes them")
        if bounds[0] != 0 or bounds[-1] > rows or any(a > b for a, b in zip(bounds, bounds[1:])):
            raise _errors.InvalidArgument(f"parallel.attention: cu_seqlens runs from {bounds[0]} to {bounds[-1]}, it must rise from 0 to at most {rows}")
        if sinks is not None and sinks.requires_grad and torch.is_grad_enabled():
            raise _errors.Unsupported("parallel.attention: sinks require a gradient, which sums over all rows: detach them")

    _tried(group, "parallel.attention", lambda: _words(q[:0], *k.shape[1:], *v.shape[1:], rows, form, bounds, attributes, sinks is not None), run)
    if form == "keys":
        return _ByKeys.apply(q, k, v, sinks, group, rows, bounds, attributes, _Options(options))
    if sinks is not None:
        sinks = sinks.unflatten(0, (group.size, -1))[group.rank].contiguous()
    q, k, v = (_Turned.apply(t, group, rows, False) for t in (q, k, v))
    out = ops.attention(q, k, v, cu_seqlens, cu_seqlens, sinks=sinks, **attributes, **options)
    return _Turned.apply(out, group, rows, True)
