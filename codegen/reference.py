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


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    key_lengths: np.ndarray | None = None,
    block_table: np.ndarray | None = None,
    page_places: np.ndarray | None = None,
    query_starts: np.ndarray | None = None,
    k_scale: np.ndarray | None = None,
    v_scale: np.ndarray | None = None,
) -> tuple[F64, F64]:
    """Softmax attention in float64.

    q: [batch, q_len, q_heads, d]; k, v: [batch, keys, kv_heads, d], any float dtype; q_heads is a multiple of kv_heads.
    causal: query i sees keys <= keys - q_len + i. A row that sees no key gives 0 and LSE = -inf.
    window: with causal, the keys that a query sees at most, its own position the last. softcap: s = softcap * tanh(scale q.k / softcap).
    sinks: [q_heads], a logit of each head that takes part in the softmax, and in the LSE, without a value.
    key_lengths: [batch], the keys of each sequence. block_table: [batch, table_pages]; k, v are then [pages, page, kv_heads, d].
    page_places: as block_table, ascending: the place in its sequence of each listed page; key_lengths still counts the whole sequence.
    A listed page that begins at or past the sequence's end ends the list.
    query_starts: [batch + 1]; q is then [total_q, q_heads, d]. k_scale, v_scale: factors of K and V, [kv_heads], or [pages, kv_heads] with
    block_table.
    Returns out, of q's shape, and LSE [batch, q_heads, q_len] (natural logarithm), with query_starts [q_heads, total_q].
    """
    q_heads = q.shape[-2]
    kv_heads = k.shape[2]
    group = q_heads // kv_heads
    ragged = query_starts is not None
    batch = len(query_starts) - 1 if query_starts is not None else q.shape[0]
    out = np.zeros(q.shape, np.float64)
    lse = np.full((q_heads, q.shape[0]) if ragged else (batch, q_heads, q.shape[1]), -np.inf)
    for b in range(batch):
        rows = slice(int(query_starts[b]), int(query_starts[b + 1])) if query_starts is not None else slice(None)
        own_q, own_out = (q[rows], out[rows]) if ragged else (q[b], out[b])
        own_lse = lse[:, rows] if ragged else lse[b]
        own_k, own_v, places, keys, pages = _keys_of(b, k, v, key_lengths, block_table, page_places)
        if not len(own_q):
            continue
        positions = np.arange(len(own_q))[:, None] + keys - len(own_q)
        visible = np.ones((len(own_q), len(places)), bool)
        if causal:
            visible = places[None, :] <= positions
        if window is not None:
            visible &= places[None, :] > positions - window
        for head in range(q_heads):
            kv = head // group
            k_factor, v_factor = (_factor(factors, kv, pages) for factors in (k_scale, v_scale))
            scores = (own_q[:, head].astype(np.float64) @ own_k[:, kv].astype(np.float64).T) * (scale * k_factor)
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            scores = np.where(visible, scores, -np.inf)
            sink = -np.inf if sinks is None else float(sinks[head])
            row_max = scores.max(axis=1, keepdims=True, initial=sink)
            zero = np.where(np.isfinite(row_max), row_max, 0.0)
            p = np.exp(scores - zero)
            row_sum = p.sum(axis=1, keepdims=True) + np.exp(sink - zero)
            seen = row_sum[:, 0] > 0
            # What a masked key holds is no part of the result, even where it is not a number.
            values = np.where(np.asarray(visible.any(axis=0))[:, None], own_v[:, kv].astype(np.float64), 0.0)
            values *= np.reshape(v_factor, (-1, 1))
            own_out[:, head] = np.where(seen[:, None], (p @ values) / np.where(row_sum > 0, row_sum, 1.0), 0.0)
            with np.errstate(divide="ignore"):
                own_lse[head] = np.where(seen, zero[:, 0] + np.log(row_sum[:, 0]), -np.inf)
    return out, lse


def _factor(factors: np.ndarray | None, kv_head: int, pages: np.ndarray) -> F64:
    """A factor for each key, or one for all."""
    if factors is None:
        return np.ones(1)
    return np.asarray(factors[pages, kv_head] if factors.ndim == 2 else factors[kv_head : kv_head + 1], np.float64)


def _keys_of(
    b: int,
    k: np.ndarray,
    v: np.ndarray,
    key_lengths: np.ndarray | None,
    block_table: np.ndarray | None,
    page_places: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int, np.ndarray]:
    """K and V of a sequence, [keys, kv_heads, d], the place of each key in the sequence, the sequence's length, the page of each key."""
    if block_table is None:
        keys = k.shape[1] if key_lengths is None else int(key_lengths[b])
        return k[b, :keys], v[b, :keys], np.arange(keys), keys, np.full(keys, b)
    page = k.shape[1]
    keys = block_table.shape[1] * page if key_lengths is None else int(key_lengths[b])
    listed = np.arange(block_table.shape[1]) if page_places is None else page_places[b].astype(np.int64)
    starts = np.asarray(listed * page)
    live = np.flatnonzero(starts < keys)
    pages = block_table[b][live]
    places = (starts[live][:, None] + np.arange(page)).reshape(-1)
    inside = places < keys
    own_k, own_v = (array[pages].reshape(-1, *array.shape[2:])[inside] for array in (k, v))
    return own_k, own_v, places[inside], keys, np.repeat(pages, page)[inside]
