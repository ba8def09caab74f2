"""rlk.parallel over the GPUs of one host: what test_parallel.py compares on CPUs, over NCCL and by sums in each other's memory. A degree that the
host has no GPUs for is skipped."""

import contextlib
import datetime
import multiprocessing
import os
import pickle

import pytest

torch = pytest.importorskip("torch")

import test_parallel as on_cpus  # noqa: E402
import torch.distributed as dist  # noqa: E402

import rlk.parallel as parallel  # noqa: E402
from rlk import verify_model  # noqa: E402
from rlk.parallel import ops  # noqa: E402

GPUS = torch.cuda.device_count()
DEGREES = [pytest.param(n, marks=pytest.mark.skipif(GPUS < n, reason=f"{n} GPUs are needed, {GPUS} are here")) for n in (2, 4, 8)]


def _rank(work, rank, degree, file, arguments, said):
    os.environ.update(TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NCCL_NVLS_ENABLE="0")  # what could add on the way
    torch.cuda.set_device(rank)
    torch.set_default_device(f"cuda:{rank}")
    dist.init_process_group("nccl", init_method=f"file://{file}", rank=rank, world_size=degree, timeout=datetime.timedelta(seconds=60),
                            device_id=torch.device("cuda", rank))
    try:
        found = work(rank, *arguments)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    said.put((rank, pickle.dumps(found)))


def processes(degree, folder, work, *arguments, expected=None):
    """[what work(rank) gives] of processes with a GPU each; None of one that ended without a word."""
    context = multiprocessing.get_context("spawn")
    said = context.Queue()
    ranks = [context.Process(target=_rank, args=(work, r, degree, folder / "store", arguments, said)) for r in range(degree)]
    for p in ranks:
        p.start()
    found = [None] * degree
    for _ in range(degree if expected is None else expected):
        rank, what = said.get(timeout=240)
        found[rank] = pickle.loads(what)
    for p in ranks:
        p.join(20)
        p.kill()
    return found


def group_of(peers, **options):
    return parallel.as_group(**({"peers": 64 << 20} if peers else {}), **options)


def as_bytes(tensors):
    return [on_cpus.bits(t).numpy().tobytes() for t in tensors]


# ---- the bits of one GPU


def _every_op(rank, peers):
    alone = parallel.Group(0, 1)
    one = as_bytes(on_cpus._every_op(alone))
    group, differ = group_of(peers), []
    for ops.GATHERED in (1 << 20, 0):
        found = as_bytes(on_cpus._every_op(group))
        differ.append([n for n, (a, b) in enumerate(zip(one, found, strict=True)) if a != b])
    return differ


@pytest.mark.parametrize("peers", [False, True], ids=["nccl", "peers"])
@pytest.mark.parametrize("degree", DEGREES)
def test_every_op_over_gpus_has_the_bits_of_one(degree, peers, tmp_path):
    assert processes(degree, tmp_path, _every_op, peers) == [[[], []]] * degree


def _linears(rank, rows):
    """Of widths that Hopper's kernels take, and of rows that are gathered and exchanged."""
    alone, found = parallel.Group(0, 1), []
    for group in (alone, group_of(False), group_of(True)):
        x, up, down, d_z = (on_cpus.numbers(n, *s, dtype=torch.bfloat16) for n, s in enumerate(
            [(rows, 1024), (3072, 1024), (1024, 3072), (rows, 1024)]))
        a, v, w = on_cpus.leaf(x), on_cpus.leaf(parallel.shard(up, group)), on_cpus.leaf(parallel.shard(down, group, 1))
        z = parallel.row_linear(parallel.column_linear(a, v, group=group), w, None, x, group=group)
        z.backward(d_z)
        with torch.no_grad():  # the rows spread
            mine = ops.rows_of(group, rows)
            y = parallel.row_linear(parallel.column_linear(a, v, group=group), w, None, x[mine], group=group, rows=rows)
        found.append(as_bytes([z, ops.gather_rows(y, group, rows), a.grad, parallel.unshard(v.grad, group), parallel.unshard(w.grad, group, 1)]))
    return [[n for n, (a, b) in enumerate(zip(f, found[0], strict=True)) if a != b] for f in found[1:]]


@pytest.mark.parametrize("rows", [1, 130, 4100])
@pytest.mark.parametrize("degree", DEGREES)
def test_wide_linears_over_gpus_have_the_bits_of_one(degree, rows, tmp_path):
    assert processes(degree, tmp_path, _linears, rows) == [[[], []]] * degree


def _model(rank, peers, shape):
    def of(group):
        rows, logp, gradients = on_cpus._scored(on_cpus.decoder(group, shape=shape))
        return rows, (rows.digest(), logp, gradients, on_cpus._sampled(on_cpus.decoder(group, shape=shape)))

    (one, first), (rows, found) = of(parallel.Group(0, 1)), of(group_of(peers))
    verdict, apart = verify_model.compare(one, rows)
    return [first == found, apart, any(verdict.values())]


@pytest.mark.parametrize("peers", [False, True], ids=["nccl", "peers"])
@pytest.mark.parametrize("shape", [on_cpus.SHAPE, "tiny-kimi-ranks"], ids=["qwen3", "kimi"])
@pytest.mark.parametrize("degree", DEGREES)
def test_a_model_over_gpus_has_the_bits_of_one(degree, shape, peers, tmp_path):
    assert processes(degree, tmp_path, _model, peers, shape) == [[True, 0, False]] * degree


@pytest.mark.parametrize("degree, trainers", [pytest.param(*d.values, t, marks=d.marks) for d, t in zip(DEGREES, (1, 2, 4), strict=True)])
def test_trainer_and_sampler_over_gpus_may_have_different_degrees(degree, trainers, tmp_path):
    (one, kl, weights), = processes(1, tmp_path, on_cpus._work_on_a_model, 1)
    assert kl == [0, 0] and one[0] != one[1]
    (tmp_path / "store").unlink(missing_ok=True)
    for drawn, apart, after in processes(degree, tmp_path, on_cpus._work_on_a_model, trainers):
        assert drawn == one and apart == [0, 0] and after == weights


# ---- what goes wrong


def _goes_wrong(rank, how):
    group = group_of(True, timeout=datetime.timedelta(seconds=5))
    part = on_cpus.numbers(rank, 64, 256)
    group.peers.sum(part, torch.bfloat16)
    torch.cuda.synchronize()
    if how == "is gone" and rank == 1:
        return "gone"
    if how == "is gone":
        with contextlib.suppress(RuntimeError):  # the GPU's own error
            group.peers.sum(part, torch.bfloat16)
            torch.cuda.synchronize()
        group.peers.check()
    parallel.row_linear(on_cpus.numbers(1, 3 + (rank == 1), 64), on_cpus.numbers(2, 16, 64), group=group)


@pytest.mark.parametrize("how, words", [("is gone", "waited 5 s in a sum for rank 1"), ("disagrees", "ranks disagree: rank 0 has")])
@pytest.mark.parametrize("degree", DEGREES[:2])
def test_gpus_fail_together_and_do_not_hang(degree, how, words, tmp_path):
    said = processes(degree, tmp_path, _goes_wrong, how)
    for rank, text in enumerate(said):
        assert text == "gone" if how == "is gone" and rank == 1 else words in text, said
