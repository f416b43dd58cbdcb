"""numpy references, one function per device function, and the error bound of each.

The exchange and level 0 are exact: their references follow the contract's operation order in float32. The combine and attention
references are float64, with the error bounds of the design.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

_SMALLEST_NORMAL = 2.0**-126
# Unit roundoff of a rounding to the output type, relative (normal results) and absolute (subnormal ones).
_OUTPUT_ROUNDING = {"float32": (0.0, 0.0), "bfloat16": (2.0**-8, 2.0**-134), "float16": (2.0**-11, 2.0**-25)}


def _flush(x: F32) -> F32:
    """Subnormals to zero of the same sign: what .ftz does to inputs and results (PTX ISA, "Floating Point Instructions")."""
    tiny = np.abs(x) < np.float32(_SMALLEST_NORMAL)
    return np.where(tiny, np.copysign(np.float32(0), x), x).astype(np.float32)


def _max_ftz(a: F32, b: F32) -> F32:
    """max.ftz.f32: a NaN loses to a number, +0 is greater than -0 (PTX ISA "max")."""
    a, b = _flush(a), _flush(b)
    greater = np.where(a == b, np.where(np.signbit(a), b, a), np.maximum(a, b))
    return np.where(np.isnan(a), b, np.where(np.isnan(b), a, greater)).astype(np.float32)


def exchange4(partial: F32, op: Literal["max", "add"], *, m_pack: int, rows: int) -> F32:
    """Left fold over the parts of each warpgroup, in float32 with subnormals flushed.

    partial: [..., 128 * warpgroups] float32, element `g * rows + row` of a warpgroup is part g's value for that row.
    Returns the same shape: every part holds its row's result.
    """
    parts = partial.reshape(*partial.shape[:-1], -1, m_pack, rows)
    result = parts[..., 0, :]
    for g in range(1, m_pack):
        other = parts[..., g, :]
        with np.errstate(invalid="ignore", over="ignore"):
            result = _max_ftz(result, other) if op == "max" else _flush(_flush(result) + _flush(other))
    return np.repeat(result[..., None, :], m_pack, axis=-2).reshape(partial.shape)


def exchange4_loop(partial: F32, *, m_pack: int, rows: int) -> F32:
    """`max` over all rows but the last of partial [count, 256], then `add`: the attention kernel's own use of the exchange."""
    head = exchange4(partial[:-1], "max", m_pack=m_pack, rows=rows)
    return np.concatenate([head, exchange4(partial[-1:], "add", m_pack=m_pack, rows=rows)])


def level0(tmem_image: F32) -> F32:
    """Each lane's columns as they are: [128, columns] float32 to the same."""
    return tmem_image.copy()


def combine(
    tmem_image: F32,
    row_max: F32,
    row_sum: F32,
    scale_log2e: float,
    *,
    m_pack: int,
    rows: int,
    use_fma: bool,
    out_dtype: str,
) -> tuple[F64, F64, F64, F64]:
    """LSE merge of the m_pack key partitions of one tile, in float64.

    tmem_image: [128, depth] unnormalised O, lane = partition * rows + row; row_max, row_sum: [128].
    Returns out [rows, depth], the bound of its elements for `out_dtype`, and m, l [rows].
    Bound: sum_g (2^-20 + 2^-23 |x_g|) |scale_g O_g| / l, x_g = (m_g - m) * scale_log2e, plus what flushed scales and products lose, plus
    the rounding to the output type.
    """
    m_g = row_max.astype(np.float64).reshape(m_pack, rows)
    l_g = row_sum.astype(np.float64).reshape(m_pack, rows)
    o_g = tmem_image.astype(np.float64).reshape(m_pack, rows, -1)
    m = m_g.max(axis=0)
    x = (m_g - m) * (scale_log2e if use_fma else 1.0)
    scale = np.exp2(x)
    merged_l = (scale * l_g).sum(axis=0)
    weighted = np.abs(scale[..., None] * o_g)
    out = (scale[..., None] * o_g).sum(axis=0) / merged_l[:, None]
    finite_x = np.where(np.isfinite(x), np.abs(x), 0.0)
    relative = 2.0**-20 + 2.0**-23 * finite_x
    bound = (relative[..., None] * weighted).sum(axis=0) / merged_l[:, None]
    # A scale under 2^-126 is flushed and all it carried is lost; a product or a sum under it loses at most 2^-126.
    bound += (np.where(scale[..., None] < _SMALLEST_NORMAL, weighted, _SMALLEST_NORMAL * (o_g != 0))).sum(axis=0) / merged_l[:, None]
    relative_rounding, absolute_rounding = _OUTPUT_ROUNDING[out_dtype]
    bound += relative_rounding * np.abs(out) + absolute_rounding
    return out, bound, m, merged_l


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, scale: float, causal: bool) -> tuple[F64, F64]:
    """Softmax attention in float64.

    q: [batch, q_len, q_heads, d]; k, v: [batch, keys, kv_heads, d], any float dtype; q_heads is a multiple of kv_heads.
    causal: query i sees keys <= keys - q_len + i. A row that sees no key gives 0 and LSE = -inf.
    Returns out [batch, q_len, q_heads, d] and LSE [batch, q_heads, q_len] (natural logarithm).
    """
    batch, q_len, q_heads, d = q.shape
    keys, kv_heads = k.shape[1:3]
    group = q_heads // kv_heads
    out = np.empty((batch, q_len, q_heads, d), np.float64)
    lse = np.empty((batch, q_heads, q_len), np.float64)
    visible = np.ones((q_len, keys), bool)
    if causal:
        visible = np.arange(keys)[None, :] <= np.arange(q_len)[:, None] + keys - q_len
    for b in range(batch):
        for head in range(q_heads):
            kv = head // group
            scores = (q[b, :, head].astype(np.float64) @ k[b, :, kv].astype(np.float64).T) * scale
            scores = np.where(visible, scores, -np.inf)
            row_max = scores.max(axis=1, keepdims=True)
            p = np.exp(scores - np.where(np.isfinite(row_max), row_max, 0.0))
            row_sum = p.sum(axis=1, keepdims=True)
            seen = row_sum[:, 0] > 0
            out[b, :, head] = np.where(seen[:, None], (p @ v[b, :, kv].astype(np.float64)) / np.where(row_sum > 0, row_sum, 1.0), 0.0)
            with np.errstate(divide="ignore"):
                lse[b, head] = np.where(seen, row_max[:, 0] + np.log(row_sum[:, 0]), -np.inf)
    return out, lse
