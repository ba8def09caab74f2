"""rlk over several ranks: degrees 1, 2, 4 and 8 have one set of bits. Also ``rlk.torch.parallel``.

    group = rlk.parallel.as_group(mesh["tp"])              # a process group, a DeviceMesh of one dimension, None: all processes
    y = rlk.parallel.column_linear(x, shard_of_w1, group=group)
    z = rlk.parallel.row_linear(y, shard_of_w2, residual=x, group=group)
"""

from rlk.parallel.context import attention, cached_attention
from rlk.parallel.ops import (column_linear, embedding, gather_rows, gathered, join, linear_logp, lm_head, own_heads, part, rms_norm, row_linear,
                              rows_of, sample, shard, spread, to_heads, unshard)
from rlk.parallel.transport import DEGREES, Group, Process, Threads, as_group, cut


def __getattr__(name):
    if name in ("decoder", "reshard", "state", "whole"):  # rlk.model is imported when a model is spread
        from rlk.parallel import model
        return getattr(model, name)
    raise AttributeError(f"module 'rlk.parallel' has no attribute '{name}'")
