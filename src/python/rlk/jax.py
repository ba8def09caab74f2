"""Every op for jax on CPUs: under jit, with gradients.

    logits = jax.jit(rlk.jax.lm_head)(hidden, weight)
    jax.grad(lambda w: rlk.jax.lm_head(hidden, w).sum())(weight)

Nothing is written per op: an op is one XLA custom call, its results' shapes come from the registry, its gradient from the op's
backward and what that needs saved. Arguments and results are as in ``rlk.torch``; attributes and options are Python's own values.
An op in place (``rope_``) gives what it would have changed as a new array, behind its results if it has any (``kda_step``). Scopes
hold where a call is traced, for its gradient too.
"""

import json
import struct
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy
from jax.custom_derivatives import SymbolicZero

from rlk import _C, _errors, _scopes
from rlk._memory import Spec

_DTYPES = {"fp16": jnp.float16, "bf16": jnp.bfloat16, "fp32": jnp.float32, "fp64": jnp.float64, "int32": jnp.int32,
           "int64": jnp.int64, "uint8": jnp.uint8, "bool": jnp.bool_,
           "fp8_e4m3": jnp.float8_e4m3fn}
_NAMES = {jnp.dtype(d): n for n, d in _DTYPES.items()}
_OPTIONS = ("backend", "arithmetic", "precision", "deterministic", "threads", "evidence")

if not hasattr(jax, "ffi"):
    raise _errors.Unsupported(f"rlk.jax needs jax 0.5 or newer, this is {jax.__version__}")
jax.ffi.register_ffi_target("rlk", _C.xla_handler(), platform="cpu")


class Schema:
    """What the registry says of an op, as this module needs it."""

    def __init__(self, name):
        described = _C.schema(name)
        self.name, self.op = name, described["name"]
        self.arguments, self.attributes = described["arguments"], described["attributes"]
        self.backward = described["backward"]
        self.aliases = [a.partition(":")[0] for a in described["aliases"].split(",") if a]
        self.slots = {a["name"]: i for i, a in enumerate(self.arguments)}
        self.inputs = [a for a in self.arguments if a["role"] != 1]
        self.results = [a for a in self.arguments if a["role"] == 1]
        self.changed = [a["name"] for a in self.arguments if a["role"] == 2]
        self.attribute_names = {a["name"] for a in self.attributes}

    def bits(self, given):
        """All attributes as the words of a call."""
        words = []
        for a in self.attributes:
            value = given.get(a["name"])
            value = a["default"] if value is None else value
            if a["type"] == "choice" and isinstance(value, str):
                choices = a["choices"].split("|")
                if value not in choices:
                    raise _errors.InvalidArgument(f"{self.name}: {a['name']} is '{value}', it is one of {a['choices']}")
                value = choices.index(value)
            words.append(struct.unpack("q", struct.pack("d", value))[0] if a["type"] == "float" else int(value))
        return numpy.array(words, numpy.int64)


@lru_cache(maxsize=None)
def _schema(name):
    return Schema(name)


class _Config(NamedTuple):
    """All of a call that is no array; equal calls are traced once."""

    op: str
    names: tuple  # of the inputs
    results: tuple  # (name, dtype)
    attributes: tuple  # (name, value)
    options: tuple  # (name, value)
    scopes: tuple  # (precision, backend), the outer ones first


def _spec(array):
    if array.dtype not in _NAMES:
        raise _errors.InvalidArgument(f"rlk takes no {array.dtype} arrays")
    return Spec(array.shape, _NAMES[array.dtype])


def _infer(op, inputs, attributes):
    return _C.infer(op, **{n: _spec(x) for n, x in inputs.items()}, **attributes)


def _run(config, *arrays):
    """The custom call."""
    schema, inputs = _schema(config.op), dict(zip(config.names, arrays))
    shapes = _infer(config.op, inputs, dict(config.attributes))
    outputs = [*config.results, *((n, _NAMES[inputs[n].dtype]) for n in schema.changed if n in inputs)]
    types = [jax.ShapeDtypeStruct(shapes[n][0], _DTYPES[dtype]) for n, dtype in outputs]
    aliases = {config.names.index(n): i for i, (n, _) in enumerate(outputs) if n in inputs}
    options = dict(config.options)
    call = jax.ffi.ffi_call("rlk", types, vmap_method="sequential", input_output_aliases=aliases)
    return tuple(call(
        *arrays, op=config.op, attributes=schema.bits(dict(config.attributes)),
        inputs=numpy.array([schema.slots[n] for n in config.names], numpy.int64),
        results=numpy.array([schema.slots[n] for n, _ in outputs], numpy.int64),
        options=numpy.array([bool(options.get("deterministic")), options.get("threads") or 0, bool(options.get("evidence"))],
                            numpy.int64),
        scopes="".join(f"{precision or ''}|{backend or ''}\n" for precision, backend in config.scopes),
        **{n: options.get(n) or "" for n in ("backend", "arithmetic", "precision")}))


# ---- gradients --------------------------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(config, *arrays):
    return _run(config, *arrays)


# Eager calls are compiled ones too: shard_map runs no such function of its own accord.
_compiled = jax.jit(_differentiable, static_argnums=0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_within(config, *arrays):
    """What a gradient runs."""
    return _run(config, *arrays)


def _refuse_second(config, *arrays):
    raise _errors.Unsupported(f"{config.op}: a second gradient is asked for, an op here has one alone")


_run_within.defvjp(_refuse_second, lambda config, residuals, cotangents: None)


def _forward(config, *primals):
    schema = _schema(config.op)
    arrays = [p.value for p in primals]
    needed = tuple(n for n, p in zip(config.names, primals) if p.perturbed and jnp.issubdtype(p.value.dtype, jnp.floating))
    kinds = {a["name"]: a for a in schema.inputs}
    for name in needed:
        if not schema.backward or not kinds[name]["differentiable"]:
            why = f"{name} has no gradient" if schema.backward else "this op has no gradient"
            raise _errors.Unsupported(f"{schema.name}: a gradient of {name} is asked for, {why}")
    if needed:
        gradients = {a["name"] for a in _schema(schema.backward).results}
        for name in config.names:
            if kinds[name]["differentiable"] and f"d_{name}" not in gradients:
                raise _errors.Unsupported(f"{schema.name}: {name} is given and a gradient is asked for, {schema.backward} has no "
                                          f"d_{name}: compute without {name}")
    whole = config._replace(results=config.results + _kept(config, arrays)) if schema.backward else config
    outputs = _run_within(whole, *arrays)
    known = dict(zip(config.names, arrays)) | dict(zip((n for n, _ in whole.results), outputs))
    kept = {a["name"]: known[a["name"]] for a in schema.arguments if a["saved"] and a["name"] in known}
    # Which gradients are needed, as the size of an empty array: of a jitted call jax remembers one tree of what is kept, that of the
    # last trace, whichever gradients another trace of it needs. Shapes are each trace's own.
    mask = sum(1 << i for i, n in enumerate(config.names) if n in needed)
    return outputs[:len(config.results)], (kept, numpy.zeros((mask, 0), bool), _Static((a.shape, a.dtype) for a in arrays))


def _kept(config, arrays):
    """Results that nobody asked for and the backward has."""
    names = [a["name"] for a in _schema(config.op).results if a["kept"] and a["name"] not in dict(config.results)]
    shapes = _infer(config.op, dict(zip(config.names, arrays)), dict(config.attributes)) if names else {}
    return tuple((n, shapes[n][1]) for n in names if n in shapes)


@jax.tree_util.register_static
class _Static(tuple):
    """A constant of what is traced."""


def _backward(config, residuals, cotangents):
    kept, marks, primals = residuals
    needed = tuple(n for i, n in enumerate(config.names) if marks.shape[0] >> i & 1)
    schema = _schema(config.op)
    backward = _schema(schema.backward) if needed else None
    found = _gradients(config, backward, kept, needed, cotangents) if needed else {}
    out = []
    for name, (shape, dtype) in zip(config.names, primals):
        if name in found:
            out.append(found[name].astype(dtype))
        elif jnp.issubdtype(dtype, jnp.floating):
            out.append(jnp.zeros(shape, dtype))
        else:
            out.append(numpy.zeros(shape, jax.dtypes.float0))
    return tuple(out)


def _gradients(config, backward, kept, needed, cotangents):
    given = {f"d_{n}": c for (n, _), c in zip(config.results, cotangents)}
    # What goes with a gradient that nobody wants: d_k_out with d_k.
    unwanted = {a["follows"] for a in backward.results if a["follows"] and a["name"][2:] not in needed}
    inputs = {}
    for a in backward.inputs:
        name = a["name"]
        if name in kept:
            inputs[name] = kept[name]
        elif name in given and name not in unwanted:
            zero = isinstance(given[name], SymbolicZero)
            if not zero:
                inputs[name] = given[name]
            elif not a["optional"]:
                inputs[name] = jnp.zeros(given[name].aval.shape, given[name].aval.dtype)
    attributes = {n: v for n, v in config.attributes if n in backward.attribute_names}
    shapes = _infer(backward.op, inputs, attributes)
    results = []
    for a in backward.results:
        wanted = a["name"][2:] in needed and (not a["follows"] or a["follows"] in inputs)
        if a["name"] in shapes and (wanted or not a["optional"]):
            results.append((a["name"], shapes[a["name"]][1]))
    options = _for_backward(backward.op, dict(config.options))
    call = _Config(backward.op, tuple(inputs), tuple(results), tuple(attributes.items()), tuple(options.items()),
                   config.scopes)
    found = dict(zip((n[2:] for n, _ in results), _run_within(call, *inputs.values())))
    return {n: g for n, g in found.items() if n in needed}


def _for_backward(op, options):
    """What names implementations or arithmetics that only the forward has is left to the registry, but for a chain whose gradients are
    summed as a tree."""
    from rlk._tools import implementations
    mine = [i for i in implementations() if i["op"] == op]
    known = {i["arithmetic"] for i in mine}
    if options.get("arithmetic") not in known:
        tree = f"{options.get('arithmetic')}/tree8"
        options["arithmetic"] = tree if tree in known else None
    if options.get("backend") and "." in options["backend"]:
        known = {i["id"] for i in mine}
        options["backend"] = ":".join(w if w in known else w.partition(".")[0] for w in options["backend"].split(":"))
    return options


_differentiable.defvjp(_forward, _backward, symbolic_zeros=True)


# ---- the functions ----------------------------------------------------------------------------------------------------------


def _function(schema):
    names = [a["name"] for a in schema.inputs]
    result_names = {a["name"] for a in schema.results}

    def op(*args, **keywords):
        if len(args) > len(names):
            raise TypeError(f"{schema.name} takes {len(names)} arguments by position, {len(args)} were given")
        given, asked, attributes, options = dict(zip(names, args)), {}, dict(preset), {}
        for name, value in keywords.items():
            kind = (given if name in names else asked if name in result_names
                    else attributes if name in schema.attribute_names else options if name in _OPTIONS else None)
            if kind is None:
                raise _errors.UnknownName(f"{schema.name}: no argument, attribute or option is called '{name}'")
            if name in given and name in names[:len(args)]:
                raise TypeError(f"{schema.name} got {name} twice")
            kind[name] = value
        inputs = {n: jnp.asarray(x) for n, x in given.items() if x is not None}
        for a in schema.inputs:
            if not a["optional"] and a["name"] not in inputs:
                raise _errors.InvalidArgument(f"{schema.name}: {a['name']} is missing")
        attributes = {n: v for n, v in attributes.items() if v is not None}
        results = _wanted(schema, inputs, asked, _infer(schema.op, inputs, attributes))
        options = {n: v for n, v in options.items() if v is not None}
        if options:
            _check(schema, inputs, dict(results), attributes, options)
        attributes = {n: v.item() if hasattr(v, "item") else v for n, v in attributes.items()}  # numpy's and jax's own scalars
        config = _Config(schema.op, tuple(inputs), results, tuple(sorted(attributes.items())),
                         tuple(sorted(options.items())), _scopes.options_of_scopes())
        out = _compiled(config, *inputs.values())
        return out[0] if len(out) == 1 else out

    preset = _preset(schema)
    op.__name__ = op.__qualname__ = schema.name
    op.__doc__ = _C.op(schema.name).__doc__
    op.__text_signature__ = _C.op(schema.name).__text_signature__
    return op


def _check(schema, inputs, results, attributes, options):
    """What a call's options ask for is there, or an error now: under jit what fails later is jax's own error."""
    told = _C.resolve(schema.op, **{n: _spec(x) for n, x in inputs.items()}, **results, **attributes, **options)
    found = json.loads(told)
    if found["error"]:
        raise _errors.make(found["code"], found["error"], told)


def _wanted(schema, inputs, asked, shapes):
    """The results of a call with their dtypes: those that must be, that follow an argument, or are asked for."""
    out = []
    for a in schema.results:
        name, word = a["name"], asked.get(a["name"])
        if word is None or word is False:
            if a["optional"] and (not a["follows"] or a["follows"] not in inputs):
                continue
            word = True
        if hasattr(word, "__dlpack__"):
            raise _errors.InvalidArgument(f"{schema.name}: {name} is given to be written, jax's arrays never change: leave it out")
        if name not in shapes:
            raise _errors.InvalidArgument(f"{schema.name}: {name} is asked for, this call cannot have it")
        if word is True:
            word = shapes[name][1]
        elif not isinstance(word, str):
            word = _NAMES.get(jnp.dtype(word), str(word))
        if word not in shapes[name][2]:
            raise _errors.InvalidArgument(f"{schema.name}: {name} is asked for in {word}, it is one of {', '.join(shapes[name][2])}")
        if word in ("fp64", "int64") and not jax.config.jax_enable_x64:
            raise _errors.InvalidArgument(f"{schema.name}: {name} is asked for in {word}, which jax has only with jax_enable_x64")
        out.append((name, word))
    if not out and not schema.changed:
        raise _errors.InvalidArgument(f"{schema.name}: no result is asked for, each is optional: name=True asks for one")
    return tuple(out)


def _preset(schema):
    """The attributes that an alias sets."""
    if schema.name == schema.op:
        return {}
    plain = {a["name"]: a["default"] for a in _C.schema(schema.op)["attributes"]}
    return {a["name"]: a["default"] for a in schema.attributes if a["default"] != plain[a["name"]]}


def _define_new():
    """Every op that is not there yet: all when this is imported, later those of a plugin."""
    for op in _C.ops():
        if op not in globals():
            for name in (op, *_schema(op).aliases):
                globals()[name] = _function(_schema(name))


_define_new()


def __getattr__(name):
    if not name.startswith("_"):
        _define_new()
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module 'rlk.jax' has no attribute '{name}'")
