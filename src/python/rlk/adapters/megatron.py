"""rlk in Megatron-LM: rope from angles, and the fused rope of multi-head latent attention.

    with rlk.adapters.megatron.patch():
        model(...)

The functions here take what Megatron's of the same names take. The fused ones leave their inputs and the incoming gradient alone,
where Megatron's write both. With Transformer Engine absent, ``apply_rope_fusion`` is served too.
"""

import rlk.torch
from rlk import _errors
from rlk.adapters._patch import Patch, dense, known


def _tables(freqs, mscale, dtype):
    return dense((freqs.cos() * mscale).to(dtype), (freqs.sin() * mscale).to(dtype))


def _apply_rotary_pos_emb_bshd(t, freqs, rotary_interleaved=False, multi_latent_attention=False, mscale=1.0):
    """t [S, B, H, D] and angles [S, 1 or B, 1, R]; with multi_latent_attention neighbours turn and come out apart."""
    if rotary_interleaved and multi_latent_attention:
        raise _errors.Unsupported("_apply_rotary_pos_emb_bshd: rotary_interleaved and multi_latent_attention are both set, "
                                  "rlk serves one of them")
    pairing = "adjacent" if rotary_interleaved else "adjacent_to_half" if multi_latent_attention else "half"
    cos, sin = _tables(freqs, mscale, t.dtype)
    return rlk.torch.rope(dense(t), cos, sin, layout="sbhd", pairing=pairing, table="full", rotary_dim=freqs.shape[-1])


def fused_apply_rotary_pos_emb(t, freqs, transpose_output_memory=False, interleaved=False, start_positions=None):
    """Transformer Engine's: the same on fp32 tables. transpose_output_memory is about where results lie."""
    cos, sin = _tables(freqs.float(), 1.0, freqs.float().dtype)
    return rlk.torch.rope(dense(t), cos, sin, starts=start_positions, layout="sbhd", pairing="adjacent" if interleaved else "half",
                          table="full", rotary_dim=freqs.shape[-1])


def fused_apply_rotary_pos_emb_thd(t, cu_seqlens, freqs, cp_size=1, cp_rank=0, interleaved=False, start_positions=None):
    """Transformer Engine's for packed sequences, t [T, H, D]."""
    cos, sin = _tables(freqs.float(), 1.0, freqs.float().dtype)
    return rlk.torch.rope(dense(t), cos, sin, starts=start_positions, cu_seqlens=cu_seqlens, layout="thd", cp_size=cp_size,
                          cp_rank=cp_rank, pairing="adjacent" if interleaved else "half", table="full",
                          rotary_dim=freqs.shape[-1])


def _latent(name, cu_seqlens, cp_rank, cp_size, rotary_interleaved):
    if rotary_interleaved:
        raise _errors.Unsupported(f"{name}: rotary_interleaved is {rotary_interleaved}, rlk and Megatron serve False alone")
    if cu_seqlens is None:  # whose positions Megatron counts from 0 on every rank
        return {"layout": "sbhd"}
    return {"cu_seqlens": cu_seqlens, "layout": "thd", "cp_rank": cp_rank, "cp_size": cp_size}


def fused_apply_mla_rope_for_q(t, cos, sin, qk_head_dim, emb_dim, cu_seqlens_q=None, cp_rank=0, cp_size=1,
                               rotary_interleaved=False):
    if t.shape[-1] != qk_head_dim + emb_dim:
        raise _errors.InvalidArgument(f"fused_apply_mla_rope_for_q: t has {t.shape[-1]} columns, qk_head_dim {qk_head_dim} "
                                      f"and emb_dim {emb_dim} need {qk_head_dim + emb_dim}")
    how = _latent("fused_apply_mla_rope_for_q", cu_seqlens_q, cp_rank, cp_size, rotary_interleaved)
    return rlk.torch.rope_mla_q(*dense(t, cos, sin), rotary_dim=emb_dim, **how)


def fused_apply_mla_rope_for_kv(kv, k_pos_emb, cos, sin, emb_dim, k_dim, v_dim, cu_seqlens_kv=None, cp_rank=0, cp_size=1,
                                rotary_interleaved=False):
    if kv.shape[-1] != k_dim + v_dim or k_pos_emb.shape[-1] != emb_dim:
        raise _errors.InvalidArgument(f"fused_apply_mla_rope_for_kv: kv has {kv.shape[-1]} columns and k_pos_emb "
                                      f"{k_pos_emb.shape[-1]}, k_dim {k_dim}, v_dim {v_dim} and emb_dim {emb_dim} need "
                                      f"{k_dim + v_dim} and {emb_dim}")
    how = _latent("fused_apply_mla_rope_for_kv", cu_seqlens_kv, cp_rank, cp_size, rotary_interleaved)
    return rlk.torch.rope_mla_kv(*dense(kv, k_pos_emb, cos, sin), k_dim=k_dim, **how)


def patch():
    """Takes Megatron's rope from rlk. Returns what undoes it."""
    from megatron.core.fusions import fused_mla_yarn_rope_apply as latent
    from megatron.core.models.common.embeddings import rope_utils
    patch = Patch()
    for module, mine in ((rope_utils, _apply_rotary_pos_emb_bshd), (latent, fused_apply_mla_rope_for_q),
                         (latent, fused_apply_mla_rope_for_kv)):
        patch.everywhere(known(getattr(module, mine.__name__), mine), mine)
    for mine in (fused_apply_rotary_pos_emb, fused_apply_rotary_pos_emb_thd):
        patch.replace(rope_utils, mine.__name__, mine)
    return patch
