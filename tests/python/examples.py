"""Small calls of every op that are known to be right, as the registry gives them, with data."""

import json
import re
from pathlib import Path

import numpy
from rlk import _C

# Plugins may add ops, of which there are no examples.
ALL = _C.ops()
BUILT_IN = re.findall(r"RLK_OP\((\w+)\)", (Path(__file__).parents[2] / "registry/ops.def").read_text())


def examples(op, dtypes):
    """(name, {tensor: array}, [results], {attribute: value}) whose tensors have these dtypes only."""
    out = []
    for e in json.loads(_C.examples_json(op))["examples"]:
        if all(t["dtype"] in dtypes for t in e["tensors"]):
            tensors = {t["name"]: data(t["name"], t["shape"], t["dtype"], t.get("values"), t.get("range")) for t in e["tensors"]}
            out.append((e["name"], tensors, [r["name"] for r in e["results"]], attributes(op, e["attributes"])))
    return out


def attributes(op, given):
    kinds = {a["name"]: a["type"] for a in _C.schema(op)["attributes"]}
    return {n: bool(v) if kinds[n] == "flag" else float(v) if kinds[n] == "float" else v for n, v in given.items()}


def data(name, shape, dtype, values=None, range=None):
    random = numpy.random.default_rng(len(name))
    kind = {"fp32": "float32", "fp16": "float16", "bf16": "float32"}.get(dtype, dtype)
    if values:
        return numpy.resize(values, shape).astype(kind)
    if range:
        return random.integers(*range, shape, dtype)
    if dtype.startswith("int"):
        return numpy.arange(numpy.prod(shape), dtype=dtype).reshape(shape)
    values = random.uniform(-1, 1, shape)
    if name in ("g", "beta"):  # log decays and strengths
        values = -abs(values) if name == "g" else abs(values)
    return values.astype(kind)
