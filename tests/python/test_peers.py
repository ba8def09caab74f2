"""Adapters beside what they replace: always the peer's formula in plain fp32, and the peer's own function where it is installed
and runs on a CPU."""

import importlib

import pytest

torch = pytest.importorskip("torch")

import rlk  # noqa: E402
from rlk.adapters import deepspeed, fla, liger, megatron, rl_kernel, transformers  # noqa: E402

F = torch.nn.functional


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype).requires_grad_()


def angles(*shape, seed=0):
    return random(*shape, seed=100 + seed).detach()


def peer(name):
    """The module of a peer, or the test is skipped."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # an import may fail in many ways where there is no GPU
        pytest.skip(f"{name} is not here: {type(error).__name__}")


def agree(mine, theirs, inputs=(), tolerance=1e-5):
    """Results and gradients of random cotangents agree."""
    mine, theirs = (tuple(r) if isinstance(r, (tuple, list)) else (r,) for r in (mine, theirs))
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance), (a - b).abs().max()
    if inputs:
        weights = [angles(*r.shape, seed=7) for r in theirs]
        grads = [torch.autograd.grad(sum((r.float() * w).sum() for r, w in zip(results, weights)), inputs, retain_graph=True)
                 for results in (mine, theirs)]
        for a, b in zip(*grads):
            assert torch.allclose(a.float(), b.float(), rtol=4 * tolerance, atol=4 * tolerance), (a - b).abs().max()


def half(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def neighbours(x, cos, sin):
    a, b = x[..., ::2], x[..., 1::2]
    return x * cos + torch.stack((-b, a), -1).flatten(-2) * sin


# ---- Liger ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch, rotary", [(1, 16), (2, 16), (1, 8)])
def test_liger_rope(batch, rotary):
    q, k = random(2, 4, 5, 16), random(2, 2, 5, 16, seed=1)
    freqs = angles(batch, 5, rotary // 2).repeat(1, 1, 2)
    cos, sin = freqs.cos(), freqs.sin()

    def plain(x):
        turned = half(x[..., :rotary], cos[:, None], sin[:, None])
        return torch.cat((turned, x[..., rotary:]), -1)

    agree(liger.liger_rope(q, k, cos, sin), (plain(q), plain(k)), (q, k))
    agree(liger.liger_rope(q, k, cos[:, None], sin[:, None]), (plain(q), plain(k)))
    agree(liger.liger_rope(q, k, cos[..., :rotary // 2], sin[..., :rotary // 2], rotary_dim=rotary), (plain(q), plain(k)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode, offset", [("llama", 0.0), ("gemma", 1.0)])
def test_liger_rms_norm(dtype, mode, offset):
    x, w = random(3, 5, 32, dtype=dtype), random(32, dtype=dtype, seed=1)
    normal = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    want = (w + offset) * normal.to(dtype) if mode == "llama" else (normal * (w.float() + offset)).to(dtype)
    got = liger.liger_rms_norm(x, w, 1e-5, offset, mode)
    agree(got, want, (x, w), 1e-5 if dtype is torch.float32 else 2e-2)
    if dtype is torch.bfloat16:  # rounded where the mode says: elsewhere a quarter of the results would differ
        assert (got == want).float().mean() > 0.95


def test_liger_swiglu_and_what_is_refused():
    a, b = random(3, 7, 24), random(3, 7, 24, seed=1)
    agree(liger.liger_swiglu(a, b), F.silu(a) * b, (a, b))
    with pytest.raises(rlk.Unsupported, match="gate_multiplier is 2.0, rlk serves 1.0 alone"):
        liger.liger_swiglu(a, b, 2.0)
    with pytest.raises(rlk.Unsupported, match="offset is 0.5"):
        liger.liger_rms_norm(a, None, 1e-6, 0.5)


def test_liger_patched_and_put_back():
    functional = peer("liger_kernel.transformers.functional")
    ops = importlib.import_module("liger_kernel.ops")
    rope = importlib.import_module("liger_kernel.transformers.rope")
    norm = importlib.import_module("liger_kernel.transformers.rms_norm").LigerRMSNorm(32)
    q, k, x = random(2, 4, 5, 16), random(2, 2, 5, 16, seed=1), random(3, 32)
    freqs = angles(1, 5, 8).repeat(1, 1, 2)
    before = ops.LigerRopeFunction.apply
    with rlk.adapters.liger.patch():
        want = half(q, freqs.cos()[:, None], freqs.sin()[:, None]), half(k, freqs.cos()[:, None], freqs.sin()[:, None])
        agree(functional.liger_rope(q, k, freqs.cos(), freqs.sin()), want, (q, k))
        agree(rope.liger_rotary_pos_emb(q, k, freqs.cos(), freqs.sin()), want)
        agree(functional.liger_swiglu(x, x), F.silu(x) * x)
        agree(norm(x), F.rms_norm(x, (32,), eps=1e-6), (x,))
    assert ops.LigerRopeFunction.apply == before and "apply" not in ops.LigerRopeFunction.__dict__


# ---- DeepSpeed --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape, table", [((6, 2, 3, 16), (6, 1, 1, 8)), ((2, 6, 3, 16), (1, 6, 1, 16)), ((6, 3, 16), (6, 1, 16)),
                                          ((2, 1, 3, 16), (1, 1, 1, 8)), ((1, 2, 3, 16), (1, 1, 1, 16)), ((1, 6, 3, 16), (1, 6, 1, 8))])
def test_deepspeed_rope(shape, table):
    t, freqs = random(*shape), angles(*table)
    cos, sin, width = freqs.cos(), freqs.sin(), table[-1]
    want = torch.cat((half(t[..., :width], cos, sin), t[..., width:]), -1)
    agree(deepspeed.apply_rotary_pos_emb(t, cos, sin), want, (t,))


def test_deepspeed_patched_and_put_back():
    layer = peer("deepspeed.sequence.layer")
    t, freqs, before = random(6, 2, 3, 16), angles(6, 1, 1, 16), layer.apply_rotary_pos_emb
    want = before(t, freqs.cos(), freqs.sin())
    with rlk.adapters.deepspeed.patch():
        assert layer.apply_rotary_pos_emb is deepspeed.apply_rotary_pos_emb
        agree(layer.apply_rotary_pos_emb(t, freqs.cos(), freqs.sin()), want, (t,))
    assert layer.apply_rotary_pos_emb is before


# ---- Megatron ---------------------------------------------------------------------------------------------------------------


def from_angles(t, freqs, interleaved, latent, mscale):
    cos, sin, width = freqs.cos() * mscale, freqs.sin() * mscale, freqs.shape[-1]
    turning, rest = t[..., :width], t[..., width:]
    if latent:
        turning = torch.cat((turning[..., ::2], turning[..., 1::2]), -1)
    return torch.cat(((neighbours if interleaved else half)(turning, cos, sin), rest), -1)


@pytest.mark.parametrize("interleaved, latent, mscale", [(False, False, 1.0), (True, False, 1.0), (False, True, 1.3)])
def test_megatron_rope(interleaved, latent, mscale):
    t, freqs = random(6, 2, 3, 16), angles(6, 1, 1, 8)
    mine = megatron._apply_rotary_pos_emb_bshd(t, freqs, interleaved, latent, mscale)
    agree(mine, from_angles(t, freqs, interleaved, latent, mscale), (t,))
    module = peer("megatron.core.models.common.embeddings.rope_utils")
    agree(mine, module._apply_rotary_pos_emb_bshd(t, freqs, interleaved, latent, mscale), (t,))


def test_transformer_engines_rope():
    t, freqs = random(6, 2, 3, 16), angles(6, 1, 1, 8)
    agree(megatron.fused_apply_rotary_pos_emb(t, freqs, interleaved=True), from_angles(t, freqs, True, False, 1), (t,))
    packed, bounds = random(6, 3, 16), torch.tensor([0, 2, 6], dtype=torch.int32)
    parts = [from_angles(packed[a:b, None], freqs[:b - a], False, False, 1)[:, 0] for a, b in ((0, 2), (2, 6))]
    agree(megatron.fused_apply_rotary_pos_emb_thd(packed, bounds, freqs), torch.cat(parts), (packed,))


@pytest.mark.parametrize("packed", [False, True])
def test_megatron_latent_rope(packed):
    q, kv = (random(6, 3, 12), random(6, 3, 10, seed=1)) if packed else (random(6, 2, 3, 12), random(6, 2, 3, 10, seed=1))
    emb = random(*kv.shape[:-2], 1, 8, seed=2)
    freqs = angles(9, 1, 1, 8)
    bounds = torch.tensor([0, 2, 6], dtype=torch.int32) if packed else None
    rows = freqs[torch.tensor([0, 1, 0, 1, 2, 3]), 0] if packed else freqs[:6]

    def turn(x):
        return from_angles(x, rows, False, True, 1)

    q_want = torch.cat((q[..., :4], turn(q[..., 4:])), -1)
    key = torch.cat((kv[..., :6], turn(emb).expand(*kv.shape[:-1], 8)), -1)
    agree(megatron.fused_apply_mla_rope_for_q(q, freqs.cos(), freqs.sin(), 4, 8, bounds), q_want, (q,))
    agree(megatron.fused_apply_mla_rope_for_kv(kv, emb, freqs.cos(), freqs.sin(), 8, 6, 4, bounds), (key, kv[..., 6:]), (kv, emb))
    with pytest.raises(rlk.InvalidArgument, match="t has 12 columns"):
        megatron.fused_apply_mla_rope_for_q(q, freqs.cos(), freqs.sin(), 5, 8, bounds)


def test_megatron_patched_and_put_back():
    rope_utils = peer("megatron.core.models.common.embeddings.rope_utils")
    latent = importlib.import_module("megatron.core.fusions.fused_mla_yarn_rope_apply")
    before = rope_utils._apply_rotary_pos_emb_bshd, latent.fused_apply_mla_rope_for_q, rope_utils.fused_apply_rotary_pos_emb
    q, freqs = random(6, 2, 3, 12), angles(6, 1, 1, 8)
    with rlk.adapters.megatron.patch():
        assert rope_utils._apply_rotary_pos_emb_bshd is megatron._apply_rotary_pos_emb_bshd
        agree(latent.fused_apply_mla_rope_for_q(q, freqs.cos(), freqs.sin(), 4, 8),
              torch.cat((q[..., :4], from_angles(q[..., 4:], freqs, False, True, 1)), -1), (q,))
    assert before == (rope_utils._apply_rotary_pos_emb_bshd, latent.fused_apply_mla_rope_for_q,
                      rope_utils.fused_apply_rotary_pos_emb)


# ---- RL-Kernel --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_rl_kernel(dtype, tolerance):
    x, w, b = random(3, 5, 32, dtype=dtype), random(17, 32, dtype=dtype, seed=1), random(17, dtype=dtype, seed=2)
    logits = rl_kernel._lm_head(x, w, b, compute_dtype=dtype, output_dtype=dtype)
    agree(logits, (x.float() @ w.float().T).to(dtype) + b, (x, w, b), tolerance)
    exact = rl_kernel._lm_head(x, w, None, compute_dtype=torch.float32, output_dtype=torch.float32, strict_fp32=True)
    agree(exact, x.float() @ w.float().T, (x, w))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        strict = rl_kernel._lm_head(x, w, None, compute_dtype=torch.float32, output_dtype=torch.float32, strict_fp32=True)
    assert torch.equal(strict, exact)
    agree(rl_kernel._linear_logits(x[0], w, None, use_fp32=True), x[0].float() @ w.float().T)
    normal = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    for out in (dtype, torch.float32):
        agree(rl_kernel._rms_norm(x, w[0], eps=1e-6, output_dtype=out), (normal * w[0].float()).to(out), (x, w), tolerance)
        agree(rl_kernel._swiglu(x, x, output_dtype=out), (F.silu(x.float()) * x.float()).to(out), (x,), tolerance)


def test_rl_kernel_patched_and_put_back():
    registry = peer("rl_engine.kernels.registry").kernel_registry
    logp = importlib.import_module("rl_engine.kernels.ops.pytorch.loss.linear_logp")
    x, w = random(3, 32), random(17, 32, seed=1)
    ops = {name: registry.get_op(name) for name in ("lm_head", "rms_norm", "swiglu")}
    calls = {"lm_head": lambda op: op(x, w), "rms_norm": lambda op: op(x, w[0]), "swiglu": lambda op: op(x, x)}
    wants = {name: call(ops[name]) for name, call in calls.items()}
    before = ops["lm_head"]._lm_head, logp._linear_logits
    with rlk.adapters.rl_kernel.patch():
        assert ops["lm_head"]._lm_head is rl_kernel._lm_head and logp._linear_logits is rl_kernel._linear_logits
        for name, call in calls.items():
            agree(call(ops[name]), wants[name], (x,))
    assert before == (ops["lm_head"]._lm_head, logp._linear_logits)


# ---- flash-linear-attention -------------------------------------------------------------------------------------------------


def delta_attention(q, k, v, g, beta, state, scale):
    """The recurrence of Kimi Delta Attention, a token at a time."""
    group = v.shape[2] // q.shape[2]
    q, k = (t.repeat_interleave(group, 2) for t in (q, k))
    out = []
    for i in range(q.shape[1]):
        state = state * g[:, i, ..., None].exp()
        write = beta[:, i, :, None] * (v[:, i] - torch.einsum("bhk,bhkv->bhv", k[:, i], state))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, i], write)
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, i] * scale, state))
    return torch.stack(out, 1), state


def attention_inputs():
    q, k = random(2, 9, 2, 16), random(2, 9, 2, 16, seed=1)
    k = F.normalize(k.detach(), dim=-1).requires_grad_()
    v, beta = random(2, 9, 4, 16, seed=2), random(2, 9, 4, seed=3)
    return q, k, v, (-random(2, 9, 4, 16, seed=4).detach().abs()).requires_grad_(), beta, random(2, 4, 16, 16, seed=5)


def test_fla_delta_attention():
    q, k, v, g, beta, state = inputs = attention_inputs()
    want = delta_attention(q, k, v, g, beta, state, 0.25)
    agree(fla.chunk_kda(q, k, v, g, beta, initial_state=state, output_final_state=True), want, inputs, 1e-4)
    agree(fla.chunk_kda(q, k, v, g, beta.sigmoid().detach())[0],
          delta_attention(q, k, v, g, beta.sigmoid(), state * 0, 0.25)[0], tolerance=1e-4)
    rate, bias = random(4, seed=6), random(64, seed=7)
    gate = -rate.exp()[:, None] * F.softplus(g + bias.view(4, 16))
    agree(fla.chunk_kda(q, k, v, g, beta, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, A_log=rate, dt_bias=bias)[0],
          delta_attention(q, k, v, gate, beta.sigmoid(), state * 0, 0.25)[0], (q, g, rate, bias), 1e-4)
    agree(fla.fused_kda_gate(g, rate, bias), gate, (g, rate, bias))
    agree(fla.fused_kda_gate(g, None, bias, -5.0), -5 * torch.sigmoid(g + bias.view(4, 16)), (g, bias))
    apart = torch.cat((g, g), -1)[..., :16]  # FLA makes it dense, and so does this
    assert not apart.is_contiguous()
    agree(fla.fused_kda_gate(apart, rate, bias), gate, (g, rate, bias))
    mine = state.detach().clone()
    out, final = fla.fused_recurrent_kda_fwd(*(t.detach() for t in (q, k, v, g, beta)), initial_state=mine)
    assert final is mine
    agree((out, mine), [t.detach() for t in want], tolerance=1e-4)
    with pytest.raises(rlk.Unsupported, match="cp_context"):
        fla.chunk_kda(q, k, v, g, beta, cp_context=object())


@pytest.mark.parametrize("interleaved", [False, True])
def test_fla_rope(interleaved):
    x, freqs = random(2, 6, 3, 20).detach(), angles(9, 8)
    wide = freqs.repeat_interleave(2, -1) if interleaved else torch.cat((freqs, freqs), -1)
    turn = neighbours if interleaved else half

    def plain(offsets, sign=1):
        rows = [turn(x[b, :, :, :16], wide[o:o + 6].cos()[:, None], sign * wide[o:o + 6].sin()[:, None]) for b, o in enumerate(offsets)]
        return torch.cat((torch.stack(rows), x[..., 16:]), -1)

    run = lambda *a, **k: fla.rotary_embedding_fwdbwd(*a, interleaved=interleaved, **k)  # noqa: E731
    agree(run(x, freqs.cos(), freqs.sin()), plain((0, 0)))
    agree(run(x, freqs.cos(), freqs.sin(), 3, conjugate=True), plain((3, 3), -1))
    agree(run(x, freqs.cos(), freqs.sin(), torch.tensor([1, 3])), plain((1, 3)))
    padded = run(x, freqs.cos(), freqs.sin(), torch.tensor([-4, 0]))
    assert torch.equal(padded[0, :4], x[0, :4]) and torch.equal(padded[1], run(x, freqs.cos(), freqs.sin())[1])
    packed, bounds = x.reshape(1, 12, 3, 20), torch.tensor([0, 6, 12], dtype=torch.int32)
    agree(run(packed, freqs.cos(), freqs.sin(), cu_seqlens=bounds), plain((0, 0)).reshape(1, 12, 3, 20))
    narrow = x.bfloat16(), freqs.cos().half(), freqs.sin().half()  # tables of a third dtype, which widen exactly
    assert torch.equal(run(*narrow), run(narrow[0], *(t.float() for t in narrow[1:])))
    mine = x.clone()
    assert run(mine, freqs.cos(), freqs.sin(), inplace=True) is mine
    agree(mine, plain((0, 0)))


def test_fla_patched_and_put_back():
    kda = peer("fla.ops.kda")
    naive = importlib.import_module("fla.ops.kda.naive").naive_recurrent_kda
    backends = importlib.import_module("fla.backends")
    rotary = importlib.import_module("fla.modules.rotary")
    import inspect
    registry = backends._function_registries[inspect.unwrap(importlib.import_module("fla.ops.kda.chunk").chunk_kda)]
    q, k, v, g, beta, state = inputs = attention_inputs()
    x, freqs = random(2, 6, 3, 16), angles(6, 8)
    with rlk.adapters.fla.patch():
        assert registry.get_active().backend_type == "rlk"
        agree(kda.chunk_kda(q, k, v, g, beta, initial_state=state, output_final_state=True),
              naive(q, k, v, g, beta, initial_state=state, output_final_state=True), inputs, 1e-4)
        agree(kda.fused_recurrent_kda(q, k, v, g, beta, initial_state=state, output_final_state=True),
              naive(q, k, v, g, beta, initial_state=state, output_final_state=True), tolerance=1e-4)
        gates = importlib.import_module("fla.ops.kda.gate")
        rate, bias = random(4, seed=6), random(64, seed=7)
        agree(gates.fused_kda_gate(g, rate, bias), gates.naive_kda_gate(g, rate, bias), (g, rate, bias))
        wide = torch.cat((freqs, freqs), -1)
        agree(rotary.rotary_embedding(x, freqs.cos(), freqs.sin()), half(x, wide.cos()[:, None], wide.sin()[:, None]), (x,))
    assert "rlk" not in registry._backends and "rlk" not in backends._get_operation_registry("kda")._backends


def test_a_version_that_is_not_known_is_refused():
    from rlk.adapters._patch import known

    def theirs(t, freqs_cos, freqs_sin, scale):
        pass

    with pytest.raises(rlk.Unsupported, match="it takes t, freqs_cos, freqs_sin, scale; this adapter knows"):
        known(theirs, deepspeed.apply_rotary_pos_emb)


def apart(t):
    """The same numbers, those of a row not side by side."""
    return torch.stack((t, t), -1)[..., 0]


def test_what_peers_make_dense_is_taken_in_any_strides():
    x, q, k = random(4, 2, 3, 16), random(2, 4, 5, 16), random(2, 2, 5, 16, seed=1)
    freqs, w, bounds = angles(6, 1, 1, 16), random(16, seed=2), torch.tensor([0, 2, 4], dtype=torch.int32)
    cos, sin = (f(angles(1, 5, 8).repeat(1, 1, 2)) for f in (torch.cos, torch.sin))
    kda = attention_inputs()
    calls = [
        (liger.liger_rope, (q, k, cos, sin)), (lambda x, w: liger.liger_rms_norm(x, w, 1e-6), (x, w)), (liger.liger_swiglu, (x, x)),
        (transformers.apply_rotary_pos_emb, (q, k, cos, sin)), (megatron._apply_rotary_pos_emb_bshd, (x, freqs[:4])),
        (lambda x, f: megatron.fused_apply_rotary_pos_emb_thd(x, bounds, f), (x[:, 0], freqs)),
        (lambda x, c, s: megatron.fused_apply_mla_rope_for_q(x, c, s, 0, 16), (x, freqs.cos(), freqs.sin())),
        (lambda kv, p, c, s: megatron.fused_apply_mla_rope_for_kv(kv, p, c, s, 16, 10, 6), (x, x[:, :, :1], freqs.cos(), freqs.sin())),
        (deepspeed.apply_rotary_pos_emb, (x, freqs[:4].cos(), freqs[:4].sin())),
        (lambda x, w: rl_kernel._linear_logits(x, w, None, use_fp32=False), (x[0, 0], q[0, 0])),
        (lambda x, w: rl_kernel._lm_head(x, w, None, compute_dtype=x.dtype, output_dtype=x.dtype), (x, q[0, 0])),
        (lambda x, w: rl_kernel._rms_norm(x, w, eps=1e-6, output_dtype=x.dtype), (x, w)),
        (lambda a, b: rl_kernel._swiglu(a, b, output_dtype=a.dtype), (x, x)),
        (fla.rotary_embedding_fwdbwd, (x, freqs[:4, 0, 0, :8].cos(), freqs[:4, 0, 0, :8].sin())),
        (lambda *t: fla.chunk_kda(*t[:5], initial_state=t[5], output_final_state=True), kda),
        (lambda *t: fla.fused_recurrent_kda_fwd(*t[:5], initial_state=t[5], inplace_final_state=False, output_final_state=True), kda)]
    for call, given in calls:
        want, found = call(*given), call(*map(apart, given))
        pairs = zip(*(r if isinstance(r, tuple) else (r,) for r in (want, found)), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), call
    assert fla.verify_chunk_kda(*map(apart, kda[:5])) == (True, None)
    packed = [t[:1].detach() for t in kda[:5]]
    for dtype in (torch.int32, torch.int64):
        out = fla.chunk_kda(*packed, cu_seqlens=torch.tensor([0, 4, 9], dtype=dtype))[0]
        assert torch.equal(out[:, :4], fla.chunk_kda(*(t[:, :4] for t in packed))[0])
