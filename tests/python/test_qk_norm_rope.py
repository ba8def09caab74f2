"""qk_norm_rope in Python: the bits of rms_norm, rope and a copy; and the decoder's and the sampler's use of it."""

import numpy
import pytest

torch = pytest.importorskip("torch")

import rlk  # noqa: E402
import rlk.model  # noqa: E402
import rlk.torch  # noqa: E402
from rlk import sampler  # noqa: E402


def call(dtype, tokens=7, heads=4, kv_heads=2, dim=16):
    draw = torch.Generator().manual_seed(2)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=draw).to(dtype)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
    norms = {n: torch.randn(dim, generator=draw).to(dtype) for n in ("q_weight", "k_weight")}
    cos, sin = rlk.torch.rope_tables(rotary_dim=dim, rows=40)
    positions = torch.randint(40, (tokens,), generator=draw)
    return (q, k, cos, sin, positions), v, norms


def composed(q, k, cos, sin, positions, q_weight, k_weight):
    q, k = rlk.torch.rms_norm(q, q_weight, eps=1e-6), rlk.torch.rms_norm(k, k_weight, eps=1e-6)
    return rlk.torch.rope(q, cos, sin, k=k, positions=positions, layout="thd")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_op_has_the_bits_of_the_others_and_keeps_the_rest_of_the_cache(dtype):
    given, v, norms = call(dtype)
    want = composed(*given, **norms)
    assert all(map(torch.equal, rlk.torch.qk_norm_rope(*given, **norms, k_out=True), want))
    pages = torch.full((2, 5, 4, 2, 16), float("nan"), dtype=dtype)
    slots = torch.tensor([3, 19, -1, 0, 7, 20, 8])
    k_cache, v_cache = pages[0].flatten(0, 1), pages[1].flatten(0, 1)
    found = rlk.torch.qk_norm_rope(*given, v, **norms, slots=slots, k_cache=k_cache, v_cache=v_cache)
    assert torch.equal(found, want[0])
    there = [i for i, s in enumerate(slots.tolist()) if 0 <= s < 20]
    expected = torch.full_like(pages, float("nan"))
    expected[0].flatten(0, 1)[slots[there]], expected[1].flatten(0, 1)[slots[there]] = want[1][there], v[there]
    assert torch.equal(pages.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_caches_have_the_bits_that_torch_rounds_to(dtype, compiled):
    given, v, norms = call(dtype)
    _, k = composed(*given, **norms)
    scales = {"k_scale": torch.tensor([0.037, 0.0011]), "v_scale": torch.tensor([0.093])}  # some keys are beyond 448
    slots, there = torch.tensor([3, 19, -1, 0, 7, 20, 8]), [0, 1, 3, 4, 6]
    k_cache, v_cache = (torch.full((20, 2, 16), 3.0).to(torch.float8_e4m3fn) for _ in range(2))
    expected = [k_cache.clone(), v_cache.clone()]
    for rows, x, scale in zip(expected, (k, v), scales.values()):
        rows.view(torch.uint8)[slots[there]] = rlk.model.fp8(x.float() * (1 / scale).reshape(-1, 1))[there].view(torch.uint8)
    run = lambda *t, **more: rlk.torch.qk_norm_rope(*t, **more)  # noqa: E731
    run = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run
    run(*given, v, **norms, slots=slots, **scales, k_cache=k_cache, v_cache=v_cache)
    assert all(torch.equal(f.view(torch.uint8), e.view(torch.uint8)) for f, e in zip((k_cache, v_cache), expected))
    with pytest.raises(rlk.InvalidArgument, match="k_scale is given, k_cache is (fp|bf)[0-9]*, not fp8_e4m3"):
        rlk.torch.qk_norm_rope(*given, slots=slots, k_scale=scales["v_scale"], k_cache=torch.zeros(20, 2, 16, dtype=dtype))


def test_every_finite_number_becomes_the_fp8_that_torch_makes_of_it():
    (q, k, cos, sin, positions), _, _ = call(torch.bfloat16, tokens=256, heads=1, kv_heads=1)
    v = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(256, 1, 256)
    v = torch.where(v.isfinite(), v, 0)
    cache = torch.zeros(256, 1, 256).to(torch.float8_e4m3fn)
    rlk.torch.qk_norm_rope(q, k, cos, sin, positions, v, slots=torch.arange(256), v_cache=cache)
    assert torch.equal(cache.view(torch.uint8), rlk.model.fp8(v).view(torch.uint8))


def test_it_has_numpys_face_and_no_gradient():
    given, _, norms = call(torch.float32)
    want = composed(*given, **norms)
    found = rlk.qk_norm_rope(*(t.numpy() for t in given), **{n: t.numpy() for n, t in norms.items()}, k_out=True)
    assert all(numpy.array_equal(f, w.numpy()) for f, w in zip(found, want))
    norms["q_weight"].requires_grad_()
    found = rlk.torch.qk_norm_rope(*given, **norms)
    with pytest.raises(rlk.Unsupported, match="qk_norm_rope: a gradient is asked for, this op has no gradient"):
        found.sum().backward()


def decoder(name="tiny-qwen3", **options):
    """With norms that differ: made of ones they would be one another's."""
    model, draw = rlk.model.Decoder(name, seed=3, **options), torch.Generator().manual_seed(6)
    for n, weight in model.named_parameters():
        if n.endswith(("q_norm", "k_norm")):
            weight.data.copy_(torch.randn(weight.shape, generator=draw))
    return model


class Counted:
    """How often the decoder calls each op."""

    def __init__(self, monkeypatch):
        self.calls = {}
        for name in ("qk_norm_rope", "rope"):
            monkeypatch.setattr(rlk.torch, name, self._counting(name, getattr(rlk.torch, name)))

    def _counting(self, name, plain):
        def counting(*given, **options):
            found = plain(*given, **options)
            self.calls[name] = self.calls.get(name, 0) + 1
            return found

        return counting

    def of(self, run):
        self.calls = {}
        return run(), self.calls


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_decoder_takes_it_where_nobody_wants_a_trace(name, dtype, monkeypatch, tmp_path):
    model, counted = decoder(name, dtype=dtype), Counted(monkeypatch)
    tokens, cu = torch.arange(23) % 64, torch.tensor([0, 9, 23], dtype=torch.int32)
    with rlk.trace(tmp_path / "t.jsonl"), torch.no_grad():
        traced, calls = counted.of(lambda: model.packed(tokens, cu))
    assert calls == {"rope": 2}
    for learns in (True, False):
        with torch.set_grad_enabled(learns):
            found, calls = counted.of(lambda: model.packed(tokens, cu).detach())
        assert calls == {"qk_norm_rope": 2} and torch.equal(found, traced)


@pytest.mark.parametrize("name, scope", [("tiny-qwen3", lambda: rlk.precision("golden")), ("tiny-llama", lambda: rlk.precision("golden")),
                                         ("tiny-qwen3", lambda: rlk.backend("rms_norm=native.golden;*=native"))])
def test_a_scope_that_wants_another_arithmetic_has_it_op_by_op(name, scope, monkeypatch):
    model, counted = decoder(name), Counted(monkeypatch)
    tokens, cu = torch.arange(12), torch.tensor([0, 12], dtype=torch.int32)
    with scope():
        with torch.no_grad():
            found, calls = counted.of(lambda: model.packed(tokens, cu))
        assert calls == {"rope": 2} and torch.equal(found, model.packed(tokens, cu))


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("f8", [False, True])
def test_the_samplers_cache_is_written_by_it_with_the_same_bits(f8, graphs, monkeypatch):
    model, counted = decoder(rlk.model.config("tiny-qwen3", fp8_cache=f8), dtype=torch.bfloat16), Counted(monkeypatch)
    requests = [sampler.Request([1 + i, 5, 9, 2], most=6 + i, seed=4, stream=i) for i in range(3)]
    plain_write, written = sampler.write, []
    monkeypatch.setattr(sampler, "write", lambda *given: (written.append(given), plain_write(*given)))

    def run():
        made, rows = sampler.Sampler(model, pages=30, page_size=4, graphs=graphs), {}
        made.note = lambda layer, name, found, keys: rows.update(
            {(layer, name, r.stream, p): row for (r, p), row in zip(keys, found.clone())})
        answers = made.run(requests)
        return [(a.tokens, a.logp) for a in answers], rows, made.cache.k.clone(), made.cache.v.clone()

    (answers, rows, *cache), calls = counted.of(run)
    assert "rope" not in calls and calls["qk_norm_rope"] > 10 and not written
    monkeypatch.setattr(rlk.model.Turn, "_same_bits", lambda *given: False)
    (plain, others, *other_cache), calls = counted.of(run)
    assert "qk_norm_rope" not in calls and written and plain == answers
    assert rows.keys() == others.keys() and all(torch.equal(rows[key], others[key]) for key in rows)
    # But for the page behind the last, which is nobody's.
    assert all(torch.equal(a[:, :-1].view(torch.uint8), b[:, :-1].view(torch.uint8)) for a, b in zip(cache, other_cache))


def test_without_the_op_the_decoder_goes_on_as_before(monkeypatch):
    model = decoder()
    tokens, cu = torch.arange(9), torch.tensor([0, 9], dtype=torch.int32)

    def none(*given, **options):
        raise rlk.NoImplementation("qk_norm_rope: none", None)

    want = model.packed(tokens, cu).detach()
    monkeypatch.setattr(rlk.torch, "qk_norm_rope", none)
    for learns in (True, False):
        with torch.set_grad_enabled(learns):
            assert torch.equal(model.packed(tokens, cu), want)
