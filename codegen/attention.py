"""Launching the full attention kernel: tensor maps, arguments and grid for arrays on the host, and what the manifest says of the entry."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from .backends import Launch
from .config import Config
from .emulator import TensorMap, Uninitialized
from .geometry import Geometry, symbol
from .geometry_sm90 import SWIZZLE_BYTES, Sm90Geometry

H200_SMS = 132
_DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}


@dataclass(frozen=True)
class Tiling:
    """How q_len positions of `group` query heads fold into tiles of tile_rows query rows of one KV head.

    heads, positions: of a tile; row r is position r // heads, head r % heads. A group larger than a tile takes tiles_per_position of them.
    q_tiles: tiles of one KV head.
    """

    heads: int
    positions: int
    tiles_per_position: int
    q_tiles: int


def tiling(tile_rows: int, q_len: int, group: int) -> Tiling:
    """The tiling that the kernel derives from its arguments; the boxes of the tensor maps have to agree with it."""
    heads = min(group, tile_rows)
    positions = tile_rows // heads
    tiles_per_position = -(-group // tile_rows)
    return Tiling(heads, positions, tiles_per_position, -(-q_len // positions) * tiles_per_position)


def attention_entry_info(config: Config, geo: Geometry) -> dict[str, Any]:
    """Name, block, grid rule, dynamic shared memory in bytes, and the arguments in order (name, C type, meaning) of the full kernel."""
    geo = _sm90(geo)
    out_type = config.out_dtype
    swizzle = f"{SWIZZLE_BYTES}-byte swizzle, zero fill"
    query = f"[batch][kv_heads][q_len][group][{geo.depth}], box 1 x 1 x positions x heads x"
    key = f"[batch][kv_heads][{geo.depth // 64}][keys][64], box 1 x 1 x {geo.slot_chunks} x {geo.block_keys} x 64"
    arguments = [
        ("q_map", "CUtensorMap", f"Q {config.dtype} {query} 64, {swizzle}"),
        ("k_map", "CUtensorMap", f"K {config.dtype} {key}, {swizzle}"),
        ("v_map", "CUtensorMap", "V, as k_map"),
        ("out_map", "CUtensorMap", f"O {out_type} {query} {geo.out_chunk_cols}, {swizzle}"),
        ("lse", "float*", "[batch][kv_heads * group][q_len] float32, natural logarithm"),
        ("batch", "unsigned", "sequences"),
        ("q_len", "unsigned", "query positions of each sequence"),
        ("keys", "unsigned", "keys of each sequence"),
        ("kv_heads", "unsigned", "KV heads"),
        ("group", "unsigned", f"query heads per KV head{f' (fixed: {config.group})' if config.group else ''}"),
        ("scale", "float", "softmax scale"),
    ]
    return {
        "name": symbol(config, geo.arch),
        "block": [geo.threads, 1, 1],
        "grid": [
            f"at most batch * kv_heads * ceil(q_len / positions) * ceil(group / {geo.tile_rows}) CTAs, "
            f"heads = min(group, {geo.tile_rows}), positions = {geo.tile_rows} / heads",
            1,
            1,
        ],
        "smem_bytes": geo.smem_bytes,
        "arguments": [{"name": name, "type": kind, "meaning": meaning} for name, kind, meaning in arguments],
    }


def attention_launch(
    config: Config,
    geo: Geometry,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    *,
    scale: float | None = None,
    ctas: int = H200_SMS,
) -> Launch:
    """The launch that fills `out` and `lse`.

    q: [batch, q_len, q_heads, depth]; k, v: [batch, keys, kv_heads, depth], all in the config's dtype and C-contiguous; q_heads is a
    multiple of kv_heads. out: as q, in out_dtype; lse: [batch, q_heads, q_len] float32, natural logarithm.
    scale: softmax scale, default 1 / sqrt(depth). ctas: most CTAs of the grid; each takes several tiles where there are more.
    Raises ValueError where an array does not fit.
    """
    geo = _sm90(geo)
    dtype, out_dtype = _DTYPES[config.dtype], _DTYPES[config.out_dtype]
    for name, array, rank, kind in (("q", q, 4, dtype), ("k", k, 4, dtype), ("v", v, 4, dtype), ("out", out, 4, out_dtype)):
        if array.ndim != rank or array.dtype != kind or not array.flags.c_contiguous or 0 in array.shape:
            raise ValueError(f"{name} is {array.dtype} {array.shape}; expected a contiguous, non-empty {kind} array of rank {rank}")
    batch, q_len, q_heads, depth = q.shape
    keys, kv_heads = k.shape[1:3]
    if depth != geo.depth or k.shape != (batch, keys, kv_heads, depth) or v.shape != k.shape or q_heads % kv_heads or out.shape != q.shape:
        raise ValueError(f"q {q.shape}, k {k.shape}, v {v.shape}, out {out.shape} do not fit depth {geo.depth} or each other")
    if lse.shape != (batch, q_heads, q_len) or lse.dtype != np.float32 or not lse.flags.c_contiguous:
        raise ValueError(f"lse is {lse.dtype} {lse.shape}; expected contiguous float32 {(batch, q_heads, q_len)}")
    group = q_heads // kv_heads
    if config.group not in (None, group):
        raise ValueError(f"the config fixes group {config.group}; q and k have {group}")
    scale = 1.0 / math.sqrt(depth) if scale is None else scale
    if not math.isfinite(scale):
        raise ValueError(f"scale {scale} is not finite")

    tiles = tiling(geo.tile_rows, q_len, group)
    items = batch * kv_heads * tiles.q_tiles
    args = (
        _query_map(q, kv_heads, tiles, SWIZZLE_BYTES // q.itemsize),
        _key_map(geo, k),
        _key_map(geo, v),
        _query_map(out, kv_heads, tiles, geo.out_chunk_cols),
        Uninitialized(lse),
        *(np.uint32(n) for n in (batch, q_len, keys, kv_heads, group)),
        np.float32(scale),
    )
    return Launch(symbol(config, geo.arch), (min(items, ctas), 1, 1), (geo.threads, 1, 1), geo.smem_bytes, args)


def _sm90(geo: Geometry) -> Sm90Geometry:
    if not isinstance(geo, Sm90Geometry):
        raise ValueError(f"there is no full kernel for {geo.arch} yet")
    return geo


def _query_map(array: np.ndarray, kv_heads: int, tiles: Tiling, columns: int) -> TensorMap:
    """Q or O [batch, q_len, q_heads, depth] as [batch][kv_heads][q_len][group][depth]."""
    batch, q_len, q_heads, depth = array.shape
    group = q_heads // kv_heads
    per_batch, per_position, per_head, _ = array.strides
    return TensorMap(
        array,
        box=(1, 1, tiles.positions, tiles.heads, columns),
        shape=(batch, kv_heads, q_len, group, depth),
        strides=(per_batch, group * per_head, per_position, per_head),
        swizzle=SWIZZLE_BYTES,
    )


def _key_map(geo: Sm90Geometry, array: np.ndarray) -> TensorMap:
    """K or V [batch, keys, kv_heads, depth] as [batch][kv_heads][depth / 64][keys][64]: one copy brings several swizzled chunks."""
    batch, keys, kv_heads, depth = array.shape
    columns = SWIZZLE_BYTES // array.itemsize
    per_batch, per_key, per_head, per_column = array.strides
    return TensorMap(
        array,
        box=(1, 1, geo.slot_chunks, geo.block_keys, columns),
        shape=(batch, kv_heads, depth // columns, keys, columns),
        strides=(per_batch, per_head, columns * per_column, per_key),
        swizzle=SWIZZLE_BYTES,
    )
