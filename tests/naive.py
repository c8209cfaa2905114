"""A second evaluation of the model, deliberately slow: one token at a time, one head at a time, numpy in float64, written
from the formulas alone. It shares no code with the reference, not even the decoding of weights."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import torch

Vector = np.ndarray[Any, Any]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def decode(weight: torch.Tensor, scale: torch.Tensor | None) -> Vector:
    """A stored weight as float64."""
    if weight.dtype == torch.float8_e4m3fn:
        codes = weight.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        power = 2.0 ** (scale.view(torch.uint8).numpy().astype(np.float64) - 127)
        return np.array([[codes[o, i] * power[o // 128, i // 128] for i in range(codes.shape[1])] for o in range(len(codes))])
    if weight.dtype == torch.int8:
        byte = weight.numpy().view(np.uint8)
        power = 2.0 ** (scale.view(torch.uint8).numpy().astype(np.float64) - 127)
        out = np.empty((len(byte), 2 * byte.shape[1]))
        for j in range(byte.shape[1]):
            for half, code in enumerate((byte[:, j] & 15, byte[:, j] >> 4)):
                sign = np.where(code >= 8, -1.0, 1.0)
                out[:, 2 * j + half] = sign * np.take(E2M1, code % 8) * power[:, (2 * j + half) // 32]
        return out
    return weight.double().numpy()


def fp8(x: Vector, block: int) -> Vector:
    """E4M3 per block and back, from float32."""
    out = []
    for i in range(0, len(x), block):
        b = x[i : i + block].astype(np.float32)
        amax = np.maximum(np.abs(b).max(), np.float32(1e-4)) * np.float32(1 / 448)
        mantissa, exponent = math.frexp(float(amax))  # amax = mantissa * 2^exponent, mantissa in [1/2, 1)
        s = np.float32(2.0 ** (exponent - (mantissa == 0.5)))
        out.append(np.clip(b / s, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * s)
    return np.concatenate(out)


def fp4(x: Vector) -> Vector:
    """E2M1 per 32 and back, from float32; a tie goes to the even code."""
    out = []
    for i in range(0, len(x), 32):
        b = x[i : i + 32].astype(np.float32)
        amax = np.maximum(np.abs(b).max(), np.float32(6 * 2.0**-126)) * np.float32(1 / 6)
        mantissa, exponent = math.frexp(float(amax))
        s = 2.0 ** (exponent - (mantissa == 0.5))
        for v in b.astype(np.float64) / s:
            away = [abs(abs(v) - g) for g in E2M1]
            nearest = [c for c in range(8) if away[c] == min(away)]
            code = nearest[0] if len(nearest) == 1 else next(c for c in nearest if c % 2 == 0)
            out.append(math.copysign(E2M1[code] * s, v))
    return np.array(out)


def norm(x: Vector, eps: float, weight: Vector | float = 1.0) -> Vector:
    return weight * x / math.sqrt(sum(v * v for v in x) / len(x) + eps)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def softmax(x: Vector) -> Vector:
    e = np.exp(x - x.max())
    return e / e.sum()


class Naive:
    """Feed tokens with `step`; `mtp_step` runs the MTP block beside it. `qat` switches the activation quantisers on."""

    def __init__(self, store: Any, qat: bool) -> None:
        self.c, self.store, self.qat = store.config, store, qat
        self.memo: dict[str, Vector] = {}
        blocks = len(self.c.compress_ratios)
        self.raw: list[list[Vector]] = [[] for _ in range(blocks)]
        self.inputs: list[list[Vector]] = [[] for _ in range(blocks)]
        self.position = -1

    def weight(self, name: str) -> Vector:
        if name not in self.memo:
            scale = name.removesuffix("weight") + "scale"
            self.memo[name] = decode(self.store.get(name), self.store.values.get(scale) if name != scale else None)
        return self.memo[name]

    def linear(self, name: str, x: Vector) -> Vector:
        """A1: the input is quantised where the weight is stored quantised."""
        stored = self.store.values[f"{name}.weight"].dtype
        if self.qat and stored in (torch.float8_e4m3fn, torch.int8):
            x = fp8(x, 128)
        return self.weight(f"{name}.weight") @ x

    def rope(self, x: Vector, position: int, layer: int, sign: int = 1) -> Vector:
        c, rd, out = self.c, self.c.qk_rope_head_dim, x.copy()
        yarn = c.compress_ratios[layer] != 0
        base = c.compress_rope_theta if yarn else c.rope_theta

        def pair(turns: float) -> float:
            return rd * math.log(c.rope_scaling.original_max_position_embeddings / (2 * math.pi * turns)) / (2 * math.log(base))

        low, high = max(math.floor(pair(c.rope_scaling.beta_fast)), 0), min(math.ceil(pair(c.rope_scaling.beta_slow)), rd - 1)
        for i in range(rd // 2):
            f = base ** (-2 * i / rd)
            if yarn:
                ramp = min(max((i - low) / (high - low), 0), 1)
                f = f / c.rope_scaling.factor * ramp + f * (1 - ramp)
            cos, sin = math.cos(position * f), sign * math.sin(position * f)
            at = len(x) - rd + 2 * i
            out[at], out[at + 1] = x[at] * cos - x[at + 1] * sin, x[at + 1] * cos + x[at] * sin
        return out

    def cache_row(self, x: Vector) -> Vector:
        """A2 and A3: the channels before the rotated ones, per 64."""
        nope = self.c.head_dim - self.c.qk_rope_head_dim
        return np.concatenate([fp8(x[:nope], 64), x[nope:]]) if self.qat else x

    def index_vector(self, x: Vector) -> Vector:
        """A4 and A5: Hadamard, then E2M1."""
        n = len(x)
        turned = np.array([sum((-1) ** (i & j).bit_count() * x[i] for i in range(n)) for j in range(n)]) / math.sqrt(n)
        return fp4(turned) if self.qat else turned

    def compressed_row(self, name: str, layer: int, j: int, width: int) -> Vector:
        """Row j before quantisation, from the inputs of its tokens."""
        r = self.c.compress_ratios[layer]
        halves = 2 if r == 4 else 1
        slots = []
        for block, half in ([(j - 1, 0), (j, 1)] if halves == 2 else [(j, 0)]):
            for p in range(r * block, r * block + r):
                if p >= 0:
                    x, columns = self.inputs[layer][p], slice(half * width, (half + 1) * width)
                    a = self.weight(f"{name}.wkv.weight")[columns] @ x
                    g = self.weight(f"{name}.wgate.weight")[columns] @ x + self.weight(f"{name}.ape")[p % r, columns]
                    slots.append((a, g))
        pooled = np.empty(width)
        for ch in range(width):
            w = softmax(np.array([g[ch] for _, g in slots]))
            pooled[ch] = sum(w[k] * slots[k][0][ch] for k in range(len(slots)))
        return self.rope(norm(pooled, self.c.rms_norm_eps, self.weight(f"{name}.norm.weight")), r * j, layer)

    def remembered(self, name: str, layer: int, j: int) -> Vector:
        """Finished row or index key j, made once."""
        key = f"{name}/{j}"
        if key not in self.memo:
            if "indexer" in name:
                self.memo[key] = self.index_vector(self.compressed_row(name, layer, j, self.c.index_head_dim))
            else:
                self.memo[key] = self.cache_row(self.compressed_row(name, layer, j, self.c.head_dim))
        return self.memo[key]

    def selection(self, at: str, layer: int, x: Vector, qr: Vector) -> list[int]:
        c, p = self.c, self.position
        n = (p + 1) // 4
        q = self.linear(f"{at}.wq_b", qr).reshape(c.index_n_heads, c.index_head_dim)
        w = self.linear(f"{at}.weights_proj", x) / math.sqrt(c.index_head_dim) / math.sqrt(c.index_n_heads)
        q = [self.index_vector(self.rope(head, p, layer)) for head in q]
        keys = [self.remembered(f"{at}.compressor", layer, j) for j in range(n)]
        score = [sum(w[h] * max(q[h] @ k, 0) for h in range(c.index_n_heads)) for k in keys]
        return sorted(range(n), key=lambda j: (-score[j], j))[: c.index_topk]

    def attention(self, at: str, layer: int, x: Vector) -> Vector:
        c, p, r = self.c, self.position, self.c.compress_ratios[layer]
        self.inputs[layer].append(x)
        qr = norm(self.linear(f"{at}.wq_a", x), c.rms_norm_eps, self.weight(f"{at}.q_norm.weight"))
        kv = norm(self.linear(f"{at}.wkv", x), c.rms_norm_eps, self.weight(f"{at}.kv_norm.weight"))
        self.raw[layer].append(self.cache_row(self.rope(kv, p, layer)))
        rows = self.raw[layer][max(0, p - c.sliding_window + 1) :]
        if r:
            chosen = self.selection(f"{at}.indexer", layer, x, qr) if r == 4 else list(range((p + 1) // r))
            rows = rows + [self.remembered(f"{at}.compressor", layer, j) for j in chosen]
        q = self.linear(f"{at}.wq_b", qr).reshape(c.num_attention_heads, c.head_dim)
        heads = []
        for h in range(c.num_attention_heads):
            query = self.rope(norm(q[h], c.rms_norm_eps), p, layer)
            logits = [query @ row / math.sqrt(c.head_dim) for row in rows] + [self.weight(f"{at}.attn_sink")[h]]
            weights = softmax(np.array(logits))[:-1]
            heads.append(self.rope(sum(w * row for w, row in zip(weights, rows, strict=True)), p, layer, sign=-1))
        per_group, rank = c.num_attention_heads // c.o_groups, c.o_lora_rank
        wo_a, y = self.weight(f"{at}.wo_a.weight"), []
        for g in range(c.o_groups):
            y.append(wo_a[g * rank : (g + 1) * rank] @ np.concatenate(heads[g * per_group : (g + 1) * per_group]))
        return self.linear(f"{at}.wo_b", np.concatenate(y))

    def expert(self, at: str, x: Vector, weight: float) -> Vector:
        limit = self.c.swiglu_limit
        a, b = self.linear(f"{at}.w1", x), self.linear(f"{at}.w3", x)
        t = [min(u, limit) * sigmoid(min(u, limit)) * min(max(v, -limit), limit) * weight for u, v in zip(a, b, strict=True)]
        return self.linear(f"{at}.w2", np.array(t))

    def experts(self, at: str, layer: int, x: Vector, token: int) -> Vector:
        c = self.c
        score = [math.sqrt(math.log1p(math.exp(v))) for v in self.weight(f"{at}.gate.weight") @ x]
        if layer < c.num_hash_layers:
            chosen = self.store.get(f"{at}.gate.tid2eid")[token].tolist()
        else:
            bias = self.weight(f"{at}.gate.bias")
            chosen = sorted(range(c.n_routed_experts), key=lambda e: (-score[e] - bias[e], e))[: c.num_experts_per_tok]
        total = sum(score[e] for e in chosen)
        y = np.zeros(c.hidden_size)
        for e in sorted(chosen):
            y += self.expert(f"{at}.experts.{e}", x, score[e] / total * c.routed_scaling_factor)
        return y + self.expert(f"{at}.shared_experts", x, 1.0)

    def mixes(self, at: str, x: Vector) -> Vector:
        flat = x.reshape(-1)
        return (self.weight(f"{at}_fn") @ flat) / math.sqrt(sum(v * v for v in flat) / len(flat) + self.c.rms_norm_eps)

    def around(self, at: str, x: Vector, sublayer: Any) -> Vector:
        """Streams [s, D] through the mix, a sub-layer and the mix back."""
        s, eps = self.c.hc_mult, self.c.hc_eps
        m, base, scale = self.mixes(at, x), self.weight(f"{at}_base"), self.weight(f"{at}_scale")
        pre = [sigmoid(m[n] * scale[0] + base[n]) + eps for n in range(s)]
        post = [2 * sigmoid(m[s + n] * scale[1] + base[s + n]) for n in range(s)]
        logits = (m[2 * s :] * scale[2] + base[2 * s :]).reshape(s, s)
        comb = np.array([softmax(row) for row in logits]) + eps
        for step in range(self.c.hc_sinkhorn_iters):
            if step:
                for j in range(s):
                    comb[j] = comb[j] / (comb[j].sum() + eps)
            for k in range(s):
                comb[:, k] = comb[:, k] / (comb[:, k].sum() + eps)
        z = sublayer(sum(pre[n] * x[n] for n in range(s)))
        return np.array([post[k] * z + sum(comb[j, k] * x[j] for j in range(s)) for k in range(s)])

    def block(self, at: str, layer: int, x: Vector, token: int) -> Vector:
        eps = self.c.rms_norm_eps
        attn_norm, ffn_norm = self.weight(f"{at}.attn_norm.weight"), self.weight(f"{at}.ffn_norm.weight")
        x = self.around(f"{at}.hc_attn", x, lambda u: self.attention(f"{at}.attn", layer, norm(u, eps, attn_norm)))
        return self.around(f"{at}.hc_ffn", x, lambda u: self.experts(f"{at}.ffn", layer, norm(u, eps, ffn_norm), token))

    def head(self, at: str, x: Vector) -> Vector:
        """Streams -> logits, with the last mix and norm under `at`."""
        m = self.mixes(f"{at}hc_head", x)
        w = [sigmoid(m[n] * self.weight(f"{at}hc_head_scale")[0] + self.weight(f"{at}hc_head_base")[n]) for n in range(len(m))]
        h = sum((w[n] + self.c.hc_eps) * x[n] for n in range(len(m)))
        return self.weight("head.weight") @ norm(h, self.c.rms_norm_eps, self.weight(f"{at}norm.weight"))

    def step(self, token: int) -> tuple[Vector, Vector]:
        """The next token -> logits [V] and streams [s, D]."""
        self.position += 1
        x = np.array([self.weight("embed.weight")[token]] * self.c.hc_mult)
        for i in range(self.c.num_hidden_layers):
            x = self.block(f"layers.{i}", i, x, token)
        return self.head("", x), x

    def mtp_step(self, x: Vector, next_token: int) -> Vector:
        """This position's streams and the token after it -> logits for the token after that."""
        eps, layer = self.c.rms_norm_eps, self.c.num_hidden_layers
        e = self.linear("mtp.0.e_proj", norm(self.weight("embed.weight")[next_token], eps, self.weight("mtp.0.enorm.weight")))
        hnorm = self.weight("mtp.0.hnorm.weight")
        x = np.array([e + self.linear("mtp.0.h_proj", norm(stream, eps, hnorm)) for stream in x])
        return self.head("mtp.0.", self.block("mtp.0", layer, x, next_token))
