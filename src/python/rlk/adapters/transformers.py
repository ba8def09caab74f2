"""rlk in models of Hugging Face transformers.

    with rlk.adapters.transformers.patch(model):
        model(...)

takes rope and lm_head of that model from rlk; without ``with`` it stays so until ``restore()``. Rope is a function of a model's
module, so other models of the same kind are changed too. A function that is not known, by its very text, is refused.

    rlk.torch.patch(model)

takes all that decides a row's bits: every linear layer, norm, gated MLP, rope, attention and lm_head. Then what ``generate`` computes
from its cache, in any batch, padded on the left or not, has the bits of a forward over the whole sequence.
"""

import ast
import inspect
import sys
import textwrap

import torch

import rlk.torch
from rlk import _errors
from rlk.adapters._patch import Patch, dense, refuse

_KNOWN_ROPE = """
def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed
"""
_KNOWN_HALF = """
def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)
"""


_KNOWN_NORM = """
def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)
"""
_KNOWN_MLP = """
def forward(self, x):
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj
"""


def _body(source):
    """What a function does, without its docstring and decorators."""
    function = ast.parse(textwrap.dedent(source)).body[0]
    first = function.body[0]
    text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return [ast.dump(function.args), *(ast.dump(s) for s in function.body[1 if text else 0:])]


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    """The function of that name in models that turn halves, over rlk.torch.rope."""
    if unsqueeze_dim not in (1, 2):
        raise _errors.InvalidArgument(f"apply_rotary_pos_emb: unsqueeze_dim is {unsqueeze_dim}, it must be 1 or 2")
    if cos.dim() == 3 and cos.shape[0] == 1:  # one table for the whole batch
        cos, sin = cos[0], sin[0]
    q, k, cos, sin = dense(q, k, cos, sin)
    return rlk.torch.rope(q, cos, sin, k=k, table="full", layout="bhsd" if unsqueeze_dim == 1 else "bshd")


@torch.compiler.disable  # where rows lie depends on values: a graph would break here anyway
def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, sliding_window=None, softcap=None,
              position_ids=None, cu_seq_lens_q=None, s_aux=None, output_attentions=False, **_):
    """transformers' attention interface over rlk.torch.attention. attention_mask is None or [B, tokens]: which of them are there."""
    refuse("attention", dropout=(dropout, 0.0), s_aux=(s_aux, None), output_attentions=(output_attentions or False, False))
    if cu_seq_lens_q is not None or (attention_mask is None and position_ids is not None and
                                     bool((position_ids.diff(dim=-1) != 1).any())):
        raise _errors.Unsupported("attention: several sequences lie in one row of the batch, this adapter takes one in each")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    options = {"scale": scaling or 0.0, "causal": getattr(module, "is_causal", True), "window": sliding_window or 0,
               "softcap": softcap or 0.0}
    if attention_mask is None:
        tokens = _whole(q, k, position_ids)
        if tokens:
            return rlk.torch.attention(q, k[:, :tokens], v[:, :tokens], **options), None
        attention_mask = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)
    if attention_mask.dim() != 2:
        raise _errors.Unsupported(f"attention: the mask has {attention_mask.dim()} axes, rlk takes [batch, tokens] of padding alone")
    here = attention_mask.bool()
    if here.shape[1] < k.shape[1]:  # a cache with room for more
        k, v = k[:, :here.shape[1]], v[:, :here.shape[1]]
    asks = here[:, here.shape[1] - q.shape[1]:]
    cu_q, cu_k, k, v = _packed_keys(k[here], v[here], here, asks, position_ids, sliding_window)
    found = rlk.torch.attention(q[asks], k, v, cu_q, cu_k, **options)
    return torch.zeros(q.shape, dtype=q.dtype, device=q.device).masked_scatter(asks[:, :, None, None], found), None


def _whole(q, k, position_ids):
    """How many of the keys there are, of a cache that may have room for more; 0 where a cache has dropped some, or sequences differ."""
    if position_ids is None or k.shape[1] == q.shape[1]:
        return k.shape[1]
    ends = position_ids[:, -1] + 1
    tokens = int(ends[0])
    return tokens if tokens <= k.shape[1] and bool((ends == tokens).all()) else 0


def _packed_keys(k, v, here, asks, position_ids, window):
    """Bounds of queries and keys, and keys and values, one sequence after the other. here, asks: which places hold a key, a query. A
    cache that keeps a window alone has dropped keys: they become zeros, which no query sees, so that the others lie where they lie in
    the whole sequence."""
    queries, keys = asks.sum(1), here.sum(1)
    tokens = keys
    if position_ids is not None:
        ends = (position_ids.expand(asks.shape) + 1).masked_fill(~asks, 0).amax(1)
        tokens = torch.where(queries > 0, ends, keys)
        if bool((tokens < keys).any()) or (not window and bool((tokens != keys).any())):
            raise _errors.Unsupported(f"attention: positions end at {tokens.tolist()}, sequences have {keys.tolist()} tokens: positions "
                                      "must count them, as attention_mask.cumsum(1) - 1 does")
    cu_q, cu_k = (torch.nn.functional.pad(n.cumsum(0), (1, 0)).to(torch.int32) for n in (queries, tokens))
    if bool((tokens != keys).any()):
        sequence = torch.repeat_interleave(tokens)
        kept = torch.arange(len(sequence), device=k.device) - cu_k[sequence] >= (tokens - keys)[sequence]
        k, v = (t.new_zeros(len(kept), *t.shape[1:]).masked_scatter(kept[:, None, None], t) for t in (k, v))
    return cu_q, cu_k, k, v


def _patch_positions(model, patch):
    """Where a padded batch comes without positions, they count a row's own tokens, as generate() has them."""
    inner = model.base_model
    before, names = inner.forward, list(inspect.signature(inner.forward).parameters)

    def forward(*args, **given):
        given = dict(zip(names, args)) | given
        mask, rows = given.get("attention_mask"), given.get("input_ids")
        rows = given.get("inputs_embeds") if rows is None else rows
        if given.get("position_ids") is None and mask is not None and mask.dim() == 2 and rows is not None and not bool(mask.all()):
            given["position_ids"] = (mask.long().cumsum(1) - 1).clamp(min=0)[:, -rows.shape[1]:]
        return before(**given)

    patch.replace(inner, "forward", forward)


def _patch_rows(model, patch):
    """Layers that look at one row alone."""
    for path, module in model.named_modules():
        kind = type(module)
        if kind is torch.nn.Linear:
            patch.replace(module, "forward", lambda x, m=module: rlk.torch.linear(x, m.weight, m.bias))
        elif kind.__name__.endswith("RMSNorm"):
            if _body(inspect.getsource(kind.forward)) != _body(_KNOWN_NORM):
                raise _errors.Unsupported(f"{path}: {kind.__module__}.{kind.__name__} is a norm that this adapter does not know")
            patch.replace(module, "forward", lambda x, m=module: rlk.torch.rms_norm(
                x, m.weight, eps=m.variance_epsilon, cast="early"))
        elif kind.__name__.endswith("MLP"):
            if _body(inspect.getsource(kind.forward)) != _body(_KNOWN_MLP) or model.config.hidden_act not in ("silu", "swish"):
                raise _errors.Unsupported(f"{path}: {kind.__module__}.{kind.__name__} is an MLP that this adapter does not know")
            patch.replace(module, "forward", lambda x, m=module: m.down_proj(rlk.torch.swiglu(
                m.gate_proj(x), m.up_proj(x), roundings="twice")))
        elif kind is not torch.nn.Embedding and any(True for _ in module.parameters(recurse=False)):
            raise _errors.Unsupported(f"{path}: {kind.__module__}.{kind.__name__} has weights, and this adapter does not know it")
        if hasattr(module, "rope_type"):
            _refuse_rope(path, module)
            # A compiler's sine has other bits than PyTorch's, and in other sizes others again.
            patch.replace(module, "forward", torch.compiler.disable(module.forward))


def _refuse_rope(path, module):
    """Frequencies that depend on how long the longest sequence is: a key in the cache keeps what held when it was computed."""
    kinds = module.rope_type
    for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
        if kind in ("dynamic", "longrope"):
            raise _errors.Unsupported(f"{path}: rope_type {kind!r} turns a token by the length of the batch's longest sequence, so what is "
                                      "generated is not what is scored")


def _patch_attention(model, patch):
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask
    AttentionInterface.register("rlk", attention)
    AttentionMaskInterface.register("rlk", flash_attention_mask)
    before = model.config._attn_implementation
    model.config._attn_implementation = "rlk"
    patch.undo(lambda: setattr(model.config, "_attn_implementation", before))


def patch(model, whole=False):
    """Takes a model's rope and lm_head from rlk; with whole, all its layers. Returns what undoes it."""
    patch = Patch()
    try:
        _patch(model, patch, whole)
    except BaseException:
        patch.restore()
        raise
    return patch


def _patch(model, patch, whole):
    if whole:
        _patch_rows(model, patch)
        _patch_positions(model, patch)
        _patch_attention(model, patch)
    module = sys.modules[type(model).__module__]
    rope = getattr(module, "apply_rotary_pos_emb", None)
    if rope is not None and rope is not apply_rotary_pos_emb:
        half = getattr(module, "rotate_half", None)
        if _body(inspect.getsource(rope)) != _body(_KNOWN_ROPE) or _body(inspect.getsource(half)) != _body(_KNOWN_HALF):
            raise _errors.Unsupported(f"{module.__name__}: its apply_rotary_pos_emb is none that this adapter knows")
        patch.replace(module, "apply_rotary_pos_emb", apply_rotary_pos_emb)
    head = getattr(model, "lm_head", None)
    if type(head) is torch.nn.Linear:
        patch.replace(head, "forward", lambda hidden: rlk.torch.lm_head(hidden, head.weight, head.bias))
