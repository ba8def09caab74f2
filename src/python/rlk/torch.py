"""Every op for torch: autograd, torch.compile, dispatch modes.

    logits = rlk.torch.lm_head(hidden, weight)

Nothing is written per op: schemas come from the registry, gradients from an op's backward and what it saves, fake results from
the registry's own inference. A call that torch need not see (no gradient is wanted, nothing is traced) goes straight to the
library. Scopes (``rlk.precision``, ``rlk.backend``) that a forward runs in hold for its backward, on whatever thread; in
code that torch.compile traces they hold where the compiled function runs, so pass ``precision=`` and ``backend=`` there.
"""

import types
from contextlib import nullcontext
from functools import lru_cache

import torch
from torch.autograd import forward_ad

from rlk import _C, _errors, _scopes
from rlk._memory import Spec

_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64",
          torch.int32: "int32", torch.int64: "int64", torch.uint8: "uint8", torch.bool: "bool",
          torch.float8_e4m3fn: "fp8_e4m3"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_OPTIONS = ("backend", "arithmetic", "precision", "deterministic", "threads", "evidence")
#: Ops that autocast, as torch's own products do.
_AUTOCAST = ("lm_head", "linear")

if hasattr(torch.ops.rlk, "lm_head"):
    raise _errors.Unsupported("rlk.torch is loaded already: torch takes the ops of one rlk in a process, once; rlk's plain functions "
                              "serve in any number of copies")
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
        #: Optional results that a recorded call has for its backward, asked for or not.
        self.kept = [a["name"] for a in self.results if a["kept"]]

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
                  "bool deterministic=False", "SymInt threads=0", "bool evidence=False"]
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


def _spec(tensor, size=_hint):
    kind = tensor.device.type
    device = "cpu" if kind in ("cpu", "meta") else f"{'hip' if torch.version.hip else 'cuda'}:{tensor.device.index or 0}"
    return Spec([size(n) for n in tensor.shape], _NAMES.get(tensor.dtype, "bool"), device)


class _Symbols:
    """Which sizes of results are which symbols of the inputs' sizes. `infer` (of a function that gives a size its number) says the
    shapes for numbers only: it is asked again with every symbol moved, and what moved with it is that symbol."""

    def __init__(self, inputs, infer):
        symbolic = [n for t in inputs if t is not None for n in t.shape if not isinstance(n, int) and n.node.hint is not None]
        self._sizes = {str(n.node.expr): n for n in symbolic}.values()
        if not symbolic:
            return
        env = symbolic[0].node.shape_env
        known = getattr(env, "backed_var_to_val", None) or env.var_to_val
        self._now = {s: int(known[s]) for n in self._sizes for s in n.node.expr.free_symbols}
        self._moved = []  # numbers of the symbols, and the shapes that they give
        settled = set()
        for symbol, value in self._now.items():
            equal = [s for s, v in self._now.items() if v == value and s not in settled]
            if symbol in settled or self._move([symbol], infer):
                settled.add(symbol)
            elif len(equal) > 1 and self._move(equal, infer):
                settled.update(equal)
                self._unite(equal)
            else:
                self._hold(symbol)

    def _move(self, symbols, infer):
        """Asks with these symbols moved: whether the op has any such shape."""
        value, before = self._now[symbols[0]], len(self._moved)
        for more in (value + 1, 2 * value + 1, value + 4096):  # a number of blocks seldom stays the same in all of them
            numbers = self._now | dict.fromkeys(symbols, more)
            try:
                self._moved.append((numbers, infer(lambda size: self._number(size, numbers))))  # noqa: B023
            except _errors.Error:
                pass
        return len(self._moved) > before

    def _unite(self, symbols):
        """Makes it a condition that the sizes in which these are, and which are equal now, stay so."""
        first = {}
        for size in self._sizes:
            if not size.node.expr.free_symbols.isdisjoint(symbols):
                torch._check(size == first.setdefault(_hint(size), size))

    def _hold(self, symbol=None):
        """Takes this call's sizes for granted, which torch remembers as a condition."""
        for size in self._sizes:
            if symbol is None or symbol in size.node.expr.free_symbols:
                int(size)

    @staticmethod
    def _number(size, numbers):
        return _hint(size) if isinstance(size, int) or size.node.hint is None else int(size.node.expr.xreplace(numbers))

    def of(self, name, at, number):
        """The size of a result's dimension, which has this number now."""
        if not self._sizes:
            return number
        found = [shapes[name][0][at] for _, shapes in self._moved]
        if all(n == number for n in found):
            return number
        for size in self._sizes:
            more = number - _hint(size)  # of B + 1 bounds B sequences
            if [self._number(size, numbers) + more for numbers, _ in self._moved] == found:
                return size + more if more else size
        self._hold()  # it is computed from others
        return number


def _fake(schema):
    def fake(*inputs, results="", **keywords):
        asked = _asked(results)
        attributes = {k: v if isinstance(v, (str, bool, float)) else _hint(v)
                      for k, v in keywords.items() if k in schema.attribute_names}

        def infer(size):
            return _C.infer(schema.name, *(None if t is None else _spec(t, size) for t in inputs), **attributes)

        shapes = infer(_hint)
        if not schema.results:
            return None
        symbols = _Symbols(inputs, infer)
        like = next((t for t in inputs if t is not None), torch.empty(0))
        out = []
        for name in schema.result_names:
            if name not in asked:
                out.append(like.new_empty(0))
                continue
            shape, preferred, _ = shapes[name]
            dtype = _DTYPES[preferred if asked[name] is True else asked[name]]
            out.append(like.new_empty([symbols.of(name, at, n) for at, n in enumerate(shape)], dtype=dtype))
        return out[0] if len(out) == 1 else tuple(out)

    return fake


# ---- gradients --------------------------------------------------------------------------------------------------------------


class _Plan:
    """All of a call but its tensors, worked out once: what results it has, and what its backward will want."""

    def __init__(self, schema, backward, keywords, every_result):
        self.keywords, self.asked = keywords, _asked(keywords["results"])
        #: The results that come back. torch's dispatcher wants each, an empty one for those that were not asked for.
        self.outputs = tuple(schema.result_names if every_result else self.asked)
        everything = (*schema.input_names, *schema.result_names)
        self.kept_names = tuple(schema.saved)
        #: Results that the backward alone has.
        self.hidden = [n for n in schema.kept if backward and n not in self.asked]
        made = {*self.asked, *self.hidden}
        # Of what was given, then what came out, then None: what is kept for the backward.
        self.kept = [everything.index(n) if n in schema.input_names or n in made else -1 for n in schema.saved]
        self.name, self.inputs = schema.name, schema.inputs
        self.backward, self.input_names = backward, schema.input_names
        if backward:
            self.no_gradient = [i for i, n in enumerate(self.outputs)
                                if n not in self.asked or f"d_{n}" not in backward.input_names]
            self._keywords, self._steps = None, {}

    def step(self, needed, missing):
        """How the backward goes for these inputs that need a gradient and these results that have none."""
        key = needed, missing
        if key not in self._steps:
            self._steps[key] = _Step(self, *key)
        return self._steps[key]

    def for_backward(self):
        """The same call's keywords for its backward, without results."""
        if self._keywords is None:
            mine = {k: v for k, v in self.keywords.items() if k in self.backward.attribute_names}
            options = {k: v for k, v in self.keywords.items() if k in _OPTIONS}
            self._keywords = mine | _for_backward(self.backward.name, options)
        return self._keywords


class _Step:
    """A call of the backward: where its inputs come from, as functions of what was kept and of the gradients, and where its
    results go."""

    def __init__(self, plan, needed, missing):
        backward = plan.backward
        given = {f"d_{n}": i for i, n in enumerate(plan.outputs) if n in plan.asked and not missing[i]}
        follows = {a["name"]: a["follows"] for a in backward.results}
        wanted = [n for n in follows if n[2:] in plan.input_names and needed[plan.input_names.index(n[2:])]
                  and (not follows[n] or follows[n] in given)]
        unwanted = {follows[n] for n in follows if n not in wanted}
        self.wanted = bool(wanted)
        for i, a in enumerate(plan.inputs):
            if needed[i] and not a["differentiable"]:
                raise _errors.Unsupported(f"{plan.name}: a gradient of {a['name']} is asked for, it has none: detach() it")
        self.inputs = [self._input(a, plan, given, a["name"] in unwanted) for a in backward.inputs]
        required = [a["name"] for a in backward.results if not a["optional"]]
        names = [n for n in backward.result_names if n in wanted or n in required]
        self.keywords = {k: v for k, v in plan.for_backward().items() if v is not None} | {n: True for n in names}
        #: Of every input of the forward: which result is its gradient, -1: none.
        self.places = [names.index(f"d_{n}") if f"d_{n}" in wanted else -1 for n in plan.input_names]

    @staticmethod
    def _input(argument, plan, given, unwanted):
        name = argument["name"]
        if name in plan.kept_names:
            at = plan.kept_names.index(name)
            return lambda ctx, kept, gradients: kept[at]
        if name in given and not unwanted:
            at, strided = given[name], argument["strided"]
            return lambda ctx, kept, gradients: _readable(gradients[at], strided)
        if name in given or argument["optional"]:
            return lambda ctx, kept, gradients: None
        return lambda ctx, kept, gradients: _zeros(ctx.shapes[name[2:]], kept, gradients)  # of a result that nothing used


def _has_memory(tensor):
    return tensor is None or (type(tensor) in _PLAIN and not tensor.is_meta)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _packed_elsewhere():
    """Whether hooks (checkpointing, offloading) keep something else than the tensors themselves."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _for_backward(op, options):
    """The options of a forward for its backward: what names implementations or arithmetics that only the forward has is left to
    the registry, but for a chain whose gradients are summed as a tree."""
    if not options.get("arithmetic") and "." not in (options.get("backend") or ""):
        return options
    options = dict(options)
    known = _implementations(op)
    if options.get("arithmetic") not in known["arithmetic"]:
        tree = f"{options.get('arithmetic')}/tree8"
        options["arithmetic"] = tree if tree in known["arithmetic"] else None
    if options.get("backend"):
        options["backend"] = ":".join(w if w in known["id"] else w.partition(".")[0]
                                      for w in options["backend"].split(":"))
    return options


def _implementations(op):
    from rlk._tools import implementations
    mine = [i for i in implementations() if i["op"] == op]
    return {"arithmetic": {i["arithmetic"] for i in mine}, "id": {i["id"] for i in mine}}


def _several(ctx, plan, results):
    """What torch must know of an op that may have several results: some come back without a gradient."""
    results = _as_tuple(results)
    ctx.shapes = {n: (t.shape, t.dtype) for n, t in zip(plan.outputs, results)}
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*[results[i] for i in plan.no_gradient])


def _keep(ctx, plan, inputs, results):
    """What rlk._C keeps when it records a call itself."""
    everything = (*inputs, *results, None)
    kept = tuple([everything[i] for i in plan.kept])
    ctx.save_for_backward(*kept)
    # Until the backward has run, an op that would write there fails.
    guardable = all(map(_has_memory, kept)) and not _packed_elsewhere()
    ctx.rlk = plan, _scopes.options_of_scopes(), _C.guard(plan.kept_names, kept) if guardable else None


def _readable(gradient, strided):
    """A gradient as the library reads it: autograd hands out expanded and transposed ones."""
    if gradient.dim() == 0 or (strided and gradient.stride(-1) == 1 and gradient.size(-1) > 1):
        return gradient
    return gradient.contiguous()


def _zeros(like, kept, gradients):
    shape, dtype = like
    return next(t for t in (*gradients, *kept) if t is not None).new_zeros(shape, dtype=dtype)


def _gradient(ctx, *gradients):
    plan, scopes, _ = ctx.rlk
    step = plan.step(ctx.needs_input_grad[1:], tuple([g is None for g in gradients]))
    if not step.wanted:
        return (None,) * (1 + len(step.places))
    kept = ctx.saved_tensors
    inputs = [take(ctx, kept, gradients) for take in step.inputs]
    with _scopes.within(scopes) if scopes else nullcontext():
        found = _as_tuple(globals()[plan.backward.name](*inputs, **step.keywords))
    ctx.rlk = plan, scopes, None
    return (None, *[found[i] if i >= 0 else None for i in step.places])


def _refuse_gradient(schema):
    what = "is a gradient itself: it has no second one" if schema.name.endswith("_bwd") else "has no gradient"

    def gradient(ctx, *gradients):
        raise _errors.Unsupported(f"{schema.name}: a gradient is asked for, this op {what}")

    return gradient


# ---- the functions ----------------------------------------------------------------------------------------------------------


def _by_position(schema, args):
    if len(args) > len(schema.input_names):
        raise TypeError(f"{schema.name} takes {len(schema.input_names)} arguments by position, {len(args)} were given; results and "
                        "attributes go by name")
    return dict(zip(schema.input_names, args))


def _once(schema, name, given):
    if given.get(name) is not None:
        raise TypeError(f"{schema.name} got {name} twice")


def _understood(schema, args, keywords, preset):
    """A call's arguments by name, and the rest of it as the op takes it below the dispatcher."""
    given = _by_position(schema, args)
    asked, rest = {}, dict(preset)
    for name, value in keywords.items():
        if name in schema.input_names:
            _once(schema, name, given)
            given[name] = value
        elif name in schema.result_names:
            if isinstance(value, torch.Tensor):
                raise _errors.Unsupported(f"{schema.name}: {name} is given to be written, which neither autograd nor torch.compile nor a "
                                          "mode can follow: leave it out, or call under torch.no_grad() and no mode")
            asked[name] = value
        elif name in schema.attribute_names or name in _OPTIONS:
            rest[name] = value
        elif name != "gradients":  # which the native call checks; what is traced has those that autograd asks for
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
    op, preset = getattr(torch.ops.rlk, schema.op), _preset(schema)
    tracing = torch.compiler.is_dynamo_compiling

    def call(*args, **keywords):
        given, rest = _understood(schema, args, keywords, preset)
        inputs = [given.get(n) for n in schema.input_names]
        if not tracing():  # there numpy's arrays are taken for torch's
            _refuse_others(schema, inputs)
        if not schema.results:
            if schema.changed and torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
                raise _errors.Unsupported(f"{schema.name}: a tensor requires grad, an op in place has no gradient")
            op(*inputs, **rest)
            out = [given[n] for n in schema.changed if given.get(n) is not None]
            return tuple(out) if len(out) > 1 else out[0]
        output = op(*inputs, **rest)
        if len(schema.results) == 1:
            return output
        found = dict(zip(schema.result_names, output))
        out = [found[part.partition("=")[0]] for part in rest["results"].split(",")]
        return tuple(out) if len(out) > 1 else out[0]

    return call


def _refuse_others(schema, inputs):
    for name, value in zip(schema.input_names, inputs):
        if isinstance(value, torch.Tensor) and value.is_nested:
            raise _errors.InvalidArgument(f"{schema.name}: {name} is a nested tensor: values() is its memory, offsets() are what "
                                          "cu_seqlens takes")
        if value is not None and not isinstance(value, torch.Tensor):
            raise _errors.InvalidArgument(f"{schema.name}: {name} is of type {type(value).__name__}, where a gradient is recorded or a "
                                          "call is traced all tensors are torch's")


def _preset(schema):
    """The attributes that an alias sets."""
    if schema.name == schema.op:
        return {}
    plain = {a["name"]: a["default"] for a in _C.schema(schema.op)["attributes"]}
    changed = [a for a in schema.attributes if a["default"] != plain[a["name"]]]
    return {a["name"]: a["choices"].split("|")[a["default"]] if a["type"] == "choice" else a["default"] for a in changed}


def _autocast(schema, args, keywords):
    """A call's arguments as autocast has them."""
    given = _by_position(schema, args)
    for name in keywords:
        _once(schema, name, given)
    given |= keywords
    device = next((t.device.type for t in given.values() if isinstance(t, torch.Tensor)), "cpu")
    if not torch.is_autocast_enabled(device):
        return given
    dtype = torch.get_autocast_dtype(device)
    return {n: t.to(dtype) if n in schema.input_names and _is_cast(t, device) else t for n, t in given.items()}


def _is_cast(value, device):
    """What torch's autocast casts."""
    return (isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
            and value.device.type == device)


def _function(schema, backward):
    dispatched, plan = _dispatched(schema), _plan_of(schema, backward)

    def directly(autocast):
        call = _C.torch_op(schema.name, dispatched, _APPLY.get(schema.op), plan, _several, autocast)
        if schema.required:
            return call

        def by_tensors(args, keywords):  # where there is none, nothing says that results are torch's
            given = any(isinstance(t, torch.Tensor) for t in (*args, *keywords.values()))
            return call(args, keywords) if given else dispatched(*args, **keywords)

        return by_tensors

    direct, traced = directly(None), dispatched
    if schema.name in _AUTOCAST:
        plain, any_autocast = direct, torch._C._is_any_autocast_enabled
        direct = directly(lambda *args, **keywords: plain((), _autocast(schema, args, keywords)))

        def traced(*args, **keywords):
            return dispatched(**_autocast(schema, args, keywords)) if any_autocast() else dispatched(*args, **keywords)

    # Dynamo takes this for true. Where a graph is made in another way, modes are active, which the library sees.
    tracing = torch.compiler.is_dynamo_compiling

    def op(*args, **keywords):
        if tracing():
            return traced(*args, **keywords)
        return direct(args, keywords)

    op.__name__ = op.__qualname__ = schema.name
    op.__doc__ = _C.op(schema.name).__doc__
    op.__text_signature__ = _C.op(schema.name).__text_signature__
    return op


def _refuse_tangents(schema, inputs):
    if forward_ad._current_level < 0:
        return
    for name, t in zip(schema.input_names, inputs):
        if t is not None and forward_ad.unpack_dual(t).tangent is not None:
            raise _errors.Unsupported(f"{schema.name}: {name} carries a tangent of forward-mode differentiation (jvp, jacfwd), which no "
                                      "op here carries on")


#: By op, the apply of its autograd.Function without the Python around it, which looks for transforms (a call that none sees comes
#: here alone) and fills in defaults.
_APPLY = {}


def _whole(schema, backward, given):
    """Refuses a recorded call whose gradient would leave an argument out: `given` are its inputs by name."""
    if not backward:
        return
    for a in schema.inputs:
        name = a["name"]
        if a["differentiable"] and f"d_{name}" not in backward.result_names and given.get(name) is not None:
            raise _errors.Unsupported(f"{schema.name}: {name} is given and a gradient is recorded, {backward.name} has no d_{name}: "
                                      f"compute without {name}, or under torch.no_grad()")


def _plan_of(schema, backward):
    preset = _preset(schema)

    def plan(*args, **keywords):
        _whole(schema, backward, dict(zip(schema.input_names, args)) | keywords)
        return _Plan(schema, backward, _understood(schema, args, keywords, preset)[1], every_result=False)

    return plan


def _define(schema):
    qualified = f"rlk::{schema.name}"
    _library.define(schema.words(), tags=(torch.Tag.needs_fixed_stride_order,))
    _library.impl(schema.name, _kernel(schema), "CompositeExplicitAutograd")  # rope_tables may have no tensor to choose by
    torch.library.register_fake(qualified, _fake(schema), lib=_library)


def _node(name, forward, backward):
    """An autograd.Function; its grad_fn is called nameBackward."""
    functions = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return types.new_class(name, (torch.autograd.Function,), exec_body=lambda namespace: namespace.update(functions))


def _differentiate(schema, schemas):
    """The op's kernel above the others. (torch.library.register_autograd gives the same and reads the schema anew in every call,
    which costs ten times the rest.)"""
    if not schema.results:
        return
    op, below = getattr(torch.ops.rlk, schema.name).default, torch._C._AutoDispatchBelowAutograd
    other = schemas.get(schema.backward)
    gradient = _gradient if other else _refuse_gradient(schema)

    def through_dispatcher(ctx, plan, *inputs):
        with below():
            output = op(*inputs, **plan.keywords | {"results": ",".join([plan.keywords["results"], *plan.hidden])})
        if other:
            _keep(ctx, plan, inputs, _as_tuple(output))
            if plan.hidden:
                output = tuple(t.new_empty(0) if n in plan.hidden else t for n, t in zip(schema.result_names, output))
            if len(schema.results) > 1:
                _several(ctx, plan, output)
        return output

    _APPLY[schema.name] = super(torch.autograd.Function, _node(schema.name, _C.recorded_forward, gradient)).apply
    dispatched = _node(schema.name, through_dispatcher, gradient).apply

    def kernel(*inputs, **keywords):
        _refuse_tangents(schema, inputs)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
            if torch._C._functorch.peek_interpreter_stack() is not None:
                raise _errors.Unsupported(f"{schema.name}: a gradient is asked for within torch.func (grad, vjp, jacrev), which cannot "
                                          "follow this op: torch.autograd.grad can")
            inputs += (None,) * (len(schema.input_names) - len(inputs))  # of which the dispatcher leaves trailing ones out
            _whole(schema, other, dict(zip(schema.input_names, inputs)))
            return dispatched(_Plan(schema, other, keywords, every_result=True), *inputs)
        with below():
            return op(*inputs, **keywords)

    _library.impl(schema.name, kernel, "Autograd")


_defined = {}  # the schemas of all ops by name


def _define_new():
    """Every op that is not there yet: all when this is imported, later those of a plugin."""
    new = {name: Schema(name) for name in _C.ops() if name not in _defined}
    _defined.update(new)
    for schema in new.values():
        _define(schema)
    for schema in new.values():
        _differentiate(schema, _defined)
    for schema in new.values():
        for name in (schema.name, *schema.aliases):
            globals()[name] = _function(Schema(name), _defined.get(schema.backward))


_define_new()


def patch(model):
    """Takes every layer of a Hugging Face model of the Qwen3 or Llama kind from rlk: generate() and a scoring forward then agree to
    the bit. Undone by restore() of what is returned, or by leaving a ``with``."""
    from rlk.adapters import transformers
    return transformers.patch(model, whole=True)


def __getattr__(name):
    if name == "parallel":  # what spreads these ops over ranks
        import importlib
        return importlib.import_module("rlk.parallel")
    if not name.startswith("_"):
        _define_new()
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module 'rlk.torch' has no attribute '{name}'")
