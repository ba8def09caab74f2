"""rlk in DeepSpeed: the rope of sequence parallelism.

    with rlk.adapters.deepspeed.patch():
        engine(...)

Where DeepSpeed computes in PyTorch, 16-bit data with fp32 tables give fp32; here as in its fused path they stay 16-bit.
"""

import rlk.torch
from rlk.adapters._patch import Patch, dense, known


def apply_rotary_pos_emb(t, freqs_cos, freqs_sin):
    """t [S, .., D] with tables [S, .., R], or [B, S, H, D] with [1, S, 1, R]: the first R dims turn."""
    t, freqs_cos, freqs_sin = dense(t, freqs_cos, freqs_sin)
    how = {"table": "full", "rotary_dim": freqs_cos.shape[-1]}
    if t.dim() == 4 and freqs_cos.shape[0] == 1 != t.shape[0]:  # also where S is 1, as in decoding
        return rlk.torch.rope(t, freqs_cos[0, :, 0], freqs_sin[0, :, 0], layout="bshd", **how)
    return rlk.torch.rope(t, freqs_cos, freqs_sin, layout="sbhd", **how)


def patch():
    """Takes DeepSpeed's rope from rlk. Returns what undoes it."""
    from deepspeed.sequence import layer
    patch = Patch()
    patch.everywhere(known(layer.apply_rotary_pos_emb, apply_rotary_pos_emb), apply_rotary_pos_emb)
    return patch
