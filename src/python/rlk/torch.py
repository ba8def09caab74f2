"""Every op for torch: autograd, torch.compile, dispatch modes.

    logits = rlk.torch.lm_head(hidden, weight)

Nothing is written per op: schemas come from the registry, gradients from an op's backward and what it saves, fake results from
the registry's own inference. A call that torch need not see (no gradient is wanted, nothing is traced) goes straight to the
library. Scopes (``rlk.precision``, ``rlk.backend``) that a forward runs in hold for its backward, on whatever thread; in
code that torch.compile traces they hold where the compiled function runs, so pass ``precision=`` and ``backend=`` there.
"""

from contextlib import nullcontext
from functools import lru_cache

import torch

from rlk import _C, _errors, _scopes
from rlk._memory import Spec

_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64",
          torch.int32: "int32", torch.int64: "int64", torch.uint8: "uint8", torch.bool: "bool"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_OPTIONS = ("backend", "arithmetic", "precision", "deterministic", "threads")
#: Ops that autocast, as torch's own products do.
_AUTOCAST = ("lm_head", "linear")

_library = torch.library.Library("rlk", "DEF")


class Schema:
    """What the registry says of an op, as this module needs it."""

    def __init__(self, name):
        described = _C.schema(name)
        self.name, self.op = name, described["name"]  # an alias has a name of its own
        self.aliases = [a.partition(":")[0] for a in described["aliases"].split(",") if a]
        self.arguments = described["arguments"]
        self.attributes = described["attributes"]
        self.backward = described["backward"]
        self.inputs = [a for a in self.arguments if a["role"] != 1]
        self.results = [a for a in self.arguments if a["role"] == 1]
        self.changed = [a["name"] for a in self.arguments if a["role"] == 2]
        self.input_names = [a["name"] for a in self.inputs]
        self.result_names = [a["name"] for a in self.results]
        self.attribute_names = [a["name"] for a in self.attributes]
        self.required = [a["name"] for a in self.inputs if not a["optional"]]
        self.saved = [a["name"] for a in self.arguments if a["saved"]]

    def words(self):
        """The op in torch's schema language."""
        parts, mark = [], iter("abcdefgh")
        last = max((i for i, a in enumerate(self.inputs) if not a["optional"]), default=-1)
        for i, a in enumerate(self.inputs):
            kind = f"Tensor({next(mark)}!)" if a["role"] == 2 else "Tensor"
            parts.append(f"{kind}{'?' if a['optional'] else ''} {a['name']}{'=None' if i > last else ''}")
        parts.append("*")
        for a in self.attributes:
            if a["type"] == "choice":
                parts.append(f"str {a['name']}=\"{a['choices'].split('|')[a['default']]}\"")
            elif a["type"] == "flag":
                parts.append(f"bool {a['name']}={a['default']}")
            else:
                parts.append(f"{'SymInt' if a['type'] == 'int' else 'float'} {a['name']}={a['default']}")
        parts += ["str results=\"\"", "str? backend=None", "str? arithmetic=None", "str? precision=None",
                  "bool deterministic=False", "SymInt threads=0"]
        count = len(self.results)
        returns = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
        return f"{self.name}({', '.join(parts)}) -> {returns}"

    def wanted(self, given, asked):
        """The results of a call as 'out,final_state=fp32': those that must be, that follow an argument, or are asked for."""
        parts = []
        for a in self.results:
            word = asked.get(a["name"])
            if word is None or word is False:
                if a["optional"] and (not a["follows"] or given.get(a["follows"]) is None):
                    continue
                word = True
            if isinstance(word, torch.dtype):
                word = _NAMES[word]
            parts.append(a["name"] if word is True else f"{a['name']}={word}")
        return ",".join(parts)


@lru_cache(maxsize=256)  # not to be changed by who gets it
def _asked(results):
    """'out,final_state=fp32' as keywords of the library's call."""
    out = {}
    for part in results.split(",") if results else ():
        name, _, dtype = part.partition("=")
        out[name] = dtype or True
    return out


def _as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


# ---- the op below the dispatcher --------------------------------------------------------------------------------------------


def _kernel(schema):
    run = _C.recorded_op(schema.name)

    def kernel(*inputs, results="", **keywords):
        asked = _asked(results)
        found = run(*inputs, **keywords, **asked)
        if not schema.results:
            return None
        if all(t is None for t in inputs):  # results of no framework's tensors are numpy's
            found = tuple(map(torch.from_numpy, _as_tuple(found)))
        if len(asked) == len(schema.results):
            return found[0] if len(asked) == 1 and isinstance(found, tuple) else found
        found = iter(_as_tuple(found))
        like = next(t for t in inputs if t is not None) if inputs else torch.empty(0)
        out = tuple(next(found) if name in asked else like.new_empty(0) for name in schema.result_names)
        return out[0] if len(out) == 1 else out

    return kernel


def _hint(size):
    """The size that a symbol stands for now."""
    return size if isinstance(size, int) else size.node.hint if size.node.hint is not None else int(size)


def _spec(tensor):
    kind = tensor.device.type
    device = "cpu" if kind in ("cpu", "meta") else f"{'hip' if torch.version.hip else 'cuda'}:{tensor.device.index or 0}"
    return Spec([_hint(n) for n in tensor.shape], _NAMES.get(tensor.dtype, "bool"), device)


def _symbol(size, known):
    """A result's size as the symbol of the one input dimension that has it. Where another dimension happens to be as large, the
    sizes of this call are taken for granted, which torch remembers as a condition."""
    symbols = known.get(size, ())
    distinct = {str(s) for s in symbols}
    if len(distinct) == 1:
        return symbols[0]
    return int(next(s for s in symbols if not isinstance(s, int))) if distinct else size


def _fake(schema):
    def fake(*inputs, results="", **keywords):
        asked = _asked(results)
        known, symbolic = {}, []
        for tensor in inputs:
            for size in tensor.shape if tensor is not None else ():
                known.setdefault(_hint(size), []).append(size)
                symbolic += [] if isinstance(size, int) else [size]
        attributes = {k: v for k, v in keywords.items() if k in schema.attribute_names and not isinstance(v, str)}
        attributes = {k: v if isinstance(v, (bool, float)) else _hint(v) for k, v in attributes.items()}
        attributes |= {k: v for k, v in keywords.items() if k in schema.attribute_names and isinstance(v, str)}
        shapes = _C.infer(schema.name, *(None if t is None else _spec(t) for t in inputs), **attributes)
        if not schema.results:
            return None
        if any(n not in known for s, _, _ in shapes.values() for n in s):
            for size in symbolic:  # a size that is computed from others: hold for these sizes only
                int(size)
            known = {}
        like = next((t for t in inputs if t is not None), torch.empty(0))
        out = []
        for name in schema.result_names:
            if name not in asked:
                out.append(like.new_empty(0))
                continue
            shape, preferred, _ = shapes[name]
            dtype = _DTYPES[preferred if asked[name] is True else asked[name]]
            out.append(like.new_empty([_symbol(n, known) for n in shape], dtype=dtype))
        return out[0] if len(out) == 1 else tuple(out)

    return fake


# ---- gradients --------------------------------------------------------------------------------------------------------------


class _Plan:
    """All of a call but its tensors, worked out once: what results it has, and what its backward will want."""

    def __init__(self, schema, keywords):
        self.keywords, self.asked = keywords, _asked(keywords["results"])
        optional = {a["name"] for a in schema.results if a["optional"]}
        self.direct = {k: v for k, v in keywords.items() if k != "results" and v is not None}
        self.direct |= {n: word for n, word in self.asked.items() if word is not True or n in optional}
        self.all_asked = len(self.asked) == len(schema.results)
        self.picks = [schema.result_names.index(n) for n in self.asked]
        everything = (*schema.input_names, *schema.result_names)
        # Of what was given, then what came out, then None: what is kept for the backward.
        self.kept_names = tuple(schema.saved)
        self.kept = [everything.index(n) if n in schema.input_names or n in self.asked else -1 for n in schema.saved]
        self._for_backward = None

    def for_backward(self, backward):
        """The same call's keywords for its backward, without results."""
        if self._for_backward is None:
            mine = {k: v for k, v in self.keywords.items() if k in backward.attribute_names}
            self._for_backward = mine | _for_backward(backward.name, {k: v for k, v in self.keywords.items() if k in _OPTIONS})
        return self._for_backward


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))


def _packed_elsewhere():
    """Whether hooks (checkpointing, offloading) keep something else than the tensors themselves."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _for_backward(op, options):
    """The options of a forward for its backward: what names implementations or arithmetics that only the forward has is left to
    the registry."""
    if not options.get("arithmetic") and "." not in (options.get("backend") or ""):
        return options
    options = dict(options)
    known = _implementations(op)
    if options.get("arithmetic") not in known["arithmetic"]:
        options["arithmetic"] = None
    if options.get("backend"):
        options["backend"] = ":".join(w if w in known["id"] else w.partition(".")[0]
                                      for w in options["backend"].split(":"))
    return options


def _implementations(op):
    from rlk._tools import implementations
    mine = [i for i in implementations() if i["op"] == op]
    return {"arithmetic": {i["arithmetic"] for i in mine}, "id": {i["id"] for i in mine}}


def _setup(schema, backward):
    def setup(ctx, plan, inputs, output):
        outputs = _as_tuple(output)
        everything = (*inputs, *outputs, None)
        kept = tuple([everything[i] for i in plan.kept])
        ctx.save_for_backward(*kept)
        ctx.plan, ctx.scopes, ctx.shapes = plan, _scopes.options_of_scopes(), {}
        if len(outputs) > 1:  # of which some may come back without a gradient
            results = dict(zip(schema.result_names, outputs))
            ctx.shapes = {n: (results[n].shape, results[n].dtype) for n in plan.asked}
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(*(t for n, t in results.items() if n not in plan.asked or f"d_{n}" not in backward))
        # Until the backward has run, an op that would write there fails.
        guardable = all([type(t) in _PLAIN for t in kept]) and not _packed_elsewhere()
        ctx.guard = _C.guard(plan.kept_names, kept) if guardable else None

    return setup


def _readable(gradient, argument):
    """A gradient as the library reads it: autograd hands out expanded and transposed ones."""
    if gradient is None or gradient.dim() == 0:
        return gradient
    if argument["strided"] and gradient.stride(-1) == 1 and gradient.size(-1) > 1:
        return gradient
    return gradient.contiguous()


def _gradient(schema, backward):
    op = getattr(torch.ops.rlk, backward.name)

    def gradient(ctx, *gradients):
        plan = ctx.plan
        kept = dict(zip(plan.kept_names, ctx.saved_tensors))
        grads = {f"d_{n}": g for n, g in zip(schema.result_names, gradients) if n in plan.asked}
        needed = dict(zip(schema.input_names, ctx.needs_input_grad[1:]))
        follows = {a["name"]: a["follows"] for a in backward.results}
        wanted = [n for n in follows if needed.get(n[2:]) and (not follows[n] or grads.get(follows[n]) is not None)]
        like = next(t for t in (*grads.values(), *kept.values()) if t is not None)
        inputs = []
        for a in backward.inputs:
            name = a["name"]
            gradient = grads.get(name)
            if name in kept:
                inputs.append(kept[name])
            elif gradient is None and not a["optional"]:
                shape, dtype = ctx.shapes[name[2:]]  # of a result that nothing used
                inputs.append(like.new_zeros(shape, dtype=dtype))
            elif name in follows.values() and next(n for n in follows if follows[n] == name) not in wanted:
                inputs.append(None)
            else:
                inputs.append(_readable(gradient, a))
        if not wanted:
            return (None,) * len(needed)
        keywords = plan.for_backward(backward)
        required = [a["name"] for a in backward.results if not a["optional"]]
        names = [n for n in backward.result_names if n in wanted or n in required]
        traced = torch.compiler.is_compiling() or torch.is_grad_enabled()
        run = op if traced or not _only_recorded(inputs) else backward.kernel
        with _scopes.within(ctx.scopes) if ctx.scopes else nullcontext():
            found = dict(zip(backward.result_names, _as_tuple(run(*inputs, results=",".join(names), **keywords))))
        ctx.guard = None
        return tuple(found[f"d_{n}"] if f"d_{n}" in wanted else None for n in schema.input_names)

    return gradient


def _refuse_gradient(schema):
    what = "is a gradient itself: it has no second one" if schema.name.endswith("_bwd") else "has no gradient"

    def gradient(ctx, *gradients):
        raise _errors.Unsupported(f"{schema.name}: a gradient is asked for, this op {what}")

    return gradient


# ---- the functions ----------------------------------------------------------------------------------------------------------


def _understood(schema, args, keywords, preset):
    """A call's arguments by name, and the rest of it as the op takes it below the dispatcher."""
    given = dict(zip(schema.input_names, args))
    asked, rest = {}, dict(preset)
    for name, value in keywords.items():
        if name in schema.input_names:
            given[name] = value
        elif name in schema.result_names:
            if isinstance(value, torch.Tensor):
                raise _errors.Unsupported(f"{schema.name}: {name} is given to be written, which neither autograd nor "
                                          "torch.compile can follow: leave it out, or use torch.no_grad()")
            asked[name] = value
        elif name in schema.attribute_names or name in _OPTIONS:
            rest[name] = value
        else:
            raise _errors.UnknownName(f"{schema.name}: no argument, attribute or option is called '{name}'")
    for name in schema.required:
        if given.get(name) is None:
            raise _errors.InvalidArgument(f"{schema.name}: {name} is missing")
    if schema.results:
        rest["results"] = schema.wanted(given, asked)
        if not rest["results"]:
            raise _errors.InvalidArgument(
                f"{schema.name}: no result is asked for, each is optional: name=True asks for one")
    return given, rest


def _dispatched(schema):
    """A call that torch must see for another reason than a gradient."""
    op = getattr(torch.ops.rlk, schema.op)
    recorded = _RECORDED.get(schema.op)
    preset, autocasts = _preset(schema), schema.name in _AUTOCAST

    def call(*args, **keywords):
        given, rest = _understood(schema, args, keywords, preset)
        if autocasts and torch._C._is_any_autocast_enabled():
            given = _autocast(given)
        inputs = [given.get(n) for n in schema.input_names]
        if not schema.results:
            if schema.changed and torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
                raise _errors.Unsupported(f"{schema.name}: a tensor requires grad, an op in place has no gradient")
            op(*inputs, **rest)
            out = [given[n] for n in schema.changed if given.get(n) is not None]
            return tuple(out) if len(out) > 1 else out[0]
        if not torch.compiler.is_compiling() and _only_recorded(inputs):
            output = recorded.apply(_Plan(schema, rest), *inputs)
        else:
            output = op(*inputs, **rest)
        if len(schema.results) == 1:
            return output
        found = dict(zip(schema.result_names, output))
        out = [found[part.partition("=")[0]] for part in rest["results"].split(",")]
        return tuple(out) if len(out) > 1 else out[0]

    return call


def _recorded(schema, dispatched):
    """A call of which a gradient is recorded, and that torch need not see for any other reason: calls that differ in their tensors
    alone are understood once."""
    if not schema.results:
        return dispatched
    preset, plans, single = _preset(schema), {}, len(schema.results) == 1
    apply, count = _RECORDED[schema.op].apply, len(schema.input_names)
    places = {n: i for i, n in enumerate(schema.input_names)}

    def call(*args, **keywords):
        inputs, key = [*args, *(None,) * (count - len(args))], []
        for name, value in keywords.items():
            if name in places:
                inputs[places[name]] = value
            else:
                key.append((name, value))
        for t in inputs:
            if type(t) not in _PLAIN:
                return dispatched(*args, **keywords)
            key.append(t is None)
        key = tuple(key)
        plan = plans.get(key)
        if plan is None:
            _, rest = _understood(schema, args, keywords, preset)
            plan = _Plan(schema, rest)
            if len(plans) < 256:
                plans[key] = plan
        output = apply(plan, *inputs)
        if single:
            return output
        return tuple([output[i] for i in plan.picks]) if len(plan.picks) > 1 else output[plan.picks[0]]

    return call


def _preset(schema):
    """The attributes that an alias sets."""
    if schema.name == schema.op:
        return {}
    plain = {a["name"]: a["default"] for a in _C.schema(schema.op)["attributes"]}
    changed = [a for a in schema.attributes if a["default"] != plain[a["name"]]]
    return {a["name"]: a["choices"].split("|")[a["default"]] if a["type"] == "choice" else a["default"] for a in changed}


def _autocast(given):
    device = next(t.device.type for t in given.values() if t is not None)
    if not torch.is_autocast_enabled(device):
        return given
    dtype = torch.get_autocast_dtype(device)
    return {n: t if t is None or not t.is_floating_point() else t.to(dtype) for n, t in given.items()}


def _function(schema):
    dispatched = _dispatched(schema)
    direct = _C.torch_op(schema.name, dispatched, _recorded(schema, dispatched))
    if all(a["optional"] for a in schema.inputs):  # perhaps no tensor says that results are torch's
        direct = dispatched
    is_compiling = torch.compiler.is_compiling
    if schema.name in _AUTOCAST:
        any_autocast = torch._C._is_any_autocast_enabled

        def op(*args, **keywords):
            if is_compiling() or any_autocast():
                return dispatched(*args, **keywords)
            return direct(*args, **keywords)
    else:
        def op(*args, **keywords):
            return dispatched(*args, **keywords) if is_compiling() else direct(*args, **keywords)
    op.__name__ = op.__qualname__ = schema.name
    op.__doc__ = _C.op(schema.name).__doc__
    op.__text_signature__ = _C.op(schema.name).__text_signature__
    return op


#: By op, how a gradient is recorded without torch's dispatcher: all that most training needs of it is the node.
_RECORDED = {}


def _only_recorded(inputs):
    """Whether these are plain tensors that autograd alone must see."""
    return (all(t is None or type(t) in (torch.Tensor, torch.nn.Parameter) for t in inputs)
            and torch._C._len_torch_dispatch_stack() == 0 and torch._C._len_torch_function_stack() == 0
            and torch._C._functorch.peek_interpreter_stack() is None)


def _define(schema):
    qualified = f"rlk::{schema.name}"
    _library.define(schema.words(), tags=(torch.Tag.needs_fixed_stride_order,))
    schema.kernel = _kernel(schema)
    _library.impl(schema.name, schema.kernel, "CompositeExplicitAutograd")  # rope_tables may have no tensor to choose by
    torch.library.register_fake(qualified, _fake(schema), lib=_library)


def _differentiate(schema, schemas):
    """The op's kernel above the others. (torch.library.register_autograd gives the same and reads the schema anew in every call,
    which costs ten times the rest.)"""
    if not schema.results:
        return
    op = getattr(torch.ops.rlk, schema.name).default
    backward = schemas.get(schema.backward)
    setup = _setup(schema, set(backward.input_names)) if backward else lambda *_: None
    gradient = _gradient(schema, backward) if backward else _refuse_gradient(schema)

    def record(below):
        class Recorded(torch.autograd.Function):
            @staticmethod
            def forward(ctx, plan, *inputs):
                output = below(plan, inputs)
                setup(ctx, plan, inputs, output)
                return output

            @staticmethod
            def backward(ctx, *gradients):
                return (None, *gradient(ctx, *gradients))

        Recorded.__name__ = Recorded.__qualname__ = schema.name
        return Recorded

    run, below = _C.recorded_op(schema.name), torch._C._AutoDispatchBelowAutograd

    as_they_come = bool(schema.required)  # else perhaps no tensor says that results are torch's

    def directly(plan, inputs):
        if plan.all_asked and as_they_come:
            return run(*inputs, **plan.direct)
        return schema.kernel(*inputs, **plan.keywords)

    def through_dispatcher(plan, inputs):
        with below():
            return op(*inputs, **plan.keywords)

    dispatched = record(through_dispatcher)
    _RECORDED[schema.name] = record(directly)

    def kernel(*inputs, **keywords):
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
            inputs += (None,) * (len(schema.input_names) - len(inputs))  # of which the dispatcher leaves trailing ones out
            return dispatched.apply(_Plan(schema, keywords), *inputs)
        with below():
            return op(*inputs, **keywords)

    _library.impl(schema.name, kernel, "Autograd")


def _define_all():
    schemas = {name: Schema(name) for name in _C.ops()}
    for schema in schemas.values():
        _define(schema)
    for schema in schemas.values():
        _differentiate(schema, schemas)
    for schema in schemas.values():
        for name in (schema.name, *schema.aliases):
            globals()[name] = _function(Schema(name))


_define_all()
