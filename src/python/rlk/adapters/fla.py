"""rlk in flash-linear-attention: a backend of its registry for Kimi Delta Attention and for rope.

    with rlk.adapters.fla.patch():
        model(...)

What rlk does not serve goes on to FLA's other backends, which its log says with the reason. Padding on the left (negative offsets)
stays unrotated, where FLA writes zeros out of place.
"""

import torch

import rlk
import rlk.torch
from rlk import _errors
from rlk.adapters._patch import Patch, dense


def chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
              use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False,
              lower_bound=None, disable_recompute=False, return_intermediate_states=False, state_v_first=False,
              cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None, use_graph=False, max_num_seqs=None, *, A_log=None,
              dt_bias=None, chunk_size=64):
    """FLA's, as (o, final_state or None)."""
    reason = _unserved(return_intermediate_states=return_intermediate_states, cp_context=cp_context, use_graph=use_graph)
    if reason:
        raise _errors.Unsupported(f"chunk_kda: {reason}")
    inputs = {"initial_state": None if initial_state is None else initial_state.contiguous(),
              "cu_seqlens": None if cu_seqlens is None else cu_seqlens.long()}
    if use_gate_in_kernel:
        inputs |= {"a_log": None if A_log is None else A_log.reshape(-1).float(),
                   "dt_bias": None if dt_bias is None else dt_bias.reshape(-1).float()}
    found = rlk.torch.kda_fwd(
        *dense(q, k, v, g, beta), **inputs, **_step(scale, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
                                            allow_neg_eigval, lower_bound, state_v_first),
        safe_gate=safe_gate, chunk_size=chunk_size, final_state=bool(output_final_state))
    return found if output_final_state else (found, None)


def fused_recurrent_kda_fwd(q, k, v, g, beta, A_log=None, dt_bias=None, initial_state=None, scale=None, output_final_state=False,
                            inplace_final_state=True, state_v_first=False, cu_seqlens=None, ssm_state_indices=None,
                            num_accepted_tokens=None, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False,
                            use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, lower_bound=None, out=None):
    """FLA's, as (o, final_state or None); with inplace_final_state the initial state becomes the final one."""
    reason = _unserved(ssm_state_indices=ssm_state_indices is not None, num_accepted_tokens=num_accepted_tokens is not None)
    if reason:
        raise _errors.Unsupported(f"fused_recurrent_kda_fwd: {reason}")
    found, state = chunk_kda(
        q, k, v, g, beta, scale, initial_state, output_final_state or inplace_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound=lower_bound, state_v_first=state_v_first,
        cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias)
    if inplace_final_state:
        state = initial_state.copy_(state)
    return found if out is None else out.copy_(found), state


def fused_kda_gate(g, A_log=None, dt_bias=None, lower_bound=None, output_dtype=torch.float32):
    """FLA's: the log decay of a raw gate [.., HV, K], which, like FLA's, it makes dense first."""
    how = {"gate": "softplus"} if lower_bound is None else {"gate": "bounded", "lower_bound": float(lower_bound)}
    a_log = None if A_log is None else A_log.reshape(-1).float()
    bias = None if dt_bias is None else dt_bias.reshape(-1).float()
    return rlk.torch.kda_gate(g.contiguous(), a_log, bias, **how).to(output_dtype)


def _step(scale, l2norm, gate, sigmoid, negative, lower_bound, v_first):
    how = {"scale": float(scale or 0), "qk_l2norm": bool(l2norm), "beta_sigmoid": bool(sigmoid),
           "allow_neg_eigval": bool(negative), "state_v_first": bool(v_first)}
    if gate:
        how |= {"gate": "softplus"} if lower_bound is None else {"gate": "bounded", "lower_bound": float(lower_bound)}
    return how


def _unserved(**given):
    return next((f"{name} is given, rlk has nothing for it" for name, value in given.items() if value), None)


def verify_chunk_kda(q, k, v, g, beta, *args, **keywords):
    """Whether rlk serves the call, and if not why: FLA's words for a backend."""
    unserved = {n: keywords.get(n) for n in ("return_intermediate_states", "cp_context", "use_graph")}
    reason = _unserved(**unserved)
    if reason is None and (len(args) > 10 or keywords.get("transpose_state_layout")):
        reason = "options by position, or by a name that is no more"
    if reason is None:
        try:
            rlk.resolve("kda_fwd", *map(rlk.torch._spec, (q, k, v, g, beta)))  # of any strides
        except rlk.Error as error:
            reason = str(error)
    return reason is None, reason


def rotary_embedding_fwdbwd(x, cos, sin, seqlen_offsets=0, cu_seqlens=None, interleaved=False, inplace=False, conjugate=False,
                            chunk_indices=None):
    """FLA's rotation of x [B, T, H, D] and its transpose, below autograd."""
    starts = None
    if isinstance(seqlen_offsets, torch.Tensor):
        starts = seqlen_offsets
    elif seqlen_offsets != 0:
        sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
        starts = torch.full((sequences,), int(seqlen_offsets), dtype=torch.int64, device=x.device)
    if cos.dtype is not x.dtype:
        cos, sin = cos.float(), sin.float()
    cos, sin = dense(cos, sin)
    run = rlk.torch.rope_ if inplace else rlk.torch.rope
    return run(x if inplace else dense(x), cos, sin, starts=starts, cu_seqlens=cu_seqlens, layout="bshd", negative="unrotated", table="half",
               pairing="adjacent" if interleaved else "half", rotary_dim=2 * cos.shape[-1], transpose=bool(conjugate))


def patch():
    """Makes rlk the first backend of FLA's chunk_kda, fused_recurrent_kda, fused_kda_gate and rotary_embedding. Returns what undoes
    it."""
    try:
        from fla.backends import BaseBackend, _function_registries, _get_operation_registry, register
    except ImportError:
        raise _errors.Unsupported("fla has no fla.backends with a registry by function: this adapter knows fla 0.6") from None
    from inspect import unwrap

    from fla.modules.rotary import ops as rotary
    from fla.ops.kda import chunk

    class RlkBackend(BaseBackend):
        backend_type = "rlk"
        package_name = "rlk"
        priority = -1

    class RlkDelta(RlkBackend):
        # A call that these refuse goes on to the next backend: what they do not take is a reason.
        fused_recurrent_kda_fwd = staticmethod(fused_recurrent_kda_fwd)
        fused_kda_gate = staticmethod(fused_kda_gate)

        @staticmethod
        def fused_recurrent_kda_fwd_verifier(q, k, v, g, beta, *args, **keywords):
            unserved = ("ssm_state_indices", "num_accepted_tokens", "transpose_state_layout")
            reason = next((f"{n} is given, rlk has nothing for it" for n in unserved if keywords.get(n) is not None), None)
            if args:
                reason = reason or "options by position"
            return (False, reason) if reason else verify_chunk_kda(q, k, v, g, beta)

    patch = Patch()
    register("kda")(RlkDelta)
    patch.undo(lambda: _get_operation_registry("kda")._backends.pop("rlk", None))
    for function, mine, verifier in ((chunk.chunk_kda, chunk_kda, verify_chunk_kda),
                                     (rotary.rotary_embedding_fwdbwd, rotary_embedding_fwdbwd, None)):
        register(function, backend=RlkBackend, verifier=verifier)(mine)
        backends = _function_registries[unwrap(function)]._backends
        patch.undo(lambda backends=backends: backends.pop("rlk", None))
    return patch
