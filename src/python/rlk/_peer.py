"""The ops of rlk.model by PyTorch's own functions: the control. Same formulas and roundings, kernels of PyTorch's choice."""

import torch
import torch.nn.functional as F


def embedding(ids, weight):
    return F.embedding(ids, weight)


def linear(x, weight):
    return F.linear(x, weight)


def rms_norm(x, weight, residual=None, *, sum=False, eps):
    if residual is not None:
        x = x + residual
    y = F.rms_norm(x, (x.shape[-1],), weight, eps)
    return (y, x) if sum else y


def swiglu(x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def rope(x, cos, sin, *, k, positions, layout):
    c, s = cos[positions][:, None], sin[positions][:, None]

    def turned(x):
        a, b = x.float().chunk(2, -1)
        return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)

    return turned(x), turned(k)


def attention(q, k, v, cu_q, cu_k=None, *, kv_len=None, block_table=None):
    """Sequence by sequence through scaled_dot_product_attention, keys and values gathered from pages where there are any."""
    bounds, out = cu_q.tolist(), []
    for b, (start, end) in enumerate(zip(bounds, bounds[1:])):
        if block_table is None:
            keys, values = k[cu_k[b]:cu_k[b + 1]], v[cu_k[b]:cu_k[b + 1]]
        else:
            n = int(kv_len[b])
            pages = block_table[b, :-(-n // k.shape[1])].long()
            keys, values = k[pages].flatten(0, 1)[:n], v[pages].flatten(0, 1)[:n]
        rows, n = end - start, len(keys)
        seen = torch.ones(rows, n, dtype=torch.bool, device=q.device).tril(n - rows) if 1 < rows < n else None
        found = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q[start:end], keys, values)), attn_mask=seen,
                                               is_causal=rows == n and rows > 1, enable_gqa=True)
        out.append(found[0].transpose(0, 1))
    return torch.cat(out) if out else torch.empty_like(q)


def lm_head(hidden, weight, *, out):
    return F.linear(hidden, weight).float()


def linear_logp(hidden, weight, *, target, temperature=1.0, logp=True, entropy=False):
    all_logp = torch.log_softmax(F.linear(hidden, weight).float() / temperature, -1)
    picked = all_logp.gather(1, target.clamp(min=0).long()[:, None])[:, 0]
    picked = torch.where(target < 0, 0.0, picked)
    if not entropy:
        return picked
    return picked, torch.where(target < 0, 0.0, -(all_logp.exp() * all_logp).sum(-1))


def sample(logits, temperature, *, seed, stream, position, logp=True):
    all_logp = torch.log_softmax(logits / temperature[:, None], -1)
    draws = []
    for row, key in zip(all_logp, zip(seed.tolist(), stream.tolist(), position.tolist())):
        draw = torch.Generator().manual_seed(hash(key) & 0x7FFFFFFF)
        draws.append(int(torch.multinomial(row.exp().cpu(), 1, generator=draw)))
    token = torch.tensor(draws, device=logits.device)
    return token, all_logp.gather(1, token[:, None])[:, 0]
