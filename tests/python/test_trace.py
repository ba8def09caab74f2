"""Traces from Python: a packed forward and the sampler's steps meet row by row; what differs is found."""

import json
import subprocess

import numpy
import pytest

import rlk
from rlk import _tools

torch = pytest.importorskip("torch")

import rlk.model  # noqa: E402
from rlk import sampler, verify_model  # noqa: E402


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def difference(a, b):
    done = subprocess.run([_tools.dispatch_program(), "trace-diff", a, b, "--json"], capture_output=True, text=True)
    assert done.returncode != 2, done.stderr
    return json.loads(done.stdout) | {"exit": done.returncode}


def test_a_scope_records_calls_of_every_framework(tmp_path):
    x, weight = numpy.ones((2, 4), numpy.float32), numpy.ones((3, 4), numpy.float32)
    assert not rlk.tracing()
    with rlk.trace(tmp_path / "a"):
        assert rlk.tracing()
        rlk.trace_tag("first")
        rlk.trace_rows([4, 4], [7, 8])
        rlk.lm_head(x, weight)
        rlk.trace_tag(None)
        rlk.trace_rows()
        rlk.lm_head(torch.from_numpy(x), torch.from_numpy(weight))
        rlk.trace_tensor("mine", torch.from_numpy(x), tag="theirs")
    rlk.lm_head(x, weight)
    head, keys, first, second, foreign, end = lines(tmp_path / "a")
    assert head["version"] == rlk.__version__ and end == {"end": 3}
    assert keys == {"keys": 1, "rows": [[4, 7], [4, 8]]} and (first["tag"], first["keys"]) == ("first", 1)
    assert (second["tag"], second["keys"]) == ("", 0) and second["tensors"] == first["tensors"]
    assert (foreign["op"], foreign["tag"], foreign["tensors"][0]["name"]) == ("", "theirs", "mine")
    assert foreign["tensors"][0]["rows"] == first["tensors"][0]["rows"]


def test_what_cannot_be_traced_is_refused(tmp_path):
    with pytest.raises(rlk.InvalidArgument, match="2 sequences and 1 positions are given"):
        rlk.trace_rows([1, 2], [1])
    with pytest.raises(rlk.InvalidArgument, match="cannot be written"):
        with rlk.trace(tmp_path / "none" / "a"):
            pass
    with rlk.trace(tmp_path / "a"):
        with pytest.raises(rlk.InvalidArgument, match="is not ended"):
            with rlk.trace(tmp_path / "b"):
                pass
    with pytest.raises(TypeError):
        rlk.trace_rows(["a"], [1])


def scored(model, file, rows, temperature=1.0):
    cu = torch.tensor([0, *map(len, rows)]).cumsum(0).to(torch.int32)
    with torch.no_grad(), rlk.trace(file):
        model.score(torch.tensor(sum(rows, [])), cu, temperature=temperature)
    return file


@pytest.fixture
def drawn(tmp_path):
    """A model, the rows that its sampler drew, and the sampler's trace."""
    model = rlk.model.Decoder("tiny-qwen3", seed=3)
    requests = [sampler.Request([1 + i, 2, 3] * (i + 1), most=9, seed=4, stream=i, temperature=0.8) for i in range(3)]
    with rlk.trace(tmp_path / "sampler"):
        answers = sampler.Sampler(model, pages=99, chunk=4, batch=2).run(requests)
    return model, [r.prompt + a.tokens for r, a in zip(requests, answers)], tmp_path / "sampler"


def test_a_packed_step_lines_up_with_decode_steps(drawn, tmp_path):
    model, rows, ours = drawn
    found = difference(scored(model, tmp_path / "trainer", rows, 0.8), ours)
    assert (found["exit"], found["verdict"], found["differ"]) == (0, "same", 0)
    # Every row of the sampler meets one of the trainer's: all but the last token of each answer went through its layers.
    joined = {w["tag"]: w["rows"] for w in found["where"]}
    assert joined["layer 1 down"] == joined["embedding"] == sum(map(len, rows)) - 3
    assert joined["score"] == 3 * 9
    tags = {f"layer {i} {role}" for i in range(2) for role in ("norm", "qkv", "q_norm", "k_norm", "rope", "attention", "out",
                                                                "mlp_norm", "gate_up", "swiglu", "down")}
    assert tags | {"embedding", "last norm", "score"} == joined.keys()


def test_a_temperature_that_one_engine_forgot_is_named(drawn, tmp_path):
    model, rows, ours = drawn
    found = difference(scored(model, tmp_path / "trainer", rows), ours)
    assert (found["exit"], found["verdict"], found["first"]["tag"]) == (11, "different semantics", "score")
    assert found["first"]["facts"][0].startswith("temperature is 1") and "0.8" in found["first"]["facts"][0]


def test_a_stale_weight_is_named_at_the_layer_that_has_it(drawn, tmp_path):
    model, rows, ours = drawn
    with torch.no_grad():
        model.blocks[1].down.copy_(model.blocks[1].down.bfloat16().float())
    found = difference(scored(model, tmp_path / "trainer", rows, 0.8), ours)
    assert (found["exit"], found["first"]["tag"]) == (12, "layer 1 down")


def test_an_op_outside_the_trace_is_upstream_of_what_differs(drawn, tmp_path):
    model, rows, ours = drawn

    class Cast:
        def __getattr__(self, name):
            return getattr(rlk.torch, name)

        def swiglu(self, x):
            return rlk.torch.swiglu(x).bfloat16().float()

    model.ops = Cast()
    found = difference(scored(model, tmp_path / "trainer", rows, 0.8), ours)
    assert (found["exit"], found["first"]["tag"]) == (13, "layer 0 down")


def test_verify_model_leaves_a_trace_of_every_path(tmp_path, capsys):
    assert verify_model.main(["tiny-llama", "--sequences", "2", "--longest", "20", "--trace", str(tmp_path)]) == 0
    files = sorted(tmp_path.iterdir())
    reference = tmp_path / "packed-reference.trace"
    assert reference in files and len(files) > 8
    for file in files:
        found = difference(reference, file)
        assert found["exit"] == 0 and found["rows"] > 0, file
    assert "decoded-from-the-first-token" in capsys.readouterr().out


def test_two_programs_without_an_op_of_rlk_are_compared_by_their_tensors(tmp_path):
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    x = torch.randn(6, 8)

    def record(file, rounded=False):
        with torch.no_grad(), rlk.trace(file):
            h = x
            rlk.trace_rows([0] * 6, range(6))
            for i, layer in enumerate(net):
                h = layer(h).bfloat16().float() if rounded and i == 1 else layer(h)
                rlk.trace_tensor("out", h, tag=f"layer {i}")
            rlk.trace_rows()
        return file

    a = record(tmp_path / "a")
    assert difference(a, record(tmp_path / "b"))["verdict"] == "same"
    found = difference(a, record(tmp_path / "c", rounded=True))
    assert (found["exit"], found["first"]["tag"], found["first"]["position"]) == (10, "layer 1", 0)
    assert found["first"]["facts"] == [f"a foreign kernel in {a}, a foreign kernel in {tmp_path / 'c'}"]


def test_what_differs_besides_the_first_difference_is_noted(drawn, tmp_path):
    """A weight that is stale and a temperature that is forgotten: the first has the verdict, the other is not a consequence of it."""
    model, rows, ours = drawn
    with torch.no_grad():
        for block in model.blocks:
            block.down.copy_(block.down.bfloat16().float())
    found = difference(scored(model, tmp_path / "trainer", rows), ours)
    assert (found["exit"], found["first"]["tag"]) == (12, "layer 0 down")
    layer, score = found["notes"]
    assert layer.startswith("layer 1 down: weight is fp32 [64x176]") and score.startswith("score: temperature is 1 in")
