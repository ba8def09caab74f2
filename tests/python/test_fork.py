"""Children of a process whose other threads were in the library when it forked: none hangs, and each has threads of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import rlk  # noqa: F401  (loads the library)

ROOT = Path(__file__).resolve().parents[2]
CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
FORKS_OF_EACH = 60
LATE = 60  # seconds after which a child is taken to hang


def library():
    """The library that rlk._C has loaded."""
    maps = Path("/proc/self/maps")
    text = maps.read_text() if maps.exists() else ""
    return next((line.split(maxsplit=5)[-1] for line in text.splitlines() if "librlk_registry.so" in line), None)  # paths have spaces


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """fork_calls.c as a library."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler or not library():
        pytest.skip("no C compiler is here, or no /proc")
    out = tmp_path_factory.mktemp("fork") / "fork_calls.so"
    subprocess.run([compiler, "-std=gnu11", "-O1", "-shared", "-fPIC", "-I", ROOT / "include", ROOT / "tests/python/fork_calls.c",
                    library(), f"-Wl,-rpath,{Path(library()).parent}", "-lpthread", "-o", out], check=True)
    return out


def run(program, *words):
    """A program of its own, which may not last."""
    done = subprocess.run([sys.executable, program, *map(str, words)], capture_output=True, text=True, timeout=4 * LATE,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


FORKS = """
import ctypes, os, signal, sys
import rlk
calls, kind, forks, late = ctypes.CDLL(sys.argv[1]), sys.argv[2].encode(), int(sys.argv[3]), int(sys.argv[4])
calls.prepare()
assert calls.call_once(kind) and calls.call_once(b"runs")
calls.start(kind)
for i in range(forks):
    child = os.fork()
    if child == 0:
        signal.alarm(late)
        good = calls.call_once(kind) and calls.call_once(b"runs")
        os._exit(len(os.listdir("/proc/self/task")) if good else 255)
    _, status = os.waitpid(child, 0)
    assert not os.WIFSIGNALED(status), f"the child of fork {i} hung, or died by signal {os.WTERMSIG(status)}"
    print(os.WEXITSTATUS(status))
calls.finish()
assert calls.call_once(kind) and calls.call_once(b"runs")
"""


@pytest.mark.parametrize("kind", ["saves", "scopes", "reloads", "sets_sinks", "forgets", "loads_plugins", "runs"])
def test_a_child_calls_whatever_threads_of_its_parent_were_in(kind, calls, tmp_path):
    program = tmp_path / "forks.py"
    program.write_text(FORKS)
    threads = [int(n) for n in run(program, calls, kind, FORKS_OF_EACH, LATE).split()]
    assert len(threads) == FORKS_OF_EACH and 255 not in threads
    # The parent's helpers are not there in a child, which starts its own for a call of this size.
    assert CPUS == 1 or all(n > 1 for n in threads)


FIRST_CALL = """
import ctypes, os, signal, sys
import rlk
calls = ctypes.CDLL(sys.argv[1])
calls.prepare()
assert calls.first_run_at_fork()
child = os.fork()
if child == 0:
    signal.alarm(int(sys.argv[2]))
    os._exit(len(os.listdir("/proc/self/task")) if calls.call_once(b"runs") else 255)
_, status = os.waitpid(child, 0)
assert not os.WIFSIGNALED(status), f"the child hung, or died by signal {os.WTERMSIG(status)}"
print(os.WEXITSTATUS(status))
"""


def test_the_helpers_of_a_first_call_while_the_process_forks_are_not_the_child_s(calls, tmp_path):
    program = tmp_path / "first.py"
    program.write_text(FIRST_CALL)
    threads = int(run(program, calls, LATE))
    assert threads != 255 and (CPUS == 1 or threads > 1)


PROCESSES = """
import multiprocessing, os, sys, threading
import numpy, rlk
h, w = numpy.ones((64, 256), numpy.float32), numpy.ones((300, 256), numpy.float32)

def work(n):
    logits = rlk.lm_head(h, w)
    kept = rlk._C.save(h, "h")
    try:
        rlk.lm_head(h, w, out=h)
        refused = False
    except rlk.Error:
        refused = True
    rlk._C.release(kept)
    with rlk.precision("golden"), rlk.backend("lm_head=native"):
        golden = rlk.lm_head(h, w)
    return float(logits[0, n]), float(golden[63, n]), refused, len(os.listdir("/proc/self/task"))

def keep_calling():
    while True:
        work(0)

if __name__ == "__main__":
    for _ in range(2):
        threading.Thread(target=keep_calling, daemon=True).start()
    for _ in range(int(sys.argv[2])):
        with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
            for answer in pool.map(work, range(8)):
                print(*answer)
            assert all((out == 256).all() for out in pool.starmap(rlk.lm_head, [(h, w)] * 4))  # an op itself is handed on
"""


@pytest.mark.parametrize("method, pools", [("fork", 6), ("spawn", 1), ("forkserver", 1)])
def test_workers_of_multiprocessing_call(method, pools, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROCESSES)
    answers = [line.split() for line in run(program, method, pools).splitlines()]
    assert len(answers) == 8 * pools
    for logit, golden, refused, threads in answers:
        assert (float(logit), float(golden), refused) == (256.0, 256.0, "True")
        # A worker is one thread; what more there is are the library's, which must be the child's own. (numpy starts none here.)
        assert CPUS == 1 or int(threads) > 1


LOADER = """
import os, sys, threading
import numpy, torch, rlk
h, w = numpy.ones((64, 256), numpy.float32), numpy.ones((300, 256), numpy.float32)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, i):
        before = len(os.listdir("/proc/self/task"))
        plain = rlk.lm_head(h * i, w)
        after = len(os.listdir("/proc/self/task"))
        same = bool((torch_face(float(i)).numpy() == plain).all())
        return torch.tensor([plain[0, 0], same, torch.utils.data.get_worker_info().id, before, after])

def torch_face(value):
    return rlk.torch.lm_head(torch.full((64, 256), value), torch.ones(300, 256))

def keep_calling():
    while not stop:
        torch_face(1.0)

if __name__ == "__main__":
    stop = False
    torch_face(1.0)  # a thread that imports while another forks holds a lock of Python's, which no child gets
    caller = threading.Thread(target=keep_calling)
    caller.start()
    try:
        for _ in range(3):
            loader = torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=60)
            for row in torch.cat(list(loader)).int().tolist():
                print(*row)
    finally:
        stop = True
        caller.join()
"""


def test_workers_of_a_data_loader_call(tmp_path):
    pytest.importorskip("torch")
    program = tmp_path / "program.py"
    program.write_text(LOADER)
    rows = [list(map(int, line.split())) for line in run(program).splitlines()]
    assert [r[0] for r in rows] == [256 * i for i in range(16)] * 3
    assert all(same for _, same, *_ in rows) and {r[2] for r in rows} == {0, 1}
    first = {}  # of each worker: how many threads it had before its first call, and after
    for _, _, worker, before, after in rows[:16]:
        first.setdefault(worker, (before, after))
    assert CPUS == 1 or all(after > before for before, after in first.values())


THREADS = """
import os, sys, torch, rlk.torch
torch.set_num_threads(int(sys.argv[1]))
h, w = torch.ones(64, 256), torch.ones(300, 256)
before = len(os.listdir("/proc/self/task"))
rlk.torch.lm_head(h, w)
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(CPUS == 1 or not Path("/proc/self/task").exists(), reason="counts threads")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_call_takes_as_many_threads_as_torch_does(threads, tmp_path):
    pytest.importorskip("torch")
    program = tmp_path / "program.py"
    program.write_text(THREADS)
    assert int(run(program, threads)) == threads - 1
