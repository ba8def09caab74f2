"""Groups of ranks, and how bits move between them. Nothing here adds: a sum that a transport makes has an order of its own.

A group is what ``as_group`` makes of a process group or of a dimension of a DeviceMesh, or it is ``Threads``: ranks that are threads of one
process, for tests and for trying a degree that the machine has no devices for.
"""

import threading

import torch

from rlk import _errors
from rlk.parallel.peers import Peers

#: How many ranks may share a sum: what cuts eight leaves evenly.
DEGREES = (1, 2, 4, 8)
_WORDS = 448  # bytes of what ranks tell each other before data moves


class Group:
    """Ranks 0 to size - 1, in the order of the leaves that they hold."""

    def __init__(self, rank, size, check="always"):
        if size not in DEGREES:
            raise _errors.InvalidArgument(f"parallel: the group has {size} ranks, it must have 1, 2, 4 or 8: a sum has eight leaves")
        if check not in ("always", "first", "never"):
            raise _errors.InvalidArgument(f"parallel: check is {check!r}, it must be 'always', 'first' or 'never'")
        self.rank, self.size, self.check = rank, size, check
        self.peers = None  # memory that all ranks read, where there is some
        self._agreed = set()

    def gather(self, part):
        """[size, ...]: the tensor of every rank, all of one shape."""
        part = part.contiguous()
        whole = part.new_empty((self.size, *part.shape))
        if self.size == 1:
            whole[0] = part
        elif part.numel():
            self._moved("gather", self._gather, _bytes(whole), _bytes(part))
        return whole

    def exchange(self, parts):
        """[size, ...]: the r-th of every rank's [size, ...] for rank r, in the order of the ranks they come from."""
        parts = parts.contiguous()
        if self.size == 1 or not parts.numel():
            return parts
        mine = torch.empty_like(parts)
        self._moved("exchange", self._exchange, _bytes(mine), _bytes(parts))
        return mine

    def agree(self, op, words, refused=None):
        """Before data moves: every rank says what it is about to do, and whether it cannot. All fail alike where they differ, so
        that none waits for data that does not come."""
        if self.size > 1 and not (self.check == "never" and refused is None):
            self._agree(op, words, refused)
        if refused is not None:
            raise refused

    def _agree(self, op, words, refused):
        key = f"{op} {words}"
        if self.check == "first" and refused is None and key in self._agreed:
            return
        said = f"!{refused}" if refused is not None else key
        mine = torch.frombuffer(bytearray(said.encode()[:_WORDS].ljust(_WORDS)), dtype=torch.uint8)
        rows = self._moved(op, self._tell, mine)
        found = [bytes(row.tolist()).decode(errors="replace").rstrip() for row in rows]
        for r, text in enumerate(found):
            if text.startswith("!"):
                raise refused if r == self.rank else _errors.InvalidArgument(f"{op}: refused on rank {r} of {self.size}: {text[1:]}")
        for r, text in enumerate(found):
            if text != found[0]:
                raise _errors.InvalidArgument(f"{op}: ranks disagree: rank 0 has '{found[0]}', rank {r} has '{text}'")
        self._agreed.add(key)

    def _moved(self, what, move, *tensors):
        try:
            return move(*tensors)
        except _errors.Error:
            raise
        except (RuntimeError, threading.BrokenBarrierError) as error:
            said = str(error).strip().splitlines() or ["a rank is gone"]
            raise _errors.BackendError(f"{what}: rank {self.rank} of {self.size} cannot reach the others: {said[0]}") from error


def _bytes(t):
    """The memory of a tensor: transports know fewer dtypes than rlk, and must not look at any."""
    return t.view(-1).view(torch.uint8)


class Process(Group):
    """Ranks of a torch.distributed process group: NCCL, gloo or another. Where it serves GPUs alone, ranks agree by a gloo group of
    the same ranks, in which one that dies is noticed."""

    def __init__(self, group=None, check="always", timeout=None, peers=0):
        import torch.distributed as dist
        if not dist.is_initialized():
            raise _errors.InvalidArgument("parallel: torch.distributed is not initialised: call init_process_group first")
        self.dist, self.group = dist, group if group is not None else dist.group.WORLD
        super().__init__(dist.get_rank(self.group), dist.get_world_size(self.group), check)
        self.teller = self.group
        if "gloo" not in dist.get_backend(self.group) and self.size > 1:
            more = {} if timeout is None else {"timeout": timeout}
            self.teller = dist.new_group(dist.get_process_group_ranks(self.group), backend="gloo",
                                         use_local_synchronization=True, **more)
        if peers and self.size > 1:
            self.peers = Peers.of_group(self.group, self.size, self.rank, 768 << 20 if peers is True else peers, timeout)

    def _gather(self, whole, part):
        self.dist.all_gather_into_tensor(whole, part, group=self.group)

    def _exchange(self, mine, parts):
        self.dist.all_to_all_single(mine, parts, group=self.group)

    def _tell(self, mine):
        rows = mine.new_empty(self.size, len(mine))
        self.dist.all_gather_into_tensor(rows.view(-1), mine, group=self.teller)
        return rows


class Threads(Group):
    """A rank that is a thread of this process; ``run`` starts them all."""

    def __init__(self, rank, shared, check="always"):
        super().__init__(rank, shared.size, check)
        self.shared = shared

    @staticmethod
    def run(size, work, timeout=60.0, check="always"):
        """[work(group) of every rank]. The first failure that is not another's consequence is raised."""
        shared = _Shared(size, timeout)
        found, failed = [None] * size, [None] * size

        def rank(r):
            try:
                found[r] = work(Threads(r, shared, check))
            except BaseException as error:  # every rank's, to be raised below
                failed[r] = error
                shared.meeting.abort()

        threads = [threading.Thread(target=rank, args=(r,)) for r in range(size)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        errors = [e for e in failed if e is not None]
        if errors:
            raise next((e for e in errors if not isinstance(e.__cause__, threading.BrokenBarrierError)), errors[0])
        return found

    def _gather(self, whole, part):
        for to, t in zip(whole.view(self.size, -1), self._tell(part)):
            to.copy_(t)
        self.shared.barrier()  # until all have read

    def _exchange(self, mine, parts):
        for to, t in zip(mine.view(self.size, -1), self._tell(parts)):
            to.copy_(t.view(self.size, -1)[self.rank])
        self.shared.barrier()

    def _tell(self, mine):
        shared = self.shared
        shared.slots[self.rank] = mine
        shared.barrier()
        found = list(shared.slots)
        shared.barrier()
        return found


class _Shared:
    def __init__(self, size, timeout):
        self.size, self.slots = size, [None] * size
        self.meeting = threading.Barrier(size, timeout=timeout)

    def barrier(self):
        self.meeting.wait()


_groups = {}


def as_group(group=None, **options):
    """A Group of a Group, a process group, a DeviceMesh of one dimension, or None for all processes. ``check``: 'always' compares what
    ranks are about to do before each step, 'first' once for each shape, 'never' trusts them. ``timeout``: of the comparison on GPUs, and of ``peers``:
    bytes of symmetric memory on each GPU of one host, through which sums go in one kernel (``True``: 768 MiB)."""
    if isinstance(group, Group):
        return group
    if hasattr(group, "get_group") and hasattr(group, "mesh_dim_names"):
        if group.ndim != 1:
            raise _errors.InvalidArgument(f"parallel: the mesh has {group.ndim} dimensions, one is needed: mesh[name]")
        group = group.get_group()
    if group is None:
        import torch.distributed as dist
        group = dist.group.WORLD if dist.is_initialized() else None
    key = (group, tuple(sorted(options.items())))
    if key not in _groups:
        _groups[key] = Process(group, **options)
    return _groups[key]


def cut(n, degree):
    """Where the parts of a dimension of n begin, and n: part r has the leaves [8 r / degree, 8 (r + 1) / degree)."""
    if degree not in DEGREES:
        raise _errors.InvalidArgument(f"parallel: degree is {degree}, it must be 1, 2, 4 or 8")
    leaf = 16 * -(-n // 128)
    return [min(n, r * (8 // degree) * leaf) for r in range(degree + 1)]
