"""rlk in DeepSpeed: the rope of sequence parallelism.

    with rlk.adapters.deepspeed.patch():
        engine(...)

Where DeepSpeed computes in PyTorch, 16-bit data with fp32 tables give fp32; here as in its fused path they stay 16-bit.
"""

import rlk.torch
from rlk.adapters._patch import Patch, known


def apply_rotary_pos_emb(t, freqs_cos, freqs_sin):
    """t [S, .., D] with tables [S, .., R], or [B, S, H, D] with [1, S, 1, R]: the first R dims turn."""
    return rlk.torch.apply_rotary_pos_emb(t, freqs_cos, freqs_sin, rotary_dim=freqs_cos.shape[-1])


def patch():
    """Takes DeepSpeed's rope from rlk. Returns what undoes it."""
    from deepspeed.sequence import layer
    patch = Patch()
    patch.everywhere(known(layer.apply_rotary_pos_emb, apply_rotary_pos_emb), apply_rotary_pos_emb)
    return patch
