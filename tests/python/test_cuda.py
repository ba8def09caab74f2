"""rlk.torch on an NVIDIA GPU: bits, gradients, streams, memory, CUDA graphs and compiled code."""

import json

import numpy
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)

import rlk  # noqa: E402
import rlk.torch  # noqa: E402
from examples import BUILT_IN, attributes, data  # noqa: E402
from rlk import _C  # noqa: E402

HERE = [i for i in rlk.implementations() if i["backend"] == "cuda"]
ON_GPU = [op for op in BUILT_IN if any(i["op"] == op for i in HERE)]
NARROW = {"fp16": torch.float16, "bf16": torch.bfloat16}


def calls(op):
    """Each example of an op: {tensor: cuda tensor}, results by name, attributes."""
    on_host = {a["name"] for a in _C.schema(op)["arguments"] if a["host"]}
    for e in json.loads(_C.examples_json(op))["examples"]:
        tensors = {}
        for t in e["tensors"]:
            made = torch.from_numpy(data(t["name"], t["shape"], t["dtype"], t.get("values"), t.get("range")))
            made = made.to(NARROW.get(t["dtype"], made.dtype))
            tensors[t["name"]] = made if t["name"] in on_host else made.cuda()
        yield tensors, {r["name"]: True for r in e["results"]}, attributes(op, e["attributes"])


def run(face, op, tensors, results, attributes, **options):
    out = getattr(face, op)(**{n: t.clone() for n, t in tensors.items()}, **results, **attributes, **options)
    return out if isinstance(out, tuple) else (out,)


def same_bits(a, b):
    a, b = a.cpu().contiguous().reshape(-1).view(torch.uint8), b.cpu().contiguous().reshape(-1).view(torch.uint8)
    return torch.equal(a, b)


def leaf(*shape, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).cuda().requires_grad_()


def test_the_cuda_plugin_is_loaded():
    assert HERE and all(i["usable"] == "yes" or not i["usable"].startswith("no: no NVIDIA driver") for i in HERE)
    assert rlk.resolve("lm_head", torch.ones(2, 64, device="cuda"), torch.ones(8, 64, device="cuda")).id.startswith("cuda.")


@pytest.mark.parametrize("op", ON_GPU)
def test_every_op_gives_the_bits_that_its_arithmetic_has_on_a_cpu(op):
    native = {i["arithmetic"] for i in rlk.implementations() if i["op"] == op and i["backend"] == "native"}
    for tensors, results, attributes in calls(op):
        chosen = rlk.resolve(op, **tensors, **results, **attributes)
        assert chosen.id.startswith("cuda."), chosen.error
        out = run(rlk.torch, op, tensors, results, attributes)
        on_cpu = {n: t.cpu() for n, t in tensors.items()}
        if chosen.arithmetic in native:
            want = run(rlk, op, on_cpu, results, attributes, arithmetic=chosen.arithmetic)
            assert all(t.is_cuda for t in out) and all(map(same_bits, out, want)), chosen.id
        else:
            want = run(rlk, op, on_cpu, results, attributes)
            for a, b in zip(out, want, strict=True):
                torch.testing.assert_close(a.cpu(), b, rtol=2e-2, atol=2e-2, equal_nan=True)


@pytest.mark.parametrize("op", [op for op in ON_GPU if _C.schema(op)["backward"] in ON_GPU])
def test_gradients_agree_with_those_of_a_cpu(op):
    differentiable = {a["name"] for a in _C.schema(op)["arguments"] if a["differentiable"]}
    tensors, results, attributes = next(calls(op))

    def gradients(device):
        given = {n: t.to(device, copy=True) if t.is_cuda else t.clone() for n, t in tensors.items()}
        wanted = [t.requires_grad_() for n, t in given.items() if n in differentiable]
        out = getattr(rlk.torch, op)(**given, **results, **attributes)
        out = [o for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad]
        return torch.autograd.grad([o.float().cos().sum() for o in out], wanted, allow_unused=True)

    for a, b in zip(gradients("cuda"), gradients("cpu"), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.cpu() - b).norm() <= 1e-3 * b.norm()


@pytest.mark.parametrize("op", ON_GPU)
def test_every_op_passes_opcheck(op):
    tensors, results, attributes = next(calls(op))
    schema = rlk.torch.Schema(op)
    differentiable = {a["name"] for a in schema.inputs if a["differentiable"]}
    inputs = [tensors.get(n) for n in schema.input_names]
    if schema.backward:
        inputs = [t.requires_grad_() if t is not None and n in differentiable else t
                  for n, t in zip(schema.input_names, inputs)]
    asked = ",".join(results) or schema.wanted(tensors, {})
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if schema.backward or schema.changed:
        tests.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(torch.ops.rlk, op).default, tuple(inputs), {"results": asked, **attributes},
                          test_utils=tests)


@pytest.mark.parametrize("op", ON_GPU)
def test_what_may_be_captured_replays_with_new_data(op):
    tensors, results, attributes = next(calls(op))
    if not rlk.resolve(op, **tensors, **results, **attributes).capture_safe:
        pytest.skip("its implementation refuses a capture")
    given = {n: t.clone() for n, t in tensors.items()}
    later = {n: t * 0.5 if t.is_floating_point() else t for n, t in tensors.items()}
    call = lambda: getattr(rlk.torch, op)(**given, **results, **attributes)  # noqa: E731
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for n, t in given.items():
        t.copy_(later[n])
    graph.replay()
    captured = captured if isinstance(captured, tuple) else (captured,)
    assert all(map(same_bits, captured, run(rlk.torch, op, later, results, attributes)))


def test_a_step_with_its_backward_is_captured():
    hidden, weight = leaf(8, 128), leaf(256, 128)

    def step():
        return torch.autograd.grad(rlk.torch.lm_head(hidden, weight).float().square().sum(), (hidden, weight))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        hidden.mul_(0.5)
    graph.replay()
    assert all(map(same_bits, captured, step()))


def test_a_call_runs_on_the_current_stream():
    weight = torch.ones(256, 256, device="cuda")
    hidden = torch.zeros(16, 256, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        hidden.fill_(1)
        out = rlk.torch.lm_head(hidden, weight)
    torch.cuda.synchronize()
    assert (out == 256).all()


def test_memory_comes_from_torch_and_goes_back():
    hidden, weight = leaf(64, 512).detach(), leaf(4096, 512).detach()
    rlk.torch.lm_head(hidden, weight)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = rlk.torch.lm_head(hidden, weight)
    assert torch.cuda.memory_allocated() - before == out.numel() * out.element_size()
    del out
    assert torch.cuda.memory_allocated() == before


def test_a_saved_tensor_is_guarded_on_a_gpu_too():
    hidden, weight = leaf(4, 64), leaf(8, 64)
    out = rlk.torch.lm_head(hidden, weight)
    with torch.no_grad(), pytest.raises(rlk.OverlapError, match="saved for a backward"):
        rlk.lm_head(leaf(4, 32).detach(), leaf(64, 32).detach(), out=hidden)
    out.sum().backward()
    assert rlk.saved() == []


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_gives_the_same_bits(backend):
    cos, sin = (t.cuda() for t in rlk.torch.rope_tables(rotary_dim=64, rows=32))

    def step(x, scale, weight):
        normed = rlk.torch.rms_norm(x, scale)
        turned = rlk.torch.rope(normed.view(1, -1, 4, 64), cos, sin, layout="bshd")
        return rlk.torch.lm_head(turned.reshape(-1, 256), weight)

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    mine, theirs = ([leaf(32, 256), leaf(256), leaf(512, 256)] for _ in range(2))
    a, b = step(*mine), compiled(*theirs)
    cotangent = torch.randn(a.shape, device="cuda", dtype=a.dtype)
    assert same_bits(a, b)
    for x, y in zip(torch.autograd.grad(a, mine, cotangent), torch.autograd.grad(b, theirs, cotangent), strict=True):
        assert same_bits(x, y)


def test_tensors_of_two_devices_are_refused():
    with pytest.raises(rlk.Error, match="weight"):
        rlk.torch.lm_head(torch.ones(2, 64, device="cuda"), torch.ones(8, 64))


def test_arrays_of_cupy_run_on_their_current_stream():
    cupy = pytest.importorskip("cupy")
    rng = numpy.random.default_rng(1)
    hidden, weight = rng.standard_normal((7, 256), dtype="float32"), rng.standard_normal((300, 256), dtype="float32")
    on_cpu = rlk.lm_head(hidden, weight, arithmetic="fma32/kb1024")
    stream = cupy.cuda.Stream(non_blocking=True)
    for where in (cupy.cuda.Stream.null, stream):
        with where:
            out = rlk.lm_head(cupy.asarray(hidden), cupy.asarray(weight), arithmetic="fma32/kb1024")
            given = cupy.empty_like(out)
            rlk.lm_head(cupy.asarray(hidden), cupy.asarray(weight), out=given, arithmetic="fma32/kb1024")
            assert type(out) is cupy.ndarray
            assert numpy.array_equal(cupy.asnumpy(out), on_cpu) and numpy.array_equal(cupy.asnumpy(given), on_cpu)
        where.synchronize()


def test_memory_of_a_result_waits_for_the_streams_that_recorded_it():
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    x, w = torch.randn(256, 512, device="cuda").bfloat16(), torch.randn(1024, 512, device="cuda").bfloat16()
    y = rlk.torch.linear(x, w)
    want, address = y.clone(), y.data_ptr()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)
        late = y.clone()
    y.record_stream(side)
    del y
    others = [torch.zeros(256, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
    assert address not in [t.data_ptr() for t in others]
    main.wait_stream(side)
    assert same_bits(late, want)


@pytest.mark.parametrize("leaves", [{}, {"leaf_first": 2, "leaf_count": 2}])
@pytest.mark.parametrize("rows, each", [(4100, 1025), (700, 257), (2048, 512)])
def test_rows_of_a_product_have_their_bits_in_any_piece(rows, each, leaves):
    k, n = 3072, 1024
    mine = k * leaves.get("leaf_count", 8) // 8
    options = leaves | ({"k_total": k} if leaves else {})
    x, w, d_y = (torch.randn(*s, device="cuda").bfloat16() for s in ((rows, mine), (n, mine), (rows, mine)))
    y = rlk.torch.linear(x, w, **options)
    back = {"d_x_" + name: v for name, v in leaves.items()} | ({"n_total": k} if leaves else {})
    up = torch.randn(mine, n, device="cuda").bfloat16()
    d_x = rlk.torch.linear_bwd(d_y, y.bfloat16(), up, d_x=True, **back)
    for at in range(0, rows, each):
        some = slice(at, min(at + each, rows))
        assert same_bits(rlk.torch.linear(x[some], w, **options), y[some])
        assert same_bits(rlk.torch.linear_bwd(d_y[some], y[some].bfloat16(), up, d_x=True, **back), d_x[some])
