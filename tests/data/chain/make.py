#!/usr/bin/env python3
"""Golden vectors of the dense chain, one file an op: inputs that every dtype holds exactly, and the truth in fp64.

    python tests/data/chain/make.py        # writes *.safetensors beside itself; needs numpy

Nothing here calls rlk: formulas are written anew from the pages, sums are exact (math.fsum), masses are integers. A case is
`case.array`; its JSON says the op, the attributes, the dtypes of inputs and results, and how far a result may be from the
truth: abs + rel |truth| + peak (the largest |truth| of the array). tests/chain_golden_test.cpp calls the ops.
"""

import json
import math
import pathlib
import struct

import numpy as np

HERE = pathlib.Path(__file__).parent
INF, NAN = math.inf, math.nan


def rounded(x, dtype):
    """To nearest even, as fp64."""
    x = np.asarray(x, np.float64)
    if dtype == "f32":
        return x.astype(np.float32).astype(np.float64)
    if dtype == "f16":
        return x.astype(np.float16).astype(np.float64)
    if dtype == "f64":
        return x
    bits = x.astype(np.float32).view(np.uint32)  # x: sums and products that fp32 holds, so that nothing is rounded twice
    keep = np.isfinite(x)
    up = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return np.where(keep, up.astype(np.uint32).view(np.float32), x).astype(np.float64)


def halves(x):
    """As bf16 lies in memory, which holds these numbers."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    assert not np.any(bits[~np.isnan(x)] & 0xFFFF)
    return (bits >> 16).astype(np.uint16)


def numbers(seed, *shape, scale=1.0):
    """Multiples of 1/16 below 4 times `scale`, a power of two: every dtype holds them."""
    random = np.random.Generator(np.random.PCG64(seed))
    return np.clip(np.round(random.standard_normal(shape) * 16), -63, 63) / 16 * scale


class File:
    def __init__(self, name):
        self.name, self.arrays, self.cases = name, {}, {}

    def case(self, name, op, inputs, results, attributes=None):
        """inputs: name -> (dtype, array); results: name -> (dtype, truth, {abs, rel, peak} or "exact")."""
        described = {"op": op, "attributes": attributes or {}, "inputs": {}, "results": {}}
        for key, (dtype, array) in inputs.items():
            described["inputs"][key] = dtype
            self.arrays[f"{name}.{key}"] = halves(array) if dtype == "bf16" else np.ascontiguousarray(
                array, np.float32 if dtype[0] == "f" else np.int64)
        for key, (dtype, truth, bound) in results.items():
            described["results"][key] = {"dtype": dtype, "bound": bound if isinstance(bound, dict) else {}}
            self.arrays[f"{name}.{key}"] = np.ascontiguousarray(truth, np.float64 if dtype[0] in "fb" else np.int64)
        self.cases[name] = json.dumps(described, sort_keys=True)

    def write(self):
        header, at = {"__metadata__": self.cases}, 0
        names = {np.dtype(np.float32): "F32", np.dtype(np.float64): "F64", np.dtype(np.int64): "I64", np.dtype(np.uint16): "BF16"}
        for key, array in self.arrays.items():
            header[key] = {"dtype": names[array.dtype], "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
            at += array.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        body = b"".join(a.tobytes() for a in self.arrays.values())
        (HERE / f"{self.name}.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
        print(f"{self.name}: {len(self.cases)} cases, {len(body) // 1024} KiB")


def rows_of(x, body):
    flat = x.reshape(-1, x.shape[-1])
    return np.array([body(row) for row in flat])


def dot(a, b):
    return math.fsum((a * b).tolist())  # products of two 16-bit numbers are exact


# ---- linear

ULP16 = {"bf16": 2.0**-7, "f16": 2.0**-10}  # of a number, at most


def linear():
    out = File("linear")
    for k, m, n in ((64, 3, 4), (128, 3, 4), (2304, 2, 3), (2880, 2, 3), (4096, 2, 2), (12288, 1, 2)):
        x, w = numbers(k, m, k), numbers(k + 1, n, k)
        y = np.array([[dot(a, b) for b in w] for a in x])
        for dtype in ("bf16", "f16"):
            out.case(f"k{k}_{dtype}", "linear", {"x": (dtype, x), "weight": (dtype, w)},
                     {"y": ("f32", y, {"peak": 3e-6})})
        bias, residual = numbers(7, n, scale=8), numbers(8, m, n, scale=8)
        first = rounded(rounded(y, "f32") + bias, "f32")
        out.case(f"k{k}_added", "linear",
                 {"x": ("bf16", x), "weight": ("bf16", w), "bias": ("f32", bias), "residual": ("f32", residual)},
                 {"y": ("f32", first + residual, {"peak": 4e-6, "rel": 2.0**-22})})
        width = 16 * -(-k // 128)
        for first_leaf, count in ((0, 4), (4, 4), (6, 2), (7, 1)):
            at = slice(min(k, first_leaf * width), min(k, (first_leaf + count) * width))
            if at.start == at.stop:
                continue
            part = np.array([[dot(a, b) for b in w[:, at]] for a in x[:, at]])
            out.case(f"k{k}_leaves{first_leaf}_{count}", "linear", {"x": ("bf16", x[:, at]), "weight": ("bf16", w[:, at])},
                     {"y": ("f32", part, {"peak": 3e-6})},
                     {"leaf_first": first_leaf, "leaf_count": count, "k_total": k})
    m, n, k = 5, 6, 160
    x, w, dy = numbers(1, m, k), numbers(2, n, k), numbers(3, m, n)
    out.case("gradients", "linear_bwd", {"d_y": ("bf16", dy), "x": ("bf16", x), "weight": ("bf16", w)},
             {"d_x": ("f32", dy @ w, {"peak": 3e-6}), "d_weight": ("f32", dy.T @ x, {"peak": 3e-6}),
              "d_bias": ("f32", dy.sum(0), {"peak": 3e-6})})
    out.write()


# ---- rms_norm, swiglu

def sigmoid(x):
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def silu(x):
    return np.where(np.isneginf(x), -0.0, x * sigmoid(x))


def rms_norm():
    out = File("rms_norm")
    eps = 1e-6
    for h in (64, 128, 1000, 1024, 4096, 8192):
        m = 1 if h > 2000 else 3
        x, w = numbers(h, m, h), numbers(h + 1, h)
        r = 1 / np.sqrt(np.array([[math.fsum((a * a).tolist()) / h] for a in x]) + eps)
        for dtype in ("bf16", "f16"):
            ulp = ULP16[dtype]
            out.case(f"end_h{h}_{dtype}", "rms_norm", {"x": (dtype, x), "weight": (dtype, w)},
                     {"y": (dtype, x * r * w, {"rel": ulp}), "rstd": ("f32", r, {"rel": 4e-7})}, {"eps": eps})
        out.case(f"early_h{h}", "rms_norm", {"x": ("bf16", x), "weight": ("bf16", w)},
                 {"y": ("bf16", rounded(rounded(x * r, "f32"), "bf16") * w, {"rel": 2 * ULP16["bf16"]})},
                 {"eps": eps, "cast": "early"})
    h, m = 264, 3
    x, w, residual, gate = numbers(1, m, h), numbers(2, h), numbers(3, m, h, scale=64), numbers(4, m, h)
    a = rounded(x + residual, "bf16")
    r = 1 / np.sqrt(np.array([[math.fsum((v * v).tolist()) / h] for v in a]) + 1e-5)
    out.case("residual", "rms_norm", {"x": ("bf16", x), "weight": ("bf16", w), "residual": ("bf16", residual)},
             {"y": ("bf16", a * r * w, {"rel": ULP16["bf16"]}), "sum": ("bf16", a, "exact")}, {"eps": 1e-5})
    r = 1 / np.sqrt(np.array([[math.fsum((v * v).tolist()) / h] for v in x]) + 1e-5)
    out.case("offset", "rms_norm", {"x": ("bf16", x), "weight": ("bf16", w)},
             {"y": ("bf16", x * r * (1 + w), {"rel": ULP16["bf16"]})}, {"eps": 1e-5, "weight_offset": 1})
    for act, f in (("silu", silu), ("sigmoid", sigmoid)):
        out.case(f"gate_{act}", "rms_norm", {"x": ("bf16", x), "weight": ("bf16", w), "gate": ("bf16", gate)},
                 {"y": ("bf16", x * r * w * f(gate), {"rel": ULP16["bf16"]})}, {"eps": 1e-5, "gate_act": act})
    out.case("zeros", "rms_norm", {"x": ("f32", np.zeros((2, 64))), "weight": ("f32", numbers(9, 64))},
             {"y": ("f32", np.zeros((2, 64)), "exact")})
    out.write()


def swiglu():
    out = File("swiglu")
    gate, up = numbers(1, 3, 75, scale=4), numbers(2, 3, 75)
    gate[0, :6] = 100, -100, 0, 12, -12, -0.0
    for dtype in ("f32", "bf16", "f16"):
        ulp = ULP16.get(dtype, 2.0**-21)
        tiny = 6e-8 if dtype == "f16" else 1e-37
        out.case(f"once_{dtype}", "swiglu", {"gate": (dtype, gate), "up": (dtype, up)},
                 {"out": (dtype, silu(gate) * up, {"rel": ulp, "abs": tiny})})
        out.case(f"twice_{dtype}", "swiglu", {"gate": (dtype, gate), "up": (dtype, up)},
                 {"out": (dtype, rounded(rounded(silu(gate), "f32"), dtype) * up, {"rel": 2 * ulp, "abs": 4 * tiny})},
                 {"roundings": "twice"})
    tanh = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    out.case("gelu_tanh", "swiglu", {"gate": ("f32", gate), "up": ("f32", up)},
             {"out": ("f32", tanh * up, {"abs": 4e-6, "rel": 2e-6})}, {"act": "gelu_tanh"})
    g, u = np.minimum(gate, 7), np.clip(up, -7, 7)
    alpha = float(np.float32(1.702))
    out.case("clamped", "swiglu", {"gate": ("f32", gate), "up": ("f32", up)},
             {"out": ("f32", g * sigmoid(alpha * g) * (u + 1), {"abs": 1e-6, "rel": 2e-6})}, {"act": "silu_clamped"})
    out.write()


# ---- logp

def log_softmax(z, target, temperature, kept):
    """logp, lse and entropy of one row, in fp64: differences from the largest first."""
    tau = float(np.float32(1) / np.float32(temperature))
    z = np.where(kept, z, -INF)
    largest = z.max()
    if largest == -INF:
        return -INF, -INF, 0.0
    d = (z - largest) * tau
    e = np.where(np.isneginf(d), 0.0, np.exp(d))
    s = math.fsum(e.tolist())
    terms = np.where(e > 0, e * np.where(e > 0, d, 0), 0)
    logp = d[target] - math.log(s) if kept[target] else -INF
    return logp, largest * tau + math.log(s), math.log(s) - math.fsum(terms.tolist()) / s


def logp():
    out = File("logp")

    def case(name, z, target, dtype="f32", temperature=1.0, keep=None, vocab=0, ignored=()):
        n, columns = z.shape
        entries = vocab or columns
        truth = []
        for i in range(n):
            kept = np.ones(entries, bool) if keep is None else keep[i]
            truth.append((0, 0, 0) if i in ignored else log_softmax(z[i, :entries], target[i], temperature, kept))
        lp, lse, entropy = (np.array(t, np.float64) for t in zip(*truth))
        far = np.array([2e-7 * abs(z[i, target[i]] - np.nanmax(z[i, :entries])) / temperature
                        if i not in ignored and np.isfinite(z[i, target[i]]) else 0 for i in range(n)])
        ids = np.array([-100 if i in ignored else t for i, t in enumerate(target)])
        inputs = {"logits": (dtype, z), "target": ("i64", ids)}
        if keep is not None:
            words = np.zeros((n, -(-entries // 32)), np.int64)
            for i in range(n):
                for c in np.flatnonzero(keep[i]):
                    words[i, c // 32] |= 1 << int(c) % 32
            inputs["keep"] = ("i32", np.where(words >= 2**31, words - 2**32, words))
        out.case(name, "logp", inputs,
                 {"logp": ("f32", lp, {"abs": 3e-6 + float(far.max())}), "lse": ("f32", lse, {"abs": 3e-6, "rel": 4e-7}),
                  "entropy": ("f32", entropy, {"abs": 4e-6})}, {"temperature": temperature, "vocab": vocab})

    for v in (8, 1000, 50257):
        z = numbers(v, 2, v, scale=4)
        case(f"v{v}", z, [3, 5], dtype="bf16")
        case(f"v{v}_temperature", z, [1, 7], dtype="bf16", temperature=0.5)
    z = np.full((2, 5000), -19.75)  # as much as the peak weighs, spread over a flat tail
    z[:, 17] = 0
    case("flat_tail", z, [17, 40])
    z = np.full((2, 300), -64.0)
    z[0, 9] = z[1, 250] = 32
    case("peaked", z, [9, 3])
    case("far_from_zero", numbers(5, 2, 700) + 1e4, [3, 600])
    case("far_below_zero", numbers(6, 2, 700) - 1e4, [3, 600])
    z = numbers(7, 3, 130)
    z[0] = -INF
    z[1, ::2] = -INF
    case("absent", z, [3, 1, 4])
    z = numbers(8, 2, 200)
    z[:, 137:] = NAN
    case("padding", z, [136, 0], vocab=137)
    case("ties", np.zeros((2, 1000)), [0, 999])
    keep = np.random.Generator(np.random.PCG64(9)).random((3, 333)) < 0.3
    keep[0, 5] = keep[1, 300] = True
    keep[2, 8] = False
    z = numbers(10, 3, 333, scale=2)
    z[~keep & (np.arange(333) % 7 == 0)] = NAN
    z[2, 8] = 1
    case("keep", z, [5, 300, 8], keep=keep)
    z = numbers(11, 3, 64)
    z[1] = NAN
    case("ignored", z, [3, 0, 5], ignored=(1,))
    out.write()


# ---- sample

def philox(counter, key):
    """Philox4x32-10 of Salmon et al., 2011."""
    c, k = list(counter), list(key)
    for _ in range(10):
        low, high = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [high >> 32 ^ c[1] ^ k[0], high & 0xFFFFFFFF, low >> 32 ^ c[3] ^ k[1], low & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def noise(token, seed, stream, position):
    """ln of an exponential variate: in fp64, from the word that belongs to the token."""
    words = philox((token >> 2, position & 0xFFFFFFFF, position >> 32, stream), (seed & 0xFFFFFFFF, seed >> 32))
    v = min(float(np.float32(words[token & 3] + 0.5)) * 2.0**-32, 1 - 2.0**-24)
    return math.log(-math.log1p(-v))


def drawn(z, temperature, k, p, least, seed, stream, position):
    """token, logp, logp_raw, count, kept ids; None where fp32 may decide otherwise: the seed is then another."""
    z = z + 0.0
    finite = np.flatnonzero(z > -INF)
    order = finite[np.lexsort((finite, -z[finite]))]
    largest = z[order[0]]
    tau = 0.0 if temperature == 0 else float(np.float32(1) / np.float32(temperature))
    share = (z[order] - largest) * (tau or 1.0)
    # Masses in fp64: what exp2's fp32 result would be is within 2^-22 of it, so borders nearer than 2^-20 are refused.
    mass = np.exp(share)
    staying = len(order) if k <= 0 else min(k, len(order))
    if 0 < p < 1:
        held = mass[:staying]
        before = (np.cumsum(held) - held) / math.fsum(held.tolist())
        if np.abs(before - float(np.float32(p))).min() < 1e-5:
            return None
        staying = max(1, int((before < float(np.float32(p))).sum()))
    if least > 0:
        if np.abs(mass[:staying] - float(np.float32(least))).min() < 1e-6:
            return None
        staying = int((mass[:staying] >= min(1.0, float(np.float32(least)))).sum())
    kept = order[:staying]
    if temperature == 0:
        token = kept[0]
    else:
        scores = np.array([(z[i] - largest) * tau - noise(int(i), seed, stream, position) for i in kept])
        best = np.argsort(-scores)
        if len(best) > 1 and scores[best[0]] - scores[best[1]] < 1e-4:
            return None
        token = kept[best[0]]
    at = (z[token] - largest) * (tau or 1.0)
    return int(token), at - math.log(math.fsum(mass[:staying].tolist())), at - math.log(math.fsum(mass.tolist())), staying, kept


def sample():
    out = File("sample")

    def case(name, z, rows, dtype="f32"):
        """rows: temperature, top_k, top_p, min_p, seed, stream, position."""
        found, rows = [], [list(r) for r in rows]
        for i, row in enumerate(rows):
            while (one := drawn(z[i], *row)) is None:
                row[4] += 1
            found.append(one)
        columns = list(zip(*rows))
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "stream", "position")
        inputs = {"logits": (dtype, z)}
        for key, column in zip(names, columns):
            inputs[key] = ("i64" if key in ("top_k", "seed", "stream", "position") else "f32", np.array(column))
        v = z.shape[1]
        keep = np.zeros((len(rows), -(-v // 32)), np.int64)
        for i, one in enumerate(found):
            for c in one[4]:
                keep[i, c // 32] |= 1 << int(c) % 32
        out.case(name, "sample", inputs,
                 {"token": ("i64", np.array([f[0] for f in found]), "exact"),
                  "logp": ("f32", np.array([f[1] for f in found]), {"abs": 3e-6, "rel": 2e-7}),
                  "logp_raw": ("f32", np.array([f[2] for f in found]), {"abs": 3e-6, "rel": 2e-7}),
                  "count": ("i32", np.array([f[3] for f in found]), "exact"),
                  "keep": ("i32", np.where(keep >= 2**31, keep - 2**32, keep), "exact")})

    for v in (8, 1000, 5000):
        z = numbers(v, 6, v, scale=2)
        case(f"plain_v{v}", z, [(1, 0, 1, 0, 10 + i, 0, i) for i in range(6)], "bf16")
        case(f"filters_v{v}", z, [(0.75, 0, 1, 0, 5, 1, 7), (1, 5, 1, 0, 2**40 + 3, 2, 8), (1.5, 0, 0.9, 0, 7, 0, 2**33),
                                  (1, 0, 1, 0.05, 8, 0, 1), (0.5, 20, 0.8, 0.02, 9, 3, 4), (2, 3, 0.5, 0, 11, 0, 6)])
    ties = np.round(numbers(3, 4, 200) * 2) / 2
    case("ties", ties, [(1, 7, 1, 0, 1, 0, 0), (1, 0, 0.3, 0, 2, 0, 0), (1, 50, 0.6, 0, 3, 0, 0), (1, 1, 1, 0, 4, 0, 0)])
    case("greedy", ties, [(0, 0, 1, 0, 1, 0, 0), (0, 9, 1, 0, 2, 0, 0), (0, 0, 0.5, 0, 3, 0, 0), (0, 3, 0.9, 0.1, 4, 0, 0)])
    absent = numbers(4, 3, 100)
    absent[0, 1:] = -INF
    absent[1, ::3] = -INF
    case("absent", absent, [(1, 0, 1, 0, 1, 0, 0), (1, 40, 0.9, 0, 2, 0, 0), (0.5, 0, 1, 0.1, 3, 0, 0)])
    out.write()


# ---- losses

def kl_of(kind, d):
    if kind == "k1":
        return -d, np.ones_like(d)
    if kind == "k2":
        return d * d / 2, -d
    # exp(d) - 1 - d without cancellation
    small = np.abs(d) < 0.5
    series = sum(d**n / math.factorial(n) for n in range(2, 24))
    k3 = np.where(small, series, np.expm1(d) - d)
    return k3, -d if kind == "k3_st" else -np.expm1(d)


def ratio_kl():
    out = File("ratio_kl")
    f32 = lambda x: rounded(x, "f32")  # noqa: E731
    size = np.array([m * 2.0**-e for e in range(20, -4, -1) for m in (1, -1.25)])
    old = numbers(1, len(size)) - 4
    logp = f32(old + size)
    ref = f32(logp + np.roll(size, 5))
    mask = np.ones(len(size))
    mask[3::7] = 0
    masked = [np.where(mask == 1, x, NAN) for x in (logp, old, ref)]
    for kind in ("k1", "k2", "k3", "k3_st"):
        d = np.where(mask == 1, f32(ref - logp), 0)
        value, _ = kl_of(kind, d)
        x = np.where(mask == 1, f32(logp - old), 0)
        out.case(kind, "ratio_kl", {"logp": ("f32", masked[0]), "old_logp": ("f32", masked[1]), "ref_logp": ("f32", masked[2]),
                                    "mask": ("f32", mask)},
                 {"ratio": ("f32", np.exp(x), {"rel": 5e-7}), "kl": ("f32", np.where(mask == 1, value, 0), {"rel": 5e-7})},
                 {"estimator": kind})
        g_r, g_k = numbers(2, len(size)), numbers(3, len(size))
        _, slope = kl_of(kind, d)
        first, second = np.exp(x) * g_r, slope * g_k
        truth = np.where(mask == 1, first + second, 0)
        out.case(f"{kind}_gradient", "ratio_kl_bwd",
                 {"logp": ("f32", masked[0]), "old_logp": ("f32", masked[1]), "ref_logp": ("f32", masked[2]),
                  "mask": ("f32", mask), "d_ratio": ("f32", g_r), "d_kl": ("f32", g_k)},
                 {"d_logp": ("f32", truth, {"rel": 1e-6, "abs": 2.0**-20 * float(np.abs(np.stack((first, second))).max())})},
                 {"estimator": kind})
    out.write()


def policy_loss():
    out = File("policy_loss")
    cu = np.array([0, 7, 7, 12, 40, 41])
    tokens, sequences = int(cu[-1]), len(cu) - 1
    old = numbers(1, tokens, scale=0.25) - 3
    logp, rollout, ref = (old + numbers(s, tokens, scale=0.25) for s in (2, 3, 4))
    advantages, entropy = numbers(5, tokens), numbers(6, tokens) + 4
    mask = (np.random.Generator(np.random.PCG64(7)).random(tokens) < 0.7).astype(float)
    mask[40] = 0  # a sequence without an active token
    low, high, coef, entropy_coef, w_low, w_high = (float(np.float32(v)) for v in (0.2, 0.25, 0.1, 0.01, 0.5, 2))
    f32 = lambda x: rounded(x, "f32")  # noqa: E731

    def truth(form, level, agg, mode, weights, kind, denominator):
        totals, lengths = np.zeros((sequences, 5)), []
        factor, parts = np.zeros(tokens), []
        for b in range(sequences):
            at = np.arange(cu[b], cu[b + 1])
            at = at[mask[at] == 1]
            l, x = old[at] - rollout[at], logp[at] - old[at]
            if weights == "sequence":
                l = np.full(len(at), l.sum() if len(at) else 0)
            if weights == "geometric":
                l = np.full(len(at), l.mean() if len(at) else 0)
            w = np.exp(np.clip(l, -20, 20)) if mode != "none" else np.ones(len(at))
            outside = (w < w_low) | (w > w_high)
            if mode == "truncate":
                w = np.minimum(w, w_high)
            if mode == "mask":
                at, x, w, outside = at[~outside], x[~outside], w[~outside], outside[~outside]
            r = np.exp(x) if level == "token" else np.full(len(at), np.exp(min(x.mean(), 10)) if len(at) else 0)
            a = -advantages[at]
            clipped = np.zeros(len(at), bool)
            if form == "clip":
                one, two = a * r, a * np.clip(r, 1 - low, 1 + high)
                term, clipped = np.maximum(one, two), two > one
                slope = np.where(clipped, 0, a * r)
            elif form == "cispo":
                k = a * np.minimum(r, 1 + high)
                term, slope, clipped = k * logp[at], k, r > 1 + high
            elif form == "reinforce":
                term, slope = a * logp[at], a
            else:
                tau = np.where(advantages[at] > 0, 1.0, float(np.float32(1.05)))
                g = sigmoid(tau * (r - 1))
                term, slope = a * 4 / tau * g, a * 4 * g * (1 - g) * r
            if mode == "zero":
                w = np.where(outside, 0, w)
            term, slope = w * term, w * slope
            value = np.zeros(len(at))
            if kind != "off":
                value, more = kl_of(kind, ref[at] - logp[at])
                slope = slope + coef * more
            totals[b] = term.sum(), value.sum(), entropy[at].sum(), len(at), clipped.sum()
            parts.append((at, slope))
        active = totals[:, 3] > 0
        sums, count = totals[:, :3], totals[:, 3]
        if agg == "seq_mean_token_mean":
            sums = np.where(active[:, None], sums / np.maximum(count, 1)[:, None], 0)
        whole = denominator if denominator else count.sum() if agg == "token_mean" else active.sum()
        policy, kl, entropies = sums.sum(0) / whole
        loss = policy + (coef * kl if kind != "off" else 0) - entropy_coef * entropies
        for b, (at, slope) in enumerate(parts):
            share = 1 / whole / (count[b] if agg == "seq_mean_token_mean" and count[b] else 1)
            factor[at] = slope * share
        return loss, totals, factor

    def case(form="clip", level="token", agg="token_mean", mode="none", weights="token", kind="off", denominator=0.0):
        loss, totals, factor = truth(form, level, agg, mode, weights, kind, denominator)
        hidden = lambda x: np.where(mask == 1, x, NAN)  # noqa: E731
        inputs = {"logp": ("f32", hidden(logp)), "old_logp": ("f32", hidden(old)), "advantages": ("f32", hidden(advantages)),
                  "mask": ("f32", mask), "cu_seqlens": ("i64", cu), "rollout_logp": ("f32", hidden(rollout)),
                  "ref_logp": ("f32", hidden(ref)), "entropy": ("f32", hidden(entropy))}
        if denominator:
            inputs["denominator"] = ("f32", np.array([denominator]))
        out.case(f"{form}_{level}_{agg}_{mode}_{weights}_{kind}", "policy_loss", inputs,
                 {"totals": ("f32", totals, {"peak": 2e-6}), "loss": ("f32", np.array([loss]), {"rel": 4e-6, "abs": 1e-6}),
                  "factor": ("f32", factor, {"peak": 2e-6, "rel": 2e-6})},
                 {"form": form, "level": level, "agg": agg, "is_mode": mode, "is_level": weights, "kl": kind, "kl_coef": 0.1,
                  "entropy_coef": 0.01, "clip_high": 0.25, "is_low": 0.5})

    for form in ("clip", "cispo", "reinforce", "soft_gate"):
        for level in ("token", "sequence"):
            for agg in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"):
                for mode in ("none", "truncate", "mask", "zero"):
                    case(form, level, agg, mode, denominator=96.0 if agg == "constant" else 0.0)
    for weights in ("sequence", "geometric"):
        for mode in ("truncate", "mask", "zero"):
            case(mode=mode, weights=weights)
    for kind in ("k1", "k2", "k3", "k3_st"):
        case(kind=kind)
    assert f32(old).tolist() == old.tolist() and f32(logp).tolist() == logp.tolist()
    out.write()


if __name__ == "__main__":
    for make in (linear, rms_norm, swiglu, logp, sample, ratio_kl, policy_loss):
        make()
