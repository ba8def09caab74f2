"""Kernels of others that a bench measures beside ours, where they can be imported: Liger, Quack, FlashInfer, FA4.

A function takes what ours takes and returns candidates of a row of chain.py, by the name of whose they are.
"""

import functools
import importlib
import sys

import torch

NAMES = ("liger", "quack", "flashinfer", "fa4")


@functools.cache
def module(name):
    """None, and a line that says so, where it cannot be imported."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # some look for a GPU or for a library meanwhile
        why = str(error).splitlines() or [type(error).__name__]
        print(f"{name} cannot be imported: {why[0][:150]}", file=sys.stderr, flush=True)


def found(tensor, names, make):
    """What `make` makes of modules, or nothing: where one is missing, and on a CPU."""
    modules = [module(name) for name in names] if tensor.is_cuda else [None]
    return make(*modules) if all(modules) else {}


def leaves(*tensors):
    """Copies: what Liger's backward passes write over."""
    return [t.clone().requires_grad_() for t in tensors]


def rms_norm(x, w, eps):
    return {
        **found(x, ["liger_kernel.ops.rms_norm"], lambda liger: {
            "liger": lambda: liger.rms_norm_forward(x, w, eps, 0.0, "llama", None)}),
        **found(x, ["quack.rmsnorm"], lambda quack: {"quack": lambda: quack.rmsnorm_fwd(x, w, eps=eps)})}


def add_rms_norm(x, r, w, eps):
    return {
        **found(x, ["liger_kernel.ops.fused_add_rms_norm"], lambda liger: {
            "liger": lambda: liger.fused_add_rms_norm_forward(x, r, w, eps, 0.0, "llama")}),
        **found(x, ["quack.rmsnorm"], lambda quack: {"quack": lambda: quack.rmsnorm_fwd(x, w, residual=r, eps=eps)})}


def rms_norm_bwd(dy, x, w, eps, d_sum=None):
    """With d_sum: of add_rms_norm, x being the sum."""
    def liger(norm, add):
        if d_sum is None:
            body = lambda x, w: norm.LigerRMSNormFunction.apply(x, w, eps)  # noqa: E731
            return {"liger": ("backward", body, leaves(x, w), dy.clone())}
        body = lambda x, r, w: add.LigerFusedAddRMSNormFunction.apply(x, r, w, eps)  # noqa: E731
        return {"liger": ("backward", body, leaves(x, torch.zeros_like(x), w), (dy, d_sum))}

    def quack(norm):
        def prepare():
            rstd = norm.rmsnorm_fwd(x, w, eps=eps, store_rstd=True)[2]
            return lambda: norm.rmsnorm_bwd(x, w, dy, rstd, d_sum, has_residual=d_sum is not None)

        return {"quack": ("prepared", prepare)}

    return {**found(x, ["liger_kernel.ops.rms_norm", "liger_kernel.ops.fused_add_rms_norm"], liger),
            **found(x, ["quack.rmsnorm"], quack)}


def swiglu(gate, up):
    return found(gate, ["liger_kernel.ops.swiglu"], lambda liger: {"liger": lambda: liger.swiglu_forward(gate, up)})


def swiglu_bwd(d_out, gate, up):
    return found(gate, ["liger_kernel.ops.swiglu"], lambda liger: {
        "liger": ("backward", liger.LigerSiLUMulFunction.apply, leaves(gate, up), d_out)})


def embedding(ids, table):
    return found(table, ["liger_kernel.ops.experimental.embedding"], lambda liger: {
        "liger": lambda: liger.LigerEmbeddingFunction.apply(table, ids)})


def embedding_bwd(ids, d_out, table):
    return found(table, ["liger_kernel.ops.experimental.embedding"], lambda liger: {
        "liger": ("backward", lambda table: liger.LigerEmbeddingFunction.apply(table, ids), leaves(table), d_out)})


def logp(logits, target):
    """Liger reads numbers back, so it is timed with its host time."""
    wide = target.long()
    plain = (None, -100, 0.0, 0.0, "none", None)
    return {
        **found(logits, ["liger_kernel.ops.cross_entropy"], lambda liger: {
            "liger": ("uncaptured", lambda: liger.cross_entropy_forward(logits, wide, *plain, False))}),
        **found(logits, ["quack.cross_entropy"], lambda quack: {
            "quack": lambda: quack.cross_entropy_fwd(logits, target, return_lse=True)})}


def logp_bwd(logits, target, d):
    def quack(loss):
        def prepare():
            lse = loss.cross_entropy_fwd(logits, target, return_lse=True)[1]
            return lambda: loss.cross_entropy_bwd(logits, target, d, lse)

        return {"quack": ("prepared", prepare)}

    return found(logits, ["quack.cross_entropy"], quack)


def logp_both(logits, target, d):
    """Liger's forward writes the gradient over the logits."""
    wide = target.long()
    mine = leaves(logits) if logits.is_cuda and module("liger_kernel.ops.cross_entropy") else [None]

    def liger(loss):
        def run():
            value = loss.LigerCrossEntropyFunction.apply(mine[0], wide, None, -100, 0.0, 0.0, "none")[0]
            return torch.autograd.grad(value, mine, d.to(value.dtype))

        return {"liger": ("uncaptured", run)}

    def quack(loss):
        def run():
            lse = loss.cross_entropy_fwd(logits, target, return_lse=True)[1]
            return loss.cross_entropy_bwd(logits, target, d, lse)

        return {"quack": run}

    return {**found(logits, ["liger_kernel.ops.cross_entropy"], liger), **found(logits, ["quack.cross_entropy"], quack)}


def sample(logits, temperature, seed, top_k=None, top_p=None, min_p=None):
    """Filters are one number for all rows: FlashInfer takes tensors too, but is faster with numbers."""
    noise = {"seed": seed, "offset": torch.zeros_like(seed)}  # tensors, for a graph

    def calls(draw):
        if top_k and top_p:
            return lambda: draw.top_k_top_p_sampling_from_logits(logits / temperature[:, None], top_k, top_p, **noise)
        for draws, number in ((draw.top_k_sampling_from_probs, top_k), (draw.top_p_sampling_from_probs, top_p),
                              (draw.min_p_sampling_from_probs, min_p)):
            if number:
                return lambda: draws(draw.softmax(logits, temperature), number, **noise)
        return lambda: draw.sampling_from_logits(logits / temperature[:, None], **noise)

    return found(logits, ["flashinfer.sampling"], lambda draw: {"flashinfer": calls(draw)})


def attention(q, k, v, causal):
    return found(q, ["flash_attn.cute"], lambda flash: {
        "fa4": lambda: flash.flash_attn_func(q, k, v, causal=causal)[0]})


def attention_bwd(d_out, q, k, v, causal):
    return found(q, ["flash_attn.cute"], lambda flash: {
        "fa4": ("backward", lambda *inputs: flash.flash_attn_func(*inputs, causal=causal)[0], leaves(q, k, v), d_out)})
