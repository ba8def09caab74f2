"""rlk.parallel: degrees 1, 2, 4 and 8 have the same bits, forward and backward. Ranks are threads here, and processes over gloo where the
transport itself is what is tested."""

import datetime
import multiprocessing
import os
import pickle
import signal
import time

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import rlk  # noqa: E402
import rlk.model  # noqa: E402
import rlk.parallel as parallel  # noqa: E402
import rlk.parallel.__main__ as command  # noqa: E402
import rlk.parallel.model as spread_model  # noqa: E402
import rlk.torch  # noqa: E402
from rlk import sampler, verify_model  # noqa: E402
from rlk.parallel import Threads, ops  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def one_thread_each():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def numbers(seed, *shape, dtype=torch.float32):
    """On the default device, drawn where every device has the same."""
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to(torch.get_default_device(), dtype)


def bits(t):
    return t.detach().cpu().contiguous().view(-1).view(torch.uint8)


def same(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def every_degree(work, degrees=(1, 2, 4, 8)):
    """work(group) -> tensors, whole on every rank: those of degree 1, after all other degrees were found to give the same."""
    first = None
    for degree in degrees:
        for rank, found in enumerate(Threads.run(degree, work)):
            first = first or found
            assert [n for n, (a, b) in enumerate(zip(first, found, strict=True)) if not same(a, b)] == [], (degree, rank)
    return first


def leaf(t):
    return t.clone().requires_grad_()


def plain(run, d_y, *inputs):
    """What run of one device gives, and its gradients."""
    inputs = [leaf(t) for t in inputs]
    y = run(*inputs)
    y.backward(d_y)
    return [y, *[t.grad for t in inputs]]


@pytest.fixture(params=[1 << 20, 0], ids=["gathered", "exchanged"])
def way(request, monkeypatch):
    monkeypatch.setattr(ops, "GATHERED", request.param)


# ---- linear


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, k, n, seed", [(5, 256, 384, 1), (0, 128, 128, 2), (1, 200, 300, 3), (17, 72, 1000, 4)])
def test_column_linear_is_linear_at_every_degree(rows, k, n, seed, dtype, way):
    x, w, b, d_y = (numbers(seed + i, *s, dtype=dtype) for i, s in enumerate([(rows, k), (n, k), (n,), (rows, n)]))
    given = [t.clone() for t in (x, w, b, d_y)]

    def work(group):
        mine = parallel.part(group, n)
        a, v, c = leaf(x), leaf(parallel.shard(w, group)), leaf(parallel.shard(b, group))
        y = parallel.column_linear(a, v, c, segments=(n,), group=group)
        y.backward(d_y[:, mine])
        return parallel.unshard(y, group, 1, (n,)), a.grad, parallel.unshard(v.grad, group, 0, (n,)), parallel.unshard(c.grad, group, 0, (n,))

    found = every_degree(work)
    assert all(map(same, found, plain(rlk.torch.linear, d_y, x, w, b)))
    assert all(map(same, given, (x, w, b, d_y)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, k, n, seed", [(5, 256, 384, 1), (0, 128, 128, 2), (1, 200, 300, 3), (17, 1000, 72, 4)])
def test_row_linear_is_linear_at_every_degree(rows, k, n, seed, dtype, way):
    x, w, b, r, d_y = (numbers(seed + i, *s, dtype=dtype)
                       for i, s in enumerate([(rows, k), (n, k), (n,), (rows, n), (rows, n)]))

    def work(group):
        a, v, c, d = leaf(parallel.shard(x, group, 1)), leaf(parallel.shard(w, group, 1)), leaf(b), leaf(r)
        y = parallel.row_linear(a, v, c, d, group=group, k_total=k)
        y.backward(d_y)
        return y, parallel.unshard(a.grad, group, 1, (k,)), parallel.unshard(v.grad, group, 1, (k,)), c.grad, d.grad

    found = every_degree(work)
    assert all(map(same, found, plain(rlk.torch.linear, d_y, x, w, b, r)))


@pytest.mark.parametrize("segments", [(256, 128, 128), (384, 384), (200, 40, 64)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_projections_are_cut_leaf_by_leaf(segments, dtype):
    rows, k, n = 7, 192, sum(segments)
    x, w, d_y = numbers(1, rows, k, dtype=dtype), numbers(2, n, k, dtype=dtype), numbers(3, rows, n, dtype=dtype)

    def work(group):
        a, v = leaf(x), leaf(parallel.shard(w, group, segments=segments))
        y = parallel.column_linear(a, v, segments=segments, group=group, arithmetic="fma32/tree8")
        y.backward(parallel.shard(d_y, group, 1, segments))
        return parallel.unshard(y, group, 1, segments), a.grad, parallel.unshard(v.grad, group, 0, segments)

    y, d_x, d_w = every_degree(work)
    reference = plain(lambda *t: rlk.torch.linear(*t, arithmetic="fma32/tree8"), d_y, x, w)
    assert same(y, reference[0]) and same(d_w, reference[2])
    assert same(d_x, rlk.torch.linear_bwd(d_y, x, w, segments=torch.tensor(segments), d_x=True, arithmetic="fma32/tree8"))


@pytest.mark.parametrize("rows", [8, 13, 3, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_be_spread_between_the_two(rows, dtype, way):
    """The sequence-parallel form: gathered before the first product, each rank's own rows after the second."""
    h, i = 128, 256
    x, up, down, r, d_z = (numbers(n, *s, dtype=dtype) for n, s in enumerate([(rows, h), (i, h), (h, i), (rows, h), (rows, h)]))

    def work(group, spread=True):
        mine = parallel.rows_of(group, rows) if spread else slice(None)
        a, v, w, d = leaf(x[mine]), leaf(parallel.shard(up, group)), leaf(parallel.shard(down, group, 1)), leaf(r[mine])
        total = {"rows": rows} if spread else {}
        y = parallel.column_linear(a, v, group=group, **total)
        z = parallel.row_linear(y, w, None, d, group=group, **total)
        z.backward(d_z[mine])
        found = [z.detach(), a.grad, d.grad]
        if spread:
            found = [parallel.gather_rows(t, group, rows) for t in found]
        return *found, parallel.unshard(v.grad, group), parallel.unshard(w.grad, group, 1)

    found = every_degree(work)
    whole = every_degree(lambda group: work(group, spread=False))
    assert all(map(same, found, whole))


def test_options_and_scopes_hold_for_the_backward():
    x, w, d_y = numbers(1, 3, 128), numbers(2, 256, 128), numbers(3, 3, 256)

    def work(group):
        a = leaf(x)
        with rlk.precision("golden"):
            y = parallel.column_linear(a, parallel.shard(w, group), group=group)
        y.backward(d_y[:, parallel.part(group, 256)])
        b = leaf(x)
        parallel.column_linear(b, parallel.shard(w, group), group=group, arithmetic="fma64").backward(d_y[:, parallel.part(group, 256)])
        return a.grad, b.grad

    a, b = work(parallel.Group(0, 1))
    with rlk.precision("golden"):
        reference = plain(rlk.torch.linear, d_y, x, w)[1]
    assert same(a, reference) and same(b, reference) and not same(a, plain(rlk.torch.linear, d_y, x, w)[1])


# ---- the vocabulary


@pytest.mark.parametrize("options", [{}, {"scale": 0.7, "padding_idx": 3}])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [256, 300, 40])
def test_embedding_is_embedding_at_every_degree(vocab, dtype, options, way):
    draw = torch.Generator().manual_seed(vocab)
    ids = torch.randint(vocab, (3, 7), generator=draw)
    ids[0, :4] = torch.tensor([-1, vocab, 3, vocab + 500])  # three of which are no tokens
    w, d_y = numbers(1, vocab, 24, dtype=dtype), numbers(2, 3, 7, 24, dtype=dtype)
    w[:, 5], w[:, 6] = -0.0, float("nan")

    def work(group):
        v = leaf(parallel.shard(w, group))
        y = parallel.embedding(ids, v, vocab=vocab, group=group, **options)
        y.backward(d_y)
        return y, parallel.unshard(v.grad, group, 0, (vocab,))

    found = every_degree(work)
    assert all(map(same, found, plain(lambda v: rlk.torch.embedding(ids, v, **options), d_y, w)))


@pytest.mark.parametrize("dtype, out", [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "fp32")])
@pytest.mark.parametrize("vocab", [256, 300])
def test_lm_head_is_lm_head_at_every_degree(vocab, dtype, out):
    h, w, b = (numbers(n, *s, dtype=dtype) for n, s in enumerate([(2, 3, 48), (vocab, 48), (vocab,)]))
    options = {"out": out} if out else {}
    d_y = numbers(9, 2, 3, vocab, dtype=torch.float32 if out else dtype)

    def work(group):
        a, v, c = leaf(h), leaf(parallel.shard(w, group)), leaf(parallel.shard(b, group))
        y = parallel.lm_head(a, v, c, vocab=vocab, group=group, **options)
        y.backward(d_y)
        return y, a.grad, parallel.unshard(v.grad, group, 0, (vocab,)), parallel.unshard(c.grad, group, 0, (vocab,))

    y, d_h, d_w, d_b = every_degree(work)
    reference = plain(lambda *t: rlk.torch.lm_head(*t, **options), d_y, h, w, b)
    assert same(y, reference[0]) and same(d_w, reference[2]) and same(d_b, reference[3])
    assert same(d_h, plain(lambda *t: rlk.torch.linear(*t), d_y.to(dtype), h, w)[1]) or out
    assert torch.allclose(d_h.float(), reference[1].float(), rtol=2e-2, atol=0.3 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab, rows, options", [
    (256, 9, {}), (300, 5, {"bias": True, "entropy": True}), (256, 0, {"entropy": True}), (1100, 4, {"keep": True, "temperatures": True, "lse": True}),
    (256, 6, {"softcap": 3.0, "temperature": 0.7, "entropy": True, "keep": True})])
def test_linear_logp_is_linear_logp_at_every_degree(vocab, rows, options, dtype):
    options = dict(options)
    draw = torch.Generator().manual_seed(vocab)
    h, w = numbers(1, rows, 48, dtype=dtype), numbers(2, vocab, 48, dtype=dtype)
    b = numbers(3, vocab, dtype=dtype) if options.pop("bias", False) else None
    target = torch.randint(vocab, (rows,), generator=draw)
    target[:2] = torch.tensor([-100, vocab + 3])[:rows]  # left out, and no token
    more = {}
    if options.pop("keep", False):
        keep = torch.randint(-2**31, 2**31, (rows, -(-vocab // 32)), generator=draw).to(torch.int32)
        more["keep"] = keep
    if options.pop("temperatures", False):
        more["temperatures"] = torch.rand(rows, generator=draw) + 0.5
    gradients = [numbers(4, rows), numbers(5, rows)]

    def run(call, hidden, weight, bias):
        found = call(hidden, weight, bias, target=target, logp=True, **more, **options)
        found = found if isinstance(found, tuple) else (found,)
        wanted = [t for t, n in zip(found, ["logp", *(["lse"] if "lse" in options else []), *(["entropy"] if "entropy" in options else [])]) if n != "lse"]
        torch.autograd.backward(wanted, gradients[:len(wanted)])
        return [*found, hidden.grad, weight.grad, *([] if bias is None else [bias.grad])]

    def work(group):
        v, c = leaf(parallel.shard(w, group)), None if b is None else leaf(parallel.shard(b, group))
        found = run(lambda *t, **k: parallel.linear_logp(*t, vocab=vocab, group=group, **k), leaf(h), v, c)
        last = 1 if c is None else 2
        return *found[:-last], *[parallel.unshard(t, group, 0, (vocab,)) for t in found[-last:]]

    found = every_degree(work)
    reference = run(rlk.torch.linear_logp, leaf(h), leaf(w), None if b is None else leaf(b))
    assert len(found) == len(reference) and all(map(same, found, reference))


@pytest.mark.parametrize("vocab", [300, 1024])
@pytest.mark.parametrize("filters, options", [([], {}), (["top_k"], {"softcap": 2.0}), (["top_p", "min_p"], {"filter_order": "min_p_first"}),
                                              (["top_k", "top_p", "min_p"], {"raw_temperature": False})])
def test_sample_draws_the_same_tokens_at_every_degree(filters, options, vocab):
    rows = 12
    z = numbers(1, rows, vocab) * 3
    z[3], z[4, 7] = float("-inf"), float("nan")  # rows without a token
    more = {"top_k": torch.full((rows,), 7), "top_p": torch.full((rows,), 0.8), "min_p": torch.full((rows,), 0.02)}
    more = {k: v for k, v in more.items() if k in filters} | {
        "seed": torch.full((rows,), 3), "position": torch.arange(rows), "temperature": torch.linspace(0, 2, rows)}
    asked = dict.fromkeys(("logp", "logp_raw", "count", "bad_count"), True)

    def work(group):
        return parallel.sample(z[:, parallel.part(group, vocab)], vocab=vocab, group=group, **asked, **more, **options)

    found = every_degree(work)
    assert all(map(same, found, rlk.torch.sample(z, **asked, **more, **options)))
    assert found[0][3] == found[0][4] == -1 and len(set(found[0].tolist())) > 3


def test_each_rank_has_its_part_of_the_kept_entries():
    z, seed, top_k = numbers(1, 5, 256), torch.arange(5), torch.full((5,), 40)
    whole = rlk.torch.sample(z, seed=seed, top_k=top_k, keep=True)[1]
    for degree in (1, 2, 8):
        parts = Threads.run(degree, lambda group: parallel.sample(z[:, parallel.part(group, 256)], seed=seed, top_k=top_k, keep=True, vocab=256, group=group)[1])
        assert same(torch.cat(parts, 1), whole)



# ---- norms over rows or heads that are spread


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [300, 5, 0])
def test_the_weight_of_a_norm_has_the_gradient_of_all_rows(rows, dtype):
    heads, width = 8, 32
    x, w, d_y = numbers(1, rows, heads, width, dtype=dtype), numbers(2, width, dtype=dtype), numbers(3, rows, heads, width, dtype=dtype)

    def by_heads(group):
        mine = slice(group.rank * heads // group.size, (group.rank + 1) * heads // group.size)
        a, v = leaf(x[:, mine]), leaf(w)
        y = parallel.rms_norm(a, v, group=group, dim=1, eps=1e-5)
        y.backward(d_y[:, mine])
        return *[group.gather(t).movedim(0, 1).flatten(1, 2) for t in (y.detach(), a.grad)], v.grad

    def by_rows(group):
        mine = parallel.rows_of(group, rows)
        a, v = leaf(x[mine]), leaf(w)
        y = parallel.rms_norm(a, v, group=group, rows=rows, eps=1e-5)
        y.backward(d_y[mine])
        return *[parallel.gather_rows(t, group, rows) for t in (y.detach(), a.grad)], v.grad

    reference = plain(lambda a, v: rlk.torch.rms_norm(a, v, eps=1e-5), d_y, x, w)
    for work in (by_heads, by_rows):
        assert all(map(same, every_degree(work), reference))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gated_norm_over_spread_heads_has_the_gradients_of_all(dtype):
    x, w, g, d_y = numbers(1, 21, 8, 16, dtype=dtype), numbers(2, 16, dtype=dtype), *(numbers(n, 21, 8, 16, dtype=dtype) for n in (3, 4))
    options = {"gate_act": "sigmoid", "eps": 1e-5}

    def work(group):
        mine = slice(group.rank * 8 // group.size, (group.rank + 1) * 8 // group.size)
        a, v, b = leaf(x[:, mine]), leaf(w), leaf(g[:, mine])
        y = parallel.rms_norm(a, v, gate=b, group=group, dim=1, **options)
        y.backward(d_y[:, mine])
        whole = [group.gather(t).movedim(0, 1).flatten(1, 2) for t in (y.detach(), a.grad, b.grad)]
        return whole[0], whole[1], v.grad, whole[2]

    assert all(map(same, every_degree(work), plain(lambda a, v, b: rlk.torch.rms_norm(a, v, gate=b, **options), d_y, x, w, g)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_all_ranks_have_is_given_to_their_heads(dtype):
    x, y, d_x, d_y = numbers(1, 7, 8, dtype=dtype), numbers(2, 7, 6, dtype=dtype), numbers(3, 7, 8, dtype=dtype), numbers(4, 7, 8, 6, dtype=dtype)

    def work(group):
        mine = slice(group.rank * 8 // group.size, (group.rank + 1) * 8 // group.size)
        a, b = leaf(x), leaf(y)
        own, each = parallel.own_heads(a, group=group), parallel.to_heads(b, 8 // group.size, group=group)
        assert same(own.detach(), x[:, mine].contiguous()) and same(each.detach(), y[:, None].expand(-1, each.shape[1], -1).contiguous())
        torch.autograd.backward([own, each], [d_x[:, mine], d_y[:, mine]])
        return a.grad, b.grad

    t = d_y.float()
    tree = ((t[:, 0] + t[:, 1]) + (t[:, 2] + t[:, 3])) + ((t[:, 4] + t[:, 5]) + (t[:, 6] + t[:, 7]))
    found = every_degree(work)
    assert same(found[0], d_x) and same(found[1], tree.to(dtype))
    said = refusals(2, lambda group: parallel.own_heads(numbers(1, 4, 3), group=group))
    assert said == ["parallel.own_heads: x has 3 heads, no multiple of 2 ranks"] * 2


def test_rows_are_gathered_and_spread_with_their_gradients():
    rows = 13
    x, d_y = numbers(1, rows, 6), numbers(2, rows, 6)

    def work(group):
        mine = parallel.rows_of(group, rows)
        a, b = leaf(x[mine]), leaf(x)
        y = parallel.gathered(a, group=group, rows=rows)
        y.backward(d_y)
        z = parallel.spread(b, group=group)
        z.backward(d_y[mine])
        return y, parallel.gather_rows(a.grad, group, rows), parallel.gather_rows(z.detach(), group, rows), b.grad

    assert all(map(same, every_degree(work), (x, d_y, x, d_y)))


# ---- attention, and kda


@pytest.mark.parametrize("form", ["heads", "keys"])
@pytest.mark.parametrize("bounds, options", [
    ([0, 40], {}), ([0, 3, 3, 150, 197], {}), ([0, 100, 333], {"window": 70, "softcap": 5.0}), ([0, 150], {"causal": False}),
    ([0, 5, 30], {"sinks": True}), ([0], {}), ([0, 700], {"split": 512})])
def test_attention_over_spread_tokens_is_attention_at_every_degree(bounds, options, form):
    options = dict(options)
    rows, heads, keys, width = bounds[-1] + (2 if options else 0), 16, 8, 16
    q, d_y = numbers(1, rows, heads, width, dtype=torch.bfloat16), numbers(2, rows, heads, width, dtype=torch.bfloat16)
    k, v = numbers(3, rows, keys, width, dtype=torch.bfloat16), numbers(4, rows, keys, width, dtype=torch.bfloat16)
    for t in (q, k, v, d_y):
        t[bounds[-1]:] = 0  # of no sequence
    cu = torch.tensor(bounds, dtype=torch.int32)
    sinks = {"sinks": numbers(5, heads)} if options.pop("sinks", False) else {}

    def one(a, b, c):
        y = rlk.torch.attention(a, b, c, cu, cu, **sinks, **options)
        return torch.cat([y[:bounds[-1]], torch.zeros_like(y[bounds[-1]:])])  # what lies there is not written

    def work(group):
        mine = parallel.rows_of(group, rows)
        a, b, c = leaf(q[mine]), leaf(k[mine]), leaf(v[mine])
        y = parallel.attention(a, b, c, cu, group=group, rows=rows, form=form, **sinks, **options)
        y.backward(d_y[mine])
        found = [parallel.gather_rows(t, group, rows) for t in (y.detach(), a.grad, b.grad, c.grad)]
        return [t[:bounds[-1]] for t in found]

    reference = plain(one, d_y, q, k, v)
    assert all(map(same, every_degree(work), [t[:bounds[-1]] for t in reference]))


@pytest.mark.parametrize("bounds, options, degrees", [
    ([0, 2048], {}, (1, 2, 4)), ([0, 512, 2560, 4096], {"window": 700, "softcap": 5.0}, (1, 2, 4)), ([0, 1500], {"causal": False}, (1,)),
    ([0, 1024, 2047], {"sinks": True}, (1, 2, 4)), ([0, 30, 30, 40], {}, (1,)), ([0], {}, (1, 2)), ([0, 1024, 2040], {"split": 0}, (1, 2))])
def test_attention_by_splits_is_attention_at_every_degree(bounds, options, degrees):
    options = {"split": 512} | options
    rows, heads, keys, width = bounds[-1] + 8 * (bounds[-1] == 2040), 4, 2, 16
    q, d_y = numbers(1, rows, heads, width, dtype=torch.bfloat16), numbers(2, rows, heads, width, dtype=torch.bfloat16)
    k, v = numbers(3, rows, keys, width, dtype=torch.bfloat16), numbers(4, rows, keys, width, dtype=torch.bfloat16)
    for t in (q, k, v, d_y):
        t[bounds[-1]:] = 0  # of no sequence
    cu = torch.tensor(bounds, dtype=torch.int32)
    sinks = {"sinks": numbers(5, heads)} if options.pop("sinks", False) else {}

    def work(group):
        mine = parallel.rows_of(group, rows)
        a, b, c = leaf(q[mine]), leaf(k[mine]), leaf(v[mine])
        y = parallel.attention(a, b, c, cu, group=group, rows=rows, form="splits", **sinks, **options)
        y.backward(d_y[mine])
        return [parallel.gather_rows(t, group, rows)[:bounds[-1]] for t in (y.detach(), a.grad, b.grad, c.grad)]

    reference = plain(lambda *t: rlk.torch.attention(*t, cu, cu, **sinks, **options), d_y, q, k, v)
    assert all(map(same, every_degree(work, degrees), [t[:bounds[-1]] for t in reference]))


def _cached(group, paged, queries, dtype=torch.bfloat16, **options):
    """Of rank r of 1, 2, 4 or 8: every rank has room for 8 / T splits; the first sequence fills all but the end of the last one, the
    second one is in the first split, the third in some."""
    lengths, split, heads, keys, width = [4000, 7, 1300], 512, 4, 2, 32
    room = split * 8 // group.size
    q = numbers(1, len(lengths), queries, heads, width, dtype=dtype)
    cache = [numbers(n, len(lengths), 8 * split, keys, width, dtype=dtype) for n in (2, 3)]
    for t in cache:
        for n, length in enumerate(lengths):
            t[n, length:] = float("nan")
    kv_len, first = torch.tensor(lengths, dtype=torch.int32), torch.full((len(lengths),), group.rank * room)
    whole = rlk.torch.attention(q, *cache, kv_len=kv_len, lse=True, split=split, **options)
    k, v = (t[:, group.rank * room:(group.rank + 1) * room] for t in cache)
    table = {}
    if paged:  # pages of 64 keys, the last one first
        k, v = (t.flatten(0, 1).unflatten(0, (-1, 64)).flip(0).contiguous() for t in (k, v))
        table = {"block_table": torch.arange(len(k) - 1, -1, -1, dtype=torch.int32).view(len(lengths), -1)}
    found = parallel.cached_attention(q, k, v, kv_len=kv_len, k_first=first, lse=True, split=split, group=group, **table, **options)
    assert all(map(same, found, whole))
    assert same(parallel.cached_attention(q, k, v, kv_len=kv_len, k_first=first, split=split, group=group, **table, **options), whole[0])
    return found


@pytest.mark.parametrize("queries, paged, options", [
    (1, True, {}), (1, False, {"window": 900}), (5, True, {"softcap": 3.0}), (300, False, {}), (2, False, {"causal": False})])
def test_attention_over_a_cache_on_several_ranks_is_attention(queries, paged, options, monkeypatch):
    if queries == 2:
        monkeypatch.setattr(ops, "GATHERED", 0)
    every_degree(lambda group: _cached(group, paged, queries, sinks=numbers(7, 4), **options))


def test_attention_over_a_cache_of_packed_queries():
    q, cu_q = numbers(1, 5, 2, 16), torch.tensor([0, 1, 5], dtype=torch.int32)
    k, v = numbers(2, 2, 1100, 2, 16), numbers(3, 2, 1100, 2, 16)
    kv_len = torch.tensor([600, 1100], dtype=torch.int32)

    def work(group):
        room = {1: 1100, 2: 1024}[group.size]
        mine = [torch.nn.functional.pad(t, (0, 0, 0, 0, 0, 1024))[:, group.rank * room:][:, :room] for t in (k, v)]
        return [parallel.cached_attention(q, *mine, kv_len=kv_len, k_first=torch.full((2,), group.rank * room), cu_q=cu_q, split=512, group=group)]

    found = every_degree(work, (1, 2))
    assert same(found[0], rlk.torch.attention(q, k, v, cu_q, kv_len=kv_len, split=512))


def test_attention_and_kda_by_heads_need_no_ranks_to_meet():
    q, k, v = numbers(1, 30, 16, 16), numbers(2, 30, 8, 16), numbers(3, 30, 8, 16)
    cu, d_y = torch.tensor([0, 11, 30]), numbers(4, 30, 16, 16)
    kq, kk = (torch.nn.functional.normalize(numbers(n, 1, 70, 8, 16), dim=-1) for n in (5, 6))
    kv, g, beta = numbers(7, 1, 70, 8, 16), -numbers(8, 1, 70, 8, 16).abs() / 8, torch.sigmoid(numbers(9, 1, 70, 8))
    d_o = numbers(10, 1, 70, 8, 16)

    def heads(group, t, dim):
        return leaf(t.unflatten(dim, (group.size, -1)).select(dim, group.rank))

    def whole(group, t, dim):
        return group.gather(t).movedim(0, dim).flatten(dim, dim + 1)

    def work(group):
        mine = [heads(group, t, 1) for t in (q, k, v)]
        y = rlk.torch.attention(*mine, cu, cu)
        y.backward(heads(group, d_y, 1))
        state = [heads(group, t, 2) for t in (kq, kk, kv, g, beta)]
        o = rlk.torch.kda_fwd(*state)
        o.backward(heads(group, d_o, 2))
        return *[whole(group, t, 1) for t in (y.detach(), *[t.grad for t in mine])], *[whole(group, t, 2) for t in (o.detach(), *[t.grad for t in state])]

    reference = plain(lambda *t: rlk.torch.attention(*t, cu, cu), d_y, q, k, v) + plain(lambda *t: rlk.torch.kda_fwd(*t), d_o, kq, kk, kv, g, beta)
    assert all(map(same, every_degree(work), reference))


@pytest.mark.parametrize("change, words", [
    ({"form": "tokens"}, "form is 'tokens', it must be 'heads', 'keys' or 'splits'"),
    ({"form": "splits"}, "rank 1 begins with token 4 of a sequence, form='splits' needs a multiple of split=1024 there"), ({"cu": [0, 9]}, "cu_seqlens runs from 0 to 9, it must rise from 0 to at most 8"),
    ({"keys": 3, "form": "heads"}, "3 key heads are no multiple of 2 ranks: form='keys' takes them"), ({"rows": 7, "cu": [0, 7]}, "has 3 of 7")])
def test_attention_that_does_not_fit_is_refused(change, words):
    given = {"form": None, "cu": [0, 8], "keys": 2, "rows": 8} | change
    said = refusals(2, lambda group: parallel.attention(numbers(1, 4, 6, 16), *[numbers(n, 4, given["keys"], 16) for n in (2, 3)], torch.tensor(given["cu"]),
                                                        group=group, rows=given["rows"], form=given["form"]))
    assert all(said) and any(words in s for s in said)


def test_a_cache_that_does_not_fit_is_refused():
    def work(group, first=512, keys=512, requires_grad=False, arithmetic=None):
        q, k = numbers(1, 1, 1, 2, 16).requires_grad_(requires_grad), numbers(2, 1, keys, 2, 16)
        return parallel.cached_attention(q, k, k, kv_len=torch.tensor([900]), k_first=torch.tensor([first * group.rank]), split=512, group=group,
                                         arithmetic=arithmetic)

    assert "k_first[0] is 100, expected a multiple of 512" in refusals(2, lambda g: work(g, first=100))[1]
    said = refusals(2, lambda g: work(g, keys=512 * (g.rank + 1)))
    assert said[0] == said[1] and "ranks disagree" in said[0]
    assert "a cache has none" in refusals(2, lambda g: work(g, requires_grad=True))[0]
    said = refusals(2, lambda g: work(g, arithmetic="fma64" if g.rank else "fma32/attn128/s512"))
    assert said[0] == said[1] and "fma64" in said[0]


# ---- what is refused, on every rank


def refusals(degree, work):
    """What each rank is told."""
    said = [None] * degree

    def rank(group):
        try:
            work(group)
        except rlk.Error as error:
            said[group.rank] = str(error)

    Threads.run(degree, rank, timeout=20)
    return said


def test_ranks_that_disagree_are_all_told():
    w = numbers(1, 256, 128)
    said = refusals(4, lambda group: parallel.column_linear(numbers(2, 3 + (group.rank == 2), 128), parallel.shard(w, group), group=group))
    assert len(set(said)) == 1 and "ranks disagree: rank 0 has" in said[0] and "[3, 128]" in said[0] and "rank 2 has" in said[0] and "[4, 128]" in said[0]
    said = refusals(2, lambda group: parallel.row_linear(numbers(2, 3, 128), numbers(1, 16, 128), group=group,
                                                         arithmetic="fma64" if group.rank else None))
    assert "fma32/tree8" in said[0] and "fma64" in said[0] and said[0] == said[1]


def test_what_one_rank_refuses_all_refuse():
    said = refusals(4, lambda group: parallel.row_linear(numbers(2, 3, 64 - (group.rank == 1)), numbers(1, 16, 64), group=group, k_total=256))
    assert said[1] == "linear: x has K=63, weight has K=64"
    assert said[0] == said[2] == said[3] == "parallel.row_linear: refused on rank 1 of 4: linear: x has K=63, weight has K=64"


@pytest.mark.parametrize("work, words", [
    (lambda group: parallel.column_linear(numbers(1, 2, 64), numbers(1, 100, 64), segments=(200,), group=group),
     "weight has N=100, rank 0 of 2 has 128 of [200]"),
    (lambda group: parallel.row_linear(numbers(1, 2, 40), numbers(1, 16, 40), group=group), "K=40, but leaves 0 to 3 of k_total=80 have 64"),
    (lambda group: parallel.column_linear(numbers(1, 2, 64), numbers(1, 64, 64), rows=5, group=group), "x has 2 rows, rank 0 of 2 has 3 of 5"),
    (lambda group: parallel.shard(numbers(1, 64, 64), group, segments=(32, 16)), "segments (32, 16) are 48 together, dimension 0 has 64"),
])
def test_parts_that_do_not_fit_are_refused(work, words):
    said = refusals(2, work)
    assert all(said) and words in said[0]


def test_a_group_of_three_is_refused():
    with pytest.raises(rlk.InvalidArgument, match="the group has 3 ranks, it must have 1, 2, 4 or 8"):
        Threads.run(3, lambda group: group)


def test_a_rank_that_is_gone_is_an_error_of_the_others():
    said = [None] * 2

    def work(group):
        if group.rank == 1:
            raise KeyError("gone")
        try:
            group.gather(numbers(1, 3))
        except rlk.BackendError as error:
            said[0] = str(error)

    with pytest.raises(KeyError):
        Threads.run(2, work, timeout=20)
    assert said[0].startswith("gather: rank 0 of 2 cannot reach the others")


def test_check_first_asks_once_for_each_shape():
    asked = []

    def work(group):
        tell = group._tell
        group._tell = lambda mine: asked.append(group.rank) or tell(mine)
        for rows in (3, 3, 4, 3):
            group.agree("op", f"{rows}")

    Threads.run(2, work, check="first")
    first, asked[:] = sorted(asked), []
    Threads.run(2, work)
    always, asked[:] = sorted(asked), []
    Threads.run(2, work, check="never")
    assert (first, always, asked) == ([0] * 2 + [1] * 2, [0] * 4 + [1] * 4, [])


# ---- processes

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["torch", "torch.distributed.device_mesh", "rlk.parallel"])


def _rank(work, rank, degree, file, arguments, timeout, said):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=degree, timeout=datetime.timedelta(seconds=timeout))
    try:
        found = work(rank, *arguments)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    said.put((rank, pickle.dumps(found)))


def processes(degree, folder, work, *arguments, timeout=30, expected=None):
    """[what work(rank) gives] of processes in a gloo group; None of one that ended without a word."""
    said = _server.Queue()
    ranks = [_server.Process(target=_rank, args=(work, r, degree, folder / "store", arguments, timeout, said)) for r in range(degree)]
    for p in ranks:
        p.start()
    found = [None] * degree
    for _ in range(degree if expected is None else expected):
        rank, what = said.get(timeout=60 + 2 * timeout)
        found[rank] = pickle.loads(what)
    for p in ranks:
        p.join(30)
        assert p.exitcode is not None
    return found


def _both_linears(group, rows=6):
    x, up, down, d_z = (numbers(n, *s, dtype=torch.bfloat16) for n, s in enumerate([(rows, 128), (256, 128), (128, 256), (rows, 128)]))
    a, v, w = leaf(x), leaf(parallel.shard(up, group)), leaf(parallel.shard(down, group, 1))
    z = parallel.row_linear(parallel.column_linear(a, v, group=group), w, None, x, group=group)
    z.backward(d_z)
    return [t.detach() for t in (z, a.grad, parallel.unshard(v.grad, group), parallel.unshard(w.grad, group, 1))]


def _attended(group):
    rows, cu = 2048, torch.tensor([0, 2048])
    q, k, v, d_y = (numbers(n, rows, h, 16, dtype=torch.bfloat16) for n, h in ((1, 2), (2, 1), (3, 1), (4, 2)))
    mine = parallel.rows_of(group, rows)
    a, b, c = leaf(q[mine]), leaf(k[mine]), leaf(v[mine])
    y = parallel.attention(a, b, c, cu, group=group, rows=rows, form="splits", split=512)
    y.backward(d_y[mine])
    return [*[parallel.gather_rows(t, group, rows) for t in (y.detach(), a.grad, b.grad, c.grad)], *_cached(group, True, 2)]


def _work_on_gloo_attention(rank):
    return [bits(t).numpy().tobytes() for t in _attended(parallel.as_group())]


@pytest.mark.parametrize("degree", [2, 4])
def test_processes_attend_over_shared_keys_with_the_bits_of_one(degree, tmp_path):
    one = [bits(t).numpy().tobytes() for t in Threads.run(1, _attended)[0]]
    for found in processes(degree, tmp_path, _work_on_gloo_attention):
        assert found == one


def _work_on_gloo(rank):
    ops.GATHERED = 0
    exchanged = _both_linears(parallel.as_group())
    ops.GATHERED = 1 << 20
    gathered = _both_linears(parallel.as_group(dist.group.WORLD))
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    meshed = _both_linears(parallel.as_group(mesh["tp"]))
    return [bits(t).numpy().tobytes() for t in (*exchanged, *gathered, *meshed)]


@pytest.mark.parametrize("degree", [2, 4])
def test_processes_have_the_bits_of_one(degree, tmp_path):
    one = [bits(t).numpy().tobytes() for t in Threads.run(1, _both_linears)[0]]
    for found in processes(degree, tmp_path, _work_on_gloo):
        assert found == one * 3


def _every_op(group):
    """Results and gradients, whole, of every op that is spread, in bf16."""
    rows, vocab = 13, 300
    x, up, down, r, d_z, table, d_e, d_l = (numbers(n, *s, dtype=torch.bfloat16) for n, s in enumerate(
        [(rows, 64), (256, 64), (64, 256), (rows, 64), (rows, 64), (vocab, 64), (rows, 64), (rows, vocab)]))
    mine, columns, total = parallel.rows_of(group, rows), parallel.part(group, vocab), {"group": group, "rows": rows}
    ids, cu = torch.arange(rows) * 23 % vocab, torch.tensor([0, 5, rows])
    found = []

    def keep(*tensors, dim=None, sizes=None):
        for t in tensors:
            found.append(t.detach() if dim is None else parallel.unshard(t.detach(), group, dim, sizes))

    a, v, w, d = leaf(x[mine]), leaf(parallel.shard(up, group)), leaf(parallel.shard(down, group, 1)), leaf(r[mine])
    z = parallel.row_linear(parallel.column_linear(a, v, **total), w, None, d, **total)  # the sequence-parallel form
    z.backward(d_z[mine])
    keep(*[parallel.gather_rows(t.detach(), group, rows) for t in (z, a.grad, d.grad)])
    keep(v.grad, dim=0)
    keep(w.grad, dim=1)
    e, n = leaf(parallel.shard(table, group)), leaf(numbers(8, 64, dtype=torch.bfloat16))
    y = parallel.embedding(ids, e, vocab=vocab, group=group)
    y.backward(d_e)
    keep(y)
    keep(e.grad, dim=0, sizes=(vocab,))
    y = parallel.rms_norm(b := leaf(x[mine]), n, **total)
    y.backward(d_e[mine])
    keep(parallel.gather_rows(b.grad, group, rows), n.grad)
    h, e = leaf(x), leaf(parallel.shard(table, group))
    logits = parallel.lm_head(h, e, vocab=vocab, group=group)
    logits.backward(d_l)
    keep(logits, h.grad)
    keep(e.grad, dim=0, sizes=(vocab,))
    h, e = leaf(x), leaf(parallel.shard(table, group))
    logp, entropy = parallel.linear_logp(h, e, target=ids, vocab=vocab, group=group, entropy=True)
    (logp.sum() + entropy.sum()).backward()
    keep(logp, entropy, h.grad)
    keep(e.grad, dim=0, sizes=(vocab,))
    keep(*parallel.sample(logits.detach().float()[:, columns], torch.full((rows,), 0.8), top_k=torch.full((rows,), 9), top_p=torch.full((rows,), 0.9),
                          seed=torch.arange(rows), vocab=vocab, group=group, logp=True))
    for form, heads in (("heads", (8, 4)), ("keys", (6, 3))):
        q, k, t = (leaf(numbers(20 + i, rows, n, 16, dtype=torch.bfloat16)[mine]) for i, n in enumerate((heads[0], heads[1], heads[1])))
        y = parallel.attention(q, k, t, cu, form=form, **total)
        y.backward(numbers(30, rows, heads[0], 16, dtype=torch.bfloat16)[mine])
        keep(*[parallel.gather_rows(p, group, rows) for p in (y.detach(), q.grad, k.grad, t.grad)])
    own = [leaf(numbers(40 + i, 1, 70, 4, 16)[:, :, group.rank * 4 // group.size:(group.rank + 1) * 4 // group.size]) for i in range(3)]
    g, beta = (-numbers(44, 1, 70, 4, 16).abs() / 8, torch.sigmoid(numbers(45, 1, 70, 4)))
    g, beta = (parallel.own_heads(t.flatten(0, 1), group=group)[None] for t in (g, beta))
    o = rlk.torch.kda_fwd(*own, g, beta)  # KDA by heads
    o.sum().backward()
    keep(*[group.gather(p).movedim(0, 2).flatten(2, 3) for p in (o.detach(), *[t.grad for t in own])])
    return found


def _work_on_every_op(rank, mesh):
    group = parallel.as_group(dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))["tp"] if mesh else None)
    found = []
    for ops.GATHERED in (1 << 20, 0):
        found.append([bits(t).numpy().tobytes() for t in _every_op(group)])
    return found


@pytest.mark.parametrize("degree, mesh", [(2, False), (4, True)])
def test_every_op_over_processes_has_the_bits_of_one(degree, mesh, tmp_path):
    one = [bits(t).numpy().tobytes() for t in Threads.run(1, _every_op)[0]]
    for found in processes(degree, tmp_path, _work_on_every_op, mesh, timeout=120):
        for way in found:
            assert [n for n, (a, b) in enumerate(zip(one, way, strict=True)) if a != b] == []


def _work_that_disagrees(rank, how):
    group = parallel.as_group()
    if how == "dies" and rank == 1:
        os._exit(1)
    if how == "dies later" and rank == 1:  # when all have agreed
        group._gather = lambda whole, part: os._exit(1)
    if how == "sleeps" and rank == 1:
        time.sleep(3)
        return
    if how == "refuses" and rank == 1:
        parallel.row_linear(numbers(1, 3, 63), numbers(2, 16, 64), group=group)
    if how == "another error" and rank == 1:  # of torch, not of rlk
        ops.ops.linear = lambda *_, **__: torch.empty(1 << 60)
    if how == "another order" and rank == 1:
        parallel.embedding(torch.tensor([1]), numbers(1, 128, 8), vocab=256, group=group)
    if how in ("another dtype", "another attribute"):
        dtype = torch.bfloat16 if rank == 1 and how == "another dtype" else torch.float32
        more = {"temperature": 0.5} if rank == 1 and how == "another attribute" else {}
        parallel.linear_logp(numbers(1, 3, 16, dtype=dtype), numbers(2, 64, 16, dtype=dtype), target=torch.tensor([1, 2, 3]), vocab=128, group=group, **more)
    if how == "is killed in a backward":
        x, w = leaf(numbers(1, 3, 64)), leaf(numbers(2, 128, 64))
        y = parallel.column_linear(x, w, group=group)
        if rank == 1:
            y.register_hook(lambda d: os.kill(os.getpid(), signal.SIGKILL))
        y.sum().backward()
    parallel.row_linear(numbers(1, 3 + (rank == 1 and how == "differs"), 64), numbers(2, 16, 64), group=group)


@pytest.mark.parametrize("how, words", [("differs", "InvalidArgument: parallel.row_linear: ranks disagree: rank 0 has"),
                                        ("refuses", "InvalidArgument: parallel.row_linear: refused on rank 1 of 2: linear: x has K=63"),
                                        ("sleeps", "BackendError: parallel.row_linear: rank 0 of 2 cannot reach the others: "),
                                        ("another error", "InvalidArgument: parallel.row_linear: refused on rank 1 of 2: "),
                                        ("another order", "InvalidArgument: parallel.row_linear: ranks disagree: rank 0 has 'parallel.row_linear"),
                                        ("another dtype", "InvalidArgument: parallel.linear_logp: ranks disagree: rank 0 has 'parallel.linear_logp [3, 16] float32"),
                                        ("another attribute", "InvalidArgument: parallel.linear_logp: ranks disagree: rank 0 has"),
                                        ("is killed in a backward", "BackendError: parallel.column_linear's gradient: rank 0 of 2 cannot reach the others: "),
                                        ("dies", "BackendError: parallel.row_linear: rank 0 of 2 cannot reach the others: "),
                                        ("dies later", "BackendError: gather: rank 0 of 2 cannot reach the others: ")])
def test_processes_fail_together_and_do_not_hang(how, words, tmp_path):
    gone = how.startswith(("dies", "is killed"))
    said = processes(2, tmp_path, _work_that_disagrees, how, timeout=1 if how == "sleeps" else 30, expected=2 - gone)
    assert said[0].startswith(words)
    if how == "another error":
        assert said[1].startswith("RuntimeError")
    else:
        assert said[1] is None if gone or how == "sleeps" else said[1].startswith("InvalidArgument")


def test_a_mesh_of_two_dimensions_is_refused(tmp_path):
    assert processes(1, tmp_path, _work_on_a_wide_mesh) == ["InvalidArgument: parallel: the mesh has 2 dimensions, one is needed: mesh[name]"]


def _work_on_a_wide_mesh(rank):
    parallel.as_group(dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp")))


def test_without_processes_a_group_is_refused():
    with pytest.raises(rlk.InvalidArgument, match="call init_process_group first"):
        parallel.as_group()


# ---- a whole model

SHAPE = rlk.model.Config(128, 64, 2, 16, 8, 16, 176, theta=1e4, max_length=256)


def decoder(group=None, dtype=torch.bfloat16, spread_rows=False, shape=SHAPE, **changes):
    model = rlk.model.Decoder(rlk.model.config(shape, **changes), seed=3, dtype=dtype, device=torch.get_default_device())
    if group is not None:
        model = parallel.decoder(model, group, spread_rows)
        model.whole_notes = True
    return model


def _scored(model):
    """Every layer's rows of a packed batch, its log-probabilities, and gradients of all weights, as bytes."""
    sequences = verify_model.corpus(model, 3, 40, 2)
    rows = verify_model.packed(model, sequences)
    tokens = torch.tensor(sum(sequences, []))
    cu = torch.tensor([0, *map(len, sequences)]).cumsum(0).to(torch.int32)
    logp, entropy = model.score(tokens, cu, temperature=0.8, entropy=True)
    ((logp * numbers(1, len(tokens))).sum() + (entropy * numbers(2, len(tokens))).sum()).backward()
    gradients = {name: bits(g).numpy().tobytes() for name, g in parallel.state(model, gradients=True)} if hasattr(model, "whole_config") else None
    return rows, [bits(t).numpy().tobytes() for t in (logp, entropy)], gradients


def _sampled(model):
    requests = [sampler.Request(p, most=6, seed=4, stream=i, temperature=0.9, top_p=0.9 if i else 1.0, top_k=i * 7)
                for i, p in enumerate([[3, 1, 4], [1, 5, 9, 2, 6] * 4, [5]])]
    return [(a.tokens, a.logp) for a in sampler.Sampler(model, pages=40, chunk=7).run(requests)]


@pytest.mark.parametrize("dtype, changes", [(torch.bfloat16, {}), (torch.float32, {"tied": False, "qk_norm": False}), (torch.bfloat16, {"fp8_cache": True}),
                                            (torch.bfloat16, {"shape": "tiny-kimi-ranks"}), (torch.float32, {"shape": "tiny-kimi-ranks"})])
def test_a_model_has_the_same_bits_at_every_degree(dtype, changes):
    model = decoder(dtype=dtype, **changes)
    rows, logp, _ = _scored(model)
    drawn, first = _sampled(model), None
    for degree, spread_rows in ((1, False), (2, False), (4, False), (8, False), (2, True), (8, True)):
        def work(group):
            return *_scored(decoder(group, dtype, spread_rows, **changes)), _sampled(decoder(group, dtype, spread_rows, **changes))

        for found in Threads.run(degree, work):
            verdict, apart = verify_model.compare(rows, found[0])
            assert apart == 0 and not any(verdict.values()), (degree, verdict, apart)
            assert found[0].digest() == rows.digest() and found[1] == logp and found[3] == drawn
            first = first or found[2]
            assert [name for name in first if found[2][name] != first[name]] == [], (degree, spread_rows)
    # And the gradients are those of the model, but for the order of sums.
    for name, module, weight, _ in spread_model._parts(model, model.config):
        g = getattr(module, weight).grad
        ours = torch.frombuffer(bytearray(first[name]), dtype=g.dtype).view(g.shape)
        assert torch.allclose(ours.float(), g.float(), atol=float(g.abs().max()) * (0.05 if dtype == torch.bfloat16 else 1e-4)), name


def test_samples_share_a_prompt_at_every_degree():
    sequences, of = [[3, 1, 4, 1, 5, 9], [2, 6], [5, 3, 5], [8], [9, 7, 9, 3]], torch.tensor([-1, 0, 0, -1, 0])
    tokens, cu = torch.tensor(sum(sequences, [])), torch.tensor([0, *map(len, sequences)]).cumsum(0).to(torch.int32)

    def scored(model):
        logp = model.score(tokens, cu, prefix_of=of)
        (logp * numbers(1, len(tokens))).sum().backward()
        return bits(logp.detach()), {name: bits(g).clone() for name, g in parallel.state(model, gradients=True)} if hasattr(model, "whole_config") else None

    whole, first = scored(decoder())[0], None
    for degree, spread_rows in ((1, False), (2, False), (8, True)):
        for logp, gradients in Threads.run(degree, lambda group: scored(decoder(group, spread_rows=spread_rows))):
            first = first or gradients
            assert torch.equal(logp, whole), (degree, spread_rows)
            assert [name for name in first if not torch.equal(first[name], gradients[name])] == [], (degree, spread_rows)


def test_the_comparison_of_degrees_can_fail(monkeypatch):
    rows, logp, _ = _scored(decoder(dtype=torch.float32))
    monkeypatch.setattr(ops, "join", lambda partial, group, dtype, *more, **options: group.gather(partial).sum(0).to(dtype))  # one by one
    found = Threads.run(8, lambda group: verify_model.packed(decoder(group, torch.float32), verify_model.corpus(decoder(), 3, 40, 2)))[0]
    verdict, apart = verify_model.compare(rows, found)
    assert verdict[0].startswith("stream") and apart > 0


def test_weights_go_from_one_degree_to_another_and_back():
    model = decoder()

    def work(group):
        mine = decoder(group, tied=True)
        with torch.no_grad():
            for p in mine.parameters():
                p.zero_()
        parallel.reshard(model, mine)
        back = parallel.whole(mine)
        assert type(back) is rlk.model.Decoder and back.config == model.config
        return [t.detach() for t in back.parameters()]

    assert all(map(same, every_degree(work), model.parameters()))
    with pytest.raises(rlk.InvalidArgument, match="the models differ: .*mlp=176.*mlp=64"):
        parallel.reshard(model, decoder(mlp=64))


def _work_on_a_model(rank, degree):
    """A step of the loop: a sampler spread over all ranks draws, a trainer over `degree` of them scores and learns, weights go back."""
    world = parallel.as_group()
    pairs = [dist.new_group(list(range(r, r + degree))) for r in range(0, world.size, degree)]
    group = parallel.as_group(pairs[rank // degree])
    trainer, drawer = decoder(group), decoder(world)
    found, kl = [], []
    for step in range(2):
        drawn = _sampled(drawer)
        prompts = [[3, 1, 4], [1, 5, 9, 2, 6] * 4, [5]]
        rows = [p + tokens for p, (tokens, _) in zip(prompts, drawn)]
        cu = torch.tensor([0, *map(len, rows)]).cumsum(0).to(torch.int32)
        logp = trainer.score(torch.tensor(sum(rows, [])), cu, temperature=0.9)
        scored = logp[:cu[1]].tolist()[len(prompts[0]):]  # the row without filters, of which the draw's logp is that of all entries
        kl.append(max(abs(a - b) for a, b in zip(scored, drawn[0][1])))
        logp[:cu[1]].sum().backward()
        with torch.no_grad():
            for p in trainer.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        parallel.reshard(trainer, drawer)
        found.append(drawn)
    return found, kl, [bits(t).numpy().tobytes() for _, t in parallel.state(drawer)]


@pytest.mark.parametrize("degree, trainers", [(2, 1), (4, 2)])
def test_trainer_and_sampler_may_have_different_degrees(degree, trainers, tmp_path):
    (one, kl, weights), = processes(1, tmp_path, _work_on_a_model, 1)
    assert kl == [0, 0] and one[0] != one[1]  # the step changed what is drawn
    (tmp_path / "store").unlink()
    for found in processes(degree, tmp_path, _work_on_a_model, trainers):
        assert found == (one, [0, 0], weights)


@pytest.mark.parametrize("changes, words", [
    ({"heads": 4, "kv_heads": 2}, "4 heads of 16 over 2 ranks: heads divided by ranks and heads * 16=64 divided by 128 must leave nothing"),
    ({"heads": 9, "kv_heads": 9, "head_dim": 128}, "9 heads of 128 over 2 ranks")])
def test_heads_that_are_no_leaves_are_refused(changes, words):
    said = refusals(2, lambda group: decoder(group, **changes))
    assert all(words in s for s in said)


def test_a_model_that_cannot_be_spread_stays_whole():
    model = rlk.model.Decoder("tiny-kimi")
    for block in model.blocks:
        block.extra = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(rlk.Unsupported, match="layer 0 has a weight 'extra'"):
        parallel.decoder(model, parallel.Group(0, 1))
    assert model.ops is rlk.torch and type(model) is rlk.model.Decoder
    said = refusals(2, lambda group: decoder(group, shape="tiny-kimi"))
    assert all("2 heads of 16 over 2 ranks: heads divided by ranks and heads * 16=32 divided by 128 must leave nothing" in s for s in said)


@pytest.mark.parametrize("shape", ["tiny-ranks", "tiny-kimi-ranks"])
def test_captured_steps_over_ranks_draw_what_one_device_draws(shape):
    requests = [sampler.Request([3, 1 + i] * (i + 1), most=5 + 30 * i, seed=4, stream=i) for i in range(3)]

    def work(group=None):
        found = sampler.Sampler(decoder(group, shape=shape, layers=4), pages=60, graphs=True)
        return [(a.tokens, a.logp) for a in found.run(requests)], len(found._steady)

    one = work()
    assert one[1] >= 3 and all(found == one for found in Threads.run(4, work))


def test_a_spread_model_is_not_saved_in_parts(tmp_path):
    model = decoder(parallel.Group(0, 1))
    for call in (model.save, model.load_weights):
        with pytest.raises(rlk.Unsupported, match="a rank has parts of the weights"):
            call(tmp_path)
    with pytest.raises(rlk.InvalidArgument, match="spread already"):
        parallel.decoder(model, model.ops.group)
    with pytest.raises(rlk.InvalidArgument, match=r"linear has a weight \[4, 4\] that was not spread"):
        model.ops.linear(numbers(1, 2, 4), numbers(2, 4, 4))


def test_the_command_says_same_and_can_say_otherwise(capsys, monkeypatch):
    small = ["--layers", "1", "--sequences", "2", "--longest", "20", "--dtype", "fp32", "--threads", "1", "4"]
    assert command.main(small) == 0
    said = capsys.readouterr().out
    assert "every degree has the same bits" in said and said.count("same") == 2 * 5 + 1 and "differ" not in said
    monkeypatch.setattr(ops, "join", lambda partial, group, dtype, *more, **options: group.gather(partial).sum(0).to(dtype))
    assert command.main([*small[:-2], "1", "8"]) == 1
    assert "degrees differ" in capsys.readouterr().out
