"""rlk.torch: autograd, torch.compile and the dispatcher, where torch is installed."""

import json
import threading

import numpy
import pytest

torch = pytest.importorskip("torch")

import rlk  # noqa: E402
import rlk.torch  # noqa: E402
from examples import ALL, BUILT_IN, examples  # noqa: E402
from rlk import _C  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

ALIASES = [a.partition(":")[0] for op in ALL for a in _C.schema(op)["aliases"].split(",") if a]


def leaf(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def tables(rotary_dim=8, rows=6, **rule):
    return rlk.torch.rope_tables(rotary_dim=rotary_dim, rows=rows, **rule)


def one_example(op):
    name, arrays, results, attributes = examples(op, ("fp32", "int32", "int64"))[0]
    return {n: torch.from_numpy(a) for n, a in arrays.items()}, results, attributes


# ---- every op is there and is what torch expects -------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [*ALL, *ALIASES])
def test_every_op_and_alias_is_a_function(op):
    assert callable(getattr(rlk.torch, op))


@pytest.mark.parametrize("op", BUILT_IN)
def test_every_op_passes_opcheck(op):
    tensors, results, attributes = one_example(op)
    schema = rlk.torch.Schema(op)
    differentiable = {a["name"] for a in schema.inputs if a["differentiable"]}
    recorded = bool(schema.backward)
    inputs = [tensors.get(n) for n in schema.input_names]
    inputs = [t.requires_grad_() if recorded and t is not None and n in differentiable else t
              for n, t in zip(schema.input_names, inputs)]
    asked = ",".join(results) or schema.wanted(tensors, {})
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if schema.backward or schema.changed:  # the others refuse a gradient, which this test asks for
        tests.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(torch.ops.rlk, op).default, tuple(inputs), {"results": asked, **attributes},
                          test_utils=tests)


@pytest.mark.parametrize("op", BUILT_IN)
def test_the_torch_face_gives_the_bits_of_the_plain_face(op):
    tensors, results, attributes = one_example(op)
    asked = {r: True for r in results}
    plain = getattr(rlk, op)(**{n: t.clone() for n, t in tensors.items()}, **attributes, **asked)
    torch_face = getattr(rlk.torch, op)(**{n: t.clone() for n, t in tensors.items()}, **attributes, **asked)
    for a, b in zip(plain if isinstance(plain, tuple) else (plain,),
                    torch_face if isinstance(torch_face, tuple) else (torch_face,), strict=True):
        assert type(b) is torch.Tensor
        assert torch.equal(a, b)


# ---- gradients ----------------------------------------------------------------------------------------------------------------


def differences(function, tensors, cotangents, step=1e-2):
    """Central differences of sum(cotangent * result) by each element, results in fp32."""
    def value():
        out = function(*tensors)
        out = out if isinstance(out, tuple) else (out,)
        return sum((c.double() * o.double()).sum() for c, o in zip(cotangents, out)).item()

    found = []
    with torch.no_grad():
        for t in tensors:
            grad = torch.zeros_like(t, dtype=torch.float64)
            for i in range(t.numel()):
                before = t.view(-1)[i].item()
                t.view(-1)[i] = before + step
                up = value()
                t.view(-1)[i] = before - step
                down = value()
                t.view(-1)[i] = before
                grad.view(-1)[i] = (up - down) / (2 * step)
            found.append(grad)
    return found


def check_gradients(function, *tensors):
    out = function(*tensors)
    out = out if isinstance(out, tuple) else (out,)
    cotangents = [torch.randn_like(o, requires_grad=False) for o in out]
    grads = torch.autograd.grad(out, tensors, cotangents)
    for got, want in zip(grads, differences(function, tensors, cotangents)):
        assert torch.allclose(got.double(), want, rtol=2e-2, atol=2e-2), (got, want)


def test_gradients_agree_with_differences():
    torch.manual_seed(0)
    check_gradients(rlk.torch.lm_head, leaf(3, 5), leaf(4, 5), leaf(4))
    cos, sin = tables()
    check_gradients(lambda q, k: rlk.torch.rope(q, cos, sin, k=k), leaf(1, 2, 3, 8), leaf(1, 1, 3, 8))
    cos, sin = tables(width="full")
    check_gradients(lambda x: rlk.torch.rope_mla_q(x, cos, sin, layout="bshd"), leaf(1, 3, 2, 12))
    check_gradients(lambda kv, p: rlk.torch.rope_mla_kv(kv, p, cos, sin, layout="bshd", k_dim=3), leaf(1, 3, 2, 5),
                    leaf(1, 3, 1, 8))
    check_gradients(lambda g, a: rlk.torch.kda_gate(g, a), leaf(3, 2, 4), leaf(2))


@pytest.mark.parametrize("dtype, far", [(torch.float32, 2e-5), (torch.bfloat16, 2.5e-2)])
def test_gradients_of_attention_are_those_of_torch_in_fp64(dtype, far):
    q, k, v = (leaf(2, 70, h, 32, dtype=dtype) for h in (4, 2, 2))
    g = leaf(2, 70, 4, 32).detach()
    out = rlk.torch.attention(q, k, v)  # lse, which the backward needs, does not come back
    assert type(out) is torch.Tensor
    found = torch.autograd.grad(out, (q, k, v), g.to(dtype))
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    truth = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in wide), is_causal=True,
                                                             enable_gqa=True).transpose(1, 2)
    wanted = torch.autograd.grad(truth, wide, g.to(dtype).double())
    assert torch.allclose(out.double(), truth, atol=far, rtol=far)
    for got, want in zip(found, wanted, strict=True):
        assert (got.double() - want).abs().max() <= far * want.abs().max()
    both, lse = rlk.torch.attention(q, k, v, lse=True)
    again = torch.autograd.grad((both, lse), (q, k, v), (g.to(dtype), torch.zeros_like(lse)))
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    with torch.no_grad():
        assert torch.equal(rlk.torch.attention(q, k, v), out)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("op", ["logp", "linear_logp"])
def test_the_backward_reads_what_a_recorded_forward_kept(op, compiled, tmp_path):
    x, weight, target = leaf(5, 16), leaf(40, 16), torch.tensor([1, 39, 0, 7, 7])
    tensors = (x, weight) if op == "linear_logp" else (x,)
    call = lambda *t: getattr(rlk.torch, op)(*t, target=target % 16, logp=True)  # noqa: E731
    run = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call

    def records(name, work):
        with rlk.trace(tmp_path / name):
            out = work()
        lines = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        return out, {r["op"]: {(t["name"], t["role"]) for t in r["tensors"]} for r in lines if r.get("op")}

    out, seen = records("forward", lambda: run(*tensors))
    assert type(out) is torch.Tensor and ("stats", "output") in seen[op]  # kept, and not returned
    if not compiled:
        assert "stats" in {r["name"] for r in rlk.saved()}
    found, seen = records("backward", lambda: torch.autograd.grad(out, tensors, torch.ones(5)))
    assert "stats" in {name for name, _ in seen[f"{op}_bwd"]}
    with torch.no_grad():
        _, seen = records("plain", lambda: run(*tensors))
        assert ("stats", "output") not in seen[op]  # nobody will read it
        wanted = {f"d_{n}": True for n in (("hidden", "weight") if op == "linear_logp" else ())}
        again = getattr(rlk, f"{op}_bwd")(*tensors, target=target % 16, d_logp=torch.ones(5), **wanted)
    assert all(map(torch.equal, found, again if isinstance(again, tuple) else (again,)))
    with pytest.raises(rlk.InvalidArgument, match="no result is asked for"):
        getattr(rlk.torch, op)(*tensors, target=target)


@pytest.mark.parametrize("face", [rlk, rlk.torch])
@pytest.mark.parametrize("op", ["linear", "linear_logp"])
def test_gradients_of_micro_batches_add_up_in_fp32_where_they_lie(op, face):
    weight = torch.randn(40, 16).half()
    batches = [(torch.randn(n, 16).half(), torch.randint(0, 40, (n,)), torch.randn(n, 40)) for n in (5, 3)]

    def gradient(face, batch, **keywords):
        x, target, d = batch
        if op == "linear":
            return face.linear_bwd(d.half(), x, weight, **keywords)
        return face.linear_logp_bwd(x, weight, target=target, d_logp=d[:, 0].contiguous(), **keywords)

    first, second = (gradient(rlk, batch, d_weight="fp32") for batch in batches)
    new = gradient(face, batches[1], d_weight=True, d_weight_before=first)
    assert new.dtype == torch.float32 and torch.equal(new, first + second)
    total = first.clone()
    gradient(face, batches[1], d_weight=total, d_weight_before=total)
    assert torch.equal(total, new)
    with pytest.raises(rlk.InvalidArgument, match="d_weight_before has size 3 in dimension 0, weight gives 40"):
        gradient(face, batches[1], d_weight=True, d_weight_before=first[:3])


@pytest.mark.parametrize("compiled", [False, True])
def test_a_loss_has_the_gradient_of_its_entropy_unasked(compiled):
    logp, entropy = leaf(2, 5), leaf(2, 5)
    old, advantages = torch.randn(2, 5), torch.randn(2, 5)
    call = lambda a, e: rlk.torch.policy_loss(a, old, advantages, entropy=e, entropy_coef=0.1)  # noqa: E731
    loss, totals = (torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call)(logp, entropy)
    assert loss.shape == (1,) and totals.shape == (2, 5)
    d_logp, d_entropy = torch.autograd.grad(loss, (logp, entropy), torch.ones(1))
    assert d_logp.abs().sum() > 0 and torch.allclose(d_entropy, torch.full((2, 5), -0.01))


def test_gradients_of_attention_over_packed_sequences_and_of_lse():
    q, k, v, sinks = leaf(9, 2, 16), leaf(9, 1, 16), leaf(9, 1, 16), leaf(2)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    check_gradients(lambda *t: rlk.torch.attention(*t[:3], cu, cu, sinks=t[3], lse=True), q, k, v, sinks)
    compiled = torch.compile(lambda *t: rlk.torch.attention(*t, cu, cu), backend="aot_eager", fullgraph=True)
    wanted = torch.autograd.grad(rlk.torch.attention(q, k, v, cu, cu).sum(), (q, k, v))
    found = torch.autograd.grad(compiled(q, k, v).sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_samples_share_the_keys_of_their_prompt():
    q, k, v = leaf(14, 2, 16), leaf(14, 1, 16), leaf(14, 1, 16)
    cu, prefix_of = torch.tensor([0, 5, 8, 9, 14]), torch.tensor([-1, 0, -1, 0], dtype=torch.int32)
    check_gradients(lambda *t: rlk.torch.attention(*t, cu, cu, prefix_of=prefix_of, lse=True), q, k, v)
    # The prompt's rows once more before every sample's own.
    rows, whole = torch.tensor([*range(5), *range(5), *range(5, 9), *range(5), *range(9, 14)]), torch.tensor([0, 5, 13, 14, 24])
    shared = rlk.torch.attention(q, k, v, cu, cu, prefix_of=prefix_of)
    repeated = rlk.torch.attention(q, k[rows], v[rows], cu, whole)
    assert torch.equal(shared, repeated)
    d_y = torch.randn_like(shared)
    for a, b in zip(torch.autograd.grad(shared, (q, k, v), d_y), torch.autograd.grad(repeated, (q, k, v), d_y), strict=True):
        torch.testing.assert_close(a, b)


def test_a_paged_cache_has_no_gradients():
    q, pages = leaf(1, 2, 2, 16), leaf(3, 4, 2, 16)
    lengths, table = torch.tensor([6]), torch.tensor([[2, 0]])
    out = rlk.torch.attention(q, pages, pages, kv_len=lengths, block_table=table)
    with pytest.raises(rlk.InvalidArgument, match="block_table is given"):
        out.sum().backward()


@pytest.mark.parametrize("compiled", [False, True])
def test_an_fp8_cache_has_the_bits_of_the_numbers_that_it_stands_for(compiled):
    torch.manual_seed(0)
    q = torch.randn(2, 3, 4, 32, dtype=torch.bfloat16)
    k, v = (torch.randn(2, 40, 2, 32).mul(8).to(torch.float8_e4m3fn) for _ in range(2))
    k_scale, v_scale = torch.tensor([0.037, 0.11]), torch.tensor([0.093])
    wide = [(x.float() * s.reshape(-1, 1)).to(q.dtype) for x, s in ((k, k_scale), (v, v_scale))]
    call = lambda *t, **more: rlk.torch.attention(*t, **more)  # noqa: E731
    call = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    assert torch.equal(call(q, k, v, k_scale=k_scale, v_scale=v_scale), rlk.torch.attention(q, *wide))
    assert torch.equal(rlk.attention(q, k, v, k_scale=k_scale, v_scale=v_scale), rlk.attention(q, *wide))
    with pytest.raises(rlk.InvalidArgument, match="v is bf16, k is fp8_e4m3"):
        rlk.attention(q, k, wide[1])
    out = rlk.torch.attention(q.requires_grad_(), k, v, k_scale=k_scale, v_scale=v_scale)
    with pytest.raises(rlk.Error, match="k is fp8_e4m3"):
        out.sum().backward()


def test_gradients_of_kda_agree_with_differences():
    torch.manual_seed(0)
    q, k, v = leaf(1, 3, 1, 4), leaf(1, 3, 1, 5)[..., :4].detach().clone(memory_format=torch.contiguous_format).requires_grad_(), leaf(1, 3, 2, 3)
    g = (-leaf(1, 3, 2, 4).detach().abs()).requires_grad_()
    beta = leaf(1, 3, 2).detach().sigmoid().requires_grad_()
    state = leaf(1, 2, 4, 3)
    check_gradients(lambda *t: rlk.torch.kda_fwd(*t, final_state=True), q, k, v, g, beta, state)


@pytest.mark.parametrize("taps", [2, 3, 4])
def test_gradients_of_short_conv_are_those_of_torchs_convolution(taps):
    x, weight, bias = leaf(2, 9, 6), leaf(6, taps), leaf(6)
    y, end = rlk.torch.short_conv(x, weight, bias, final_state=True)
    padded = torch.nn.functional.pad(x.transpose(1, 2), (taps - 1, 0))
    other = torch.nn.functional.silu(torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=6)).transpose(1, 2)
    torch.testing.assert_close(y, other)
    assert torch.equal(end, x[:, 1 - taps:])
    d_y, d_end = torch.randn_like(y), torch.randn_like(end)
    ours = torch.autograd.grad([y, end], [x, weight, bias], [d_y, d_end])
    theirs = torch.autograd.grad([other, x[:, 1 - taps:]], [x, weight, bias], [d_y, d_end])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_left_padding_stays_and_the_rest_turns_by_narrow_tables(narrow):
    x, (cos, sin) = leaf(2, 6, 3, 8), (t.to(narrow) for t in tables())
    starts = torch.tensor([-4, 0], dtype=torch.int32)
    with pytest.raises(rlk.InvalidArgument, match="position -4.*negative=unrotated"):
        rlk.torch.rope(x, cos, sin, starts=starts, layout="bshd")
    y = rlk.torch.rope(x, cos, sin, starts=starts, layout="bshd", negative="unrotated")
    alone = rlk.torch.rope(x[:1, 4:], cos.float(), sin.float(), layout="bshd")
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    d_x, = torch.autograd.grad((y * weight).sum(), x)
    d_alone, = torch.autograd.grad((alone * weight[:1, 4:]).sum(), x)
    assert torch.equal(y[:1, :4], x[:1, :4]) and torch.equal(d_x[:1, :4], weight[:1, :4])
    assert torch.equal(y[:1, 4:], alone) and torch.equal(d_x[:1, 4:], d_alone[:1, 4:])


def test_kept_results_serve_the_backward_and_carry_no_gradient():
    make = lambda: (leaf(1, 70, 1, 32), leaf(1, 70, 1, 32), leaf(1, 70, 1, 32),  # noqa: E731
                    (-leaf(1, 70, 1, 32).detach().abs()).requires_grad_(),
                    leaf(1, 70, 1).detach().sigmoid().requires_grad_())
    inputs = make()
    out, states, inverses = rlk.torch.kda_fwd(*inputs, chunk_states=True, chunk_inverses=True)
    assert not states.requires_grad and not inverses.requires_grad
    kept = torch.autograd.grad(out.sum(), inputs)
    again = make()
    computed = torch.autograd.grad(rlk.torch.kda_fwd(*again).sum(), again)
    for a, b in zip(kept, computed):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_calls_of_one_kind_are_not_taken_for_another():
    q, k, (cos, sin) = leaf(1, 2, 6, 8), leaf(1, 1, 6, 8), tables()
    plain = {}
    with torch.no_grad():
        for turned in (False, True):
            plain[turned] = rlk.torch.rope(q, cos, sin, k=k, transpose=turned)
    for turned in (False, True, False):
        both = rlk.torch.rope(q, cos, sin, k=k, transpose=turned)
        alone = rlk.torch.rope(q, cos, sin, transpose=turned)
        by_place = rlk.torch.rope(q, cos, sin, k, transpose=turned)
        assert torch.equal(alone, plain[turned][0]) and alone.grad_fn is not None
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(both, plain[turned], by_place))
    x = leaf(3, 8)
    y, rstd = rlk.torch.rms_norm(x, rstd=True)
    assert isinstance(rlk.torch.rms_norm(x), torch.Tensor) and rstd.shape == (3, 1) and not rstd.requires_grad
    with pytest.raises(rlk.UnknownName, match="'espilon'"):
        rlk.torch.rms_norm(x, espilon=1.0)
    assert torch.equal(rlk.torch.rms_norm(x), y)


def test_a_gradient_is_called_by_its_op():
    h, w = leaf(2, 4), leaf(3, 4)
    assert rlk.torch.lm_head(h, w).grad_fn.name() == "lm_headBackward"
    assert torch.ops.rlk.lm_head(h, w, results="out").grad_fn.name() == "lm_headBackward"


def test_a_kept_graph_gives_its_gradients_again():
    h, w = leaf(2, 4), leaf(3, 4)
    out = rlk.torch.lm_head(h, w).square().sum()
    first = torch.autograd.grad(out, (h, w), retain_graph=True)
    assert rlk.saved() == []
    for a, b in zip(first, torch.autograd.grad(out, (h, w)), strict=True):
        assert torch.equal(a, b)


def test_threads_record_gradients_at_once():
    def gradients(seed):
        h, w = leaf(2 + seed % 3, 16), leaf(300, 16)  # enough for the interpreter's lock to be given up
        return torch.autograd.grad(rlk.torch.lm_head(h * (seed + 1), w).sin().sum(), (h, w))

    want, wrong = [gradients(seed) for seed in range(8)], []

    def work(seed):
        for _ in range(40):
            if not all(map(torch.equal, gradients(seed), want[seed])):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and rlk.saved() == []


def test_q_and_k_of_one_packed_product_turn_in_place():
    cos, sin = tables()
    qkv = leaf(2, 6, 64).detach()
    q, k, v = (part.view(2, 6, -1, 8) for part in qkv.split([32, 16, 16], dim=2))
    want = rlk.torch.rope(q.clone(), cos, sin, k=k.clone(), layout="bshd")
    want_v = v.clone()
    rlk.torch.rope_(q, cos, sin, k=k, layout="bshd")
    assert torch.equal(q, want[0]) and torch.equal(k, want[1]) and torch.equal(v, want_v)
    assert q._base is qkv and qkv._version > 0


@pytest.mark.parametrize("dtype", ["fp32", torch.float32])
def test_a_result_may_be_asked_for_in_a_dtype_recorded_or_not(dtype):
    h, w = leaf(2, 16, dtype=torch.bfloat16), leaf(3, 16, dtype=torch.bfloat16)
    recorded = rlk.torch.lm_head(h, w, out=dtype)
    plain = rlk.torch.lm_head(h.detach(), w.detach(), out=dtype)
    assert recorded.dtype == plain.dtype == torch.float32 and torch.equal(recorded, plain)
    assert recorded.requires_grad and not plain.requires_grad
    with pytest.raises(rlk.InvalidArgument, match="out is 'torch.complex64', it takes"):
        rlk.torch.lm_head(h, w, out=torch.complex64)


def test_a_wanted_gradient_is_checked_by_name_recorded_or_not():
    h, w = leaf(2, 4), leaf(3, 4)
    for tensors in ((h, w), (h.detach(), w.detach())):
        assert torch.equal(rlk.torch.lm_head(*tensors, gradients="hidden,weight"), rlk.lm_head(h.detach(), w.detach()))
        with pytest.raises(rlk.Error, match="gradient of 'hiden' asked for, there is no such argument"):
            rlk.torch.lm_head(*tensors, gradients="hiden")


def test_only_wanted_gradients_are_computed():
    h, w = leaf(2, 4), leaf(3, 4).detach()
    out = rlk.torch.lm_head(h, w)
    out.sum().backward()
    assert h.grad is not None and w.grad is None
    cos, sin = tables()
    q, k = leaf(1, 1, 3, 8), leaf(1, 1, 3, 8)
    turned = rlk.torch.rope(q.detach(), cos, sin, k=k)
    turned[1].sum().backward()  # nothing comes back through the first result
    assert k.grad is not None


def test_a_second_gradient_is_refused():
    h, w = leaf(2, 4), leaf(3, 4)
    first, = torch.autograd.grad(rlk.torch.lm_head(h, w).pow(2).sum(), h, create_graph=True)
    with pytest.raises(rlk.Unsupported, match="lm_head_bwd: a gradient is asked for"):
        torch.autograd.grad(first.sum(), h)


def test_what_has_no_gradient_says_so():
    cos, sin = tables()
    with pytest.raises(rlk.Unsupported, match="rope_: a tensor requires grad"):
        rlk.torch.rope_(leaf(1, 1, 3, 8), cos, sin)
    with pytest.raises(rlk.Unsupported, match="out is given to be written"):
        rlk.torch.lm_head(leaf(2, 4), leaf(3, 4), out=torch.empty(2, 3))
    with pytest.raises(rlk.InvalidArgument, match="requires grad"):
        rlk.lm_head(leaf(2, 4), leaf(3, 4))
    with torch.no_grad():
        assert not rlk.lm_head(leaf(2, 4), leaf(3, 4)).requires_grad


def test_a_saved_tensor_is_guarded_until_its_backward_ran():
    h, w = leaf(2, 4), leaf(3, 4)
    out = rlk.torch.lm_head(h, w)
    assert {r["name"] for r in rlk.saved()} == {"hidden", "weight"}
    with torch.no_grad(), pytest.raises(rlk.OverlapError, match="saved for a backward"):
        rlk.lm_head(torch.ones(2, 2), torch.ones(4, 2), out=h)
    out.sum().backward()
    assert rlk.saved() == []
    out = rlk.torch.lm_head(h, w)
    del out
    assert rlk.saved() == []


def test_what_hooks_keep_elsewhere_is_not_guarded():
    h, w = leaf(2, 4), leaf(3, 4)
    with torch.autograd.graph.save_on_cpu():  # the tensors themselves may be freed, and their memory written again
        out = rlk.torch.lm_head(h, w)
    assert rlk.saved() == []
    out.sum().backward()
    assert torch.equal(h.grad, w.detach().sum(0).expand(2, 4))


def test_a_written_tensor_is_not_used_by_what_saved_it():
    cos, sin = tables()
    x = torch.randn(1, 1, 3, 8)
    y = (x * leaf(1, 1, 3, 8)).sum()  # saves x
    rlk.torch.rope_(x, cos, sin)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_the_scope_of_a_forward_holds_in_its_backward():
    def gradient(scope):
        h, w = leaf(2, 64, dtype=torch.bfloat16), leaf(9, 64, dtype=torch.bfloat16)
        with scope:
            out = rlk.torch.lm_head(h, w)
        thread = threading.Thread(target=lambda: out.sum().backward())  # as the engine does for a GPU
        thread.start()
        thread.join()
        return h.grad

    h, w = leaf(2, 64, dtype=torch.bfloat16), leaf(9, 64, dtype=torch.bfloat16)
    with torch.no_grad(), rlk.precision("golden"):
        want = rlk.lm_head_bwd(torch.ones(2, 9, dtype=torch.bfloat16), h, w, d_hidden=True)
    assert torch.equal(gradient(rlk.precision("golden")), want)
    with pytest.raises(rlk.NoImplementation):
        with rlk.backend("lm_head_bwd=cuda"):
            out = rlk.torch.lm_head(h, w)
        out.sum().backward()


def test_checkpointing_gives_the_same_gradients():
    w = leaf(7, 16)
    for reentrant in (False, True):
        plain, kept = leaf(3, 16), leaf(3, 16)
        rlk.torch.lm_head(plain, w).tanh().sum().backward()
        checkpoint(lambda t: rlk.torch.lm_head(t, w).tanh(), kept, use_reentrant=reentrant).sum().backward()
        assert torch.equal(plain.grad, kept.grad)
    assert rlk.saved() == []


# ---- torch.compile and modes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_function_gives_the_same_bits(dynamic):
    cos, sin = tables(8, 64)

    def step(h, w, x):
        logits = rlk.torch.lm_head(h, w)
        turned, same = rlk.torch.rope(x, cos, sin, k=x * 2)
        return logits.sin().sum() + (turned * same).sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for m in (2, 3, 5):
        mine, theirs = [leaf(m, 16), leaf(7, 16), leaf(1, 2, m, 8)], [leaf(m, 16), leaf(7, 16), leaf(1, 2, m, 8)]
        a, b = step(*mine), compiled(*theirs)
        a.backward()
        b.backward()
        assert torch.equal(a, b)
        for x, y in zip(mine, theirs):
            assert torch.equal(x.grad, y.grad)


def test_export_keeps_a_dynamic_batch():
    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(7, 16))

        def forward(self, h):
            return rlk.torch.lm_head(h, self.weight)

    head = Head()
    batch = torch.export.Dim("batch", min=2, max=1024)
    program = torch.export.export(head, (torch.randn(3, 16),), dynamic_shapes=({0: batch},))
    h = torch.randn(11, 16)
    assert torch.equal(program.module()(h), head(h))


def test_a_function_mode_sees_the_call():
    seen = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Mode():
        rlk.torch.lm_head(torch.ones(2, 4), torch.ones(3, 4))
    assert "rlk.lm_head.default" in seen


def test_autocast_casts_lm_head_as_torchs_own_products():
    h, w = leaf(2, 16), leaf(3, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = rlk.torch.lm_head(h, w)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert h.grad.dtype == torch.float32


def test_autocast_takes_a_call_as_strictly_as_it_is_written():
    h, w = torch.ones(2, 16), torch.ones(3, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(TypeError, match="lm_head takes 3 arguments by position, 5 were given"):
            rlk.torch.lm_head(h, w, None, h, w)
        with pytest.raises(TypeError, match="lm_head got weight twice"):
            rlk.torch.lm_head(h, w, weight=w)
        with pytest.raises(rlk.InvalidArgument, match="lm_head: hidden is of type str, which is no tensor"):
            rlk.torch.lm_head("h", w)
        with pytest.raises(rlk.InvalidArgument, match="lm_head: hidden is fp64"):  # which torch's autocast leaves alone
            rlk.torch.lm_head(h.double(), w.double())
        assert torch.mm(h.double(), w.double().t()).dtype == torch.float64


def test_a_default_device_changes_no_call():
    h, w, out = torch.ones(2, 4), torch.ones(3, 4), torch.empty(2, 3)
    with torch.device("cpu"):
        assert rlk.torch.lm_head(h, w, out=out) is out and (out == 4).all()
        with pytest.raises(rlk.InvalidArgument, match="rms_norm: eps is 'a', it takes a number"):
            rlk.torch.rms_norm(h, eps="a")

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    seen = []
    with torch.device("cpu"), Mode():
        rlk.torch.lm_head(h, w)
        assert "rlk.lm_head" in seen
        with pytest.raises(rlk.Unsupported, match="nor a mode can follow"):
            rlk.torch.lm_head(h, w, out=out)
        with pytest.raises(TypeError, match="lm_head takes 3 arguments by position, 5 were given"):
            rlk.torch.lm_head(h, w, None, h, w)
        with pytest.raises(TypeError, match="lm_head got weight twice"):
            rlk.torch.lm_head(h, w, weight=w)


def test_compiled_code_says_which_error_it_raises():
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Observed exception(.|\\n)*out is given to be written"):
        torch.compile(lambda o: rlk.torch.lm_head(o, o, out=o), backend="eager", fullgraph=True)(torch.ones(4, 4))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused_by_what_they_are(layout):
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(1, 4)], layout=layout)
    with pytest.raises(rlk.InvalidArgument, match="lm_head: hidden is a nested tensor: values.. is its memory"):
        rlk.torch.lm_head(nested, torch.ones(3, 4))


# ---- tensors that lie in wait ---------------------------------------------------------------------------------------------------------


def test_the_negative_bit_is_refused_not_ignored():
    negative = torch.randn(2, 4, dtype=torch.complex64).conj().imag
    assert negative.is_neg() and negative.stride(-1) != 1
    row = torch.view_as_real(torch.randn(4, dtype=torch.complex64)).unsqueeze(0)
    bits = torch._neg_view(torch.ones(2, 4))
    with pytest.raises(rlk.InvalidArgument, match="negative bit"):
        rlk.lm_head(bits, torch.ones(3, 4))
    assert row.shape[0] == 1


def test_tensors_without_memory_are_refused_in_one_line():
    for tensor in (torch.eye(4)[:2].to_sparse(), torch.ones(2, 4, device="meta")):
        with pytest.raises(rlk.InvalidArgument, match="lm_head: hidden is of type Tensor, which gives no DLPack view") as caught:
            rlk.lm_head(tensor, torch.ones(3, 4))
        assert "\n" not in str(caught.value)
    with pytest.raises(rlk.InvalidArgument, match="gives no DLPack view"):
        torch.vmap(lambda h: rlk.lm_head(h, torch.ones(3, 4)))(torch.ones(5, 2, 4))


def test_subclasses_are_not_read_as_plain_memory():
    with torch._subclasses.FakeTensorMode():
        fake = torch.ones(2, 4)
    with pytest.raises(rlk.InvalidArgument, match="no plain torch.Tensor"):
        rlk.lm_head(fake, torch.ones(3, 4))


class Named(torch.Tensor):
    """A subclass whose memory is plain."""


def test_a_subclass_of_plain_memory_is_taken_by_the_torch_face_alone():
    h, w = leaf(2, 4), leaf(3, 4)
    want = torch.autograd.grad(rlk.torch.lm_head(h, w).sum(), (h, w))
    named = h.detach().as_subclass(Named).requires_grad_()
    out = rlk.torch.lm_head(named, w)
    found = torch.autograd.grad(out.sum(), (named, w))
    assert torch.equal(torch.Tensor(out), rlk.torch.lm_head(h, w)) and all(map(torch.equal, map(torch.Tensor, found), want))
    with torch.no_grad(), pytest.raises(rlk.InvalidArgument, match="is of type Named, which is no plain torch.Tensor"):
        rlk.lm_head(named, w)


def test_meta_tensors_give_shapes():
    h, w = torch.ones(2, 4, device="meta"), torch.ones(3, 4, device="meta", requires_grad=True)
    out = rlk.torch.lm_head(h, w)
    assert out.is_meta and out.shape == (2, 3) and out.requires_grad and rlk.saved() == []
    with pytest.raises(rlk.InvalidArgument, match="hidden has K=4, weight has K=3"):
        rlk.torch.lm_head(h, w[:, :3])


def test_tangents_are_refused_not_dropped():
    forward, h, w = torch.autograd.forward_ad, leaf(2, 4).detach(), leaf(3, 4).detach()
    with forward.dual_level():
        for face in (rlk, rlk.torch):
            assert forward.unpack_dual(face.lm_head(h, w)).tangent is None
            with pytest.raises(rlk.InvalidArgument, match="lm_head: weight is of type Tensor, which carries a tangent"):
                face.lm_head(h, forward.make_dual(w, w))
        with pytest.raises(rlk.InvalidArgument, match="carries a tangent"):
            rlk.torch.lm_head(forward.make_dual(h, h), w.clone().requires_grad_())
    for transform in (lambda f: torch.func.jvp(f, (h,), (h,)), lambda f: torch.func.jacfwd(f)(h)):
        with pytest.raises(rlk.Unsupported, match="lm_head: hidden carries a tangent"):
            transform(lambda h: rlk.torch.lm_head(h, w))


def test_transforms_batch_a_call_and_ask_gradients_of_autograd():
    h, w = leaf(5, 2, 4), leaf(3, 4)
    want = torch.stack([rlk.torch.lm_head(one, w) for one in h])
    assert torch.equal(torch.vmap(lambda one: rlk.torch.lm_head(one, w))(h), want)
    g = torch.eye(6).view(6, 2, 3)
    out = rlk.torch.lm_head(h[0], w)
    batched, = torch.autograd.grad(out, w, g, is_grads_batched=True, retain_graph=True)
    assert torch.equal(batched, torch.stack([torch.autograd.grad(out, w, one, retain_graph=True)[0] for one in g]))
    for transform in (torch.func.grad, torch.func.jacrev):
        with pytest.raises(rlk.Unsupported, match="lm_head: a gradient is asked for within torch.func"):
            transform(lambda h: rlk.torch.lm_head(h, w).sum())(h[0].detach())


def test_what_has_no_gradient_does_not_lose_one_in_silence():
    cos, sin = tables()
    x, learnt = leaf(1, 2, 6, 8), cos.clone().requires_grad_()
    for mine in (x, x.detach()):
        with pytest.raises(rlk.Unsupported, match="rope: a gradient of cos is asked for, it has none: detach"):
            rlk.torch.rope(mine, learnt, sin).sum().backward()
    rlk.torch.rope(x, learnt.detach(), sin).sum().backward()
    assert x.grad is not None and learnt.grad is None


def test_tensors_of_several_frameworks_meet_only_where_nothing_is_recorded():
    h, w = numpy.ones((2, 4), numpy.float32), leaf(3, 4)
    assert torch.equal(rlk.torch.lm_head(w.detach(), h), torch.from_numpy(rlk.lm_head(w.detach().numpy(), h)))
    for call in (lambda: rlk.torch.lm_head(h, w), lambda: rlk.torch.lm_head(w, h)):
        with pytest.raises(rlk.InvalidArgument, match="lm_head: (hidden|weight) is of type ndarray, where a gradient is recorded"):
            call()


def test_read_only_memory_is_not_written_by_the_torch_face():
    h, w, (cos, sin) = torch.ones(2, 4), torch.ones(3, 4), tables()
    frozen, x = numpy.zeros((2, 3), numpy.float32), numpy.ones((1, 2, 6, 8), numpy.float32)
    frozen.flags.writeable = x.flags.writeable = False
    for call in (lambda: rlk.torch.lm_head(h, w, out=frozen), lambda: rlk.torch.rope_(x, cos, sin)):
        with pytest.raises(rlk.InvalidArgument, match="is of type ndarray, which is read-only"):
            call()
    assert not frozen.any() and (x == 1).all()
    jax = pytest.importorskip("jax.numpy")
    with pytest.raises(rlk.InvalidArgument, match="which never changes"):
        rlk.torch.lm_head(h, w, out=jax.zeros((2, 3)))


@pytest.mark.parametrize("face", [rlk, rlk.torch])
def test_a_result_is_a_tensor_of_torchs_own(face):
    hidden, weight = torch.ones(2, 4), torch.ones(3, 4, dtype=torch.float32)
    for y in (face.lm_head(hidden, weight), face.lm_head(hidden.bfloat16(), weight.bfloat16()), face.lm_head(hidden, torch.nn.Parameter(weight, False))):
        assert type(y) is torch.Tensor and y.is_leaf and not y.requires_grad and y.device == hidden.device and (y == 4).all()
        assert y.untyped_storage().resizable() and y.untyped_storage().nbytes() == y.nbytes  # what torch imports is neither
        assert y.resize_(5, 7).shape == (5, 7)
    with torch.inference_mode():
        assert face.lm_head(hidden, weight).is_inference()


def test_a_result_without_memory_says_so_recorded_or_not():
    wide = torch.ones(1, 1).expand(1 << 40, 1)
    for weight in (wide, leaf(1, 1).expand(1 << 40, 1)):
        with pytest.raises(rlk.OutOfMemory, match="lm_head: there is no memory for out") as caught:
            rlk.torch.lm_head(wide, weight)
        assert "\n" not in str(caught.value)


def test_torch_jit_traces_the_call():
    w = leaf(3, 4).detach()
    traced = torch.jit.trace(lambda h: rlk.torch.lm_head(h, w) + 1, (torch.ones(2, 4),))
    h = leaf(2, 4).detach()
    assert torch.equal(traced(h), rlk.torch.lm_head(h, w) + 1)


def test_evidence_is_an_option_of_every_face():
    h, w = leaf(2, 4), leaf(3, 4)
    rlk.clear_evidence()
    for call in (lambda: rlk.torch.lm_head(h.detach(), w.detach(), evidence=True), lambda: rlk.torch.lm_head(h, w, evidence=True)):
        with pytest.raises(rlk.NoImplementation, match="certificate"):
            call()


def test_torch_takes_one_copy_and_says_so(monkeypatch):
    import importlib
    with pytest.raises(rlk.Unsupported, match="rlk.torch is loaded already"):
        importlib.reload(rlk.torch)
    h, w = leaf(2, 4), leaf(3, 4)
    rlk.torch.lm_head(h, w).sum().backward()
    assert h.grad is not None


@pytest.mark.parametrize("dtype,wide", [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("asked", [False, True])
def test_gradients_of_a_norm_with_residual_are_those_of_adding_first(dtype, wide, compiled, asked):
    torch.manual_seed(3)
    x, weight, residual = leaf(5, 40, dtype=dtype), leaf(40, dtype=dtype), leaf(5, 40, dtype=wide)
    d_y, d_sum = torch.randn(5, 40, dtype=dtype), torch.randn(5, 40, dtype=wide)

    def together(x, weight, residual):
        return rlk.torch.rms_norm(x, weight, residual, sum=asked)

    out = (torch.compile(together, backend="aot_eager") if compiled else together)(x, weight, residual)
    y, total = out if asked else (out, None)
    got = torch.autograd.grad((y, total) if asked else y, (x, weight, residual), (d_y, d_sum) if asked else d_y)
    added = (x.detach().to(wide) + residual.detach()).requires_grad_()
    want, wanted = rlk.rms_norm_bwd(d_y, added.detach(), weight.detach(), d_sum=d_sum if asked else None, d_x=True, d_weight=True)
    assert torch.equal(got[0], want) and torch.equal(got[1], wanted) and got[2].dtype == wide
    if asked:
        assert torch.equal(total, added)
    if dtype == wide:
        assert torch.equal(got[2], want) and torch.equal(y, rlk.torch.rms_norm(added, weight))
    plain = rlk.rms_norm_bwd(d_y, added.detach(), weight.detach(), d_sum=d_sum if asked else None, d_x=wide)
    assert torch.equal(got[2], plain)


def test_a_sum_alone_has_gradients_and_residuals_without_one_get_none():
    x, weight, residual = leaf(3, 8), torch.ones(8), torch.randn(3, 8)
    _, total = rlk.torch.rms_norm(x, weight, residual, sum=True)
    (gradient,) = torch.autograd.grad(total, x, torch.full((3, 8), 2.0))
    assert torch.equal(gradient, torch.full((3, 8), 2.0))


@pytest.mark.parametrize("apart", [False, True])
def test_partial_sums_have_the_gradient_of_their_sum(apart):
    torch.manual_seed(3)
    parts = [torch.randn(5, 9, requires_grad=True) for _ in range(4)]
    bias, residual, d_y = torch.randn(9, requires_grad=True), torch.randn(3, 9, requires_grad=True), torch.randn(3, 9)
    rows = {"row_first": 1, "row_count": 3}
    if apart:
        y = rlk.torch.tp_sum(parts[0], bias=bias, residual=residual, p1=parts[1], p2=parts[2], p3=parts[3], **rows)
    else:
        y = rlk.torch.tp_sum(torch.stack(parts), bias=bias, residual=residual, **rows)
    whole = [p[1:4] for p in parts]
    assert torch.equal(y, (((whole[0] + whole[1]) + (whole[2] + whole[3])) + bias) + residual)
    y.backward(d_y)
    for p in parts:
        assert torch.equal(p.grad[1:4], d_y) and not p.grad[0].any() and not p.grad[4].any()
    assert torch.equal(residual.grad, d_y)
    assert torch.allclose(bias.grad, d_y.sum(0), atol=1e-5)


def test_swiglu_of_a_product_refuses_its_gradient_by_name():
    x, weight = torch.randn(3, 8), torch.randn(12, 8, requires_grad=True)
    products = rlk.torch.linear(x, weight.detach())
    y = rlk.torch.linear(x, weight.detach(), activation="swiglu")
    assert torch.equal(y, rlk.torch.swiglu(products[:, :6].contiguous(), products[:, 6:].contiguous()))
    with pytest.raises(Exception, match="activation is swiglu"):
        rlk.torch.linear(x, weight, activation="swiglu").sum().backward()
