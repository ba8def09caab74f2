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

#: Parts of at most so many bytes for each other rank travel whole, each four bytes beside a number; larger ones by shares. Only time depends on it.
WORDS = 1 << 20

_WAYS = {"words": 0, "shared": 1}
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_SLOT, _WORD_SLOT = 8192, 1024  # elements
_BLOCKS = (256, 128, 64, 32, 16)


class _Sum(ctypes.Structure):
    """As peers/sum.hpp has it."""

    _fields_ = [*[(name, ctypes.c_int64) for name in ("count", "each", "width")],
                *[(name, ctypes.c_void_p) for name in ("part", "y", "bias", "residual")], ("memory", ctypes.c_void_p * 8),
                ("late", ctypes.c_void_p), ("nanoseconds", ctypes.c_uint64),
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
    """How many blocks of a kernel have their slots in so much memory."""
    for blocks in _BLOCKS:
        if library().rlk_peers_bytes(size, blocks) <= nbytes:
            return blocks
    least = library().rlk_peers_bytes(size, _BLOCKS[-1])
    raise _errors.InvalidArgument(f"parallel: peers is {nbytes} bytes, {size} ranks need {least}")


def _dense(t):
    """Rows beside each other, on sixteen bytes."""
    if t is None or t.is_contiguous() and t.data_ptr() % 16 == 0:
        return t
    return t.clone(memory_format=torch.contiguous_format)


class Peers:
    """One rank's side. `addresses`: of each rank's memory as this GPU reaches it, zero at first and laid out for `blocks`."""

    def __init__(self, addresses, rank, blocks, timeout, owner):
        self.size, self.rank, self.owner, self.timeout = len(addresses), rank, owner, timeout
        self.late = torch.zeros(1, dtype=torch.int32, pin_memory=True, device="cpu")
        self.call = _Sum(memory=(ctypes.c_void_p * 8)(*addresses), late=self.late.data_ptr(), nanoseconds=int(timeout.total_seconds() * 1e9),
                         ranks=self.size, rank=rank, room=blocks)

    @staticmethod
    def of_group(group, size, rank, nbytes, timeout=None):
        """In PyTorch's symmetric memory, on GPUs that reach each other's."""
        import torch.distributed._symmetric_memory as symmetric
        # Nothing here is added by a switch, and setting up what could can put a host's GPUs out of service.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        timeout, blocks = timeout or datetime.timedelta(minutes=10), blocks_in(nbytes, size)
        bytes_ = library().rlk_peers_bytes(size, blocks)
        own = symmetric.empty(bytes_, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device()))
        handle = symmetric.rendezvous(own, group)
        own.zero_()
        handle.barrier(channel=0, timeout_ms=int(timeout.total_seconds() * 1000))
        torch.cuda.synchronize()
        addresses = [handle.get_buffer(r, [bytes_], torch.uint8).data_ptr() for r in range(size)]
        return Peers(addresses, rank, blocks, timeout, (own, handle))

    @staticmethod
    def takes(part, dtype):
        """Whether the kernel sums rows of this width and dtype."""
        return part.is_cuda and part.numel() > 0 and part.shape[1] % 8 == 0 and dtype in _TYPES

    def sum(self, part, dtype, bias=None, residual=None, spread=False, way=None):
        """The sum, of which `part` [M, N] is this rank's; with `spread` this rank's rows of it."""
        self.check()
        part, bias, residual = (_dense(t) for t in (part, bias, residual))
        rows, width = part.shape
        share = -(-rows // self.size)
        mine = min(rows, (self.rank + 1) * share) - min(rows, self.rank * share) if spread else rows
        y = part.new_empty(mine, width, dtype=dtype)
        c, count = self.call, part.numel()
        way = "shared" if spread else way or ("words" if count * 4 * (self.size - 1) <= WORDS else "shared")
        c.count, c.width, c.each = count, width, share * width if spread else -(-count // (8 * self.size)) * 8
        c.part, c.y, c.type, c.spread, c.way = part.data_ptr(), y.data_ptr(), _TYPES[dtype], spread, _WAYS[way]
        c.bias, c.residual = (None if t is None else t.data_ptr() for t in (bias, residual))
        c.chunk, c.blocks = self._grid(way, c.each if way == "shared" else count)
        failed = library().rlk_peers_sum(ctypes.byref(c), torch.cuda.current_stream(part.device).cuda_stream, part.device.index)
        if failed:
            raise _errors.BackendError(f"parallel: a sum over {self.size} ranks cannot start: {failed.decode()}")
        return y

    def _grid(self, way, count):
        """Elements of a step and blocks: few elements are cut finer, so that more blocks move them."""
        if way == "words":
            return _WORD_SLOT, min(self.call.room, -(-count // _WORD_SLOT))
        chunk, most = _SLOT, min(self.call.room, 128)  # more gain nothing
        while chunk > 1024 and -(-count // chunk) * 2 <= most:
            chunk //= 2
        return chunk, min(most, -(-count // chunk))

    def check(self):
        """Raises where a sum waited in vain; the GPU's own error comes where its stream is waited for."""
        late = int(self.late[0])
        if late:
            raise _errors.BackendError(f"parallel: rank {self.rank} of {self.size} waited {self.timeout.total_seconds():g} s in a sum for rank {late - 1}, "
                                       "which did not come")
