"""Traces: a record of every call, to hold two programs against each other with ``rlk-dispatch trace-diff``."""

import os

from rlk import _C

tracing = _C.tracing
trace_weights_changed = _C.trace_weights_changed


class trace:
    """``with rlk.trace("sampler.trace"):`` records every call of this process into a file. ``tags`` are globs, comma separated, of
    the calls to record; ``every`` keeps only rows at positions that are its multiples; with ``weights_once`` a weight is digested
    when it is met first and after trace_weights_changed(). Not while a CUDA graph is captured."""

    def __init__(self, file, *, tags=None, every=0, weights_once=False):
        self._options = os.fspath(file), tags, every, weights_once

    def __enter__(self):
        _C.trace_begin(*self._options)
        return self

    def __exit__(self, *_):
        _C.trace_end()


def trace_tag(tag):
    """What the next calls of this thread are for, a layer and a role; None: nothing is said."""
    _C.trace_tag(tag)


def trace_rows(sequences=(), positions=()):
    """Whose rows the next calls of this thread compute: the sequence and the absolute position of each. None given: nothing is
    said."""
    _C.trace_rows(sequences, positions)


def trace_tensor(name, tensor, tag=None):
    """Records what another kernel computed, under a tag of its own or the thread's. Without a trace it does nothing."""
    _C.trace_tensor(name, tensor.detach() if hasattr(tensor, "detach") else tensor, tag)
