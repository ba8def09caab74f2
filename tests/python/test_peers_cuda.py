"""Sums over ranks through their memory on one GPU: streams are ranks. The bits are tp_sum's; a rank that does not come is an error."""

import datetime
import random
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)

import rlk  # noqa: E402
import rlk.torch  # noqa: E402
from rlk.parallel import peers  # noqa: E402

BLOCKS = 16  # of all ranks together on one GPU at the same time


class Ranks:
    def __init__(self, size, seconds=60):
        nbytes = peers.library().rlk_peers_bytes(size, BLOCKS) + (16 << 20)
        self.memory = [torch.zeros(nbytes, dtype=torch.uint8, device="cuda") for _ in range(size)]
        self.peers = [peers.Peers(self.memory, r, BLOCKS, datetime.timedelta(seconds=seconds)) for r in range(size)]
        self.streams = [torch.cuda.Stream() for _ in range(size)]

    def run(self, call):
        """[call(rank, peers)], all at the same time."""
        torch.cuda.synchronize()
        found = []
        for r, (p, stream) in enumerate(zip(self.peers, self.streams)):
            with torch.cuda.stream(stream):
                found.append(call(r, p))
        torch.cuda.synchronize()
        return found


def same(a, b):
    return a.shape == b.shape and torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_sums_of_all_kinds_are_those_of_tp_sum(size):
    ranks, draw = Ranks(size), random.Random(size)
    for _ in range(60):
        rows, width = draw.choice([1, 2, 5, 16, 67, 130]), draw.choice([8, 64, 520, 1024, 4104])
        dtype = draw.choice([torch.bfloat16, torch.float16, torch.float32])
        way, spread = draw.choice([("words", False), ("shared", False), (None, False), (None, True), ("landed", False), ("landed", True)])
        parts = torch.randn(size, rows, width, device="cuda") * 3
        parts[:, 0, :3] = torch.tensor([float("nan"), float("inf"), -0.0], device="cuda")
        bias, residual = (torch.randn(*s, device="cuda").to(dtype) if draw.random() < 0.5 else None for s in ((width,), (rows, width)))
        want = rlk.torch.tp_sum(parts, bias=bias, residual=residual, y=dtype)
        share = -(-rows // size)
        own = [slice(min(rows, r * share), min(rows, (r + 1) * share)) if spread else slice(None) for r in range(size)]

        def call(r, p):
            added = bias, None if residual is None else residual[own[r]], spread
            if way != "landed":
                return p.sum(parts[r], dtype, *added, way=way)
            for some, to in p.places(rows, width):
                to.copy_(parts[r, some])
            return p.landed(rows, width, dtype, *added)

        found = ranks.run(call)
        for r, y in enumerate(found):
            assert same(y, want[own[r]]), (size, rows, width, dtype, way, spread, r)


def test_strided_and_shifted_operands_are_taken():
    ranks = Ranks(2)
    parts, residual = torch.randn(2, 6, 72, device="cuda"), torch.randn(6, 72, device="cuda").bfloat16()
    want = rlk.torch.tp_sum(parts, residual=residual, y=torch.bfloat16)
    wide, shifted = torch.randn(2, 6, 100, device="cuda"), torch.empty(6 * 72 + 1, device="cuda").bfloat16()
    wide[:, :, 20:92], shifted[1:] = parts, residual.flatten()
    found = ranks.run(lambda r, p: p.sum(wide[r, :, 20:92], torch.bfloat16, residual=shifted[1:].view(6, 72)))
    assert all(same(y, want) for y in found)


def test_a_captured_sum_is_replayed_with_new_data():
    ranks = Ranks(2)
    parts = [torch.randn(2, m, 1024, device="cuda") for m in (1, 9, 700)]  # of both ways, an odd number
    ways = ("words", "shared", "shared")
    graphs = []
    for r, p in enumerate(ranks.peers):
        with torch.cuda.stream(ranks.streams[r]):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            found = [p.sum(t[r], torch.bfloat16, way=way) for t, way in zip(parts, ways)]
            graph.capture_end()
        graphs.append((graph, found))
    for _ in range(20):
        for t in parts:
            t.normal_()
        ranks.run(lambda r, p: graphs[r][0].replay())
        for _, found in graphs:
            assert all(same(y, rlk.torch.tp_sum(t, y=torch.bfloat16)) for y, t in zip(found, parts))


def test_a_rank_that_does_not_come_is_an_error():
    """In a process of its own: the GPU's context is lost with the kernel."""
    text = """
import torch, rlk, test_peers_cuda as t
ranks = t.Ranks(2, seconds=0.5)
ranks.peers[1].sum(torch.ones(1, 64, device="cuda"), torch.bfloat16, way={way!r})
try:
    torch.cuda.synchronize()
    print("nothing")
except RuntimeError:
    print("stopped")
try:
    ranks.peers[1].sum(torch.ones(1, 64), torch.bfloat16)
except rlk.BackendError as error:
    print(error)
"""
    from pathlib import Path
    for way in ("words", "shared"):
        done = subprocess.run([sys.executable, "-c", text.format(way=way)], capture_output=True, text=True, cwd=Path(__file__).parent)
        assert done.stdout.startswith("stopped\n") and "rank 1 of 2 waited 0.5 s in a sum for rank 0, which did not come" in done.stdout, done
