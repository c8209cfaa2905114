"""The verdict on one output of one op again, from what stands at the end of this file. Needs numpy and nothing else.

It is the row with the worst element: what the candidate stored, what the twin computed in float64, and the bound. Where the
op's own operands are there too (products, norms, quantisers), the twin is computed from them anew. The formulas are a second
writing of those that judged.
"""

from __future__ import annotations

import base64
import json
import sys
import zlib
from typing import Any

import numpy as np

MANTISSA_BITS = {"f32": 24, "bf16": 8}
E4M3 = np.array([m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:127])
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def ulp(x: Any, form: str) -> Any:
    """Spacing of the format at |x|, at least that of its smallest normal number."""
    exponent = np.where(np.isfinite(x), np.frexp(np.abs(x))[1] - 1, 1024)
    return np.exp2(np.maximum(exponent, -126) + 1.0 - MANTISSA_BITS[form])


def dense(r: dict[str, Any]) -> dict[str, Any]:
    """Plain numbers c against t within A: max(0, |c - t| - ulp(|t| + A)/2) / A by element, and what hides inside half an
    ulp by row, and over all rows by sign."""
    c, t, a, form = r["c"].astype(np.float64), r["t"], r["A"], r["form"]
    error = np.abs(c - t)
    excess = np.maximum(error - ulp(np.abs(t) + a, form) / 2, 0)
    used = np.where(excess > 0, excess / a, 0.0)
    used = np.where(error <= ulp(t, form) / 2, 0.0, used)
    same = (np.isnan(c) & np.isnan(t)) | (np.isinf(c) & (c == t))
    used = np.where(same, 0.0, np.where(np.isfinite(used) & np.isfinite(c) & np.isfinite(t), used, np.inf))
    finite = np.isfinite(c) & np.isfinite(t) & np.isfinite(a)
    c, t, a = (np.where(finite, x, 0.0) for x in (c, t, a))
    step = ulp(t, form)
    perfect = np.round(t / step) * step - t
    norm = np.linalg.norm
    hidden = float(norm(c - t) - norm(perfect) * (1 + 2.0**-40))
    tests = {"element": used, "row_rms": np.divide(hidden, 2 * norm(a)) if hidden > 0 else 0.0}
    if "sums" in r:
        tests["bias"] = max(_fair(r["sums"]), _fair(r["outward"])) / r["lambda"]
    return tests


def _fair(x: Any) -> float:
    return abs(float(x.sum())) / float(np.linalg.norm(x)) if (x != 0).sum() >= 2 else 0.0


def _blocks(x: Any, block: int) -> Any:
    """[n] -> [g, block], zeros at the end."""
    return np.pad(x, (0, -len(x) % block)).reshape(-1, block)


def own_scales(t: Any, r: dict[str, Any], largest: float) -> Any:
    """The smallest power of two at least amax · fl32(1/largest), as a byte."""
    amax = np.maximum(np.abs(_blocks(t.astype(np.float32), r["block"])).max(1), np.float32(r["floor"]))
    product = (amax * np.float32(1 / largest)).astype(np.float32)
    bits = product.view(np.int32)
    byte = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return np.where(np.isfinite(product), byte, 255).clip(0, 255)


def nearest(x: Any, magnitudes: Any) -> Any:
    """Code of the nearest magnitude, ties to the even code, the sign in the bit above."""
    size = np.minimum(np.abs(x), magnitudes[-1])
    high = np.searchsorted(magnitudes, size).clip(1, len(magnitudes) - 1)
    low_gap, high_gap = size - magnitudes[high - 1], magnitudes[high] - size
    up = (high_gap < low_gap) | ((high_gap == low_gap) & (high % 2 == 0))
    return np.where(up, high, high - 1) + np.where(np.signbit(x), len(magnitudes) + len(magnitudes) % 2, 0)


def codes(r: dict[str, Any]) -> dict[str, Any]:
    """Codes within A of their bins, under the candidate's own scales, and scales within A of their range."""
    grid, block = (E4M3 if r["grid"] == "e4m3" else E2M1), r["block"]
    largest, sign = grid[-1], 128 if r["grid"] == "e4m3" else 8
    stored, scales, t, a = r["c"].astype(np.int64), r["scales"].astype(np.int64), r["t"], r["A"]
    value, bound = np.abs(_blocks(t, block)), _blocks(a, block)
    amax, least, most = (np.maximum(x.max(1), r["floor"]) for x in (value, value - bound, value + bound))
    upper = largest * np.exp2(scales - 127.0)
    low, high = amax - upper, upper / 2 - amax
    slack = np.where(low > 0, amax - least, most - amax)
    outside = np.maximum(np.maximum(low, high) - 2.0**-23 * amax, 0)
    of_scale = np.where(slack > 0, outside / slack, np.inf)
    of_scale = np.where(scales == own_scales(t, r, largest), 0.0, np.where(scales == 255, np.inf, of_scale))
    size = np.repeat(np.exp2(scales - 127.0), block)[: len(t)]
    x, room, magnitude = t / size, a / size, stored % sign
    known = np.minimum(magnitude, len(grid) - 1)
    middle = (grid[1:] + grid[:-1]) / 2
    below, above = np.concatenate([[0.0], middle]), np.concatenate([middle, [np.inf]])
    signed = np.where(stored >= sign, -x, x)
    beyond = np.maximum(np.maximum(below[known] - signed, signed - above[known]), 0)
    of_code = np.where(beyond > 0, beyond / room, 0.0)
    own = nearest(x.astype(np.float32), grid)
    of_code = np.where((room == 0) & (stored != own), np.inf, of_code)
    of_code = np.where(magnitude >= len(grid), np.inf, of_code)
    return {"scale": np.repeat(of_scale, block)[: len(t)], "code": np.nan_to_num(of_code, nan=np.inf, posinf=np.inf)}


def picks(r: dict[str, Any]) -> dict[str, Any]:
    """A choice of the k largest of t[:visible]: each pick's gap to the best one left out, over the sum of their bounds."""
    c, t, a, visible = r["c"].astype(np.int64), r["t"], r["A"], r["visible"]
    count = min(visible, len(c), len(t))
    used = np.zeros(len(c))
    chosen = c[:count]
    left = np.setdiff1d(np.arange(visible), chosen)
    for k, pick in enumerate(c):
        if k >= count:
            used[k] = 0.0 if pick == -1 else np.inf
        elif not 0 <= pick < visible or (chosen == pick).sum() > 1:
            used[k] = np.inf
        elif len(left):
            gap = t[left] - t[pick]
            share = [g / b if b else np.inf for g, b in zip(gap, a[left] + a[pick], strict=True) if g > 0]
            used[k] = max(share, default=0.0)
    return {"gap": used}


def exact(r: dict[str, Any]) -> dict[str, Any]:
    """Bytes or numbers that must agree to the bit."""
    return {"bytes": np.where(r["c"] != r["t"], np.inf, 0.0)}


def twin(r: dict[str, Any]) -> tuple[Any, Any] | None:
    """Value and bound of the worst element (a product), or value of the row (a norm), from the operands; None without."""
    if "weight" in r:
        x, w = r["x"].astype(np.float64), r["weight"].astype(np.float64)
        return np.array([x @ w]), np.array([r["growth"] * (np.abs(x) @ np.abs(w))])
    if "eps" in r:
        x = r["x"].astype(np.float64)
        return x / np.sqrt((x * x).mean() + r["eps"]) * r["norm"], None
    return None


def check_twin(r: dict[str, Any]) -> str:
    """Whether the twin's numbers here follow from the operands, in words."""
    made = twin(r)
    if made is None:
        return "the twin's values are those of the run: this op's operands are not inlined"
    where = slice(r["channel"], r["channel"] + 1) if "weight" in r else slice(None)
    size = np.abs(r["x"]).astype(np.float64) @ np.abs(r["weight"]) if "weight" in r else np.abs(made[0])
    agree = np.all(np.abs(made[0] - r["t"][where]) <= 2.0**-40 * size)  # two orders of summation in float64
    if made[1] is not None:
        agree &= np.all(np.abs(made[1] - r["A"][where]) <= 2.0**-40 * r["A"][where])
    if not agree:
        raise SystemExit("the twin's values do not follow from the operands: this file is damaged")
    return "the twin was computed anew from the operands"


JUDGES = {"dense": dense, "codes": codes, "picks": picks, "exact": exact}


def verdict(r: dict[str, Any]) -> tuple[float, str]:
    """Budget used, and the test that used it."""
    with np.errstate(all="ignore"):  # what divides by a bound of 0 is infinite, and meant to be
        tests = {name: float(np.max(share, initial=0.0)) for name, share in JUDGES[r["kind"]](r).items()}
    name = max(tests, key=lambda n: tests[n])
    return tests[name], name


def unpack(text: str) -> dict[str, Any]:
    """Arrays from their bytes, other values as they are."""
    table = json.loads(base64.b64decode(text))

    def value(x: Any) -> Any:
        if not isinstance(x, dict):
            return x
        return np.frombuffer(zlib.decompress(base64.b64decode(x["zlib"])), x["dtype"]).reshape(x["shape"])

    return {name: value(x) for name, x in table.items()}


def main(text: str) -> int:
    """Print the verdict; 1 where it fails."""
    r = unpack(text)
    used, test = verdict(r)
    print(f"{'PASS' if used <= 1 else 'FAIL'} {r['op']}: output {r['output']}, budget used {used:.9g} ({test}), the gate is 1")
    print(f"  worst at {r['place']}")
    if "element" in r:
        at = r["element"]
        scale = f", scale byte {r['scales'][at // r['block']]}" if r["kind"] == "codes" else ""
        bound = f", bound {r['A'][at]:.3g}" if "A" in r else ""
        print(f"  candidate {r['c'][at]}{scale}, twin {r['t'][at]:.9g}{bound}")
    print(f"  bound: {r['bound']}")
    print(f"  {check_twin(r)}")
    return int(used > 1)


if __name__ == "__main__" and "DATA" in globals():
    sys.exit(main(globals()["DATA"]))
