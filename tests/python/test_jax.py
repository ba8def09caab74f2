"""rlk.jax: XLA's custom calls, jit and gradients, where jax is installed."""

import os
import subprocess
import sys

import numpy
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import rlk  # noqa: E402
import rlk.jax  # noqa: E402
from examples import ALL, BUILT_IN, examples  # noqa: E402
from rlk import _C  # noqa: E402

ALIASES = [a.partition(":")[0] for op in ALL for a in _C.schema(op)["aliases"].split(",") if a]


def random(*shape, dtype=jnp.float32, seed=0):
    return jax.random.normal(jax.random.key(seed + sum(shape)), shape).astype(dtype)


def bits(x):
    return numpy.asarray(x).tobytes()


@pytest.mark.parametrize("op", [*ALL, *ALIASES])
def test_every_op_and_alias_is_a_function(op):
    assert callable(getattr(rlk.jax, op))


@pytest.mark.parametrize("op", BUILT_IN)
def test_the_jax_face_gives_the_bits_of_the_plain_face_with_and_without_jit(op):
    _, arrays, results, attributes = examples(op, ("fp32", "int32", "int64"))[0]
    shapes = _C.infer(op, **arrays, **attributes)
    asked = {r: "int32" if "int32" in shapes[r][2] else True for r in results}  # jax has int64 only on request
    changed = [a["name"] for a in _C.schema(op)["arguments"] if a["role"] == 2 and a["name"] in arrays]
    given = {n: a.copy() for n, a in arrays.items()}
    want = getattr(rlk, op)(**given, **asked, **attributes)
    if changed and _C.schema(op)["arguments"][-1]["role"] == 1:  # beside results the plain face does not name what it changed
        want = (*(want if isinstance(want, tuple) else (want,)), *(given[n] for n in changed))
    call = lambda a: getattr(rlk.jax, op)(**a, **asked, **attributes)  # noqa: E731
    if any(shapes[r][2] == ["int64"] for r in results):
        with pytest.raises(rlk.InvalidArgument, match="jax_enable_x64|is int32, it takes int64"):
            call(arrays)
        return
    arrays = {n: jnp.asarray(a) for n, a in arrays.items()}
    before = {n: bits(arrays[n]) for n in changed}
    for got in (call(arrays), jax.jit(call)(arrays)):
        want, got = (r if isinstance(r, tuple) else (r,) for r in (want, got))
        assert len(want) == len(got) and all(bits(a) == bits(b) for a, b in zip(want, got))
    assert before == {n: bits(arrays[n]) for n in changed}  # jax's arrays never change


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_are_the_formulas(dtype):
    hidden, weight, bias = random(5, 16, dtype=dtype), random(7, 16, dtype=dtype), random(7, dtype=dtype)
    cotangent = random(5, 7)
    mine = lambda *a: (rlk.jax.lm_head(*a).astype(jnp.float32) * cotangent).sum()  # noqa: E731
    plain = lambda h, w, b: ((h.astype(jnp.float32) @ w.astype(jnp.float32).T + b) * cotangent).sum()  # noqa: E731
    tolerance = 1e-5 if dtype == jnp.float32 else 3e-2
    for got, want in zip(jax.jit(jax.grad(mine, (0, 1, 2)))(hidden, weight, bias), jax.grad(plain, (0, 1, 2))(hidden, weight, bias)):
        assert got.dtype == want.dtype and jnp.allclose(got, want, rtol=tolerance, atol=tolerance)


def test_gradients_agree_with_differences():
    from jax.test_util import check_grads
    x, weight, cos, sin = random(3, 8), random(8), random(6, 4), random(6, 4)
    check_grads(lambda x, w: rlk.jax.rms_norm(x, w), (x, weight), 1, ["rev"], rtol=2e-2, atol=2e-2)
    k, v = random(1, 3, 1, 16), random(1, 3, 1, 16, seed=1)
    for attributes in ({}, {"lse": True}):  # the backward has it in either case
        check_grads(lambda q, k, v: rlk.jax.attention(q, k, v, **attributes), (random(1, 3, 2, 16, seed=2), k, v), 1,  # noqa: B023
                    ["rev"], rtol=2e-2, atol=2e-2)
    check_grads(lambda g, u: rlk.jax.swiglu(g, u), (x, x + 1), 1, ["rev"], rtol=2e-2, atol=2e-2)
    q, k = random(1, 2, 6, 8), random(1, 1, 6, 8)
    check_grads(lambda q, k: rlk.jax.rope(q, cos, sin, k=k), (q, k), 1, ["rev"], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("op", [op for op in BUILT_IN if _C.schema(op)["backward"]])
def test_gradients_of_every_op_are_the_bits_of_its_backward_with_and_without_jit(op):
    _, arrays, results, attributes = examples(op, ("fp32", "int32", "int64"))[0]
    schema = _C.schema(op)
    learns = [a["name"] for a in schema["arguments"] if a["differentiable"] and a["name"] in arrays]
    shapes = _C.infer(op, **arrays, **attributes)
    asked = {r: "int32" if shapes[r][1] == "int64" else True for r in results}
    backward = {a["name"]: a for a in _C.schema(schema["backward"])["arguments"]}
    cotangents = {r: numpy.random.default_rng(len(r)).normal(size=shapes[r][0]).astype(numpy.float32)
                  for r in shapes if r in asked and f"d_{r}" in backward}

    def loss(leaves):
        found = getattr(rlk.jax, op)(**(arrays | leaves), **asked, **attributes)
        found = dict(zip([r for r in shapes if r in asked], found if isinstance(found, tuple) else (found,)))
        return sum((found[r] * w).sum() for r, w in cotangents.items())

    leaves = {n: jnp.asarray(arrays[n]) for n in learns}
    got = jax.grad(loss)(leaves)
    compiled = jax.jit(jax.grad(loss))(leaves)
    saved = [a["name"] for a in schema["arguments"] if a["saved"]]
    required = [n for n, a in backward.items() if a["role"] != 1 and not a["optional"]]
    always = [a["name"] for a in schema["arguments"] if a["kept"]]
    assert set(saved) & set(required) & set(shapes) <= {*asked, *always}
    kept = [n for n in shapes if n in asked or n in always]
    made = getattr(rlk, op)(**arrays, **attributes, **dict.fromkeys(kept, True))
    known = arrays | dict(zip(kept, made if isinstance(made, tuple) else (made,)))
    given = {n: known[n] for n in saved if n in known and n in backward} | {f"d_{r}": w for r, w in cotangents.items()}
    given |= {n: known[n] for n in required if n in known}
    wanted = {f"d_{n}": True for n in learns if f"d_{n}" in backward}
    taken = {a["name"] for a in _C.schema(schema["backward"])["attributes"]}
    want = getattr(rlk, schema["backward"])(**given, **wanted, **{k: v for k, v in attributes.items() if k in taken})
    want = dict(zip([n for n in backward if n in wanted], want if isinstance(want, tuple) else (want,)))
    assert want and learns
    for n in learns:
        assert bits(got[n]) == bits(compiled[n]) == bits(want[f"d_{n}"]), n
    # One trace of a call serves all of its gradients: that of each alone, then of all again.
    for n in learns:
        assert bits(jax.grad(lambda x, n=n: loss(leaves | {n: x}))(leaves[n])) == bits(got[n]), n
    again = jax.grad(loss)(leaves)
    assert all(bits(again[n]) == bits(got[n]) for n in learns)


def test_kept_results_and_optional_ones_come_with_their_gradients():
    q, k, v = (random(1, 5, 2, 8, seed=i) / 3 for i in range(3))
    g, beta = -jnp.abs(random(1, 5, 2, 8, seed=3)), jax.nn.sigmoid(random(1, 5, 2))

    def recurrence(q, k, v, g, beta):
        state, out = jnp.zeros((1, 2, 8, 8)), []
        for t in range(5):
            state = state * jnp.exp(g[:, t])[..., None]
            write = beta[:, t, :, None] * (v[:, t] - jnp.einsum("bhk,bhkv->bhv", k[:, t], state))
            state = state + k[:, t][..., None] * write[..., None, :]
            out.append(jnp.einsum("bhk,bhkv->bhv", q[:, t] * 8 ** -0.5, state))
        return jnp.stack(out, 1), state

    def loss(call, both):
        def of(*a):
            out, state = call(*a)
            return (out * random(1, 5, 2, 8)).sum() + (state * random(1, 2, 8, 8)).sum() * both
        return jax.grad(of, (0, 1, 2, 3, 4))

    for both in (0, 1):
        got = jax.jit(loss(lambda *a: rlk.jax.kda_fwd(*a, final_state=True), both))(q, k, v, g, beta)
        for a, b in zip(got, loss(recurrence, both)(q, k, v, g, beta)):
            assert jnp.allclose(a, b, rtol=1e-3, atol=1e-4)


def test_what_has_no_gradient_says_so():
    q, cos, sin = random(1, 2, 6, 8), random(6, 4), random(6, 4)
    with pytest.raises(rlk.Unsupported, match="cos has no gradient"):
        jax.grad(lambda c: rlk.jax.rope(q, c, sin).sum())(cos)
    with pytest.raises(rlk.Unsupported, match="this op has no gradient"):
        jax.grad(lambda d: rlk.jax.rope_bwd(d, cos, sin).sum())(q)


def test_a_second_gradient_is_refused():
    hidden, weight = random(5, 16), random(7, 16)
    first = jax.grad(lambda h: rlk.jax.lm_head(h, weight).sum())
    with pytest.raises(rlk.Unsupported, match="a second gradient is asked for, an op here has one alone"):
        jax.grad(lambda w: jax.grad(lambda h: (rlk.jax.lm_head(h, w) ** 2).sum())(hidden).sum())(weight)
    assert first(hidden).shape == hidden.shape


def test_shapes_of_jax_are_still_leaves_and_a_call_is_exported():
    shape = jax.ShapeDtypeStruct((5, 16), jnp.float32)
    assert jax.tree.leaves(shape) == [shape]
    weight, hidden = random(7, 16), random(5, 16)
    both = jax.jit(jax.value_and_grad(lambda h: rlk.jax.lm_head(h, weight).sum()))
    exported = jax.export.export(both, disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("rlk")])(shape)
    assert all(map(numpy.array_equal, exported.call(hidden), both(hidden)))


SPREAD = """
import jax, jax.numpy as jnp, numpy, rlk.jax
from jax.sharding import AxisType, PartitionSpec as P

mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
hidden, weight = jax.random.normal(jax.random.key(1), (8, 16)), jax.random.normal(jax.random.key(2), (7, 16))
spread = jax.shard_map(rlk.jax.lm_head, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=False)
loss = lambda f: jax.grad(lambda h: (f(h, weight) ** 2).sum())
for f in (spread, jax.jit(spread)):
    assert numpy.array_equal(f(hidden, weight), rlk.jax.lm_head(hidden, weight))
    assert numpy.array_equal(loss(f)(hidden), loss(rlk.jax.lm_head)(hidden))
"""


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="jax 0.6 and older have it elsewhere")
def test_a_call_is_spread_by_shard_map():
    done = subprocess.run([sys.executable, "-c", SPREAD], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"})
    assert done.returncode == 0, done.stderr


def test_scopes_and_options_hold_under_jit_and_for_the_gradient():
    hidden, weight = random(5, 64), random(7, 64)
    plain = jax.jit(lambda h, w: rlk.jax.lm_head(h, w))(hidden, weight)

    def golden(h, w):
        with rlk.precision("golden"):
            return rlk.jax.lm_head(h, w)

    with rlk.precision("golden"):
        want = rlk.lm_head(numpy.asarray(hidden), numpy.asarray(weight))
        d_want = rlk.lm_head_bwd(numpy.ones((5, 7), numpy.float32), numpy.asarray(hidden), numpy.asarray(weight), d_hidden=True)
    got = jax.jit(golden)(hidden, weight)
    assert bits(got) == bits(want) != bits(plain)
    assert bits(rlk.jax.lm_head(hidden, weight, precision="golden")) == bits(want)
    assert bits(jax.jit(jax.grad(lambda h: golden(h, weight).sum()))(hidden)) == bits(d_want)


def test_scalars_of_numpy_and_jax_are_attributes():
    x, weight = random(3, 8), random(8)
    want = bits(rlk.jax.rms_norm(x, weight, eps=0.5, weight_offset=True))
    for scalar in (numpy.float32, jnp.float32):
        assert bits(rlk.jax.rms_norm(x, weight, eps=scalar(0.5), weight_offset=numpy.bool_(True))) == want


def test_gradients_within_jits_scans_and_maps_are_those_outside():
    """Each after another of the same call, of which jax keeps one trace."""
    x, w = random(3, 4, 8), random(5, 8)
    ones = numpy.ones((4, 5), numpy.float32)
    d_x, d_w = ones @ numpy.asarray(w), numpy.einsum("bmv,bmk->vk", numpy.ones((3, 4, 5)), numpy.asarray(x))
    jitted = jax.jit(rlk.jax.lm_head)
    loops = [lambda x, w: sum(jitted(r, w).sum() for r in x),
             lambda x, w: jax.lax.scan(lambda c, r: (c + jitted(r, w).sum(), None), 0.0, x)[0],
             lambda x, w: jax.lax.map(lambda r: jitted(r, w), x).sum(),
             lambda x, w: jax.vmap(jitted, (0, None))(x, w).sum(),
             lambda x, w: jax.checkpoint(lambda x, w: sum(jitted(r, w).sum() for r in x))(x, w)]
    for _ in range(2):
        for loop in loops:
            for of, want in ((0, (d_x,)), (1, (d_w,)), ((0, 1), (d_x, d_w))):
                for got, w_ in zip(jax.tree.leaves(jax.grad(loop, of)(x, w)), want):
                    assert numpy.allclose(got, w_, atol=1e-4)


def test_vmap_loops():
    hidden, weight = random(3, 5, 16), random(7, 16)
    assert bits(jax.vmap(lambda h: rlk.jax.lm_head(h, weight))(hidden)) == bits(rlk.jax.lm_head(hidden, weight))


def test_mistakes_are_the_librarys_own_words_when_traced():
    with pytest.raises(rlk.InvalidArgument, match="hidden"):
        jax.jit(rlk.jax.lm_head)(random(5, 16), random(7, 15))
    with pytest.raises(rlk.InvalidArgument, match="lm_head: weight is missing"):
        rlk.jax.lm_head(random(5, 16))
    with pytest.raises(rlk.UnknownName, match="'wieght'"):
        rlk.jax.lm_head(random(5, 16), wieght=random(7, 16))
    with pytest.raises(rlk.InvalidArgument, match="layout is 'bsdh', it is one of bhsd"):
        rlk.jax.rope(random(1, 2, 6, 8), random(6, 4), random(6, 4), layout="bsdh")
    with pytest.raises(rlk.InvalidArgument, match="lm_head: out is given to be written, jax's arrays never change"):
        rlk.jax.lm_head(random(5, 16), random(7, 16), out=jnp.zeros((5, 7)))
    for options, kind, words in (({"threads": "2"}, rlk.InvalidArgument, "threads is '2', it takes a number"),
                                 ({"backend": 5}, rlk.InvalidArgument, "backend is 5, it takes a name"),
                                 ({"backend": "nope"}, rlk.ConfigurationError, "unknown backend 'nope'"),
                                 ({"precision": "exact"}, rlk.InvalidArgument, "precision is 'exact', it is standard"),
                                 ({"arithmetic": "nope"}, rlk.NoImplementation, "promises arithmetic 'nope'")):
        with pytest.raises(kind, match=words):
            jax.jit(lambda h, w: rlk.jax.lm_head(h, w, **options))(random(5, 16), random(7, 16))  # noqa: B023
    with pytest.raises(Exception, match="RLK_INVALID_ARGUMENT: rope: token 0 of batch 0 is at position 9, cos has 6 rows"):
        rlk.jax.rope(random(1, 2, 6, 8), random(6, 4), random(6, 4), positions=jnp.full(6, 9)).block_until_ready()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_of_a_norm_with_residual_are_those_of_adding_first(dtype):
    x, weight, residual = random(5, 24, dtype=dtype), random(24, dtype=dtype), random(5, 24, dtype=dtype, seed=9)
    d_y, d_sum = random(5, 24, dtype=dtype, seed=1), random(5, 24, dtype=dtype, seed=2)
    _, pull = jax.vjp(lambda *a: rlk.jax.rms_norm(*a, sum=True), x, weight, residual)
    got = jax.jit(pull)((d_y, d_sum))
    want = rlk.jax.rms_norm_bwd(d_y, x + residual, weight, d_sum=d_sum, d_x=True, d_weight=True)
    assert all(bits(a) == bits(b) for a, b in zip(got, (*want, want[0])))
    _, pull = jax.vjp(rlk.jax.rms_norm, x, weight, residual)  # without the sum it is computed again
    want = rlk.jax.rms_norm_bwd(d_y, x + residual, weight, d_x=True, d_weight=True)
    assert all(bits(a) == bits(b) for a, b in zip(pull(d_y), (*want, want[0])))
