"""Sums over GPUs of one host that write into each other's memory: one kernel moves the parts, adds them as ``tp_sum`` does and moves results.

The kernel is in librlk_peers.so (src/python/peers), which a build with CUDA has. Ranks wait for each other inside it, by flags; it needs
nothing of the host, so it may be captured in a graph. A rank that waits longer than the group's timeout fails, and says for whom.
"""

import ctypes
import datetime
import functools
import os
from pathlib import Path

import torch

from rlk import _errors

#: Products of at least so many rows for each rank are made share by share, each copied to the rank that adds it while the next is made.
LANDED = 512
#: Parts of at most so many bytes for each other rank travel whole, each four bytes beside a number; larger ones by shares. Only time depends on it.
WORDS = 1 << 20

_WAYS = {"words": 0, "shared": 1, "landed": 2}
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_SLOT, _WORD_SLOT = 8192, 1024  # elements
_BLOCKS = (256, 128, 64, 32, 16)


class _Sum(ctypes.Structure):
    """As peers/sum.hpp has it."""

    _fields_ = [*[(name, ctypes.c_int64) for name in ("count", "each", "width")],
                *[(name, ctypes.c_void_p) for name in ("part", "y", "bias", "residual")], ("memory", ctypes.c_void_p * 8),
                ("landing", ctypes.c_int64), ("late", ctypes.c_void_p), ("nanoseconds", ctypes.c_uint64),
                *[(name, ctypes.c_int32) for name in ("ranks", "rank", "type", "spread", "way", "chunk", "blocks", "room")]]


@functools.cache
def library():
    file = Path(__file__).parent.parent / "librlk_peers.so"
    if not file.exists():
        raise _errors.Unsupported("parallel: peers asks for sums through GPUs' memory, this build of rlk has no CUDA")
    found = ctypes.CDLL(str(file))
    found.rlk_peers_bytes.restype = ctypes.c_int64
    found.rlk_peers_sum.restype = ctypes.c_char_p
    found.rlk_peers_sum.argtypes = [ctypes.POINTER(_Sum), ctypes.c_void_p, ctypes.c_int]
    return found


def blocks_in(nbytes, size):
    """How many blocks of a kernel have their slots in half of so much memory; the fewest may have it all."""
    for blocks in _BLOCKS:
        if library().rlk_peers_bytes(size, blocks) * 2 <= nbytes:
            return blocks
    least = library().rlk_peers_bytes(size, _BLOCKS[-1])
    if least <= nbytes:
        return _BLOCKS[-1]
    raise _errors.InvalidArgument(f"parallel: peers is {nbytes} bytes, {size} ranks need {least}")


def _dense(t):
    """Rows beside each other, on sixteen bytes."""
    if t is None or t.is_contiguous() and t.data_ptr() % 16 == 0:
        return t
    return t.clone(memory_format=torch.contiguous_format)


class Peers:
    """One rank's side. `memory`: each rank's as this GPU reaches it, in bytes, zero at first and laid out for `blocks`; behind that parts land."""

    def __init__(self, memory, rank, blocks, timeout, owner=None):
        self.size, self.rank, self.memory, self.owner, self.timeout = len(memory), rank, memory, owner, timeout
        self.beside = torch.cuda.Stream(memory[rank].device)
        self.landing = -(-library().rlk_peers_bytes(self.size, blocks) // 256) * 256
        self.late = torch.zeros(1, dtype=torch.int32, pin_memory=True, device="cpu")
        self.call = _Sum(memory=(ctypes.c_void_p * 8)(*[m.data_ptr() for m in memory]), landing=self.landing, late=self.late.data_ptr(), nanoseconds=int(timeout.total_seconds() * 1e9),
                         ranks=self.size, rank=rank, room=blocks)

    @staticmethod
    def of_group(group, size, rank, nbytes, timeout=None):
        """In PyTorch's symmetric memory, on GPUs that reach each other's."""
        import torch.distributed._symmetric_memory as symmetric
        # Nothing here is added by a switch, and setting up what could can put a host's GPUs out of service.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        timeout, blocks = timeout or datetime.timedelta(minutes=10), blocks_in(nbytes, size)
        own = symmetric.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device()))
        handle = symmetric.rendezvous(own, group)
        own.zero_()
        handle.barrier(channel=0, timeout_ms=int(timeout.total_seconds() * 1000))
        torch.cuda.synchronize()
        return Peers([handle.get_buffer(r, [nbytes], torch.uint8) for r in range(size)], rank, blocks, timeout, (own, handle))

    @staticmethod
    def takes(part, dtype):
        """Whether the kernel sums rows of this width and dtype."""
        return part.is_cuda and part.numel() > 0 and part.shape[1] % 8 == 0 and dtype in _TYPES

    def sum(self, part, dtype, bias=None, residual=None, spread=False, way=None):
        """The sum, of which `part` [M, N] is this rank's; with `spread` this rank's rows of it."""
        part = _dense(part)
        way = "shared" if spread else way or ("words" if part.numel() * 4 * (self.size - 1) <= WORDS else "shared")
        return self._sum(part, *part.shape, dtype, bias, residual, spread, way)

    def lands(self, x, width):
        """Whether parts of so many columns for each row of x are made share by share, by `land`."""
        rows = len(x)
        return (x.is_cuda and x.dtype in _TYPES and rows >= LANDED * self.size and width > 0 and width % 8 == 0
                and self.size * -(-rows // self.size) * width * 4 <= len(self.memory[0]) - self.landing)

    def places(self, rows, width):
        """(rows, where this rank's part of them goes) of all ranks' shares, this rank's at last. When `landed` is called they are complete in
        the order of the stream, and none is written before the last sum is over."""
        share = -(-rows // self.size)
        for n in range(1, self.size + 1):  # none is written to by all at once
            r = (self.rank + n) % self.size
            some = slice(min(rows, r * share), min(rows, (r + 1) * share))
            at = self.landing + self.rank * share * width * 4
            if some.stop > some.start:
                yield some, self.memory[r][at:at + (some.stop - some.start) * width * 4].view(torch.float32).view(-1, width)

    def land(self, rows, width, make):
        """Parts by make(rows, to) or make(rows), each copied to its place beside the next one's product."""
        main = torch.cuda.current_stream(self.memory[0].device)
        places = list(self.places(rows, width))
        for some, to in places[:-1]:
            part = make(some)
            self.beside.wait_stream(main)
            part.record_stream(self.beside)
            with torch.cuda.stream(self.beside):
                to.copy_(part, non_blocking=True)
        make(*places[-1])
        main.wait_stream(self.beside)

    def landed(self, rows, width, dtype, bias=None, residual=None, spread=False):
        """The sum of parts [rows, width] that all ranks wrote to `places`."""
        return self._sum(None, rows, width, dtype, bias, residual, spread, "landed")

    def _sum(self, part, rows, width, dtype, bias, residual, spread, way):
        self.check()
        bias, residual = _dense(bias), _dense(residual)
        share = -(-rows // self.size)
        mine = min(rows, (self.rank + 1) * share) - min(rows, self.rank * share) if spread else rows
        y = self.memory[self.rank].new_empty(mine, width, dtype=dtype)
        c, count = self.call, rows * width
        c.count, c.width, c.each = count, width, share * width if spread or way == "landed" else -(-count // (8 * self.size)) * 8
        c.part, c.y, c.type, c.spread, c.way = None if part is None else part.data_ptr(), y.data_ptr(), _TYPES[dtype], spread, _WAYS[way]
        c.bias, c.residual = (None if t is None else t.data_ptr() for t in (bias, residual))
        c.chunk, c.blocks = self._grid(way, count if way == "words" else c.each)
        failed = library().rlk_peers_sum(ctypes.byref(c), torch.cuda.current_stream(y.device).cuda_stream, y.device.index)
        if failed:
            raise _errors.BackendError(f"parallel: a sum over {self.size} ranks cannot start: {failed.decode()}")
        return y

    def _grid(self, way, count):
        """Elements of a step and blocks: few elements are cut finer, so that more blocks move them."""
        if way == "words":
            return _WORD_SLOT, min(self.call.room, -(-count // _WORD_SLOT))
        chunk, most = _SLOT, self.call.room  # two on each multiprocessor: while one waits, the other moves
        while chunk > 1024 and -(-count // chunk) * 2 <= most:
            chunk //= 2
        return chunk, min(most, -(-count // chunk))

    def check(self):
        """Raises where a sum waited in vain; the GPU's own error comes where its stream is waited for."""
        late = int(self.late[0])
        if late:
            raise _errors.BackendError(f"parallel: rank {self.rank} of {self.size} waited {self.timeout.total_seconds():g} s in a sum for rank {late - 1}, "
                                       "which did not come")
