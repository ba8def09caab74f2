"""Attention of one product of q, k and v in training: the bits of the ops one by one, forward and backward, and no gradients that are
computed apart and put together."""

import pytest

torch = pytest.importorskip("torch")

from torch.profiler import ProfilerActivity, profile  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import rlk  # noqa: E402
import rlk.model  # noqa: E402
import rlk.torch  # noqa: E402

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
LENGTHS = [9, 0, 1, 30]


def decoder(name, dtype=torch.float32, device="cpu"):
    """With norms that differ: made of ones they would be one another's."""
    model, draw = rlk.model.Decoder(name, seed=3, dtype=dtype, device=device), torch.Generator().manual_seed(6)
    for n, weight in model.named_parameters():
        if n.endswith("norm"):
            weight.data.copy_(torch.randn(weight.shape, generator=draw))
    return model


def batch(device="cpu"):
    tokens = torch.randint(64, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    return tokens.to(device), torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32).to(device)


def composed(self, layer, block, qkv, attend, note, tag):
    """rlk.model's Turn, op by op."""
    c, m = self.model.config, self.model
    q, k, v = qkv.split([c.heads, c.kv_heads, c.kv_heads], 1)
    if c.qk_norm:
        q, k = rlk.torch.rms_norm(q, block.q_norm, eps=c.eps), rlk.torch.rms_norm(k, block.k_norm, eps=c.eps)
    q, k = rlk.torch.rope(q, m.cos, m.sin, k=k, positions=self.positions, layout="thd")
    note("rope", k)
    return rlk.torch.attention(q, k, v, self.bounds, self.bounds)


@pytest.fixture
def op_by_op(monkeypatch):
    """Runs what it is given with layers op by op."""
    def run(what):
        with monkeypatch.context() as patched:
            patched.setattr(rlk.model.Turn, "__call__", composed)
            return what()

    return run


def gradients(model, loss):
    """Of all weights; None where there is none."""
    model.zero_grad(set_to_none=True)
    found = loss(model)
    found.backward()
    return [found.detach(), *[p.grad for p in model.parameters()]]


def scored(model):
    return model.score(*batch(model.device)).sum()


def same(found, want):
    return len(found) == len(want) and all(
        a is b is None or a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, want))


def in_one_step(loss):
    """Whether attention is in this graph as a step of its own kind."""
    graph, seen = [loss.grad_fn], set()
    while graph:
        node = graph.pop()
        if node is not None and node not in seen:
            seen.add(node)
            graph += [n for n, _ in node.next_functions]
    return "AttendedBackward" in {type(node).__name__ for node in seen}


class Followed(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), keywords=None):
        return function(*args, **keywords or {})


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_loss_and_every_gradient_have_the_bits_of_the_ops_one_by_one(name, dtype, device, op_by_op):
    model = decoder(name, dtype, device)
    want = op_by_op(lambda: gradients(model, scored))
    assert same(gradients(model, scored), want) and all(g.isfinite().all() and g.any() for g in want)


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-llama"])
def test_no_gradients_are_put_together(name, op_by_op):
    model = decoder(name)

    def names():
        hidden = model.packed(*batch())
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
            hidden.sum().backward()
        return [(event.name, event.cpu_parent.name if event.cpu_parent else "") for event in profiled.events()]

    assert op_by_op(names).count(("aten::cat", "SplitWithSizesBackward0")) == 2
    found = names()
    assert "aten::cat" not in [name for name, _ in found]
    within = {name for name, parent in found if parent == "AttendedBackward"}
    assert "aten::empty_like" in within and not within & {"aten::copy_", "aten::clone", "aten::contiguous", "aten::zeros_like", "aten::add"}


@pytest.mark.parametrize("way", ["retained", "create_graph", "checkpoint", "checkpoint, reentrant", "a mode", "a mode in the backward"])
def test_the_graph_may_be_kept_made_again_and_followed(way, op_by_op):
    model = decoder("tiny-qwen3", torch.bfloat16)
    want = op_by_op(lambda: gradients(model, scored))
    loss, weights = scored, list(model.parameters())
    if way.startswith("checkpoint"):
        one = torch.ones(1, requires_grad=True)
        assert same(gradients(model, lambda m: checkpoint(lambda _: loss(m), one, use_reentrant="," in way)), want)
        return
    if way == "a mode":
        with Followed():
            assert same(gradients(model, loss), want)
        return
    found = loss(model)
    if way == "retained":
        assert same(torch.autograd.grad(found, weights, retain_graph=True), want[1:])
    if way == "a mode in the backward":
        with Followed():
            assert same(torch.autograd.grad(found, weights), want[1:])
        return
    assert same([g.detach() for g in torch.autograd.grad(found, weights, create_graph=way == "create_graph")], want[1:])


def test_a_compiled_model_has_the_same_gradients(op_by_op):
    model = decoder("tiny-qwen3")
    want = op_by_op(lambda: gradients(model, scored))
    compiled = torch.compile(model.score, backend="aot_eager")
    assert not in_one_step(compiled(*batch()).sum())
    assert same(gradients(model, lambda m: compiled(*batch()).sum()), want)


@pytest.mark.parametrize("learning", [("q_norm",), ("k_norm", "out"), ("qkv",), ("embed",), ()])
def test_only_what_learns_gets_a_gradient(learning, op_by_op):
    model = decoder("tiny-qwen3")
    for name, weight in model.named_parameters():
        weight.requires_grad_(name.endswith(learning))
    if not learning:
        assert not scored(model).requires_grad
        return
    want = op_by_op(lambda: gradients(model, scored))
    assert same(gradients(model, scored), want) and any(g is not None for g in want[1:]) and None in want


@pytest.mark.parametrize("of", ["rope", "rope alone", "attention"])
def test_noted_rows_have_gradients_too(of, op_by_op):
    model = decoder("tiny-qwen3")

    def loss(model):
        rows = {}
        hidden = model.packed(*batch(), note=lambda layer, name, found: rows.update({(layer, name): found}))
        noted = rows[1, of.split()[0]].square().sum()
        return noted if "alone" in of else noted + hidden.sum()

    want = op_by_op(lambda: gradients(model, loss))
    assert same(gradients(model, loss), want)


def test_what_wants_each_op_has_it(tmp_path, op_by_op):
    model = decoder("tiny-qwen3")
    assert in_one_step(scored(model))
    with rlk.trace(tmp_path / "t.jsonl"):
        assert not in_one_step(scored(model))
    for scope in (rlk.precision("golden"), *map(rlk.backend, ("rms_norm=native.golden;*=native", "rms_norm_bwd=native.golden;*=native"))):
        with scope:
            assert not in_one_step(scored(model))
            assert same(gradients(model, scored), op_by_op(lambda: gradients(model, scored)))
    tokens, cu = batch()
    hidden = model(tokens, rlk.model.places(cu, len(tokens)), lambda _, q, k, v: rlk.torch.attention(q, k, v, cu, cu))
    assert not in_one_step(hidden)


def test_a_backward_is_in_the_scopes_of_its_forward(op_by_op):
    model = decoder("tiny-qwen3")

    def within(model):
        with rlk.backend("attention_bwd=native.golden;*=native"):
            return scored(model)

    found = gradients(model, within)
    assert same(found, op_by_op(lambda: gradients(model, within))) and not same(found, gradients(model, scored))


def test_there_is_no_second_gradient():
    model = decoder("tiny-qwen3")
    first, = torch.autograd.grad(scored(model), [model.blocks[0].q_norm], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()
