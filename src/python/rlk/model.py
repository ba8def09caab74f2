"""A small decoder over rlk's ops, for training and for sampling: one set of weights, one set of bits.

    model = rlk.model.Decoder("tiny-qwen3", seed=1)
    logp = model.score(tokens, cu_seqlens)          # the trainer's: a packed batch, with gradients
    model.save("folder"); rlk.model.load("folder")  # as Hugging Face stores Qwen3 and Llama

``Decoder.forward`` takes rows of tokens and a function that attends; everything else of a layer looks at one row alone. The
trainer attends within packed sequences, the sampler (rlk.sampler) in pages of a cache, and a row has the same bits in both. Every
op comes from ``Decoder.ops``: rlk.torch, or PyTorch's own for a control (rlk._peer).
"""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

import rlk.torch
from rlk import _errors
from rlk._add_norm import AddNorm
from rlk._attended import Attended, parts
from rlk._hybrid import Latent, Packed, Recurrent


@dataclass(frozen=True)
class Config:
    """A decoder's shape, in the words of the ops."""

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    theta: float = 1e6
    eps: float = 1e-6
    qk_norm: bool = True
    tied: bool = True
    max_length: int = 40960
    scaling: dict = field(default_factory=dict)  # attributes of rope_tables
    fp8_cache: bool = False  # keys and values are rounded to fp8_e4m3, in training too, so that a cache holds them in 8 bits
    # Of the Kimi-Linear kind: every period-th layer has latent attention without rotation, the others KDA. 0: attention throughout.
    period: int = 0
    state_dim: int = 0  # of KDA's heads
    conv: int = 4  # taps of the convolution before it
    latent: int = 0  # width of the row that keys and values come from
    plain_dim: int = 0  # of a key, from that row
    extra_dim: int = 0  # of a key, shared by all heads
    value_dim: int = 0

    def __post_init__(self):
        for name in ("vocab", "width", "layers", "heads", "kv_heads", "head_dim", "mlp", "max_length"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise _errors.InvalidArgument(f"model: {name} is {value!r}, it must be a number above 0")
        if self.heads % self.kv_heads:
            raise _errors.InvalidArgument(f"model: {self.heads} heads are no multiple of {self.kv_heads} key heads")


_LLAMA3 = {"scaling": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max": 8192}
CONFIGS = {
    "tiny-qwen3": Config(64, 64, 2, 4, 2, 16, 176, theta=1e4, max_length=4096),
    "tiny-llama": Config(64, 64, 2, 4, 2, 16, 176, theta=1e4, eps=1e-5, qk_norm=False, tied=False, max_length=4096),
    "tiny-kimi": Config(64, 64, 4, 2, 2, 32, 176, eps=1e-5, qk_norm=False, tied=False, max_length=4096, period=4, state_dim=16,
                        latent=32, plain_dim=16, extra_dim=16, value_dim=16),
    # The smallest whose heads are whole leaves on eight ranks (rlk.parallel), with an MLP that is not cut evenly.
    "tiny-ranks": Config(128, 64, 2, 16, 8, 16, 176, theta=1e4, max_length=4096),
    "tiny-kimi-ranks": Config(128, 64, 4, 8, 8, 32, 176, eps=1e-5, qk_norm=False, tied=False, max_length=4096, period=4, state_dim=16,
                              latent=32, plain_dim=16, extra_dim=16, value_dim=16),
    "qwen3-0.6b": Config(151936, 1024, 28, 16, 8, 128, 3072),
    "qwen3-1.7b": Config(151936, 2048, 28, 16, 8, 128, 6144),
    "qwen3-8b": Config(151936, 4096, 36, 32, 8, 128, 12288, tied=False),
    # One period of it, with the dense MLP of its first layer in place of experts.
    "kimi-linear-48b-a3b": Config(163840, 2304, 4, 32, 32, 192, 9216, eps=1e-5, qk_norm=False, tied=False, max_length=1048576, period=4,
                                  state_dim=128, latent=512, plain_dim=128, extra_dim=64, value_dim=128),
    "llama-3.1-8b": Config(128256, 4096, 32, 32, 8, 128, 14336, theta=5e5, eps=1e-5, qk_norm=False, tied=False,
                           max_length=131072, scaling=_LLAMA3),
}


def config(name, **changes):
    """A configuration by name, with changes: config("qwen3-8b", layers=4)."""
    if isinstance(name, Config):
        return replace(name, **changes)
    if name not in CONFIGS:
        raise _errors.InvalidArgument(f"model '{name}' is unknown; known: {', '.join(CONFIGS)}")
    return replace(CONFIGS[name], **changes)


class Block(nn.Module):
    """Attention and gated MLP, each behind a norm. What a block adds travels beside the stream and is added by the next norm."""

    def __init__(self, c, make, layer):
        super().__init__()
        self.config, self.other = c, None
        self.norm = make(c.width, ones=True)
        if c.period:
            self.other = (Recurrent if (layer + 1) % c.period else Latent)(c, make)
            self.out = make(c.width, c.heads * (c.state_dim if (layer + 1) % c.period else c.value_dim))
        else:
            self._attention(c, make)
        self.mlp_norm = make(c.width, ones=True)
        self.gate_up = make(2 * c.mlp, c.width)
        self.down = make(c.width, c.mlp)

    def _attention(self, c, make):
        self.qkv = make((c.heads + 2 * c.kv_heads) * c.head_dim, c.width)
        self.q_norm = make(c.head_dim, ones=True) if c.qk_norm else None
        self.k_norm = make(c.head_dim, ones=True) if c.qk_norm else None
        self.out = make(c.width, c.heads * c.head_dim)

    def names(self):
        """Of attention: names in a checkpoint, and what they are here."""
        c = self.config
        for name, part in zip("qkv", self.qkv.detach().split([n * c.head_dim for n in (c.heads, c.kv_heads, c.kv_heads)])):
            yield f"{name}_proj.weight", part
        if c.qk_norm:
            yield "q_norm.weight", self.q_norm.detach()
            yield "k_norm.weight", self.k_norm.detach()

    def forward(self, ops, added, stream, turn, attend, recur, note, tag):
        c = self.config
        tag("norm")
        x, stream = norm(ops, added, self.norm, stream, c.eps)
        x = self.other(ops, x, attend, recur, note, tag) if self.other else self.attended(ops, x, turn, attend, note, tag)
        tag("out")
        x = ops.linear(x.flatten(1), self.out)
        tag("mlp_norm")
        x, stream = norm(ops, x, self.mlp_norm, stream, c.eps)
        note("stream", stream)
        x = gated(ops, x, self.gate_up, tag)
        tag("down")
        x = ops.linear(x, self.down)
        note("mlp", x)
        return x, stream

    def attended(self, ops, x, turn, attend, note, tag):
        c = self.config
        tag("qkv")
        qkv = ops.linear(x, self.qkv)
        note("qkv", qkv)
        x = turn(self, qkv.unflatten(-1, (-1, c.head_dim)), attend, note, tag)
        note("attention", x)
        return x


def fp8(x):
    """Keys or values as a cache of 8 bits holds them: what is beyond its largest number becomes that."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn)


class Rounded(torch.autograd.Function):
    """What such a cache's numbers are in x's dtype; x gets their gradient."""

    @staticmethod
    def forward(ctx, x):
        return fp8(x).to(x.dtype)

    @staticmethod
    def backward(ctx, d_x):
        return d_x


class Turn:
    """The norms of q's and k's heads, their rotation, and attention. Where nobody wants a trace, norms and rotation are one op with the bits of
    the three. Without a gradient it also takes k and v to their places in a cache: ``keep(layer, v)`` names these as the op does, and then
    attend has None for k and v. With one, attention is part of the step, for its backward: within sequences of these `bounds`."""

    def __init__(self, model, positions, keep, noted, bounds, prefix_of):
        self.model, self.positions, self.keep, self.noted, self.bounds, self.prefix_of = model, positions, keep, noted, bounds, prefix_of
        self.learns = torch.is_grad_enabled()
        known = model.ops is rlk.torch or not self.learns and getattr(model.ops, "turns", False)
        plain = rlk.tracing() or model.config.head_dim > 256 or self.learns and (
            bounds is None or model.config.fp8_cache or torch.compiler.is_compiling())
        self.at_once = None if known and not plain else False  # None: not asked yet

    def __call__(self, layer, block, qkv, attend, note, tag):
        """Rows of attention, of the product qkv [T, heads, D]."""
        found = self._found(self._learned if self.learns else self._one, layer, block, qkv, note)
        if self.learns and found is not None:
            return found
        q, k, v = found or self._each(block, qkv, note, tag)
        tag("attention")
        return attend(q, k, v)

    def _found(self, way, layer, block, qkv, note):
        """What the one op gives; None: it has not the bits of the three here, or there is none."""
        if self.at_once is None:
            self.at_once = self._same_bits(block, qkv)
        if self.at_once:
            try:
                return way(layer, block, qkv, note)
            except (_errors.NoImplementation, _errors.Unsupported):
                self.at_once = False
        return None

    def _same_bits(self, block, qkv):
        """Whether the three have the arithmetic here that the one op has: a scope or RLK_BACKEND may want another. The norm's backward must
        have it too: it gets no rstd of the forward."""
        m, c = self.model, block.config
        with torch.no_grad():
            q, k, _ = parts(qkv, c)
            found = [rlk.resolve("rope", q, m.cos, m.sin, k=k, positions=self.positions, layout="thd")]
            if c.qk_norm:
                found.append(rlk.resolve("rms_norm", q, block.q_norm, eps=c.eps))
            if c.qk_norm and self.learns:
                found.append(rlk.resolve("rms_norm_bwd", q, q, block.q_norm, d_x=True, d_weight=True, eps=c.eps))
        return all(found) and {f.arithmetic for f in found} <= {"rms32", "rope32"}

    def _each(self, block, qkv, note, tag):
        c, m = self.model.config, self.model
        q, k, v = parts(qkv, c)
        if c.qk_norm:
            with branch(q) as queries:
                tag("q_norm")
                q = m.ops.rms_norm(q, block.q_norm, eps=c.eps)
            tag("k_norm")
            k = m.ops.rms_norm(k, block.k_norm, eps=c.eps)
            queries.join()
        tag("rope")
        q, k = m.ops.rope(q, m.cos, m.sin, k=k, positions=self.positions, layout="thd")
        note("rope", k)
        return q, k, v

    def _one(self, layer, block, qkv, note):
        m, c = self.model, self.model.config
        q, k, v = parts(qkv, c)
        norms = {"q_weight": block.q_norm, "k_weight": block.k_norm} if c.qk_norm else {}
        kept = self.keep(layer, v) if self.keep else {}
        found = m.ops.qk_norm_rope(q, k, m.cos, m.sin, self.positions, **norms, **kept, k_out=self.noted or not kept, eps=c.eps,
                                   arithmetic="rms32/rope32")
        q, k = found if isinstance(found, tuple) else (found, None)
        if k is not None:
            note("rope", k)
        return (q, None, None) if kept else (q, k, v)

    def _learned(self, layer, block, qkv, note):
        m = self.model
        x, k = Attended.apply(qkv, block.q_norm, block.k_norm, m.cos, m.sin, self.positions, self.bounds, self.prefix_of, m.config)
        note("rope", k)
        return x


def chain_of(arithmetic):
    """lm_head's part of an arithmetic of linear_logp's."""
    return arithmetic.removesuffix("/lse128/l8").removesuffix("/ex2/lse2048/l8")


def norm(ops, added, weight, stream, eps):
    """The norm of stream + added, and that sum."""
    if stream is None:
        return ops.rms_norm(added, weight, eps=eps), added
    if not torch.is_grad_enabled():
        return ops.rms_norm(added, weight, stream, sum=True, eps=eps)
    if ops is rlk.torch:
        return AddNorm.apply(added, stream, weight, eps)
    if hasattr(ops, "add_norm"):
        return ops.add_norm(added, stream, weight, eps)
    stream = stream + added
    return ops.rms_norm(stream, weight, eps=eps), stream


def places(cu_seqlens, rows, prefix_of=None):
    """Which token of its sequence each row is, without a look at the lengths by the host. Those of another come first where there is prefix_of."""
    row = torch.arange(rows, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    place = row - cu_seqlens[sequence]
    if prefix_of is not None:
        place = place + _shared(cu_seqlens, prefix_of)[sequence.clamp(max=len(prefix_of) - 1)]
    return place.to(torch.int32)


def _expect_prefixes(prefix_of, sequences):
    if len(prefix_of) != sequences:
        raise _errors.InvalidArgument(f"model: prefix_of has {len(prefix_of)} sequences, cu_seqlens has {sequences}")
    for n, of in enumerate(prefix_of):
        if not -1 <= of < n or of >= 0 and prefix_of[of] != -1:
            raise _errors.InvalidArgument(f"model: prefix_of[{n}] is {of}, it must be -1 or a sequence before {n} that has no prefix itself")


def _shared(cu_seqlens, prefix_of):
    """How many tokens of another sequence come before those of each."""
    return cu_seqlens.diff()[prefix_of.long().clamp(min=0)].masked_fill(prefix_of < 0, 0)


class branch:
    """``with branch(x) as b:`` while a GPU's graph without gradients is captured, what is inside runs beside what follows, up to b.join(). Else in turn."""

    _streams = {}

    def __init__(self, like):
        self.stream = None
        if like.is_cuda and not torch.is_grad_enabled() and torch.cuda.is_current_stream_capturing():
            self.stream = self._streams.get(like.device) or self._streams.setdefault(like.device, torch.cuda.Stream(like.device))
            self.scope = torch.cuda.stream(self.stream)

    def __enter__(self):
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
            self.scope.__enter__()
        return self

    def __exit__(self, *given):
        if self.stream is not None:
            self.scope.__exit__(*given)

    def join(self):
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


def gated(ops, x, weight, tag):
    """swiglu of linear, in one step of the same bits where there is one, it is faster (on a GPU, of up to 16 rows), and neither a gradient nor a
    trace wants what is between."""
    wanted = getattr(ops, "gates", ops is rlk.torch) and not (x.is_cuda and len(x) > 16)
    if wanted and not torch.is_grad_enabled() and not rlk.tracing():
        try:  # a rank without a row of the weight has no product to hold to an arithmetic
            held = {"arithmetic": rlk.resolve("linear", x, weight.detach()).arithmetic} if len(weight) else {}
            return ops.linear(x, weight, activation="swiglu", **held)
        except (_errors.NoImplementation, _errors.Unsupported):
            pass
    tag("gate_up")
    x = ops.linear(x, weight)
    tag("swiglu")
    return ops.swiglu(x)


class Decoder(nn.Module):
    """A model of the Qwen3 or Llama kind. Weights are random by seed until they are loaded; without a seed they are drawn on the device, quickly, and
    not the same on another kind of it."""

    def __init__(self, shape="tiny-qwen3", *, seed=0, dtype=torch.float32, device="cpu", ops=rlk.torch):
        super().__init__()
        self.config, self.ops, self._chain = config(shape), ops, None
        c, draw = self.config, torch.Generator(device if seed is None else "cpu").manual_seed(seed or 0)

        def make(*size, ones=False):
            data = torch.ones(size) if ones else torch.randn(size, generator=draw, device=draw.device) * (size[-1] ** -0.5)
            return nn.Parameter(data.to(device=device, dtype=dtype))

        self.embed = make(c.vocab, c.width)
        self.blocks = nn.ModuleList(Block(c, make, i) for i in range(c.layers))
        self.norm = make(c.width, ones=True)
        self.head = None if c.tied else make(c.vocab, c.width)
        if not c.period:
            cos, sin = rlk.torch.rope_tables(rotary_dim=c.head_dim, rows=c.max_length, base=c.theta, **c.scaling)
            self.register_buffer("cos", cos.to(device), persistent=False)
            self.register_buffer("sin", sin.to(device), persistent=False)

    @property
    def device(self):
        return self.embed.device

    @property
    def head_weight(self):
        return self.embed if self.head is None else self.head

    def forward(self, tokens, positions, attend, note=None, recur=None, keep=None, bounds=None, prefix_of=None):
        """Hidden rows [T, width] of tokens [T] at positions [T]. attend(layer, q, k, v) is all that sees more than a row, and in a
        model with recurrent layers recur(layer, block, qkv, decay, beta);
        note(layer, name, rows) is shown what every op leaves. Where keep(layer, v) gives the caches of a layer, with their slots and
        v, as qk_norm_rope takes them, it may be that op which writes there, and then attend has None for k and v. With `bounds` attend is
        attention within packed sequences of these bounds, with prefix_of that over their prefixes, and it may be that nobody calls it."""
        ops = self.ops

        tag = rlk.trace_tag if rlk.tracing() else lambda text: None
        turn = None if self.config.period else Turn(self, positions, keep, note is not None, bounds, prefix_of)
        note = note or (lambda layer, name, rows: None)

        tag("embedding")
        added, stream = ops.embedding(tokens, self.embed), None
        note(-1, "embedding", added)
        for i, block in enumerate(self.blocks):
            added, stream = block(ops, added, stream, lambda *given: turn(i, *given), lambda q, k, v: attend(i, q, k, v),
                                  lambda *given: recur(i, *given),
                                  lambda name, rows: note(i, name, rows), lambda role: tag(f"layer {i} {role}"))
        tag("last norm")
        hidden, _ = norm(ops, added, self.norm, stream, self.config.eps)
        tag(None)
        note(len(self.blocks), "hidden", hidden)
        return hidden

    def packed(self, tokens, cu_seqlens, sequences=None, prefix_of=None, **options):
        """Hidden rows of packed sequences: sequence b is tokens[cu_seqlens[b]:cu_seqlens[b + 1]]. In a trace its rows are those of
        sequences[b], or of b; they stay so until the caller says otherwise. prefix_of: the sequence whose tokens come before those of each, as
        a prompt does before its samples, or -1; it is one before, without a prefix itself. Its rows are computed once."""
        if prefix_of is not None and self.config.period:
            raise _errors.Unsupported("model: prefix_of is given, and recurrent layers have one state for a sequence: bring each sample's prompt")
        if not (cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing()):  # whose lengths are another's when it is replayed
            self._expect_lengths(cu_seqlens, len(tokens), prefix_of)
        positions = places(cu_seqlens, len(tokens), prefix_of)
        if rlk.tracing():
            bounds = cu_seqlens.tolist()
            names = range(len(bounds) - 1) if sequences is None else sequences
            rlk.trace_rows([name for name, a, b in zip(names, bounds, bounds[1:]) for _ in range(b - a)], positions.tolist())

        shared = {} if prefix_of is None else {"prefix_of": prefix_of}

        def attend(layer, q, k, v):
            if self.config.fp8_cache:
                k, v = Rounded.apply(k), Rounded.apply(v)
            return self.ops.attention(q, k, v, cu_seqlens, cu_seqlens, **shared)

        options |= shared
        if self.config.period:
            options["recur"] = Packed(self.ops, cu_seqlens)
        return self.forward(tokens, positions, attend, bounds=cu_seqlens, **options)

    def _expect_lengths(self, cu_seqlens, tokens, prefix_of):
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != tokens:  # attention leaves rows of no sequence as they were, NaN or not
            raise _errors.InvalidArgument(f"model: cu_seqlens goes from {bounds[0]} to {bounds[-1]}, there are {tokens} tokens: "
                                          "what pads a batch is a sequence of its own")
        lengths = [b - a for a, b in zip(bounds, bounds[1:])]
        if prefix_of is not None:
            _expect_prefixes(prefix_of.tolist(), len(lengths))
            lengths = [n + (lengths[of] if of >= 0 else 0) for n, of in zip(lengths, prefix_of.tolist())]
        longest = max(lengths, default=0)
        if longest > self.config.max_length:
            raise _errors.InvalidArgument(
                f"model: a sequence has {longest} tokens, max_length is {self.config.max_length}")

    def score(self, tokens, cu_seqlens, temperature=1.0, entropy=False, prefix_of=None, **options):
        """[T]: the log-probability of every token after those before it; 0 for the first of a sequence that has no prefix. With entropy, also
        that of the distribution the token was drawn from."""
        hidden = self.packed(tokens, cu_seqlens, prefix_of=prefix_of, **options)
        begins = torch.zeros(len(tokens) + 1, dtype=torch.bool, device=tokens.device).index_fill(0, cu_seqlens.long(), True)
        target = tokens.roll(-1).to(torch.int32).masked_fill(begins[1:], -100)
        if prefix_of is not None:
            begin, follows, before = self._after_prefixes(cu_seqlens, prefix_of, len(tokens))
            hidden = torch.cat([hidden, rlk.torch.embedding(before, hidden)])
            target = torch.cat([target, tokens[begin].to(torch.int32).masked_fill(~follows, -100)])
        if rlk.tracing():
            rlk.trace_tag("score")
        found = self.ops.linear_logp(hidden, self.head_weight, target=target, temperature=temperature, logp=True,
                                     **({"entropy": True} if entropy else {}))
        if rlk.tracing():
            rlk.trace_tag(None)
            rlk.trace_rows()
        # Row t speaks of token t + 1; the last row of a sequence is left out and is 0.
        found = found if entropy else (found,)
        if prefix_of is None:
            found = tuple(f.roll(1) for f in found)
        else:  # the last row of a prefix speaks of the first token of each that follows
            found = tuple(f[:len(tokens)].roll(1).index_add(0, begin, f[len(tokens):].masked_fill(~follows, 0)) for f in found)
        return found if entropy else found[0]

    @staticmethod
    def _after_prefixes(cu_seqlens, prefix_of, rows):
        """Of each sequence: the row of its first token, whether there is one after a prefix, and that prefix's last row."""
        of = prefix_of.long()
        begin, last = cu_seqlens[:-1].long().clamp(max=max(rows - 1, 0)), cu_seqlens[1:].long()[of.clamp(min=0)] - 1
        follows = (of >= 0) & (cu_seqlens.diff() > 0) & (_shared(cu_seqlens, prefix_of) > 0)
        return begin, follows, last.masked_fill(~follows, 0)

    def logits(self, hidden):
        """[T, vocab] in fp32, by the chain of sums that score's linear_logp has on this device: what is drawn is what is scored."""
        if self.ops is not rlk.torch:
            return self.ops.lm_head(hidden, self.head_weight, out="fp32")
        if self._chain is None:
            target = torch.zeros(len(hidden), dtype=torch.int32, device=hidden.device)
            found = rlk.resolve("linear_logp", hidden.detach(), self.head_weight.detach(), target=target, logp=True)
            self._chain = chain_of(found.arithmetic)
        return self.ops.lm_head(hidden, self.head_weight, out="fp32", arithmetic=self._chain)

    # ---- weights as Hugging Face stores them

    def _names(self):
        """(name in a checkpoint, the part of a parameter that it is, shaped as there) for all that a checkpoint holds."""
        c = self.config
        yield "model.embed_tokens.weight", self.embed.detach()
        for i, b in enumerate(self.blocks):
            at = f"model.layers.{i}."
            yield at + "input_layernorm.weight", b.norm.detach()
            for name, part in b.other.names() if b.other else b.names():
                yield at + "self_attn." + name, part
            yield at + "self_attn.o_proj.weight", b.out.detach()
            yield at + "post_attention_layernorm.weight", b.mlp_norm.detach()
            yield at + "mlp.gate_proj.weight", b.gate_up.detach()[:c.mlp]
            yield at + "mlp.up_proj.weight", b.gate_up.detach()[c.mlp:]
            yield at + "mlp.down_proj.weight", b.down.detach()
        yield "model.norm.weight", self.norm.detach()
        if self.head is not None:
            yield "lm_head.weight", self.head.detach()

    def save(self, folder):
        """config.json and model.safetensors, as transformers reads them."""
        from safetensors.torch import save_file
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: part.cpu().contiguous() for name, part in self._names()},
                  folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(to_checkpoint(self.config, self.embed.dtype), indent=2))

    def load_weights(self, folder):
        """Takes every weight from the *.safetensors of a folder. One that is missing, left over or of another shape is an error,
        and then nothing has changed."""
        from safetensors import safe_open
        found = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():
                    found[name] = (file, tensors.get_slice(name).get_shape())
        wanted = dict(self._names())
        extra = {"lm_head.weight"} if self.config.tied else set()  # a tied head may be stored twice
        missing, over = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys() - extra)
        if missing or over:
            raise _errors.InvalidArgument(f"{folder}: " + "; ".join(
                f"{word} {len(names)}, the first is {names[0]}" for word, names in (("missing", missing), ("not known", over)) if names))
        for name, part in wanted.items():
            if list(part.shape) != list(found[name][1]):
                raise _errors.InvalidArgument(f"{folder}: {name} is {list(found[name][1])}, the model has {list(part.shape)}")
        for file in {file for file, _ in found.values()}:
            with safe_open(file, framework="pt") as tensors:
                for name in wanted.keys() & set(tensors.keys()):
                    wanted[name].copy_(tensors.get_tensor(name))
        return self


def to_checkpoint(c, dtype=torch.float32):
    """A Config in the words of transformers' config.json."""
    if c.period:
        return _to_kimi(c, dtype)
    rope = {"rope_type": "default", "rope_theta": c.theta}
    if c.scaling:
        s = c.scaling
        rope |= {"rope_type": s["scaling"], "factor": s["factor"], "low_freq_factor": s["low_freq_factor"],
                 "high_freq_factor": s["high_freq_factor"], "original_max_position_embeddings": s["original_max"]}
    return {"architectures": ["Qwen3ForCausalLM" if c.qk_norm else "LlamaForCausalLM"],
            "model_type": "qwen3" if c.qk_norm else "llama", "vocab_size": c.vocab, "hidden_size": c.width,
            "num_hidden_layers": c.layers, "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads,
            "head_dim": c.head_dim, "intermediate_size": c.mlp, "rms_norm_eps": c.eps, "hidden_act": "silu",
            "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": c.tied,
            "max_position_embeddings": c.max_length, "rope_theta": c.theta, "rope_parameters": rope,
            "rope_scaling": rope if c.scaling else None, "torch_dtype": str(dtype).removeprefix("torch."),
            "bos_token_id": None, "eos_token_id": None}


def _to_kimi(c, dtype):
    layers = range(1, c.layers + 1)
    return {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "vocab_size": c.vocab, "hidden_size": c.width,
            "num_hidden_layers": c.layers, "num_attention_heads": c.heads, "num_key_value_heads": c.heads,
            "intermediate_size": c.mlp, "rms_norm_eps": c.eps, "hidden_act": "silu", "attention_bias": False,
            "tie_word_embeddings": c.tied, "model_max_length": c.max_length, "q_lora_rank": None, "kv_lora_rank": c.latent,
            "qk_nope_head_dim": c.plain_dim, "qk_rope_head_dim": c.extra_dim, "v_head_dim": c.value_dim, "mla_use_nope": True,
            "linear_attn_config": {"full_attn_layers": [i for i in layers if i % c.period == 0],
                                   "kda_layers": [i for i in layers if i % c.period], "num_heads": c.heads,
                                   "head_dim": c.state_dim, "short_conv_kernel_size": c.conv},
            "mlp_layer_types": ["dense"] * c.layers, "torch_dtype": str(dtype).removeprefix("torch."),
            "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def _from_kimi(d):
    """Of config.json as it was published, with linear_attn_config, and as transformers writes it."""
    layers, heads, linear = d["num_hidden_layers"], d["num_attention_heads"], d.get("linear_attn_config") or {}
    types = d.get("layer_types") or ["full_attention" if i + 1 in linear["full_attn_layers"] else "linear_attention" for i in range(layers)]
    period = next((i + 1 for i, kind in enumerate(types) if kind == "full_attention"), 0)
    if not period or types != ["linear_attention" if (i + 1) % period else "full_attention" for i in range(layers)]:
        raise _errors.Unsupported("config.json: layers with attention are not every n-th, this decoder has them so")
    dense = d.get("mlp_layer_types") or ["dense"] * min(layers, d.get("first_k_dense_replace", 1))
    if dense.count("dense") != layers:
        raise _errors.Unsupported(f"config.json: {layers - dense.count('dense')} of {layers} layers have experts, this decoder's MLPs are dense")
    kda_heads = linear.get("num_heads", d.get("linear_num_heads"))
    _expect(d | {"heads of KDA": kda_heads}, q_lora_rank=None, mla_use_nope=True, num_key_value_heads=heads, **{"heads of KDA": heads})
    plain, extra = d["qk_nope_head_dim"], d["qk_rope_head_dim"]
    return Config(d["vocab_size"], d["hidden_size"], layers, heads, heads, plain + extra, d["intermediate_size"], eps=d["rms_norm_eps"],
                  qk_norm=False, tied=bool(d.get("tie_word_embeddings", False)),
                  max_length=d.get("model_max_length") or d["max_position_embeddings"], period=period,
                  state_dim=linear.get("head_dim", d.get("linear_head_dim")), latent=d["kv_lora_rank"], plain_dim=plain, extra_dim=extra,
                  conv=linear.get("short_conv_kernel_size", d.get("linear_conv_kernel_dim")), value_dim=d["v_head_dim"])


def _expect(d, **wanted):
    for name, value in wanted.items():
        if d.get(name, value) != value:
            raise _errors.Unsupported(f"config.json: {name} is {d[name]!r}, this decoder has {value!r}")


def from_checkpoint(d):
    """A Config from config.json; what this decoder does not compute is refused by name."""
    kind = d.get("model_type")
    if kind not in ("qwen3", "llama", "kimi_linear"):
        raise _errors.Unsupported(f"config.json: model_type {kind!r} is not known; known: qwen3, llama, kimi_linear")
    _expect(d, hidden_act="silu", attention_bias=False, mlp_bias=False, use_sliding_window=False)
    if kind == "kimi_linear":
        return _from_kimi(d)
    rope = d.get("rope_parameters") or d.get("rope_scaling") or {}
    form = rope.get("rope_type", rope.get("type", "default"))
    if form not in ("default", "llama3"):
        raise _errors.Unsupported(f"config.json: rope_type {form!r} is not known; known: default, llama3")
    scaling = {} if form == "default" else {
        "scaling": "llama3", "factor": float(rope["factor"]), "low_freq_factor": float(rope["low_freq_factor"]),
        "high_freq_factor": float(rope["high_freq_factor"]), "original_max": int(rope["original_max_position_embeddings"])}
    heads = d["num_attention_heads"]
    return Config(d["vocab_size"], d["hidden_size"], d["num_hidden_layers"], heads, d.get("num_key_value_heads", heads),
                  d.get("head_dim") or d["hidden_size"] // heads, d["intermediate_size"],
                  theta=float(rope.get("rope_theta", d.get("rope_theta", 1e4))), eps=d["rms_norm_eps"], qk_norm=kind == "qwen3",
                  tied=bool(d.get("tie_word_embeddings", False)), max_length=d["max_position_embeddings"], scaling=scaling)


def load(folder, **options):
    """The decoder of a folder with config.json and *.safetensors."""
    text = json.loads((Path(folder) / "config.json").read_text())
    named = text.get("dtype") or text.get("torch_dtype") or "float32"
    options.setdefault("dtype", getattr(torch, named))
    return Decoder(from_checkpoint(text), **options).load_weights(folder)


def describe(c):
    """A configuration on one line."""
    return ", ".join(f"{k}={v}" for k, v in asdict(c).items() if v or v is False)
