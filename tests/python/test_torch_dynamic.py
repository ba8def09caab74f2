"""Every op of the registry in torch.export and torch.compile, with its rows as a symbol: one graph for every batch."""

import pytest

torch = pytest.importorskip("torch")

import rlk.torch  # noqa: E402
from rlk import _C  # noqa: E402
from test_torch_ops import LEARNS, RUNS, call, example, gradients, same_bits  # noqa: E402

#: Starts of sequences or groups of rows: they go on where the batch before ends.
OFFSETS = ("cu_seqlens", "group_offsets")
#: What has rows though the registry says nothing of them: one row's result depends on the others.
ROWS = {("group_advantage", "rewards"): 0, ("group_advantage", "group_offsets"): 0, ("loss_reduce", "totals"): 0}


def axes(op, tensors):
    """By tensor, the axis along which its batch lies."""
    found = {}
    for a in _C.schema(op)["arguments"]:
        axis = ROWS.get((op, a["name"]), 0 if a["batch_axis"] == -2 or a["name"] in OFFSETS else a["batch_axis"])
        if a["name"] in tensors and axis >= 0:
            found[a["name"]] = axis
    return found


def batches(op, times):
    """The example, so many times."""
    tensors, asked, attributes = example(op)

    def more(name, t, axis):
        if name not in OFFSETS:
            return torch.cat([t] * times, axis)
        return torch.cat([t[:1]] + [t[1:] + i * t[-1] for i in range(times)])

    where = axes(op, tensors)
    return {n: more(n, t, where[n]) if n in where else t for n, t in tensors.items()}, asked, attributes


class Call(torch.nn.Module):
    def __init__(self, op, asked, attributes):
        super().__init__()
        self.rest = op, asked, attributes

    def forward(self, given):
        op, asked, attributes = self.rest
        return call(op, given, asked, attributes)


def fresh(tensors):
    return {n: t.clone() for n, t in tensors.items()}


@pytest.mark.parametrize("op", RUNS)
def test_every_op_is_exported_with_a_dynamic_batch(op):
    tensors, asked, attributes = batches(op, 2)
    where = axes(op, tensors)
    assert where, op
    batch, bounds = torch.export.Dim("batch", min=2, max=4096), torch.export.Dim("bounds", min=3, max=4096)
    shapes = {n: {where[n]: bounds if n in OFFSETS else batch} if n in where else None for n in tensors}
    program = torch.export.export(Call(op, asked, attributes), (fresh(tensors),), dynamic_shapes=(shapes,), strict=False)
    for times in (2, 5):
        tensors = batches(op, times)[0]
        with torch.no_grad():
            assert all(map(same_bits, program.module()(fresh(tensors)), call(op, fresh(tensors), asked, attributes))), times


@pytest.mark.parametrize("op", RUNS)
def test_every_op_is_compiled_once_for_every_batch(op):
    _, asked, attributes = batches(op, 2)
    torch._dynamo.reset()
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(Call(op, asked, attributes), fullgraph=True, backend=count)
    for times in (2, 5, 3):
        tensors = batches(op, times)[0]
        given = fresh(tensors)
        for name, axis in axes(op, tensors).items():
            torch._dynamo.mark_dynamic(given[name], axis)  # an error where the op fixes it
        assert all(map(same_bits, compiled(given), call(op, fresh(tensors), asked, attributes))), times
    assert len(graphs) == 1


@pytest.mark.parametrize("op", LEARNS)
def test_gradients_of_a_graph_for_every_batch_have_the_bits_of_eager_ones(op):
    _, asked, attributes = batches(op, 2)
    torch._dynamo.reset()
    compiled = torch.compile(Call(op, asked, attributes), fullgraph=True, dynamic=True, backend="aot_eager")
    for times in (2, 3):
        tensors = batches(op, times)[0]
        mine = gradients(op, tensors, asked, attributes)
        assert all(map(same_bits, gradients(op, tensors, asked, attributes, run=lambda _, given, *__: compiled(given)), mine)), times


def test_packed_sequences_are_symbols_too_in_number_and_length():
    def packed(*lengths):
        draw = torch.Generator().manual_seed(sum(lengths))
        q, k, v, g = (torch.rand(1, sum(lengths), 2, 32, generator=draw) for _ in range(4))
        return q, k, v, -g, torch.rand(1, sum(lengths), 2, generator=draw), torch.tensor([0, *lengths]).cumsum(0)

    class Packed(torch.nn.Module):
        def forward(self, q, k, v, g, beta, bounds):
            out, state = rlk.torch.kda_fwd(q, k, v, g, beta, cu_seqlens=bounds, final_state=True)
            x = rlk.torch.attention(q[0], k[0], v[0], bounds.int(), bounds.int())
            return out, state, x

    tokens, bounds = torch.export.Dim("tokens", min=2, max=4096), torch.export.Dim("bounds", min=3, max=64)
    program = torch.export.export(Packed(), packed(5, 9, 2), dynamic_shapes=(*({1: tokens},) * 5, {0: bounds}), strict=False)
    for lengths in ((5, 9, 2), (70, 1), (3, 3, 3, 3, 64)):
        with torch.no_grad():
            found, want = program.module()(*packed(*lengths)), Packed()(*packed(*lengths))
        assert found[1].shape[0] == len(lengths) and all(map(same_bits, found, want))
