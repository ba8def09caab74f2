"""What autograd, torch.compile, checkpointing, autocast and export must find in every op of the registry."""

import pytest

torch = pytest.importorskip("torch")

import numpy  # noqa: E402
import rlk  # noqa: E402
import rlk.torch  # noqa: E402
from examples import BUILT_IN, examples  # noqa: E402
from rlk import _C  # noqa: E402
from torch.autograd.gradcheck import GradcheckError  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

KINDS = ("fp32", "int32", "int64", "uint8", "bool")
RUNS = [op for op in BUILT_IN if examples(op, KINDS)]
LEARNS = [op for op in RUNS if _C.schema(op)["backward"]]
GRADIENTS = [op for op in RUNS if op.endswith("_bwd")]


def uniform(*shape, seed=1):
    return numpy.random.default_rng(seed).uniform(-1, 1, shape).astype(numpy.float32)


# Where the registry's example is a single number, sums say nothing of their order of arguments.
LARGER = {
    "lm_head": ({"hidden": uniform(3, 5), "weight": uniform(4, 5, seed=2), "bias": uniform(4)}, ["out"], {}),
    "linear": ({"x": uniform(3, 5), "weight": uniform(4, 5, seed=2), "bias": uniform(4), "residual": uniform(3, 4)}, ["y"], {}),
    "logp": ({"logits": 3 * uniform(5, 9), "target": numpy.array([0, 8, 3, 3, 1], numpy.int32)}, ["logp", "lse", "entropy"],
             {"temperature": 0.7}),
}


def example(op):
    """Tensors, asked results and attributes of a call."""
    arrays, results, attributes = LARGER.get(op) or examples(op, KINDS)[0][1:]
    return {n: torch.from_numpy(a) for n, a in arrays.items()}, {r: True for r in results}, attributes


def call(op, tensors, asked, attributes, face=rlk.torch, **options):
    out = getattr(face, op)(**tensors, **asked, **attributes, **options)
    return out if isinstance(out, tuple) else (out,)


def learnable(op, tensors):
    """The tensors with fresh leaves for those that have a gradient; and these."""
    differentiable = {a["name"] for a in _C.schema(op)["arguments"] if a["differentiable"]}
    fresh = {n: t.clone().requires_grad_(n in differentiable and t.is_floating_point()) for n, t in tensors.items()}
    return fresh, [t for t in fresh.values() if t.requires_grad]


def recorded(out):
    return [o for o in out if o.requires_grad]


def cotangents(out, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(o.shape, generator=generator, dtype=o.dtype) for o in out]


def gradients(op, tensors, asked, attributes, run=call, **options):
    tensors, leaves = learnable(op, tensors)
    out = recorded(run(op, tensors, asked, attributes, **options))
    assert out and leaves, op
    return torch.autograd.grad(out, leaves, cotangents(out), allow_unused=True)


def same_bits(a, b):
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes()


def test_every_op_is_tried():
    assert set(RUNS) == set(BUILT_IN) and len(LEARNS) >= 12
    assert {_C.schema(op)["backward"] for op in LEARNS} <= set(BUILT_IN)


@pytest.mark.parametrize("op", LEARNS)
def test_gradients_are_the_slopes_of_the_golden_forward(op):
    tensors, asked, attributes = example(op)
    fresh, leaves = learnable(op, tensors)
    out = recorded(call(op, fresh, asked, attributes, precision="golden"))
    weights = cotangents(out)
    found = torch.autograd.grad(out, leaves, weights, allow_unused=True)
    kept = [i for i, o in enumerate(call(op, fresh, asked, attributes)) if o.requires_grad]
    names = [n for n, t in fresh.items() if t.requires_grad]

    def value(moved):
        with torch.no_grad():
            got = call(op, tensors | moved, asked, attributes, precision="golden")
        return sum((got[i].double() * w.double()).sum().item() for i, w in zip(kept, weights))

    step = 2.0 ** -8
    for seed in range(2):
        for name, gradient in zip(names, found):
            assert gradient is not None, name
            direction = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(seed + len(name)))
            slope = (value({name: tensors[name] + step * direction}) - value({name: tensors[name] - step * direction})) / (2 * step)
            parts = gradient.double() * direction.double()
            size = parts.abs().sum().item()
            assert size > 0, name
            assert abs(slope - parts.sum().item()) <= 5e-3 * size + 1e-4, (name, slope, parts.sum().item(), size)


def tables(**rule):
    cos, sin = rlk.rope_tables(rotary_dim=8, rows=3, **rule)
    return {"cos": cos, "sin": sin}


# Where the example has thousands of numbers: fewer.
SMALLER = {
    "kda_fwd": ({"q": uniform(1, 3, 1, 4), "k": uniform(1, 3, 1, 4, seed=2), "v": uniform(1, 3, 2, 3), "g": -abs(uniform(1, 3, 2, 4)),
                 "beta": abs(uniform(1, 3, 2)), "initial_state": uniform(1, 2, 4, 3)}, ["out", "final_state"], {}),
    "kda_gate": ({"g": uniform(3, 2, 4), "a_log": uniform(2)}, ["out"], {}),
    "rope": ({"x": uniform(1, 2, 3, 8), "k": uniform(1, 1, 3, 8, seed=2), **tables()}, ["out", "k_out"], {}),
    "rope_mla_q": ({"x": uniform(1, 3, 2, 12), **tables(width="full")}, ["out"], {"layout": "bshd"}),
    "rope_mla_kv": ({"kv": uniform(1, 3, 2, 5), "k_pos_emb": uniform(1, 3, 1, 8), **tables(width="full")}, ["key", "value"],
                    {"layout": "bshd", "k_dim": 3}),
    "short_conv": ({"x": uniform(1, 5, 3), "weight": uniform(3, 4, seed=2), "bias": uniform(3)}, ["y", "final_state"], {}),
    "rms_norm": ({"x": uniform(3, 8), "weight": uniform(8, seed=2), "residual": uniform(3, 8, seed=3)}, ["y", "sum"], {}),
    "swiglu": ({"gate": uniform(3, 5), "up": uniform(3, 5, seed=2)}, ["out"], {}),
    "embedding": ({"ids": numpy.array([3, 0, 3], numpy.int32), "weight": uniform(5, 4)}, ["out"], {}),
    "linear_logp": ({"hidden": uniform(3, 6), "weight": uniform(7, 6, seed=2), "target": numpy.array([0, 6, 3], numpy.int32)},
                    ["logp", "entropy"], {"temperature": 0.7}),
    "attention": ({"q": uniform(1, 4, 2, 16), "k": uniform(1, 4, 1, 16, seed=2), "v": uniform(1, 4, 1, 16, seed=3)}, ["out", "lse"], {}),
}


class InFp64(torch.autograd.Function):
    """An op as a function of fp64, which gradcheck wants and no op reads: inputs lie where fp32 holds them exactly, moved or not."""

    @staticmethod
    def forward(ctx, run, wrong, *inputs):
        ctx.run, ctx.wrong = run, wrong
        narrow = [t.float() for t in inputs]
        assert all(torch.equal(n.double(), t) for n, t in zip(narrow, inputs))
        ctx.save_for_backward(*narrow)
        return tuple(o.double() for o in run(narrow))

    @staticmethod
    def backward(ctx, *cotangents):
        leaves = [t.requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.run(leaves)
        found = torch.autograd.grad(out, leaves, [c.float() for c in cotangents], allow_unused=True)
        return None, None, *[None if g is None else g.double() * ctx.wrong for g in found]


def gradcheck(op, wrong=1.0):
    """Every element of an op's Jacobian beside its difference."""
    arrays, results, attributes = SMALLER[op] if op in SMALLER else examples(op, KINDS)[0][1:] if op not in LARGER else LARGER[op]
    inputs, _ = learnable(op, {n: torch.from_numpy(a) for n, a in arrays.items()})
    inputs = {n: ((t.detach() * 64).round() / 64).requires_grad_() if t.requires_grad else t for n, t in inputs.items()}
    names, order = [n for n, t in inputs.items() if t.requires_grad], [n for n in rlk.torch.Schema(op).result_names if n in results]
    kept = [n for n, o in zip(order, call(op, inputs, dict.fromkeys(results, True), attributes)) if o.requires_grad]

    def run(leaves):
        out = call(op, inputs | dict(zip(names, leaves)), dict.fromkeys(results, True), attributes, precision="golden")
        return [o for n, o in zip(order, out, strict=True) if n in kept]

    wide = [inputs[n].detach().double().requires_grad_() for n in names]
    assert wide and kept, op
    # The bounds are of a difference over 2^-6: the third derivative, and one rounding of a golden result to fp32.
    assert torch.autograd.gradcheck(lambda *ts: InFp64.apply(run, wrong, *ts), wide, eps=2.0 ** -7, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("op", LEARNS)
def test_every_element_of_an_ops_jacobian_passes_gradcheck(op):
    gradcheck(op)
    with pytest.raises(GradcheckError):
        gradcheck(op, wrong=1.02)


@pytest.mark.parametrize("op", RUNS)
def test_every_op_is_compiled_whole_and_keeps_its_bits(op):
    tensors, asked, attributes = example(op)
    torch._dynamo.reset()
    compiled = torch.compile(lambda given: call(op, given, asked, attributes), fullgraph=True, backend="aot_eager")
    for _ in range(2):
        want = call(op, {n: t.clone() for n, t in tensors.items()}, asked, attributes)
        assert all(map(same_bits, compiled({n: t.clone() for n, t in tensors.items()}), want))
    if op in LEARNS:
        mine = gradients(op, tensors, asked, attributes)
        theirs = gradients(op, tensors, asked, attributes, run=lambda _, given, *__: compiled(given))
        assert all(map(same_bits, mine, theirs))


@pytest.mark.parametrize("op", LEARNS)
def test_a_checkpointed_op_gives_the_same_gradients(op):
    tensors, asked, attributes = example(op)
    want = gradients(op, tensors, asked, attributes)

    def run(op, given, *rest):
        names = list(given)
        return checkpoint(lambda *values: call(op, dict(zip(names, values)), *rest), *given.values(), use_reentrant=False)

    assert all(map(same_bits, gradients(op, tensors, asked, attributes, run=run), want))
    assert rlk.saved() == []


#: Ops whose gradient reads nothing of the forward that another recompute could change.
LINEAR = {"tp_sum", "embedding", "rope", "rope_mla_q", "rope_mla_kv"}


@pytest.mark.parametrize("op", LEARNS)
def test_a_recompute_that_differs_is_seen_in_the_gradients(op):
    tensors, asked, attributes = example(op)
    differentiable = {a["name"] for a in _C.schema(op)["arguments"] if a["differentiable"]}
    runs = []

    def run(op, given, *rest, broken=True):
        names = list(given)

        def forward(*values):
            runs.append(op)
            again = len(runs) > 1 and broken
            moved = {n: v * (1 + 2.0 ** -6) if again and n in differentiable and v.is_floating_point() else v
                     for n, v in zip(names, values)}
            return call(op, moved, *rest)

        return checkpoint(forward, *given.values(), use_reentrant=False)

    want = gradients(op, tensors, asked, attributes)
    found = gradients(op, tensors, asked, attributes, run=run)
    assert len(runs) == 2
    assert (not all(map(same_bits, found, want))) == (op not in LINEAR)


@pytest.mark.parametrize("op", LEARNS)
def test_a_second_gradient_is_refused_by_every_op(op):
    tensors, asked, attributes = example(op)
    fresh, leaves = learnable(op, tensors)
    out = recorded(call(op, fresh, asked, attributes))
    weights = [c.requires_grad_() for c in cotangents(out)]
    first = torch.autograd.grad(out, leaves, weights, create_graph=True, allow_unused=True)
    first = [g for g in first if g is not None and g.requires_grad]
    assert first
    with pytest.raises(rlk.Unsupported, match=f"{_C.schema(op)['backward']}: a gradient is asked for"):
        torch.autograd.grad(sum(g.sum() for g in first), leaves + weights, allow_unused=True)


@pytest.mark.parametrize("op", [op for op in RUNS if op not in LEARNS])
def test_an_op_without_a_gradient_refuses_one(op):
    tensors, asked, attributes = example(op)
    given = {n: t.clone().requires_grad_(t.is_floating_point()) for n, t in tensors.items()}
    if not any(t.requires_grad for t in given.values()):
        return  # rope_tables reads positions alone
    if not rlk.torch.Schema(op).changed and not any(o.is_floating_point() for o in call(op, tensors, asked, attributes)):
        assert not any(o.requires_grad for o in call(op, given, asked, attributes))  # integers: torch takes them for constants
        return
    with pytest.raises(rlk.Unsupported, match=f"{op}: a (gradient is asked for|tensor requires grad)"):
        out = recorded(call(op, given, asked, attributes))
        torch.autograd.grad([o.sum() for o in out], [t for t in given.values() if t.requires_grad], allow_unused=True)


@pytest.mark.parametrize("op", RUNS)
def test_autocast_changes_products_alone(op):
    tensors, asked, attributes = example(op)
    fresh = lambda: {n: t.clone() for n, t in tensors.items()}  # noqa: E731
    plain = call(op, fresh(), asked, attributes)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = call(op, fresh(), asked, attributes)
    if op in ("lm_head", "linear"):
        narrow = {n: t.bfloat16() for n, t in tensors.items()}
        assert cast[0].dtype == torch.bfloat16 and same_bits(cast[0].float(), call(op, narrow, asked, attributes)[0].float())
    else:
        assert all(map(same_bits, plain, cast))


@pytest.mark.parametrize("face", [rlk, rlk.torch], ids=["plain", "torch"])
@pytest.mark.parametrize("op", RUNS)
def test_no_op_reads_or_writes_a_tensor_with_the_negative_bit(op, face):
    tensors, asked, attributes = example(op)
    tried = 0
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        given = {n: t.clone() for n, t in tensors.items()}
        given[name] = torch._neg_view(tensor.clone())
        with pytest.raises(rlk.InvalidArgument, match=f"{op}: {name} is of type Tensor, which has its negative bit set"):
            call(op, given, asked, attributes, face=face)
        tried += 1
    plain = call(op, {n: t.clone() for n, t in tensors.items()}, asked, attributes, face=face)
    schema = rlk.torch.Schema(op)
    for name, result in zip([n for n in schema.result_names if n in asked], plain):
        if result.is_floating_point():
            given = asked | {name: torch._neg_view(torch.empty_like(result))}
            with pytest.raises(rlk.InvalidArgument, match=f"{op}: {name} is of type Tensor, which has its negative bit set"):
                call(op, tensors, given, attributes, face=face)
            tried += 1
    assert tried


def test_a_conjugate_is_refused_and_its_imaginary_part_too():
    complex_ = torch.randn(3, 5, dtype=torch.complex64)
    weight = torch.randn(4, 5)
    for face in (rlk, rlk.torch):
        with pytest.raises(rlk.InvalidArgument, match="hidden"):
            face.lm_head(complex_.conj(), weight)
        imaginary = complex_.t().contiguous().t().conj().imag  # what .imag of a conjugate is: the negative bit on every second number
        assert imaginary.is_neg()
        with pytest.raises(rlk.InvalidArgument, match="negative bit"):
            face.lm_head(imaginary, weight)
        assert torch.equal(face.lm_head(imaginary.resolve_neg().contiguous(), weight),
                           face.lm_head(-complex_.imag.contiguous(), weight))


class Block(torch.nn.Module):
    """Every op of a decoder's layer, its logits and their log-probabilities."""

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(5)
        for name, shape in {"table": (11, 32), "norm": (32,), "qkv": (64, 32), "out": (32, 32), "up": (96, 32), "down": (32, 48),
                            "head": (11, 32)}.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape, generator=draw)))
        cos, sin = rlk.torch.rope_tables(rotary_dim=16, rows=64)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, ids):
        batch, length = ids.shape
        x = rlk.torch.embedding(ids, self.table)
        qkv = rlk.torch.linear(rlk.torch.rms_norm(x, self.norm), self.qkv)
        q, k, v = (t.unflatten(-1, (-1, 16)).contiguous() for t in qkv.split([32, 16, 16], -1))
        q, k = rlk.torch.rope(q, self.cos, self.sin, k=k, layout="bshd")
        mixed = rlk.torch.attention(q, k, v).flatten(2)
        x = x + rlk.torch.linear(mixed, self.out)
        gate, up = rlk.torch.linear(rlk.torch.rms_norm(x, self.norm), self.up).chunk(2, -1)
        x = x + rlk.torch.linear(rlk.torch.swiglu(gate.contiguous(), up.contiguous()), self.down)
        flat = x.reshape(batch * length, 32)
        logp = rlk.torch.linear_logp(flat, self.head, target=ids.reshape(-1), logp=True)
        return rlk.torch.lm_head(x, self.head), logp


def test_a_decoders_layer_is_exported_with_a_dynamic_batch():
    block, ids = Block(), torch.arange(3 * 7).remainder(11).reshape(3, 7).int()
    program = torch.export.export(block, (ids,), dynamic_shapes=({0: torch.export.Dim("batch", min=2, max=1024)},))
    for batch in (2, 3, 9):
        more = torch.arange(batch * 7).mul(5).remainder(11).reshape(batch, 7).int()
        with torch.no_grad():
            assert all(map(same_bits, program.module()(more), block(more)))


def test_a_decoders_layer_is_compiled_with_a_dynamic_batch_and_learns_the_same():
    block = Block()
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch in (2, 5):
        ids = torch.arange(batch * 7).mul(5).remainder(11).reshape(batch, 7).int()
        grads = []
        for run in (block, compiled):
            logits, logp = run(ids)
            grads.append(torch.autograd.grad(logits.sin().sum() + logp.sum(), list(block.parameters())))
        assert all(map(same_bits, *grads))
