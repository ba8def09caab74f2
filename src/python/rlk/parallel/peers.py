"""Memory that every rank of one host can read: partial sums are written there and read from there, with no transport between.

Each rank's memory has two halves that take turns, so that a rank may write the next sum while another still reads the last one; a barrier
stands between writing and reading. A captured graph begins with the same half whenever it is replayed: there a second barrier
follows the reading.
"""

import datetime
import os

import torch

_ALIGNED = 256


class Peers:
    """`memory` has view(rank, at, shape, dtype) and barrier(): ``Symmetric`` on GPUs, threads' in tests."""

    def __init__(self, memory, size, rank, nbytes):
        self.memory, self.size, self.rank, self.half, self.turn = memory, size, rank, nbytes // 2 // _ALIGNED * _ALIGNED, 0

    def fits(self, rows, width, out_bytes):
        """Whether a sum's parts and its results have room in half of the memory."""
        return rows * width > 0 and self._results_at(rows, width) + -(-rows // self.size) * width * out_bytes <= self.half

    @staticmethod
    def _results_at(rows, width):
        return -(-rows * width * 4 // _ALIGNED) * _ALIGNED

    def room(self, rows, width):
        """Where this rank's part of the next sum goes."""
        return self.memory.view(self.rank, self.turn * self.half, (rows, width), torch.float32)

    def sum(self, part, add, own, dtype, few, spread, to=None):
        """The sum, of which `part` is this rank's; add(parts, rows) adds those rows. `own`: this rank's rows."""
        rows, width = part.shape
        at, self.turn = self.turn * self.half, 1 - self.turn
        mine = self.memory.view(self.rank, at, (rows, width), torch.float32)
        if mine.data_ptr() != part.data_ptr():
            mine.copy_(part)
        self.memory.barrier()
        parts = [self.memory.view(r, at, (rows, width), torch.float32) for r in range(self.size)]
        if few:
            y = add(parts, slice(None), to)
        elif spread:
            y = add([p[own] for p in parts], own)
        else:
            each, at = -(-rows // self.size), at + self._results_at(rows, width)
            results = [self.memory.view(r, at, (each, width), dtype) for r in range(self.size)]
            add([p[own] for p in parts], own, results[self.rank][:own.stop - own.start])
            self.memory.barrier()
            y = torch.cat([t[:max(0, rows - r * each)] for r, t in enumerate(results)], out=to)
        if self.memory.replayed():
            self.memory.barrier()
        return y


class Symmetric:
    """PyTorch's symmetric memory, on GPUs that reach each other's. A rank that does not come to a barrier within `timeout` is an error of
    the others' streams."""

    cuda = True

    def __init__(self, group, nbytes, timeout=None):
        import torch.distributed._symmetric_memory as symmetric
        # Nothing here is added by a switch, and setting up what could can put a host's GPUs out of service.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self.milliseconds = int((timeout or datetime.timedelta(minutes=10)).total_seconds() * 1000)
        self.own = symmetric.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device()))
        self.handle = symmetric.rendezvous(self.own, group)

    def view(self, rank, at, shape, dtype):
        return self.handle.get_buffer(rank, list(shape), dtype, at // dtype.itemsize)

    def barrier(self):
        self.handle.barrier(channel=0, timeout_ms=self.milliseconds)

    @staticmethod
    def replayed():
        return torch.cuda.is_current_stream_capturing()
